"""Keeping: values that stay when their client leaves, and the client that comes back to them.

Problem: a notebook kernel dies more often than the devices do, and everything of a client that
leaves is freed.  A client may *keep* a publication: then its buffers, and the slices on which they
lie, stay when it leaves, on its account and within its quotas.  They are its *seat*.  The next
client of its name has the slices again as its own, with the functions that are compiled for them,
and takes the values by their names.

Names of clients are the identity here, so nothing moves, neither in the ledger nor on hosts: all
that was the client's is the client's again.

All runs of a client end when it leaves, so only values that are there can be kept: a publication
that is to be kept waits for its values, and until then the one before has the name.

A seat ends with its last name: when an owner of the lab takes the names back, when values fail
with their hosts, or when the client comes back.

Rule for maintainers: nothing here moves or copies; names hold buffers (:mod:`.slices.sharing`),
and a seat holds slices.

Paper: section 4.6 (ownership); the paper has nothing that outlives its client.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from pathways_lab.core.checks import ClientRecord, refusal
from pathways_lab.core.errors import Failure
from pathways_lab.core.memory.store import BufferRecord
from pathways_lab.core.messages import (
    ClientLeft,
    HandlePublished,
    HandleTaken,
    HandleUnpublished,
    ProgramsForgotten,
    SlicesKept,
)
from pathways_lab.core.messages.elastic import Answer
from pathways_lab.core.program.program import SliceId
from pathways_lab.core.slices.sharing import Sharing
from pathways_lab.core.state import State


class Keeping:
    """seats: by client that has left, the slices on which something of it is kept.

    coming: publications that are to be kept, with those of their values that are not there.
    release(slice): nobody holds it any more.
    """

    def __init__(
        self,
        state: State,
        sharing: Sharing,
        clients: Mapping[str, ClientRecord],
        release: Callable[[SliceId], None],
    ) -> None:
        self.state = state
        self.sharing = sharing
        self.clients = clients
        self.seats: dict[str, set[SliceId]] = {}
        self.coming: list[tuple[HandlePublished, list[BufferRecord]]] = []
        self._release = release

    # --- requests ----------------------------------------------------------------------

    def publish(self, event: HandlePublished) -> None:
        """Give buffers a name; one that is to be kept when all of them are there."""
        if event.to:
            self._answer(event, self._give(event))
        elif event.keep:
            found = [self.state.store.find(number, event.client) for number in event.buffers]
            self.coming.append((event, [buffer for buffer in found if buffer is not None]))
        else:
            self._answer(event, self.sharing.publish(event))

    def _give(self, event: HandlePublished) -> str | Failure | None:
        if event.to not in self.clients:
            there = ", ".join(sorted(self.clients))
            return f"there is no client {event.to!r} to whom to give it; there is {there}"
        if event.to == event.client:
            return "it is to be given to the client that has it"
        return self.sharing.give(event)

    def work(self) -> bool:
        """Publish what is there now; of one name in the order in which it came."""
        waiting: set[str] = set()
        coming, self.coming = self.coming, []
        for event, missing in coming:
            while missing and missing[-1].state != "promised":
                missing.pop()
            if missing or event.name in waiting:
                waiting.add(event.name)
                self.coming.append((event, missing))
            else:
                self._answer(event, self.sharing.publish(event))
        return len(self.coming) < len(coming)

    def unpublish(self, event: HandleUnpublished) -> None:
        """Take a name back: one's own, or as an owner that of a client that has left."""
        publisher = self.sharing.publisher(event.name)
        seat = publisher in self.seats and self.clients[event.client].owner
        given = self.sharing.take_back(event.client, event.name)
        if publisher == event.client or seat:
            self.sharing.unpublish(event.name)
        elif not given:
            self._answer(event, "it is not published by this client")
            return
        self._answer(event, None)
        self._vacate()

    def take(self, event: HandleTaken) -> None:
        """Give a client references of its own."""
        why = self.sharing.take(event)
        if why is None:
            self.clients[event.client].references.update(event.buffers)
        else:
            self.state.out.append(refusal(event, f"name {event.name}", why))

    def _answer(
        self, event: HandlePublished | HandleUnpublished, why: str | Failure | None
    ) -> None:
        answer: Any = Answer(event.cause, event.client, event.request)
        if why is not None:
            answer = refusal(event, f"name {event.name}", why)
        self.state.out.append(answer)

    # --- seats -------------------------------------------------------------------------

    def leave(self, event: ClientLeft, record: ClientRecord) -> set[SliceId]:
        """A client leaves: its names end, but for those that are kept.

        Returns its slices that stay.
        """
        self.coming = [entry for entry in self.coming if entry[0].client != event.client]
        self.sharing.leave(event.client)
        for name in self.sharing.names_of(event.client):
            if name not in self.sharing.kept or self.sharing.failed(name):
                self.sharing.unpublish(name)
        stay = {b.slice for b in self._buffers(event.client)} & record.slices
        if self.sharing.names_of(event.client):
            self.seats[event.client] = stay
            self.state.out.append(SlicesKept(event.cause, event.client, tuple(sorted(stay))))
            self._forget_plans(record, stay)
        return stay

    def back(self, client: str) -> set[SliceId]:
        """The slices of a client that is there again."""
        return {s for s in self.seats.pop(client, set()) if s in self.state.resources.slices}

    def lost(self) -> None:
        """Values have failed: a name of nobody's whose values have failed is of no use."""
        for client in tuple(self.seats):
            for name in self.sharing.names_of(client):
                if self.sharing.failed(name):
                    self.sharing.unpublish(name)
        self._vacate()

    def _vacate(self) -> None:
        """Slices on which nothing is kept any more go, and seats without a name."""
        for client, held in tuple(self.seats.items()):
            used = {buffer.slice for buffer in self._buffers(client)}
            unused = held - used
            if self.sharing.names_of(client):
                held &= used
            else:
                del self.seats[client]
            if unused or client not in self.seats:
                kept = tuple(sorted(held)) if client in self.seats else None
                self.state.out.append(SlicesKept(self.state.cause, client, kept))
            for slice_id in sorted(unused & self.state.resources.slices.keys()):
                self._release(slice_id)

    def _buffers(self, client: str) -> list[BufferRecord]:
        """Values that are kept under names of a client."""
        names = self.sharing.names_of(client)
        return [buffer for name in names for buffer in self.sharing.buffers(name)]

    def _forget_plans(self, record: ClientRecord, stay: set[SliceId]) -> None:
        """Hosts would have them as long as the slices; no gang of them will get a place."""
        running = {run.index.plan.key for run in self.state.runs.values()}
        gone = {
            key: index
            for key, index in record.plans.items()
            if stay.intersection(index.plan.slices) and key not in running
        }
        if gone:
            hosts = dict.fromkeys(host for index in gone.values() for host in index.hosts)
            there = self.state.alive(hosts)
            self.state.out.append(ProgramsForgotten(self.state.cause, there, tuple(gone), ()))
