"""Plots become Bokeh figures.

Problem: notebook, dashboard and tests need the same figures.  They are built
once per shape of the plots; later updates only change columns, labels, ranges and heights, which
the holder of the figures finds by name: sources by the layer's name, the time
axis by :data:`~pathways_lab.notebook.scene.plot.TIME`, figures by the panel's name, axes and the
note of an empty panel by that and ``-y``, ``-rows``, ``-groups``, ``-readouts``, ``-empty``; their
grounds by ``-bands``, ``-rules``, ``-ahead`` and ``-before``, frames around the chosen gang by
``-chosen``.  A figure's height beyond its plot is its tag.

Rule for maintainers: this module knows Bokeh and plots, and nothing about
clusters.  Colours of text, grounds and axes are left to ``--bk-*`` variables of
the page (``live.css``), so that a figure follows the page's theme; glyphs,
which those variables do not reach, use colours that are legible on white and on
near-black.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import pi
from typing import Any

from bokeh.core.json_encoder import serialize_json
from bokeh.core.properties import value
from bokeh.document import Document
from bokeh.layouts import column
from bokeh.models import (
    Column,
    ColumnDataSource,
    CustomJSHover,
    CustomJSTickFormatter,
    FixedTicker,
    HoverTool,
    LinearAxis,
    LinearColorMapper,
    Node,
    NoOverlap,
    PanTool,
    Range1d,
)
from bokeh.models.annotations import Label
from bokeh.models.dom import Div, Span, Text
from bokeh.models.ui import Pane
from bokeh.plotting import figure

from pathways_lab.notebook.scene.palette import INK, PAINTS
from pathways_lab.notebook.scene.plot import (
    AREAS,
    ARROWS,
    BOXES,
    CATALOGUE,
    LEFT,
    LINES,
    MILLISECONDS,
    RIGHT,
    TEXTS,
    TIME,
    Columns,
    Layer,
    Plot,
)
from pathways_lab.notebook.view.stream import Message, blank

FONT = "system-ui, -apple-system, 'Segoe UI', Helvetica, Arial, sans-serif"
THEMED = "theme-ink"
"""Tag of what ``live.js`` gives the page's text colour: texts, and frames of the chosen gang."""


TICK = f"""
const small = Math.max(...ticks.map(Math.abs)) < {MILLISECONDS};
return small && tick ? `${{+(1e3 * tick).toFixed(3)}} ms` : `${{+tick.toFixed(6)}} s`;
"""
"""A tick of a time axis, as :func:`~pathways_lab.notebook.scene.plot.moments` says it."""


