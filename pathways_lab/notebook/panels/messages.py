"""Messages: the sequence of messages between processes, in the newest run that has them.

A sequence diagram that lies on its side: a row per process, an arrow per
message, from left to right in the order of time.  A message of one process to many
is one column.  Its width is order, not time: messages come in bursts.

Paper: figure 4 (what travels between client, controller and hosts).
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from pathways_lab.notebook.panels.graph import newest
from pathways_lab.notebook.scene.palette import CAUSE_COLOURS
from pathways_lab.notebook.scene.plot import (
    AREAS,
    FRAME,
    LINES,
    TEXTS,
    Growing,
    Layer,
    Plot,
    blank,
    in_ways,
    put,
    wide,
)
from pathways_lab.notebook.scene.row_layout import MOST
from pathways_lab.notebook.scene.scene import Scene
from pathways_lab.timeline.machine import natural
from pathways_lab.timeline.records import Event

MOST_COLUMNS = 48
"""Columns shown: the first ones; how many more there are is said."""

BURST = 0.002
"""Seconds within which messages of one kind from or to one process are one column."""

KINDS = ("submit", "grant", "report", "run-ended")
"""Kinds that have the same colour in every picture, whichever of them is in it."""

HOVER = (
    ("message", "@kind_name"),
    ("from", "@source"),
    ("to", "@target"),
    ("bytes", "@bytes{0,0}"),
    ("at", "@at"),
)


def plot(scene: Scene, now: float) -> Plot:
    """The panel at *now* (seconds)."""
    run = newest(scene, now, told=True)
    told = sorted(run.messages, key=lambda m: m.time) if run is not None else []
    columns = bursts(told)
    people = participants(told)
    row = {name: float(n) for n, name in enumerate(people)}
    shown = columns[:MOST_COLUMNS]
    places = max(len(shown), 6)
    total = sum(int(m.args.get("bytes", 0)) for m in told)
    rest = sum(map(len, columns[MOST_COLUMNS:]))
    note = (
        f"{run.program}: {len(told)} message{'s' * (len(told) > 1)}, {total:,} bytes"
        if run and told
        else ""
    )
    note += f"; the last {rest} are not shown" if rest else ""
    each = max(10.0, min(22.0, 420.0 / max(len(people), 1)))
    lines, heads = _arrows(shown, row, scene.origin, places)
    return Plot(
        name="messages",
        title="Messages",
        note=note,
        height=round(max(52, each * (len(people) + 1.6))),
        x=(-1.6, places - 0.4),
        y=(-1.4, max(len(people), 1) - 0.4),
        layers=(
            Layer("messages-lines", LINES, lines, alpha=0.8),
            Layer("messages-heads", AREAS, heads, hover=HOVER),
            Layer("messages-words", TEXTS, _words(shown, places)),
        ),
        rows={at: name for name, at in row.items()},
        rules=tuple(row.values()),
        empty="" if told else "no message of a run is recorded",
    )


def _ends(message: Event) -> tuple[str, str, str]:
    args = message.args
    return str(args.get("kind", "")), str(args.get("source", "")), str(args.get("target", ""))


def bursts(told: list[Event]) -> list[list[Event]]:
    """Messages of one kind that one process sends, or gets, at about the same time."""
    out: list[list[Event]] = []
    for message in told:
        kind, source, target = _ends(message)
        for burst in reversed(out[-4:]):
            first_kind, first_source, first_target = _ends(burst[0])
            if (
                kind == first_kind
                and message.time - burst[0].time < BURST
                and (source == first_source or target == first_target)
            ):
                burst.append(message)
                break
        else:
            out.append([message])
    return out


def participants(told: list[Event]) -> list[str]:
    """Clients, then the control plane, then hosts; of too many hosts, their islands."""
    names = {end for m in told for end in _ends(m)[1:]}
    hosts = sorted((n for n in names if "/" in n), key=natural)
    if len(hosts) > MOST:
        hosts = sorted({n.partition("/")[0] for n in hosts}, key=natural)
    control = [n for n in names if n == "control"]
    return [*sorted(n for n in names if "/" not in n and n != "control"), *control, *hosts]


def _at(name: str, row: dict[str, float]) -> float:
    return row[name] if name in row else row[name.partition("/")[0]]


def _arrows(
    shown: list[list[Event]], row: dict[str, float], origin: float, places: int
) -> tuple[Growing, Growing]:
    lines = blank(("xs", "ys", "fill", "width"))
    heads = blank(("xs", "ys", "fill", "kind_name", "source", "target", "bytes", "at"))
    kinds = dict(zip(KINDS, CAUSE_COLOURS, strict=False))
    half = 5.0 * places / FRAME
    for x, burst in enumerate(shown):
        for message in burst:
            kind, source, target = _ends(message)
            colour = kinds.setdefault(kind, CAUSE_COLOURS[len(kinds) % len(CAUSE_COLOURS)])
            a, b = _at(source, row), _at(target, row)
            down = 0.32 if b > a else -0.32
            put(lines, [x, x], [a, b - down], colour, 1.6)
            tip = [x - half, x + half, x], [b - down, b - down, b], colour
            about = float(message.args.get("bytes", 0)), f"{message.time - origin:.5f} s"
            put(heads, *tip, kind, source, target, *about)
    return lines, heads


def _words(shown: list[list[Event]], places: int) -> dict[str, list[Any]]:
    """The kind above its column, where the one before leaves room."""
    each, free = FRAME / (places + 1.2), -100.0
    told: list[tuple[int, str]] = []
    for x, burst in enumerate(shown):
        word, middle = _ends(burst[0])[0], (x + 1.5) * each
        if middle - wide(word) / 2 > free:
            told.append((x, word))
            free = middle + wide(word) / 2 + 4
    columns = [x for x, _ in told]
    apart = [b - a for a, b in pairwise([-2, *columns, places + 2])]
    rooms = [min(before, after) / (places + 1.2) for before, after in pairwise(apart)]
    return {
        "x": [float(x) for x in columns],
        "y": [-0.95 for _ in told],
        **in_ways([((word, ""), room) for (_, word), room in zip(told, rooms, strict=True)]),
    }
