"""Gang order: what every island was told to run, in order, and how far it is.

A row per host, a column per place in the island's order, so that one gang is
lined up across its hosts: the same order everywhere is what the eye sees.
Hollow = granted, hatched = launched, striped upright = running, solid = done;
overdue = running far longer than that computation ever did.  The columns around the
frontier between done and not done are shown, however far grants run ahead.

Paper: section 4.4 (gang-scheduled dispatch), 4.5 (grants ahead of the data).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from pathways_lab.notebook.scene.awaited import missing
from pathways_lab.notebook.scene.device_state import What
from pathways_lab.notebook.scene.gang_number import number
from pathways_lab.notebook.scene.plot import BOXES, CATALOGUE, DATA, RIGHT, Layer, Plot, wide
from pathways_lab.notebook.scene.row_layout import rows
from pathways_lab.notebook.scene.scene import Scene
from pathways_lab.notebook.scene.text import nothing
from pathways_lab.timeline.gangs import Gang

PLACES, MOST_PLACES = 40, 160
"""Columns shown while it runs, and at most when it is over."""

MOST_ROWS = 16
"""Hosts that get a row each; of more, an island's share one row."""

LATE, LEAST = 4.0, 1.0
"""A gang is overdue after so many times the longest that its node took, and so many seconds."""

SHOWN = ("granted", "launched", "running", "overdue", "done", "failed")

MOST_BOXES = 700
"""Boxes of a picture that is over."""

AHEAD = 14
"""Columns kept for gangs beyond the frontier."""

TYPES = {
    "left": np.float32,
    "right": np.float32,
    "top": np.float32,
    "bottom": np.float32,
    "paint": np.uint8,
    "what": np.uint16,
    "place": np.int32,
    "gang": np.float64,
    "granted": np.float64,
    "launched": np.float64,
    "started": np.float64,
    "ended": np.float64,
}
"""Columns of every layer; times in seconds on the axis, NaN when unknown."""

ABOUT = (
    ("place in the order", "@place"),
    ("computation", "@what{node} of @what{program}"),
    ("client", "@what{client}"),
    ("line", "@what{line}"),
    ("granted", "@granted{0.0000} s"),
)
WAITING = (*ABOUT, ("why it waits", "@why"))
LAUNCHED = (*ABOUT, ("launched", "@launched{0.0000} s"))
PENDING = (*LAUNCHED, ("why", "@why"))
ENDED = (*LAUNCHED, ("ran", "@started{0.0000} s to @ended{0.0000} s"))


def plot(scene: Scene, now: float) -> Plot:
    """The panel at *now* (seconds)."""
    together = len(scene.machine.hosts) > MOST_ROWS
    layout = rows(scene.machine, "island" if together else "host")
    row_of = {lane.host: row for lane, row in layout.of.items()}
    orders = {island: scene.gangs.order(island) for island in layout.groups.values()}
    hosts = scene.machine.hosts
    places = _places(scene, orders, len(layout.labels))
    boxes: dict[str, list[tuple[float, ...]]] = {state: [] for state in SHOWN}
    whys: dict[str, list[str]] = {state: [] for state in SHOWN}
    running = {(key, lane.host): since for lane, key, since, _ in scene.running()}
    readouts = {}
    for at, island in layout.groups.items():
        order = orders[island]
        gone = scene.gangs.gone.get(island, 0)
        readouts[at] = summary(order, gone, scene.gangs.known(island) - len(order) - gone)
        for column, gang in enumerate(around_frontier(order, places)):
            there = [h for h in gang.where if h in row_of and hosts[h].island == island]
            for host in _slowest(gang, there) if together else there:
                state = gang.state if together else gang.state_on(host)
                since = running.get(((gang.run, gang.step), host))
                if state == "launched" and since is not None:
                    state = "overdue" if _overdue(scene, gang, now - since) else "running"
                place = gang.place_on(island)[1]
                boxes[state].append(_box(scene, gang, host, state, column, row_of[host], place))
                if state not in ("done", "failed"):
                    whys[state].append(why(scene, gang, host, state))
    return Plot(
        name="order",
        title="Gang order",
        note="□ granted  ▨ launched  ▥ running  ■ done  ▩ failed, overdue; a column is a gang",
        height=max(46, min(260, round(22 * layout.end + 24))) if layout.of else 46,
        x=(-0.2, places + 0.2),
        y=(-0.62, max(layout.end, 0.5) + 0.12),
        layers=(
            _layer("granted", boxes, WAITING, whys, alpha=0.1),
            _layer("launched", boxes, PENDING, whys, alpha=0.3, hatch="right_diagonal_line"),
            _layer("running", boxes, PENDING, whys, alpha=0.5, hatch="vertical_line"),
            _layer("overdue", boxes, PENDING, whys, alpha=0.45, hatch="x"),
            _layer("done", boxes, ENDED, lined=True),
            _layer("failed", boxes, ENDED, alpha=0.25, hatch="x"),
            Layer(CATALOGUE, DATA, scene.catalogue.columns()),
        ),
        rows=layout.labels,
        groups=layout.groups,
        readouts=readouts,
        bands=layout.bands[1::2],
        empty=nothing(scene),
    )


