"""Gang order: what every island was told to run, in order, and how far it is.

A row per host, a column per place in the island's order, so that one gang is
lined up across its hosts: the same order everywhere is what the eye sees.
Hollow = granted, hatched = launched, solid = done.  The columns around the
frontier between done and not done are shown, however far grants run ahead.

Paper: section 4.4 (gang-scheduled dispatch), 4.5 (grants ahead of the data).
"""

from __future__ import annotations

import numpy as np

from pathways_lab.notebook.plot import BOXES, CATALOGUE, DATA, Layer, Plot
from pathways_lab.notebook.rows import rows
from pathways_lab.notebook.scene import Scene, What
from pathways_lab.timeline.gangs import STATES, Gang

PLACES, MOST_PLACES = 40, 160
"""Columns shown while it runs, and at most when it is over."""

MOST_ROWS = 16
"""Hosts that get a row each; of more, an island's share one row."""

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
LAUNCHED = (*ABOUT, ("launched", "@launched{0.0000} s"))
ENDED = (*LAUNCHED, ("ran", "@started{0.0000} s to @ended{0.0000} s"))


def plot(scene: Scene, now: float) -> Plot:
    """The panel at *now* (seconds)."""
    together = len(scene.machine.hosts) > MOST_ROWS
    layout = rows(scene.machine, "island" if together else "host")
    row_of = {lane.host: row for lane, row in layout.of.items()}
    orders = {island: scene.gangs.order(island) for island in layout.groups.values()}
    places = PLACES
    if scene.final:
        longest = max((len(order) for order in orders.values()), default=0)
        room = MOST_BOXES // max(1, len(layout.labels))
        places = max(PLACES, min(longest, room, MOST_PLACES))
    boxes: dict[str, list[tuple[float, ...]]] = {state: [] for state in STATES}
    readouts = {}
    for at, island in layout.groups.items():
        order = orders[island]
        readouts[at] = summary(order, scene.gangs.gone.get(island, 0))
        for column, gang in enumerate(around_frontier(order, places)):
            for host in _slowest(gang) if together else gang.where:
                if host in row_of:
                    state = gang.state if together else gang.state_on(host)
                    boxes[state].append(_box(scene, gang, host, state, column, row_of[host]))
    return Plot(
        name="order",
        title="Gang order",
        note="one column per gang, the same on every host:   □ granted   ▨ launched   ■ done",
        height=max(46, min(260, round(22 * layout.end + 24))) if layout.of else 46,
        x=(-0.2, places + 0.2),
        y=(-0.62, max(layout.end, 0.5) + 0.12),
        layers=(
            _layer("granted", boxes, ABOUT, alpha=0.1),
            _layer("launched", boxes, LAUNCHED, alpha=0.35, hatch="right_diagonal_line"),
            _layer("done", boxes, ENDED, lined=True),
            _layer("failed", boxes, ENDED, alpha=0.25, hatch="x"),
            Layer(CATALOGUE, DATA, scene.catalogue_columns()),
        ),
        rows=layout.labels,
        groups=layout.groups,
        readouts=readouts,
        bands=layout.bands[1::2],
        empty="" if scene.started else "waiting for the first gang",
    )


def around_frontier(order: list[Gang], places: int = PLACES) -> list[Gang]:
    """The gangs to show."""
    frontier = next(
        (n for n, gang in enumerate(order) if gang.state in ("granted", "launched")), len(order)
    )
    end = min(len(order), max(frontier + AHEAD, places))
    return order[max(0, end - places) : end]


def _slowest(gang: Gang) -> tuple[str, ...]:
    """The host that a gang waits for, or waited for longest."""
    if not gang.where:
        return ()
    end = float("inf")
    return (max(gang.where, key=lambda h: (gang.ended.get(h, end), gang.launched.get(h, end))),)


def summary(order: list[Gang], gone: int = 0) -> str:
    """``"12 / 18 done"``: how far the island is; *gone* gangs are done and forgotten."""
    if not order:
        return ""
    done = sum(1 for gang in order if gang.state in ("done", "failed"))
    return f"{done + gone} / {len(order) + gone} done"


def _layer(
    state: str,
    boxes: dict[str, list[tuple[float, ...]]],
    hover: tuple[tuple[str, str], ...],
    alpha: float = 1.0,
    hatch: str = "",
    lined: bool = False,
) -> Layer:
    values = list(zip(*boxes[state], strict=True)) or [()] * len(TYPES)
    columns = {
        name: np.array(column, kind)
        for (name, kind), column in zip(TYPES.items(), values, strict=True)
    }
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
    scene: Scene, gang: Gang, host: str, state: str, column: int, row: float
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
        1 if state == "failed" else scene.palette.code(gang.program, gang.node),
        scene.what(What(gang.node, gang.program, gang.client, gang.line)),
        gang.place[1],
        *(time - scene.origin for time in times),
    )
