"""Faults on purpose, on real processes: each comes out as it was said beforehand."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import psutil
import pytest

import pathways_lab as pw
from pathways_lab.client.chaos import chaos, fault_report
from pathways_lab.client.chaos.fault_report import Expected, Fault
from pathways_lab.client.lab import queue_display
from pathways_lab.core.errors import PathwaysError
from tests.acceptance.storm import storm
from tests.runtime.processes import until

pytestmark = pytest.mark.cluster

V = np.arange(8, dtype=np.float32)


@pytest.fixture(scope="module")
def lab() -> Iterator[pw.Lab]:
    with pw.start(islands=2, hosts_per_island=2, devices_per_host=1, progress=False) as started:
        yield started


def as_expected(made: Fault) -> Fault:
    assert made.report().ok, repr(made)
    return made


def pid(lab: pw.Lab, host: str) -> int | None:
    return {h.name: h.pid for island in lab.islands for h in island.hosts}.get(host)


def ended(pid: int) -> bool:
    """Whether a process is over, also if nobody has asked for its exit code yet."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_a_small_storm(lab: pw.Lab) -> None:
    """What spares everybody: any value that fails, or comes wrong, or never, is one too many."""
    outcome = storm(lab, 1, 1, 2, ("partition",))
    assert outcome.broken == [], str(outcome)
    assert outcome.results > 10


class Clock:
    """Moves only when somebody sleeps."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def test_a_fault_lasts_from_when_it_is_there(lab: pw.Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy worker takes seconds to begin it, which are no part of what was asked for."""
    clock, ended = Clock(), []
    monkeypatch.setattr(fault_report, "time", clock)
    slow = Fault(
        lab, "slowly begun", Expected("nothing happens", spares=True),
        lambda: clock.sleep(3.0), 5.0, lambda: ended.append(clock.now),
    )  # fmt: skip
    assert as_expected(slow).lasts == 5.0
    assert ended == [1008.0]