class Figures:
    """The figures of some plots.

    root: all of them below each other, with one time axis.
    """

    def __init__(self, plots: Sequence[Plot]) -> None:
        timed = [plot for plot in plots if plot.time]
        self.time = _range(timed[0].x if timed else (0.0, 1.0), TIME)
        self.sources: dict[str, ColumnDataSource] = {}
        self.figures: dict[str, Any] = {}
        for plot in plots:
            self.figures[plot.name] = self._build(plot, last=bool(timed) and plot is timed[-1])
        stacked = [part for plot in plots for part in (heading(plot), self.figures[plot.name])]
        self.root: Column = column(*stacked, sizing_mode="stretch_width", spacing=0)

    def _build(self, plot: Plot, last: bool) -> Any:
        beside = 26 if last else 4  # the page adds it to other heights
        shown: Any = figure(
            name=plot.name,
            height=plot.height + beside,
            tags=[beside],
            sizing_mode="stretch_width",
            x_range=self.time if plot.time else _range(plot.x, f"{plot.name}-x"),
            y_range=_range(plot.y[::-1], f"{plot.name}-y"),
            toolbar_location=None,
            tools=[],
            min_border_left=LEFT,
            min_border_right=RIGHT,
            min_border_top=2,
            min_border_bottom=24 if last else 2,
            output_backend="canvas",
            outline_line_color=None,
        )
        self._grounds(shown, plot)
        self._style_axes(shown, plot, last)
        for layer in plot.layers:
            self._draw(shown, layer)
        self._frames(shown, plot)
        for renderer in shown.renderers:
            # Nothing is selected by Bokeh: a page would update a third of its glyphs for nothing.
            renderer.update(selection_glyph=None, nonselection_glyph=None, muted_glyph=None)
        shown.add_layout(
            Label(
                name=f"{plot.name}-empty", x=Node.frame.center, y=Node.frame.center,
                text=plot.empty, text_align="center", text_baseline="middle", text_font=FONT,
                text_font_size="13px", visible=bool(plot.empty),
            )
        )  # fmt: skip
        if plot.time:
            shown.add_tools(PanTool(dimensions="width"))
        return shown

    def _grounds(self, shown: Any, plot: Plot) -> None:
        """Bands behind every second island, the lines that bound a scale, and veils over what is
        to come and what is not known."""
        bands, rules, ahead, before = map(self._filled, plot.grounds.items())
        shown.hstrip(
            y0="y0", y1="y1", source=bands,
            fill_color="#808080", fill_alpha=0.07, line_color=None, level="underlay",
        )  # fmt: skip
        shown.hspan(y="y", source=rules, line_color=INK, line_alpha=0.35, level="underlay")
        for veiled in (ahead, before):
            shown.vstrip(
                x0="x0", x1="x1", source=veiled,
                fill_color="#808080", fill_alpha=0.15, line_color=None,
            )  # fmt: skip
        shown.vspan(x="x0", source=ahead, line_color=INK, line_dash="dashed")
        shown.text(
            x="x0", y="y", text="text", source=ahead, x_offset=5, y_offset=1, text_color=INK,
            text_baseline="top", text_font=value(FONT), text_font_size="12px", tags=[THEMED],
        )  # fmt: skip

    def _filled(self, named: tuple[str, Columns]) -> ColumnDataSource:
        source = self._source(named[0])
        source.data = dict(named[1])
        return source

    def _style_axes(self, shown: Any, plot: Plot, last: bool) -> None:
        shown.ygrid.visible = False
        shown.xgrid.visible = plot.time
        shown.xgrid.grid_line_alpha = 0.5
        shown.xaxis.visible = last
        shown.xaxis.minor_tick_line_color = None
        shown.xaxis.formatter = CustomJSTickFormatter(code=TICK)
        shown.xaxis.major_label_policy = NoOverlap(min_distance=8)  # a page may be narrow
        for axis, labels in (("rows", plot.rows), ("groups", plot.groups)):
            place: Any = shown.yaxis[0] if axis == "rows" else LinearAxis()
            self._axis(place, labels, bold=axis == "groups")
            if axis == "groups":
                shown.add_layout(place, "left")
            place.name = f"{plot.name}-{axis}"
        right = LinearAxis()
        self._axis(right, plot.readouts, bold=False)
        shown.add_layout(right, "right")
        right.name = f"{plot.name}-readouts"
        for each in shown.xaxis:
            each.major_label_text_font = FONT
            each.major_label_text_font_size = "12px"

    def _axis(self, axis: Any, labels: Any, bold: bool) -> None:
        axis.ticker = FixedTicker(ticks=list(labels))
        axis.major_label_overrides = dict(labels)
        axis.major_tick_line_alpha = axis.axis_line_alpha = 0.0
        axis.minor_tick_line_color = None
        axis.major_tick_out = axis.major_tick_in = 0
        axis.major_label_text_font = FONT
        axis.major_label_text_font_size = "12px"
        axis.major_label_text_font_style = "bold" if bold else "normal"
        axis.major_label_standoff = 8

    def _draw(self, shown: Any, layer: Layer) -> None:
        source = self._source(layer.name)
        source.data = dict(layer.columns)
        if layer.kind == BOXES:
            renderer = self._boxes(shown, layer, source)
        elif layer.kind == TEXTS:
            renderer = shown.text(
                x="x", y="y", text="text", source=source,
                text_color="ink" if "ink" in layer.columns else INK,
                tags=[] if "ink" in layer.columns else [THEMED],
                text_align={"start": "left", "end": "right"}.get(layer.anchor, "center"),
                text_baseline="middle", text_font=value(FONT), text_font_size="12px",
                text_font_style="bold" if layer.bold else "normal",
            )  # fmt: skip
        elif layer.kind == AREAS:
            renderer = shown.patches(
                xs="xs", ys="ys", source=source, fill_color="fill", fill_alpha=0.9, line_color=None
            )
        elif layer.kind == LINES:
            renderer = shown.multi_line(
                xs="xs", ys="ys", source=source, line_color="fill", line_width="width",
                line_alpha=layer.alpha,
            )  # fmt: skip
        elif layer.kind == ARROWS:
            renderer = shown.bezier(
                x0="x0", y0="y0", x1="x1", y1="y1", cx0="cx0", cy0="y0", cx1="cx1", cy1="y1",
                source=source, line_color=INK, line_width=1.2, tags=[THEMED],
            )  # fmt: skip
            shown.scatter(
                x="x1", y="y1", source=source, marker="triangle", angle=-pi / 2, size=7,
                fill_color=INK, line_color=INK, tags=[THEMED],
            )  # fmt: skip
        else:
            return
        if layer.hover:
            shown.add_tools(self._hover(layer, renderer))

    def _boxes(self, shown: Any, layer: Layer, source: ColumnDataSource) -> Any:
        columns = layer.columns
        fill: Any = "fill"
        if "paint" in columns:
            mapper = LinearColorMapper(palette=list(PAINTS), low=-0.5, high=len(PAINTS) - 0.5)
            fill = {"field": "paint", "transform": mapper}
        style: dict[str, Any] = {
            "fill_color": fill,
            "fill_alpha": "alpha" if "alpha" in columns else layer.alpha,
            "line_color": "edge" if "edge" in columns else fill if layer.edged else None,
            "line_width": 1.2,
        }
        if layer.hatch:
            hatch = fill if "paint" in columns else "edge" if "edge" in columns else "fill"
            style |= {
                "hatch_pattern": layer.hatch,
                "hatch_color": hatch,
                "hatch_alpha": layer.hatch_alpha,
                "hatch_scale": 6,
                "hatch_weight": 1.4,
            }
        return shown.quad(
            left="left", right="right", top="top", bottom="bottom", source=source,
            border_radius=layer.corner, **style,
        )  # fmt: skip

    def _frames(self, shown: Any, plot: Plot) -> None:
        """Frames around the chosen gang; the page fills them."""
        if not any("gang" in layer.columns for layer in plot.layers):
            return
        source = self._source(f"{plot.name}-chosen")
        source.data = {side: [] for side in ("left", "right", "top", "bottom")}
        shown.quad(
            left="left", right="right", top="top", bottom="bottom", source=source,
            fill_color=None, line_color=INK, line_width=2.5, tags=[THEMED],
        )  # fmt: skip

    def _hover(self, layer: Layer, renderer: Any) -> HoverTool:
        """Finds the mark under the pointer; the page tells of it below the figures."""
        tool = HoverTool(renderers=[renderer], tooltips=None, tags=list(layer.hover))
        formatters: dict[str, Any] = {}
        if "what" in layer.columns:
            formatters["@what"] = CustomJSHover(
                args={"catalogue": self._source(CATALOGUE)},
                code="return catalogue.data[format]?.[value] ?? ''",
            )
        if layer.kinds:
            names = list(layer.kinds)
            formatters["@kind"] = CustomJSHover(args={"names": names}, code="return names[value]")
        tool.formatters = formatters
        return tool

    def _source(self, name: str) -> ColumnDataSource:
        return self.sources.setdefault(name, ColumnDataSource(name=name))


