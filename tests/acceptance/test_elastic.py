"""Devices that are lost, lent, taken away on the real lab: the same slices, programs and bits."""

from __future__ import annotations

import itertools
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import distributed
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import pathways_lab as pw
from pathways_lab.client.lab import queue_display
from pathways_lab.timeline.records import Event, Span
from tests.runtime.processes import until

pytestmark = pytest.mark.cluster

SECONDS = 60.0
V = np.arange(8, dtype=np.float32)


@pytest.fixture(scope="module")
def lab() -> Iterator[pw.Lab]:
    with pw.start(islands=2, hosts_per_island=2, devices_per_host=1) as started:
        yield started


def mixed(on: pw.Slice) -> Any:
    """A program with a collective: every element becomes the product with the sum of all."""

    def body(block: jax.Array) -> Any:
        return jnp.sin(block) * jax.lax.psum(block.sum(), "x")

    whole = jax.shard_map(body, mesh=on.mesh, in_specs=P("x"), out_specs=P("x"))
    f = pw.jit(whole, on=on, in_shardings=P("x"), out_shardings=P("x"))

    @pw.program
    def twice(v: Any) -> Any:
        return f(f(v))

    return twice


class Work:
    """What a lab has done since then."""

    def __init__(self, lab: pw.Lab) -> None:
        self._lab, self._before, self._since = lab, lab.stats(), lab.timeline.clock()

    def since(self) -> tuple[int, ...]:
        """What was captured, lowered and exported; programs and code that were sent; what was
        compiled: news of that come later than results, so it counts when it began."""
        before, after = self._before, self._lab.stats()
        made = [getattr(after, n) - getattr(before, n) for n in ("captured", "lowered", "exported")]
        sent = [after.sent.get(op, 0) - before.sent.get(op, 0) for op in ("program", "function")]
        spans = [r for r in self._lab.timeline.records if isinstance(r, Span)]
        compiled = [s for s in spans if s.kind == "compile" and s.start > self._since]
        return (*made, *sent, len(compiled))


NOTHING = (0, 0, 0, 0, 0, 0)


def hosts(lab: pw.Lab) -> dict[str, int]:
    return {host.name: host.pid for island in lab.islands for host in island.hosts}


def ended(lab: pw.Lab, how: str) -> set[int]:
    """Runs of which this was told."""
    return {r.run for r in lab.timeline.records if isinstance(r, Event) and r.kind == how}


def left(lab: pw.Lab) -> list[str]:
    """Why hosts have left on purpose."""
    kinds = [r for r in lab.timeline.records if isinstance(r, Event) and r.kind == "hosts-left"]
    return [str(r.args["reason"]) for r in kinds]


def test_a_client_steps_aside_and_comes_back_elsewhere_without_its_help(
    lab: pw.Lab, tmp_path: Path
) -> None:
    # Hosts that compute together keep what they have compiled as long as any slice needs them.
    others = [lab.slice(2, "x", island=f"island{i}") for i in range(2)]
    lab.invite(tmp_path / "lab")
    with pw.connect(tmp_path / "lab", name="guest") as guest:
        on = guest.slice(2, "x", island="island0")
        twice, there = mixed(on), mixed(guest.slice(2, "x", island="island1"))
        right = twice(V).result(timeout=SECONDS)
        there(V).result(timeout=SECONDS)
        kept = pw.device_put(V, on.sharding(P("x")))
        np.testing.assert_array_equal(twice(kept).result(timeout=SECONDS), right)
        before = Work(guest)
        for island in (None, "island1", "island0"):
            taken = lab.suspend("guest")
            assert "of guest (2 devices on island" in repr(taken)
            until(lambda: on.state == "suspended", SECONDS)
            waiting = twice(kept)
            late = pw.device_put(V + 1, on.sharding(P("x")))
            np.testing.assert_array_equal(kept.result(timeout=SECONDS), V)
            asked = waiting.copy_to_host_async() or waiting
            assert not waiting.is_ready()
            lab.resume("guest", island=island)
            np.testing.assert_array_equal(asked.result(timeout=SECONDS), right)
            np.testing.assert_array_equal(late.result(timeout=SECONDS), V + 1)
            np.testing.assert_array_equal(twice(kept).result(timeout=SECONDS), right)
            assert on.island == (island or "island0")
            assert on.binding.generation == {None: 0, "island1": 1, "island0": 2}[island]
        assert before.since() == NOTHING

        def suspended() -> int:
            events = [r for r in lab.timeline.records if isinstance(r, Event)]
            return [event.kind for event in events].count("slice-suspended")

        until(lambda: suspended() >= 6)  # records come some moments later
        assert suspended() == 6
        with pytest.raises(pw.PathwaysError, match="no client 'nobody'"):
            lab.suspend("nobody")
    for other in others:
        other.release()


