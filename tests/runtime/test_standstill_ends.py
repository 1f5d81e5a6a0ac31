"""A deadlock is ended once: not again by its lease, nor by a second look."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from pathways_lab.core import messages as m
from pathways_lab.core.diagnosis.overdue import Overdue
from pathways_lab.core.diagnosis.stall_story import Arrow, Member, Stuck
from pathways_lab.core.program.program import Call, Line
from pathways_lab.runtime.control_plane.stall_response import Standstill

HOSTS = ("island0/host0", "island0/host1")


def gang(run: int) -> Overdue:
    return Overdue(run, "ann", "p", 0, f"n{run}", Line(), HOSTS, 3.0, True)


def member(run: int, inside: str) -> Member:
    return Member(run, 0, "ann", "p", f"n{run}", Line(), (inside,), 3.0)


STORY = Stuck(
    "deadlock",
    (member(1, HOSTS[0]), member(2, HOSTS[1])),
    (Arrow(0, 1, HOSTS[1]), Arrow(1, 0, HOSTS[0])),
)


class Stage:
    """A standstill with everything around it written down."""

    def __init__(self) -> None:
        self.late: tuple[Overdue, ...] = (gang(1), gang(2))
        self.given_up: list[m.Event] = []
        self.renewed = 0
        call = Call("f", 7, (), (), name="n")
        plan = SimpleNamespace(steps=[SimpleNamespace(node=call)])
        registry: Any = SimpleNamespace(
            disorder={"island0": 2.0},
            programs={1: ("p", "key"), 2: ("p", "key"), 3: ("p", "key")},
            plans={"key": (None, plan)},
            bindings={7: SimpleNamespace(island="island0")},
        )
        formations: Any = SimpleNamespace(together=set, renew=self._renew)
        races: Any = {1, 2, 3}
        rim: Any = SimpleNamespace(
            registry=registry,
            happened=self.given_up.append,
            restart_host=None,
            overdue=lambda *_: self.late,
        )
        diary: Any = SimpleNamespace(remember=lambda _: None)
        self.standstill = Standstill(rim, formations, races, rim, diary)

    def _renew(self, *_: Any) -> None:
        self.renewed += 1

    def told(self) -> None:
        self.standstill._told(STORY, 10.0)


def test_a_deadlock_is_ended_once() -> None:
    stage = Stage()
    stage.told()
    assert [e.gangs for e in stage.given_up if isinstance(e, m.GivenUp)] == [((1, 0), (2, 0))]
    stage.told()
    stage.standstill.lease_ends("island0", "ann", 10.5)
    assert stage.renewed == 1


def test_a_lease_that_ends_while_gangs_hang_ends_them() -> None:
    stage = Stage()
    stage.standstill.lease_ends("island0", "ann", 10.0)
    assert stage.renewed == 1
    stage.standstill.lease_ends("island0", "ann", 10.0)
    assert stage.renewed == 1


def test_the_next_deadlock_is_ended_too() -> None:
    stage = Stage()
    stage.told()
    stage.late = (gang(3),)
    stage.standstill.lease_ends("island0", "ann", 12.0)
    assert stage.renewed == 2
