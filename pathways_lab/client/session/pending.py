"""Pending answers and values of a kernel: one object for each thing that will be settled.

Rule for maintainers: plain state; the connection settles it.

Paper: section 4.2 (client).
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from pathways_lab.client.session.waiting import Pending
from pathways_lab.core.program.program import Plan
from pathways_lab.core.slices.topology import SliceBinding

_NOBODY: frozenset[str] = frozenset()


class Watch(weakref.ref[Any]):
    """Calls something when a buffer's handle is gone, of any thread's, also while garbage is
    collected.  id: of the buffer."""

    __slots__ = ("id",)
    id: int


class Buffer(Pending):
    """The kernel's side of one logical buffer.  run: which run makes it (0: an upload).

    stored: its number on hosts; another than id for one that was taken.
    ticket: shows hosts that this client may read it, if it is another client's.
    witnesses: hosts that together know when it is there, if any do.  asked: they were.
    fed: a host computation makes it (:mod:`pathways_lab.client.feeds.feed`).
    shared: it was published, so others may have it.
    handle: watches its handle, once there is one.
    """

    __slots__ = (
        "__weakref__", "asked", "fed", "handle", "id", "run", "shared", "stored", "ticket",
        "witnesses",
    )  # fmt: skip

    def __init__(self, identity: int, run: int) -> None:
        super().__init__()
        self.id = self.stored = identity
        self.run = run
        self.ticket: bytes | None = None
        self.witnesses: frozenset[str] = _NOBODY
        self.asked = self.fed = self.shared = False
        self.handle: Watch | None = None


class Run(Pending):
    """A submitted run.  inputs: buffers that it waits for, and fed ones.

    plans: of the calls that travel as this run, one after the other, or its own.
    there: so many of its first outputs are there.
    vouched: all of them are, as their witnesses say.
    hear: the number under which they say so without being asked; 0: they are asked.
    """

    __slots__ = ("hear", "id", "inputs", "outputs", "plans", "steps", "there", "vouched")

    def __init__(
        self,
        identity: int,
        inputs: tuple[Buffer, ...],
        outputs: tuple[Buffer, ...],
        plans: tuple[Plan, ...],
    ) -> None:
        super().__init__()
        self.id = identity
        self.inputs = inputs
        self.outputs = outputs
        self.plans = plans
        self.steps = sum([len(plan.steps) for plan in plans])
        self.there = 0
        self.vouched = False
        self.hear = 0

    def complete(self) -> bool:
        """Whether all its outputs are there.  Over all calls each is looked at once."""
        while self.there < len(self.outputs) and self.outputs[self.there].done:
            self.there += 1
        return self.there == len(self.outputs)


class SliceAnswer(Pending):
    """The answer to a request for a slice.  waits: its place in line and why, while it waits."""

    __slots__ = ("binding", "waits")

    def __init__(self) -> None:
        super().__init__()
        self.binding: SliceBinding | None = None
        self.waits = ""


class Answer(Pending):
    """The answer to a question, as it came."""

    __slots__ = ("buffers", "fields")

    def __init__(self) -> None:
        super().__init__()
        self.fields: dict[str, Any] = {}
        self.buffers: tuple[bytes, ...] = ()


class Racing(threading.local):
    """Runs that the calling thread submits belong to a race, if *enter* is set.

    enter(run, inputs): the race's number and the controller's; may raise.
    """

    enter: Callable[[int, Sequence[Buffer | None]], tuple[int, int]] | None = None
