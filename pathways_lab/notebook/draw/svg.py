"""Plots become one SVG file: the frozen picture, readable anywhere.

Problem: when a run has ended its picture must survive saving, reopening
without a kernel, distrust, and conversion, in any front end and theme, in few
kilobytes.  An SVG file inside an ``<img>`` does; it can use nothing of the page.

Rule for maintainers: same plots, same numbers as the live figures.  Boxes of one
colour are one path, so a bar costs some 20 bytes.  Text and rules have the ink of
the ground (``currentColor``), which follows the page's scheme of colours.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any
from xml.sax.saxutils import escape

from pathways_lab.notebook.scene.overview import Overview
from pathways_lab.notebook.scene.palette import DARK, EMPTY, INK, LIGHT, PAINTS
from pathways_lab.notebook.scene.plot import (
    AREAS,
    BOXES,
    LEFT,
    LINES,
    RIGHT,
    TEXTS,
    WIDTH,
    Layer,
    Plot,
    moments,
    nice,
    wide,
)

HEADING, STRIP, EDGE = 30, 18, 8
"""Pixels above a plot, of an overview, and around all of it."""

HERE = "currentColor"
"""The ink of the ground."""

GROUND = (
    f"<style>svg{{color:{LIGHT[1]}}}.ground{{fill:{LIGHT[0]}}}"
    f"@media(prefers-color-scheme:dark){{svg{{color:{DARK[1]}}}.ground{{fill:{DARK[0]}}}}}</style>"
    f'<rect class="ground" x="-{EDGE}" y="-{EDGE}" width="100%" height="100%"/>'
)
"""The ground of a file whose view box begins :data:`EDGE` before its content."""

FEW = 800
"""Boxes of a layer up to which they are set off from each other."""

SEAM = 4.0
"""Boxes wider than this (pixels) are set off from their neighbours by a fine line."""

FONT = "system-ui,-apple-system,'Segoe UI',Helvetica,Arial,sans-serif"

HATCHES = {
    "right_diagonal_line": "M-1 7L7 -1M-1 1L1 -1M5 7L7 5",
    "x": "M0 0L6 6M6 0L0 6",
    "vertical_line": "M3 0V6",
}


@dataclass(slots=True)
class Sheet:
    """An SVG file in the making; sizes in pixels."""

    parts: list[str] = field(default_factory=list)
    hatches: dict[tuple[str, str], str] = field(default_factory=dict)

    def text(
        self, x: float, y: float, text: str, anchor: str = "start", bold: bool = False,
        ink: str = HERE, size: int = 12,
    ) -> None:  # fmt: skip
        """One line of text; *y* is its middle."""
        style = ' font-weight="600"' if bold else ""
        size_ = f' font-size="{size}"' if size != 12 else ""
        at = "" if anchor == "start" else f' text-anchor="{anchor}"'
        self.parts.append(
            f'<text x="{short(x)}" y="{short(y + 0.35 * size)}" fill="{ink}"{at}{style}{size_}>'
            f"{escape(text)}</text>"
        )

    def path(self, d: str, style: str) -> None:
        """A filled or drawn path."""
        self.parts.append(f'<path d="{d}" {style}/>')

    def hatch(self, name: str, colour: str) -> str:
        """The id of a hatch in a colour."""
        key = (name, colour)
        return self.hatches.setdefault(key, f"h{len(self.hatches)}")

    def finish(self, height: float, title: str, description: str, facts: Mapping[str, Any]) -> str:
        """The whole file."""
        defs = "".join(
            f'<pattern id="{name}" width="6" height="6" patternUnits="userSpaceOnUse">'
            f'<path d="{HATCHES[hatch]}" stroke="{colour}" stroke-width="1.4" fill="none"/>'
            "</pattern>"
            for (hatch, colour), name in self.hatches.items()
        )
        return (
            f'{opened(WIDTH, round(height))} font-family="{FONT}" font-size="12" role="img">'
            f"{GROUND}<title>{escape(title)}</title><desc>{escape(description)}</desc>"
            f"<metadata>{escape(json.dumps(dict(facts)))}</metadata>"
            f"<defs>{defs}</defs>{''.join(self.parts)}</svg>"
        )


def opened(width: int, height: int) -> str:
    """The begin of a file with so much room for its content."""
    wide, tall = width + 2 * EDGE, height + 2 * EDGE
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{wide}" height="{tall}" '
        f'viewBox="-{EDGE} -{EDGE} {wide} {tall}"'
    )


def inked(colour: str) -> str:
    """A panel's colour as a file has it."""
    return HERE if colour == INK else colour


def short(number: float, digits: int = 2) -> str:
    """A pixel coordinate in few characters."""
    text = f"{number:.{digits}f}".rstrip("0").rstrip(".")
    return text if text != "-0" else "0"


