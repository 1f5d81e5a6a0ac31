"""Questions over the timeline, answered from records alone.

Problem: views, tests and errors ask the same things (what happened to this
run, in which order did an island work, how many messages did it cost), and
must get the same answers.

Rule for maintainers: a question is a function from records to plain data; no
clock, no lab, no state.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from pathways_lab.timeline.gangs import Gang, Gangs
from pathways_lab.timeline.machine import Lane, Machine, lanes_of
from pathways_lab.timeline.records import Event, Record, Sample, Span, own
from pathways_lab.timeline.waits import NOTHING, RUNNING, Waits, known_order


def time_of(record: Record) -> float:
    """When a record begins, in seconds."""
    return record.start if isinstance(record, Span) else record.time


def run_meant(run: object, known: Iterable[int], of: str = "record") -> int:
    """The run of *known* whose number, or whose client's own number for it, is *run*.

    of: what of a run is known.  Raises TypeError for what is no number, and KeyError where no run
    has it, or those of several clients do.
    """
    if isinstance(run, bool) or not isinstance(run, int):
        raise TypeError(f"{run!r:.80} is no number of a run; lab.timeline.runs lists all runs")
    runs = set(known)
    meant = [run] if run in runs else sorted(number for number in runs if own(number) == run)
    if not meant:
        raise KeyError(f"no {of} of run {run} is known; lab.timeline.runs lists all runs")
    if len(meant) > 1:
        raise KeyError(f"{len(meant)} clients have a run {run}: one of {meant} must be named")
    return meant[0]


def story(
    records: Iterable[Record], run: int | None = None, step: int | None = None
) -> list[Record]:
    """Everything known about one run, or one gang of it, oldest first.

    Raises as :func:`run_meant` does.
    """
    records = list(records)
    if run is not None:
        run = run_meant(run, [r.run for r in records if not isinstance(r, Sample)])
    found = [
        r
        for r in records
        if not isinstance(r, Sample)
        and (run is None or r.run == run)
        and (step is None or r.step == step)
    ]
    return sorted(found, key=time_of)


def machine(records: Iterable[Record]) -> Machine:
    """Islands, hosts, devices and slices that the records mention."""
    out = Machine()
    for record in records:
        out.add(record)
    return out


def order(records: Iterable[Record], island: str) -> list[Gang]:
    """The gangs of one island in the order in which it was told to run them."""
    out = Gangs()
    for record in records:
        out.add(record)
    return out.order(island)


def lanes(records: Iterable[Record]) -> dict[Lane, list[Span]]:
    """The computations of every device, by start."""
    out: dict[Lane, list[Span]] = {}
    for record in records:
        if isinstance(record, Span) and record.kind == "gang":
            for lane in lanes_of(record.island, record.host, record.devices):
                out.setdefault(lane, []).append(record)
    for spans in out.values():
        spans.sort(key=lambda s: s.start)
    return out


@dataclass(frozen=True, slots=True)
class Flow:
    """Wire messages of one kind between two ends, and their bytes on the wire."""

    messages: int = 0
    bytes: int = 0


def flows(records: Iterable[Record], run: int | None = None) -> dict[tuple[str, str, str], Flow]:
    """Wire messages and bytes by ``(kind, source, target)``, of one run or of all.

    A message about several runs counts for none of them, and in the sum of all.
    """
    found: dict[tuple[str, str, str], Flow] = {}
    for r in records:
        if isinstance(r, Event) and r.kind == "message" and (run is None or r.run == run):
            key = (str(r.args["kind"]), str(r.args["source"]), str(r.args["target"]))
            flow = found.get(key, Flow())
            found[key] = Flow(flow.messages + 1, flow.bytes + int(r.args["bytes"]))
    return found


class Stretch(NamedTuple):
    """The time from *start* to *end* (seconds) of a device, in one state.

    cause: :data:`RUNNING`, or one of :data:`CAUSES`.  gang: it runs, or was awaited; None where
    there was nothing to do.
    """

    cause: str
    start: float
    end: float
    gang: Span | None


def stretches(records: Iterable[Record], start: float, end: float) -> dict[Lane, list[Stretch]]:
    """States of every device between two times (seconds), without gaps.

    Devices that never ran anything are not in the answer.
    """
    if end <= start:
        raise ValueError(f"the range must have a length: {start} to {end}")
    fold = Waits(since=start)
    out: dict[Lane, list[Stretch]] = {}
    for record in sorted(records, key=known_order):
        for devices, wait in fold.add(record):
            waited = Stretch(wait.cause, wait.start, wait.end, wait.gang)
            for lane in lanes_of(wait.gang.island, wait.gang.host, devices):
                out.setdefault(lane, []).append(waited)
        if isinstance(record, Span) and record.kind == "gang":
            for lane in lanes_of(record.island, record.host, record.devices):
                out.setdefault(lane, []).append(Stretch(RUNNING, record.start, record.end, record))
    return {lane: _tiled(parts, start, end) for lane, parts in out.items()}


def waits(
    records: Iterable[Record], start: float, end: float
) -> dict[Lane, list[tuple[str, float, float]]]:
    """The same without gangs: ``(cause, from, until)``."""
    return {lane: [p[:3] for p in parts] for lane, parts in stretches(records, start, end).items()}


def _tiled(parts: list[Stretch], start: float, end: float) -> list[Stretch]:
    """Cut to a range, without overlaps, the rest filled: nobody asked for more."""
    out: list[Stretch] = []
    reached = start
    for cause, a, b, gang in sorted(parts, key=lambda part: (part.start, part.end)):
        a, b = max(a, reached), min(b, end)
        if b <= a:
            continue
        if a > reached:
            out.append(Stretch(NOTHING, reached, a, None))
        out.append(Stretch(cause, a, b, gang))
        reached = b
    if reached < end:
        out.append(Stretch(NOTHING, reached, end, None))
    return out


def shares(parts: Iterable[tuple[str, float, float]]) -> dict[str, float]:
    """Seconds by cause."""
    out: dict[str, float] = {}
    for cause, start, end in parts:
        out[cause] = out.get(cause, 0.0) + end - start
    return out
