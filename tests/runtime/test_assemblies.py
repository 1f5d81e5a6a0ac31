"""Islands whose hosts start as one runtime: who waits, who is told, who starts anew."""

from __future__ import annotations

from typing import Any

import pytest

from pathways_lab.runtime.islands.accelerator_groups import Assemblies, HostWaiting

A, B, C = "i/a", "i/b", "j/c"


class World:
    """Records what the book asks of others."""

    def __init__(self) -> None:
        self.opened: list[tuple[int, int]] = []
        self.closed: list[int] = []
        self.told: list[tuple[str, str, Any]] = []
        self.ended: list[tuple[str, str]] = []
        self.book = Assemblies(
            self,
            lambda host, op, fields: self.told.append((host, op, fields)),
            lambda host, reason: self.ended.append((host, reason)),
        )

    def open(self, formation: int, processes: int, book: object) -> None:
        self.opened.append((formation, processes))

    def close(self, formation: int) -> None:
        self.closed.append(formation)


@pytest.fixture
def world() -> World:
    return World()


def assemble(world: World) -> int:
    """Both hosts of an island wait, and are told where to meet."""
    world.book.waits(A, "i", 2)
    world.book.waits(B, "i", 2)
    number = world.opened[-1][0]
    world.book.opened(number, "unix:/there")
    return number


def test_hosts_are_told_where_to_meet_when_all_are_there(world: World) -> None:
    world.book.waits(B, "i", 2)
    world.book.waits(C, "j", 2)
    assert world.opened == []
    world.book.waits(A, "i", 2)
    assert world.opened == [(-1, 2)]
    world.book.opened(-1, "unix:/there")
    where = {"address": "unix:/there", "number": -1, "hosts": [A, B]}
    assert world.told == [(A, "assemble", where), (B, "assemble", where)]
    assert world.ended == []


def test_one_that_goes_before_all_are_there_costs_nobody_else(world: World) -> None:
    world.book.waits(A, "i", 2)
    world.book.lost(A, "killed")
    assert world.ended == []
    world.book.waits(B, "i", 2)
    assert world.opened == []
    world.book.waits(A, "i", 2)
    assert world.opened == [(-1, 2)]


def test_the_loss_of_one_host_ends_the_others_of_its_island(world: World) -> None:
    number = assemble(world)
    world.book.waits(C, "j", 2)
    world.book.lost(B, "killed")
    world.book.lost(A, "it was ended")
    assert [host for host, _ in world.ended] == [A]
    assert "i/b was lost: killed" in world.ended[0][1]
    assert world.closed == [number]
    again = assemble(world)
    assert again != number
    assert len(world.told) == 4


def test_a_host_that_comes_again_starts_its_island_anew(world: World) -> None:
    """Its predecessor's end may be noticed later than its successor's beginning."""
    assemble(world)
    world.book.waits(B, "i", 2)
    assert [host for host, _ in world.ended] == [A]
    world.book.waits(A, "i", 2)
    assert len(world.opened) == 2


def test_without_a_service_all_start_anew(world: World) -> None:
    world.book.refused(assemble(world), "no memory")
    assert [host for host, _ in world.ended] == [A, B]
    number = assemble(world)
    world.book.orphaned([number, 7])
    assert [host for host, _ in world.ended][2:] == [A, B]


@pytest.mark.parametrize(
    "change",
    [
        {"members": 1},
        {"members": True},
        {"members": 2.5},
        {"name": ""},
        {"island": 3},
        {"name": None},
    ],
)
def test_a_malformed_hello_is_refused(change: dict[str, Any]) -> None:
    hello = {"name": A, "island": "i", "members": 2}
    assert HostWaiting.seen(hello) == HostWaiting(A, "i", 2)
    with pytest.raises((TypeError, ValueError)):
        HostWaiting.seen({**hello, **change})
