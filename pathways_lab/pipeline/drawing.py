"""A schedule with its times, drawn.

Problem: what a schedule gains is where its gaps are, and letters in a row show that
badly as soon as tasks differ in length.

Rule for maintainers: one small SVG, readable in light and in dark.

Paper: figure 10.
"""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import NamedTuple

from pathways_lab.timeline.roles import COLOURS

WIDTH, ROW, LEFT = 860, 22, 64


class Box(NamedTuple):
    """A task with its time, in any unit.  text: in it, where there is room.  name: in full."""

    row: int
    start: float
    end: float
    kind: str
    text: str
    name: str


def svg(title: str, rows: int, boxes: Sequence[Box]) -> str:
    """The drawing: a row per slice, a box per task."""
    scale = (WIDTH - LEFT) / (max((box.end for box in boxes), default=0) or 1)
    parts = [
        f'<text x="0" y="{ROW * n + 15}" fill="currentColor">slice {n}</text>'
        f'<rect x="{LEFT}" y="{ROW * n + 2}" width="{WIDTH - LEFT}" height="{ROW - 4}"'
        ' fill="currentColor" fill-opacity="0.08"/>'
        for n in range(rows)
    ]
    for box in boxes:
        x, y, width = LEFT + box.start * scale, ROW * box.row, (box.end - box.start) * scale
        parts.append(
            f'<rect x="{x:.1f}" y="{y + 2}" width="{max(width - 1, 0.5):.1f}" height="{ROW - 4}"'
            f' fill="{COLOURS[box.kind]}"><title>{html.escape(box.name)}</title></rect>'
        )
        if width >= 7 * len(box.text) + 3:
            parts.append(
                f'<text x="{x + width / 2:.1f}" y="{y + 15}" fill="white" text-anchor="middle">'
                f"{html.escape(box.text)}</text>"
            )
    shown = [kind for kind in COLOURS if any(box.kind == kind for box in boxes)]
    legend = "".join(
        f'<rect x="{LEFT + 110 * n}" y="{ROW * rows + 6}" width="10" height="10"'
        f' fill="{COLOURS[kind]}"/><text x="{LEFT + 15 + 110 * n}" y="{ROW * rows + 15}"'
        f' fill="currentColor">{kind}</text>'
        for n, kind in enumerate(shown)
    )
    height = ROW * (rows + 1)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img"'
        f' style="max-width:{WIDTH}px;width:100%" font-family="sans-serif" font-size="12">'
        f"<title>{html.escape(title)}</title>{''.join(parts)}{legend}</svg>"
    )
