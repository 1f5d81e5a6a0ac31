"""Memory and DCN: bytes in use on each island's devices, and bytes that arrive from others.

Paper: section 4.6 (memory of buffers), 5.3 (transfers over the DCN).
"""

from __future__ import annotations

import numpy as np

from pathways_lab.core.memory.holdings import size
from pathways_lab.notebook.panels.utilisation import steps
from pathways_lab.notebook.scene.palette import ARRIVES, CAUSE_COLOURS
from pathways_lab.notebook.scene.plot import AREAS, Layer, Plot, blank, put
from pathways_lab.notebook.scene.scene import Scene

TALL = 0.42
"""Height of the larger of each quantity, in rows; a row is an island's."""

SHOWN = 8
"""How many times more there may be than is in use, for what there is to be the scale."""

HOVER = (("", "@name on @island"), ("most", "@most"))


def plot(scene: Scene, now: float) -> Plot:
    """The panel at *now* (seconds)."""
    islands = scene.machine.islands
    start, end = scene.range(now)
    areas = blank(("xs", "ys", "fill", "name", "island", "most"))
    edges, rates = scene.by_dcn.shares(now, max(1, round(10 * scene.span(now) / scene.window)))
    levels = {island: used.levels(now) for island, used in scene.used.items()}
    most_used = max((max(values, default=0.0) for _, values in levels.values()), default=0.0)
    there = max((_memory(scene, island) for island in islands), default=0)
    # The memory that is there is the scale, unless used memory could not be seen on it.
    most_used = float(there) if most_used <= there <= SHOWN * most_used else most_used
    most_rate = max((float(r.max(initial=0.0)) for r in rates.values()), default=0.0)
    readouts = {}
    scales = {}

    def draw(name: str, island: str, xs: list[float], values: list[float], most: float,
             floor: float, colour: str, text: str) -> None:  # fmt: skip
        if not xs or most <= 0:
            return
        edge, heights = np.array(xs), np.array(values) / most * TALL
        outline, ys = steps(edge, end, np.zeros(len(edge)), heights)
        put(areas, outline, [round(floor - y, 4) for y in ys], colour, name, island, text)

    for row, island in enumerate(islands):
        times, used = levels.get(island, ([], []))
        times = [max(start, time - scene.origin) for time in times]
        top = max(used, default=0.0)
        scales[row - 0.02 - TALL] = size(most_used) if most_used else ""
        scales[row + 0.46 - TALL] = f"{size(most_rate)}/s" if most_rate else ""
        draw("memory", island, times, used, most_used, row - 0.02,
             CAUSE_COLOURS[2], size(top))  # fmt: skip
        rate = rates.get(island, np.zeros(0))
        peak = float(rate.max(initial=0.0))
        draw("DCN", island, list(edges - scene.origin) if len(rate) else [], list(rate), most_rate,
             row + 0.46, ARRIVES, f"{size(peak)}/s")  # fmt: skip
        readouts[row - 0.22] = size(used[-1]) if used else ""
        readouts[row + 0.26] = f"{size(peak)}/s" if peak > 0 else ""
    return Plot(
        name="memory",
        title="Memory and DCN",
        note="above, bytes in use (right: now); below, bytes from other islands (right: most)",
        height=max(56, min(300, 60 * len(islands) + 4)),
        x=scene.range(now),
        y=(-0.52, max(len(islands), 1) - 0.48),
        layers=(Layer("memory-areas", AREAS, areas, hover=HOVER),),
        time=True,
        brief=True,
        groups={float(row): island for row, island in enumerate(islands)},
        readouts=readouts,
        rows=scales,
        rules=tuple(row + at for row in range(len(islands)) for at in (-0.02 - TALL, -0.02, 0.46)),
        empty="" if scene.used or rates else "nothing measured yet",
    )


def _memory(scene: Scene, island: str) -> int:
    """Bytes of all devices of an island, as far as hosts have said it."""
    return sum(host.memory * host.devices for host in scene.machine.hosts_of(island))
