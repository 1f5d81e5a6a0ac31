"""A device process at work: messages in, launches and messages out.

Problem: grants, code, uploads, pieces of transfers and fetches arrive on many
links, while lanes launch, compilers compile and shards move, each in threads
of their own; one place must know what belongs to what.

How: the reactor's thread owns the :class:`Launcher` and everything here.  What
other threads find out is posted to it; what the launcher decides is carried
out by lanes, exchange and links, none of which is ever waited for.

Rule for maintainers: no decision about order, failure or memory here, it is in
the launcher; no computation and no large copy in this thread.  What goes wrong
with one step is the failure of that step; any other exception here is a bug
and ends the process, so that the control plane sees a lost host, not a silent
one.

Paper: section 4.5.
"""

from __future__ import annotations

import os
import time
import traceback
from collections import deque
from collections.abc import Callable
from typing import Any, ClassVar

from pathways_lab.core.errors import Failure, PathwaysError
from pathways_lab.core.messages import Grant
from pathways_lab.core.program import Plan
from pathways_lab.core.topology import SliceBinding
from pathways_lab.runtime import binding as bindings
from pathways_lab.runtime.actions import (
    Action,
    Broken,
    CancelReceive,
    Key,
    Launch,
    LaunchRow,
    Receive,
    Refuse,
    Report,
    RunOver,
    Send,
    Serve,
)
from pathways_lab.runtime.codec import pack, unpack, unpack_fields
from pathways_lab.runtime.courses import Courses
from pathways_lab.runtime.desk import Desk, Fetch
from pathways_lab.runtime.devices import IslandRuntime, Place, lane_of
from pathways_lab.runtime.exchange import Arrived, Exchange
from pathways_lab.runtime.formation import Formation
from pathways_lab.runtime.functions import Code, Compiler, Executable
from pathways_lab.runtime.gangs import GangJob, Work, progress
from pathways_lab.runtime.joining import Joint
from pathways_lab.runtime.lanes import Job, Lane, Lanes, Times
from pathways_lab.runtime.launch import Launcher
from pathways_lab.runtime.link import Link, LinkClosed
from pathways_lab.runtime.output import Output
from pathways_lab.runtime.peers import Peers
from pathways_lab.runtime.reactor import Reactor
from pathways_lab.runtime.reports import Reports
from pathways_lab.runtime.rows import Piece
from pathways_lab.runtime.spanning import SpanningCpuRuntime
from pathways_lab.runtime.story import Story
from pathways_lab.runtime.tenants import Tenants, failure_of

_CUT_SECONDS = 0.25
STUCK_SECONDS = 10.0
"""How long a gang may go on in a formation that has ended, before its host is restarted."""
_JOIN_SECONDS = 30.0
"""How long the control plane may take to be there: in a new lab it starts meanwhile."""
_PATIENCE = 0.001
"""Seconds for which an end that nobody waits for may stay unseen while gangs end faster."""

Buffers = list[memoryview]
Fields = dict[str, Any]
Ending = GangJob | Piece


