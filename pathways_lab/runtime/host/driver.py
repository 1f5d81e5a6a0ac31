"""A device process at work: messages in, launches and messages out.

Problem: grants, code, uploads, pieces of transfers and fetches arrive on many
links, while device queues launch, compilers compile and shards move, each in threads
of their own; one place must bring them together.

How: the reactor's thread owns the :class:`Launcher` and everything here.  Other
threads post their findings to it.  Device queues, the transfer engine and links carry
out the launcher's actions, and the driver never waits for them.

Rule for maintainers: no decision about order, failure or memory here, it is in
the launcher; no launch and no transfer either, that is the :class:`Carrier`'s;
no computation and no large copy in this thread.  An error of one step
is the failure of that step; any other exception here is a bug and ends the
process, so that the control plane sees a lost host, not a silent one.

Paper: section 4.5.
"""

from __future__ import annotations

import math
import os
import ssl
import time
import traceback
from collections.abc import Callable
from typing import Any, ClassVar

from pathways_lab.core.errors import Failure
from pathways_lab.core.messages import Grant
from pathways_lab.core.program.folding import Folded, laid_out
from pathways_lab.core.program.program import SliceId
from pathways_lab.core.slices.topology import SliceBinding
from pathways_lab.executor.actions import Action
from pathways_lab.executor.launcher import Launcher
from pathways_lab.runtime import virtual_devices as bindings
from pathways_lab.runtime.data_messages import DATA, Parts
from pathways_lab.runtime.devices import IslandRuntime, lane_of
from pathways_lab.runtime.host.client_io import Desk, unfinished_bytes
from pathways_lab.runtime.host.compile_marks import NO_NOTES, Notes
from pathways_lab.runtime.host.compiler import Code, Compiler, Executable
from pathways_lab.runtime.host.device_queues import Job, Lane, Lanes
from pathways_lab.runtime.host.effects import Carrier
from pathways_lab.runtime.host.host_records import Story
from pathways_lab.runtime.host.local_slices import Tenants, failure_of
from pathways_lab.runtime.host.migration import Parking
from pathways_lab.runtime.host.peers import Peers
from pathways_lab.runtime.host.reports import Reports
from pathways_lab.runtime.host.segment_job import Piece, Work
from pathways_lab.runtime.host.transfer_engine import Exchange
from pathways_lab.runtime.host.user_output import Output
from pathways_lab.runtime.islands.group_member import Joint
from pathways_lab.runtime.islands.multi_host_runtime import SpanningCpuRuntime
from pathways_lab.runtime.islands.process_group import Formation
from pathways_lab.timeline.records import Sample
from pathways_lab.transport.auth import HOSTS
from pathways_lab.transport.codec import pack, unpack, unpack_fields
from pathways_lab.transport.edge import parsed
from pathways_lab.transport.framing import Limits
from pathways_lab.transport.handshake import SILENCE, STREAM, Refused, tune
from pathways_lab.transport.link import Link, LinkClosed
from pathways_lab.transport.reactor import Reactor

_CUT_SECONDS = 0.25
STUCK_SECONDS = 10.0
"""How long a gang may go on in a formation that has ended, before its host is restarted."""
_STAND_BACK = 0.01
"""Seconds for which lanes are expected to read again; a lane that will not says so."""
_HAND_OVER_SECONDS = 5.0
"""How long a host that leaves waits for clients to take what they asked for."""
_JOIN_SECONDS = 30.0
"""How long the control plane may take to be there: in a new lab it starts meanwhile."""
_LOOK_SECONDS = 5.0
"""Between two looks at the bound of this host's clock, and at the connections of collectives."""
_CHANGED = 1.25
"""A bound of so many times the last one, or one part of so many, is recorded."""
_HEADER = 4 << 20
"""Bytes of the fields of one message at the data door: decoded, they take some fifty times that."""

Buffers = list[memoryview]
Fields = dict[str, Any]
Follows = list[Action] | None
"""Actions to which a message leads."""


