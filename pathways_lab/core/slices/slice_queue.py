"""The line of requests for slices: each is met, waits, or is refused.

Problem: devices can be shared by any number of slices, so a request is met at
once, with two exceptions: an island that another client has on lease, and a client
that holds as many devices as its quota allows.  Both end.  So such a request
may wait, in one line for the whole lab, and its client hears of its place
whenever that changes.

Requests are met in the order in which they came.  A request that can be met passes
earlier ones that cannot: it takes nothing that they wait for.  Two requests of one
client never pass each other.  A request that can never be met, or not any more, is
refused.

Rule for maintainers: the resource manager finds devices, quotas are asked;
nothing here knows how.  A line is served after every event that may move it.

Paper: section 4.1 (resource manager).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from pathways_lab.core.errors import Failure
from pathways_lab.core.memory.quotas import MORE
from pathways_lab.core.messages import SliceBound, SliceRequested, SliceWaiting
from pathways_lab.core.program.program import SliceId, slice_name
from pathways_lab.core.scheduling.policies import PlaceView, places
from pathways_lab.core.slices.topology import SliceBinding
from pathways_lab.core.state import State

CHOOSING = "the policy chooses an island"
"""The wait of a request that may be met at once: no client is told."""


@dataclass(slots=True)
class Bookings:
    """line: requests that wait, with what each waits for.

    bound: told of every new slice, before anybody else.
    moved: whether something may be met that could not be before.
    """

    state: State
    bound: Callable[[SliceBinding], None]
    line: dict[SliceId, tuple[SliceRequested, str]] = field(default_factory=dict)
    moved: bool = False
    _told: dict[SliceId, tuple[int, int, str]] = field(default_factory=dict)

    def ask(self, event: SliceRequested) -> None:
        """A new request is met, refused, or waits."""
        client, asked = event.client, event.request.devices
        failure = self.state.quotas.too_many(client, asked)
        if event.slice in self.state.resources.slices or event.slice in self.line:
            failure = Failure("refused", f"slice {event.slice} exists already", "ask for a new one")
        if failure is not None:
            self.state.refuse(event, f"slice {event.slice}", failure)
        elif event.wait and any(client == other.client for other, _ in self.line.values()):
            self._wait(event, f"an earlier request of {client}")
        else:
            failure, why = self._meet(event)
            if why is CHOOSING or (failure is not None and event.wait and why):
                self._wait(event, why)
            elif failure is not None:
                self.state.refuse(event, f"slice {event.slice}", failure)

    def work(self) -> bool:
        """Meet what can be met now, refuse what never will be, tell the others their places."""
        if not (self.moved and self.line):
            return False
        self.moved = False
        behind: set[str] = set()
        for event, _ in tuple(self.line.values()):
            if event.client in behind:
                continue
            failure, why = self._meet(event)
            if why and (event.wait or why is CHOOSING):
                behind.add(event.client)
                self.line[event.slice] = event, why
                continue
            self._leave(event.slice)
            if failure is not None:
                self.state.refuse(event, f"slice {event.slice}", failure)
        self._tell()
        return True

    def withdraw(self, client: str, slice_id: SliceId | None = None) -> bool:
        """A client waits no longer, for one slice or for any; False when it did not."""
        mine = [e.slice for e, _ in self.line.values() if e.client == client]
        gone = [number for number in mine if slice_id in (None, number)]
        for number in gone:
            self._leave(number)
        self.moved |= bool(gone)
        return bool(gone)

    def _meet(self, event: SliceRequested) -> tuple[Failure | None, str]:
        """None when it was met; else why not, and what it could wait for ("": for nothing)."""
        state, client, asked = self.state, event.client, event.request.devices
        failure = state.quotas.too_many(client, asked)
        if failure is not None:
            return failure, ""
        failure, why = too_many_now(state, client, asked)
        if failure is not None:
            return failure, why
        island = self._chosen(event)
        if island is None:
            return None, CHOOSING
        request = replace(event.request, island=island or event.request.island)
        result = state.resources.bind(event.slice, client, request)
        if isinstance(result, Failure) and island:
            result = state.resources.bind(event.slice, client, event.request)
        if isinstance(result, Failure):
            return result, state.resources.kept_from(client, event.request)
        self.bound(result)
        state.out.append(SliceBound(event.cause, client, result))
        return None, ""

    def _chosen(self, event: SliceRequested) -> str | None:
        """The island that the policy wants for a slice, "" for any; None while it is asked."""
        request, turns = event.request, self.state.turns
        named = request.island is not None or request.at or request.islands
        if named or not places(turns.policy):
            return ""
        found = tuple(self.state.resources.places(event.client, request))
        return turns.place(event.slice, PlaceView(event.time, event.client, request.shape, found))

    def _tell(self) -> None:
        """Everybody who waits learns his place when it has changed."""
        count = len(self.line)
        for place, (event, why) in enumerate(self.line.values(), 1):
            if why is not CHOOSING and self._told.get(event.slice) != (place, count, why):
                self._told[event.slice] = place, count, why
                self.state.out.append(
                    SliceWaiting(event.cause, event.client, event.slice, place, count, why)
                )

    def _wait(self, event: SliceRequested, why: str) -> None:
        self.line[event.slice] = event, why
        self._tell()

    def _leave(self, slice_id: SliceId) -> None:
        del self.line[slice_id]
        self.state.turns.questions.forget_place(slice_id)
        self._told.pop(slice_id, None)


def too_many_now(state: State, client: str, asked: int) -> tuple[Failure | None, str]:
    """Why a client may not have so many devices more, and what it could wait for."""
    most = state.quotas.of(client).devices
    held = state.resources.held_by(client)
    if most is None or not state.quotas.enforced or sum(held.values()) + asked <= most:
        return None, ""
    mine = ", ".join(f"{slice_name(number)} ({n})" for number, n in held.items())
    why = f"the quota of {client} is {most} devices, and its slices hold {mine}"
    more = MORE.format(client=client, what="devices")
    remedy = f"release one of them (slice.release()), or {more}"
    return Failure("refused", f"{asked} devices are too many now: {why}", remedy), why
