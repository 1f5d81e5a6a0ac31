"""Pending answers and values of a kernel: one object for each thing that will be settled.

Rule for maintainers: plain state; the connection settles it.

Paper: section 4.2 (client).
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from pathways_lab.client.session.habits import Habit
from pathways_lab.client.session.waiting import Pending
from pathways_lab.core.errors import Failure
from pathways_lab.core.program.program import Plan
from pathways_lab.core.slices.topology import SliceBinding

_NOBODY: frozenset[str] = frozenset()


class Watch(weakref.ref[Any]):
    """Calls something when a buffer's handle is gone, of any thread's, also while garbage is
    collected.

    id: of the buffer; 0: of a bundle's array, it was noted that the handle is gone.
    bundle: of which the handle is an array, if it is.
    """

    __slots__ = ("bundle", "id")
    id: int
    bundle: Bundle | None


class Buffer(Pending):
    """The kernel's side of one logical buffer.  run: which run makes it (0: an upload).

    stored: its number on hosts; another than id for one that was taken.
    ticket: shows hosts that this client may read it, if it is another client's.
    witnesses: hosts that together know when it is there, if any do.  asked: they were.
    fed: a host computation makes it (:mod:`pathways_lab.client.feeds.feed`).
    shared: it was published, so others may have it.
    handle: watches its handle, or those of a bundle, once there is one.
    habit: of the function that made it, if it has many results.  place: which one it is.
    """

    __slots__ = (
        "__weakref__", "asked", "fed", "habit", "handle", "id", "place", "run", "shared", "stored",
        "ticket", "witnesses",
    )  # fmt: skip

    def __init__(self, identity: int, run: int) -> None:
        super().__init__()
        self.id = self.stored = identity
        self.run = run
        self.ticket: bytes | None = None
        self.witnesses: frozenset[str] = _NOBODY
        self.asked = self.fed = self.shared = False
        self.handle: Watch | Bundle | None = None
        self.habit: Habit | None = None
        self.place = 0


class Maker(Protocol):
    """A program that makes bundles (:class:`pathways_lab.client.program.graph.Prepared`)."""

    @property
    def habit(self) -> Habit: ...


class Bundle:
    """Results of one call that have one buffer.

    maker: the program that made them.  first: which of its results is the first of them.
    watches: of their handles, in their order.  left: so many handles are there.
    over: it is no bundle any more: dropped, donated or taken apart.
    ended: why its arrays are gone, if they were consumed.
    """

    __slots__ = ("buffer", "ended", "first", "left", "maker", "over", "watches")

    def __init__(self, buffer: Buffer, maker: Maker, first: int) -> None:
        self.buffer = buffer
        self.maker = maker
        self.first = first
        self.watches: list[Watch] = []
        self.left = 0
        self.over = False
        self.ended: Failure | None = None

    @property
    def habit(self) -> Habit:
        """The habit of the function that made it."""
        return self.maker.habit

    def at(self, leaves: Sequence[Any], position: int) -> bool:
        """Whether all its handles follow each other in *leaves* from *position* on."""
        if self.over:
            return False
        there = leaves[position : position + len(self.watches)]
        try:
            places = [leaf._place for leaf in there if leaf._bundle is self]
        except AttributeError:
            return False
        return places == list(range(len(self.watches)))

    def end(self, why: Failure) -> None:
        """Its arrays are consumed: nobody needs to be told any more when their handles go."""
        self.ended, self.over = why, True
        self.watches.clear()  # a watch that is gone before its handle tells nothing

    def lost(self, watch: Watch) -> int | None:
        """One of its handles is gone: the number of its buffer if that was the last one."""
        self.left -= 1
        watch.id = 0
        if self.left or self.over:
            return None
        self.over = True
        return self.buffer.id

    def cut(self) -> None:
        """The handles that are gone have gone another way than the others: remember where."""
        gone = [not watch.id for watch in self.watches]
        ends = [n for n in range(1, len(gone)) if gone[n] != gone[n - 1]]
        self.habit.cut([self.first + n for n in ends])


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
