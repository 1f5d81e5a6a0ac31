"""A panel as plain data: what is drawn where, before any library draws it.

Problem: the same panel is shown live by Bokeh and frozen as an SVG file, and
both must be the same picture; tests want to compare numbers, not pixels.  So
panels are functions from a scene to a :class:`Plot`, and there are two small
libraries that know nothing about clusters.

Rule for maintainers: no Bokeh here and none in panels.  Columns are lists or
numpy arrays of equal length.  y grows downwards, in rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import numpy as np

Columns = Mapping[str, Any]
Growing = dict[str, list[Any]]
"""Columns that are being made."""


def blank(names: Iterable[str]) -> Growing:
    """Columns without an entry."""
    return {name: [] for name in names}


def put(columns: Growing, *values: Any) -> None:
    """One entry more: a value for each of the columns, in their order."""
    for column, value in zip(columns.values(), values, strict=True):
        column.append(value)


WIDTH, LEFT, RIGHT = 920, 150, 108
"""Pixels: of a whole picture, and of its margins, the same in all panels so that
their time axes line up.  Live figures may be wider or narrower than this."""

FRAME = WIDTH - LEFT - RIGHT
"""Width of the drawing area that texts and resolutions are fitted to."""

LABELLED, GROUPED = LEFT - 2, 56
"""Pixels, as :func:`wide` counts them: of all that stands in the left margin, and of the names
of groups, however long the other labels are."""

NARROW, BROAD = "ijlI.,:;'|!()[] ", "mwMW<>%@+=~→"
"""Letters far from the usual width."""

LEAST = 3
"""Letters of a shortened word that say nothing any more."""

MILLISECONDS = 0.5
"""Axes that end before (seconds) are labelled in milliseconds."""

BOXES, TEXTS, AREAS, LINES, DATA = "boxes", "texts", "areas", "lines", "data"
ARROWS = "arrows"
"""Kinds of layer.

boxes: ``left, right, top, bottom`` and ``paint`` (index into the palette) or
    ``fill`` (CSS colour), optionally ``alpha``, ``edge`` (CSS colour).
