"""Whose gang comes next: policies as small pure objects.

Problem: which of several waiting runs goes first is a matter of taste, and
users shall be able to try their own.  A policy sees an immutable view of the
runs whose next window could be granted now and names one of them.  Everything
that must not go wrong stays in the core: what is eligible, the order inside a
run, how often a run may be overtaken.

Rule for maintainers: a policy has no state and no effects; what it may need to
know is in the view.  Runs of one program, client and priority are
interchangeable, so only the first of them is shown.

Paper: section 4.4 (policies of the gang scheduler), section 5.3 (proportional
share, Figure 9).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Protocol, runtime_checkable

from pathways_lab.core.errors import Failure


@dataclass(frozen=True, slots=True)
class Candidate:
    """A run whose next window could be granted now.

    priority: its own, or the highest of those who wait for its results.
    order: its number in the order of submission.  waited: seconds since then.
    seconds: estimated device time of its next window, on its busiest slice.
    remaining: the same of all that is not granted.
    begun: whether part of it is granted.  overtaken: how often it was passed.
    """

    run: int
    client: str
    program: str
    priority: int
    order: int
    waited: float
    seconds: float
    remaining: float
    begun: bool
    overtaken: int


@dataclass(frozen=True, slots=True)
class View:
    """What a policy decides from.

    candidates: at least one, in order of submission.
    used: by client, device seconds, where older ones count less and less.
    programs: the same by program name.
    """

    time: float
    candidates: tuple[Candidate, ...]
    used: Mapping[str, float] = field(default_factory=dict)
    programs: Mapping[str, float] = field(default_factory=dict)


@runtime_checkable
class Policy(Protocol):
    """``choose`` returns the ``run`` of one of ``view.candidates``."""

    def choose(self, view: View) -> int:
        """The number of the run that goes first."""
        ...


@dataclass(frozen=True, slots=True)
class FIFO:
    """First submitted, first granted."""

    def choose(self, view: View) -> int:
        """See :class:`Policy`."""
        return min(view.candidates, key=lambda c: c.order).run


@dataclass(frozen=True, slots=True)
class Priority:
    """The highest priority first, then first submitted."""

    def choose(self, view: View) -> int:
        """See :class:`Policy`."""
        return min(view.candidates, key=lambda c: (-c.priority, c.order)).run


@dataclass(frozen=True, slots=True)
class ProportionalShare:
    """Device time in proportion to *weights*, by client or by program name.

    Who is not named weighs 1; weights are positive.
    """

    weights: Mapping[str, float] = field(default_factory=dict)
    by: str = "client"

    def __post_init__(self) -> None:
        if self.by not in ("client", "program"):
            raise ValueError(f"shares are by 'client' or by 'program', not by {self.by!r}")
        for name, weight in self.weights.items():
            if not weight > 0:
                raise ValueError(f"the weight of {name!r} is {weight}; weights are positive")

    def choose(self, view: View) -> int:
        """See :class:`Policy`."""
        used = view.used if self.by == "client" else view.programs

        def rank(c: Candidate) -> tuple[float, int]:
            name = c.client if self.by == "client" else c.program
            return used.get(name, 0.0) / self.weights.get(name, 1.0), c.order

        return min(view.candidates, key=rank).run


@dataclass(frozen=True, slots=True)
class ShortestFirst:
    """The run with the least measured device time left first."""

    def choose(self, view: View) -> int:
        """See :class:`Policy`."""
        return min(view.candidates, key=lambda c: (c.remaining, c.order)).run


def ask(policy: Policy, view: View) -> int | Failure:
    """The policy's choice, or why it is not one.  User code never raises out of here."""
    name = type(policy).__name__
    try:
        chosen = policy.choose(view)
    except Exception as error:
        return Failure(
            "policy",
            f"policy {name} raised {type(error).__name__}: {error}",
            "FIFO has taken over; correct choose() and set the policy again",
        )
    if any(c.run == chosen for c in view.candidates) and not isinstance(chosen, bool):
        return int(chosen)
    runs = ", ".join(str(c.run) for c in view.candidates[:8])
    return Failure(
        "policy",
        f"policy {name} chose {chosen!r}, which is none of the eligible runs ({runs})",
        "FIFO has taken over; choose() must return the run of one of view.candidates",
    )


def validate(policy: object) -> Failure | None:
    """Try a policy on a few views before it is installed."""
    if not isinstance(policy, Policy):
        return Failure(
            "policy",
            f"{type(policy).__name__} is no policy: it has no method choose(view)",
            "write a class with choose(self, view) that returns the run of a candidate",
        )
    some = tuple(
        Candidate(n, f"kernel-{1 + n % 2}", f"p{n}", n % 2, n, 0.1 * n, 0.01 * n, 0.02, n > 2, 0)
        for n in (1, 2, 3)
    )
    used = MappingProxyType({"kernel-1": 1.5})
    for view in (
        View(0.0, some[:1]),
        View(1.0, some),
        View(2.0, some[::-1], used, MappingProxyType({"p1": 0.5})),
    ):
        answer = ask(policy, view)
        if isinstance(answer, Failure):
            return answer
    return None
