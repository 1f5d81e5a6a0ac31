"""The control plane's answers to a client that cancels, or asks for the window of grants."""

from __future__ import annotations

import pytest

from pathways_lab.core import messages as m
from pathways_lab.core.errors import Failure
from pathways_lab.core.messages.elastic import Answer
from pathways_lab.transport.edge import Malformed
from tests.runtime.rim_kit import ONE, Lab


def test_what_was_cancelled_is_told_before_the_answer() -> None:
    lab = Lab()
    why = Failure("cancelled", "no")
    lab.core.answer = lambda event: [
        m.Resolved("c", "kernel-1", (ONE + 6,), why),
        Answer("c", "kernel-1", event.request, numbers={"cancelled": 1, "begun": 2, "going": 3}),
    ]
    lab.say(1, "cancel", runs=[], buffers=[ONE + 6], id=ONE + 3)
    assert lab.core.events[-1].request == ONE + 3
    assert lab.core.events[-1].buffers == (ONE + 6,)
    (told,) = lab.clients[0].of("answered")
    counts = (told["cancelled"], told["begun"], told["going"])
    assert (told["id"], counts) == (ONE + 3, (1, 2, 3))
    ops = [op for op, _, _ in lab.clients[0].sent]
    assert ops.index("resolved") < ops.index("answered")


def test_who_asks_for_the_window_is_answered() -> None:
    lab = Lab()
    lab.core.answer = lambda event: [
        Answer("c", "kernel-1", event.request, numbers={"seconds": 0.25})
    ]
    lab.say(1, "window", seconds=0.25, id=3)
    assert (lab.core.events[-1].seconds, lab.core.events[-1].request) == (0.25, 3)
    assert lab.clients[0].of("answered") == [
        {"id": 3, "failure": None, "lines": (), "seconds": 0.25}
    ]
    before = len(lab.core.events)
    for wrong in (-1, "soon", float("nan"), float("inf"), 10**400):
        with pytest.raises(Malformed):
            lab.say(1, "window", seconds=wrong, id=4)
    assert len(lab.core.events) == before
