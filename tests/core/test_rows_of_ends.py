"""A segment of n gangs that ends is n segments of one: the same commands, whatever fails."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from pathways_lab.core.control import Control
from pathways_lab.core.diagnosis.invariants import check
from pathways_lab.core.errors import Failure
from pathways_lab.core.messages import (
    BuffersDropped,
    ClientJoined,
    Event,
    FunctionAnnounced,
    GivenUp,
    HostJoined,
    HostReport,
    ProgramRegistered,
    RunEnded,
    RunSubmitted,
    SliceRequested,
)
from pathways_lab.core.scheduling.outcomes import Outcomes
from pathways_lab.core.scheduling.rules import Rules
from pathways_lab.core.slices.topology import SliceRequest
from tests.core.test_economy import chain

HOSTS = ("i/h000", "i/h001")
STEPS = 12
BROKEN, STUCK = Failure("execute", "broke"), Failure("stuck", "hangs")


def reports(rng: random.Random, run: int, rows: bool) -> Iterator[Event]:
    """Two hosts come to the end of a run, each at its own pace; gangs fail, and it is given up."""
    fails = {(host, step) for host in HOSTS for step in range(STEPS) if rng.random() < 0.02}
    given_up = rng.randrange(40)
    at = dict.fromkeys(HOSTS, 0)
    while any(step < STEPS for step in at.values()):
        host = rng.choice([h for h in HOSTS if at[h] < STEPS])
        first, last = at[host], min(STEPS, at[host] + rng.randint(1, 7))
        at[host] = last
        times = tuple(rng.choice([0.0, 0.001, 0.002]) for _ in range(first, last))
        one = tuple((run, step, (s,)) for step, s in enumerate(times, first))
        failed = tuple((run, step, BROKEN) for step in range(first, last) if (host, step) in fails)
        yield HostReport(0.0, "r", host, ((run, first, times),) if rows else one, failed)
        if given_up in range(first, last):
            yield GivenUp(0.0, "watchdog", STUCK, runs=(run,))


def played(seed: int, rows: bool) -> list[Any]:
    rng, control, plan = random.Random(seed), Control(Rules(assumed=1e-4)), chain(STEPS, 16)
    told: list[Any] = []

    def say(event: Event) -> None:
        told.append(control.handle(event))
        check(control)

    base = (0.0, "test")
    for host in HOSTS:
        say(HostJoined(*base, host, "i", 8, "cpu", 1 << 40))
    say(ClientJoined(*base, "k"))
    say(SliceRequested(*base, "k", 1, SliceRequest((16,), ("x",))))
    say(FunctionAnnounced(*base, "k", "f", 1))
    for host in HOSTS:
        say(HostReport(*base, host, compiled=(("f", 1, 0, None),)))
    say(ProgramRegistered(*base, "k", plan))
    say(RunSubmitted(*base, "k", 7, "plan", (None,), (100,)))
    say(RunSubmitted(*base, "k", 8, "plan", (100,), (101,)))
    for run in (7, 8):
        for report in reports(rng, run, rows):
            say(report)
    say(BuffersDropped(*base, "k", (100, 101)))
    assert not control.state.runs
    account = control.accounts(1.0)["k"][0]
    told.append([account.gangs, round(account.device_seconds, 9)])
    assert all(gone == (0, 0) for gone in control.state.pace.by_slice.values())
    return told


def test_a_segment_of_n_that_ends_leads_to_the_same_commands_as_n_of_one() -> None:
    outcomes: Counter[str] = Counter()
    for seed in range(60):
        told = played(seed, rows=True)
        assert told == played(seed, rows=False)
        outcomes.update(c.outcome for said in told for c in said if isinstance(c, RunEnded))
    assert min(outcomes["finished"], outcomes["failed"]) > 15


def test_the_comparison_notices_an_end_that_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = Outcomes.ended
    monkeypatch.setattr(
        Outcomes, "ended", lambda self, run, at, host, times: ended(self, run, at, host, times[1:])
    )
    with pytest.raises(AssertionError):
        played(0, rows=True)