@dataclass(frozen=True, slots=True)
class Frame:
    """Maps a plot's coordinates to the sheet's pixels."""

    plot: Plot
    top: float

    def x(self, value: float) -> float:
        low, high = self.plot.x
        return LEFT + (value - low) / (high - low) * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        low, high = self.plot.y
        return self.top + (value - low) / (high - low) * self.plot.height


def picture(
    plots: Sequence[Plot],
    title: str,
    notes: Sequence[str] = (),
    legend: Iterable[tuple[str, Sequence[tuple[str, str]]]] = (),
    facts: Mapping[str, Any] | None = None,
    description: str = "",
    advice: str = "",
    overview: Overview | None = None,
) -> str:
    """The SVG file of some plots below each other.

    facts: numbers about what is drawn, kept inside the file for whoever checks.
    advice: a sentence above the plots.
    overview: of all that was, below plots that show the last part of it.
    """
    sheet = Sheet()
    sheet.text(0, 12, title, bold=True, size=15)
    if notes:
        sheet.text(WIDTH, 12, " · ".join(notes), anchor="end")
    top = 26 + _legend(sheet, legend)
    for line in _wrapped(advice):
        top += 18
        sheet.text(0, top - 10, line)
    timed = [plot for plot in plots if plot.time]
    for plot in plots:
        sheet.text(LEFT, top + HEADING - 13, plot.title, bold=True, size=13)
        beside = LEFT + 14 + wide(plot.title, bold=True, size=13)
        sheet.text(beside, top + HEADING - 13, plot.note)
        frame = Frame(plot, top + HEADING)
        _ground(sheet, frame)
        for layer in plot.layers:
            _layer(sheet, frame, layer)
        _labels(sheet, frame)
        top = frame.top + plot.height
        if timed and plot is timed[-1]:
            _time_axis(sheet, frame)
            top += 22
            if overview is not None:
                _overview(sheet, top + 6, plot.x, overview)
                top += 6 + STRIP + 16
    return sheet.finish(top + 4, title, description, facts or {})


def _wrapped(text: str) -> list[str]:
    """A text in lines that are not wider than the drawing."""
    lines: list[str] = []
    for word in text.split():
        longer = f"{lines[-1]} {word}" if lines else ""
        if longer and wide(longer) <= WIDTH:
            lines[-1] = longer
        else:
            lines.append(word)
    return lines


def _legend(sheet: Sheet, legend: Iterable[tuple[str, Sequence[tuple[str, str]]]]) -> float:
    """Swatches in rows; returns the height that they take."""
    x, y = 0.0, 34.0
    height = 0.0
    for program, nodes in legend:
        height = height or 16.0
        first = wide(nodes[0][0]) + 26 if nodes else 0.0
        if x and x + wide(program, bold=True) + 12 + first > WIDTH:
            x, y, height = 0.0, y + 18, height + 18
        sheet.text(x, y, program, bold=True)
        x += wide(program, bold=True) + 12
        for name, colour in nodes:
            if x + wide(name) + 16 > WIDTH:
                x, y, height = 0.0, y + 18, height + 18
            edge = 'stroke="#808080"' if colour == EMPTY else ""
            sheet.path(f"M{short(x)} {short(y - 5)}h11v11h-11z", f'fill="{colour}" {edge}')
            sheet.text(x + 16, y, name)
            x += wide(name) + 30
        x += 12
    return height


def _ground(sheet: Sheet, frame: Frame) -> None:
    plot = frame.plot
    for low, high in plot.bands:
        box = _box(LEFT, WIDTH - RIGHT, frame.y(low), frame.y(high))
        sheet.path(box, 'fill="#808080" fill-opacity=".07"')
    if plot.time:
        ticks = "".join(
            f"M{short(frame.x(t))} {short(frame.top)}v{plot.height}" for t in nice(*plot.x)
        )
        sheet.path(ticks, 'stroke="#808080" stroke-opacity=".18"')
    if plot.rules:
        rules = "".join(f"M{LEFT} {short(frame.y(y))}H{WIDTH - RIGHT}" for y in plot.rules)
        sheet.path(rules, f'stroke="{HERE}" stroke-opacity=".35"')
    ahead = plot.grounds[f"{plot.name}-ahead"]
    for at, word in zip(ahead["x0"], ahead["text"], strict=True):
        left = frame.x(at)
        veil = _box(left, WIDTH - RIGHT, frame.top, frame.top + plot.height)
        sheet.path(veil, 'fill="#808080" fill-opacity=".15" data-layer="ahead"')
        sheet.path(
            f"M{short(left)} {short(frame.top)}v{plot.height}",
            f'stroke="{HERE}" stroke-dasharray="4"',
        )
        sheet.text(left + 5, frame.top + 7, word)


