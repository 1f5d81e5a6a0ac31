"""Messages about values that stay when their client leaves (:mod:`.core.slices.keeping`).

Rule for maintainers: as for all messages (:mod:`pathways_lab.core.messages`).
"""

from __future__ import annotations

from dataclasses import dataclass

from pathways_lab.core.program.program import SliceId


@dataclass(frozen=True, slots=True)
class SlicesKept:
    """These stay for the next client of this name; None: nothing is kept for it any more."""

    cause: str
    client: str
    slices: tuple[SliceId, ...] | None
