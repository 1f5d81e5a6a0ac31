"""Handles that clients share: who may read what another has made.

Problem: a buffer belongs to one client, and nobody else can name it.  Sometimes
that is not wanted: a model that one notebook trains is what another serves.  So
its owner *publishes* it under a name, and any client *takes* it by that name.

What is decided here: taking gives a reference of the taker's own, which counts
like a handle.  So the taker's value outlives the name, the owner's handle and
the owner himself; the bytes are freed when the last one who has it drops it.
The name itself counts too, until it is taken back, used for something newer, or
its owner leaves.  References only read: what is shared is never donated, and
nothing is computed on another's slice.

Rule for maintainers: the store counts; here is only who may.

Paper: section 4.6 (object store, ownership).
"""

from __future__ import annotations

from pathways_lab.core.errors import Failure
from pathways_lab.core.messages import (
    HandlePublished,
    HandleTaken,
    Published,
    Resolved,
    Taken,
    Unpublished,
)
from pathways_lab.core.state import State
from pathways_lab.core.store import BufferRecord
from pathways_lab.core.uploads import Uploads


class Sharing:
    """names: by name, who published which buffer, and what takers must know of it."""

    def __init__(self, state: State, uploads: Uploads) -> None:
        self.state = state
        self.uploads = uploads
        self.names: dict[str, tuple[str, BufferRecord, bytes]] = {}

    def names_of(self, client: str) -> list[str]:
        """What a client has published."""
        return [name for name, (owner, _, _) in self.names.items() if owner == client]

    def publish(self, event: HandlePublished) -> str | Failure | None:
        """Give a buffer a name; a name of the same client's moves.  Why not, or None."""
        known = self.names.get(event.name)
        if known is not None and known[0] != event.client:
            return f"{known[0]} has published something under this name: choose another"
        buffer = self.state.store.buffers.get(event.buffer)
        if buffer is None or buffer.owner != event.client or not buffer.kept:
            return "only the client that made a handle can publish it, as long as it has it"
        if buffer.failure is not None:
            return buffer.failure
        if buffer.donor:
            return "the handle was donated: publish the result of that call"
        # The new one first: it may be the same buffer.
        again = known is not None and known[1] is buffer
        buffer.names.add(event.name)
        if known is not None and not again:
            self._end(event.name, known[1])
        self.names[event.name] = event.client, buffer, event.about
        self.state.out.append(Published(self.state.cause, event.client, event.name))
        return None

    def unpublish(self, name: str) -> None:
        """Nobody can take it by this name any more."""
        client, buffer, _ = self.names.pop(name)
        self._end(name, buffer)
        self.state.out.append(Unpublished(self.state.cause, client, name))

    def _end(self, name: str, buffer: BufferRecord) -> None:
        buffer.names.discard(name)
        self.state.store.settle(buffer)
        self.uploads.dropped(buffer)

    def take(self, event: HandleTaken) -> str | None:
        """Give a client a reference of its own.  Why not, or None."""
        known = self.names.get(event.name)
        if known is None:
            there = ", ".join(sorted(self.names)) or "nothing"
            return f"nothing is published under this name; there is {there}"
        if self.state.store.in_use(event.buffer) or event.buffer < 1:
            return f"the number {event.buffer} is in use"
        owner, buffer, about = known
        if owner == event.client:
            return "this client has published it itself, and has the handle"
        self.state.store.refer(buffer, event.client, event.buffer)
        cause, client = self.state.cause, event.client
        self.state.out.append(
            Taken(cause, client, event.name, event.buffer, buffer.id, buffer.slice, about)
        )
        if buffer.state != "promised":
            self.state.out.append(Resolved(cause, client, (event.buffer,), buffer.failure))
        return None