def heading(plot: Plot) -> Pane:
    """Name and note of a panel, as text of the page and not of a canvas."""
    name = Span(style={"font-weight": "600"}, children=[plot.title])
    words = Text(name=f"{plot.name}-note", content=plot.note)
    note = Span(style={"opacity": "0.72", "margin-left": "1em"}, children=[words])
    line = {
        "font": f"13px/1.4 {FONT}",
        "color": "var(--jp-ui-font-color1, #212121)",
        "white-space": "nowrap",
        "overflow": "hidden",
        "text-overflow": "ellipsis",
    }
    return Pane(
        elements=[Div(style=line, children=[name, note])],
        styles={"margin": f"8px 0 3px {LEFT}px", "max-width": "100%"},
    )


def _range(bounds: tuple[float, float], name: str | None = None) -> Range1d:
    return Range1d(start=bounds[0], end=bounds[1], name=name)


_templates: dict[tuple[Any, ...], str] = {}


def documented(message: Message) -> Message:
    """A snapshot with a document in place of its blank plots; other messages as they are."""
    if "plots" not in message:
        return message
    rest = {name: value for name, value in message.items() if name != "plots"}
    return rest | {"document": template(message["plots"])}


def template(plots: Sequence[Plot]) -> str:
    """A Bokeh document of plots of this shape, without data, as JSON text.

    Building one takes some 200 ms, so the last few are kept; what
    :func:`~pathways_lab.notebook.scene.plot.everything` says fills it.
    """
    key = tuple(plot.shape for plot in plots)
    text = _templates.get(key)
    if text is None:
        made = Document()
        made.add_root(Figures([blank(plot) for plot in plots]).root)
        text = str(serialize_json(made.to_json(deferred=False)))
        while len(_templates) >= 16:
            _templates.pop(next(iter(_templates)))
        _templates[key] = text
    return text
