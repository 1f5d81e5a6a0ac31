"""What hosts are told about the runtimes that they form, and when."""

from __future__ import annotations

from typing import Any

import pytest

from pathways_lab.core.errors import Failure
from pathways_lab.core.slices.topology import SliceBinding
from pathways_lab.runtime.islands.process_group import Formation
from pathways_lab.runtime.islands.process_groups import Formations
from pathways_lab.transport.codec import unpack


class World:
    """Records what the book asks of others."""

    def __init__(self) -> None:
        self.said: list[tuple[str, str, Any]] = []
        self.opened: list[tuple[int, int]] = []
        self.closed: list[int] = []
        self.lost: list[tuple[tuple[int, ...], str]] = []
        self.book = Formations(self, self.tell, lambda s, why: self.lost.append((s, why)))

    def tell(self, host: str, op: str, fields: dict[str, Any]) -> None:
        key = fields["slice"] if op == "span" else fields["number"]
        self.said.append((host, op, key))
        if op == "span":
            self.last = unpack(Formation, fields["formation"])
        else:
            self.fields = fields

    def open(self, formation: int, processes: int, book: object) -> None:
        self.opened.append((formation, processes))

    def close(self, formation: int) -> None:
        self.closed.append(formation)

    def take(self) -> list[tuple[str, str, Any]]:
        said, self.said = self.said, []
        return said


@pytest.fixture
def world() -> World:
    return World()


def slice_over(slice_id: int, *devices: tuple[str, int]) -> SliceBinding:
    return SliceBinding(slice_id, "k", "island0", (len(devices),), ("x",), devices, "cpu")


A0, A1, B0, B1, C0 = ("a", 0), ("a", 1), ("b", 0), ("b", 1), ("c", 0)


def test_a_slice_of_one_host_needs_no_formation(world: World) -> None:
    world.book.bind(slice_over(1, A0, A1), 0)
    world.book.unbind(1)
    assert world.said == []
    assert world.opened == []


def test_slices_end_together_with_those_of_their_formation(world: World) -> None:
    for number, devices in enumerate(((A0, B0), (B0, A0), (A1, B1), (C0,)), 1):
        world.book.bind(slice_over(number, *devices), 0)
    assert world.book.together([1]) == {1, 2}
    assert world.book.together([3, 4]) == {3, 4}
    assert world.book.together([]) == set()


def test_from_the_first_slice_to_the_last(world: World) -> None:
    """Hosts are told before the slice is bound; slices over the same devices share."""
    world.book.bind(slice_over(1, A0, B0, A1), 3)
    assert world.take() == [("a", "span", 1), ("b", "span", 1)]
    assert world.last == Formation(1, "island0", 3, (("a", (0, 1)), ("b", (0,))))
    assert world.opened == [(1, 2)]
    world.book.bind(slice_over(2, A1, A0, B0), 3)
    assert world.take() == [("a", "span", 2), ("b", "span", 2)]
    assert world.last.number == 1
    assert world.opened == [(1, 2)]
    world.book.opened(1, "unix:/there")
    assert world.take() == [("a", "form", 1), ("b", "form", 1)]
    assert world.fields["address"] == "unix:/there"
    for host in "ab":
        world.book.formed(1, host, None)
    world.book.unbind(1)
    assert world.take() == []
    world.book.unbind(2)
    assert world.take() == [("a", "dissolve", 1), ("b", "dissolve", 1)]
    assert world.closed == [], "it would end whoever has not heard of it yet"
    assert len(world.book) == 0
    for host in "aab":
        assert world.closed == []
        world.book.left(1, host)
    assert world.closed == [1]
    world.book.left(1, "b")
    assert world.closed == [1]


def test_a_lost_host_ends_its_formations_at_once_and_no_others(world: World) -> None:
    world.book.bind(slice_over(1, A0, B0), 0)
    world.book.bind(slice_over(2, A1, B1, C0), 0)
    world.book.bind(slice_over(3, A0, C0), 0)
    world.take()
    world.book.host_lost("b", "killed")
    assert world.take() == [("a", "dissolve", 1), ("a", "dissolve", 2), ("c", "dissolve", 2)]
    assert world.fields["reason"] == "b was lost: killed"
    assert world.closed == []
    for number in (1, 2):
        world.book.left(number, "a")
    assert world.closed == [1], "it is not waited for the host that was lost"
    # Late news of what is over changes nothing.
    world.book.opened(1, "unix:/there")
    world.book.formed(1, "a", "b was lost")
    world.book.unbind(1)
    world.book.refused(2, "late")
    assert world.take() == []
    formation = world.book.of_slice(3)
    assert formation is not None
    assert formation.number == 3
    assert world.book.of_slice(1) is None


def test_a_host_that_cannot_join_ends_it_for_all(world: World) -> None:
    world.book.bind(slice_over(1, A0, B0), 0)
    world.take()
    world.book.formed(1, "a", "no memory")
    assert world.take() == [("a", "dissolve", 1), ("b", "dissolve", 1)]
    assert world.lost == [((1,), "a could not join: no memory")]
    # The next slice over the same devices gets a new one.
    world.book.bind(slice_over(2, A0, B0), 0)
    assert world.last.number == 2


def test_broken_collectives_cost_their_slices_and_no_others(world: World) -> None:
    """All hosts live; the devices are as good as before for a new slice."""
    world.book.bind(slice_over(1, A0, B0), 0)
    world.book.bind(slice_over(2, B0, A0), 0)
    world.book.bind(slice_over(3, A1, B1), 0)
    world.take()
    world.book.broken(1, "the network broke")
    world.book.broken(1, "the other host says so too")
    assert world.take() == [("a", "dissolve", 1), ("b", "dissolve", 1)]
    assert world.lost == [((1, 2), "the network broke")]
    assert world.book.of_slice(3) is not None
    world.book.host_lost("a", "killed")
    assert len(world.lost) == 1, "the core hears of lost hosts by itself"


def test_a_service_is_asked_for_twice(world: World) -> None:
    """The coordination process may die while it opens one."""
    world.book.bind(slice_over(1, A0, B0), 0)
    world.take()
    world.book.refused(1, "it died")
    assert world.opened == [(1, 2), (1, 2)]
    world.book.refused(1, "it died again")
    assert world.take() == [("a", "dissolve", 1), ("b", "dissolve", 1)]
    assert "it died again" in world.fields["reason"]


def test_an_orphan_lives_on_but_takes_no_new_slices(world: World) -> None:
    world.book.bind(slice_over(1, A0, B0), 0)
    world.book.opened(1, "unix:/there")
    world.take()
    world.book.orphaned([1, 77])
    assert world.take() == []
    world.book.bind(slice_over(2, A0, B0), 0)
    assert world.last.number == 2
    assert world.opened == [(1, 2), (2, 2)]
    world.take()
    world.book.unbind(1)
    assert world.take() == [("a", "dissolve", 1), ("b", "dissolve", 1)]


def test_a_service_ends_when_every_living_host_has_left_it(world: World) -> None:
    """Also of one that is formed again, and of one whose last hosts die meanwhile."""
    world.book.bind(slice_over(1, A0, B0), 0)
    world.book.renew({1}, Failure("stuck", "it hung"))
    world.book.left(1, "a")
    assert world.closed == []
    world.book.left(1, "b")
    assert world.closed == [1]
    world.book.unbind(1)
    world.book.left(2, "b")
    assert world.closed == [1]
    world.book.host_lost("a", "killed")
    assert world.closed == [1, 2]
    world.book.left(77, "a")
