"""Planned against actual: the last run that ended, per device, and what became of the difference.

Left, two lanes per device: hollow above, how an ideal machine would do it
(no dispatch, transfers that take no time); solid below, how it was.  Right, the
whole of each device's lost time, divided among its causes: it adds up to 100 %.

Paper: section 5.3 and figure 10 (pipelines and their bubbles).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from pathways_lab.notebook.panels.graph import newest
from pathways_lab.notebook.scene.duration import duration
from pathways_lab.notebook.scene.gang_number import number
from pathways_lab.notebook.scene.palette import CAUSE_COLOURS, NEUTRAL, ink_on
from pathways_lab.notebook.scene.plot import (
    BOXES,
    LINES,
    TEXTS,
    WORD,
    Growing,
    Layer,
    Plot,
    blank,
    in_way,
    moments,
    put,
)
from pathways_lab.notebook.scene.row_layout import MOST, short
from pathways_lab.notebook.scene.scene import WAITS, Scene
from pathways_lab.notebook.scene.text import nothing
from pathways_lab.timeline.planned import OTHERS, PLAN, Device, compare
from pathways_lab.timeline.waits import MEMORY, NOTHING

MOST_BOXES = 600
"""Bars of all lanes; of more, close neighbours are drawn as one."""

SPLIT, RIGHT = 0.70, 0.74
"""Where the lanes end and the causes begin, as shares of the width."""

SHORT = {
    PLAN: "plan", OTHERS: "others", NOTHING: "no work", "earlier computation": "inputs",
    "input transfer": "transfer",
    "gang order": "order",
    MEMORY: "memory",
}  # fmt: skip
COLOURS = dict(zip(WAITS, CAUSE_COLOURS, strict=True)) | {
    PLAN: NEUTRAL, OTHERS: "#4ea296", NOTHING: "#6b6b6b",
}  # fmt: skip
ORDER = (PLAN, OTHERS, NOTHING, *WAITS)
HOVER = (("computation", "@node"), ("", "@which"), ("from", "@from"), ("took", "@took"))
GAP_HOVER = (("device", "@device"), ("waited for", "@cause"), ("share of its gap", "@share"),
             ("seconds", "@took"))  # fmt: skip

BOX = ("left", "right", "top", "bottom", "fill", "alpha", "edge", "node", "which", "from", "took",
       "gang")  # fmt: skip
GAP = ("left", "right", "top", "bottom", "fill", "device", "cause", "share", "took")


def plot(scene: Scene, now: float) -> Plot:
    """The panel at *now* (seconds)."""
    run = newest(scene, whole=True)
    boxes, gaps, words = blank(BOX), blank(GAP), blank(WORD)
    rows: dict[float, str] = {}
    readouts: dict[float, str] = {}
    note = ""
    devices: tuple[Device, ...] = ()
    actual = 0.0
    if run is not None and run.count and run.end > run.begin:
        before = [
            gang
            for other in scene.runs.values()
            if other is not run and other.begin < run.end and other.end > run.begin
            for gang in other.stretches
        ]
        found = compare(run, scene.flows.run(run.run), before)
        actual = found.actual
        names = {gang.step: gang.node for gang in run.gangs}
        note = f"{run.program}: {duration(found.planned)} planned, {duration(found.actual)} actual"
        note += "; right: where its lost time went"
        groups = _groups(found.devices)
        devices = tuple(group[0] for group in groups)
        parts = _parts(devices)
        several = len(devices) < len(found.devices)
        note += " (drawn: one device of many)" if several else ""
        for row, group in enumerate(groups):
            device, at = _together(group), float(row)
            rows[at] = f"{short(device.lane.host)} · {device.lane.device}"
            share = device.lost / found.actual / len(group) if found.actual > 0 else 0.0
            readouts[at] = f"lost {100 * share:.0f} %"
            finest = found.actual * len(groups) / MOST_BOXES if parts > MOST_BOXES else 0.0
            _lanes(scene, run.run, run.program, device, names, found.actual, finest, at, boxes)
            _causes(device, at, gaps, words)
    count = max(len(rows), 1)
    each = max(8.0, min(30.0, 460.0 / count))
    axis = (20 / each) if devices else 0.0
    grid, ticks = _time_axis(count - 0.4, axis, actual)
    return Plot(
        name="planned",
        title="Planned against actual",
        note=note,
        height=round(max(52, each * (count + 0.2 + axis))),
        x=(0.0, 1.0),
        y=(-0.6, count - 0.4 + axis),
        layers=(
            Layer("planned-grid", LINES, grid, alpha=0.25),
            Layer("planned-ticks", TEXTS, ticks, anchor="start"),
            Layer("planned-lanes", BOXES, boxes, hover=HOVER),
            Layer("planned-gap", BOXES, gaps, hover=GAP_HOVER),
            Layer("planned-words", TEXTS, words if each >= 13 else blank(words)),
        ),
        rows=rows if each >= 13 else {},
        groups=_islands(devices),
        readouts=readouts if each >= 13 else {},
        bands=_bands(devices),
        empty="" if devices else nothing(scene) or "waiting for a run to end",
    )


def _time_axis(bottom: float, tall: float, whole: float) -> tuple[Growing, Growing]:
    """Lines through the lanes and, below them, what they say.  whole: seconds of the run."""
    grid, ticks = blank(("xs", "ys", "fill", "width")), blank(WORD[:5])
    known = moments(0.0, whole, 6) if tall and whole > 0 else {}
    for n, (time, text) in enumerate(known.items()):
        x = SPLIT * time / whole
        put(grid, [x, x], [-0.6, bottom], NEUTRAL, 1)
        # Where there is too little room every other one leaves it to its neighbours.
        room = SPLIT / len(known) * (1 if n % 2 else 2)
        put(ticks, x + 0.004, bottom + 0.55 * tall, *in_way((text, ""), room))
    return grid, ticks


def _groups(devices: tuple[Device, ...]) -> list[list[Device]]:
    """Each device, or those of a host or of an island, where they or their bars are too many."""
    for level in (3, 2, 1):
        groups: dict[tuple[object, ...], list[Device]] = {}
        for device in devices:
            groups.setdefault(tuple(device.lane)[:level], []).append(device)
        if len(groups) <= MOST and _parts(group[0] for group in groups.values()) <= MOST_BOXES:
            break
    return list(groups.values())


def _parts(devices: Iterable[Device]) -> int:
    return sum(len(device.planned) + len(device.actual) for device in devices)


def _together(group: list[Device]) -> Device:
    """The first of a group with the gaps of all."""
    gap: dict[str, float] = {}
    for device in group:
        for cause, seconds in device.gap.items():
            gap[cause] = gap.get(cause, 0.0) + seconds
    return replace(group[0], gap=gap)


def _rows_of(devices: tuple[Device, ...]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for row, device in enumerate(devices):
        found.setdefault(device.lane.island, []).append(row)
    return found


def _islands(devices: tuple[Device, ...]) -> dict[float, str]:
    """Their names, in the middle of their rows."""
    return {(at[0] + at[-1]) / 2: island for island, at in _rows_of(devices).items()}


def _bands(devices: tuple[Device, ...]) -> tuple[tuple[float, float], ...]:
    """Every second island."""
    return tuple((at[0] - 0.5, at[-1] + 0.5) for at in list(_rows_of(devices).values())[1::2])


def _lanes(
    scene: Scene, run: int, program: str, device: Device, names: dict[int, str], whole: float,
    finest: float, at: float, boxes: Growing,
) -> None:  # fmt: skip
    for which, parts in (("planned", device.planned), ("actual", device.actual)):
        top, bottom = (at - 0.42, at - 0.06) if which == "planned" else (at - 0.02, at + 0.40)
        for step, start, end in _merged(parts, finest):
            colour = scene.palette.colour(program, names.get(step, ""))
            alpha = 0.12 if which == "planned" else 1.0
            box = SPLIT * start / whole, SPLIT * end / whole, top, bottom, colour, alpha, colour
            about = names.get(step, "several"), which, f"{start:.4f} s to {end:.4f} s"
            put(boxes, *box, *about, duration(end - start), number(run, step))


def _merged(
    parts: tuple[tuple[int, float, float], ...], finest: float
) -> list[tuple[int, float, float]]:
    """Neighbours that are closer than *finest* seconds become one, of no step."""
    out: list[tuple[int, float, float]] = []
    for step, start, end in sorted(parts, key=lambda part: part[1]):
        if out and finest and start - out[-1][2] < finest and end - out[-1][1] < 4 * finest:
            out[-1] = (-1, out[-1][1], max(end, out[-1][2]))
        else:
            out.append((step, start, end))
    return out


def _causes(device: Device, at: float, gaps: Growing, words: Growing) -> None:
    left, lost = RIGHT, device.lost
    runs = sorted(set(device.gap) - set(ORDER))
    for cause in (*ORDER[:1], *runs, *ORDER[1:]):
        seconds = device.gap.get(cause, 0.0)
        if seconds <= 0 or lost <= 0:
            continue
        right = left + (1 - RIGHT) * seconds / lost
        colour = COLOURS.get(cause, NEUTRAL)
        put(
            gaps, left, right, at - 0.36, at + 0.36, colour,
            f"{device.lane.host}, device {device.lane.device}", cause,
            f"{100 * seconds / lost:.1f} %", duration(seconds),
        )  # fmt: skip
        share = f"{100 * seconds / lost:.0f} %"
        ways = f"{SHORT.get(cause, cause.partition(' (')[0])} {share}", share, ""
        shown = in_way(ways, right - left)
        put(words, (left + right) / 2, at, *shown, ink_on(colour))
        left = right
