"""Laws of letters: one for all hosts that are told the same, one for a run and what it drops."""

from __future__ import annotations

import pytest

from pathways_lab.core import messages as m
from pathways_lab.core.program.folding import folded
from pathways_lab.transport.codec import pack, unpack_fields
from tests.runtime.rim_kit import ONE, Lab, grants, plan_on, submitted


def test_hosts_that_are_told_the_same_get_the_same_letter_and_each_its_own_order() -> None:
    """Encoding a message costs more than sending it, and a run may be told to hundreds."""
    lab = Lab()
    lab.say(1, "program", plan=pack(folded(plan_on((ONE, ONE + 1)))))
    windows = [(0, 1, 40, (-1, -1)), (1, 2, 41, (40, 12)), (2, 3, 42, (41, 41))]
    lab.core.answer = lambda event: [
        m.Grant("c", host, ONE + 9, "plan", first, last, 1, place, before, (None,), (ONE + 6,))
        for first, last, place, previous in windows
        for host, before in zip(lab.hosts, previous, strict=True)
    ]
    lab.say(1, "submit", b"arg", run=ONE + 9, plan="plan", inputs=[None], outputs=[ONE + 6],
            arguments={0: 0})  # fmt: skip
    one, two = ([s for s in peer.letters if s.op == "grant"] for peer in lab.hosts.values())
    assert [a is b for a, b in zip(one, two, strict=True)] == [True, False, True]
    assert one[0].pieces is two[0].pieces
    for got, name in zip((one, two), lab.hosts, strict=True):
        told = [unpack_fields(m.Grant, {**(s.fields or {}), "host": name}) for s in got]
        previous = [before[name == "i1/h"] for *_, before in windows]
        assert [(g.first, g.place) for g in told] == [(0, 40), (1, 41), (2, 42)]
        assert [g.previous for g in told] == previous
        assert [len(s.buffers) for s in got] == [1, 0, 0]


def test_handles_that_come_with_a_run_are_dropped_also_when_it_is_refused() -> None:
    lab = Lab()
    submitted(lab)
    lab.core.events.clear()
    again = {"run": ONE + 10, "plan": "p", "inputs": [], "outputs": [ONE + 8], "dropped": [ONE + 6]}
    lab.say(1, "submit", b"arg", **again, arguments={0: 7})
    assert [type(event) for event in lab.core.events] == [m.BuffersDropped]
    lab.say(1, "submit", b"arg", **again, arguments={})
    (_, run) = lab.core.events
    assert isinstance(run, m.RunSubmitted)
    assert run.dropped == (ONE + 6,)


def test_hosts_hear_of_a_run_before_it_is_recorded_also_where_something_is_dropped_with_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lab = Lab()
    told: list[str] = []
    host = lab.hosts["i0/h"]
    recorded = lab.rim.diary.decided
    monkeypatch.setattr(
        lab.rim.diary,
        "decided",
        lambda *all: told.extend(["record" if host.of("free") else "early"]) or recorded(*all),
    )
    lab.say(1, "program", plan=pack(folded(plan_on((ONE, ONE + 1)))))
    told.clear()
    lab.core.answer = lambda event: [m.FreeBuffers("c", ("i0/h",), (ONE + 6,)), *grants(ONE + 9)]
    lab.say(1, "submit", b"arg", run=ONE + 9, plan="plan", inputs=[None], outputs=[ONE + 7],
            arguments={0: 0}, dropped=[ONE + 6])  # fmt: skip
    assert told == ["record"]
    assert host.of("grant")
