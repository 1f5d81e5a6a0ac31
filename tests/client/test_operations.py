"""Operations of a gang: those of its function, on its devices, and nothing is left behind."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import pathways_lab as pw
from pathways_lab.client.program.operations import brief, told
from pathways_lab.core.errors import PathwaysError
from pathways_lab.runtime import operations
from pathways_lab.runtime.operations import BYTES, Row, packed, reports, summed

HOSTS = (("a", 0), ("a", 1), ("b", 0), ("b", 1))


@dataclass
class Named:
    """A part of a profile, as JAX reads it."""

    name: str
    lines: list[Any] = field(default_factory=list)
    events: list[Any] = field(default_factory=list)
    stats: list[Any] = field(default_factory=list)
    duration_ns: float = 0.0


def event(operation: str, module: str, ns: float, device: int | None = None) -> Named:
    stats = [("hlo_op", operation), ("hlo_module", module)]
    stats += [] if device is None else [("device_ordinal", device)]
    return Named(operation, stats=stats, duration_ns=ns)


def profile(**planes: list[Named]) -> Any:
    made = [
        Named(name.replace("_", ":"), lines=[Named("", events=e)]) for name, e in planes.items()
    ]
    return type("Profile", (), {"planes": made})


def test_operations_are_summed_up_where_they_ran() -> None:
    python = Named("wrapper", duration_ns=5e9)
    found = summed(profile(**{
        "/host_CPU": [
            python, event("dot", "jit_f", 2e6, 2049), event("dot", "jit_f", 3e6, 2049),
            event("dot", "jit_f", 1e6, 2048), event("add", "jit_g", 9e6, 2048),
        ],
        "/device_GPU_3": [event("dot", "jit_f", 7e6)],
    }))  # fmt: skip
    assert found == [
        Row("jit_g", "add", 0, 1, 0.009), Row("jit_f", "dot", 3, 1, 0.007),
        Row("jit_f", "dot", 1, 2, 0.005), Row("jit_f", "dot", 0, 1, 0.001),
    ]  # fmt: skip


def test_a_report_has_the_longest_that_there_is_room_for() -> None:
    rows = [Row("jit_f", f"dot.{n}" * 20, 0, 1, 1.0 / (n + 1)) for n in range(5000)]
    none = np.zeros(BYTES, np.uint8)
    found = reports(np.concatenate([none, packed(rows), packed([], "it is so"), none]))
    assert list(found) == [1, 2]
    assert found[1][0] == rows[: len(found[1][0])]
    assert len(found[1][0]) > 100
    assert found[2] == ([], "it is so")


def test_means_over_devices_and_the_slowest_of_them() -> None:
    a = [Row("jit_my_f", "dot", 0, 2, 1.0), Row("jit_my_f", "dot", 1, 2, 2.0),
         Row("jit_g", "add", 0, 1, 50.0), Row("jit_my_f", "add", 7, 1, 50.0)]  # fmt: skip
    b = [Row("jit_my_f", "dot", 0, 2, 6.0), Row("jit_my_f", "add", 1, 1, 1.0)]
    found = told("my f", "s1", HOSTS, {0: (a, ""), 2: (b, "")})
    assert [(o.name, o.times, o.seconds, o.share, o.slowest) for o in found] == [
        ("dot", 2, 3.0, 0.75, (("b", 0), 6.0)), ("add", 1, 1.0, 0.25, (("b", 1), 1.0)),
    ]  # fmt: skip
    assert repr(found).splitlines()[:3] == [
        "my f on s1: 2 operations; means over 4 devices",
        "operation  times        ms  share  slowest device",
        "dot            2  3000.000   75 %  b · 0, 6000.000 ms",
    ]
    assert ">add</td>" in found._repr_html_()
    assert brief(found) == "dot 75 %, add 25 %; dot longest on b · 0"


def test_what_could_not_be_seen_is_an_error() -> None:
    with pytest.raises(PathwaysError, match="could not be seen on b: the profiler did not start"):
        told("f", "s1", HOSTS, {0: ([], ""), 2: ([], "the profiler did not start: why")})
    with pytest.raises(PathwaysError, match="XLA told of no operation of 'f'"):
        told("f", "s1", HOSTS, {0: ([Row("jit_g", "add", 0, 1, 1.0)], "")})


@pytest.fixture(scope="module")
def lab() -> Iterator[pw.Lab]:
    with pw.start(islands=1, hosts_per_island=2, devices_per_host=2) as lab:
        yield lab


@pytest.mark.cluster
def test_the_operations_of_a_gang_on_hosts_that_compute_together(lab: pw.Lab) -> None:
    s = lab.slice(4, "x")

    def forward(w: Any, a: Any) -> Any:
        return jnp.sort(jnp.tanh(a @ w), axis=1).sum(axis=0)

    f = pw.jit(forward, on=s, in_shardings=(None, P("x")))
    w, a = np.ones((64, 64), np.float32), np.ones((256, 64), np.float32)
    for _ in range(2):
        found = lab.operations(f, w, a)
        assert {"all-reduce"} <= {each.name.split(".")[0] for each in found}
        assert all(each.seconds > 0 and each.times >= 1 for each in found)
        assert sum(each.share for each in found) == pytest.approx(1.0)
        assert {each.slowest[0] for each in found} <= set(s.binding.devices)
        assert not any("callback" in each.name for each in found), "only its own"
    assert lab.timeline.operations == {"forward": brief(found)}


def test_a_new_profile_ends_an_older_one_and_nothing_is_left(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The run of the older one was cancelled, say."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    one, other, double = np.int32(1), np.int32(2), jax.jit(lambda x: jnp.sin(x @ x))
    x = jnp.ones((64, 64))
    double(x).block_until_ready()
    operations._begin(one)
    operations._begin(other)
    operations._begin(other)  # the second device of this host
    assert len(list(tmp_path.iterdir())) == 1
    double(x).block_until_ready()
    late = reports(operations._end(one, one))
    assert late == {0: ([], "another profile began on this host meanwhile")}
    ((rows, wrong),) = reports(operations._end(other, other)).values()
    assert not wrong
    assert {row.module for row in rows} >= {"jit__lambda"}
    assert reports(operations._end(other, other)) == {}, "the first device of a host reports"
    assert not list(tmp_path.iterdir())


def test_a_host_that_is_profiled_already_says_so(tmp_path: Path) -> None:
    mark = np.int32(3)
    with jax.profiler.trace(str(tmp_path)):
        operations._begin(mark)
        ((rows, wrong),) = reports(operations._end(mark, mark)).values()
    assert not rows
    assert wrong.startswith("the profiler did not start: ")


@pytest.mark.cluster
def test_a_gang_that_fails_ends_the_profile(lab: pw.Lab) -> None:
    one = lab.slice(1, "x")

    def wrong(x: Any) -> Any:
        raise ValueError("this one")

    def calls(x: Any) -> Any:
        return jax.pure_callback(wrong, jax.ShapeDtypeStruct((), jnp.float32), x)

    with pytest.raises(PathwaysError, match="this one"):
        lab.operations(pw.jit(calls, on=one), np.float32(1))
    assert len(lab.operations(pw.jit(lambda x: jnp.sin(x @ x), on=one), np.ones((64, 64))))


@pytest.mark.cluster
def test_what_has_no_gang_of_its_own_or_loses_its_inputs_is_refused(lab: pw.Lab) -> None:
    one = lab.slice(1, "x")
    f = pw.jit(lambda x: x + 1, on=one, donate_argnums=0)
    x = pw.device_put(np.ones(4, np.float32), one)
    with pytest.raises(PathwaysError, match="donates x, which would be gone"):
        lab.operations(f, x)
    with pytest.raises(PathwaysError, match="is a program, and operations are those of one gang"):
        lab.operations(pw.program(lambda: f(x)))
    with pytest.raises(PathwaysError, match="not a part of a program"):
        pw.program(lambda: lab.operations(f, x))()
    x.block_until_ready()
