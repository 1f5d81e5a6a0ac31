"""Laws: what is written down is read back the same, and a core that decides otherwise is caught."""

from __future__ import annotations

from collections import deque
from itertools import islice
from pathlib import Path

import pytest

from pathways_lab.core.control import Control
from pathways_lab.core.messages import (
    Event,
    FreeBuffers,
    HostJoined,
    HostLost,
    HostReport,
    PolicyChosen,
    PolicySet,
    RunSubmitted,
)
from pathways_lab.core.messages.uploads import PatienceEnded
from pathways_lab.core.scheduling.policies import ProportionalShare
from pathways_lab.core.scheduling.rules import Rules
from pathways_lab.runtime.control_plane.transcript import (
    IncompleteTranscript,
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
    transcript = Transcript(world.control, path, limit)
    events: list[Event] = []
    world.decide = transcript.handle
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
    assert any(isinstance(c, PolicySet) for _, commands in found for c in commands)
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
    written = Transcript(Control(), path)
    written.handle(HostJoined(0.0, "test", "i/h", "i", 2, "cpu", 1 << 30))
    written.handle(HostReport(1.0, "test", "i/h", resident=(1 << 32,)))
    freed = [FreeBuffers("clock", ("i/h",), (1 << 32,))]
    assert written.handle(PatienceEnded(written.due, "clock")) == freed
    assert list(read(path))[-1] == (PatienceEnded(11.0, "clock"), freed)
    assert differences(path) == []
