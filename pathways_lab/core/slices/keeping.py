"""Keeping: values that stay when their client leaves, and the client that comes back to them.

Problem: a notebook kernel dies more often than the devices do, and everything of a client that
leaves is freed.  A client may *keep* a publication: then its buffers, and the slices on which they
lie, stay when it leaves, on its account and within its quotas.  They are its *seat*.  The next
client of its name has the slices again as its own, with the functions that are compiled for them,
and takes the values by their names.

Names of clients are the identity here, so nothing moves, neither in the ledger nor on hosts: all
that was the client's is the client's again.

The runs of a client end when it leaves, so a publication that is to be kept waits for its values,
and until then the one before has the name.  But a client may keep a value *ahead*: when all that
it uploaded for it is there.  Then the runs that make it go on when the client leaves, wherever
they stand, with their slices and programs; and the name stays when they fail, for it says why.

A seat ends with its last name: when an owner of the lab takes the names back, when values fail
with their hosts, or when the client comes back.

Rule for maintainers: nothing here moves or copies; names hold buffers (:mod:`.slices.sharing`),
and a seat holds slices.

Paper: section 4.6 (ownership); the paper has nothing that outlives its client.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from pathways_lab.core import messages as m
from pathways_lab.core.checks import ClientRecord
from pathways_lab.core.errors import Failure
from pathways_lab.core.memory.store import BufferRecord
from pathways_lab.core.messages import elastic as em
from pathways_lab.core.program.program import SliceId
from pathways_lab.core.slices.sharing import Sharing
from pathways_lab.core.state import State


class Keeping:
    """seats: by client that has left, what is kept: slices, and the programs of its runs.

    going: clients that have left, and how many of their runs go on.
    coming: publications that are to be kept, with what is not there of what they wait for.
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
        self.seats: dict[str, ClientRecord] = {}
        self.going: dict[str, int] = {}
        self.coming: list[tuple[m.HandlePublished, list[BufferRecord]]] = []
        self._release = release

    # --- requests ----------------------------------------------------------------------

    def publish(self, event: m.HandlePublished) -> None:
        """Give buffers a name; one that is to be kept when all of them are there."""
        if event.to:
            self._answer(event, self._give(event))
        elif event.keep:
            found = [self.state.store.find(number, event.client) for number in event.buffers]
            there = [buffer for buffer in found if buffer is not None]
            self.coming.append((event, self._makers(there)[1] if event.ahead else there))
        else:
            self._answer(event, self.sharing.publish(event))

    def _give(self, event: m.HandlePublished) -> str | Failure | None:
        if event.to not in self.clients:
            there = ", ".join(sorted(self.clients))
            return f"there is no client {event.to!r} to whom to give it; there is {there}"
        if event.to == event.client:
            return "it is to be given to the client that has it"
        return self.sharing.give(event)

    def work(self) -> bool:
        """Publish what is there now, of one name in the order in which it came; let go what only
        runs used that are over."""
        ended = self._end_runs()
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
        return ended or len(self.coming) < len(coming)

    def unpublish(self, event: m.HandleUnpublished) -> None:
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

    def take(self, event: m.HandleTaken) -> None:
        """Give a client references of its own."""
        why = self.sharing.take(event)
        if why is None:
            self.clients[event.client].references.update(event.buffers)
        else:
            self.state.refuse(event, f"name {event.name}", why)

    def _answer(
        self, event: m.HandlePublished | m.HandleUnpublished, why: str | Failure | None
    ) -> None:
        if why is None:
            self.state.out.append(em.Answer(event.cause, event.client, event.request))
        else:
            self.state.refuse(event, f"name {event.name}", why)

    # --- seats -------------------------------------------------------------------------

    def runs(self, client: str) -> set[int]:
        """The runs of a client that go on when it leaves: those that make what it keeps."""
        kept = self.sharing.kept.intersection(self.sharing.names_of(client))
        made = self._makers([buffer for name in kept for buffer in self.sharing.buffers(name)])[0]
        return made & self.state.clients[client]

    def leave(self, event: m.ClientLeft, record: ClientRecord, going: set[int]) -> set[SliceId]:
        """A client leaves: its names end, but for those that are kept.

        going: its runs that go on.  Returns its slices that stay.
        """
        client, state = event.client, self.state
        self.coming = [entry for entry in self.coming if entry[0].client != client]
        self.sharing.leave(client)
        for name in self.sharing.names_of(client):
            if name not in self.sharing.kept or self._worthless(name):
                self.sharing.unpublish(name)
        if going:
            self.going[client] = len(going)
            state.clients[client] = going
        stay = self._used(client) & record.slices
        if self.sharing.names_of(client):
            plans = {i.plan.key: i for i in (state.runs[number].index for number in going)}
            self.seats[client] = ClientRecord(plans, record.number, record.owner, stay)
            told = m.SlicesKept(event.cause, client, tuple(sorted(stay)), tuple(sorted(going)))
            state.out.append(told)
            self._forget_plans(record, stay)
        return stay

    def back(self, event: m.ClientJoined) -> ClientRecord:
        """A client is there, perhaps again; its slices, and the programs of its runs."""
        self.going.pop(event.client, None)
        self.state.clients.setdefault(event.client, set())
        seat = self.seats.pop(event.client, ClientRecord())
        slices = {s for s in seat.slices if s in self.state.resources.slices}
        return ClientRecord(seat.plans, event.number, event.owner, slices)

    def _end_runs(self) -> bool:
        """Some runs of clients that have left may be over: what only these used goes."""
        left = {client: len(self.state.clients[client]) for client in self.going}
        if left == self.going:
            return False
        self.going = {client: number for client, number in left.items() if number}
        for client in left.keys() - self.going.keys():
            del self.state.clients[client]
        self._vacate()
        return True

    def lost(self) -> None:
        """Values have failed: a name of nobody's whose values have failed is of no use."""
        for client in tuple(self.seats):
            for name in self.sharing.names_of(client):
                if self._worthless(name):
                    self.sharing.unpublish(name)
        self._vacate()

    def _worthless(self, name: str) -> bool:
        return self.sharing.failed(name) and name not in self.sharing.ahead

    def _vacate(self) -> None:
        """Slices on which nothing is kept any more go, and seats without a name."""
        for client, seat in tuple(self.seats.items()):
            unused = seat.slices - self._used(client)
            seat.slices -= unused
            over = client not in self.going and not self.sharing.names_of(client)
            if over:
                del self.seats[client]
            if unused or over:
                kept = None if over else tuple(sorted(seat.slices))
                runs = tuple(sorted(self.state.clients.get(client, ())))
                self.state.out.append(m.SlicesKept(self.state.cause, client, kept, runs))
            for slice_id in sorted(unused & self.state.resources.slices.keys()):
                self._release(slice_id)

    def _used(self, client: str) -> set[SliceId]:
        """Slices with values that are kept under names of a client, or with runs that go on."""
        names, runs = self.sharing.names_of(client), self.state.clients.get(client, ())
        used = {buffer.slice for name in names for buffer in self.sharing.buffers(name)}
        return used.union(*[self.state.runs[number].index.plan.slices for number in runs])

    def _makers(self, buffers: list[BufferRecord]) -> tuple[set[int], list[BufferRecord]]:
        """The runs that are still to make buffers, and the uploads that are still to come."""
        makers: set[int] = set()
        uploads: list[BufferRecord] = []
        todo = list(buffers)
        while todo:
            buffer = todo.pop()
            run = self.state.runs.get(buffer.maker)
            if buffer.state != "promised":
                continue
            if run is None:
                uploads.append(buffer)
            elif run.id not in makers:
                makers.add(run.id)
                todo += [each for each in run.inputs if each is not None]
        return makers, uploads

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
            self.state.out.append(m.ProgramsForgotten(self.state.cause, there, tuple(gone), ()))
