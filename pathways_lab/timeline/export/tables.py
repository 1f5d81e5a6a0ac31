"""The timeline as a few tables: what SQL asks.

Problem: whoever asks in SQL wants a gang's device, a wait's cause and a transfer's bytes as
columns, and not records of many kinds whose facts are in ``args``.

Rule for maintainers: a row says what records say, and nothing is guessed: NULL where no record
says.  Each column has a type and a meaning with its unit here, and nowhere else; times are
seconds on the records' clock, as everywhere in the timeline.

Paper: section 5.1 (where time goes), section 5.3.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from pathways_lab.timeline import queries, waits
from pathways_lab.timeline.machine import FEEDS, natural
from pathways_lab.timeline.records import Event, Record, Sample, Span, own
from pathways_lab.timeline.runs import runs

Rows = Iterator[tuple[Any, ...]]


class Column(NamedTuple):
    """A column: its type in SQL, and its meaning with its unit."""

    type: str
    about: str


class Table(NamedTuple):
    """A table: one row of it is *about*; rows(records) has the columns' values in their order."""

    about: str
    columns: dict[str, Column]
    rows: Callable[[Sequence[Record]], Rows]


TIME = "seconds on the records' clock"
RUN = {
    "run": Column("BIGINT", "number of the run, as in records"),
    "step": Column("BIGINT", "number of the node in its plan, from 0"),
    "program": Column("VARCHAR", "name of the program"),
    "node": Column("VARCHAR", "name of the node: that of its function"),
    "client": Column("VARCHAR", "the client that submitted it"),
}
PLACE = {
    "island": Column("VARCHAR", "name of the island"),
    "host": Column("VARCHAR", "name of the host"),
}
DEVICE = {**PLACE, "device": Column("BIGINT", "number of the device on its host, from 0")}
STRETCH = {
    "begun": Column("DOUBLE", TIME),
    "ended": Column("DOUBLE", TIME),
    "seconds": Column("DOUBLE", "from begun to ended"),
}


def _run(record: Span | Event) -> tuple[Any, ...]:
    """The values of :data:`RUN`; of a record that belongs to no run, NULL."""
    run, step = record.run or None, None if record.step < 0 else record.step
    return run, step, record.program or None, record.node or None, record.client or None


def _stretch(begun: float, ended: float) -> tuple[float, float, float]:
    return begun, ended, ended - begun


def _spans(records: Iterable[Record], kind: str) -> Iterator[Span]:
    return (r for r in records if isinstance(r, Span) and r.kind == kind)


def _gangs(records: Sequence[Record]) -> Rows:
    for gang in _spans(records, "gang"):
        args, stretch = gang.args, _stretch(gang.start, gang.end)
        more = gang.line or None, args.get("slice"), args.get("seq"), bool(args.get("poisoned"))
        for device in gang.devices:
            yield *_run(gang), gang.island, gang.host, device, *stretch, *more


def _waits(records: Sequence[Record]) -> Rows:
    gangs = list(_spans(records, "gang"))
    if not gangs:
        return
    known = [r.time for r in records if isinstance(r, Event) and r.kind == "submitted"]
    start, end = min([*known, *(g.start for g in gangs)]), max(g.end for g in gangs)
    for lane, parts in queries.stretches(records, start, end).items():
        for cause, begun, ended, gang in parts:
            if cause != waits.RUNNING:
                of = (None,) * len(RUN) if gang is None else _run(gang)
                yield cause, *lane, *_stretch(begun, ended), *of


def _transfers(records: Sequence[Record]) -> Rows:
    for each in _spans(records, "transfer"):
        args = each.args
        ends = args.get("source") or None, each.host, args.get("nbytes")
        yield *_run(each), *ends, *_stretch(each.start, each.end)


def _work(records: Sequence[Record]) -> Rows:
    for each in records:
        if isinstance(each, Span) and each.kind not in ("gang", "transfer"):
            island = None if each.island in ("", FEEDS) else each.island
            stretch = _stretch(each.start, each.end)
            yield each.kind, island, each.host, *stretch, *_run(each)


def _runs(records: Sequence[Record]) -> Rows:
    for row in runs(records):
        named = row.client or None, row.program or None
        times = row.submitted, row.granted, row.begun, row.ended
        told = row.outcome or None, row.waited, row.seconds
        yield row.run, own(row.run), *named, row.priority, *times, *told


def _clients(records: Sequence[Record]) -> Rows:
    found: dict[str, dict[str, float]] = {}
    for record in records:
        if isinstance(record, Sample) or not record.client:
            continue
        times = found.setdefault(record.client, {})
        if isinstance(record, Event) and record.kind in ("client-joined", "client-left"):
            times[record.kind] = record.time
    for name, times in found.items():
        yield name, times.get("client-joined"), times.get("client-left")


def _hosts(records: Sequence[Record]) -> Rows:
    known = queries.machine(records).hosts.values()
    for host in sorted(known, key=lambda each: (natural(each.island), natural(each.name))):
        told = host.devices, host.kind or None, host.memory or None, host.lost or None
        yield host.island, host.name, *told


