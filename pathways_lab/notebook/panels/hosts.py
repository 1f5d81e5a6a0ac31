"""Host work: what each host's process does so that its devices compute.

A lane per host: receiving a grant, preparing (waiting for nothing: addresses,
buffers), launching, sending.  Dispatch is parallel and asynchronous when these
marks run ahead of the bars below them.  A lane per worker that makes elements of feeds
stands below those of the hosts: preparing is the making of an element.

Paper: figure 4 (sequential and parallel asynchronous dispatch).
"""

from __future__ import annotations

from pathways_lab.notebook.scene.plot import BOXES, CATALOGUE, DATA, Layer, Plot
from pathways_lab.notebook.scene.scene import WORK, Scene

HOVER = (
    ("work", "@kind{custom}"),
    ("for", "@what{node} of @what{program}"),
    ("client", "@what{client}"),
    ("from", "@left{0.00000} s to @right{0.00000} s"),
    ("took", "@busy{0.000} ms, @count time(s)"),
)


def plot(scene: Scene, now: float) -> Plot:
    """The panel at *now* (seconds)."""
    rows = scene.host_rows
    count = len(rows.labels)
    each = max(4.0, min(20.0, 200.0 / max(count, 1)))
    table = scene.worked.table
    return Plot(
        name="hosts",
        title="Host work",
        note="from the top of each lane: " + ", ".join(WORK),
        height=max(44, round(each * (rows.end + 0.5))),
        x=scene.range(now),
        y=(-0.6, max(rows.end, 0.5) + 0.1),
        layers=(
            Layer(
                "hosts-work",
                BOXES,
                table.columns(),
                first=table.first,
                hover=HOVER,
                kinds=WORK,
                lined=True,
                edged=True,  # most are shorter than a pixel
            ),
            Layer(CATALOGUE, DATA, scene.catalogue.columns()),
        ),
        time=True,
        rows=rows.labels if each >= 13 else {},
        groups=rows.groups,
        bands=rows.bands[1::2],
        empty="" if len(table) else "no control work is recorded" if scene.started else "",
    )
