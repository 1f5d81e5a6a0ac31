"""Timelines as files: columns in one compressed archive, read back without a cluster.

Problem: what happened must outlive its lab, be sent by mail, and be read by
programs that are not this one, in years.

Format: a zip of NumPy arrays (``.npz``), because NumPy is here anyway, columns
of times compress well and stay exact, any language reads it, and reading it
runs no code.  Arrays:

``about``: JSON text: ``format``, ``version`` (of the records), ``dropped``,
    ``clock`` (the moment of saving, on the records' clock), ``counts``;
``texts``: every distinct text, as bytes of a JSON list; ``args``: every distinct
    ``args``, the same way, each as JSON text; other
    columns hold numbers of rows of these;
``order``: kind of each record, oldest first: 0 span, 1 event, 2 sample;
``span.*``, ``event.*``, ``sample.*``: one column per field of
    :mod:`~pathways_lab.timeline.records`, in order; times are float64 seconds;
    ``span.devices`` holds rows of ``texts``, as ``"0 1 2"``.

Rule for maintainers: never read with pickle; a file of another version is
refused, not guessed at.
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from pathways_lab.timeline.records import VERSION, Event, Record, Sample, Span

FORMAT = "pathways-lab timeline"
KINDS: tuple[tuple[str, type[Record]], ...] = (("span", Span), ("event", Event), ("sample", Sample))
TIMES = {"start", "end", "time", "value"}
NUMBERS = {"run", "step"}


@dataclass(frozen=True, slots=True)
class Saved:
    """The content of a file.  clock: the moment of saving.  dropped: records lost before."""

    records: tuple[Record, ...]
    clock: float
    dropped: int


class _Numbered(dict[str, int]):
    def __missing__(self, text: str) -> int:
        self[text] = len(self)
        return self[text]


def _plain(value: Any) -> Any:
    """Values that JSON does not know: NumPy's numbers, sets."""
    if hasattr(value, "item"):
        return value.item()
    if isinstance(value, set | frozenset):
        return sorted(value)
    return str(value)


def save(path: str | Path, records: Sequence[Record], clock: float, dropped: int) -> Path:
    """Write *records*; returns the path, with ``.npz`` where it had no ending."""
    path = Path(path)
    path = path if path.suffix else path.with_suffix(".npz")
    texts, args = _Numbered(), _Numbered()
    columns: dict[str, Any] = {}
    order = np.zeros(len(records), np.uint8)
    counts = {}
    for number, (kind, made) in enumerate(KINDS):
        chosen = [r for r in records if isinstance(r, made)]
        counts[kind] = len(chosen)
        order[[n for n, r in enumerate(records) if isinstance(r, made)]] = number
        for each in fields(made):
            values: list[Any] = [getattr(r, each.name) for r in chosen]
            name = f"{kind}.{each.name}"
            if each.name in TIMES:
                columns[name] = np.array(values, np.float64)
            elif each.name in NUMBERS:
                columns[name] = np.array(values, np.int64)
            elif each.name == "args":
                written = (json.dumps(dict(v), default=_plain, sort_keys=True) for v in values)
                columns[name] = np.array([args[text] for text in written], np.int32)
            elif each.name == "devices":
                columns[name] = np.array([texts[" ".join(map(str, v))] for v in values], np.int32)
            else:
                columns[name] = np.array([texts[v] for v in values], np.int32)
    about = {"format": FORMAT, "version": VERSION, "clock": clock, "dropped": dropped}
    about["counts"] = counts
    with path.open("wb") as file:
        np.savez_compressed(
            file,
            about=np.array(json.dumps(about)),
            texts=_text_column(texts),
            args=_text_column(args),
            order=order,
            **columns,
        )
    return path


def _text_column(texts: Sequence[str] | _Numbered) -> Any:
    """A JSON list in UTF-8 bytes: an array of texts would give each the length of the longest."""
    return np.frombuffer(json.dumps(list(texts)).encode(), np.uint8)


def load(path: str | Path) -> Saved:
    """Read a file.  Raises ValueError when it is none, or of another version."""
    try:
        with np.load(path, allow_pickle=False) as file:
            if "about" not in file:
                raise ValueError("it has no 'about'")
            about = json.loads(str(file["about"]))
            if about.get("format") != FORMAT:
                raise ValueError(f"its format is {about.get('format')!r}")
            if about.get("version") != VERSION:
                raise ValueError(
                    f"its records have version {about.get('version')}, this package reads {VERSION}"
                )
            columns = {name: file[name] for name in file.files}
    except (ValueError, TypeError, zipfile.BadZipFile, KeyError, EOFError) as error:
        raise ValueError(f"{path} is not a timeline that can be read: {error}") from None
    texts = json.loads(columns["texts"].tobytes())
    args = [json.loads(text) for text in json.loads(columns["args"].tobytes())]
    rows = {kind: _records(kind, made, columns, texts, args) for kind, made in KINDS}
    readers = [iter(rows[kind]) for kind, _ in KINDS]
    records = tuple(next(readers[kind]) for kind in columns["order"].tolist())
    return Saved(records, float(about["clock"]), int(about["dropped"]))


def _records(
    kind: str, made: Any, columns: dict[str, Any], texts: list[str], args: list[dict[str, Any]]
) -> list[Record]:
    values = []
    for each in fields(made):
        column = columns[f"{kind}.{each.name}"].tolist()
        if each.name == "args":
            column = [args[n] for n in column]
        elif each.name == "devices":
            column = [tuple(map(int, texts[n].split())) for n in column]
        elif each.name not in TIMES | NUMBERS:
            column = [texts[n] for n in column]
        values.append(column)
    return [made(*row) for row in zip(*values, strict=True)]
