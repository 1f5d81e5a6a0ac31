"""Options of a function's or program's runs: how far ahead they are granted, and their tags.

Rule for maintainers: plain data, which every call of the function carries into its plan.

Paper: section 4.4, section 4.5.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pathways_lab.client.lab import slice_request
from pathways_lab.client.session import failures


@dataclass(frozen=True, slots=True)
class Running:
    """keep: runs go on when nobody can read their results any more.

    window: seconds of work that may lie before a gang on its devices when it gets its place,
        unless the lab or the slice says less (None: as they say).
    """

    keep: bool = False
    window: float | None = None

    @classmethod
    def of(cls, keep: Any, window: Any) -> Running:
        """Raises PathwaysError for what is no switch and no number of seconds."""
        if not isinstance(keep, bool):
            raise failures.refused(
                f"keep={keep!r:.60} is not a switch", "keep=True, or leave it out"
            )
        return cls(keep, None if window is None else slice_request.seconds("window", window))

    def beside(self, other: Running) -> Running:
        """The options that hold where both are given."""
        said = [w for w in (self.window, other.window) if w is not None]
        return Running(self.keep or other.keep, min(said, default=None))


USUAL = Running()
