"""Slices that span islands: a mesh over both, gangs with one order on both, and lost hosts."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import pathways_lab as pw
from tests.acceptance.collective import pids
from tests.runtime.processes import stop

pytestmark = pytest.mark.cluster

SECONDS = 60.0
BOTH = P(("island", "x"))


def over(lab: pw.Lab, *names: str) -> pw.Slice:
    """Two devices of each island.  names: of the islands, in this order."""
    return lab.slice((2, 2), ("island", "x"), islands=names or 2)


def scaled(on: pw.Slice, axes: tuple[str, ...], by: float) -> Any:
    """Every element becomes a multiple of a sum over mesh axes."""

    def body(block: jax.Array) -> Any:
        return block * 0 + by * jax.lax.psum(block.sum(), axes)

    mapped = jax.shard_map(body, mesh=on.mesh, in_specs=BOTH, out_specs=BOTH)
    return pw.jit(mapped, on=on, in_shardings=BOTH, out_shardings=BOTH)


V = np.arange(8, dtype=np.float32)


def test_one_mesh_lies_on_two_islands(lab: pw.Lab) -> None:
    """Its first axis, and a computation of JAX's partitioner."""
    with over(lab) as on:
        assert on.islands == ("island0", "island1")
        assert on.hosts == ("island0/host0",) * 2 + ("island1/host0",) * 2
        assert repr(on).endswith("on island0 and island1>")
        w = np.arange(12, dtype=np.float32).reshape(3, 4)
        product = pw.jit(
            lambda v, w: jnp.tanh(v) @ w, on=on,
            in_shardings=(P("island", None), P(None, "x")), out_shardings=P(),
        )  # fmt: skip
        v = np.arange(12, dtype=np.float32).reshape(4, 3)
        np.testing.assert_allclose(product(v, w).result(timeout=SECONDS), np.tanh(v) @ w, rtol=1e-5)
    with over(lab, "island1", "island0") as on:
        assert on.islands == ("island1", "island0")
        total = scaled(on, ("island", "x"), 1.0)(V)
        np.testing.assert_array_equal(total.result(timeout=SECONDS), np.full_like(V, V.sum()))


def test_arrays_go_from_islands_to_a_slice_over_them_and_back(lab: pw.Lab) -> None:
    with over(lab) as wide, lab.slice(2, "x", island="island1") as narrow:
        total = scaled(wide, ("island",), 1.0)
        double = pw.jit(lambda v: v * 2, on=narrow, in_shardings=P("x"), out_shardings=P("x"))

        @pw.program
        def there_and_back(v: Any) -> Any:
            return double(total(double(v)))

        halves = (2 * V).reshape(2, 2, 2).sum(axis=(0, 2))
        expected = 2 * np.broadcast_to(halves[None, :, None], (2, 2, 2)).reshape(8)
        np.testing.assert_array_equal(there_and_back(V).result(timeout=SECONDS), expected)


def test_two_clients_compete_over_both_islands_and_each(lab: pw.Lab) -> None:
    """In orders of their own; ``python -m tests.acceptance.competing`` takes longer."""
    assert lab.embedded is not None
    right: list[int] = []

    def work(name: str, order: tuple[str, ...]) -> None:
        assert lab.embedded is not None
        with pw.Lab(lab.embedded.control, name=name) as mine:
            slices = {axes: over(mine) for axes in ("island x", "island")}
            slices["x"] = mine.slice((1, 2), ("island", "x"), island="island1")
            calls = {axes: scaled(slices[axes], tuple(axes.split()), 1.0) for axes in order}
            alone = {axes: pw.program(calls[axes]) for axes in order}
            found = [(axes, n, alone[axes](V + n)) for n in range(20) for axes in order]
            for axes, n, handle in found:
                blocks = (V + n).reshape(2 if axes != "x" else 1, 2, -1)
                over_all = tuple({"island": 0, "x": 1}[a] for a in axes.split())
                sums = blocks.sum(axis=2).sum(axis=over_all, keepdims=True)
                expected = np.broadcast_to(sums[..., None], blocks.shape).reshape(8)
                np.testing.assert_array_equal(handle.result(timeout=SECONDS), expected)
            right.append(len(found))

    orders = (("island x", "island", "x"), ("x", "island", "island x"))
    threads = [threading.Thread(target=work, args=(f"c{n}", o)) for n, o in enumerate(orders)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert right == [60, 60]


def sent(lab: pw.Lab) -> int:
    """Bytes of this client that came to other islands."""
    return lab.accounts().clients[lab.name].dcn_bytes


def test_collectives_between_islands_take_as_long_as_the_emulated_dcn(lab: pw.Lab) -> None:
    """Those inside of an island, of the same slice, take no longer than ever."""
    with over(lab) as on:
        far, near = (pw.program(scaled(on, (axis,), 1.0)) for axis in ("island", "x"))
        for call, more in ((near, 0), (far, 2 * 2 * 4)):
            before = sent(lab)
            call(V).result(timeout=SECONDS)
            assert sent(lab) == before + more, "two sums over both islands bring each host a number"
        try:
            lab.dcn(latency=0.2)
            took = []
            for call in (near, far):
                begun = time.monotonic()
                call(V).result(timeout=SECONDS)
                took.append(time.monotonic() - begun)
        finally:
            lab.dcn()
        assert took[1] >= 0.2
        assert took[0] < took[1]
        begun = time.monotonic()
        far(V).result(timeout=SECONDS)
        assert time.monotonic() - begun < took[1]


@pytest.fixture
def own_lab() -> Iterator[pw.Lab]:
    with pw.start(islands=2, hosts_per_island=2, devices_per_host=1) as started:
        yield started


def test_a_host_of_one_island_is_lost_in_the_middle_of_a_gang(own_lab: pw.Lab) -> None:
    """The gang fails with that reason, and slices of either island go on at once."""
    lab = own_lab
    on = over(lab)
    total = scaled(on, ("island", "x"), 1.0)
    np.testing.assert_array_equal(total(V).result(timeout=SECONDS), np.full_like(V, V.sum()))
    near = lab.slice(1, "x", island="island0")
    far = lab.slice_at([("island1/host0", 0)], axes="x")
    doubles = [pw.jit(lambda v: v * 2, on=each) for each in (near, far)]
    for double in doubles:
        double(V).result(timeout=SECONDS)
    victim = pids(lab)["island1/host1"]
    # Stopped first, so that the collective waits for it on the other hosts.
    stop(victim)
    waiting = [total(V) for _ in range(3)]
    time.sleep(0.3)
    assert not waiting[0].is_ready()
    os.kill(victim, signal.SIGKILL)
    for handle in waiting:
        with pytest.raises(pw.PathwaysError, match="host island1/host1 was lost"):
            handle.result(timeout=SECONDS)
    for double in doubles:
        np.testing.assert_array_equal(double(V).result(timeout=SECONDS), V * 2)
    on.rebind()
    assert on.islands == ("island0", "island1")
    np.testing.assert_array_equal(total(V).result(timeout=SECONDS), np.full_like(V, V.sum()))
