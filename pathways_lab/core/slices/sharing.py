"""Sharing: published buffers, which other clients may take and read.

Problem: a buffer belongs to one client, and no other client can name it.  Sometimes
clients want more: one notebook serves the model that another one trains.  So
its owner *publishes* it under a name, and any client *takes* it by that name.

One name stands for one or many buffers, and they are taken together.  Taking gives
references of the taker's own, which count like handles, and can be published too.  So
the taker's value outlives the name, the owner's handle and the owner; the bytes are
freed when the last client that has it drops it.  The name itself counts too, until it is
taken back, used for something newer, or its publisher leaves; one that is kept stays then
(:mod:`.slices.keeping`).  References only read: a shared buffer is never donated, and nothing
is computed on another client's slice.

A publication may be *given* to one client.  Nobody else can take it or learn of it, and it ends
when it is taken.

Rule for maintainers: the store counts; this module knows only the permissions.

Paper: section 4.6 (object store, ownership).
"""

from __future__ import annotations

from collections.abc import Iterable

from pathways_lab.core import messages as m
from pathways_lab.core.errors import Failure
from pathways_lab.core.memory.store import BufferRecord
from pathways_lab.core.memory.uploads import Uploads
from pathways_lab.core.state import State

Publication = tuple[str, tuple[BufferRecord, ...], bytes]
"""A client, the buffers that it has published, and the words for takers."""