def test_what_did_not_strike_is_called_off(lab: pw.Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """One message on each of four links: what some have not seen is no part of what comes next."""
    said: list[tuple[str, str]] = []
    monkeypatch.setattr(chaos, "_TOLD", 0.0)
    monkeypatch.setattr(
        lab.chaos, "_trouble", lambda name, rule: said.append((name, rule.get("kind", "heal")))
    )
    as_expected(lab.chaos.duplicate("island0", "island1"))
    ends = [f"island{i}/host{h}" for i in range(2) for h in range(2)]
    assert sorted(said[:2]) == [(name, "duplicate") for name in ends[2:]]
    assert sorted(said[2:]) == [(name, "heal") for name in ends]


def test_a_crowded_host_gets_a_slice_of_its_own(lab: pw.Lab) -> None:
    """Its memory can be filled although clients have more slices on it than on its neighbour."""
    slices = [lab.slice(1, island="island1") for _ in range(12)]
    for on in slices:
        if on.hosts != ("island1/host0",):
            on.release()
    alone = lab.slice_at([("island1/host0", 0)])
    assert set(alone.hosts) == {"island1/host0"}
    for on in [*slices, alone]:
        on.release()


def test_who_looks_does_not_wait_in_line(lab: pw.Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a quota keeps from a fault is refused; what the fault has got by then is given back."""
    monkeypatch.setattr(queue_display, "stay", lambda *_: pytest.fail("it waits in line"))

    def nothing(*dies: str) -> Fault:
        return Fault(
            lab, "nothing", Expected("nothing happens", dies=frozenset(dies)), lambda: None
        )

    with lab.slice(2, island="island1") as held:
        for left, look in (
            (1, lambda: nothing()._compute("island0")),
            (1, lambda: nothing()._transfer("island0", "island1")),
            (2, lambda: nothing("elsewhere/host0")),
            (0, lambda: lab.chaos.fill_memory("island0/host0")),
        ):
            lab.quota(lab.name, devices=2 + left)
            with pytest.raises(pw.PathwaysError, match="the quota of"):
                look()
            assert lab.slices == [held]
    lab.quota(lab.name)


def test_a_host_is_killed_and_the_report_says_so(
    lab: pw.Lab, capsys: pytest.CaptureFixture[str]
) -> None:
    with lab.chaos.kill("island0/host1") as fault:
        assert "expected: within a second the control plane names" in capsys.readouterr().out
        assert "fault.report() waits" in repr(fault)
    assert fault.ok, repr(fault)
    assert fault.detected is not None
    assert fault.recovered is not None
    assert fault.detected < fault.recovered
    assert "values on island1 are still there" in fault._repr_html_()


def test_what_never_ends_fails_and_then_frees_its_host_as_told(lab: pw.Lab) -> None:
    before = {name: pid(lab, name) for name in ("island1/host0", "island1/host1")}
    on = lab.slice(1, island="island1")
    (host,) = on.hosts
    f = pw.jit(lambda x: x + 1, on=on)
    for_ever = pw.jit(pw.emulated(300_000), on=on, name="for_ever")
    np.testing.assert_array_equal(f(V).result(timeout=60), V + 1)
    try:
        assert lab.on_stuck("fail", after=3).owner == lab.name
        stuck = for_ever(V)
        until(lambda: bool(lab.stuck(0.5)), 60)  # its code is compiled first
        behind = f(V)
        with pytest.raises(pw.PathwaysError, match="everybody has waited") as caught:
            stuck.result(timeout=60)
        failure = caught.value.failure
        assert failure.kind == "stuck"
        assert failure.line.text.startswith("stuck = for_ever(")
        assert f"'for_ever' has not ended on {host}" in failure.message
        assert failure.story is not None
        assert not behind.is_ready(), "the device is still busy"
        lab.on_stuck("restart", after=3)
        with pytest.raises(pw.PathwaysError, match=host):
            behind.result(timeout=60)
        until(lambda: pid(lab, host) not in (None, before[host]), 60)
        other = next(name for name in before if name != host)
        assert pid(lab, other) == before[other]
        again = pw.jit(lambda x: x + 1, on=lab.slice(1, island="island1"))
        np.testing.assert_array_equal(again(V).result(timeout=60), V + 1)
    finally:
        lab.on_stuck("report")


def test_the_line_of_the_user_at_which_a_host_stands_is_seen(lab: pw.Lab, tmp_path: Path) -> None:
    def wait_for_data(value: Any) -> Any:
        while not (tmp_path / "data").exists():
            time.sleep(0.02)
        return value

    def step(x: Any) -> Any:
        return jax.pure_callback(wait_for_data, jax.ShapeDtypeStruct((), jnp.float32), x)

    on = lab.slice(1)
    host = on.binding.devices[0][0]
    found = pw.jit(step, on=on)(jnp.float32(1))
    try:
        until(lambda: [line.function for line in lab.stacks(host).lines] == ["wait_for_data"], 60)
        with pytest.raises(PathwaysError, match="the lab has no host or island 'island7'"):
            lab.stacks("island7")
    finally:
        (tmp_path / "data").touch()
    assert found.item() == 1


def test_a_host_that_hears_nothing_is_ended_by_its_worker(lab: pw.Lab) -> None:
    """Stopped for ever: only its parent can do anything about it."""
    before = pid(lab, "island0/host0")
    assert before is not None
    lab.on_stuck("report", silence=3)
    os.kill(before, signal.SIGSTOP)
    try:
        until(lambda: bool((found := lab.stuck()) and found.silent == ("island0/host0",)))
        assert "island0/host0 does not answer" in str(lab.stuck())
        until(lambda: pid(lab, "island0/host0") not in (None, before), 60)
        assert not psutil.pid_exists(before)
        lost = [r for r in lab.timeline.records if getattr(r, "kind", "") == "host-lost"]
        said = re.search(r"it has not answered for (\d+\.\d) s", lost[-1].args["reason"])  # type: ignore[union-attr]
        assert said is not None
        assert float(said[1]) >= 3
    finally:
        lab.on_stuck("report")
        with contextlib.suppress(ProcessLookupError):
            os.kill(before, signal.SIGCONT)


def test_only_owners_break_things_and_say_what_is_done(lab: pw.Lab, tmp_path: Path) -> None:
    lab.invite(tmp_path / "lab")
    with pw.connect(tmp_path / "lab", name="guest") as guest:
        with pytest.raises(pw.PathwaysError, match="this is for owners of the lab"):
            guest.chaos.kill("island0/host0")
        with pytest.raises(pw.PathwaysError, match="only its owners say what the watchdog does"):
            guest.on_stuck("restart", after=1)
        assert guest.watchdog.action == "report"
    for wrong in (lambda: lab.chaos.kill("island7/host0"), lambda: lab.chaos.hang("island0"),
                  lambda: lab.chaos.partition("island0/host0", "island0/host1")):  # fmt: skip
        with pytest.raises(pw.PathwaysError, match="remedy"):
            wrong()
    with pytest.raises(pw.PathwaysError, match="can report, fail or restart"):
        lab.on_stuck("explode")  # type: ignore[arg-type]


def test_the_dask_scheduler_is_lost_and_a_new_lab_forms(lab: pw.Lab) -> None:
    """Last: this lab does not come back."""
    embedded = lab.embedded
    assert embedded is not None
    processes = [pid for pids in embedded.pids.values() for pid in pids]
    f = pw.jit(lambda x: pw.emulated(20_000)(x), on=lab.slice(1, island="island1"))
    kept = pw.device_put(V, lab.slice(1, island="island0").sharding(jax.sharding.PartitionSpec()))
    kept.block_until_ready()
    pending = f(V)
    as_expected(lab.chaos.lose_scheduler())
    for handle in (pending, kept):
        with pytest.raises(pw.PathwaysError, match="the Dask scheduler ended") as caught:
            handle.result(timeout=60)
        assert "pw.start()" in caught.value.failure.remedy
    with pytest.raises(pw.PathwaysError, match="the Dask scheduler ended"):
        f(V)
    until(lambda: all(map(ended, processes)), 60)
    with pw.start(islands=1, hosts_per_island=1, devices_per_host=1, progress=False) as new:
        again = pw.jit(lambda x: x + 1, on=new.slice(1))
        np.testing.assert_array_equal(again(V).result(timeout=60), V + 1)