def loss(w: Any, batch: Any) -> jax.Array:
    x, y = batch
    error = jnp.tanh(x @ w["in"]) @ w["out"] - y
    return (error * error).mean()


def gradients(w: Any, part: Any) -> Any:
    value, gradient = jax.value_and_grad(loss)(w, part)
    return gradient, value


def sgd(w: Any, gradient: Any) -> Any:
    return jax.tree.map(lambda a, g: a - 0.1 * g, w, gradient)


def test_training_goes_on_with_fewer_islands_and_grows_back(lab: pw.Lab) -> None:
    """All hosts of an island are killed; the losses are those of a run without, bit for bit."""
    chance = np.random.default_rng(0)

    def random(*shape: int) -> Any:
        return chance.normal(size=shape).astype(np.float32)

    weights = {"in": random(4, 8), "out": random(8, 1)}
    data = [(random(8, 4), random(8, 1)) for _ in range(4)]
    loop = lab.elastic(gradients, weights, itertools.cycle(data), update=sgd, every=3)
    seen: dict[int, float] = {}
    alone = last = 0
    deadline = time.monotonic() + 2 * SECONDS
    for step, _, value in loop:
        assert step == len(seen), "every step once, in order"
        seen[step] = float(value)
        if step == 10:
            assert loop.members == ["island0", "island1"]
            for name, pid in hosts(lab).items():
                if name.startswith("island0/"):
                    os.kill(pid, signal.SIGKILL)
        elif len(loop.members) == 1:
            alone += 1
            time.sleep(0.1)
        elif step > 10 and alone:
            last = last or step + 10
            if step == last:
                break
        assert time.monotonic() < deadline, repr(loop)
    assert alone >= 1
    told = [text for _, text in loop.story]
    assert "island0 was lost" in told[0]
    assert "island0 joined" in told[-1]
    plain = lab.elastic(gradients, weights, itertools.cycle(data), update=sgd)
    assert [float(s.out) for s in itertools.islice(plain, len(seen))] == list(seen.values())


def test_training_takes_what_a_quota_leaves_it_and_more_when_it_may(
    lab: pw.Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queue_display, "stay", lambda *_: pytest.fail("it waits in line"))
    weights = {"in": np.ones((4, 8), np.float32), "out": np.ones((8, 1), np.float32)}
    data = [(np.ones((8, 4), np.float32), np.ones((8, 1), np.float32))] * 12
    lab.quota(lab.name, devices=2)
    loop = lab.elastic(gradients, weights, data, update=sgd, devices=2)
    members = []
    for step, _, _ in loop:
        members.append(list(loop.members))
        if step == 3:
            lab.quota(lab.name)
    assert members[3] == ["island0"]
    assert members[-1] == ["island0", "island1"]
    assert len(members) == len(data)
    lab.quota(lab.name, devices=0)
    with pytest.raises(pw.PathwaysError, match="a lease or a quota keeps them"):
        next(iter(loop))
    lab.quota(lab.name)