def _labels(sheet: Sheet, frame: Frame) -> None:
    plot = frame.plot
    inner = max((len(text) for text in plot.rows.values()), default=0)
    for y, text in plot.rows.items():
        sheet.text(LEFT - 4, frame.y(y), text, anchor="end")
    for y, text in plot.groups.items():
        # Left of the rows' labels, but nothing is cut off.
        end = max(LEFT - 16 - max(50.0, 6.6 * inner), wide(text, bold=True))
        sheet.text(end, frame.y(y), text, anchor="end", bold=True)
    for y, text in plot.readouts.items():
        if text:
            sheet.text(WIDTH - RIGHT + 8, frame.y(y), text)
    if plot.empty:
        middle = frame.top + plot.height / 2
        sheet.text((LEFT + WIDTH - RIGHT) / 2, middle, plot.empty, anchor="middle")


def _time_axis(sheet: Sheet, frame: Frame) -> None:
    bottom = frame.top + frame.plot.height
    sheet.path(f"M{LEFT} {short(bottom)}H{WIDTH - RIGHT}", f'stroke="{HERE}" stroke-opacity=".5"')
    for t, text in moments(*frame.plot.x).items():
        sheet.text(frame.x(t), bottom + 12, text, anchor="middle")


def _overview(sheet: Sheet, top: float, shown: tuple[float, float], overview: Overview) -> None:
    """How busy devices were all the time, and a frame around the part that is shown above."""
    begin, length, digits = overview
    low, high = min(begin, shown[0]), max(begin + length * len(digits), shown[1])
    scale = (WIDTH - LEFT - RIGHT) / (high - low)
    bottom = top + STRIP

    def x(time: float) -> float:
        return LEFT + (time - low) * scale

    sheet.text(LEFT - 8, top + STRIP / 2, "everything", anchor="end", bold=True)
    parts = "".join(
        _box(
            x(begin + length * n), x(begin + length * (n + 1)), bottom - STRIP * int(d) / 9, bottom
        )
        for n, d in enumerate(digits)
        if d != "0"
    )
    sheet.path(parts, f'fill="{HERE}" fill-opacity=".55" data-layer="overview"')
    sheet.path(f"M{LEFT} {short(bottom)}H{WIDTH - RIGHT}", f'stroke="{HERE}" stroke-opacity=".5"')
    frame = _box(x(shown[0]), max(x(shown[1]), x(shown[0]) + 2), top - 2, bottom + 2)
    sheet.path(frame, f'fill="none" stroke="{HERE}" stroke-width="1.6" data-layer="shown"')
    for anchor, at, time in (("start", LEFT, low), ("end", WIDTH - RIGHT, high)):
        sheet.text(at, bottom + 10, f"{round(time, 2):g} s", anchor=anchor)


def _box(left: float, right: float, top: float, bottom: float) -> str:
    return f"M{short(left)} {short(top)}h{short(right - left)}v{short(bottom - top)}H{short(left)}z"


def _layer(sheet: Sheet, frame: Frame, layer: Layer) -> None:
    if layer.kind == BOXES:
        _boxes(sheet, frame, layer)
    elif layer.kind == TEXTS:
        columns = layer.columns
        inks = map(inked, columns.get("ink") or [INK] * len(layer))
        anchor = {"center": "middle"}.get(layer.anchor, layer.anchor)
        for x, y, text, ink in zip(columns["x"], columns["y"], columns["text"], inks, strict=True):
            if not text:
                continue
            sheet.text(frame.x(x), frame.y(y), text, anchor, layer.bold, ink)
    elif layer.kind == AREAS:
        for xs, ys, fill in zip(
            layer.columns["xs"], layer.columns["ys"], layer.columns["fill"], strict=True
        ):
            points = zip(map(frame.x, xs), map(frame.y, ys), strict=True)
            d = _outline([(min(max(x, LEFT), WIDTH - RIGHT), y) for x, y in points])
            sheet.path(d, f'fill="{fill}" fill-opacity=".9"')
    elif layer.kind == LINES:
        _strokes(sheet, frame, layer)


def _strokes(sheet: Sheet, frame: Frame, layer: Layer) -> None:
    """Lines that look alike become one path."""
    columns = layer.columns
    alike: dict[tuple[str, float], list[str]] = {}
    for xs, ys, fill, width in zip(
        columns["xs"], columns["ys"], columns["fill"], columns["width"], strict=True
    ):
        points = (
            f"{short(frame.x(x), 1)} {short(frame.y(y), 1)}" for x, y in zip(xs, ys, strict=True)
        )
        alike.setdefault((inked(fill), round(width, 1)), []).append("M" + "L".join(points))
    for (fill, width), lines in alike.items():
        style = f'stroke="{fill}" stroke-width="{width:g}" stroke-opacity="{layer.alpha:g}"'
        sheet.path("".join(lines), f'fill="none" {style} data-layer="{layer.name}"')


