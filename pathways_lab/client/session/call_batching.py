"""Calls outside of programs, sent together when they come faster than answers.

Problem: a small gang takes less time than the message that asks for it.  A
call may travel with the next ones while no thread waits for its answer; a call that
a thread waits for may not wait a microsecond; and a loop that calls without ever
looking must be slowed down in time, or memory grows without bound.

How: a call leaves at once while nothing is under way, and where calls do not come fast: a
kernel that computes between them, or draws, keeps the interpreter from the thread that would
learn that nothing is under way any more.  Where devices have work for long
(:mod:`pathways_lab.client.session.backlog`), calls need not come fast: training steps of hundreds
of arrays take the kernel longer than a pause.  Else the call waits for others: until there are
:data:`MOST`, or as many as in the last burst, if that was a short one; until anything else is
sent or waited for, until everything under way is over, or :data:`SOON`, or a :data:`PART` of the
time for which devices have work.  A wait for a value that is under way already sends nothing while
more steps are under way behind that value than calls wait: a loop that reads earlier losses would
else send each of its calls alone.  Calls that leave together
are one run of one plan, in which values whose handles are gone already are
values between two steps.  Such a plan is made when the same calls come in the
same way for the second time, and kept; in a loop that is every time, since runs are
of 1, 2, 4 ... calls: the remaining calls wait on, unless they must leave too.

Rule for maintainers: order is kept; every sender of anything else calls
:meth:`Calls.flush` first.  A call that was taken is sent or fails; Ctrl-C waits meanwhile.

Paper: section 4.2 (client), section 4.5 (batching where throughput matters).
"""

from __future__ import annotations

import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from pathways_lab.client.lab.tags import Tag, current
from pathways_lab.client.program.graph import Prepared
from pathways_lab.client.session import failures
from pathways_lab.client.session.connection import Connection
from pathways_lab.client.session.pending import Buffer
from pathways_lab.core.errors import PathwaysError
from pathways_lab.core.program.concatenate import Part, Source, in_series
from pathways_lab.core.program.program import Plan, SliceId
from pathways_lab.transport.deferred_signals import HeldBack

MOST = 128
"""Calls that leave together."""
ARRAYS = 4096
"""Arguments and results of calls that leave together: a plan names each of them."""
PAUSE = 200e-6
"""Seconds without a call that end a burst."""
SHORT, FEW = 16, 32
"""A burst's length is predicted only from short bursts (at most SHORT calls): in longer ones a
pause may be the scheduler's noise.  And only while fewer than FEW steps are under way: with more,
cluster or kernel are slow already."""
SOON = 0.002
"""Seconds for which a call waits for others at most, unless its devices have work for longer."""
PART = 0.25
"""The share of the time for which they have work that a call waits at most."""
HALF = 0.5
"""The same in a loop that waits for earlier values: its calls come one by one as devices go on."""
_CALLS = 1024
"""Calls in all plans that are made for a slice: cluster and client keep them, some KB for each."""
_SEEN = 4096
_ARGUMENTS, _BYTES = 256, 1 << 20
"""A call with more arguments in its message, or larger ones, goes alone: so none of the limits of
a message is reached by calls that would each be within it."""
_NONE: Mapping[int, int] = {}


@dataclass(slots=True, eq=False)
class Entry:
    """One call.  arguments: by plan input, its place in *payload*.  tag: for policies."""

    prepared: Prepared
    inputs: Sequence[Buffer | None]
    outputs: tuple[Buffer, ...]
    arguments: Mapping[int, int]
    payload: Sequence[bytes]
    tag: Tag

    def takes(self, prepared: Prepared, tag: Tag) -> bool:
        """Whether a call of *prepared* may follow in the same run."""
        same = self.prepared is prepared or self.prepared.place is prepared.place
        return same and (self.tag is tag or self.tag == tag)


Shape = tuple[object, ...]


class Burst:
    """Calls that come fast, one after the other, and what is to be expected of them."""

    def __init__(self) -> None:
        self._last = -math.inf
        self._calls = self._expected = 0

    def over(self, now: float, steps: int) -> bool:
        """Record a call at *now* (seconds), while *steps* are under way.

        True if the batch should be sent now: the burst has reached its expected length, or
        this call follows a pause.
        """
        if now - self._last >= PAUSE:
            self._calls, self._expected = 0, self._calls
        self._last = now
        self._calls += 1
        return self._calls in (1, self._expected) and self._expected <= SHORT and steps < FEW


