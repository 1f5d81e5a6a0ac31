"""The watchdog: asks when something is late, tells each story once, and waits for nobody."""

from __future__ import annotations

from collections.abc import Sequence

from pathways_lab.core.diagnosis.overdue import Overdue
from pathways_lab.core.diagnosis.stall import LAUNCHED, Seen
from pathways_lab.core.diagnosis.stall_detector import Watchdog
from pathways_lab.core.diagnosis.stall_story import Stuck
from pathways_lab.core.program.program import Line


class World:
    """Gangs by number, each granted on both hosts, at time 0 where nothing else is said."""

    def __init__(self) -> None:
        self.runs: list[int] = []
        self.granted: dict[int, float] = {}
        self.asked: list[tuple[tuple[str, ...], int]] = []
        self.told: list[Stuck] = []
        self.dog = Watchdog(self.overdue, self.ask, lambda story, now: self.told.append(story))

    def overdue(self, seconds: float, now: float) -> list[Overdue]:
        since = {r: now - self.granted.get(r, 0.0) for r in self.runs}
        return [
            Overdue(r, "k", "p", 0, f"g{r}", Line(), ("h0", "h1"), since[r], True)
            for r in self.runs
            if since[r] >= seconds
        ]

    def ask(self, hosts: Sequence[str], number: int) -> None:
        self.asked.append((tuple(hosts), number))

    def answer(self, now: float, **orders: tuple[int, ...]) -> None:
        number = self.asked[-1][1]
        for host, order in orders.items():
            seen = tuple(Seen(run, 0, LAUNCHED, 1.0, (0,)) for run in order)
            self.dog.answered(host, number, seen, now)


def test_nobody_is_asked_while_nothing_is_late() -> None:
    world = World()
    world.runs = [1]
    world.dog.look(1.0)
    assert world.asked == []
    world.dog.look(2.5)
    assert world.asked == [(("h0", "h1"), 1)]
    world.dog.look(2.75)
    assert len(world.asked) == 1


def test_late_is_told_once_and_a_deadlock_as_long_as_it_lasts() -> None:
    world = World()
    world.runs = [1, 2]
    for now in (3.0, 3.5):
        world.dog.look(now)
        world.answer(now, h0=(1, 2), h1=(1, 2))
    assert [s.kind for s in world.told] == ["late"]
    for now in (4.0, 4.5):
        world.dog.look(now)
        world.answer(now, h0=(1, 2), h1=(2, 1))
    assert [s.kind for s in world.told] == ["late", "deadlock", "deadlock"]


def test_a_story_that_is_over_is_told_again_when_it_comes_back() -> None:
    world = World()
    world.runs = [1]
    for now, late in ((3.0, 2.0), (4.0, 9.0), (5.0, 2.0)):  # an owner asks for more patience
        world.dog.look(now, late)
        world.answer(now, h0=(1,), h1=(1,))
    assert len(world.told) == 2


def test_what_ended_before_the_answers_came_makes_nobody_else_late() -> None:
    world = World()
    heard: list[Stuck | None] = []
    world.runs = [1]
    world.dog.look(3.0)
    world.dog.wonder(3.0, 1.0, heard.append)
    world.runs, world.granted = [2], {2: 3.05}
    world.answer(3.1, h0=(2,), h1=(2,))
    assert (heard, world.told) == ([None], [])


def test_who_asks_for_less_than_is_late_changes_nothing() -> None:
    world = World()
    heard: list[Stuck | None] = []
    world.runs = [1]
    world.dog.wonder(0.5, 0.1, heard.append)
    world.answer(0.6, h0=(1,), h1=(1,))
    assert [s.kind for s in heard if s] == ["late"]
    assert world.told == []


def test_silent_hosts_and_old_answers() -> None:
    world = World()
    world.runs = [1]
    world.dog.look(3.0)
    world.answer(3.0, h0=(1,))
    world.dog.look(3.5)
    assert world.told == []
    world.dog.look(4.1)
    assert world.told[0].silent == ("h1",)
    world.answer(4.2, h1=(1,))  # too late: nobody asks any more
    assert len(world.told) == 1


def test_a_host_that_is_lost_is_not_waited_for() -> None:
    world = World()
    world.runs = [1]
    world.dog.look(3.0)
    world.answer(3.0, h0=(1,))
    world.dog.lost("h1", 3.1)
    assert world.told[0].silent == ()


def test_clients_that_ask_are_answered_from_one_round() -> None:
    world = World()
    heard: list[Stuck | None] = []
    world.dog.wonder(0.5, 1.0, heard.append)
    assert heard == [None]
    world.runs = [1]
    world.dog.wonder(2.0, 1.0, heard.append)
    world.dog.wonder(2.0, 1.0, heard.append)
    assert len(world.asked) == 1
    world.answer(2.1, h0=(1,), h1=(1,))
    assert [s.kind for s in heard[1:] if s] == ["late", "late"]