def test_islands_and_workers_leave_and_join_and_a_lost_slice_works_on(lab: pw.Lab) -> None:
    on, other = (lab.slice(2, "x", island=f"island{i}") for i in range(2))
    twice, beside = mixed(on), mixed(other)
    right = twice(V).result(timeout=SECONDS)
    np.testing.assert_array_equal(beside(V).result(timeout=SECONDS), right)
    kept = pw.device_put(V, on.sharding(P("x")))
    with pytest.raises(pw.PathwaysError, match=r"slice s\d+ of kernel-1 \(2 devices on island0"):
        lab.remove_island("island0")
    with pytest.raises(pw.PathwaysError, match="there is no 'island7'; there is island0, island1"):
        lab.remove_island("island7")
    assert "on island0" in repr(lab.remove_island("island0", anyway=True))
    assert [island.name for island in lab.islands] == ["island1"]
    assert on.state == "lost"
    with pytest.raises(pw.PathwaysError, match="took island0 away"):
        kept.result(timeout=SECONDS)
    with pytest.raises(pw.PathwaysError, match="took island0 away"):
        twice(V).result(timeout=SECONDS)
    before = Work(lab)
    assert on.rebind().island == "island1"
    np.testing.assert_array_equal(twice(V).result(timeout=SECONDS), right)
    assert before.since() == NOTHING, "island1 has compiled this before"
    with pytest.raises(pw.PathwaysError, match=rf"slice {on.name}: it is bound, and only lost"):
        on.rebind()
    made = lab.add_island(hosts=2, devices_per_host=1)
    assert made.name == "island0"
    again = lab.slice(2, "x", island="island0")
    np.testing.assert_array_equal(mixed(again)(V).result(timeout=SECONDS), right)
    slow = pw.jit(lambda v: pw.emulated(1000)(v), on=again)
    slow(V).block_until_ready()
    with lab.dask_client() as dask, ThreadPoolExecutor(1) as waits:
        workers = dask.scheduler_info(n_workers=-1)["workers"]
        (address,) = [a for a, info in workers.items() if info["name"] == "island0/host1"]
        handle = slow(V)
        run = handle.buffer.run
        until(lambda: run in ended(lab, "granted"), SECONDS)
        waiting = waits.submit(handle.result, SECONDS)
        until(lambda: handle._fetch is not None, SECONDS)
        dask.retire_workers([address])
    np.testing.assert_array_equal(waiting.result(), V)
    until(lambda: "island0/host1" not in hosts(lab), SECONDS)
    assert "island0/host0" in hosts(lab)
    until(lambda: any("Dask removed" in reason for reason in left(lab)), SECONDS)
    until(lambda: run in ended(lab, "finished") | ended(lab, "failed"), SECONDS)
    assert run in ended(lab, "finished"), "what was admitted has ended first"
    with pytest.raises(pw.PathwaysError, match="Dask removed"):
        mixed(again)(V).result(timeout=SECONDS)


def test_a_cluster_scaled_down_hands_over_what_somebody_waits_for() -> None:
    """Dask tells the last worker to end, and forgets it, while its gang runs."""
    with (
        distributed.LocalCluster(
            n_workers=2, threads_per_worker=1, security=True, protocol="tls",
            host="127.0.0.1", dashboard_address=None,
        ) as cluster,
        pw.connect(cluster, islands="worker", devices_per_host=1) as lab,
    ):  # fmt: skip
        stays, goes = (lab.slice(1, island=island.name) for island in lab.islands)

        def large(v: Any) -> Any:
            """So many bytes that a process that ended at once would not have sent them."""
            return jnp.broadcast_to(pw.emulated(1000)(v), (1 << 21, 8))

        works = {on: pw.jit(large, on=on) for on in (stays, goes)}
        for work in works.values():
            work(V).block_until_ready()
        asked, unasked = works[goes](V), works[stays](V)
        with ThreadPoolExecutor(1) as waits:
            waiting = waits.submit(asked.result, SECONDS)
            until(lambda: asked._fetch is not None, SECONDS)
            cluster.scale(1)
            np.testing.assert_array_equal(waiting.result()[-1], V)
        until(lambda: len(lab.islands) == 1, SECONDS)
        np.testing.assert_array_equal(unasked.result(timeout=SECONDS)[-1], V)
        with pytest.raises(pw.PathwaysError, match="Dask removed"):
            works[goes](V).result(timeout=SECONDS)