class Calls:
    """The calls of one connection that have not left."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._lock = threading.RLock()
        self._entries: list[Entry] = []
        self._until, self._armed = 0.0, math.inf
        self._burst = Burst()
        self._waited = self._flushing = False
        self._plans: dict[Shape, Plan] = {}
        self._seen: OrderedDict[int, None] = OrderedDict()
        """Hashes of shapes: what is taken for seen by mistake has its plan one time too soon."""
        connection.flush, connection.awaited = self.flush, self.awaited
        connection.over = self._some

    def add(
        self,
        prepared: Prepared,
        inputs: Sequence[Buffer | None],
        arguments: Mapping[int, int] = _NONE,
        payload: Sequence[bytes] = (),
        donate: Callable[[], None] | None = None,
    ) -> tuple[Buffer, ...]:
        """Take one call; its output buffers, pending.

        donate(): drops what the call consumes.  Not before calls that came earlier have
        left, or they would take those ids along, ahead of this call.
        """
        connection = self._connection
        with self._lock:
            alone = (
                len(prepared.slices) > 1
                or connection.racing.enter is not None
                or not connection.registered.has(prepared)
                # Others need not wait for what a host computation still has to make.
                or any(b is not None and b.fed and not b.done for b in inputs)
                or (payload and (len(payload) > _ARGUMENTS or sum(map(len, payload)) > _BYTES))
            )
            tag = current()
            if alone or (self._entries and not self._entries[-1].takes(prepared, tag)):
                self._flush()
            if donate is not None:
                donate()
            if alone:
                return self._send_alone(prepared, inputs, arguments, payload)
            outputs = tuple([connection.new_buffer() for _ in prepared.plan.outputs])
            now = time.monotonic()
            over = self._burst.over(now, connection.steps)
            ahead = connection.backlog.seconds(prepared.place.id)
            patience = PART * ahead
            waited, self._waited = self._waited, False
            if not self._entries:
                self._until = now + max(SOON, patience)
            if over and waited and patience > PAUSE:
                # It comes after a wait, not after a pause of the kernel, and others follow.
                self._until, over = min(self._until, now + HALF * ahead), False
            self._entries.append(Entry(prepared, inputs, outputs, arguments, payload, tag))
            calls = len(self._entries)
            full = calls >= MOST or calls * prepared.arrays >= ARRAYS
            over = over and patience <= SOON
            if over or full or not connection.under_way:
                self._flush(whole=over)
            self._arm()
        return outputs

    def flush(self, drops: bool = False) -> None:
        """Send what waits.  Any thread; what another one is sending has left at the return.

        drops: tell also whose handles are gone.
        """
        connection = self._connection
        if self._entries or self._flushing or (drops and connection.dropped):
            with self._lock, HeldBack():
                self._flush()
                if drops and not self._flushing:
                    connection.forget(connection.take_dropped())

    def awaited(self, buffer: Buffer) -> None:
        """Somebody waits for *buffer*: send what waits, or have it wait on for others.

        It waits on where the value does not need it, and devices have more steps to do after
        that value than wait here.
        """
        self._waited, connection = True, self._connection
        if self._entries and (buffer.done or connection.maker(buffer) is not None):
            with self._lock, HeldBack():
                if 0 < len(self._entries) < connection.behind(buffer):
                    on = self._entries[-1].prepared.place.id
                    patience = HALF * connection.backlog.seconds(on)
                    if patience > PAUSE:
                        self._until = time.monotonic() + patience
                        return self._arm()
        self.flush()

    def _some(self) -> None:
        """Nothing is under way any more: the next run of what waits."""
        if self._entries:
            with self._lock:
                self._flush(whole=False)

    def _arm(self) -> None:
        """Have what waits looked at when its time is over."""
        if self._entries and self._until < self._armed:
            self._armed = self._until
            left = max(self._until - time.monotonic(), 0.0)
            self._connection.reactor.call_later(left, self._tick, self._armed)

    def _tick(self, armed: float) -> None:
        with self._lock:
            if armed != self._armed:
                return  # an earlier look was asked for since then
            self._armed = math.inf
            if self._until <= time.monotonic():
                self._flush(whole=False)
            self._arm()

    def _send_alone(
        self,
        prepared: Prepared,
        inputs: Sequence[Buffer | None],
        arguments: Mapping[int, int],
        payload: Sequence[bytes],
    ) -> tuple[Buffer, ...]:
        connection, self._flushing = self._connection, True
        gone = connection.take_dropped()
        try:
            connection.registered.add(prepared)
            return connection.submit(prepared.plan, inputs, arguments, payload, dropped=gone)
        except BaseException:
            connection.drop(*gone)
            raise
        finally:
            self._flushing = False

    def _flush(self, whole: bool = True) -> None:
        """Send all, or what makes the largest run."""
        if self._flushing or not self._entries:
            return
        self._flushing = True
        entries, self._entries = self._entries, []
        gone = dict.fromkeys(self._connection.take_dropped())
        try:
            while entries:
                count = 1 << (len(entries).bit_length() - 1)
                self._send(entries[:count], entries[count:], gone)
                del entries[:count]
                if entries and not whole:
                    self._entries[:0] = entries
                    self._until = time.monotonic() + SOON
                    self._connection.drop(*gone)
                    break
        except BaseException as error:
            self._connection.drop(*gone)
            outputs = [output for entry in entries for output in entry.outputs]
            open_ = [output for output in outputs if not output.done]
            self._connection.board.settle(open_, failures.not_sent(error))
            if not isinstance(error, PathwaysError):
                raise
        finally:
            self._flushing = False

    def _send(self, entries: list[Entry], later: list[Entry], gone: dict[int, None]) -> None:
        """So many calls as one run, or as one run each when they come so for the first time.

        gone: ids of handles that nobody has; those that go along are taken out.
        """
        connection = self._connection
        as_one = self._as_one(entries, later, gone) if len(entries) > 1 else None
        needed = {b.id for call in later for b in (*call.inputs, *call.outputs) if b is not None}
        told = [number for number in gone if number not in needed]
        if as_one is None:
            for entry in entries:
                connection.submit(
                    entry.prepared.plan, entry.inputs, entry.arguments, entry.payload, entry.tag,
                    outputs=entry.outputs, dropped=told if entry is entries[-1] else (),
                )  # fmt: skip
        else:
            wires, plan = as_one
            parts = tuple([entry.prepared.plan for entry in entries])
            connection.registered.add_series(plan, wires.keys)
            connection.submit(
                plan, wires.inputs, wires.arguments, wires.payload, entries[0].tag,
                outputs=wires.kept, dropped=told, parts=parts,
            )  # fmt: skip
            connection.traffic.runs += len(entries) - 1
        for number in told:
            del gone[number]

    def _as_one(
        self, entries: list[Entry], later: list[Entry], gone: dict[int, None]
    ) -> tuple[_Wires, Plan] | None:
        """How these go as one run, if it may be; nobody is told of values that stay inside."""
        wires = _Wires(entries, later, gone)
        plan = self._plan(wires)
        if plan is None:
            return None
        for buffer in wires.inner:
            self._connection.disown(buffer)
            gone.pop(buffer.id, None)
        return wires, plan

    def _plan(self, wires: _Wires) -> Plan | None:
        plan, on = self._plans.get(wires.shape), wires.entries[0].prepared.place.id
        seen = hash(wires.shape)
        if plan is None and seen in self._seen and self._room(on, len(wires.entries)):
            parts = [
                Part(entry.prepared.plan, sources, kept)
                for entry, sources, kept in zip(
                    wires.entries, wires.sources, wires.keeps, strict=True
                )
            ]
            names = list(dict.fromkeys(part.plan.name for part in parts))
            name = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
            plan = self._plans[wires.shape] = in_series(name, parts)
        elif plan is None:
            self._seen[seen] = None
            if len(self._seen) > _SEEN:
                self._seen.popitem(last=False)
        return plan

    def _room(self, on: SliceId, calls: int) -> bool:
        """Whether another plan may be made; those that are registered no more are forgotten."""
        knows = self._connection.registered.knows
        self._plans = {shape: p for shape, p in self._plans.items() if knows(p.key)}
        made = sum([len(p.steps) for p in self._plans.values() if on in p.slices])
        return made + calls <= _CALLS


class _Wires:
    """How calls hang together.

    shape: the same for calls that can be one and the same plan.  keys: of their plans.
    inputs, arguments, payload, kept: of the run.  inner: what stays inside.
    """

    def __init__(self, entries: list[Entry], later: list[Entry], gone: dict[int, None]) -> None:
        self.entries = entries
        self.inputs: list[Buffer | None] = []
        self.arguments: dict[int, int] = {}
        self.payload: list[bytes] = []
        self.kept: list[Buffer] = []
        self.inner: list[Buffer] = []
        self.sources: list[tuple[Source, ...]] = []
        self.keeps: list[tuple[int, ...]] = []
        made: dict[Buffer, Source] = {}
        outer: dict[Buffer, Source] = {}
        for number, entry in enumerate(entries):
            sources = []
            for position, buffer in enumerate(entry.inputs):
                source = None if buffer is None else made.get(buffer) or outer.get(buffer)
                if source is None:
                    source = (-1, len(self.inputs))
                    self.inputs.append(buffer)
                    if buffer is None:
                        self.arguments[source[1]] = len(self.payload)
                        self.payload.append(entry.payload[entry.arguments[position]])
                    else:
                        outer[buffer] = source
                sources.append(source)
            self.sources.append(tuple(sources))
            for position, output in enumerate(entry.outputs):
                made[output] = (number, position)
        read_later = {buffer for entry in later for buffer in entry.inputs}
        for entry in entries:
            kept = []
            for position, output in enumerate(entry.outputs):
                if output.id in gone and output not in read_later:
                    self.inner.append(output)
                else:
                    kept.append(position)
                    self.kept.append(output)
            self.keeps.append(tuple(kept))
        self.keys = tuple([entry.prepared.plan.key for entry in entries])
        self.shape: Shape = (self.keys, tuple(self.sources), tuple(self.keeps))
