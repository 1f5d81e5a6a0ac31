"""A timeline for Perfetto: Chrome's trace event format, as JSON.

Problem: a viewer that everybody in the field knows shows more than any figure
of ours: thousands of lanes, search, and arithmetic over selections.

The mapping: a host is a process; a device, the host's control work and the
transfers that arrive are its threads.  Data edges are flows between slices,
memory is a counter, runs are slices of the process "runs".  Times are
microseconds since the first record.

Rule for maintainers: slices of one thread do not overlap (more threads are
opened for those that would); every flow has both ends, and each lies on a
slice.  The counts equal the timeline's (tested).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from pathways_lab.timeline.flow import Flows, flows
from pathways_lab.timeline.machine import natural
from pathways_lab.timeline.queries import time_of
from pathways_lab.timeline.records import ENDS, Event, Record, Sample, Span

CONTROL, ARRIVALS = 10_000, 20_000
"""Thread numbers: devices count from 0, and a hundred each for those that overlap."""

Json = dict[str, Any]


class _Threads:
    """Gives every slice a thread of its process on which nothing overlaps it."""

    def __init__(self) -> None:
        self.names: dict[tuple[int, int], str] = {}
        self._ends: dict[tuple[int, int], list[float]] = {}

    def place(self, process: int, base: int, name: str, start: float, end: float) -> int:
        ends = self._ends.setdefault((process, base), [])
        for lane, reached in enumerate(ends):
            if start >= reached:
                ends[lane] = end
                break
        else:
            lane = len(ends)
            ends.append(end)
            self.names[process, base + lane] = name if not lane else f"{name} ({lane + 1})"
        return base + lane


def events(records: Iterable[Record]) -> list[Json]:
    """The trace events of *records*, by time."""
    found = sorted(records, key=time_of)
    if not found:
        return []
    origin = time_of(found[0])
    hosts = sorted({r.host for r in found if r.host}, key=natural)
    processes = {host: number for number, host in enumerate(hosts, 2)}
    threads = _Threads()
    slices: dict[tuple[int, int, str], Json] = {}
    out: list[Json] = []
    begun: dict[int, Event] = {}

    def micro(time: float) -> float:
        return round(1e6 * (time - origin), 3)

    def piece(name: str, kind: str, process: int, thread: int, start: float, end: float,
              args: Json) -> Json:  # fmt: skip
        # The difference of rounded ends, so that neighbours that touch do not overlap.
        length = round(micro(end) - micro(start), 3)
        made = {
            "ph": "X", "name": name, "cat": kind, "pid": process, "tid": thread,
            "ts": micro(start), "dur": max(length, 0.0), "args": args,
        }  # fmt: skip
        out.append(made)
        return made

    for record in found:
        if isinstance(record, Sample):
            if record.name == "memory" and record.host:
                name = f"memory of device {record.args.get('device', 0)}"
                out.append(
                    {"ph": "C", "name": name, "cat": "memory", "pid": processes[record.host],
                     "tid": 0, "ts": micro(record.time), "args": {"bytes": record.value}}
                )  # fmt: skip
        elif isinstance(record, Span):
            _span(record, processes, threads, piece, slices)
        elif record.kind == "submitted":
            begun[record.run] = record
        elif record.kind in ENDS and record.run in begun:
            first = begun.pop(record.run)
            lane = threads.place(1, 0, "runs", first.time, record.time)
            args = {"run": record.run, "client": record.client, "outcome": record.kind}
            piece(record.program or "run", "run", 1, lane, first.time, record.time, args)
        elif record.kind not in ("plan", "message", "launched"):
            process = processes.get(record.host, 1)
            out.append(
                {"ph": "i", "s": "p", "name": record.kind, "cat": "event", "pid": process,
                 "tid": 0, "ts": micro(record.time), "args": _args(record)}
            )  # fmt: skip
    out += _flows(flows(found), slices)
    out.sort(key=lambda event: event["ts"])
    return _names(processes, threads) + out


def _span(
    span: Span, processes: dict[str, int], threads: _Threads, piece: Any,
    slices: dict[tuple[int, int, str], Json],
) -> None:  # fmt: skip
    process = processes[span.host]
    name = span.node or span.kind
    if span.kind == "gang":
        lanes = [(100 * device, f"device {device}") for device in span.devices]
    elif span.kind == "transfer":
        lanes = [(ARRIVALS, "transfers that arrive")]
    else:
        name = f"{span.kind} {span.node}".strip()
        lanes = [(CONTROL, "control work")]
    for base, title in lanes:
        lane = threads.place(process, base, title, span.start, span.end)
        made = piece(name, span.kind, process, lane, span.start, span.end, _args(span))
        slices.setdefault((span.run, span.step, span.host), made)


def _args(record: Span | Event) -> Json:
    known = {
        "program": record.program, "client": record.client, "run": record.run,
        "step": record.step if record.step >= 0 else "", "line": getattr(record, "line", ""),
    }  # fmt: skip
    plain = {key: str(v) if isinstance(v, dict) else v for key, v in record.args.items()}
    return {key: value for key, value in known.items() if value != ""} | plain


def _flows(known: Flows, slices: dict[tuple[int, int, str], Json]) -> list[Json]:
    """An arrow along each data edge, from the first device of a host to that of another."""
    gangs = {"gang", "transfer"}
    at: dict[tuple[int, int], list[Json]] = {}
    for (run, step, _), made in slices.items():
        if made["cat"] in gangs:
            at.setdefault((run, step), []).append(made)
    out: list[Json] = []
    number = 0
    for (run, step), targets in at.items():
        flow = known.run(run)
        for source in flow[step].after if 0 <= step < len(flow) else ():
            sources = at.get((run, source), ())
            for place, target in enumerate(targets if sources else ()):
                origin = sources[place % len(sources)]
                number += 1
                leaves = min(origin["ts"] + origin["dur"], target["ts"])
                shared = {"name": "data", "cat": "flow", "id": number}
                ends = (("s", origin, max(leaves, origin["ts"])), ("f", target, target["ts"]))
                for kind, there, time in ends:
                    out.append(
                        {"ph": kind, **shared, "pid": there["pid"], "tid": there["tid"],
                         "ts": round(time, 3), **({"bp": "e"} if kind == "f" else {})}
                    )  # fmt: skip
    return out


def _names(processes: dict[str, int], threads: _Threads) -> list[Json]:
    def named(what: str, process: int, thread: int, name: str) -> Json:
        return {"ph": "M", "name": what, "pid": process, "tid": thread, "ts": 0.0,
                "args": {"name": name}}  # fmt: skip

    out = [named("process_name", 1, 0, "runs")]
    out += [named("process_name", number, 0, host) for host, number in processes.items()]
    out += [named("thread_name", *at, name) for at, name in threads.names.items()]
    return out


def trace(records: Sequence[Record], dropped: int = 0) -> str:
    """*records* as JSON that Perfetto opens."""
    plain = {
        "traceEvents": events(records),
        "displayTimeUnit": "ms",
        "otherData": {"records": len(records), "dropped": dropped},
    }
    return json.dumps(plain, default=str)


def save(path: str | Path, records: Sequence[Record], dropped: int = 0) -> Path:
    """Write *records* as a JSON file that Perfetto opens; returns the path."""
    path = Path(path)
    path = path if path.suffix else path.with_suffix(".json")
    path.write_text(trace(records, dropped))
    return path
