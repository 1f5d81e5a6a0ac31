"""Messages about programs that their client needs no more, and about runs that waited.

Problem: programs and compiled code come with the messages that need them, and nothing that
is submitted says when they may go; only their client knows that nobody can call them again.
See :mod:`pathways_lab.core.program.code_gc` for what follows.

Rule for maintainers: as in :mod:`pathways_lab.core.messages`, whose unions have them.

Paper: section 4.2 (registering computations).
"""

from __future__ import annotations

from dataclasses import dataclass

from pathways_lab.core.program.program import SliceId


@dataclass(frozen=True, slots=True)
class ProgramsDropped:
    """A client will submit no more runs of these plans, unless it registers them again.

    functions: ``(function, slice)`` that none of its other plans calls.
    """

    time: float
    cause: str
    client: str
    plans: tuple[str, ...]
    functions: tuple[tuple[str, SliceId], ...]


@dataclass(frozen=True, slots=True)
class ProgramsForgotten:
    """Hosts forget plans, and functions with what was compiled: no run needs them."""

    cause: str
    hosts: tuple[str, ...]
    plans: tuple[str, ...]
    functions: tuple[tuple[str, SliceId], ...]


@dataclass(frozen=True, slots=True)
class RunWaited:
    """A run is admitted after it was ready, and this is why not at once.

    since: when it had everything else (seconds).
    waited_for: ``"memory"`` (of devices, or of its client's quota) or ``"turn"`` (the policy
        preferred others).
    """

    cause: str
    run: int
    since: float
    waited_for: str
