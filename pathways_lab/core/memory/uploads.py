"""Uploads: buffers that a client fills itself.

Problem: the bytes travel on other sockets than the messages about them, so they
may come first, late, or when no client wants them any more; and they need memory
like every buffer.

Rule for maintainers: an upload is resident when all hosts have its bytes, in
their own memory; it takes device memory at the launch of its first reader, in
the order of the grants.  Its bytes count from its admission on, and no reader
is admitted before.  They count as long as somebody has a handle or reads it, whether
its bytes have come or not.  One that was declared *ahead* asks for memory when a first
run reads it: an upload without a reader keeps no run from beginning.

Paper: section 4.6 (object store).
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from pathways_lab.core.errors import Failure
from pathways_lab.core.memory.store import BufferRecord
from pathways_lab.core.messages import FreeBuffers
from pathways_lab.core.scheduling.admission import Entry, beyond_quota, too_large
from pathways_lab.core.scheduling.outcomes import Outcomes
from pathways_lab.core.state import State

PATIENCE = 10.0
"""Seconds for which bytes that nobody has declared are kept; the words are sent before them."""


class Uploads:
    """early: hosts that have the bytes of buffers that nobody declared yet.

    ahead: buffers that ask for memory when somebody reads them.
    abandoned: buffers whose bytes were given up because nobody declared them in time.
    since: when bytes came that nobody had declared then, by buffer, first ones first.
    orphans: hosts to which bytes are under way that nobody wants.
    present: numbers of the clients that are connected, newest: the highest that ever was;
        what still comes of others up to that, which have left, is nobody's.
    """

    def __init__(self, state: State, outcomes: Outcomes) -> None:
        self.state = state
        self.outcomes = outcomes
        self.early: dict[int, set[str]] = {}
        self.ahead: set[int] = set()
        self.orphans: dict[int, set[str]] = {}
        self.present: set[int] = set()
        self.newest = 0
        self.abandoned: set[int] = set()
        self.since: dict[int, float] = {}

    def declare(self, buffer: BufferRecord, hosts: tuple[str, ...], ahead: bool = False) -> None:
        """A new buffer whose bytes are on their way to *hosts*, or will be (*ahead*)."""
        buffer.stored = True
        buffer.arriving = set(hosts) - self.early.pop(buffer.id, set())
        if ahead:
            self.ahead.add(buffer.id)
        else:
            self._enter(buffer)
        if not buffer.arriving and buffer.failure is None:
            self._arrive(buffer)

    def read(self, buffer: BufferRecord) -> None:
        """A run will read the buffer: from now on it needs memory."""
        if buffer.id in self.ahead:
            self.ahead.discard(buffer.id)
            if buffer.failure is None:
                self._enter(buffer)

    def _enter(self, buffer: BufferRecord) -> None:
        """It waits for memory, or is told at once that there will never be any."""
        state = self.state
        state.submitted += 1
        lines = {buffer.slice: [buffer.nbytes, buffer.nbytes]}
        need = state.store.ledger.need(lines, upload=True)
        kind = buffer.slice, buffer.nbytes
        entry = Entry(state.submitted, kind, buffer, None, lines, need, state.time)
        failure = too_large(entry, state.store.ledger)
        if buffer.id in self.abandoned:
            self.abandoned.discard(buffer.id)
            text = f"its bytes were on hosts for {PATIENCE:g} s before it was declared"
            failure = Failure("lost", f"upload {buffer.name!r}: {text}", "upload it again")
        if failure is None and state.quotas.on_bytes:
            failure = beyond_quota(entry, state.store.ledger, state.quotas)
        if failure is not None:
            self.lose(buffer, failure)
            return
        state.admission.put(entry)

    def admitted(self, buffer: BufferRecord) -> None:
        """There is memory for the buffer."""
        buffer.admitted = buffer.granted = True
        self.state.store.count(buffer)
        self.state.wake(buffer)

    def came(self, number: int, host: str) -> None:
        """All parts for one host are there (perhaps before the buffer was declared)."""
        buffer = self.state.store.buffers.get(number)
        if number in self.orphans:
            self.orphans[number].discard(host)
            if not self.orphans[number]:
                del self.orphans[number]
            self.state.out.append(FreeBuffers(self.state.cause, (host,), (number,)))
        elif buffer is not None and host in buffer.arriving:
            buffer.arriving.remove(host)
            if not buffer.arriving and buffer.state == "promised":
                self._arrive(buffer)
        elif buffer is None and self._departed(number >> 32):
            self.state.out.append(FreeBuffers(self.state.cause, (host,), (number,)))
        elif buffer is None:
            self.early.setdefault(number, set()).add(host)
            self.since.setdefault(number, self.state.time)

    @property
    def due(self) -> float:
        """When the next bytes are given up, unless they are declared; infinity: there are none."""
        return next(iter(self.since.values()), math.inf) + PATIENCE

    def abandon(self) -> None:
        """Nobody counts what was never declared, so hosts do not keep it."""
        while self.due <= self.state.time:
            number = next(iter(self.since))
            del self.since[number]
            if number in self.early:
                self.abandoned.add(number)
                self.reject(number, ())

    def _arrive(self, buffer: BufferRecord) -> None:
        self.outcomes.arrive(buffer)
        self.state.store.make(buffer)
        self.dropped(buffer)

    def dropped(self, buffer: BufferRecord) -> None:
        """A buffer that is gone needs no memory any more."""
        if buffer.state == "freed":
            self.ahead.discard(buffer.id)
        if buffer.state == "freed" and not buffer.maker and not buffer.admitted:
            self.state.admission.remove(buffer=buffer)

    def let_go(self) -> None:
        """Free uploads that nobody can use any more, and what of them still comes.

        Their bytes may never come: a client is interrupted, or a link breaks, while it sends.
        """
        unwanted, self.state.store.unwanted = self.state.store.unwanted, []
        for buffer in unwanted:
            if buffer.state == "promised":
                self.ahead.discard(buffer.id)
                self.state.admission.remove(buffer=buffer)
                self.reject(buffer.id, self.state.alive(buffer.arriving))
                self.state.store.make(buffer)

    def lose(self, buffer: BufferRecord, failure: Failure) -> None:
        """The bytes will never come, or there is no place for them."""
        self.state.admission.remove(buffer=buffer)
        self.reject(buffer.id, self.state.alive(buffer.arriving))
        self.outcomes.fail_buffer(buffer, failure)

    def give_up(self, buffer: BufferRecord, failure: Failure) -> None:
        """Its client says that the bytes will never come; what was sent of them is freed."""
        if buffer.state == "promised":
            self.state.admission.remove(buffer=buffer)
            self.outcomes.fail_buffer(buffer, failure)
            self.dropped(buffer)

    def join(self, client: int) -> None:
        """Numbers are given in the order of joining, and never again; 0: it has none."""
        if client:
            self.present.add(client)
            self.newest = max(self.newest, client)

    def _departed(self, client: int) -> bool:
        return 0 < client <= self.newest and client not in self.present

    def leave(self, client: int) -> None:
        """Nothing of this client's is expected or wanted any more; what still comes is freed."""
        if client == 0:
            return
        self.present.discard(client)
        for number in [n for n in self.early if n >> 32 == client]:
            self.reject(number, ())
        for number in [n for n in self.orphans if n >> 32 == client]:
            del self.orphans[number]
        self.abandoned = {n for n in self.abandoned if n >> 32 != client}

    def lose_host(self, host: str) -> None:
        """A dead host has no bytes, and none are under way to it."""
        for waiting in (self.early, self.orphans):
            for number in [n for n, hosts in waiting.items() if host in hosts]:
                waiting[number].discard(host)
                if not waiting[number]:
                    del waiting[number]

    def reject(self, number: int, hosts: Iterable[str]) -> None:
        """Nobody wants bytes that may still be under way to *hosts*."""
        early = self.early.pop(number, set())
        if early:
            self.state.out.append(FreeBuffers(self.state.cause, tuple(sorted(early)), (number,)))
        coming = set(hosts) - early
        if coming:
            self.orphans[number] = coming
