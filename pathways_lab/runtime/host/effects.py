"""Carries out the actions of a host's launcher, and tells the launcher their ends.

Problem: to start a segment of gangs or a transfer is to hand it to a thread of the device
queues or of the transfer engine; their ends come back in those threads, faster than it
is worth to wake the reactor for.

How: actions are done in order, also those that follow from doing them, and a device
queue gets all gangs of one decision at once.  Ends are collected, and looked at
when a client, a step or the next grants wait for one, with the next message, or with
the next report: to look at each in the launch thread keeps the other hosts
of a collective waiting.

Rule for maintainers: in the reactor's thread, but for marked methods; nothing
here is ever waited for.  An error of one step is the failure of that step.

Paper: section 4.5 (asynchronous dispatch on the hosts).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from operator import sub
from typing import Any

import numpy as np

from pathways_lab.core.diagnosis.stall import Seen
from pathways_lab.core.errors import Failure, PathwaysError
from pathways_lab.executor.actions import (
    Action,
    Broken,
    CancelReceive,
    Decision,
    Receive,
    Refuse,
    Report,
    RunOver,
    Send,
    Serve,
)
from pathways_lab.executor.launcher import Launcher
from pathways_lab.executor.steps import Key, Segment
from pathways_lab.runtime import arrays
from pathways_lab.runtime.devices import Place
from pathways_lab.runtime.host.client_io import Desk, Fetch
from pathways_lab.runtime.host.device_queues import Lanes
from pathways_lab.runtime.host.host_records import Story
from pathways_lab.runtime.host.local_slices import Tenants, failure_of
from pathways_lab.runtime.host.reports import Reports
from pathways_lab.runtime.host.segment_job import Piece, SegmentJob, progress
from pathways_lab.runtime.host.transfer_engine import Arrived, Exchange

TOLD_AFTER = 0.005
"""A gang that runs longer (seconds) is reported when it launches, not only when it ends.  Shorter
bars are invisible in a live view."""
GLANCE = 0.002
"""Seconds between two looks at ends that grants wait for, while more of them are to come."""


def number_of(payload: Any) -> int:
    """The number that decides, of which every device has a copy."""
    array = arrays.resolved(payload)
    assert array is not None, "a value that is there"
    return int(np.asarray(array.addressable_shards[0].data))


@dataclass(eq=False, repr=False)
class Carrier:
    """Everything between one host's launcher and its threads.

    call_here(function): run it as the reactor does, at once where that is free.
    """

    _host: str
    _launcher: Launcher
    _tenants: Tenants
    _lanes: Lanes
    _exchange: Exchange
    _desk: Desk
    _story: Story
    _reports: Reports
    _call_here: Callable[..., None]
    _todo: deque[Action] = field(default_factory=deque, init=False)
    _doing: bool = field(default=False, init=False)
    _handed: dict[str, list[Piece]] = field(default_factory=dict, init=False)
    _flying: dict[Key, SegmentJob] = field(default_factory=dict, init=False)
    _ended: deque[Piece] = field(default_factory=deque, init=False)
    _poked: bool = field(default=False, init=False)
    _seen: float = field(default=0.0, init=False)
    _doomed: dict[Key, Failure] = field(default_factory=dict, init=False)

    @property
    def unseen(self) -> bool:
        """Whether something has ended that was not looked at yet."""
        return bool(self._ended)

    def doom(self, slices: list[int], failure: Failure) -> None:
        """The gangs of these slices that are not over shall not be launched, or end in failure."""
        for segment in self._launcher.segments():
            if segment.stretch.first.slice in slices:
                if (job := self._flying.get(segment.key)) is not None:
                    job.doomed = failure
                else:
                    self._doomed[segment.key] = failure

    def progress(self) -> Iterator[Seen]:
        """The gangs that this host has launched, and those that it has not."""
        return progress(self._launcher.segments(), self._flying)

    # --- what the launcher decided --------------------------------------------------------

    def carry_out(self, actions: list[Action]) -> None:
        """Do what was decided, in order, also what is decided meanwhile."""
        self._todo.extend(actions)
        if self._doing:
            return
        self._doing = True
        try:
            while self._todo:
                action = self._todo.popleft()
                try:
                    self._do(action)
                except Exception as error:
                    self._could_not(action, error)
        finally:
            self._doing = False
        launching = bool(self._handed)
        for lane, jobs in self._handed.items():
            self._lanes.put(lane, *jobs)
        self._handed.clear()
        # A report at once would be one before the launch, where this is the thread that launches.
        self._reports.due(now=not launching)

    def _do(self, action: Action) -> None:
        match action:
            case Segment():
                self._launch(action)
            case Send() | Receive():
                self._transfer(action)
            case CancelReceive(key=key):
                self._exchange.submit(self._exchange.cancel, key, nbytes=0)
            case Report():
                self._reports.over(action)
            case RunOver(run=run):
                self._reports.run_over(run)
                self._exchange.submit(self._exchange.run_over, run, nbytes=0)
            case Serve(fetch=Decision() as asked, slot=slot, reader=reader):
                more, case = divmod(number_of(slot.payload), asked.cases)
                self._reports.decided(asked.run, asked.value, case)
                if more > 0:
                    client = self._tenants.client(slot.value.slice)
                    self._reports.record(
                        self._story.counted(asked, more - 1, client, time.monotonic())
                    )
                self._todo += self._launcher.served(slot, reader)
            case Serve():
                self._todo += self._desk.serve(action)
                self._reports.told()
            case Refuse(fetch=Fetch() as fetch, failure=failure):
                self._desk.refuse(fetch, failure)
            case Broken(message=message):
                raise RuntimeError(message)

    def _could_not(self, action: Action, error: Exception) -> None:
        """One step cannot be done here: that step fails."""
        match action:
            case Segment(key=key, stretch=stretch):
                text, line = f"{stretch.first.name} cannot be launched", stretch.first.line
                failure = failure_of(text, error, self._host, line)
                count = len(stretch.parts)
                failures = dict.fromkeys(range(count), failure)
                self.carry_out(self._launcher.done(key, [0.0] * count, failures))
            case Send(key=key, node=node):
                text = f"{node.name} cannot be sent"
                failure = failure_of(text, error, self._host, node.line)
                self.carry_out(self._launcher.sent(key, failure))
            case Receive(key=key, node=node):
                failure = failure_of(
                    f"{node.name} cannot be received", error, self._host, node.line
                )
                self.carry_out(self._launcher.received(key, failure=failure))
            case Serve(slot=slot, reader=reader, fetch=Fetch() as fetch):
                self._desk.refuse(fetch, failure_of("a value cannot be read", error, self._host))
                self.carry_out(self._launcher.served(slot, reader))
            case _:
                raise error

    def _transfer(self, action: Send | Receive) -> None:
        """One end of a transfer; its devices may still be being opened."""
        sending = isinstance(action, Send)
        end = action.node.input if sending else action.node.output
        slice_id = action.plan.values[end].slice
        assert slice_id is not None
        engine = self._exchange
        work: Callable[..., None] = engine.send if sending else engine.receive
        done = self._sent if sending else self._arrived

        def start(place: Place | Failure) -> None:
            if isinstance(place, Failure):
                self._could_not(action, PathwaysError(place))
            else:
                route = self._tenants.route(action.plan, action.node)
                nbytes = action.plan.values[end].nbytes * len(place.numbers)
                engine.submit(work, action, place, route, done, nbytes=nbytes)

        self._tenants.when_open(slice_id, start)

    # --- gangs ------------------------------------------------------------------------------

    def _launch(self, segment: Segment) -> None:
        slice_id = segment.stretch.first.slice
        place, executables = self._tenants.place(slice_id), self._tenants[slice_id].executables
        job = SegmentJob(
            segment,
            place,
            executables,
            self._host,
            self._over,
            self._tenants,
            time.monotonic(),
        )
        job.doomed = self._doomed.pop(segment.key, None) if self._doomed else None
        self._flying[segment.key] = job
        self._handed.setdefault(segment.lane, []).append(Piece(job, 0))

    def _over(self, piece: Piece) -> None:
        """In the lane's thread.  To see to each end would cost more than a small gang."""
        # First: whoever begins to wait meanwhile looks for what has ended.
        self._ended.append(piece)
        if not self._poked and (
            piece.awaited or self._launcher.memory.short or self._hurries(piece.job.segment)
        ):
            self._poked = True
            self._call_here(self.see_ended)

    def _hurries(self, segment: Segment) -> bool:
        """Whether grants wait for an end of this run.

        Gangs shorter than :data:`GLANCE` are not seen one by one: now and then one is, and the last
        one of its lane.
        """
        if not self._reports.hurried(segment.run.id):
            return False
        if time.monotonic() - self._seen >= GLANCE:
            return True
        lane = self._lanes.find(segment.lane)
        return lane is None or lane.empty

    def see_ended(self) -> None:
        """See to the gangs that have ended."""
        self._poked, self._seen = False, time.monotonic()
        while self._ended:
            self._todo += self._see(self._ended.popleft())
        self.carry_out([])

    def _see(self, piece: Piece) -> list[Action]:
        """Some gangs of a segment are over: what the launcher wants done then."""
        job, ends = piece.job, piece.ends()
        taken = list(map(sub, ends.ends, ends.starts))
        actions = self._launcher.done(job.segment.key, taken, ends.failures)
        report = next(action for action in actions if isinstance(action, Report))
        spoiled = [step - report.first for step in report.failures]
        self._reports.ended(self._story.ended(job, ends, spoiled))
        job.over += len(taken)
        if job.over == len(job.parts):
            del self._flying[job.segment.key]
        return actions

    def look(self) -> None:
        """Nobody was in a hurry with what ended meanwhile, and with what goes on."""
        if self._ended:
            self.see_ended()
        before = time.monotonic() - TOLD_AFTER
        for job in self._flying.values():
            for at in range(max(job.announced, job.over), len(job.called)):
                if job.called[at] > before:
                    break
                job.announced = at + 1
                self._reports.record(self._story.launched(job, at))

    # --- transfers --------------------------------------------------------------------------

    def _sent(
        self, action: Send, failure: Failure | None, start: float, end: float, nbytes: int
    ) -> list[Action]:
        client = self._tenants.client(action.source.value.slice)
        self._reports.record(self._story.sent(action, start, end, nbytes, client))
        return self._launcher.sent(action.key, failure)

    def _arrived(self, arrived: Arrived) -> list[Action]:
        action = arrived.action
        client = self._tenants.client(action.target.value.slice)
        self._reports.record(self._story.arrived(arrived, client))
        return self._launcher.received(action.key, arrived.payload, arrived.failure)
