"""Several systems measured in turn, so that the machine's moods hit all alike.

Problem: on a machine with other users the second system measured meets another
machine than the first.  So every round visits every system and every case once,
case by case, in an order shuffled anew, and systems are compared round by round.  And some
systems spin while they wait, so all but the one whose turn it is are stopped.

Rule for maintainers: a system that is not installed, or that fails, is named
with its reason and left out from then on; it never ends the benchmark.  One that fails to start
has a second try, said aloud: frameworks that meet for the first time fail now and then.
"""

from __future__ import annotations

import functools
import random
import time
from collections.abc import Callable, Sequence
from concurrent import futures
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, runtime_checkable

from benchmarks.harness import machine

GROWTH = 8
"""A case that turns out too short is repeated with at most so many times the units."""
ROUNDS, STEADY = 8, 0.9
"""So many rounds more at most, until one takes at least that share of the time of the last."""

BREATH, AWAKE = 20.0, 0.5
"""While one system starts for so long, all others are awake for that many seconds."""


class Missing(Exception):
    """This system cannot be measured here; the text says why, in one line."""


class Timed(NamedTuple):
    """What one round took: seconds for a number of units."""

    seconds: float
    units: float


class System(Protocol):
    """Something that is measured.

    name: in tables and figures.  cases: what it can do, among the benchmark's
    cases.
    """

    name: str
    cases: Sequence[str]

    def start(self) -> None:
        """Get ready for rounds.  Raises Missing."""

    def round(self, case: str, units: int) -> Timed:
        """Do at least *units* of a case and say how long they took."""

    def stop(self) -> None:
        """End everything; also after a failed start, and while it rests."""


@runtime_checkable
class Resting(Protocol):
    """A system that can be kept from using the processor: one with processes of its own."""

    def rest(self) -> None:
        """Use no processor until :meth:`wake`: it is another's turn."""

    def wake(self) -> None:
        """Be ready for a round."""


@dataclass
class Measured:
    """Seconds per unit of every case and system, in order of rounds.

    missing: system -> why it was not measured (to the end).  busy: cores that the
    machine used while all systems were started and rested.
    began, load: when, and the load averages before anything was started.
    """

    times: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    busy: float = 0.0
    began: str = field(default_factory=machine.now)
    load: list[float] = field(default_factory=machine.load)

    def of(self, case: str, system: str) -> list[float]:
        """The samples of one system in one case; empty when there are none."""
        return self.times.get(case, {}).get(system, [])


def more_units(timed: Timed, budget: float) -> int:
    """How many units fill *budget* seconds, judged by a round that was too short or too long."""
    wanted = budget / max(timed.seconds, 1e-9) * timed.units
    return max(1, int(min(wanted, GROWTH * timed.units)))


def measure(
    systems: Sequence[System],
    cases: Sequence[str],
    *,
    rounds: int,
    budget: float,
    seed: int = 0,
    say: Callable[[str], None] = print,
) -> Measured:
    """Start all systems, measure all their cases in interleaved rounds, stop them.

    rounds: samples per system and case.  budget: seconds that one sample should
    take.  Warm-up: every case is first run until one round takes half its
    budget and is hardly faster than the last, which also finds the number of
    units for the rounds that count.
    """
    result = Measured(times={case: {} for case in cases})
    alive: list[System] = []
    units: dict[tuple[str, str], int] = {}

    def drop(system: System, error: Exception) -> None:
        reason = str(error) if isinstance(error, Missing) else f"{type(error).__name__}: {error}"
        result.missing[system.name] = reason
        alive[:] = [other for other in alive if other is not system]
        say(f"without {system.name}: {reason}")
        with suppress(Exception):
            system.stop()

    try:
        for system in systems:
            say(f"starting {system.name}")
            others = tuple(alive)
            alive.append(system)
            try:
                _breathing(functools.partial(_begin, system, say), others)
                for case in cases:
                    if case in system.cases:
                        go = functools.partial(system.round, case)
                        units[system.name, case] = warm(go, budget)
                _rest(system)
            except Exception as error:
                drop(system, error)
        result.busy = busy_cores(1.0) if alive else 0.0
        chance = random.Random(seed)
        for number in range(rounds):
            turns = [
                (system, case)
                for case in chance.sample(list(cases), len(cases))
                for system in chance.sample(alive, len(alive))
                if case in system.cases
            ]
            for system, case in turns:
                if system.name in result.missing:
                    continue
                try:
                    timed = _turn(system, case, units[system.name, case])
                except Exception as error:
                    drop(system, error)
                    continue
                times = result.times[case].setdefault(system.name, [])
                times.append(timed.seconds / timed.units)
            say(f"round {number + 1} of {rounds}")
    finally:
        for system in alive:
            with suppress(Exception):
                system.stop()
    return result


def _begin(system: System, say: Callable[[str], None]) -> None:
    """Start it, with a second try where it is installed and failed."""
    try:
        system.start()
    except Missing:
        raise
    except Exception as error:
        system.stop()
        say(f"starting {system.name} once more: {error}")
        system.start()


def _breathing(work: Callable[[], None], others: Sequence[System]) -> None:
    """Do something long; the others are awake now and then, so that none misses another."""
    pool = futures.ThreadPoolExecutor(1)
    try:
        done = pool.submit(work)
        while futures.wait([done], BREATH).not_done:
            for other in others:
                _wake(other)
            time.sleep(AWAKE)
            for other in others:
                _rest(other)
        done.result()
    finally:
        pool.shutdown(wait=False)  # Ctrl-C: whoever stops the system ends the work


def _rest(system: System) -> None:
    if isinstance(system, Resting):
        system.rest()


def _wake(system: System) -> None:
    if isinstance(system, Resting):
        system.wake()


def _turn(system: System, case: str, units: int) -> Timed:
    """One round of a system that rests before and after."""
    _wake(system)
    timed = system.round(case, units)
    _rest(system)
    return timed


def warm(go: Callable[[int], Timed], budget: float) -> int:
    """The units that take about *budget* seconds, found by doing them until it is no faster."""
    go(1)
    # The first call may compile, connect, allocate: it says nothing about the second.
    timed = go(1)
    while timed.seconds < budget / 2:
        timed = go(more_units(timed, budget))
    for _ in range(ROUNDS):
        # Caches and plans go on filling, and rounds found too short would be full of that.
        before, timed = timed, go(more_units(timed, budget))
        if timed.seconds / timed.units > STEADY * before.seconds / before.units:
            break
    return more_units(timed, budget)


def busy_cores(seconds: float) -> float:
    """How many cores the machine keeps busy right now, whoever uses them."""
    import psutil

    before, begun = psutil.cpu_times(), time.monotonic()
    time.sleep(seconds)
    after, passed = psutil.cpu_times(), time.monotonic() - begun
    idle = (after.idle + getattr(after, "iowait", 0)) - (before.idle + getattr(before, "iowait", 0))
    return max(0.0, (psutil.cpu_count() or 1) - float(idle) / passed)
