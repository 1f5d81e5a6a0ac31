"""The figure of a benchmark: an SVG file, drawn as the lab's frozen pictures are.

Every row is a system in a case: a dot at the median, a line over the quartiles,
on one logarithmic axis of time.  Curves are for what changes with a size.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from benchmarks.harness.numbers import brief, seconds, spread
from pathways_lab.notebook.draw.svg import Sheet
from pathways_lab.notebook.scene.palette import HUES, INK
from pathways_lab.notebook.scene.plot import WIDTH

LEFT, RIGHT, TOP, ROW = 320, 90, 64, 18
CURVES = 320
"""Height of the drawing area of curves in pixels."""


class Axis:
    """Maps a positive number to pixels, logarithmically."""

    def __init__(self, values: Sequence[float], start: float, end: float) -> None:
        low, high = min(values), max(values)
        self.low, self.high = math.log10(low) - 0.05, math.log10(high) + 0.05
        self.start, self.end = start, end

    def __call__(self, value: float) -> float:
        share = (math.log10(value) - self.low) / (self.high - self.low)
        return self.start + share * (self.end - self.start)

    def ticks(self) -> list[float]:
        """Powers of ten inside; 1, 2, 5 of each where there are few."""
        powers = range(math.floor(self.low), math.ceil(self.high) + 1)
        steps = (1,) if self.high - self.low > 2 else (1, 2, 5)
        every = [step * 10.0**power for power in powers for step in steps]
        return [tick for tick in every if self.low <= math.log10(tick) <= self.high]


def dots(title: str, times: Mapping[str, Mapping[str, Sequence[float]]], label: str) -> str:
    """case -> system -> samples in seconds, as an SVG file."""
    sheet = Sheet()
    sheet.text(0, 12, title, bold=True, size=15)
    sheet.text(0, 34, f"{label}: median and quartiles, logarithmic; left is faster")
    samples = [value for of in times.values() for values in of.values() for value in values]
    if not samples:
        sheet.text(0, TOP, "nothing could be measured")
        return sheet.finish(TOP + 20, title, label, {})
    across = Axis(samples, LEFT, WIDTH - RIGHT)
    colours = _colours([system for of in times.values() for system in of])
    y = float(TOP)
    for case, of in times.items():
        if not of:
            continue
        sheet.text(0, y, case, bold=True)
        for system, values in of.items():
            middle = spread(values)
            left, right = across(middle.low), max(across(middle.high), across(middle.low) + 1)
            paint = f'stroke="{colours[system]}"'
            sheet.path(f"M{left:.1f} {y:.1f}H{right:.1f}", f'{paint} stroke-width="3" fill="none"')
            at = across(middle.median)
            sheet.path(f"M{at:.1f} {y:.1f}h0", f'{paint} stroke-width="9" stroke-linecap="round"')
            sheet.text(LEFT - 12, y, system, anchor="end")
            sheet.text(WIDTH - RIGHT + 8, y, seconds(middle.median))
            y += ROW
        y += ROW / 2
    for tick in across.ticks():
        at = across(tick)
        sheet.path(f"M{at:.1f} {TOP - 12}V{y:.1f}", f'stroke="{INK}" stroke-opacity=".3"')
        sheet.text(at, y + 10, seconds(tick), anchor="middle")
    return sheet.finish(y + 24, title, label, {"medians": _medians(times)})


def curves(
    title: str,
    lines: Mapping[str, Sequence[tuple[float, float]]],
    x_label: str,
    y_label: str,
    level: float | None = None,
) -> str:
    """name -> (x, y) points with positive x and y, both axes logarithmic, as an SVG file.

    level: a value of y that is marked by a rule.
    """
    sheet = Sheet()
    sheet.text(0, 12, title, bold=True, size=15)
    sheet.text(0, 34, f"{y_label} against {x_label}, logarithmic")
    points = [point for line in lines.values() for point in line]
    if not points:
        sheet.text(0, TOP, "nothing could be measured")
        return sheet.finish(TOP + 20, title, y_label, {})
    left, bottom = 70, TOP + CURVES
    across = Axis([x for x, _ in points], left, WIDTH - 230)
    levels = [] if level is None else [level]
    up = Axis([*(y for _, y in points), *levels], bottom, TOP)
    for tick in across.ticks():
        at = across(tick)
        sheet.path(f"M{at:.1f} {TOP}V{bottom}", f'stroke="{INK}" stroke-opacity=".3"')
        sheet.text(at, bottom + 12, brief(tick), anchor="middle")
    for tick in up.ticks():
        at = up(tick)
        sheet.path(f"M{left} {at:.1f}H{WIDTH - 230}", f'stroke="{INK}" stroke-opacity=".3"')
        sheet.text(left - 6, at, brief(tick), anchor="end")
    if level is not None:
        sheet.path(
            f"M{left} {up(level):.1f}H{WIDTH - 230}",
            f'stroke="{INK}" stroke-width="2" stroke-dasharray="6 4"',
        )
    for number, (name, line) in enumerate(lines.items()):
        colour = HUES[number % len(HUES)]
        d = "L".join(f"{across(x):.1f} {up(y):.1f}" for x, y in sorted(line))
        dash = ' stroke-dasharray="3 3"' if number >= len(HUES) else ""
        sheet.path(f"M{d}", f'stroke="{colour}" stroke-width="2.5" fill="none"{dash}')
        at = TOP + ROW * number
        sheet.path(f"M{WIDTH - 215} {at}h14", f'stroke="{colour}" stroke-width="4"{dash}')
        sheet.text(WIDTH - 195, at, name)
    sheet.text((left + WIDTH - 230) / 2, bottom + 30, x_label, anchor="middle")
    height = max(bottom + 44, TOP + ROW * len(lines) + 20)
    return sheet.finish(height, title, y_label, {"lines": {k: list(v) for k, v in lines.items()}})


def _colours(systems: Sequence[str]) -> dict[str, str]:
    names = list(dict.fromkeys(systems))
    return {name: HUES[number % len(HUES)] for number, name in enumerate(names)}


def _medians(times: Mapping[str, Mapping[str, Sequence[float]]]) -> dict[str, dict[str, float]]:
    return {
        case: {system: spread(values).median for system, values in of.items()}
        for case, of in times.items()
    }
