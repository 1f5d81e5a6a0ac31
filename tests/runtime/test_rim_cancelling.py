"""The control plane's answer to a client that cancels."""

from __future__ import annotations

from pathways_lab.core import messages as m
from pathways_lab.core.cancel_messages import CancelAnswered
from pathways_lab.core.errors import Failure
from tests.runtime.rim_kit import ONE, Lab


def test_what_was_cancelled_is_told_before_the_answer() -> None:
    lab = Lab()
    why = Failure("cancelled", "no")
    lab.core.answer = lambda event: [
        m.Resolved("c", "kernel-1", (ONE + 6,), why),
        CancelAnswered("c", "kernel-1", event.request, 1, 2, 3),
    ]
    lab.say(1, "cancel", runs=[], buffers=[ONE + 6], id=ONE + 3)
    assert lab.core.events[-1].request == ONE + 3
    assert lab.core.events[-1].buffers == (ONE + 6,)
    (told,) = lab.clients[0].of("answered")
    counts = (told["cancelled"], told["begun"], told["going"])
    assert (told["id"], counts) == (ONE + 3, (1, 2, 3))
    ops = [op for op, _, _ in lab.clients[0].sent]
    assert ops.index("resolved") < ops.index("answered")
