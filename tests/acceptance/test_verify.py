"""Law: a device that computes wrong is named, and no other; whoever looks leaves nothing behind."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import pathways_lab as pw
from pathways_lab.client.lab.devices import Slice
from pathways_lab.client.session.handles import Handle
from pathways_lab.client.verify import step_check
from pathways_lab.client.verify.device_check import Verification
from tests.runtime.processes import until

pytestmark = pytest.mark.cluster

X = np.arange(64, dtype=np.float32).reshape(8, 8)


@pytest.fixture(scope="module")
def lab() -> Iterator[pw.Lab]:
    with pw.start(islands=2, hosts_per_island=2, devices_per_host=2, progress=False) as started:
        yield started


@pytest.fixture(autouse=True)
def nothing_is_left(lab: pw.Lab) -> Iterator[None]:
    before = list(lab.slices)
    yield
    assert lab.slices == before


@contextlib.contextmanager
def flipping(lab: pw.Lab, *bad: tuple[str, int]) -> Iterator[None]:
    """These compute wrong meanwhile."""

    def flip(lasts: float) -> None:
        for host, device in bad:
            lab.chaos._act(host, {"do": "flip", "rule": {"device": device, "lasts": lasts}})

    lab.chaos._dask()
    flip(600.0)
    try:
        yield
    finally:
        flip(0.0)


def named(found: Verification) -> list[tuple[str, int]]:
    return [(device.host, device.number) for device in found.suspects]


# --- scan -----------------------------------------------------------------------------------------


def test_all_agree(lab: pw.Lab) -> None:
    found = lab.verify(rounds=2)
    assert (found.ok, found.suspects) == (True, ())
    assert repr(found).startswith("8 devices have computed the same in 2 rounds, to the bit")
    assert [check.what for check in found.checks] == [
        host.name for island in lab.islands for host in island.hosts
    ]


def test_a_flip_comes_out_as_it_was_said(lab: pw.Lab) -> None:
    with lab.slice(2, island="island1") as on:
        host, number = on.binding.devices[1]
        f = pw.jit(lambda x: x + 1, on=on, out_shardings=P("x"))
        np.testing.assert_array_equal(f(X).result(timeout=60), X + 1)
        with lab.chaos.flip(host, number, seconds=600.0) as fault:
            spoilt = f(X).result(timeout=60)
            fault.end()
            assert (spoilt != X + 1).sum() == 1
            assert (spoilt[4:] != X[4:] + 1).any(), "of the second device"
        assert fault.ok, repr(fault)
        assert f"wrong results on device {number} of {host}: most" in repr(fault)
        # A call may still reach the host before the news that the fault is over.
        until(lambda: np.array_equal(f(X).result(timeout=60), X + 1))


def test_several_are_named_and_half_of_them_are_not(lab: pw.Lab) -> None:
    bad = [("island0/host0", 1), ("island1/host1", 0), ("island1/host1", 1)]
    with flipping(lab, *bad):
        found = lab.verify(rounds=1)
    assert named(found) == bad
    assert "device 1: otherwise in 1 of 1 rounds, in products" in found._repr_html_()
    with flipping(lab, *bad, ("island0/host0", 0)):
        found = lab.verify(rounds=1)
    assert (found.ok, found.suspects) == (False, ())
    assert "no result is that of most of them" in repr(found)


def test_clients_who_own_nothing_may_look_too(lab: pw.Lab, tmp_path: Path) -> None:
    lab.invite(tmp_path / "lab")
    with pw.connect(tmp_path / "lab", name="guest") as guest:
        with guest.slice_at(guest.devices()[:2]) as on:
            assert on.binding.devices == (("island0/host0", 0), ("island0/host0", 1))
        assert guest.verify(rounds=1).ok
        assert guest.slices == []
        guest_step = pw.jit(lambda x: x + 1, on=guest.slice(1))
        with pytest.raises(pw.PathwaysError, match="another lab"):
            lab.verify(guest_step, X)
    for wrong in ([("island0/host0", "0")], [(0, 0)], []):
        with pytest.raises(pw.PathwaysError, match="remedy"):
            lab.slice_at(wrong)  # type: ignore[arg-type]


def test_who_interrupts_it_leaves_nothing_behind(
    lab: pw.Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Handle, "result", interrupted)
        with pytest.raises(KeyboardInterrupt):
            lab.verify()


@pytest.mark.parametrize("host", ["island0", "island0/host0"])
def test_a_device_that_is_not_there_is_refused(lab: pw.Lab, host: str) -> None:
    with pytest.raises(pw.PathwaysError, match="remedy"):
        lab.chaos.flip(host, 2)


# --- replay ---------------------------------------------------------------------------------------


@pytest.fixture
def across(lab: pw.Lab) -> Iterator[Slice]:
    """A device of each host of an island."""
    with lab.slice_at([("island0/host0", 1), ("island0/host1", 0)]) as on:
        yield on


def mixing(on: Slice) -> Callable[[Any, Any], Any]:
    """All that each device makes comes to all, by a collective; results of many types."""

    def part(x: Any) -> Any:
        return x + 1e-3 * jax.lax.psum(jnp.sin(x).sum(), "x")

    mixed = jax.shard_map(part, mesh=on.mesh, in_specs=P("x"), out_specs=P("x"))

    def step(w: Any, x: Any) -> Any:
        y = mixed(x) @ w
        return {"loss": y.sum(), "y": y, "low": y.astype(jnp.bfloat16), "sign": y > 0}

    return step


def test_a_step_is_the_same_everywhere_and_changes_nothing(lab: pw.Lab, across: Slice) -> None:
    w, x = pw.device_put(X, across), pw.device_put(X, across.sharding(P("x")))
    step = pw.jit(mixing(across), on=across)
    before = step(w, x)["y"].result(timeout=60)
    found = lab.verify(step, w, x)
    assert (found.ok, found.suspects) == (True, ()), repr(found)
    assert "'step' made the same on 2 sets of devices, to the bit" in repr(found)
    assert found.checks[0].what == "device 1 of island0/host0 and device 0 of island0/host1"
    np.testing.assert_array_equal(step(w, x)["y"].result(timeout=60), before)


@pytest.mark.parametrize(
    "bad", [("island0/host1", 0), ("island0/host0", 0), ("island1/host0", 0)],
    ids=["its own", "one that it is compared with", "another"],
)  # fmt: skip
def test_who_spoils_a_step_is_named_and_no_other(
    lab: pw.Lab, across: Slice, bad: tuple[str, int]
) -> None:
    w, x = pw.device_put(X, across), pw.device_put(X, across.sharding(P("x")))
    step = pw.jit(mixing(across), on=across)
    with flipping(lab, bad):
        found = lab.verify(step, w, x)
    if bad[0] == "island1/host0":
        assert found.ok, repr(found)
    else:
        assert named(found) == [bad], repr(found)
        assert f"wrong results on device {bad[1]} of {bad[0]}: that alone" in found.story


def test_what_no_set_tells_is_left_open(lab: pw.Lab) -> None:
    with lab.slice_at([("island0/host0", 0), ("island0/host0", 1)]) as on:
        x = pw.device_put(X, on.sharding(P("x")))
        step = pw.jit(mixing(on), on=on)
        with flipping(lab, ("island0/host0", 1)):
            found = lab.verify(step, X, x)
        assert named(found) == [("island0/host0", 0), ("island0/host0", 1)]
        assert "no set tells which" in repr(found)
        assert "otherwise, in what is on device 1 of island0/host0" in repr(found)
        assert not found.ok


def test_keys_and_small_types_count(lab: pw.Lab) -> None:
    with lab.slice_at([("island0/host0", 0)]) as on:

        def step(key: Any) -> Any:
            few = jax.random.randint(key, (8,), -8, 8)
            return jax.random.split(key, 3), few.astype(jnp.int4), few.astype(jnp.float8_e5m2)

        with flipping(lab, ("island0/host0", 0)):
            found = lab.verify(step, pw.device_put(jax.random.key(3), on))
        assert named(found) == [("island0/host0", 0)]


def test_what_differs_on_the_same_devices_accuses_nobody(
    lab: pw.Lab, across: Slice, monkeypatch: pytest.MonkeyPatch
) -> None:
    compute, ran = step_check._Computing.__call__, []

    def other(self: Any, on: Slice) -> Any:
        ran.append(on)
        with flipping(lab, ("island0/host1", 0)) if len(ran) == 2 else contextlib.nullcontext():
            return compute(self, on)

    monkeypatch.setattr(step_check._Computing, "__call__", other)
    found = lab.verify(pw.jit(mixing(across), on=across), X, X)
    assert (found.ok, found.suspects, len(ran)) == (False, (), 2)
    assert "'step' is not deterministic: on the same devices" in repr(found)
    assert "is on device 0 of island0/host1" in repr(found), "and of no other: it spoils results"


REFUSED: dict[str, tuple[Callable[[pw.Lab, Slice], Any], str]] = {
    "donation": (
        lambda lab, on: lab.verify(pw.jit(lambda x: x + 1, on=on, donate_argnums=0), X),
        "donates x",
    ),
    "callbacks": (
        lambda lab, on: lab.verify(
            pw.jit(lambda x: jax.pure_callback(np.sin, x, x), on=on), X
        ),
        "calls back into Python",
    ),
    "no results": (lambda lab, on: lab.verify(pw.jit(lambda x: None, on=on), X), "has no results"),
    "a program": (lambda lab, on: lab.verify(pw.program(lambda x: x), X), "is a program"),
    "no place": (lambda lab, on: lab.verify(lambda x: x + 1, X), "on which slice"),
    "in a program": (
        lambda lab, on: pw.program(lambda x: lab.verify())(pw.device_put(X, on)),
        "not a part of a program",
    ),
    "no rounds": (lambda lab, on: lab.verify(rounds=0), "rounds=0"),
}  # fmt: skip


@pytest.mark.parametrize(("use", "words"), REFUSED.values(), ids=REFUSED)
def test_refused(lab: pw.Lab, across: Slice, use: Any, words: str) -> None:
    with pytest.raises(pw.PathwaysError, match=words) as caught:
        use(lab, across)
    assert caught.value.failure.remedy
    assert caught.value.failure.line.file == __file__


def test_nobody_to_compare_with(
    lab: pw.Lab, across: Slice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_check, "_islands_like", lambda *_: [[("island0/host0", 2)]])
    with pytest.raises(pw.PathwaysError, match="nobody to compare with"):
        lab.verify(pw.jit(lambda x: x + 1, on=across), X)