def _memory(records: Sequence[Record]) -> Rows:
    for each in records:
        if isinstance(each, Sample) and each.name == "memory":
            device, most = each.args.get("device"), each.args.get("most")
            yield each.time, each.island, each.host, device, int(each.value), most


def _messages(records: Sequence[Record]) -> Rows:
    for each in records:
        if isinstance(each, Event) and each.kind == "message":
            told = [each.args.get(name) for name in ("kind", "source", "target", "bytes")]
            yield each.time, *told, each.run or None, each.program or None


def _events(records: Sequence[Record]) -> Rows:
    for each in records:
        if isinstance(each, Event) and each.kind != "message":
            at = each.island or None, each.host or None
            yield each.time, each.kind, *at, *_run(each), json.dumps(dict(each.args), default=str)


TABLES = {
    "gangs": Table(
        "a computation on one device: of a gang on four devices, four rows",
        {
            **RUN,
            **DEVICE,
            **STRETCH,
            "line": Column("VARCHAR", "the user's source line"),
            "slice": Column("BIGINT", "number of the slice"),
            "place": Column("BIGINT", "place in the order of its island, from 0"),
            "poisoned": Column("BOOLEAN", "whether something that it depends on had failed"),
        },
        _gangs,
    ),
    "waits": Table(
        "a time in which one device waited, from the first submission to the end of the last gang",
        {
            "cause": Column("VARCHAR", ", ".join(waits.CAUSES)),
            **DEVICE,
            **STRETCH,
            **{
                name: column._replace(about=f"{column.about}, of the gang that was awaited")
                for name, column in RUN.items()
            },
        },
        _waits,
    ),
    "transfers": Table(
        "the part of a transfer that arrived on one host",
        {
            **RUN,
            "source": Column("VARCHAR", "names of the hosts that sent"),
            "target": Column("VARCHAR", "name of the host at which it arrived"),
            "bytes": Column("BIGINT", "that arrived"),
            **STRETCH,
        },
        _transfers,
    ),
    "runs": Table(
        "a run",
        {
            "run": RUN["run"],
            "number": Column("BIGINT", "of the run as its client counts, and pictures do"),
            "client": RUN["client"],
            "program": RUN["program"],
            "priority": Column("BIGINT", "with which it was submitted"),
            "submitted": Column("DOUBLE", TIME),
            "granted": Column("DOUBLE", f"when its first gang had its place, {TIME}"),
            "begun": Column("DOUBLE", f"when its first computation began, {TIME}"),
            "ended": Column("DOUBLE", TIME),
            "outcome": Column("VARCHAR", "finished, failed, cancelled; NULL while it goes on"),
            "waited": Column("DOUBLE", "seconds from submitted to begun"),
            "seconds": Column("DOUBLE", "from submitted to ended"),
        },
        _runs,
    ),
    "clients": Table(
        "a client",
        {
            "client": Column("VARCHAR", "its name"),
            "joined_at": Column("DOUBLE", TIME),
            "left_at": Column("DOUBLE", f"{TIME}; NULL while it is there"),
        },
        _clients,
    ),
    "hosts": Table(
        "a host",
        {
            **PLACE,
            "devices": Column("BIGINT", "how many"),
            "kind": Column("VARCHAR", "of its devices"),
            "memory": Column("BIGINT", "bytes of each device"),
            "lost": Column("VARCHAR", "the reason, when it is gone"),
        },
        _hosts,
    ),
    "memory": Table(
        "a sample of a device's memory",
        {
            "time": Column("DOUBLE", TIME),
            **DEVICE,
            "bytes": Column("BIGINT", "in use"),
            "most": Column("BIGINT", "bytes that were in use at most, since the sample before"),
        },
        _memory,
    ),
    "messages": Table(
        "a message of a run between client, control plane and hosts",
        {
            "time": Column("DOUBLE", TIME),
            "kind": Column("VARCHAR", "of message"),
            "source": Column("VARCHAR", "the process that sent it"),
            "target": Column("VARCHAR", "the process that it was for"),
            "bytes": Column("BIGINT", "on the wire"),
            "run": RUN["run"],
            "program": RUN["program"],
        },
        _messages,
    ),
    "work": Table(
        "something that a host did beside computations and transfers",
        {
            "kind": Column("VARCHAR", "compile, receive, prepare, launch, send, host-computation"),
            **PLACE,
            **STRETCH,
            **RUN,
        },
        _work,
    ),
    "events": Table(
        "anything else that happened, as records say it",
        {
            "time": Column("DOUBLE", TIME),
            "kind": Column("VARCHAR", "of event"),
            **PLACE,
            **RUN,
            "args": Column("VARCHAR", "what else is known of it, as JSON"),
        },
        _events,
    ),
}
"""All tables, by name."""


def columns(name: str, records: Sequence[Record]) -> dict[str, list[Any]]:
    """The columns of a table."""
    table = TABLES[name]
    rows = list(table.rows(records))
    return {each: [row[at] for row in rows] for at, each in enumerate(table.columns)}
