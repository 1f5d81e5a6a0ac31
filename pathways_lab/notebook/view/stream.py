"""A picture as numbered messages: updates, and snapshots that say what they contain.

Problem: no update may ever be applied twice or skipped, by pages that are opened
late, twice, or again.

How: the present plots are the whole state.  All changes leave as *one* message
with a sequence number; a snapshot names the number that it contains, so a page that
has one applies exactly the messages after it.

Rule for maintainers: no lock and no Bokeh here, so that it works in any process;
the caller holds a lock of its own.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from pathways_lab.notebook.scene.header import Header
from pathways_lab.notebook.scene.plot import Change, Plot, changes, everything, steadied
from pathways_lab.notebook.view.encode import encode

Message = dict[str, Any]
"""A message to pages.  ``block`` are the bytes of columns; ``plots`` of a snapshot are
blank: pages want their document, see :func:`.bokeh_figures.documented`."""


class Stream:
    """Plots and a header, and the number of the last message about them."""

    def __init__(self, plots: Sequence[Plot], header: Header | None = None) -> None:
        self.plots = tuple(plots)
        self.header = header or Header()
        self.seq = 0

    def snapshot(self) -> Message:
        """The present state."""
        described, block = encode(c for plot in self.plots for c in everything(plot))
        return {
            "type": "snapshot",
            "seq": self.seq,
            "plots": tuple(blank(plot) for plot in self.plots),
            "changes": json.dumps(described),
            "block": block,
            "header": asdict(self.header),
        }

    def update(self, plots: Sequence[Plot], header: Header) -> Message | None:
        """From now on these; the message that says so, None when nothing is different."""
        before, named = self.plots, {plot.name: plot for plot in self.plots}
        self.plots = tuple([steadied(named.get(plot.name, plot), plot) for plot in plots])
        headline = header if header != self.header else None
        self.header = header
        if [plot.shape for plot in before] != [plot.shape for plot in self.plots]:
            self.seq += 1
            return self.snapshot()
        changed: list[Change] = []
        for old, new in zip(before, self.plots, strict=True):
            changed += changes(old, new)
        if not changed and headline is None:
            return None
        self.seq += 1
        described, block = encode(changed)
        message: Message = {"type": "update", "seq": self.seq, "changes": json.dumps(described)}
        message["block"] = block
        if headline is not None:
            message["header"] = asdict(headline)
        return message


def blank(plot: Plot) -> Plot:
    """A plot of the same shape without data."""
    layers = (
        replace(layer, columns={name: column[:0] for name, column in layer.columns.items()})
        for layer in plot.layers
    )
    return replace(plot, layers=tuple(layers))
