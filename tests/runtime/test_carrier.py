"""Ends that come back from lanes: who is told at once, and who with the next report."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from pathways_lab.runtime.host import effects as module
from pathways_lab.runtime.host.effects import GLANCE, TOLD_AFTER, Carrier

HURRIED = 7
"""A run for whose ends grants wait."""


class Job:
    """Gangs that have ended.  waits(): whether somebody waits for it."""

    def __init__(self, waits: Any = lambda: False, run: int = 1) -> None:
        segment = SimpleNamespace(run=SimpleNamespace(id=run), lane="lane")
        self.job = SimpleNamespace(segment=segment)
        self._waits = waits

    @property
    def awaited(self) -> bool:
        return bool(self._waits())


def carrier(*, short: bool = False) -> tuple[Any, list[Any]]:
    """A carrier of which only ends are wanted, and what it was poked to do."""
    poked: list[Any] = []
    launcher = SimpleNamespace(memory=SimpleNamespace(short=short))
    parts: Any = SimpleNamespace()
    lanes: Any = SimpleNamespace(find=lambda lane: SimpleNamespace(empty=parts.empty))
    reports: Any = SimpleNamespace(hurried=lambda run: run == HURRIED)
    made: Any = Carrier(
        "island0/host0", launcher, parts, lanes, parts, parts, parts, reports,  # type: ignore[arg-type]
        poked.append,
    )  # fmt: skip
    made.parts, parts.empty = parts, False
    return made, poked


@pytest.mark.parametrize(
    ("waited", "short", "at_once"), [(False, False, 0), (True, False, 1), (False, True, 1)]
)
def test_only_ends_that_somebody_needs_are_seen_at_once(
    waited: bool, short: bool, at_once: int
) -> None:
    """To see to each in the thread that launches keeps other hosts waiting in collectives."""
    host, poked = carrier(short=short)
    for _ in range(100):
        host._over(Job(lambda: waited))
    assert len(poked) == at_once, "again only when it was looked"
    assert host.unseen


def test_an_end_that_grants_wait_for_is_seen_at_once_and_of_small_gangs_some_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else devices stand still until a report is due; and a gang may be shorter than a look."""
    host, poked = carrier()
    now = [5.0]
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    host._over(Job(run=HURRIED + 1))
    assert not poked
    looked = []
    for gang in range(1000):
        now[0] += 0.00005
        host.parts.empty = gang == 999
        host._over(Job(run=HURRIED))
        if host._poked:
            looked.append(gang)
            host._poked, host._seen = False, now[0]
    assert looked[0] == 0
    assert len(looked) <= 2 + 1000 * 0.00005 / GLANCE
    assert looked[-1] == 999, "the last one of its lane: nothing comes later that would tell"


def test_who_begins_to_wait_meanwhile_finds_what_has_ended() -> None:
    """A message looks for ends: it sees this one, or this one sees that somebody waits."""
    host, _ = carrier()
    found: list[bool] = []

    def asked() -> bool:
        found.append(host.unseen)
        return False

    host._over(Job(asked))
    assert found == [True]


def test_only_gangs_that_go_on_for_a_moment_are_told_before_they_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of small gangs several are open whenever anybody looks, and nobody sees so short a bar."""
    now, told = 5.0, []
    host, _ = carrier()
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now))
    host._reports = SimpleNamespace(record=told.append)
    host._story = SimpleNamespace(launched=lambda job, at: job.called[at])
    jobs = [
        SimpleNamespace(called=called, over=over, announced=0)
        for over, *called in (
            (0,), (0, now), (0, now - 2 * TOLD_AFTER),
            (1, 4.9, 4.95, 4.99, now - TOLD_AFTER / 2),
        )
    ]  # fmt: skip
    host._flying = dict(enumerate(jobs))
    for _ in range(2):  # and each once
        host.look()
    assert told == [now - 2 * TOLD_AFTER, 4.95, 4.99]
    now += TOLD_AFTER
    host.look()
    assert told[3:] == [now - TOLD_AFTER, now - 1.5 * TOLD_AFTER]