class Sharing:
    """names: publications by name.  kept: those of them that stay when their publisher leaves.

    ahead: those of the kept ones that got their name before they were there.

    gifts: publications to one client, by that client, and by who gave them and their name.
    """

    def __init__(self, state: State, uploads: Uploads) -> None:
        self.state = state
        self.uploads = uploads
        self.names: dict[str, Publication] = {}
        self.kept: set[str] = set()
        self.ahead: set[str] = set()
        self.gifts: dict[str, dict[tuple[str, str], Publication]] = {}

    def names_of(self, client: str) -> list[str]:
        """The names that a client has published."""
        return [name for name, (owner, _, _) in self.names.items() if owner == client]

    def publisher(self, name: str) -> str | None:
        """The client that has published under this name."""
        return self.names[name][0] if name in self.names else None

    def buffers(self, name: str) -> tuple[BufferRecord, ...]:
        """The buffers that a name stands for."""
        return self.names[name][1]

    def failed(self, name: str) -> bool:
        """Whether some of what a name stands for will never be there (any more)."""
        return any(buffer.failure is not None for buffer in self.buffers(name))

    def count(self, name: str) -> int:
        """How many buffers a name stands for; 0 if it is nobody's."""
        return len(self.names[name][1]) if name in self.names else 0

    def publish(self, event: m.HandlePublished) -> str | Failure | None:
        """Give buffers a name; a name of the same client's moves.  Why not, or None."""
        known = self.names.get(event.name)
        if known is not None and known[0] != event.client:
            return f"{known[0]} has published something under this name: choose another"
        buffers = self._shareable(event)
        if not isinstance(buffers, list):
            return buffers
        # The new ones first: some may have the name already.
        for buffer in buffers:
            buffer.names.add(event.name)
        if known is not None:
            self._end(event.name, {*known[1]} - {*buffers})
        self.names[event.name] = event.client, tuple(buffers), event.about
        for wanted, names in ((event.keep, self.kept), (event.ahead, self.ahead)):
            (names.add if wanted else names.discard)(event.name)
        self.state.out.append(m.Published(self.state.cause, event.client, event.name, event.keep))
        return None

    def give(self, event: m.HandlePublished) -> str | Failure | None:
        """Let one client take buffers by a name that is between these two.  Why not, or None."""
        given, key = self.gifts.setdefault(event.to, {}), (event.client, event.name)
        if key in given:
            return f"{event.to} was given something of this name and has not taken it yet"
        buffers = self._shareable(event)
        if not isinstance(buffers, list):
            return buffers
        for buffer in buffers:
            buffer.gifts.append(event.to)
        given[key] = event.client, tuple(buffers), event.about
        stored, slices = tuple([b.id for b in buffers]), tuple([b.slice for b in buffers])
        cause, giver = self.state.cause, event.client
        told = m.Given(cause, giver, event.name, event.to, stored, slices, event.about)
        self.state.out.append(told)
        return None

    def take_back(self, client: str, name: str) -> bool:
        """End what a client has given under this name, and nobody has taken; whether it had."""
        found = [to for to, given in self.gifts.items() if (client, name) in given]
        for to in found:
            self._end_gift(to, (client, name))
        return bool(found)

    def leave(self, client: str) -> None:
        """Nothing is given to a client that leaves, nor by it, any more."""
        for to, given in self.gifts.items():
            for key in [key for key in given if client in (to, key[0])]:
                self._end_gift(to, key)
        self.gifts.pop(client, None)

    def _end_gift(self, to: str, key: tuple[str, str]) -> None:
        _, buffers, _ = self.gifts[to].pop(key)
        for buffer in buffers:
            buffer.gifts.remove(to)
        self._settle(buffers)

    def _shareable(self, event: m.HandlePublished) -> list[BufferRecord] | str | Failure:
        """The buffers, or why their client cannot share them."""
        buffers: list[BufferRecord] = []
        for number in event.buffers:
            buffer = self.state.store.find(number, event.client)
            if buffer is None or not (buffer.kept or number in buffer.references):
                return "only a client that has a handle can publish it"
            if buffer.failure is not None:
                return buffer.failure
            if buffer.donor:
                return "the handle was donated: publish the result of that call"
            buffers.append(buffer)
        return buffers

    def unpublish(self, name: str) -> None:
        """Nobody can take it by this name any more."""
        client, buffers, _ = self.names.pop(name)
        self.kept.discard(name)
        self.ahead.discard(name)
        self._end(name, buffers)
        self.state.out.append(m.Unpublished(self.state.cause, client, name))

    def _end(self, name: str, buffers: Iterable[BufferRecord]) -> None:
        for buffer in buffers:
            buffer.names.discard(name)
        self._settle(buffers)

    def _settle(self, buffers: Iterable[BufferRecord]) -> None:
        for buffer in sorted({*buffers}, key=lambda b: b.id):
            self.state.store.settle(buffer)
            self.uploads.dropped(buffer)

    def take(self, event: m.HandleTaken) -> str | Failure | None:
        """Give a client references of its own.  Why not, or None.

        Values that have failed are only taken together with others that are good.
        """
        key = event.giver, event.name
        gift = self.gifts.get(event.client, {}).get(key)
        known = gift if event.giver else self.names.get(event.name)
        if known is None:
            there = ", ".join(sorted(self.names)) or "nothing"
            return f"nothing is published under this name; there is {there}"
        numbers = event.buffers
        for number in numbers:
            if self.state.store.in_use(number) or number < 1:
                return f"the number {number} is in use"
        if len({*numbers}) < len(numbers):
            return "two of them have the same number"
        owner, buffers, about = known
        if owner == event.client and gift is None and event.name not in self.kept:
            return "this client has published it itself, and has the handle"
        if len(numbers) != len(buffers):
            return f"it is {len(buffers)} arrays, and {len(numbers)} were asked for: take it again"
        dead = [buffer for buffer in buffers if buffer.failure is not None]
        of = self.state.resources.slices
        if dead and (len(dead) == len(buffers) or any(of[b.slice].failure for b in dead)):
            return dead[0].failure
        for number, buffer in zip(numbers, buffers, strict=True):
            self.state.store.refer(buffer, event.client, number)
        if gift is not None:
            self._end_gift(event.client, key)
        cause, client = self.state.cause, event.client
        stored, slices = tuple([b.id for b in buffers]), tuple([b.slice for b in buffers])
        taken = m.Taken(cause, client, event.name, numbers, stored, slices, about, event.request)
        self.state.out.append(taken)
        for number, buffer in zip(numbers, buffers, strict=True):
            if buffer.state != "promised":
                self.state.out.append(m.Resolved(cause, client, (number,), buffer.failure))
        return None
