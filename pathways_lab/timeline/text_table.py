"""A table of text, for terminals and for pages.

Problem: a dozen reports are tables, and their cells hold names that users chose.

Rule for maintainers: every cell is escaped here, and nowhere else.  No colours, so that a
table reads on light and on dark pages.
"""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, repr=False)
class TextTable:
    """Rows of text; shows itself in terminals and notebooks.

    rows: cells of each.  In a row of fewer cells than the others the last one takes the rest.
    heads: of the columns; () for a table without.
    align: ``"<"`` (left) or ``">"`` for each column; the last one holds for all that follow.
    caption: above the table.  notes: by row, what a page shows of it under the pointer.
    """

    rows: Sequence[Sequence[str]]
    heads: Sequence[str] = ()
    align: str = "<"
    caption: str = ""
    notes: Sequence[str] = ()

    def _sides(self) -> str:
        """``"<"`` or ``">"`` of each column."""
        columns = max(map(len, [self.heads, *self.rows]))
        return self.align.ljust(columns, self.align[-1])

    def lines(self) -> list[str]:
        """The table as text without its caption, a line per row."""
        table = [self.heads, *self.rows] if self.heads else self.rows
        sides = self._sides()
        full = (row for row in table if len(row) == len(sides))
        widths = [max(map(len, column)) for column in zip(*full, strict=True)]
        return [
            "  ".join(f"{c:{s}{w}}" for c, s, w in zip(row, sides, widths, strict=False)).rstrip()
            for row in table
        ]

    def __repr__(self) -> str:
        return "\n".join([self.caption, *self.lines()] if self.caption else self.lines())

    def _repr_html_(self) -> str:
        sides = self._sides()

        def line(tag: str, row: Sequence[str], note: str = "") -> str:
            cells = []
            for at, (cell, side) in enumerate(zip(row, sides, strict=False)):
                style = f"text-align:{'left' if side == '<' else 'right'}"
                # The first column has names: a narrow page rather scrolls than breaks them.
                style += ";white-space:nowrap" * (at == 0)
                rest = len(sides) - at if at == len(row) - 1 else 1
                span = f' colspan="{rest}"' if rest > 1 else ""
                text = html.escape(cell)
                text = text.replace("/", "/<wbr>") if tag == "th" else text
                cells.append(f'<{tag} style="{style}"{span}>{text}</{tag}>')
            title = f' title="{html.escape(note)}"' if note else ""
            return f"<tr{title}>{''.join(cells)}</tr>"

        notes = self.notes or ("",) * len(self.rows)
        rows = [line("th", self.heads)] if self.heads else []
        rows += [line("td", row, note) for row, note in zip(self.rows, notes, strict=True)]
        # A wide table is scrolled: a caption in its middle would be out of sight.
        said = f'<caption style="text-align:left">{html.escape(self.caption)}</caption>'
        return f"<table>{said if self.caption else ''}{''.join(rows)}</table>"


class Tabled:
    """Shows itself as its table."""

    __slots__ = ()

    def _table(self) -> TextTable:
        raise NotImplementedError

    def __repr__(self) -> str:
        return repr(self._table())

    def _repr_html_(self) -> str:
        return self._table()._repr_html_()
