"""Looking into a real lab: what its devices hold, and where the first NaN comes from."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import pathways_lab as pw
from pathways_lab.core.errors import Failure

pytestmark = pytest.mark.cluster

X = np.arange(8, 0, -1, dtype=np.float32)


@pytest.fixture(scope="module")
def lab() -> Iterator[pw.Lab]:
    with pw.start(islands=2, hosts_per_island=2, devices_per_host=1, progress=False) as lab:
        yield lab


def failure(handle: Any) -> Failure:
    with pytest.raises(pw.PathwaysError) as caught:
        handle.result(timeout=60)
    return caught.value.failure


def test_every_value_is_told_with_its_variable_and_what_keeps_it(
    lab: pw.Lab, tmp_path: Path
) -> None:
    s = lab.slice(2, island="island0")
    x = pw.device_put(np.ones(1000, np.float32), s)  # upload
    params = {"w": pw.jit(lambda a: 2 * a, on=s, name="double")(x)}
    params["w"].result(timeout=60)
    lab.publish("weights", params["w"])
    memory = lab.memory()
    found = {value.name: value for value in memory.values}
    upload, made = found["x"], found["params['w']"]
    assert "# upload" in upload.line.text
    assert upload.why == ("a handle is held",)
    assert made.why == ("a handle is held", "published as 'weights'")
    assert "2 * a" in made.line.text
    assert made.devices == dict.fromkeys((("island0/host0", 0), ("island0/host1", 0)), 4000)
    assert (made.nbytes, made.state, made.owner) == (8000, "on devices", lab.name)
    assert memory.total == sum(memory.owners.values()) == 16_000
    # A guest sees names of its own.
    path = tmp_path / "lab.json"
    lab.invite(path)
    with pw.connect(path, name="bob") as guest:
        mine = pw.device_put(np.ones(10, np.float32), guest.slice(1))
        theirs = guest.memory()
        assert [value.name for value in theirs.values] == ["mine"]
        assert theirs.owners == {lab.name: 16_000, "bob": 40}
        assert {value.owner for value in lab.memory().values} == {lab.name, "bob"}
        del mine
    lab.unpublish("weights")


def test_the_first_nan_is_said_and_all_that_depends_on_it_fails_of_it(lab: pw.Lab) -> None:
    left, right = lab.slice(2, island="island0"), lab.slice(2, island="island1")
    cut = {"in_shardings": P("x"), "out_shardings": P("x")}
    double = pw.jit(lambda x: 2 * x, on=left, name="double", **cut)
    log = pw.jit(lambda x: jnp.log(x - 5), on=left, name="log", **cut)
    mean = pw.jit(jnp.mean, on=right, name="mean")

    @pw.program
    def step(x: Any) -> Any:
        y = double(x)
        z = log(y)  # here
        return y, mean(z)

    assert np.isnan(step(X)[1].result(timeout=60)), "off, it is a value like another"
    with lab.check_nans():
        good, bad = step(X)
        later = mean(bad)
        np.testing.assert_array_equal(good.result(timeout=60), 2 * X)
        for handle in (bad, later):
            why = failure(handle)
            assert why.message == (
                "log has made a NaN: element [6] of its result 0 (float32[8]),"
                " in the shard of device 1 of its slice"
            )
            assert (why.program, why.node) == ("step", "log")
            assert (why.host, why.device) == (left.binding.devices[1][0], "0")
            assert why.line.text.endswith("# here")
    assert np.isnan(step(X)[1].result(timeout=60)), "off again"


def test_what_is_called_while_it_is_on_is_tested_also_when_it_runs_later(lab: pw.Lab) -> None:
    s = lab.slice(2, island="island0")
    half = pw.jit(lambda x: x / 2, on=s, donate_argnums=0, name="half")
    with lab.check_nans(infs=True):
        kept = [half(np.array([1.0, value], np.float32)) for value in (1.0, np.inf)]
        first = half(pw.device_put(np.full(2, np.nan, np.float32), s))
        try:
            why = failure(half(first))
        except pw.PathwaysError as error:  # it was known already when the second was called
            why = error.failure
    np.testing.assert_array_equal(kept[0].result(timeout=60), [0.5, 0.5])
    assert "was given an infinity: element [1] of its argument 0 'x'" in failure(kept[1]).message
    assert why.message.startswith("half was given a NaN: element [0]")


def test_gangs_that_follow_each_other_closely_are_tested_one_by_one(lab: pw.Lab) -> None:
    s = lab.slice(1)
    add = pw.jit(lambda x: x + 1, on=s, name="add")
    root = pw.jit(jnp.sqrt, on=s, name="root")

    @pw.program
    def chain(x: Any) -> Any:
        return add(root(add(add(x))))

    with lab.check_nans():
        assert chain(np.float32(2)).result(timeout=60) == 3
        why = failure(chain(np.float32(-6)))
    assert why.message.startswith("root has made a NaN: element [] of its result 0")
