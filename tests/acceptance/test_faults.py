"""Faults on the real lab: what they touch fails with the reason, and nothing else notices."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import pathways_lab as pw
from pathways_lab.timeline.records import Event
from tests.acceptance.collective import SECONDS, V, pids, right, total
from tests.acceptance.crashes import crash, leave, segfault
from tests.acceptance.reading import gangs
from tests.runtime.processes import until

pytestmark = pytest.mark.cluster


@pytest.fixture(scope="module")
def lab() -> Iterator[pw.Lab]:
    with pw.start(islands=2, hosts_per_island=2, devices_per_host=2) as started:
        yield started


def whole(lab: pw.Lab, island: str) -> pw.Slice:
    """All four devices of an island of two hosts."""
    on = lab.slice((4,), axes=("x",), island=island)
    assert len(set(on.hosts)) == 2
    return on


def events(lab: pw.Lab, kind: str) -> list[Event]:
    return [r for r in lab.timeline.records if isinstance(r, Event) and r.kind == kind]


def granted(lab: pw.Lab) -> set[int]:
    """Runs of which a part has its place."""
    return {event.run for event in events(lab, "granted")}


def test_a_collective_behind_nine_seconds_of_earlier_work_of_one_host(lab: pw.Lab) -> None:
    """Skew is legal: nobody is killed, results are right."""
    before = pids(lab)
    on = whole(lab, "island0")
    parts = [lab.slice((2,), axes=("x",), island="island0") for _ in range(2)]
    busy = next(p for p in parts if set(p.hosts) == {"island0/host1"})
    work = pw.jit(
        lambda v: pw.emulated(9000)(v), on=busy, in_shardings=P("x"), out_shardings=P("x")
    )
    f = total(on)
    right(f(V))
    worked = work(V)
    # Not before: its function is compiled first, and nobody waits for that.
    until(lambda: worked.buffer.run in granted(lab))
    results = [f(V + n) for n in range(5)]
    assert not results[0].is_ready()
    for n, result in enumerate(results):
        right(result, V + n)
    np.testing.assert_array_equal(worked.result(timeout=SECONDS), V)
    assert pids(lab) == before
    for part in (on, *parts):
        part.release()
    spans = gangs(lab)
    # Not the longest: the other host may have waited in the collective for as long.
    (long,) = (s for s in spans if s.run == worked.buffer.run)
    assert long.host == "island0/host1"
    assert long.end - long.start > 8.5
    entered = [s for s in spans if s.host == "island0/host0" and s.start < long.end - 5 < s.end]
    assert entered, "the other host has entered the collective and waited in it"


def test_an_input_that_fails_on_one_host_only(lab: pw.Lab) -> None:
    """The collective behind it is entered by both hosts; its run fails and no other."""
    on = whole(lab, "island0")
    f = total(on)

    def picky(values: np.ndarray[Any, Any], where: np.ndarray[Any, Any]) -> Any:
        if int(where) == 3 and float(values[0]) < 0:
            raise ValueError("no negative numbers on the last device")
        return np.asarray(values)

    def body(block: jax.Array) -> Any:
        kind = jax.ShapeDtypeStruct(block.shape, block.dtype)
        return jax.pure_callback(picky, kind, block, jax.lax.axis_index("x"))

    check = pw.jit(
        jax.shard_map(body, mesh=on.mesh, in_specs=P("x"), out_specs=P("x"), check_vma=False),
        on=on,
        in_shardings=P("x"),
        out_shardings=P("x"),
    )

    @pw.program
    def checked(v: Any) -> Any:
        return f(check(v))

    bad_ones = [3, 5]
    handles = [checked(V - 100 if n in bad_ones else V + n) for n in range(8)]
    for n, handle in enumerate(handles):
        if n in bad_ones:
            with pytest.raises(pw.PathwaysError, match="no negative numbers") as caught:
                handle.result(timeout=SECONDS)
            assert caught.value.failure.host == "island0/host1"
        else:
            right(handle, V + n)
    right(f(V))
    on.release()


class Load(threading.Thread):
    """Somebody who computes on a slice, run after run, a few at once."""

    def __init__(self, lab: pw.Lab, island: str, name: str) -> None:
        super().__init__(name=f"{name} on {island}", daemon=True)
        self.f = total(whole(lab, island))
        self.island = island
        self.ends: list[float] = []
        self.failures: list[pw.PathwaysError] = []
        self.stop = threading.Event()

    def run(self) -> None:
        flying: list[tuple[int, Any]] = []
        for n in range(1_000_000):
            if self.stop.is_set() and not flying:
                return
            try:
                if not self.stop.is_set():
                    flying.append((n, self.f(V + n)))
                if len(flying) == 4 or self.stop.is_set():
                    number, handle = flying.pop(0)
                    right(handle, V + number)
                    self.ends.append(time.monotonic())
            except pw.PathwaysError as error:
                self.failures.append(error)
                if len(self.failures) == 6:
                    return


def test_a_host_is_killed_under_load(lab: pw.Lab, tmp_path: Path) -> None:
    """Two clients on both islands; one host of one island dies."""
    lab.invite(tmp_path / "lab")
    with pw.connect(tmp_path / "lab") as guest:
        loads = [
            Load(who, island, name)
            for name, who in (("owner", lab), ("guest", guest))
            for island in ("island0", "island1")
        ]
        for load in loads:
            load.start()
        until(lambda: min(len(load.ends) for load in loads) >= 10)
        before = pids(lab)
        killed = time.monotonic()
        os.kill(before["island0/host1"], signal.SIGKILL)
        here = [load for load in loads if load.island == "island0"]
        there = [load for load in loads if load.island == "island1"]
        for load in here:
            load.join(SECONDS)
            assert len(load.failures) == 6, f"{load.name} did not hear of the loss"
            for error in load.failures:
                assert "island0/host1" in str(error), error
        until(lambda: pids(lab).get("island0/host1") not in (before["island0/host1"], None))
        back = time.monotonic()
        seen = [len(load.ends) for load in there]
        until(lambda: all(len(load.ends) > n for load, n in zip(there, seen, strict=True)))
        for load in there:
            load.stop.set()
        for load in there:
            load.join(SECONDS)
            assert not load.failures
            assert any(killed < t < back for t in load.ends), "it waited for the lost host"
        after = pids(lab)
        assert {n for n in before if before[n] != after[n]} == {"island0/host1"}
        for who in (lab, guest):
            right(total(whole(who, "island0"))(V))


def test_collectives_that_break_cost_their_slice_and_nothing_else(lab: pw.Lab) -> None:
    """All hosts live; the handles say why, and a new slice on the same devices works."""
    before = pids(lab)
    on, other = whole(lab, "island0"), whole(lab, "island1")
    f, beside = total(on), total(other)
    kept = f(V)
    right(kept)
    right(beside(V))
    local = lab.slice((2,), axes=("x",), island="island0")

    def cut(values: Any) -> Any:
        """In a device process: what a broken network would do."""
        import gc

        from pathways_lab.runtime.islands.group_member import Joint

        for joint in [found for found in gc.get_objects() if isinstance(found, Joint)]:
            joint.sever()
        return values

    def body(v: jax.Array) -> Any:
        return jax.pure_callback(cut, jax.ShapeDtypeStruct(v.shape, v.dtype), v)

    sever = pw.jit(body, on=local, in_shardings=P(), out_shardings=P())
    sever(V).result(timeout=SECONDS)
    with pytest.raises(pw.PathwaysError, match="connections between its hosts broke"):
        f(V).result(timeout=SECONDS)
    with pytest.raises(pw.PathwaysError, match="connections between its hosts broke"):
        (kept + 1).result(timeout=SECONDS)
    assert pids(lab) == before
    right(total(whole(lab, "island0"))(V + 1), V + 1)
    right(beside(V + 2), V + 2)
    until(lambda: events(lab, "slices-lost"))
    assert [on.id in event.args["slices"] for event in events(lab, "slices-lost")] == [True]


def test_functions_that_crash_their_host_cost_their_own_client_and_it_reads_why(
    lab: pw.Lab,
) -> None:
    """A short form of ``python -m tests.acceptance.crashes``; the other island goes on."""
    mine, other = (lab.slice(1, island=f"island{i}") for i in range(2))
    double = pw.jit(lambda x: x * 2, on=other)
    kept = double(np.float32(3))
    before, crashed, going = pids(lab), set[str](), []
    for way in (segfault, leave):
        going += [double(np.float32(n)) for n in range(50)]
        crashed.update(mine.hosts)
        crash(lab, mine, way)
    assert [float(each) for each in going] == [2.0 * n for n in range(50)] * 2
    assert float(kept) == 6.0

    def words() -> list[str]:
        downs = events(lab, "host-down")
        return [r.args["words"] for r in downs if "in node 'crashing'" in r.args["text"]]

    until(lambda: len(words()) == 2)
    assert "Segmentation fault" in words()[0]
    until(lambda: not lab.stuck())
    changed = {host for host, pid in pids(lab).items() if pid != before[host]}
    assert changed == crashed
    for part in (mine, other):
        part.release()


def test_a_function_whose_compilation_ends_the_host_costs_one_crash(lab: pw.Lab) -> None:
    on = lab.slice(1, island="island1")

    class Ends:
        """A callback that ends the host when it arrives there."""

        def __reduce__(self) -> Any:
            return ctypes.string_at, (0,)

        def __call__(self, x: Any) -> Any:
            return x

    @pw.jit(on=on)
    def bad(x: Any) -> Any:
        return jax.pure_callback(Ends(), jax.ShapeDtypeStruct((), "float32"), x)

    with pytest.raises(
        pw.PathwaysError, match=r"signal 11 .* while it compiled 'bad', at .*faults"
    ):
        bad(np.float32(1)).result(timeout=SECONDS)
    on.rebind()
    before = pids(lab)
    with pytest.raises(pw.PathwaysError, match=r"bad is not compiled again") as refused:
        bad(np.float32(1)).result(timeout=SECONDS)
    assert refused.value.failure.line.file == __file__
    assert float(pw.jit(lambda x: x + 1, on=on)(np.float32(1))) == 2.0
    until(lambda: not lab.stuck())
    assert before.items() <= pids(lab).items()
    on.release()