class HostRim:
    """Everything that one device process does.

    fatal(reason): end the process.
    client_context, server_context: TLS of its links, or None.
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
    ) -> None:
        self.name = name
        self.island = island
        self.runtime = runtime
        self.launcher = Launcher(name, island, runtime.memory, rows=True)
        self.reactor = Reactor("host", self._message, self._closed, on_error=fatal)
        self._fatal = fatal
        self._control: Link | None = None
        self._context = client_context
        self._todo: deque[Action] = deque()
        self._doing = False
        self._handed: dict[str, list[Ending]] = {}
        self._flying: dict[Key, GangJob] = {}
        self._ended: deque[tuple[Ending, Times, Failure | None]] = deque()
        self._poked = False
        self._looked = 0.0
        self._doomed: dict[Key, Failure] = {}
        self._output = Output(self._printed)
        self._output.install()
        self._lanes = Lanes(self._thread_died)
        self.compiler = Compiler(name, self._output, self._thread_died)
        self._peers = Peers(self.reactor, data_key, name, context=client_context)
        self.exchange = Exchange(
            name,
            self._peers,
            self._clock,
            self.reactor.call_soon,
            self._sent,
            self._arrived,
            self._thread_died,
        )
        self.reports = Reports(
            name,
            island,
            self._clock,
            self.tell_control,
            self.reactor.call_later,
            lambda: self.launcher.idle,
            self.launcher.memory,
            self._look,
            lambda ended: self._story.gangs(ended),
        )
        self.tenants = Tenants(
            name,
            runtime,
            self.launcher,
            self.compiler,
            self.reactor.call_soon,
            lambda slice_id: self.desk.opened(slice_id),
            self._compiled,
        )
        self.desk = Desk(
            name,
            data_key,
            self.launcher,
            self.exchange,
            self.tenants.where,
            self._carry_out,
            self._resident,
        )
        self._story = Story(name, island, runtime.emulated, self._offset)
        self._courses = Courses(name, self._story, self._piece_over)
        bindings.resolve_with(self.tenants.device)
        self.data_address = self.reactor.listen(
            data_listen,
            data_key,
            lambda link, hello: self.desk.meet(link, hello),
            tag="data",
            context=server_context,
            bulk=True,
        )

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
                **hello,
            },
            _JOIN_SECONDS,
            name="control",
            tag="control",
            context=self._context,
            retry=True,
        )

    def _offset(self) -> float:
        """Seconds to add to this process's clock to get the control plane's."""
        return self._control.clock_offset if self._control is not None else 0.0

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

    # --- messages -----------------------------------------------------------------------

    def _message(self, link: Link, op: str, fields: Fields, buffers: Buffers) -> None:
        if link.tag == "control":
            self._from_control[op](self, fields, buffers)
        else:
            # Others may be wrong: that closes their link and nothing else.
            try:
                self._from_data[op](self, link, fields, buffers)
            except (KeyError, TypeError, ValueError) as error:
                reason = f"{self.name} refused {op[:40]!r}: {error!r}"
                link.close(reason)
                self.tell_control("rejected", {"client": link.holder, "reason": reason[:500]})
        if self._ended:
            self._gangs_over()
        self.reports.due()

    def _printed(self, run: int, device: int, text: str) -> None:
        """User code printed; in any thread."""
        self.tell_control("output", {"run": run, "device": device, "text": text})

    # --- slices, formations, functions ------------------------------------------------------

    def _bind(self, fields: Fields, _: Buffers) -> None:
        self.tenants.bind(unpack(SliceBinding, fields["binding"]))

    def _unbind(self, fields: Fields, _: Buffers) -> None:
        actions, lane = self.tenants.unbind(fields["slice"])
        self._carry_out(actions)
        if lane:
            self._lanes.drop(lane)

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
        if joint is not None:
            lane = self._lanes.find(lane_of(joint.formation.footprint))
            oldest = lane.oldest if lane is not None else None
            if oldest is not None or joint.stuck:
                self.reactor.call_later(STUCK_SECONDS, self._stuck, joint, lane, oldest, reason)
                self.reactor.call_later(_CUT_SECONDS, self._cut, joint, lane)

    def _cut(self, joint: Joint, lane: Lane | None) -> None:
        """What was being launched when its connections were cut may have missed it."""
        oldest = lane.oldest if lane is not None else None
        if isinstance(oldest, GangJob) and oldest.doomed is not None:
            joint.sever()
            self.reactor.call_later(_CUT_SECONDS, self._cut, joint, lane)

    def _stuck(self, joint: Joint, lane: Lane | None, oldest: Job | None, reason: str) -> None:
        """What ended some time ago should have let go of its thread.  Else only the end helps."""
        text = f"{joint.formation} ended ({reason}), but some time later"
        if oldest is not None and lane is not None and lane.oldest is oldest:
            self._fatal(f"{text} its lane is still busy with a gang of it")
        elif joint.stuck and self.tenants.none_here:
            self._fatal(f"{text} a thread still waits to be connected")
        elif joint.stuck:
            # It only keeps a thread: no reason to cost anybody's slice.
            self.reactor.call_later(STUCK_SECONDS, self._stuck, joint, lane, None, reason)

    def _restart(self, fields: Fields, _: Buffers) -> None:
        """The control plane has given this process up."""
        self._fatal(fields["reason"])

    def _reform(self, fields: Fields, _: Buffers) -> None:
        """The hosts of a formation wait for each other: it ends, and is formed again.

        What was granted before goes with the old one, on all hosts alike.
        """
        failure, slices = unpack(Failure, fields["failure"]), fields["slices"]
        for gang in self.launcher.gangs():
            if gang.call.slice in slices:
                key = (gang.run.id, gang.index)
                if (job := self._flying.get(key)) is not None:
                    job.doomed = failure
                else:
                    self._doomed[key] = failure
        if isinstance(self.runtime, SpanningCpuRuntime):
            # First: who waits for the old formation shall wait for the new one.
            for slice_id in slices:
                self.runtime.span(slice_id, unpack(Formation, fields["formation"]))
        self._end_formation(fields["number"], failure.message)
        if isinstance(self.runtime, SpanningCpuRuntime):
            lane, reforming = self.tenants.reform(slices, self._output)
            self._lanes.put(lane, reforming)

    def _progress(self, fields: Fields, _: Buffers) -> None:
        """What has this host launched, and what has it not?"""
        gangs = progress(self.launcher.gangs(), self._flying)
        seen = [pack(s) for s in (*gangs, *self._courses.progress(self.launcher.rows()))]
        self.tell_control("progress", {"number": fields["number"], "gangs": seen})

    def _prepare(self, fields: Fields, buffers: Buffers) -> None:
        try:
            code = Code.from_wire(fields, buffers[0])
        except (KeyError, TypeError, ValueError, IndexError) as error:
            text = "the description of a compiled function is malformed"
            failure = failure_of(text, error, self.name)
            self.reports.compiled(fields["function"], fields["slice"], 0, failure)
            return
        self.tenants.prepare(code)

    def _compiled(
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
            self.reports.record(self._story.compiled(binding, code, start, end, failure))
        self.reports.compiled(code.function, code.slice, temporary, failure)
        self.reports.due()

    # --- programs and grants ----------------------------------------------------------------

    def _program(self, fields: Fields, _: Buffers) -> None:
        for packed in fields["bindings"]:
            self.tenants.bind(unpack(SliceBinding, packed))
        self.launcher.program(unpack(Plan, fields["plan"]))

    def _grant(self, fields: Fields, buffers: Buffers) -> None:
        received = time.monotonic()
        grant = unpack_fields(Grant, fields)
        plan = self.launcher.plan(grant.plan)
        arguments: dict[int, Any] = {}
        for position, place in (fields.get("arguments") or {}).items():
            arguments[int(position)] = self.tenants.argument(plan, int(position), buffers[place])
        work = Work(received, time.monotonic(), free=bool(fields.get("free", False)))
        actions = self.launcher.grant(grant, arguments, work, free=work.free)
        work.ended = time.monotonic()
        self._carry_out(actions)

    def _abort(self, fields: Fields, _: Buffers) -> None:
        text = f"run {fields['run']} was ended by the control plane"
        failure = Failure("cancelled", text, host=self.name)
        self._carry_out(self.launcher.abort(fields["run"], failure))

    def _free(self, fields: Fields, _: Buffers) -> None:
        buffers = tuple(fields["buffers"])
        self.desk.free(buffers)
        self._carry_out(self.launcher.free(buffers))

    def _clients(self, fields: Fields, _: Buffers) -> None:
        self.desk.clients(fields["newest"], fields["present"], self.reactor.links)

    # --- what the launcher decided --------------------------------------------------------

    def _carry_out(self, actions: list[Action]) -> None:
        """Do what was decided, in order, also what is decided meanwhile."""
        self._todo.extend(actions)
        if self._doing:
            return
        self._doing = True
        while self._todo:
            action = self._todo[0]
            try:
                self._do(action)
            except Exception as error:
                self._could_not(action, error)
            self._todo.popleft()
        self._doing = False
        for lane, jobs in self._handed.items():
            self._lanes.put(lane, *jobs)
        self._handed.clear()
        self.reports.due()

    def _do(self, action: Action) -> None:
        match action:
            case Launch():
                self._launch(action)
            case LaunchRow():
                self._launch_row(action)
            case Send() | Receive():
                self._exchange(action)
            case CancelReceive(key=key):
                self.exchange.submit(self.exchange.cancel, key)
            case Report(key=key, seconds=seconds, failure=failure):
                self.reports.finished(*key, seconds, failure)
            case RunOver(run=run):
                self.reports.run_over()
                self.exchange.submit(self.exchange.run_over, run)
            case Serve():
                self.desk.serve(action)
            case Refuse(fetch=Fetch() as fetch, failure=failure):
                self.desk.refuse(fetch, failure)
            case Broken(message=message):
                self._fatal(message)

    def _could_not(self, action: Action, error: Exception) -> None:
        """One step cannot be done here: that step fails."""
        match action:
            case Launch(key=key, call=call):
                failure = failure_of(f"{call.name} cannot be launched", error, self.name, call.line)
                self._carry_out(self.launcher.done(key, 0.0, failure))
            case LaunchRow(run=run, stretch=stretch):
                text, call = "a program cannot be launched", stretch.first
                failure = failure_of(text, error, self.name, call.line)
                key = (run, stretch.parts[0].index)
                ends = [(0.0, failure)] * len(stretch.parts)
                self._carry_out(self.launcher.row_done(key, ends))
            case Send(key=key, node=node):
                failure = failure_of(f"{node.name} cannot be sent", error, self.name, node.line)
                self._carry_out(self.launcher.sent(key, failure))
            case Receive(key=key, node=node):
                failure = failure_of(f"{node.name} cannot be received", error, self.name, node.line)
                self._carry_out(self.launcher.received(key, failure=failure))
            case _:
                raise error

    def _exchange(self, action: Send | Receive) -> None:
        """One end of a transfer; its devices may still be being opened."""
        sending = isinstance(action, Send)
        end = action.node.input if sending else action.node.output
        slice_id = action.plan.values[end].slice
        assert slice_id is not None
        work: Callable[..., None] = self.exchange.send if sending else self.exchange.receive

        def start(place: Place | Failure) -> None:
            if isinstance(place, Failure):
                self._could_not(action, PathwaysError(place))
            else:
                self.exchange.submit(
                    work, action, place, self.tenants.route(action.plan, action.node)
                )

        self.tenants.when_open(slice_id, start)

    def _launch(self, launch: Launch) -> None:
        call = launch.call
        place = self.tenants.place(call.slice)
        executable = self.tenants[call.slice].executables.get(call.function)
        now = time.monotonic()
        job = GangJob(launch, place, executable, self.name, self._meet, self._over, now)
        job.doomed = self._doomed.pop(launch.key, None) if self._doomed else None
        self._flying[launch.key] = job
        self._handed.setdefault(launch.lane, []).append(job)

    def _launch_row(self, launch: LaunchRow) -> None:
        slice_id = launch.stretch.first.slice
        executables = self.tenants[slice_id].executables
        piece = self._courses.launch(launch, self.tenants.place(slice_id), executables)
        self._handed.setdefault(launch.lane, []).append(piece)

    def _meet(self, job: GangJob) -> None:
        """Before the first launch of a function on several hosts.  In the lane's thread."""
        call = job.launch.call
        self.runtime.meet(job.place.binding, f"{call.slice}/{call.function}")

    def _over(self, job: GangJob, times: Times, failure: Failure | None) -> None:
        """In the lane's thread.  Waking the reactor costs more than a small gang: not always."""
        unknown = failure if job.doomed is None else None
        if unknown is not None and isinstance(self.runtime, SpanningCpuRuntime):
            failure = self.runtime.explained(job.place.binding, unknown, self._broken)
        self._end(job, times, failure, job.launch.awaited)

    def _piece_over(self, piece: Piece, times: Times) -> None:
        """The same of gangs of a row."""
        self._end(piece, times, None, piece.awaited)

    def _end(self, job: Ending, times: Times, failure: Failure | None, awaited: bool) -> None:
        self._ended.append((job, times, failure))
        late = times.end - self._looked > _PATIENCE
        if not self._poked and (awaited or late or self.launcher.memory.short):
            self._poked = True
            self.reactor.call_soon(self._gangs_over)

    def _broken(self, number: int, reason: str) -> None:
        """The hosts of a formation live, but its connections do not.  In the lane's thread."""
        self.tell_control("broken", {"number": number, "reason": reason})

    def _gangs_over(self) -> None:
        """See to the gangs that have ended."""
        self._poked = False
        self._looked = time.monotonic()
        while self._ended:
            job, times, failure = self._ended.popleft()
            if isinstance(job, Piece):
                self._todo += self._courses.over(job, times, self.launcher, self.reports)
                continue
            key = job.launch.key
            del self._flying[key]
            actions = self.launcher.done(key, times.end - times.start, failure)
            why = next(a.failure for a in actions if isinstance(a, Report) and a.key == key)
            if job.laps:
                for lap in self._story.laps(job, why is not None):
                    self.reports.record(lap)
            else:
                self.reports.ended(self._story.ended(job, times, why is not None))
            self._todo.extend(actions)
        self._carry_out([])

    def _look(self) -> None:
        """Nobody was in a hurry with what ended meanwhile, and with what goes on."""
        if self._ended:
            self._gangs_over()
        for job in self._flying.values():
            if job.called and not job.announced:
                job.announced = True
                self.reports.record(self._story.launched(job))
        for told in self._courses.launched():
            self.reports.record(told)

    # --- transfers --------------------------------------------------------------------------

    def _piece(self, link: Link, fields: Fields, buffers: Buffers) -> None:
        if link.peer["role"] != "host":
            raise ValueError("only hosts send pieces")
        if type(fields["run"]) is not int or type(fields["step"]) is not int:
            raise ValueError("run and step are not numbers")
        data = buffers[0] if buffers else memoryview(b"")
        self.exchange.submit(self.exchange.piece, fields, data)

    def _resident(self, buffer: int) -> None:
        """An upload is complete."""
        self.reports.resident(buffer)
        self.reports.due()

    def _sent(self, action: Send, failure: Failure | None, start: float, nbytes: int) -> None:
        client = self.tenants.client(action.source.value.slice)
        self.reports.record(self._story.sent(action, start, self._clock(), nbytes, client))
        self._carry_out(self.launcher.sent(action.key, failure))

    def _arrived(self, arrived: Arrived) -> None:
        action = arrived.action
        client = self.tenants.client(action.target.value.slice)
        self.reports.record(self._story.arrived(arrived, self._clock(), client))
        self._carry_out(self.launcher.received(action.key, arrived.payload, arrived.failure))

    _from_control: ClassVar[dict[str, Callable[[HostRim, Fields, Buffers], None]]] = {
        "bind": _bind,
        "unbind": _unbind,
        "span": _span,
        "form": _form,
        "dissolve": _dissolve,
        "restart": _restart,
        "reform": _reform,
        "progress": _progress,
        "prepare": _prepare,
        "program": _program,
        "grant": _grant,
        "free": _free,
        "abort": _abort,
        "peers": lambda self, fields, _: self._peers.members(dict(fields["peers"])),
        "clients": _clients,
        "pulse": lambda self, *_: self.tell_control("pulse", {}),
    }
    _from_data: ClassVar[dict[str, Callable[[HostRim, Link, Fields, Buffers], None]]] = {
        "piece": _piece,
        "put": lambda self, *letter: self.desk.put(*letter),
        "fetch": lambda self, *letter: self.desk.fetch(*letter),
    }
