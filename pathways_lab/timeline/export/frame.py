"""Records as a pandas frame, for whoever thinks in tables.

Problem: pandas answers questions that nobody thought of; not everybody has it.

Rule for maintainers: the only module that knows pandas, and only when asked.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields
from typing import Any

from pathways_lab.timeline.records import Event, Record, Sample, Span

FIELDS = tuple(dict.fromkeys(each.name for kind in (Span, Event, Sample) for each in fields(kind)))


def columns(records: Iterable[Record]) -> dict[str, list[Any]]:
    """``type`` and every field of any record; None where a record has no such field."""
    found = list(records)
    out: dict[str, list[Any]] = {"type": [type(record).__name__ for record in found]}
    for name in FIELDS:
        out[name] = [getattr(record, name, None) for record in found]
    return out


def frame(records: Iterable[Record]) -> Any:
    """The same as a frame.  Raises ModuleNotFoundError where pandas is not installed."""
    return made_of(columns(records))


def made_of(columns: dict[str, list[Any]]) -> Any:
    """A frame of columns.  Raises ModuleNotFoundError where pandas is not installed."""
    try:
        import pandas  # type: ignore[import-untyped, unused-ignore]
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"a timeline as a data frame needs pandas, which is not here ({error}): pip install"
            " pandas, or use timeline.records and timeline.runs, which are the same as plain"
            " objects",
            name=error.name,
        ) from None
    return pandas.DataFrame(columns)
