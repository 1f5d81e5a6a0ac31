"""What a soak concludes from its samples."""

from __future__ import annotations

import mmap
import os
import random

from pathways_lab.timeline.log import Timeline
from pathways_lab.timeline.records import Event
from tests.acceptance.soak import HOUR, Pace, Samples, Sets, slope, written

MINUTES = 60.0


def life(begin: float, minutes: int, level: float, per_hour: float, noise: float = 1.0) -> Samples:
    """A sample every twenty seconds."""
    chance = random.Random(begin)
    return [
        (begin + 20 * n, level + per_hour * 20 * n / HOUR + chance.gauss(0, noise))
        for n in range(minutes * 3)
    ]


def test_what_is_flat_grows_or_falls_is_called_so() -> None:
    assert slope([life(0, 60, 300, 0)]).verdict(32) == "flat"
    assert slope([life(0, 60, 300, 40)]).verdict(32) == "GROWS"
    assert slope([life(0, 60, 300, -40)]).verdict(32) == "flat"
    assert slope([life(0, 60, 300, -40)]).verdict(-32) == "FALLS"
    assert slope([life(0, 60, 300, 40)]).verdict(-32) == "flat"


def test_the_interval_holds_the_truth() -> None:
    found = [slope([life(n, 60, 300, 25, noise=5)]) for n in range(200)]
    assert 180 <= sum(abs(f.per_hour - 25) < f.spread for f in found) <= 199


def test_a_process_that_was_replaced_starts_anew() -> None:
    """A smaller one afterwards hides no growth, a larger one is none."""
    leaking = [life(0, 20, 300, 60), life(20 * MINUTES, 20, 250, 60)]
    assert slope(leaking).verdict(32) == "GROWS"
    assert slope([[*leaking[0], *leaking[1]]]).verdict(32) != "GROWS"
    larger = [life(0, 20, 300, 0), life(20 * MINUTES, 20, 400, 0)]
    assert slope(larger).verdict(32) == "flat"
    assert slope([[*larger[0], *larger[1]]]).verdict(32) == "GROWS"


def test_the_pace_is_that_of_a_steady_machine() -> None:
    """One that gets slower is no fault of the lab; a lab that does is, on any machine."""
    steady, slower = life(0, 60, 10, 0, noise=0.1), life(0, 60, 10, 3, noise=0.1)
    rates = [(at, 1200 / seconds) for at, seconds in slower]
    assert slope([rates]).verdict(-24) == "FALLS"
    assert Pace(rates, list(slower)).steady().verdict(-24) == "flat"
    assert Pace(rates, list(steady)).steady().verdict(-24) == "FALLS"


def test_sets_of_devices_are_counted_for_each_life_of_a_host() -> None:
    def bind(*devices: tuple[str, int]) -> None:
        timeline.extend([Event("slice-bound", 1.0, "i", args={"devices": devices})])

    timeline, sets = Timeline(), Sets()
    bind(("i/a", 0), ("i/b", 0))
    bind(("i/a", 0))
    assert sets.count(timeline, {1: "i/a", 2: "i/b", 3: "kernel"}) == {
        "i/a": 2, "i/b": 1, "kernel": 0,
    }  # fmt: skip
    bind(("i/a", 0))
    bind(("i/b", 1))
    assert sets.count(timeline, {1: "i/a", 2: "i/b"})["i/a"] == 2
    bind(("i/a", 0))
    assert sets.count(timeline, {4: "i/a", 2: "i/b"}) == {"i/a": 1, "i/b": 2, "kernel": 0}


def test_too_little_decides_nothing() -> None:
    assert slope([]).verdict(32) == "not decided"
    assert slope([life(0, 60, 300, 0)[:2]]).verdict(32) == "not decided"
    assert slope([life(0, 3, 300, 0, noise=10)]).verdict(32) == "not decided"


def test_memory_that_was_written_to_counts() -> None:
    with mmap.mmap(-1, 64 << 20, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as kept:
        before = written(os.getpid())
        for _ in range(64):
            kept.write(b"x" * (1 << 20))
        assert 60 << 20 < written(os.getpid()) - before < 80 << 20
    assert written(1 << 30) == 0
