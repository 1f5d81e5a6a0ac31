"""The lives of runs, gangs, buffers and slices, as tables.

Problem: a distributed system is wrong wherever an object makes a step that
nobody foresaw.  So the steps are data: a move that is not in a table raises
:class:`~pathways_lab.core.errors.InvalidTransition`, and the diagrams of
``docs/order.md`` are drawn from the same tables.

Rule for maintainers: a new state or move is a new row here, never an
assignment somewhere else.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pathways_lab.core.errors import InvalidTransition


@dataclass(frozen=True, slots=True)
class LifeCycle:
    """The kind of a thing, its first state, and ``(state, move) -> state``."""

    name: str
    start: str
    moves: Mapping[tuple[str, str], str]

    def next(self, state: str, move: str, thing: object = "") -> str:
        """The state after *move*; raises InvalidTransition when there is none."""
        try:
            return self.moves[state, move]
        except KeyError:
            legal = ", ".join(m for s, m in self.moves if s == state) or "none, it is over"
            raise InvalidTransition(
                f"{self.name} {thing} is {state} and cannot {move} (legal moves: {legal})"
            ) from None

    @property
    def ends(self) -> tuple[str, ...]:
        """States without a way out."""
        left = {state for state, _ in self.moves}
        return tuple(dict.fromkeys(s for s in self.moves.values() if s not in left))


RUN = LifeCycle(
    "run",
    "queued",
    {
        ("queued", "admit"): "admitted",
        ("queued", "fail"): "failed",
        ("queued", "cancel"): "cancelled",
        ("admitted", "grant"): "granted",
        ("admitted", "cut"): "cut",
        ("granted", "finish"): "finished",
        ("granted", "fail"): "failed",
        ("cut", "fail"): "failed",
        ("cut", "cancel"): "cancelled",
    },
)
"""``granted``: every gang has its place.  ``cut``: what is not granted never will be."""

GANG = LifeCycle(
    "gang",
    "waiting",
    {
        ("waiting", "grant"): "granted",
        ("waiting", "cancel"): "cancelled",
        ("waiting", "skip"): "skipped",
        ("granted", "finish"): "finished",
        ("granted", "fail"): "failed",
        ("granted", "lose"): "lost",
    },
)
"""``failed``: it ran on all its hosts, and its results reach nobody.  ``skipped``: a decision
was against it."""

BUFFER = LifeCycle(
    "buffer",
    "promised",
    {
        ("promised", "arrive"): "resident",
        ("promised", "fail"): "failed",
        ("resident", "fail"): "failed",
        ("resident", "donate"): "donated",
        ("promised", "free"): "freed",
        ("resident", "free"): "freed",
        ("failed", "free"): "freed",
        ("donated", "free"): "freed",
    },
)
"""``promised``: somebody will make or upload it; ``freed``: nobody can name it any more."""

SLICE = LifeCycle(
    "slice",
    "bound",
    {
        ("bound", "release"): "released",
        ("bound", "lose"): "lost",
        ("bound", "suspend"): "suspended",
        ("suspended", "bind"): "bound",
        ("suspended", "lose"): "lost",
        ("released", "lose"): "lost",
        ("released", "free"): "freed",
        ("lost", "bind"): "bound",
        ("lost", "free"): "freed",
    },
)
"""``released``: takes no new work and ends with its last buffer and run.  ``suspended``:
holds no devices; its values are in its hosts' own memory, and its runs wait."""
