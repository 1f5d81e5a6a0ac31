"""SQL over a timeline, by DuckDB.

Problem: who knows SQL asks "which client waited longest, and for what" in one line, of a lab, of
a saved timeline and of a simulation alike.

How: the tables of :mod:`.tables` that a query names are filled from the records of now, in a
database in memory that ends with the query.  The answer is rows of plain values and no relation
of DuckDB: it stays as it is while the lab goes on, any thread may read it, and a notebook shows
it as it shows other tables.

Rule for maintainers: a query reads these tables and nothing else.  No file, no network, no
extension, no variable of Python; only one statement, and it must be one that selects (tested).
The only module that knows DuckDB, and only when asked.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any, overload

import numpy as np

from pathways_lab.timeline.export.frame import made_of
from pathways_lab.timeline.export.tables import TABLES, columns
from pathways_lab.timeline.records import Record
from pathways_lab.timeline.text_table import Tabled, TextTable

SHOWN = 40
"""QueryRows of an answer as text: the first."""

SHUT = {
    "enable_external_access": "false",
    "autoinstall_known_extensions": "false",
    "autoload_known_extensions": "false",
    "python_enable_replacements": "false",
    "temp_directory": "",
}
"""Settings of the database, which no query can change: it reaches nothing outside."""

_NUMBERS = {"BIGINT": np.int64, "DOUBLE": np.float64, "BOOLEAN": np.bool_}


class QueryRows(Sequence[tuple[Any, ...]], Tabled):
    """The answer to a query: rows of plain values.

    columns: their names.
    """

    def __init__(self, columns: Sequence[str], rows: Iterable[tuple[Any, ...]]) -> None:
        self.columns = tuple(columns)
        self._rows = list(rows)

    @overload
    def __getitem__(self, at: int) -> tuple[Any, ...]: ...

    @overload
    def __getitem__(self, at: slice) -> QueryRows: ...

    def __getitem__(self, at: int | slice) -> tuple[Any, ...] | QueryRows:
        return QueryRows(self.columns, self._rows[at]) if isinstance(at, slice) else self._rows[at]

    def __len__(self) -> int:
        return len(self._rows)

    def to_dataframe(self) -> Any:
        """A pandas frame.  Raises ModuleNotFoundError where pandas is not installed."""
        return made_of({name: [row[at] for row in self._rows]
                        for at, name in enumerate(self.columns)})  # fmt: skip

    def _table(self) -> TextTable:
        more = len(self._rows) - SHOWN
        caption = f"the first {SHOWN} of {len(self._rows):,} rows" if more > 0 else ""
        body = [tuple(map(_text, row)) for row in self._rows[:SHOWN]]
        numbers = [
            any(isinstance(row[at], int | float) for row in self._rows[:SHOWN])
            for at in range(len(self.columns))
        ]
        align = "".join("<>"[number] for number in numbers)
        return TextTable(body, self.columns, align, caption)


def _text(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def query(text: str, records: Sequence[Record]) -> QueryRows:
    """The answer of *records* to one statement that selects; of "", the tables that there are.

    Raises ValueError for any other statement and for one that is wrong, and ModuleNotFoundError
    where DuckDB is not installed.
    """
    if not isinstance(text, str):
        raise TypeError(f"a query is text, like 'select * from gangs', and not {text!r:.80}")
    if not text.strip():
        return QueryRows(
            ("table", "column", "type", "meaning"),
            [(name, column, *told) for name, table in TABLES.items()
             for column, told in table.columns.items()],
        )  # fmt: skip
    try:
        import duckdb
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"SQL over a timeline needs DuckDB, which is not here ({error}): pip install"
            " 'pathways-lab[sql]', or use timeline.records and timeline.to_dataframe()",
            name=error.name,
        ) from None
    named = set(re.findall(r"\w+", text.lower()))
    with duckdb.connect(":memory:", config=dict(SHUT)) as base:
        try:
            kinds = [each.type.name for each in base.extract_statements(text)]
            if len(kinds) != 1 or not kinds[0].startswith(("SELECT", "EXPLAIN")):
                found = " and ".join(kinds) or "nothing"
                raise ValueError(
                    f"a query is one statement that selects, and not {found}: tables of a timeline"
                    " are read only"
                )
            for name in TABLES:
                _fill(base, name, columns(name, records if name in named else ()))
            answer = base.execute(text)
            return QueryRows([each[0] for each in answer.description or ()], answer.fetchall())
        except duckdb.Error as error:
            raise ValueError(f"{error}\nTables: {', '.join(TABLES)}; lab.sql() has their columns"
                             ) from None  # fmt: skip


def _fill(base: Any, name: str, values: dict[str, list[Any]]) -> None:
    """A table with these columns."""
    types = {each: column.type for each, column in TABLES[name].columns.items()}
    base.execute(f"create table {name} ({', '.join(f'{n} {kind}' for n, kind in types.items())})")
    if any(values.values()):
        base.register("rows", {each: _array(types[each], of) for each, of in values.items()})
        base.execute(f"insert into {name} select * from rows")
        base.unregister("rows")


def _array(kind: str, values: list[Any]) -> Any:
    """A column as DuckDB reads it.  None becomes NULL."""
    if kind not in _NUMBERS:
        return np.array(values, object)
    none = [value is None for value in values]
    filled = [0 if value is None else value for value in values]
    return np.ma.masked_array(np.array(filled, _NUMBERS[kind]), none)