class HostRim:
    """Everything that one device process does.

    fatal(reason): end the process.  retire(reason): end it for good.
    client_context, server_context: TLS of its links, or None.
    notes: of what it compiles.  contact: the host at which others reach it, where that is not the
        one at which it listens.
    """

    def __init__(
        self,
        name: str,
        island: str,
        runtime: IslandRuntime,
        data_key: bytes,
        data_listen: str,
        fatal: Callable[[str], None],
        *,
        client_context: Any = None,
        server_context: Any = None,
        retire: Callable[[str], None] = lambda reason: None,
        notes: Notes = NO_NOTES,
        contact: str = "",
    ) -> None:
        self._retire = retire
        self.name = name
        self.island = island
        self.runtime = runtime
        self.launcher = Launcher(name, island, runtime.memory)
        self.reactor = Reactor(
            "host", self._message, self._closed, on_error=fatal, awake=True, stand_back=_STAND_BACK
        )
        self._fatal = fatal
        self._control: Link | None = None
        self._context = client_context
        self._output = Output(self._printed)
        self._output.install()
        self._lanes = Lanes(self._thread_died, self.reactor)
        self.compiler = Compiler(name, self._output, self._thread_died, notes=notes)
        self._peers = Peers(self.reactor, data_key, name, context=client_context)
        self._story = Story(name, island, runtime.emulated, self._offset)
        self.reports = Reports(
            name, island, self._clock, self.tell_control, self._later, self.launcher, self._story
        )
        self.tenants = Tenants(
            name, runtime, self.launcher, self.compiler, self._lanes, self,
            client_context is not None,
        )  # fmt: skip
        self.exchange = Exchange(name, self._peers, self._clock, self.post, self._thread_died)
        self.desk = Desk(
            name, data_key, self.launcher, self.tenants, self.exchange, self._peers, self.reports,
            runtime.count,
        )  # fmt: skip
        self._carrier = Carrier(
            name, self.launcher, self.tenants, self._lanes, self.exchange, self.desk, self._story,
            self.reports, self.reactor.call_here,
        )  # fmt: skip
        self._parking = Parking(
            name, self.launcher, self.tenants, self.desk, self.exchange, self.reports
        )
        bindings.resolve_with(self.tenants.device)
        if isinstance(runtime, SpanningCpuRuntime):
            runtime.reach = self._peers.stream
        self.listens = self.reactor.listen(
            data_listen,
            data_key,
            self._meet,
            tag="data",
            context=server_context,
            bulk=True,
            limits=Limits(
                _HEADER, body=max(unfinished_bytes(runtime.memory), runtime.memory * runtime.count)
            ),
        )
        port = self.listens.rpartition(":")[2]
        self.data_address = f"tcp://{contact}:{port}" if contact else self.listens

    def start(self, control: str, key: bytes, **hello: Any) -> None:
        """Join the lab at the control plane's address, and work until the process ends."""
        self.reactor.start()
        self._control = self.reactor.connect(
            control,
            key,
            {
                "role": "host",
                "name": self.name,
                "island": self.island,
                "devices": self.runtime.count,
                "kind": self.runtime.kind,
                "memory": self.runtime.memory,
                "pid": os.getpid(),
                "data_address": self.data_address,
                "emulated": self.runtime.emulated,
                "make": self.runtime.make,
                **hello,
            },
            _JOIN_SECONDS,
            name="control",
            tag="control",
            context=self._context,
            holder=HOSTS,
            retry=True,
        )
        self._peers.silence = self._control.peer.get("silence", SILENCE)
        self._control.bear(self._peers.silence)
        self._control.beat(lambda _: None)
        self._tell_clock(self._control, told=math.inf)
        self._bear_silence()

    def _bear_silence(self) -> None:
        if isinstance(self.runtime, SpanningCpuRuntime):
            self.runtime.bear(self._peers.silence)
            self.reactor.call_later(_LOOK_SECONDS, self._bear_silence)

    def _tell_clock(self, control: Link, told: float) -> None:
        """Record how far off this host's times may be, when that has changed a lot."""
        error = control.clock.error(time.monotonic())
        if not told / _CHANGED <= error <= told * _CHANGED:
            told = error
            self.reports.record(Sample("clock", self._clock(), error, self.island, self.name))
        if not control.clock.one:
            self.reactor.call_later(_LOOK_SECONDS, self._tell_clock, control, told)

    def _offset(self) -> float:
        """Seconds to add to this process's clock to get the control plane's."""
        return self._control.clock.offset if self._control is not None else 0.0

    def _clock(self) -> float:
        """The control plane's clock."""
        return time.monotonic() + self._offset()

    def tell_control(self, op: str, fields: Fields) -> None:
        """Send to the control plane, from any thread; nothing when it is gone."""
        if self._control is not None:
            try:
                self._control.send(op, fields)
            except LinkClosed:
                return

    def _meet(self, link: Link, hello: Fields) -> Fields:
        """Somebody has proved a key of the data door.  Raises Refused."""
        if hello.get("role") != STREAM:
            return self.desk.meet(link, hello)
        runtime = self.runtime
        if link.holder or not link.certified or not isinstance(runtime, SpanningCpuRuntime):
            raise Refused("collectives come from hosts, with a certificate, to CPU devices")

        def take(sock: ssl.SSLSocket) -> None:
            tune(sock, self._peers.silence)
            runtime.admit(hello.get("number"), link.name, sock)

        link.taker = take
        return {"role": "host", "name": self.name}

    # --- ends ---------------------------------------------------------------------------

    def _thread_died(self, error: BaseException) -> None:
        self._fatal("".join(traceback.format_exception(error)))

    def _closed(self, link: Link, reason: str) -> None:
        if link.tag == "control":
            return self._fatal(f"the control plane is gone: {reason}")
        self.desk.closed(link)
        if link.peer["role"] == "host":
            known = [key for key, _ in self.launcher.unfinished()]
            self.exchange.submit(self.exchange.peer_lost, link.name, reason, known)

    # --- what happens here, and what follows ----------------------------------------------

    def post(self, function: Callable[..., list[Action] | None], *args: Any) -> None:
        """Call it in the reactor's thread, and carry out what it returns.  From any thread."""
        self.reactor.call_soon(self._follow, function, *args)

    def _follow(self, function: Callable[..., list[Action] | None], *args: Any) -> None:
        self._carrier.carry_out(function(*args) or [])

    def _later(self, seconds: float, function: Callable[[], None]) -> None:
        """Call it in the reactor's thread, after a look at what has ended by then."""
        self.reactor.call_later(seconds, self._on_time, function)

    def _on_time(self, function: Callable[[], None]) -> None:
        self._carrier.look()
        function()

    # --- messages -----------------------------------------------------------------------

    def _message(self, link: Link, op: str, fields: Fields, buffers: Buffers) -> None:
        if link.tag == "control":
            if actions := self._from_control[op](self, fields, buffers):
                self._carrier.carry_out(actions)
        else:
            self._from_data(link, op, fields, buffers)
        if self._carrier.unseen:
            self._carrier.see_ended()
        self.reports.due()

    def _from_data(self, link: Link, op: str, fields: Fields, buffers: Buffers) -> None:
        """Others may be wrong: that closes their link and nothing else."""
        try:
            message = parsed(DATA, op, fields, buffers)
            if actions := self.from_data[op](self, link, message, buffers):
                self._carrier.carry_out(actions)
        except Exception as error:
            # Any error but a ValueError is a fault of this process, and costs no more than one.
            done = "refused" if isinstance(error, ValueError) else "could not take"
            reason = f"{self.name} {done} {op[:40]!r}: {error!r}"
            link.close(reason)
            self.tell_control("rejected", {"client": link.holder, "reason": reason[:500]})

    def _printed(self, run: int, device: int, text: str) -> None:
        """User code printed; in any thread."""
        self.tell_control("output", {"run": run, "device": device, "text": text})

    # --- slices, formations, functions ------------------------------------------------------

    def _bind(self, fields: Fields, _: Buffers) -> None:
        self.tenants.bind(unpack(SliceBinding, fields["binding"]))

    def _unbind(self, fields: Fields, _: Buffers) -> list[Action]:
        actions = self.tenants.unbind(fields["slice"])
        self._forget_programs()
        return actions

    def _park(self, fields: Fields, _: Buffers) -> None:
        self._parking.park(fields["slice"])

    def _move(self, fields: Fields, _: Buffers) -> list[Action]:
        actions = self._parking.move(unpack(SliceBinding, fields["binding"]))
        self._forget_programs()
        return actions

    def _forget_programs(self) -> None:
        self._story.forget(lambda plan: self.launcher.plan(plan) is None)

    def _span(self, fields: Fields, _: Buffers) -> None:
        """A slice that is about to be bound computes together with other hosts."""
        if isinstance(self.runtime, SpanningCpuRuntime):
            self.runtime.span(fields["slice"], unpack(Formation, fields["formation"]))

    def _form(self, fields: Fields, _: Buffers) -> None:
        """All hosts of a formation meet now."""

        def done(number: int, failure: Failure | None) -> None:
            plain = None if failure is None else pack(failure)
            self.tell_control("joined", {"number": number, "failure": plain})

        if isinstance(self.runtime, SpanningCpuRuntime):
            self.runtime.form(fields["number"], fields["address"], done)

    def _dissolve(self, fields: Fields, _: Buffers) -> None:
        """A formation has ended."""
        self._end_formation(fields["number"], fields["reason"])

    def _end_formation(self, number: int, reason: str) -> None:
        if not isinstance(self.runtime, SpanningCpuRuntime):
            return
        joint = self.runtime.dissolve(number, reason)
        self.tell_control("left", {"number": number})
        if joint is not None:
            lane = self._lanes.find(lane_of(joint.formation.footprint))
            oldest = lane.oldest if lane is not None else None
            if oldest is not None or joint.stuck:
                self.reactor.call_later(STUCK_SECONDS, self._stuck, joint, lane, oldest, reason)
                self.reactor.call_later(_CUT_SECONDS, self._cut, joint, lane)

    def _cut(self, joint: Joint, lane: Lane | None) -> None:
        """Cut again: a gang that was being launched may have missed the first cut."""
        oldest = lane.oldest if lane is not None else None
        if isinstance(oldest, Piece) and oldest.doomed is not None:
            joint.sever()
            self.reactor.call_later(_CUT_SECONDS, self._cut, joint, lane)

    def _stuck(self, joint: Joint, lane: Lane | None, oldest: Job | None, reason: str) -> None:
        """A formation that ended should have let go of its thread by now.  Else the host ends."""
        text = f"{joint.formation} ended ({reason}), but some time later"
        if oldest is not None and lane is not None and lane.oldest is oldest:
            self._fatal(f"{text} its lane is still busy with a gang of it")
        elif joint.stuck and self.tenants.none_here:
            self._fatal(f"{text} a thread still waits to be connected")
        elif joint.stuck:
            # It only keeps a thread: no reason to cost anybody's slice.
            self.reactor.call_later(STUCK_SECONDS, self._stuck, joint, lane, None, reason)

    def _leave(self, fields: Fields, _: Buffers) -> None:
        """Nothing runs here any more; values that clients wait for are handed over first."""
        self.desk.hand_over(lambda: self._retire(fields["reason"]))
        # A client that hangs holds nobody up for long.
        self.reactor.call_later(_HAND_OVER_SECONDS, self._retire, fields["reason"])

    def _restart(self, fields: Fields, _: Buffers) -> None:
        """The control plane has given this process up."""
        self._fatal(fields["reason"])

    def _reform(self, fields: Fields, _: Buffers) -> None:
        """The hosts of a formation wait for each other: it ends, and is formed again.

        Gangs granted before go with the old one, on all hosts alike.
        """
        failure, slices = unpack(Failure, fields["failure"]), fields["slices"]
        self._carrier.doom(slices, failure)
        if isinstance(self.runtime, SpanningCpuRuntime):
            # First: who waits for the old formation shall wait for the new one.
            for slice_id in slices:
                self.runtime.span(slice_id, unpack(Formation, fields["formation"]))
        self._end_formation(fields["number"], failure.message)
        if isinstance(self.runtime, SpanningCpuRuntime):
            self.tenants.reform(slices, self._output)

    def _progress(self, fields: Fields, _: Buffers) -> None:
        """Tell which gangs this host has launched, and which not."""
        seen = [pack(each) for each in self._carrier.progress()]
        self.tell_control("progress", {"number": fields["number"], "gangs": seen})

    def _prepare(self, fields: Fields, buffers: Buffers) -> None:
        try:
            code = Code.from_wire(fields, buffers[0])
        except Exception as error:
            text = "the description of a compiled function is malformed"
            failure = failure_of(text, error, self.name)
            self.reports.compiled(fields["function"], fields["slice"], 0, failure)
            return
        self.tenants.prepare(code)

    def opened(self, slice_id: SliceId) -> list[Action]:
        """See :class:`pathways_lab.runtime.host.local_slices.Told`, as of the next three."""
        return self.desk.opened(slice_id)

    def broken(self, number: int, reason: str) -> None:
        self.tell_control("broken", {"number": number, "reason": reason})

    def compiled(
        self,
        binding: SliceBinding,
        code: Code,
        result: Executable | Failure,
        start: float,
        end: float,
    ) -> None:
        failure = result if isinstance(result, Failure) else None
        temporary = result.temporary if isinstance(result, Executable) else 0
        if end > start:
            self.reports.record(self._story.compiled(binding, code, start, end, result))
        if isinstance(result, Executable) and result.crossing:
            self.reports.crosses(code.function, code.slice, result.crossing)
        self.reports.compiled(code.function, code.slice, temporary, failure)

    def compiling(self, binding: SliceBinding, code: Code, start: float, waiting: int) -> None:
        self.reports.record(self._story.compiling(binding, code, start, waiting))

    # --- programs and grants ----------------------------------------------------------------

    def _program(self, fields: Fields, _: Buffers) -> None:
        for packed in fields["bindings"]:
            self.tenants.bind(unpack(SliceBinding, packed))
        self.launcher.program(laid_out(unpack(Folded, fields["plan"])))

    def _forget(self, fields: Fields, _: Buffers) -> None:
        functions = [(str(key), int(slice_id)) for key, slice_id in fields["functions"]]
        self.launcher.forget(fields["plans"], functions)
        self.tenants.forget(functions)
        self._forget_programs()

    def _grant(self, fields: Fields, buffers: Buffers) -> list[Action]:
        received = time.monotonic()
        grant = unpack_fields(Grant, {**fields, "host": self.name})
        plan = self.launcher.plan(grant.plan)
        arguments: dict[int, Any] = {}
        for position, place in (fields.get("arguments") or {}).items():
            arguments[position] = self.tenants.argument(plan, position, buffers, place)
        work = Work(received, time.monotonic(), free=bool(fields.get("free", False)))
        actions = self.launcher.grant(grant, arguments, work, free=work.free)
        if grant.prompt:
            self.reports.hurry(grant.run)
        if hear := fields.get("hear"):
            actions = [*self.desk.expect(grant.run >> 32, hear, grant.outputs[0]), *actions]
        work.ended = time.monotonic()
        return actions

    def _abort(self, fields: Fields, _: Buffers) -> list[Action]:
        text = f"run {fields['run']} was ended by the control plane"
        failure = Failure("cancelled", text, host=self.name)
        return self.launcher.abort(fields["run"], failure)

    def _free(self, fields: Fields, _: Buffers) -> list[Action]:
        buffers = tuple(fields["buffers"])
        self.desk.free(buffers)
        return self.launcher.free(buffers)

    def _clients(self, fields: Fields, _: Buffers) -> None:
        self.desk.clients(fields["newest"], fields["present"], self.reactor.links)

    # --- transfers --------------------------------------------------------------------------

    def _parts(self, link: Link, message: Parts, buffers: Buffers) -> None:
        if link.peer["role"] != "host":
            raise ValueError("only hosts send parts of transfers")
        pairs = message.pairs(buffers)
        nbytes = sum([len(data) for data in buffers])
        self.exchange.submit(self.exchange.parts, message, pairs, nbytes=nbytes)

    _from_control: ClassVar[dict[str, Callable[[HostRim, Fields, Buffers], Follows]]] = {
        "bind": _bind,
        "unbind": _unbind,
        "park": _park,
        "move": _move,
        "retire": _leave,
        "span": _span,
        "form": _form,
        "dissolve": _dissolve,
        "restart": _restart,
        "reform": _reform,
        "progress": _progress,
        "prepare": _prepare,
        "program": _program,
        "forget": _forget,
        "grant": _grant,
        "free": _free,
        "abort": _abort,
        "peers": lambda self, fields, _: self._peers.members(dict(fields["peers"])),
        "clients": _clients,
        "pulse": lambda self, *_: self.tell_control("pulse", {}),
    }
    from_data: ClassVar[dict[str, Callable[[HostRim, Link, Any, Buffers], Follows]]] = {
        "parts": _parts,
        "put": lambda self, *letter: self.desk.put(*letter),
        "fetch": lambda self, *letter: self.desk.fetch(*letter),
        "parted": lambda self, *letter: self.desk.parted(*letter),
    }