texts: ``x, y, text``, anchored by ``Layer.anchor``; ``ink`` (CSS colour) where
    the ground is known, else the page's text colour.  With ``choices`` (texts, the
    longest first) and ``room`` (share of the drawing area's width) a page picks the
    first that fits there.
areas: ``xs, ys`` (lists of polygons) and ``fill``.
lines: ``xs, ys`` (lists of points), ``fill`` (CSS colour) and ``width`` (pixels).
arrows: ``x0, y0, x1, y1`` and ``cx0, cx1`` (where each bends); the page fills them.
data: nothing is drawn; hover texts of other layers read it.
"""


WORD = ("x", "y", "text", "room", "choices", "ink")
"""The columns of texts that a page picks, on known grounds."""

BACK = 200
"""Lengths of an axis for which the time before it is veiled: a canvas draws no sharp edge of a box
that is much longer."""

CATALOGUE = "catalogue"
"""The data layer behind ``@what{field}`` in hover texts: field of a row number."""


@dataclass(frozen=True, slots=True)
class Layer:
    """One kind of mark.

    first: number of the first row, for layers whose rows never change once
        they are there: then updates send only new rows.  None: anything may
        change.
    hover: ``(label, template)`` per line of the hover text.
    hatch: a Bokeh hatch pattern for the whole layer, or "".
    alpha: opacity of all boxes, unless there is a column of that name.
    hatch_alpha: opacity of the hatch.
    lined: boxes stand in rows like text in lines, and may be very many.
    edged: boxes have an outline in the colour of their paint.
    anchor: of texts: ``"start"``, ``"center"`` or ``"end"``.
    kinds: names behind the numbers of the column ``kind``, for hover texts.
    """

    name: str
    kind: str
    columns: Columns
    first: int | None = None
    hover: tuple[tuple[str, str], ...] = ()
    hatch: str = ""
    alpha: float = 1.0
    edged: bool = False
    hatch_alpha: float = 0.8
    lined: bool = False
    anchor: str = "center"
    bold: bool = False
    corner: int = 0
    kinds: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(next(iter(self.columns.values()), ()))


@dataclass(frozen=True, slots=True)
class Plot:
    """One panel.

    title, note: its name, and in a few words how to read it; what must not be cut off where
        there is little room comes first.
    height: of the drawing area in pixels at normal size.
    x: range; time: whether x is the shared time axis (seconds).
    y: low and high row coordinate; rows grow downwards.
    rows: label per row coordinate; groups: label of several rows, further out;
        readouts: live numbers at the right edge.
    bands: row ranges with a slightly darker ground (every second island).
    ahead: where the time begins that is to come, and a word there.
    brief: nothing is known here of the time before the axis, which a page may show.
    empty: what to say while there is nothing to show, or "".
    """

    name: str
    title: str
    height: int
    x: tuple[float, float]
    y: tuple[float, float]
    layers: tuple[Layer, ...]
    note: str = ""
    time: bool = False
    rows: Mapping[float, str] = field(default_factory=dict)
    groups: Mapping[float, str] = field(default_factory=dict)
    readouts: Mapping[float, str] = field(default_factory=dict)
    bands: tuple[tuple[float, float], ...] = ()
    rules: tuple[float, ...] = ()
    ahead: tuple[float, str] | None = None
    brief: bool = False
    empty: str = ""

    def __post_init__(self) -> None:
        """Names that people and machines give may be longer than the margin is wide."""
        rows, groups = (dict(labels) for labels in (self.rows, self.groups))
        inner = max(map(wide, rows.values()), default=0.0)
        outer = max((wide(name, True) for name in groups.values()), default=0.0)
        if inner + outer <= LABELLED:
            return
        outer = min(outer, max(GROUPED, LABELLED - inner))
        shown = {at: squeezed(name, LABELLED - outer) for at, name in rows.items()}
        object.__setattr__(self, "rows", shown)
        shown = {at: squeezed(name, outer, bold=True) for at, name in groups.items()}
        object.__setattr__(self, "groups", shown)

    @property
    def shape(self) -> tuple[Any, ...]:
        """Two plots of the same shape differ only in what an update can change."""
        return self.name, self.time, tuple((layer.name, layer.kind) for layer in self.layers)

    @property
    def places(self) -> tuple[Any, ...]:
        """Where its rows are."""
        return self.y, tuple(self.rows), tuple(self.groups), tuple(self.readouts)

    @property
    def grounds(self) -> dict[str, Columns]:
        """By name of their source: the bands, the lines that bound a scale, the veil of what is
        to come, and that of what is not known."""
        low, high = zip(*self.bands, strict=True) if self.bands else ((), ())
        veil = blank(("x0", "x1", "y", "text", "room", "choices"))
        if self.ahead:
            (at, word), (start, end) = self.ahead, self.x
            put(veil, at, end, self.y[0], *in_way((word, ""), 0.9 * (end - at) / (end - start)))
        before: dict[str, list[float]] = {"x0": [], "x1": []}
        if self.brief and self.x[0] > 0:
            back = self.x[0] - BACK * (self.x[1] - self.x[0])
            before = {"x0": [max(0.0, back)], "x1": [self.x[0]]}
        return {
            f"{self.name}-bands": {"y0": list(low), "y1": list(high)},
            f"{self.name}-rules": {"y": list(self.rules)},
            f"{self.name}-ahead": veil,
            f"{self.name}-before": before,
        }


@dataclass(frozen=True, slots=True)
class Replace:
    """Give the source *name* these columns."""

    name: str
    columns: Columns


@dataclass(frozen=True, slots=True)
class Append:
    """Add rows to the source *name* and keep only the last *keep* rows."""

    name: str
    columns: Columns
    keep: int


@dataclass(frozen=True, slots=True)
class Assign:
    """Set the ``"range"`` or ``"labels"`` of the axis called *name*, the ``"text"`` or
    ``"content"`` of a text in a figure or above it, or the ``"height"`` of a figure."""

    name: str
    attribute: str
    value: Any


Change = Replace | Append | Assign

TIME = "time"
"""Name of the shared x range."""


LABELS = ("rows", "groups", "readouts")


def everything(plot: Plot) -> list[Change]:
    """The changes that turn the blank plot of the same shape into *plot*."""
    out: list[Change] = [Replace(layer.name, layer.columns) for layer in plot.layers]
    out.append(Assign(plot.name, "height", plot.height))
    out.append(Assign(TIME if plot.time else f"{plot.name}-x", "range", plot.x))
    out.append(Assign(f"{plot.name}-y", "range", plot.y[::-1]))
    out.extend(Replace(name, columns) for name, columns in plot.grounds.items())
    out.extend(Assign(f"{plot.name}-{kind}", "labels", getattr(plot, kind)) for kind in LABELS)
    out.append(Assign(f"{plot.name}-empty", "text", plot.empty))
    out.append(Assign(f"{plot.name}-note", "content", plot.note))
    return out


def steadied(old: Plot, new: Plot) -> Plot:
    """*new*, as high as *old* where it would only be lower.

    The newest run's panels would go up and down with every run, and all below them.
    """
    alike = (new.shape, new.places) == (old.shape, old.places)
    lower = new.height < old.height and alike
    return replace(new, height=old.height) if lower else new


def changes(old: Plot, new: Plot) -> list[Change]:
    """The changes that turn *old*, as shown, into *new*; both must have the same shape."""
    if old.shape != new.shape:
        raise ValueError(f"the panel {new.name!r} has another shape now: build it anew")
    out: list[Change] = []
    for before, after in zip(old.layers, new.layers, strict=True):
        out.extend(_layer_changes(before, after))
    if new.height != old.height:
        out.append(Assign(new.name, "height", new.height))
    if new.x != old.x:
        out.append(Assign(TIME if new.time else f"{new.name}-x", "range", new.x))
    if new.y != old.y:
        out.append(Assign(f"{new.name}-y", "range", new.y[::-1]))
    for name, columns in new.grounds.items():
        if columns != old.grounds[name]:
            out.append(Replace(name, columns))
    for kind in LABELS:
        if getattr(new, kind) != getattr(old, kind):
            out.append(Assign(f"{new.name}-{kind}", "labels", getattr(new, kind)))
    if new.empty != old.empty:
        out.append(Assign(f"{new.name}-empty", "text", new.empty))
    if new.note != old.note:
        out.append(Assign(f"{new.name}-note", "content", new.note))
    return out


def _layer_changes(old: Layer, new: Layer) -> list[Change]:
    if old.first is not None and new.first is not None:
        held = old.first + len(old)
        end = new.first + len(new)
        if old.first <= new.first <= held <= end:
            if held == end:
                return []
            tail = {key: column[held - new.first :] for key, column in new.columns.items()}
            return [Append(new.name, tail, len(new))]
    elif same(old.columns, new.columns):
        return []
    return [Replace(new.name, new.columns)]


def same(a: Columns, b: Columns) -> bool:
    """Whether two sets of columns are equal."""
    if a.keys() != b.keys():
        return False
    return all(_equal(a[key], b[key]) for key in a)


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, np.ndarray) or isinstance(b, np.ndarray):
        return np.array_equal(a, b, equal_nan=np.issubdtype(np.asarray(a).dtype, np.floating))
    return bool(a == b)


def nice(low: float, high: float, most: int = 8) -> list[float]:
    """Round numbers between two others, at most about *most* of them."""
    span = high - low
    if span <= 0:
        return [low]
    step = 10.0**-9
    while True:
        for factor in (1, 2, 5):
            if span / (step * factor) <= most:
                step *= factor
                first = -int(-low // step)
                count = int((high - first * step) // step) + 1
                return [round((first + n) * step, 9) for n in range(count)]
        step *= 10


def moments(low: float, high: float, most: int = 8) -> dict[float, str]:
    """The ticks of an axis between two times (seconds); short ones in milliseconds."""
    small = max(abs(low), abs(high)) < MILLISECONDS
    return {
        t: f"{round(1e3 * t, 3):g} ms" if small and t else f"{round(t, 6):g} s"
        for t in nice(low, high, most)
    }


@lru_cache(4096)
def wide(text: str, bold: bool = False, size: int = 12) -> float:
    """About how many pixels a line of text takes in the wider ones of the usual fonts."""
    ems = sum(
        0.36 if sign in NARROW else 0.96 if sign in BROAD else 0.7 if sign.isupper() else 0.61
        for sign in text
    )
    return ems * size * (1.1 if bold else 1.0)


def shorter(word: str) -> tuple[str, ...]:
    """The ways to write a word, each with fewer of its letters, and at last none."""
    lengths = (at for at in (24, 16, 12, 8, 5, LEAST) if at < len(word))
    return (word, *(f"{word[:at]}…" for at in lengths), "")


def in_way(ways: Sequence[str], room: float) -> tuple[str, float, list[str]]:
    """The columns text, room and choices of a word in several ways, the longest first, with the
    share of the width that it has room for: a page shows what fits there, a picture what fits into
    its usual width, or the last."""
    text = next((w for w in ways if wide(w, bold=True) + 6 < room * FRAME), ways[-1])
    return text, 0.97 * room, list(dict.fromkeys(ways))


def in_ways(words: Iterable[tuple[Sequence[str], float]]) -> dict[str, list[Any]]:
    """The same columns of many words."""
    shown = [in_way(*each) for each in words]
    return {name: [each[n] for each in shown] for n, name in enumerate(("text", "room", "choices"))}


def squeezed(name: str, room: float, bold: bool = False) -> str:
    """As much of both ends of a name as there is room for (pixels): either may tell it apart."""
    if wide(name, bold) <= room:
        return name
    shown = "…"
    for letters in range(1, len(name)):
        more = f"{name[: (letters + 1) // 2]}…{name[len(name) - letters // 2 :]}"
        if wide(more, bold) > room:
            break
        shown = more
    return shown
