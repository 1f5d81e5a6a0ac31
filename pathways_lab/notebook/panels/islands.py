"""Islands: every host and device, its holder, and how busy it was.

A device is a meter: its length is the share of the time drawn in which it computed, made of
the colours of the functions.  A sample of "busy at this instant"
would flicker and say less.  Where there are more than a few hundred devices, those of one
host share a cell, which shows their average, whatever they compute.

Paper: section 3 (virtual devices on islands of accelerators).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

from pathways_lab.notebook.scene.device_state import What
from pathways_lab.notebook.scene.lanes import NAMED
from pathways_lab.notebook.scene.palette import FAILED, HEAT, NEUTRAL, PAINTS
from pathways_lab.notebook.scene.plot import (
    BOXES,
    FRAME,
    TEXTS,
    WORD,
    Growing,
    Layer,
    Plot,
    blank,
    in_way,
    in_ways,
    put,
    squeezed,
)
from pathways_lab.notebook.scene.row_layout import short
from pathways_lab.notebook.scene.scene import Scene
from pathways_lab.notebook.scene.spent import by_device
from pathways_lab.timeline.machine import HostSeen, Lane, SliceSeen
from pathways_lab.timeline.records import own

METER = 0.20
"""Top of a meter, in rows below the middle of its cell."""

ACROSS = 4
"""Islands beside each other; more begin another line."""

BETWEEN = 0.035
"""Gap between two islands, as a share of the panel's width."""

TALLEST = 8
"""Hosts of an island below each other before a second column is made."""

MOST_CELLS = 320
"""Devices that get a cell each."""

NARROW = 36
"""Pixels of an island's name in a page that has no room for more."""

SHOWN = 0.005
"""Shares below this are drawn as idle."""

HOVER = (
    ("device", "@name"),
    ("held by", "@holder"),
    ("state", "@state"),
    ("computation", "@work"),
)


@dataclass(frozen=True, slots=True)
class Cell:
    """One device, or all devices of a host: where it is drawn, and what is known of it.

    computed: the shares of the time drawn, by colour.
    """

    left: float
    right: float
    row: float
    label: str
    host: HostSeen
    computed: dict[str, float]
    holder: SliceSeen | None
    what: What | None

    @property
    def share(self) -> float:
        return sum(self.computed.values())

    @property
    def state(self) -> str:
        if self.host.lost:
            return f"lost: {self.host.lost}"
        if self.share > SHOWN:
            return f"busy {100 * self.share:.0f} %"
        return "free" if self.holder is None else "idle"


@dataclass(frozen=True, slots=True)
class Block:
    """One island's place: *left* and *width* as shares of the panel, *top* in rows."""

    island: str
    hosts: tuple[HostSeen, ...]
    left: float
    width: float
    top: float

    @property
    def columns(self) -> int:
        return math.ceil(len(self.hosts) / TALLEST)

    @property
    def tall(self) -> int:
        return math.ceil(len(self.hosts) / self.columns)


def plot(scene: Scene, now: float) -> Plot:
    """The panel at *now* (seconds)."""
    blocks = list(_blocks(scene))
    computed = by_device(scene, *scene.elapsed(now))
    cells = [cell for block in blocks for cell in _cells(scene, block, computed)]
    deep = max((block.top + block.tall for block in blocks), default=1.0)
    labels = {
        block.top + row: short(host.name)
        for block in blocks
        if block.left == 0 and block.columns == 1 and block.tall > 1
        for row, host in enumerate(block.hosts)
    }
    return Plot(
        name="islands",
        title="Islands",
        note=f"each {'device' if _single(scene) else 'host'}'s newest computation, and its busy"
        " share of the time drawn",
        height=26 + round(deep * (38 if deep <= 2 else 26)),
        x=(0.0, 1.0),
        y=(-1.0, deep - 0.5),
        layers=(
            Layer("islands-cells", BOXES, _outlines(cells), hover=HOVER, corner=3),
            Layer("islands-meters", BOXES, _meters(cells)),
            Layer(
                "islands-lost",
                BOXES,
                _lost(cells),
                hatch="right_diagonal_line",
                hatch_alpha=0.3,
                corner=3,
            ),
            Layer("islands-words", TEXTS, _words(scene, cells)),
            Layer("islands-heads", TEXTS, _heads(scene, blocks), anchor="start", bold=True),
        ),
        rows=labels,
        empty="" if blocks else "waiting for the first host",
    )


def _blocks(scene: Scene) -> Iterator[Block]:
    islands = scene.machine.islands
    across = min(ACROSS, len(islands))
    top = 0.0
    for first in range(0, len(islands), ACROSS):
        line = []
        for number, island in enumerate(islands[first : first + ACROSS]):
            width = (1 - BETWEEN * (across - 1)) / across
            left = number * (width + BETWEEN)
            line.append(Block(island, scene.machine.hosts_of(island), left, width, top))
        yield from line
        top += max(block.tall for block in line) + 1.0


def _single(scene: Scene) -> bool:
    """Whether each device has a cell, and not each host."""
    return len(scene.machine.lanes) <= MOST_CELLS


