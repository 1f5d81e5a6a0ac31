"""The kernel's link to the control plane.

Problem: everything that the kernel wants of the cluster is one message on one
link, sent by the thread that wants it; everything that comes back settles
something.  Objects die at any moment, also inside a garbage collection, where
nothing may be sent: their ids are only enqueued, and travel with the next
message or with the next tick.

Rule for maintainers: ids are made here (the client's number in the high 32
bits); a handler runs in the reactor's thread and only settles, counts and
stores.  Users' code is never called from it.

Paper: section 4.2 (client), section 4.5.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import ssl
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from pathways_lab.client.lab.stats import Traffic
from pathways_lab.client.lab.tags import NOTHING, Tag, current
from pathways_lab.client.session import failures
from pathways_lab.client.session.backlog import Backlog
from pathways_lab.client.session.code_registry import Registered
from pathways_lab.client.session.host_completion import Witnesses
from pathways_lab.client.session.own_work import OwnWork
from pathways_lab.client.session.pending import (
    Buffer,
    Bundle,
    Racing,
    Run,
    Watch,
)
from pathways_lab.client.session.requests import Questions
from pathways_lab.client.session.slice_moves import Following
from pathways_lab.client.session.waiting import Board, Pending
from pathways_lab.core.errors import Failure, PathwaysError
from pathways_lab.core.program.program import Line, Plan, SliceId
from pathways_lab.core.slices.topology import SliceBinding
from pathways_lab.runtime.processes.interpreter_settings import Settings
from pathways_lab.transport.codec import unpack
from pathways_lab.transport.forks import leave_at_fork
from pathways_lab.transport.framing import TO_CONTROL, Letter, WireError
from pathways_lab.transport.handshake import SILENCE, Refused
from pathways_lab.transport.link import Link, LinkClosed
from pathways_lab.transport.reactor import Reactor

if TYPE_CHECKING:
    from typing_extensions import Buffer as Bytes

_STEPS = 8192
"""Steps of runs under way, at most.  A submitter above it waits until at most half of them remain,
or only one run does."""
_KINDS = ("slice", "run", "buffer", "race", "question")
_TICK = 0.1
"""Seconds after which it is told at the latest what nobody has any more."""


class Gift(NamedTuple):
    """A publication for this client alone.  fields, about: with which it is read."""

    fields: dict[str, Any]
    about: bytes


class Flush(Protocol):
    """See :meth:`pathways_lab.client.session.call_batching.Calls.flush`."""

    def __call__(self, drops: bool = False) -> None: ...


class Connection:
    """One authenticated link, and everything that is pending on it.

    name: what the control plane calls this kernel: as it asked to be called, or
    a number.  number: in the high 32 bits of its ids.  owner: it may decide for all.
    silence: seconds without a sign of a machine after which it counts as lost.
    topology: islands with hosts, and policy: the one in force, as the control plane last told.
    given: by giver and name, what others have given this client and it has not taken.
    tag: of runs of which nothing else is said.
    kept: slices that were kept from an earlier connection of this name.
    own_work: the user's lines that wait for values, and that work between calls.
    traffic: counters.  steps: of runs that were submitted and are not over; backlog: by slice.
    on_records, on_output, on_policy: called in the reactor's thread.
    gone: what calls when a handle is gone; it only enqueues.
    thinned: bundles of which some handles are gone, and how many were left at the last tick.
    on_tick(): called now and then, in the reactor's thread.
    flush(drops=False): send what waits to be sent together, and with *drops* the ids
        of dropped handles; these never before anything that waits.
    awaited(buffer): somebody will wait for it: send what waits, as far as it must leave now.
    over(): called when everything that was submitted is over.
    forked: this process is a fork of the one that has the lab; nothing here is of use.
    quiet: see :func:`pathways_lab.transport.handshake.meet`.
    """

    forked = False

    def __init__(
        self,
        address: str,
        key: bytes,
        *,
        context: ssl.SSLContext | None = None,
        name: str = "",
        timeout: float = 10.0,
        holder: int = 0,
        quiet: Callable[[float], object] | None = None,
    ) -> None:
        self.context = context
        self.traffic = Traffic()
        self.tag = NOTHING
        self.closed: Failure | None = None
        self.on_records: Callable[[list[Any]], None] = lambda _: None
        self.on_output: Callable[[dict[str, Any]], None] = lambda _: None
        self.on_policy: Callable[[str, dict[str, Any]], None] = lambda op, _: None
        self.address = address
        self.topology: dict[str, Any] = {}
        self.policy: dict[str, Any] = {}
        self.given: dict[tuple[str, str], Gift] = {}
        self.on_data: Callable[[Link, str, dict[str, Any], list[memoryview]], None] | None = None
        self.on_data_closed: Callable[[Link, str], None] | None = None
        self.expect: Callable[[Buffer], int] = lambda _: 0
        self.expect_no_more: Callable[[Buffer, int], None] = lambda *_: None
        self.on_closed: Callable[[Failure], None] = lambda _: None
        self.flush: Flush = lambda drops=False: None
        self.awaited: Callable[[Buffer], None] = lambda _: None
        self.over: Callable[[], None] = lambda: None
        self.on_tick: Callable[[], None] = lambda: None
        self._buffers: dict[int, Buffer] = {}
        self._runs: dict[int, Run] = {}
        self.steps = self._vouched = 0
        self.own_work = OwnWork()
        self.backlog = Backlog()
        self._witnesses = Witnesses()
        self.questions: Questions = Questions(self)
        self.following = Following()
        self.racing = Racing()
        self._dropped: deque[int | Watch] = deque()
        self.thinned: dict[Bundle, int] = {}
        self.gone: Callable[[Watch], None] = self._dropped.append
        # Not send(): calls that wait may have to register too.
        self.registered = Registered(self._send)
        self.reactor = Reactor("pathways-kernel", self._message, self._link_closed)
        self.board = Board(self.reactor)
        self._settings = Settings()
        self.reactor.start()
        hello = {"role": "client", "name": name, "pid": os.getpid()}
        try:
            self.link = self.reactor.connect(
                address, key, hello, timeout, context=context, holder=holder, quiet=quiet
            )
        except Refused as refusal:
            self.close("it was refused")
            raise failures.refused(f"the lab refuses this client: {refusal}") from None
        except BaseException:
            self.close("it was not reached")
            raise
        peer = self.link.peer
        self.silence = float(peer.get("silence", SILENCE))
        self.link.bear(self.silence)
        self.name = str(peer["client"])
        self.data_key = bytes(peer["data_key"])
        self.owner = bool(peer.get("owner", False))
        self.emulated = bool(peer.get("emulated", False))
        # Newer ones may have been told already.
        self.topology = self.topology or peer["topology"]
        self.policy = self.policy or peer["policy"]
        self.number = int(peer["number"])
        self.kept = [unpack(SliceBinding, packed) for packed in peer.get("kept", ())]
        self._high = self.number << 32
        self._numbers = {kind: itertools.count(1) for kind in _KINDS}
        self.reactor.call_later(_TICK, self._tick)
        leave_at_fork(self)

    # --- identities -------------------------------------------------------------

    def new_id(self, kind: str) -> int:
        """A fresh id for a ``"slice"``, ``"run"``, ``"buffer"``, ``"race"`` or ``"question"``."""
        return self._high | next(self._numbers[kind])

    def new_buffer(self) -> Buffer:
        """A buffer that is uploaded, or that a run will make."""
        buffer = Buffer(self.new_id("buffer"), 0)
        self._buffers[buffer.id] = buffer
        return buffer

    def drop(self, *identities: int) -> None:
        """Forget buffers, with the next message or tick."""
        self._dropped.extend(identities)

    # --- sending ----------------------------------------------------------------

    def check(self) -> None:
        """Raises PathwaysError when the lab is gone."""
        if self.closed is not None:
            raise PathwaysError(self.closed)

    def send(
        self, op: str, fields: dict[str, Any] | None = None, buffers: Sequence[Bytes] = ()
    ) -> None:
        """Send to the control plane.  Raises PathwaysError when the lab is gone."""
        self.flush(drops=True)
        self._send(op, fields, buffers)

    def _send(
        self, op: str, fields: dict[str, Any] | None = None, buffers: Sequence[Bytes] = ()
    ) -> None:
        self.check()
        letter = Letter(op, fields, buffers)
        try:
            letter.check(TO_CONTROL)
            self.link.forward(letter)
        except WireError as error:
            raise failures.refused(
                f"this cannot be sent to the lab: {error}",
                "pass fewer arguments, or larger ones (stacked, or as handles: pw.device_put)",
            ) from None
        except LinkClosed as error:
            raise PathwaysError(self.closed or _lost(str(error))) from None
        self.traffic.sent[op] += 1

    @property
    def dropped(self) -> bool:
        """Whether handles are gone of which nobody was told."""
        return bool(self._dropped)

    def take_dropped(self) -> list[int]:
        """Ids of handles that are gone; the caller sees to them from now on."""
        dropped: list[int] = []
        while self._dropped:
            try:
                found = self._dropped.popleft()
            except IndexError:
                break
            if not isinstance(found, Watch):
                dropped.append(found)
            elif (bundle := found.bundle) is None:
                dropped.append(found.id)
            elif (last := bundle.lost(found)) is not None:
                dropped.append(last)
            elif bundle.left == len(bundle.watches) - 1:
                self.thinned[bundle] = 0
        return dropped

    def forget(self, dropped: Iterable[int]) -> None:
        """Nobody has a handle to these buffers any more."""
        if known := self._forgotten(dropped):
            self._send("drop", {"buffers": known})

    def _forgotten(self, dropped: Iterable[int]) -> list[int]:
        return [i for i in dropped if self._buffers.pop(i, None) is not None]

    def disown(self, buffer: Buffer) -> None:
        """This buffer will never exist outside of a run."""
        self._buffers.pop(buffer.id, None)

    def _tick(self) -> None:
        if self.closed is None:
            self.reactor.call_later(_TICK, self._tick)  # first: whatever comes of this one
            with contextlib.suppress(PathwaysError):
                if self._dropped:
                    self.flush(drops=True)
                self.own_work.look()
                self.on_tick()
                self._witnesses.forget(self.registered.tidy())

    def release_slice(self, slice_id: SliceId) -> None:
        """Give a slice back, with everything that was registered for it."""
        self.registered.release(slice_id)
        self._witnesses.released(slice_id)
        if self.closed is None:
            self.send("release-slice", {"slice": slice_id})

    def submit(
        self,
        plan: Plan,
        inputs: Sequence[Buffer | None],
        arguments: Mapping[int, int],
        payload: Sequence[Bytes],
        tag: Tag | None = None,
        outputs: Sequence[Buffer] | None = None,
        dropped: Iterable[int] = (),
        parts: tuple[Plan, ...] = (),
    ) -> tuple[Buffer, ...]:
        """One run of a registered plan: exactly one message.  Its output buffers, pending.

        tag: what policies are told of it; None: what is said where this is called.
        outputs: those buffers, when they have been made already.
        dropped: nobody has a handle to these any more; inputs of the run may be among them.
        parts: plans that it was made of, one after the other, if it was.
        """
        identity = self.new_id("run")
        tag = (current() if tag is None else tag).over(self.tag)
        new = outputs is None  # nobody else knows them if this fails
        if outputs is None:
            outputs = [self.new_buffer() for _ in plan.outputs]
        witnesses = self._witnesses.of(plan, inputs)
        for buffer in outputs:
            buffer.run, buffer.witnesses = identity, witnesses
        outputs = tuple(outputs)
        # Fed ones are in use, and known to be, as long as a run reads them.
        waits = tuple(
            buffer
            for buffer in inputs
            if buffer is not None and (buffer.fed or buffer.run in self._runs)
        )
        run = self._runs[identity] = Run(identity, waits, outputs, parts or (plan,))
        self.steps += run.steps
        self.backlog.began(run.plans[0].slices, run.steps)
        fields = {
            "run": identity,
            "plan": plan.key,
            "inputs": [None if buffer is None else buffer.id for buffer in inputs],
            "outputs": [buffer.id for buffer in outputs],
            "priority": tag.priority or 0,
            "arguments": arguments,
        }
        if tag.data:
            fields["data"] = tag.data
        fields |= self.own_work.take()
        if known := self._forgotten(dropped):
            fields["dropped"] = known
        try:
            if self.racing.enter is not None:
                fields["race"] = self.racing.enter(identity, inputs)
                for buffer in outputs:
                    buffer.witnesses = frozenset()
            elif len(outputs) == 1 and (hear := self.expect(outputs[0])):
                fields["hear"] = run.hear = hear
            self.send("submit", fields, payload)
        except BaseException as error:
            self._take_run(identity)
            self.board.settle((run, *outputs), failures.not_sent(error))
            if new:
                self._forgotten([buffer.id for buffer in outputs])
            if known:
                with contextlib.suppress(PathwaysError):
                    self._send("drop", {"buffers": known})
            raise
        self.traffic.runs += 1
        return outputs

    @property
    def runs(self) -> tuple[Run, ...]:
        """Runs that were submitted and are not over."""
        return tuple(self._runs.values())

    def maker(self, buffer: Buffer) -> Run | None:
        """The run that makes a buffer, while it is not over."""
        return self._runs.get(buffer.run)

    @property
    def under_way(self) -> bool:
        """Whether a run was submitted that is not over."""
        return len(self._runs) > self._vouched

    def behind(self, buffer: Buffer) -> int:
        """The steps under way that were submitted after the run that makes *buffer*."""
        return sum([run.steps for run in self.runs if run.id > buffer.run and not run.vouched])

    @property
    def down(self) -> list[dict[str, Any]]:
        """Hosts without a device process: name, island, told (why), again (it is started)."""
        return list(self.topology["down"])

    def await_host(self, timeout: float) -> None:
        """Wait for the lab's first host: who makes the lab may still be at it.

        Raises PathwaysError when none comes within *timeout* seconds.  Ctrl-C gets through.
        """
        try:
            self.board.wait(
                lambda: bool(self.topology["islands"]) or self.closed is not None,
                timeout,
                "the first host",
            )
        except TimeoutError:
            raise failures.refused(
                f"no host has joined the lab within {timeout:g} s",
                "look into the logs of its Dask workers, start workers, or give a longer timeout",
            ) from None
        self.check()

    def make_room(self, plan: Plan) -> None:
        """Back-pressure: wait until the steps under way, and those of *plan*, are not too many.

        One run may always wait behind the running one, whatever its size, so that devices
        never idle between them.  Never in the reactor's thread.  Ctrl-C gets through.
        """
        most = max(0, _STEPS - len(plan.steps))
        if self.steps <= most:
            return
        if self.forked:
            self.check()
        few = min(most, _STEPS // 2)

        def room(steps: int) -> bool:
            return self.steps <= steps or len(self._runs) < 2 or self.closed is not None

        if not room(most):
            self.flush()
            self.board.wait(lambda: room(few), None, "room")

    def _take_run(self, identity: int) -> Run | None:
        run = self._runs.pop(identity, None)
        if run is not None:
            run.inputs = ()  # before anybody is told that it is over
            self.steps -= run.steps
            self.backlog.ended(time.monotonic(), run.plans[0].slices, run.steps)
            self._vouched -= run.vouched
            if run.hear:
                self.expect_no_more(run.outputs[0], run.hear)
        return run

    def vouch(self, buffer: Buffer) -> None:
        """All witnesses of a buffer say that it is there.  In the reactor's thread."""
        self.board.settle((buffer,), None)
        run = self._runs.get(buffer.run)
        if run is not None and not run.vouched and run.complete():
            run.vouched = True
            self._vouched += 1
            if not self.under_way:
                self.over()

    def cancel(self, buffers: Sequence[Buffer], *, earlier: bool = False) -> None:
        """Cancel what is not granted of the runs that make *buffers* and of what they wait for.

        earlier: also of runs that an earlier client of this name has submitted.
        """
        self.flush()
        others = [b.id for b in buffers if earlier and not (b.run or b.done)]
        seen: set[int] = set()
        todo = [buffer.run for buffer in buffers]
        while todo:
            run = self._runs.get(todo.pop())
            if run is not None and run.id not in seen:
                seen.add(run.id)
                todo += [buffer.run for buffer in run.inputs]
        if seen or others:
            self.send("cancel", {"runs": sorted(seen), "buffers": others})

    # --- receiving: in the reactor's thread ----------------------------------------

    def _message(
        self, link: Link, op: str, fields: dict[str, Any], buffers: list[memoryview]
    ) -> None:
        if link.peer.get("role") != "control":
            if self.on_data is not None:
                self.on_data(link, op, fields, buffers)
            return
        self.traffic.received[op] += 1
        handler = self._HANDLERS.get(op)
        if handler is not None:
            handler(self, fields)
        elif op == "answered":
            self.questions.answered(fields, buffers)
        elif op == "given":
            self._given(fields, buffers)

    def _resolved(self, fields: dict[str, Any]) -> None:
        for buffers, failure in fields["resolved"]:
            # Looked up once: another thread forgets what has no handle any more.
            known = filter(None, map(self._buffers.get, buffers))
            self.board.settle(known, None if failure is None else unpack(Failure, failure))

    def _run_ended(self, fields: dict[str, Any]) -> None:
        self._resolved(fields)
        run = self._take_run(fields["run"])
        if run is not None:
            failure = _failure(fields)
            # Outputs that nobody resolved do not stay open behind an ended run.
            open_ = [output for output in run.outputs if failure and not output.done]
            self.board.settle((run, *open_), failure)
            if not self.under_way:
                self.over()

    def _slice_bound(self, fields: dict[str, Any]) -> None:
        binding = unpack(SliceBinding, fields["binding"])
        self.following.bound(binding)
        self._witnesses.bound(binding)
        self.questions.bound(binding)

    def _refused(self, fields: dict[str, Any]) -> None:
        """Whatever was asked for does not happen: fail what hangs on it."""
        failure = unpack(Failure, fields["failure"])
        kind, _, number = str(fields["subject"]).partition(" ")
        identity = int(number) if number.isdecimal() else 0
        if kind == "run":
            if (run := self._take_run(identity)) is not None:
                self.board.settle((run, *run.outputs), failure)
        elif kind == "buffer":
            if (buffer := self._buffers.get(identity)) is not None:
                self.board.settle((buffer,), failure)
        elif kind == "slice":
            self.questions.refused(identity, failure)
        # Anything else (a function, a program) fails the runs that need it.

    def _closing(self, fields: dict[str, Any]) -> None:
        self._fail(_lost(fields["reason"], fields.get("remedy", ""), fields.get("details", "")))

    def _topology(self, fields: dict[str, Any]) -> None:
        self.topology, there = fields, fields["clients"]
        for key in [key for key in tuple(self.given) if key[0] not in there]:
            self.given.pop(key, None)
        self.board.settle((), None)

    def _given(self, fields: dict[str, Any], buffers: list[memoryview]) -> None:
        self.given[fields["client"], fields["name"]] = Gift(fields, bytes(buffers[0]))
        self.board.settle((), None)

    def _records(self, fields: dict[str, Any]) -> None:
        self.on_records(fields["records"])

    def _policy(self, fields: dict[str, Any]) -> None:
        self.policy = fields
        self.on_policy("policy", fields)

    def _policy_printed(self, fields: dict[str, Any]) -> None:
        self.on_policy("policy-printed", fields)

    _HANDLERS: dict[str, Callable[[Connection, dict[str, Any]], None]] = {  # noqa: RUF012
        "resolved": _resolved,
        "run-ended": _run_ended,
        "slice-bound": _slice_bound,
        "refused": _refused,
        "slice-waiting": lambda self, fields: self.questions.slice_waits(fields),
        "closing": _closing,
        "topology": _topology,
        "records": _records,
        "output": lambda self, fields: self.on_output(fields),
        "policy": _policy,
        "policy-printed": _policy_printed,
    }

    # --- the end --------------------------------------------------------------------

    def _link_closed(self, link: Link, reason: str) -> None:
        if link.peer.get("role") == "control":
            self._fail(_lost(reason))
        elif self.on_data_closed is not None:
            self.on_data_closed(link, reason)

    def _fail(self, failure: Failure) -> None:
        if self.closed is not None:
            return
        self.closed = failure
        self._settings.end()
        pending: list[Pending] = [
            *self._runs.values(),
            *self.questions.open,
        ]
        self._runs.clear()
        self._vouched = 0
        # A value that was there is gone with the lab as well.
        self.board.settle([*pending, *self._buffers.values()], failure)
        self.on_closed(failure)

    def leave_to_parent(self) -> None:
        """This process is a fork: everything refuses from now on, and nobody is told."""
        if self.closed is None:
            self.closed = failures.refused(
                f"this lab belongs to process {os.getppid()}, and process {os.getpid()} is a fork"
                " of it: it has none of the threads that read the lab's links",
                "pass arrays (handle.result()) to forked processes, or let them start or join a"
                " lab of their own",
                line=Line(),
            ).failure
        self.forked, self.steps = True, _STEPS + 1  # asked where there is no room: calls are fast
        self.flush = lambda drops=False: None
        for entry in (*self._runs.values(), *self.questions.open, *self._buffers.values()):
            entry.failure, entry.done = self.closed, True
        self._runs.clear()

    def close(self, reason: str = "the lab was closed", remedy: str = "") -> None:
        """Leave the lab: the control plane frees everything of this kernel."""
        self._fail(_lost(reason, remedy))
        self.reactor.close(reason)


def _failure(fields: dict[str, Any]) -> Failure | None:
    packed = fields.get("failure")
    return None if packed is None else unpack(Failure, packed)


def _lost(reason: str, remedy: str = "", details: str = "") -> Failure:
    return failures.failure(
        "lost",
        f"the lab is gone: {reason}",
        remedy or "start a new one with pw.start(), or pw.connect(...) again",
        line=Line(),
        details=details,
    ).failure