def _outline(points: Sequence[tuple[float, float]]) -> str:
    """A closed path; steps, which change one coordinate only, are written in one number."""
    x, y = short(points[0][0], 1), short(points[0][1], 1)
    parts = [f"M{x} {y}"]
    for point in points[1:]:
        before = x, y
        x, y = short(point[0], 1), short(point[1], 1)
        if x != before[0]:
            parts.append(f"H{x}" if y == before[1] else f"L{x} {y}")
        elif y != before[1]:
            parts.append(f"V{y}")
    return "".join(parts) + "z"


def _boxes(sheet: Sheet, frame: Frame, layer: Layer) -> None:
    """Boxes that look alike become one path."""
    if layer.lined:
        _lines(sheet, frame, layer)
        return
    columns = layer.columns
    alike: dict[tuple[str, float, str], list[str]] = {}
    for n in range(len(layer)):
        fill, alpha = _look(layer, n)
        edge = inked(columns["edge"][n]) if "edge" in columns else fill if layer.edged else ""
        left, right = _extent(frame, layer, n)
        if right >= left:
            top, bottom = frame.y(float(columns["top"][n])), frame.y(float(columns["bottom"][n]))
            box = _box(left, max(right, left + 0.3), top, bottom)
            alike.setdefault((fill, alpha, edge), []).append(box)
    for (fill, alpha, edge), boxes in alike.items():
        d = "".join(boxes)
        opacity = f' fill-opacity="{alpha:g}"' if alpha < 1 else ""
        stroke = f' stroke="{edge}"' if edge else ""
        sheet.path(d, f'fill="{fill}"{opacity}{stroke} data-layer="{layer.name}"')
        if layer.hatch:
            hatch = f"url(#{sheet.hatch(layer.hatch, edge or fill)})"
            sheet.path(d, f'fill="{hatch}" fill-opacity="{layer.hatch_alpha:g}"')


def _look(layer: Layer, n: int) -> tuple[str, float]:
    """Colour and opacity of a box."""
    columns = layer.columns
    fill = PAINTS[columns["paint"][n]] if "paint" in columns else inked(columns["fill"][n])
    return fill, round(float(columns["alpha"][n]), 2) if "alpha" in columns else layer.alpha


def _extent(frame: Frame, layer: Layer, n: int) -> tuple[float, float]:
    """Left and right of a box in pixels, cut to the drawing area."""
    left = frame.x(float(layer.columns["left"][n]))
    right = frame.x(float(layer.columns["right"][n]))
    return max(left, LEFT), min(right, WIDTH - RIGHT)


def _lines(sheet: Sheet, frame: Frame, layer: Layer) -> None:
    """Boxes as thick strokes: a dozen bytes each, so that thousands stay small.

    Fine strokes set wide ones off from a neighbour that they touch, while they are few.
    """
    columns = layer.columns
    rows: dict[tuple[float, float, str, float], list[tuple[float, float]]] = {}
    for n in range(len(layer)):
        left, right = _extent(frame, layer, n)
        if right >= left:
            top, bottom = frame.y(float(columns["top"][n])), frame.y(float(columns["bottom"][n]))
            key = (round((top + bottom) / 2, 1), round(bottom - top, 1), *_look(layer, n))
            rows.setdefault(key, []).append((round(left, 1), round(max(right, left + 0.3), 1)))
    seams: dict[float, list[str]] = {}
    for (middle, thick, fill, alpha), spans in rows.items():
        spans.sort()
        d = [f"M{short(spans[0][0])} {short(middle)}h{short(spans[0][1] - spans[0][0])}"]
        d += [
            f"m{short(left - before)} 0h{short(right - left)}"
            for (_, before), (left, right) in pairwise(spans)
        ]
        opacity = f' stroke-opacity="{alpha:g}"' if alpha < 1 else ""
        style = f'stroke="{fill}" stroke-width="{short(thick)}"{opacity}'
        sheet.path("".join(d), f'{style} data-layer="{layer.name}"')
        seams.setdefault(thick, []).extend(
            f"M{short(left)} {short(middle - thick / 2)}v{short(thick)}"
            for (_, before), (left, right) in pairwise(spans)
            if right - left > SEAM and left - before < 1
        )
    for lines in seams.values() if len(layer) <= FEW else ():
        sheet.path("".join(lines), 'stroke="#fff" stroke-opacity=".5" stroke-width=".8"')