def _cells(scene: Scene, block: Block, computed: dict[Lane, dict[int, float]]) -> Iterator[Cell]:
    held = scene.machine.held
    single = _single(scene)
    for place, host in enumerate(block.hosts):
        column, row = divmod(place, block.tall)
        span = block.width / block.columns
        groups = [(d,) for d in range(host.devices)] if single else [tuple(range(host.devices))]
        each = span / max(1, len(groups))
        for number, devices in enumerate(groups):
            left = block.left + column * span + number * each
            lanes = [Lane(block.island, host.name, device) for device in devices]
            if single:
                shares = {PAINTS[of]: share for of, share in computed.get(lanes[0], {}).items()}
            else:
                each_of = (sum(computed[lane].values()) for lane in lanes if lane in computed)
                shares = {HEAT: sum(each_of) / max(1, len(lanes))}
            yield Cell(
                left,
                left + each * (0.94 if len(groups) <= 16 and single else 0.98),
                block.top + row,
                str(devices[0]) if single else "",
                host,
                shares,
                next((held[host.name, d] for d in devices if (host.name, d) in held), None),
                next(filter(None, map(scene.work_of, lanes)), None),
            )


def _boxes(cells: list[Cell]) -> dict[str, list[Any]]:
    return {
        "left": [cell.left for cell in cells],
        "right": [cell.right for cell in cells],
        "top": [cell.row - 0.40 for cell in cells],
        "bottom": [cell.row + 0.40 for cell in cells],
    }


def _outlines(cells: list[Cell]) -> dict[str, list[Any]]:
    return {
        **_boxes(cells),
        "fill": [NEUTRAL for _ in cells],
        "alpha": [0.03 if cell.holder is None else 0.12 for cell in cells],
        "edge": [FAILED if cell.host.lost else NEUTRAL for cell in cells],
        "name": [f"{c.host.name}, device {c.label}" if c.label else c.host.name for c in cells],
        "holder": [f"{c.holder} of {c.holder.client}" if c.holder else "nobody" for c in cells],
        "state": [cell.state for cell in cells],
        "work": [
            f"{cell.what.node} of {cell.what.program}" if cell.what else "none yet"
            for cell in cells
        ],
    }


def _meters(cells: list[Cell]) -> Growing:
    """One part for each colour, beside each other."""
    out = blank(("left", "right", "top", "bottom", "fill"))
    for cell in cells:
        if cell.share <= SHOWN or cell.host.lost:
            continue
        ends = accumulate(cell.computed.values(), initial=0.0)
        for colour, (begin, end) in zip(cell.computed, pairwise(ends), strict=True):
            left, right = (cell.left + (cell.right - cell.left) * at for at in (begin, end))
            put(out, left, right, cell.row + METER, cell.row + 0.40, colour)
    return out


def _lost(cells: list[Cell]) -> dict[str, list[Any]]:
    lost = [cell for cell in cells if cell.host.lost]
    return {**_boxes(lost), "fill": [FAILED for _ in lost], "alpha": [0.08 for _ in lost]}


def _words(scene: Scene, cells: list[Cell]) -> Growing:
    """The device's number, and where there is room what it works on, or at the end its share."""
    out = blank(WORD[:5])
    for cell in cells:
        choices = ["lost" if cell.host.lost else cell.label, ""]
        if not cell.host.lost and cell.what and cell.share > SHOWN and cell.label:
            work = f"{100 * cell.share:.0f} %" if scene.final else cell.what.node
            choices.insert(0, f"{cell.label} · {work or cell.what.program}")
        if choices[0]:
            shown = in_way(choices, 0.9 * (cell.right - cell.left))
            put(out, (cell.left + cell.right) / 2, cell.row - 0.09, *shown)
    return out


def _heads(scene: Scene, blocks: list[Block]) -> dict[str, list[Any]]:
    return {
        "x": [block.left for block in blocks],
        "y": [block.top - 0.72 for block in blocks],
        **in_ways((_headings(scene, block), block.width) for block in blocks),
    }


def _headings(scene: Scene, block: Block) -> list[str]:
    """The texts above an island, from the longest to the shortest."""
    devices = sum(host.devices for host in block.hosts)
    kinds = sorted({host.kind.upper() for host in block.hosts if host.kind})
    kind = f" {'/'.join(kinds)}" if kinds else ""
    hosts = f"{len(block.hosts)} host{'s' * (len(block.hosts) != 1)}"
    plural = "s" * (devices != 1)
    parts = f"{hosts}, {devices}{kind} device{plural}"
    words: list[tuple[str, ...]] = [(parts,), (f"{devices:,} device{plural}",), ()]
    slices = [held for held in scene.machine.slices.values() if block.island in held.islands]
    if slices:
        words.insert(0, (parts, _slices(slices)))
    island = squeezed(block.island, block.width * FRAME, bold=True)
    return [*("  ·  ".join((island, *each)) for each in words), squeezed(island, NARROW, bold=True)]


def _slices(slices: list[SliceSeen]) -> str:
    if len(slices) > NAMED:
        return f"{len(slices)} slices"
    several = len({of.client for of in slices}) > 1  # each counts its own
    names = [
        f"{of.client} " * several + f"s{own(of.slice)}: {'×'.join(map(str, of.shape))}"
        for of in slices
    ]
    return f"slice{'s' * (len(slices) != 1)} {', '.join(names)}"
