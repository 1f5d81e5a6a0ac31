"""Memory and DCN: bytes in use on each island's devices, and bytes that arrive from others.

Paper: section 4.6 (memory of buffers), 5.3 (transfers over the DCN).
"""

from __future__ import annotations

import numpy as np

from pathways_lab.notebook.palette import CAUSE_COLOURS
from pathways_lab.notebook.panels.utilisation import steps
from pathways_lab.notebook.plot import AREAS, Layer, Plot
from pathways_lab.notebook.scene import Scene
from pathways_lab.notebook.text import size

TALL = 0.42
"""Height of the larger of each quantity, in rows; a row is an island's."""

HOVER = (("", "@name on @island"), ("most", "@most"))


def plot(scene: Scene, now: float) -> Plot:
    """The panel at *now* (seconds)."""
    islands = scene.machine.islands
    start, end = scene.range(now)
    areas: dict[str, list[object]] = {n: [] for n in ("xs", "ys", "fill", "name", "island", "most")}
    edges, rates = scene.by_dcn.shares(now, (), max(1, round(10 * scene.span(now) / scene.window)))
    most_used = max((v for used in scene.used.values() for _, v in used), default=0.0)
    most_rate = max((float(r.max(initial=0.0)) for r in rates.values()), default=0.0)
    readouts = {}

    def draw(name: str, island: str, xs: list[float], values: list[float], most: float,
             floor: float, colour: str, text: str) -> None:  # fmt: skip
        if not xs or most <= 0:
            return
        edge, heights = np.array(xs), np.array(values) / most * TALL
        outline, ys = steps(edge, end, np.zeros(len(edge)), heights)
        areas["xs"].append(outline)
        areas["ys"].append([round(floor - y, 4) for y in ys])
        areas["fill"].append(colour)
        areas["name"].append(name)
        areas["island"].append(island)
        areas["most"].append(text)

    for row, island in enumerate(islands):
        used = list(scene.used.get(island, ()))
        times = [max(start, t - scene.origin) for t, _ in used]
        top = max((v for _, v in used), default=0.0)
        draw("memory", island, times, [v for _, v in used], most_used, row - 0.02,
             CAUSE_COLOURS[2], size(top))  # fmt: skip
        rate = rates.get(island, np.zeros(0))
        peak = float(rate.max(initial=0.0))
        draw("DCN", island, list(edges - scene.origin) if len(rate) else [], list(rate), most_rate,
             row + 0.46, CAUSE_COLOURS[4], f"{size(peak)}/s")  # fmt: skip
        readouts[row - 0.22] = size(used[-1][1]) if used else ""
        readouts[row + 0.26] = f"{size(peak)}/s" if peak > 0 else ""
    return Plot(
        name="memory",
        title="Memory and DCN",
        note="above, bytes in use (right: now); below, bytes from other islands (right: most)",
        height=max(56, min(240, 52 * len(islands) + 4)),
        x=scene.range(now),
        y=(-0.52, max(len(islands), 1) - 0.48),
        layers=(Layer("memory-areas", AREAS, areas, hover=HOVER),),
        time=True,
        groups={float(row): island for row, island in enumerate(islands)},
        readouts=readouts,
        rules=tuple(row + at for row in range(len(islands)) for at in (-0.02, 0.46)),
        empty="" if scene.used or rates else "no sample of memory and no transfer yet",
    )
