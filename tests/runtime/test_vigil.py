"""Law: awake only while messages come fast, never longer than said, never past a timer."""

from __future__ import annotations

from typing import Any

from pathways_lab.transport.busy_poll import Vigil

MOST = 1.0


class World:
    """A selector whose messages come at given times; looking takes 0.01 s."""

    def __init__(self, *messages: float, seconds: float = MOST) -> None:
        self.now = 0.0
        self.messages = list(messages)
        self.slept: list[float] = []
        self.looks = self.ways_given = 0
        self.vigil = Vigil(self.select, seconds, lambda: self.now, self.give_way)

    def select(self, patience: float) -> Any:
        if not patience:
            self.looks += 1
            self.now += 0.01
        elif not self.messages or self.messages[0] > self.now:
            woken = min(self.messages[0] if self.messages else 1e9, self.now + patience)
            self.slept.append(round(woken - self.now, 2))
            self.now = woken
        if self.messages and self.messages[0] <= self.now:
            return [(self.messages.pop(0), 1)]
        return []

    def give_way(self) -> None:
        self.ways_given += 1

    def hear(self, patience: float = 10.0) -> Any:
        return [key for key, _ in self.vigil.select(patience)]


def test_it_sleeps_until_two_messages_have_come_quickly() -> None:
    world = World(0.3, 0.6, 0.9, 1.2)
    assert [world.hear(), world.hear()] == [[0.3], [0.6]]
    assert world.slept == [0.3, 0.3]
    assert world.looks == 0
    assert [world.hear(), world.hear()] == [[0.9], [1.2]]
    assert world.slept == [0.3, 0.3], "the others were looked for"
    assert world.looks > 50


def test_everybody_else_goes_first_between_two_looks() -> None:
    world = World(0.1, 0.2, 0.6)
    for _ in range(3):
        world.hear()
    assert 30 < world.ways_given == world.looks - 1


def test_it_does_not_look_for_longer_than_said_and_then_not_at_all() -> None:
    world = World(0.1, 0.2, 5.0, 5.1, 9.0)
    for _ in range(2):
        world.hear()
    assert world.hear() == [5.0]
    looked = world.looks
    assert 90 < looked < 110, "for a second after the last one"
    assert abs(world.slept[-1] - 3.8) < 0.05
    assert [world.hear(), world.hear()] == [[5.1], [9.0]]
    assert world.looks == looked, "one came late: two must come quickly again"


def test_a_timer_is_not_kept_waiting() -> None:
    world = World(0.1, 0.2, 0.9)
    for _ in range(2):
        world.hear()
    assert world.hear(0.3) == []
    assert 0.5 <= world.now < 0.53
    assert world.hear(0.0) == [], "and who has no time does not wait"
    assert world.now < 0.55


def test_it_sleeps_for_as_long_as_is_left_after_looking() -> None:
    world = World(0.1, 0.2, 5.0)
    for _ in range(2):
        world.hear()
    assert world.hear(3.0) == []
    assert abs(world.now - 3.2) < 0.02


class Gang:
    """It ends at a given time."""

    def __init__(self, world: World, end: float) -> None:
        self.world, self.end = world, end
        self.left: list[float] = []

    def look(self) -> bool:
        return self.world.now >= self.end

    def leave(self) -> None:
        self.left.append(round(self.world.now, 1))


def test_what_is_watched_is_seen_to_end_without_a_message() -> None:
    world = World(0.1, 0.2, 1.4)
    for _ in range(2):
        world.hear()
    gang = Gang(world, 0.7)
    assert world.vigil.select(10.0, gang) == []
    assert (round(world.now, 1), gang.left) == (0.7, [])
    gang.end = 9.0
    assert world.vigil.select(10.0, gang) == [(1.4, 1)], "an end is as good as a message"
    assert (world.slept, gang.left) == ([0.1, 0.1], [])


def test_what_is_watched_is_left_to_others_before_the_thread_sleeps() -> None:
    world = World(0.1, 0.2, 5.0, 9.0)
    gang = Gang(world, 4.0)
    for _ in range(2):
        world.vigil.select(10.0, gang)
    assert gang.left == [0.0, 0.1]
    assert world.vigil.select(10.0, gang) == [(5.0, 1)]
    assert gang.left == [0.0, 0.1, 1.2]


def test_never_means_never() -> None:
    world = World(0.1, 0.2, 0.3, 0.4, seconds=0.0)
    assert [world.hear() for _ in range(4)] == [[0.1], [0.2], [0.3], [0.4]]
    assert (world.looks, len(world.slept)) == (0, 4)


def test_a_real_selector_is_a_selector_still() -> None:
    import selectors
    import socket

    near, far = socket.socketpair()
    with near, far, selectors.DefaultSelector() as selector:
        selector.register(far, selectors.EVENT_READ, "far")
        vigil = Vigil(selector.select)
        for _ in range(5):
            near.send(b"x")
            ((key, _),) = vigil.select(5.0)
            assert key.data == "far"
            far.recv(1)
        assert vigil.select(0.0) == []