def _places(scene: Scene, orders: Mapping[str, Sequence[Gang]], hosts: int) -> int:
    """How many columns there are: as many as have room where the picture is of what is over."""
    longest = max(map(len, orders.values()), default=0) if scene.final else 0
    return max(PLACES, min(longest, MOST_BOXES // max(1, hosts), MOST_PLACES))


def around_frontier(order: list[Gang], places: int = PLACES) -> list[Gang]:
    """The gangs to show."""
    frontier = next((n for n, gang in enumerate(order) if not gang.over), len(order))
    end = min(len(order), max(frontier + AHEAD, places))
    return order[max(0, end - places) : end]


def _overdue(scene: Scene, gang: Gang, seconds: float) -> bool:
    usual = scene.longest.get((gang.program, gang.node))
    return usual is not None and seconds > max(LEAST, LATE * usual)


def why(scene: Scene, gang: Gang, host: str, state: str) -> str:
    """In words, what keeps a gang from being further on a host."""
    if state == "overdue":
        longest = scene.longest[gang.program, gang.node]
        return f"far longer than ever before, which was {1000 * longest:.1f} ms"
    if state == "running":
        return "it computes"
    node, made = missing(scene, gang, host)
    if made is not None:
        where = f" ({made.placed}), which is {made.state}" if made.places else ", without a place"
        return f"waits for {node}{where}"
    if node:
        return f"waits for the bytes of {node}"
    if state == "launched":
        return "behind others in the queues of its devices"
    return "its turn comes after the gangs before it"


def _slowest(gang: Gang, there: Sequence[str]) -> Sequence[str]:
    """The one of these hosts that a gang waits for, or waited for longest."""
    end = float("inf")
    order = sorted(there, key=lambda h: (gang.ended.get(h, end), gang.launched.get(h, end)))
    return order[-1:]


def summary(order: list[Gang], gone: int = 0, ahead: int = 0) -> str:
    """``"12 / 18 done"``: how far the island is, in what room there is beside the figure.

    gone, ahead: gangs that are done and forgotten, and that are granted far ahead.
    """
    if not order:
        return ""
    done, known = sum(gang.over for gang in order) + gone, len(order) + gone + ahead
    texts = f"{done} / {known} done", f"{done}/{known} done", f"{done}/{known}"
    return next((text for text in texts if wide(text) <= RIGHT - 8), f"{done} done")


def _layer(
    state: str,
    boxes: dict[str, list[tuple[float, ...]]],
    hover: tuple[tuple[str, str], ...],
    whys: dict[str, list[str]] | None = None,
    alpha: float = 1.0,
    hatch: str = "",
    lined: bool = False,
) -> Layer:
    values = list(zip(*boxes[state], strict=True)) or [()] * len(TYPES)
    columns: dict[str, Any] = {
        name: np.array(column, kind)
        for (name, kind), column in zip(TYPES.items(), values, strict=True)
    }
    if whys is not None:
        columns["why"] = whys[state]
    return Layer(
        f"order-{state}",
        BOXES,
        columns,
        hover=hover,
        alpha=alpha,
        hatch=hatch,
        edged=True,
        lined=lined,
        corner=2,
    )


def _box(
    scene: Scene, gang: Gang, host: str, state: str, column: int, row: float, place: int
) -> tuple[float, ...]:
    """One box, in the order of :data:`TYPES`."""
    unknown = float("nan")
    times = (
        gang.granted if gang.granted is not None else unknown,
        gang.launched.get(host, unknown),
        gang.started.get(host, unknown),
        gang.ended.get(host, unknown),
    )
    return (
        column + 0.08,
        column + 0.92,
        row - 0.38,
        row + 0.38,
        1 if state in ("failed", "overdue") else scene.palette.code(gang.program, gang.node),
        scene.catalogue.row(What(gang.node, gang.program, gang.client, gang.line)),
        place,
        number(gang.run, gang.step),
        *(time - scene.origin for time in times),
    )
