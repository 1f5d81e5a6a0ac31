"""Laws: what is written down is read back the same, and a core that decides otherwise is caught."""

from __future__ import annotations

from collections import deque
from itertools import islice
from pathlib import Path

import pytest

from pathways_lab.core.control import Control
from pathways_lab.core.messages import (
    BuffersDropped,
    Event,
    FreeBuffers,
    HostJoined,
    HostLost,
    HostReport,
    PatienceEnded,
    PolicyChosen,
    PolicySet,
    RunSubmitted,
)
from pathways_lab.core.scheduling.policies import ProportionalShare
from pathways_lab.core.scheduling.rules import Rules
from pathways_lab.runtime.control_plane import transcript
from pathways_lab.runtime.control_plane.transcript import (
    IncompleteTranscript,
    LastEvents,
    Transcript,
    differences,
    read,
)
from pathways_lab.sim.machine import FunctionCost, Machine
from pathways_lab.sim.simulate import Load, chain, simulate
from pathways_lab.sim.world import World


def played(path: Path, limit: int = 1 << 30) -> list[Event]:
    """A simulated lab with a policy, two clients and a lost host, written down at *path*."""
    world = World(Machine(2, 2, 2, default=FunctionCost(0.01)), seed=3)
    events: list[Event] = []
    world.observers.append(Transcript(path, limit).decided)
    world.observers.append(lambda event, commands: events.append(event))
    loads = [Load(chain(n, 4, [f"{n}.f", f"{n}.g"]), n, runs=20, flight=20) for n in ("a", "b")]
    world.agenda.after(0.1, world.lose, "island0/host1")
    simulate(loads, policy=ProportionalShare({"a": 2.0}), world=world)
    return events


def test_what_was_written_is_read_and_decided_again(tmp_path: Path) -> None:
    path = tmp_path / "transcript"
    events = played(path)
    found = list(read(path))
    assert [event for event, _ in found] == events
    assert {HostLost, PolicyChosen, RunSubmitted} <= {type(event) for event in events}
    assert any(isinstance(c, PolicySet) for _, commands in found for c in commands or ())
    assert path.stat().st_mode & 0o077 == 0
    assert differences(path) == []


def test_a_core_that_decides_otherwise_is_caught(tmp_path: Path) -> None:
    path = tmp_path / "transcript"
    played(path)
    assert differences(path, Control(Rules(window=0.001)))


def test_it_ends_at_its_limit_and_says_so(tmp_path: Path) -> None:
    path = tmp_path / "transcript"
    events = played(path, limit=10_000)
    known = read(path)
    assert [event for event, _ in islice(known, 5)] == events[:5]
    with pytest.raises(IncompleteTranscript, match="reached its limit"):
        deque(known)
    assert path.stat().st_size < 10_100


def test_an_entry_that_was_cut_off_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "transcript"
    events = played(path)
    path.write_bytes(path.read_bytes()[:-3])
    assert len(list(read(path))) == len(events) - 1
    assert differences(path) == []


def test_what_is_given_up_because_of_the_time_is_given_up_again(tmp_path: Path) -> None:
    path = tmp_path / "transcript"
    written, core = Transcript(path), Control()

    def handle(event: Event) -> None:
        written.decided(event, core.handle(event))

    handle(HostJoined(0.0, "test", "i/h", "i", 2, "cpu", 1 << 30))
    handle(HostReport(1.0, "test", "i/h", resident=(1 << 32,)))
    handle(PatienceEnded(core.due, "clock"))
    freed = [FreeBuffers("clock", ("i/h",), (1 << 32,))]
    assert list(read(path))[-1] == (PatienceEnded(11.0, "clock"), freed)
    assert differences(path) == []


def test_a_full_disk_ends_the_transcript_and_nothing_else() -> None:
    if not Path("/dev/full").exists():
        pytest.skip("no file here is always full")
    written = Transcript("/dev/full")
    for _ in range(2):
        written.decided(PatienceEnded(1.0, "clock"), [])


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LastEvents:
    """Nothing is written yet; three events are kept."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(transcript, "KEPT", 3)
    return LastEvents()


def clock(last: LastEvents, count: int) -> Path:
    """So many events, and an end: the file that has them."""
    for number in range(count):
        last.decided(PatienceEnded(float(number), "clock"), [])
    return Path(last.end("a bug").split()[0])


def test_without_a_transcript_the_last_events_are_written_at_the_end(kept: LastEvents) -> None:
    path = clock(kept, 3)
    told = read(path)
    assert [(event.time, commands) for event, commands in islice(told, 3)] == [
        (0.0, None), (1.0, None), (2.0, None),
    ]  # fmt: skip
    with pytest.raises(IncompleteTranscript, match="stopped: a bug"):
        next(told)
    assert path.stat().st_mode & 0o077 == 0


def _dropped(count: int) -> Event:
    return BuffersDropped(0.0, "client", "kernel-1", tuple(range(count)))


def test_events_that_name_many_arrays_push_out_those_before_them(
    kept: LastEvents, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transcript, "ENTRIES", 10)
    for count in (4, 4, 4, 20):
        kept.decided(_dropped(count), [])
        assert kept._entries <= 10 or len(kept._newest) == 1
    (event,) = [event for event, _ in islice(read(Path(kept.end("a bug").split()[0])), 1)]
    assert event == _dropped(20)


def test_events_that_were_not_kept_are_missed(kept: LastEvents) -> None:
    path = clock(kept, 5)
    assert [event.time for event, _ in islice(read(path), 3)] == [2.0, 3.0, 4.0]
    with pytest.raises(IncompleteTranscript, match="2 events before those in"):
        differences(path)
