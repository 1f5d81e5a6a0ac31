"""Balance: how many rows each expert got, of the last runs.

Problem: a router that prefers some experts lets the others idle, and everything waits for the
largest one.

Rule for maintainers: counts are those that hosts told with their decisions, nothing is computed
from bytes: rows of an expert on the senders' own slice do not travel.

Paper: section 6.3 (mixture of experts).
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from pathways_lab.timeline.packed import Item
from pathways_lab.timeline.records import Event

RUNS = 20
"""Runs over which balance is told."""

Where = tuple[str, int, str]
"""A program, the step that counts, and its name: a program may have several layers of experts."""


class Balance:
    """Rows by expert in the last runs of each program."""

    def __init__(self) -> None:
        self._runs: dict[Where, dict[int, dict[int, int]]] = {}

    def __bool__(self) -> bool:
        return bool(self._runs)

    def add(self, items: Iterable[Item]) -> None:
        """Fold what has become known."""
        for item in items:
            if isinstance(item, Event) and item.kind == "rows":
                runs = self._runs.setdefault((item.program, item.step, item.node), {})
                runs.setdefault(item.run, {})[item.args["expert"]] = item.args["rows"]
                if len(runs) > RUNS:
                    del runs[next(iter(runs))]

    def counts(self) -> dict[Where, NDArray[np.float64]]:
        """Rows by run, the newest one last, and expert."""
        found = {}
        for where, runs in self._runs.items():
            table = np.zeros((len(runs), 1 + max(max(each) for each in runs.values())))
            for at, each in enumerate(runs.values()):
                table[at, list(each)] = list(each.values())
            found[where] = table
        return found
