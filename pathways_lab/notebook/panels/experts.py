"""Experts: how many rows each got, as the mean of the last runs, and in the newest one.

Bars of one length mean that the router is fair.  No row is ever dropped: an expert has no capacity.

Paper: section 6.3 (mixture of experts).
"""

from __future__ import annotations

from pathways_lab.notebook.scene.palette import INK
from pathways_lab.notebook.scene.plot import BOXES, LINES, Layer, Plot, blank, put
from pathways_lab.notebook.scene.scene import Scene

TALL = 0.36
"""Half the height of a bar, in rows."""

LABELLED = 11.0
"""Pixels of a row from which on it has a label."""

HOVER = (
    ("", "expert @expert of @node in @program"),
    ("rows", "@mean on average, @newest in the newest run"),
)


def plot(scene: Scene, now: float) -> Plot:
    """The panel at *now* (seconds)."""
    bars = blank(
        ("left", "right", "top", "bottom", "fill", "program", "node", "expert", "mean", "newest")
    )
    marks = blank(("xs", "ys", "fill", "width"))
    rows, groups, readouts = {}, {}, {}
    notes, most, at = [], 1.0, 0.0
    for (program, _, node), table in scene.balance.counts().items():
        means, newest = table.mean(axis=0), table[-1]
        most = max(most, float(means.max()), float(newest.max()))
        largest, runs = means.max() / max(means.mean(), 1e-9), len(table)
        over = "one run" if runs == 1 else f"the last {runs} runs"
        notes.append(f"{node}: largest is {largest:.2f} of the mean of {over}")
        groups[at + (len(means) - 1) / 2] = node
        for expert, (mean, last) in enumerate(zip(means.tolist(), newest.tolist(), strict=True)):
            box = (0.0, mean, at - TALL, at + TALL, scene.palette.colour(program), program, node)
            put(bars, *box, expert, f"{mean:.1f}", f"{last:.0f}")
            put(marks, [last, last], [at - TALL, at + TALL], INK, 2)
            rows[at] = str(expert)
            readouts[at] = f"{mean:.0f}"
            at += 1
        at += 0.5
    each = max(4.0, min(18.0, 240.0 / max(len(rows), 1)))
    labelled = each >= LABELLED
    return Plot(
        name="experts",
        title="Rows by expert",
        note="; ".join((*notes, "line: the newest; none dropped")),
        height=max(44, round(each * (at + 0.5))),
        x=(0.0, 1.05 * most),
        y=(-0.7, max(at - 0.5, 0.5) + 0.2),
        layers=(
            Layer("experts-mean", BOXES, bars, hover=HOVER),
            Layer("experts-newest", LINES, marks),
        ),
        rows=rows if labelled else {},
        groups=groups,
        readouts=readouts if labelled else {},
        empty="" if rows else "no expert has got rows yet",
    )
