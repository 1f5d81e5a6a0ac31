"""The picture that a notebook keeps, as data for the script of live views.

Problem: a static picture shows what was drawn, and a reader wants to zoom and to click long after
the kernel is gone.

How: the data are all that a page gets that opens a live view: one snapshot, compressed.  The
extension of JupyterLab hands them to the script of live views (its ``saved.js``); all other places
show the static picture that lies beside them.

Rule for maintainers: old notebooks meet new scripts.  Raise the number in :data:`MIME` when the
script would not show older data any more.
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from pathways_lab.notebook.scene.header import Header
from pathways_lab.notebook.scene.plot import BOXES, Columns, Layer, Plot
from pathways_lab.notebook.view.encode import framed
from pathways_lab.notebook.view.stream import Stream

MIME = "application/vnd.pathways-lab.picture.v1"

PARTS = 2.0**20
"""Parts of a second to which times are rounded: what is finer is noise, a third of all bytes."""


def saved(plots: Sequence[Plot], header: Header) -> str:
    """The data of a picture, as text."""
    from pathways_lab.notebook.draw.bokeh_figures import (
        documented,  # seconds of imports, which other pictures need not wait for
    )

    snapshot = Stream([_each(plot, _rounded) for plot in plots], header).snapshot()
    return base64.b64encode(zlib.compress(framed(documented(snapshot)))).decode()


def within(plot: Plot) -> Plot:
    """The plot without the boxes beside the time that it shows."""

    def cut(layer: Layer) -> Columns:
        columns = layer.columns
        if layer.kind != BOXES or not isinstance(columns["left"], np.ndarray):
            return columns
        seen = (columns["right"] >= plot.x[0]) & (columns["left"] <= plot.x[1])
        return {name: column[seen] for name, column in columns.items()}

    return replace(_each(plot, cut), brief=True) if plot.time else plot


def _rounded(layer: Layer) -> Columns:
    return {
        name: np.round(column * PARTS) / PARTS
        if isinstance(column, np.ndarray) and column.dtype == np.float64
        else column
        for name, column in layer.columns.items()
    }


def _each(plot: Plot, change: Callable[[Layer], Columns]) -> Plot:
    layers = tuple(replace(layer, columns=change(layer)) for layer in plot.layers)
    return replace(plot, layers=layers)
