"""The figures of one way of doing the work, from a stretch of a timeline.

Problem: a comparison needs few numbers that mean the same for all ways: speed,
utilisation, bytes sent, and the cost of the controllers.

Rule for maintainers: from records alone, but for the processor time of processes,
which nothing records.

Paper: section 5.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import psutil

from pathways_lab.client.lab.devices import Slice
from pathways_lab.client.lab.lab import Lab
from pathways_lab.timeline import queries, waits
from pathways_lab.timeline.busy import computed
from pathways_lab.timeline.log import Recording
from pathways_lab.timeline.machine import Lane
from pathways_lab.timeline.records import Record, Sample, Span

CLIENT, CONTROL = "client and control plane", "control plane and hosts"
INSIDE, BETWEEN = "hosts of an island", "islands (DCN)"


@dataclass(frozen=True)
class Measured:
    """Figures of the time between the first computation and the end of the last one.

    seconds: its length.  steps, examples: done in it.  busy: share of the time
        of all devices (see ``timeline/busy.py``).
    bubble: idle share by plan; None where there is no plan.
    idle: shares of the devices' time by cause (see ``lab.timeline.waits``).
    messages, bytes: on the wire, by link.  Collectives are inside of computations and
        not counted.
    cpu: processor seconds of client and control plane, as far as it is known.
    memory: the most bytes on one device.
    loss: the last one.  difference: see ``SideBySide``.  note: for people.
    """

    seconds: float
    steps: int
    examples: int
    busy: float
    bubble: float | None
    idle: Mapping[str, float]
    messages: Mapping[str, int]
    bytes: Mapping[str, int]
    cpu: float
    memory: int
    loss: float
    difference: float
    note: str

    @property
    def throughput(self) -> float:
        """Examples per second."""
        return self.steps * self.examples / self.seconds if self.seconds else 0.0


def measure(recording: Recording, slices: Sequence[Slice], **known: Any) -> Measured:
    """Look at a recording of work on *slices*.  known: the fields that records do not say."""
    records = recording.records
    lanes = {Lane(on.island, host, device) for on in slices for host, device in on.binding.devices}
    start, end, busy = computed(records, recording.start, lanes)
    idle: dict[str, float] = {}
    for lane, parts in queries.waits(records, start, end).items():
        if lane in lanes:
            for cause, seconds in queries.shares(parts).items():
                if cause != waits.RUNNING:
                    share = seconds / (len(lanes) * (end - start))
                    idle[cause] = idle.get(cause, 0.0) + share
    messages, nbytes = _links(records)
    used = [
        int(r.args["most"])
        for r in records
        if isinstance(r, Sample)
        and r.name == "memory"
        and Lane(r.island, r.host, int(r.args["device"])) in lanes
    ]
    return Measured(
        seconds=end - start,
        busy=busy,
        idle=idle,
        messages=messages,
        bytes=nbytes,
        memory=max(used, default=0),
        **known,
    )


def _links(records: Iterable[Record]) -> tuple[dict[str, int], dict[str, int]]:
    """Messages and bytes by link."""
    records = tuple(records)
    messages: dict[str, int] = {CLIENT: 0, CONTROL: 0}
    nbytes: dict[str, int] = {CLIENT: 0, CONTROL: 0, INSIDE: 0, BETWEEN: 0}
    island_of = {r.host: r.island for r in records if r.host and r.island}
    for (_, source, target), flow in queries.flows(records).items():
        link = CONTROL if source in island_of or target in island_of else CLIENT
        messages[link] += flow.messages
        nbytes[link] += flow.bytes
    for r in records:
        if isinstance(r, Span) and r.kind == "transfer":
            sources = {island_of.get(h) for h in str(r.args.get("source", "")).split(", ")}
            link = INSIDE if sources <= {r.island} else BETWEEN
            nbytes[link] += int(r.args.get("nbytes", 0))
    return messages, nbytes


class ControllersTime:
    """Processor seconds of this kernel and, where it was started here, of the control plane."""

    def __init__(self, lab: Lab) -> None:
        pids = lab.embedded.pids.get("control", []) if lab.embedded is not None else []
        self._processes = [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]
        self._begin = self._now()

    def _now(self) -> float:
        times = [process.cpu_times() for process in self._processes]
        return time.process_time() + float(sum(t.user + t.system for t in times))

    def passed(self) -> float:
        """Since this was made."""
        return self._now() - self._begin
