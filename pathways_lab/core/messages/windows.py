"""Messages about how far ahead grants run on a lab.

Rule for maintainers: as in :mod:`pathways_lab.core.messages`, whose unions have them.  A slice
states its window in its request, a program in its calls.

Paper: section 4.4 (policies act between grants).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class WindowChosen:
    """An owner says how many seconds of work may be ahead on any device; None: asks only.

    request: the client's number for it, which comes back with Answer and the ``seconds`` in force.
    """

    time: float
    cause: str
    client: str
    seconds: float | None = None
    request: int = 0
