"""Races: each host gets the grants in its own order, and nothing is lost or held for ever."""

from __future__ import annotations

from typing import Any

from pathways_lab.core import messages as m
from pathways_lab.core.scheduling.unordered_launch import Races
from tests.runtime.rim_kit import ONE, TWO, Lab

HOSTS = {"h0": (0, 1), "h1": (1, 0)}


class Wire:
    """Remembers what was sent, by host: the operation, and its run or buffer."""

    def __init__(self) -> None:
        self.sent: dict[str, list[tuple[str, int, bool]]] = {"h0": [], "h1": []}

    def __call__(self, host: str, op: str, fields: dict[str, Any], buffers: Any) -> None:
        self.sent[host].append((op, fields["run"], fields.get("free", False)))


def opened() -> tuple[Races, Wire]:
    wire = Wire()
    races = Races(wire)
    races.open(1, "kernel-1", "island0", HOSTS)
    races.entered(1, 10, 0)
    races.entered(1, 20, 1)
    return races, wire


def granted(races: Races, run: int) -> None:
    for host in HOSTS:
        assert races.hold(host, "grant", {"run": run})


def test_every_host_in_its_own_order() -> None:
    races, wire = opened()
    granted(races, 10)
    granted(races, 99)  # not of the race, and after it on every host
    races.close(1, 0.0)
    assert wire.sent == {"h0": [], "h1": []}
    granted(races, 20)
    races.settle(0.1)
    assert [run for _, run, _ in wire.sent["h0"]] == [10, 20, 99]
    assert [run for _, run, _ in wire.sent["h1"]] == [20, 10, 99]
    assert all(free for sent in wire.sent.values() for _, _, free in sent)
    assert not races.hold("h0", "grant", {"run": 100})
    assert 10 in races
    races.ended(10)
    races.ended(20)
    assert not races


def test_frees_and_aborts_keep_their_place_behind_grants() -> None:
    races, wire = opened()
    granted(races, 10)
    assert races.hold("h1", "free", {"run": 0})
    assert not races.hold("h1", "program", {"run": 0})
    granted(races, 20)
    races.close(1, 0.0)
    assert [op for op, _, _ in wire.sent["h1"]] == ["grant", "grant", "free"]


def test_a_run_that_ends_without_places_is_not_waited_for() -> None:
    races, wire = opened()
    granted(races, 10)
    races.close(1, 0.0)
    races.ended(20)
    races.settle(0.1)
    assert [run for _, run, _ in wire.sent["h1"]] == [10]


def test_nothing_waits_longer_than_seconds() -> None:
    races, wire = opened()
    granted(races, 10)
    races.close(1, 0.0)
    races.settle(4.0)
    assert wire.sent["h0"] == []
    races.settle(6.0)
    assert [run for _, run, _ in wire.sent["h0"]] == [10]


def test_what_a_client_leaves_behind_goes_on_in_order() -> None:
    races, wire = opened()
    granted(races, 10)
    granted(races, 20)
    races.abandon("kernel-2")
    assert wire.sent["h1"] == []
    races.abandon("kernel-1")
    assert [run for _, run, _ in wire.sent["h1"]] == [10, 20]


def test_other_hosts_are_not_concerned() -> None:
    races, _ = opened()
    assert not races.hold("h7", "grant", {"run": 10})


def test_nobody_starts_or_enters_another_s_race() -> None:
    lab = Lab()
    lab.core.answer = lambda event: [m.Leased("c", "kernel-1", "i0", order=False)]
    lab.say(1, "lease", island="i0", order=False, patience=1.0, id=1)
    lab.core.answer = lambda event: []
    race, orders = ONE | 1, {"i0/h": [0]}
    lab.say(1, "race", race=race, island="i0", orders=orders)
    held = lab.rim.races._open[race]
    lab.say(2, "race-go", race=race)
    assert held.closed is None
    lab.say(2, "submit", run=TWO + 1, plan="p", inputs=[], outputs=[], arguments={}, race=[race, 0])
    assert not held.waiting
    lab.say(1, "race", race=TWO | 1, island="i0", orders=orders)
    assert list(lab.rim.races._open) == [race]
    lab.say(1, "submit", run=ONE + 1, plan="p", inputs=[], outputs=[], arguments={}, race=[race, 0])
    assert held.waiting == {ONE + 1}
    lab.say(1, "race-go", race=race)
    assert held.closed is not None
