"""Policies: small objects with one method, which choose the run whose gang comes next.

Problem: which of several waiting runs goes first is a matter of taste, and
users shall be able to try their own.  A policy sees an immutable view of runs
that compete for the same devices and could go on now, and names one of them.
Everything that must not go wrong stays in the core: what is eligible, the order
inside a run, how often a run may be overtaken.

    class LongestWaiting:
        def choose(self, view):
            return max(view.candidates, key=lambda c: c.waited).run

    lab.policy = LongestWaiting()

A policy is asked for every window of gangs, not for every run: a run that has begun
yields between its windows to the run that the policy prefers then, and goes on afterwards.  That is
all the preemption there is: gangs that have their places keep them, and memory is
reserved for whole runs, so the first run must find room beside those that have begun.

An object's attributes are its memory: ``self.turns += 1`` works, on a copy that
belongs to the lab.

Rule for maintainers: the policies here have no state and no effects; what a
policy may need to know is in the view.  Runs of one program, client, priority and
data are interchangeable, so only the first of them is shown; where data differ, the
first :data:`APART` runs of a program are looked at.

Paper: section 4.4 (policies of the gang scheduler), section 5.3 (proportional
share, Figure 9).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import islice
from types import MappingProxyType, TracebackType
from typing import Any, Protocol, runtime_checkable

from pathways_lab.core.errors import Failure
from pathways_lab.core.program.program import Line

APART = 32
"""Runs of one program, client and priority that are candidates at a time, each with its data."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A run that could go on now: the next of its gangs would get their places.

    run: its number, which ``choose`` returns.
    client: the name of who submitted it (``pw.start(name=...)``, else
        ``"kernel-1"`` ...).  program: the program's name.
    priority: its own, or the highest of those who wait for its results.
    order: its number in the order of submission.  waited: seconds since then.
    seconds: estimated device seconds of what it would be granted now (up to
        0.1 s, measured on earlier runs), on the slice that is busy longest.
    remaining: the same of all that is not granted yet.
    devices: how many devices its slices have.
    begun: whether part of it is granted.  overtaken: how often it was passed, since then if it was.
    data: what its client says of it, like ``{"deadline": 3.0}``: of :func:`pathways_lab.program`
        (``data=``) and of :func:`pathways_lab.tagged`.
    """

    run: int
    client: str
    program: str
    priority: int
    order: int
    waited: float
    seconds: float
    remaining: float
    devices: int
    begun: bool
    overtaken: int
    data: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PolicyView:
    """The view from which a policy decides.

    time: seconds, on the control plane's clock.
    candidates: runs that compete for devices, in order of submission; two or
        more, for who is alone is not held up by a question.
    used: device seconds by client (devices times seconds) since somebody came
        (back) or the policy was set, older ones counting less: half after ten
        seconds.  programs: the same by program name.
    """

    time: float
    candidates: tuple[Candidate, ...]
    used: Mapping[str, float] = field(default_factory=dict)
    programs: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Place:
    """An island on which a slice could lie.

    island: its name, which ``place`` returns.  kind, hosts, devices: what it has.
    shared: how many slices hold the most shared of the devices that it would get there.
    held: how many devices the slices on it hold, those that share one counted for each.
    """

    island: str
    kind: str
    hosts: int
    devices: int
    shared: int
    held: int


@dataclass(frozen=True, slots=True)
class PlaceView:
    """The view from which a policy decides where a slice shall lie.

    time: seconds, on the control plane's clock.  client: its name.  shape: of the mesh.
    candidates: islands that have the devices, two or more; the first is where it lies if
        nobody chooses.
    """

    time: float
    client: str
    shape: tuple[int, ...]
    candidates: tuple[Place, ...]


@runtime_checkable
class Policy(Protocol):
    """Anything with ``choose(view)``, which returns the ``run`` of one of ``view.candidates``.

    It may also have ``place(view)``: given a :class:`PlaceView`, it returns the ``island`` of one
    of ``view.candidates`` for a new slice whose request names none.  Which devices of it is
    the core's to say, and slices that are bound again stay near.

        class Spread(pw.FIFO):
            def place(self, view):
                return min(view.candidates, key=lambda c: c.held / c.devices).island
    """

    def choose(self, view: PolicyView) -> int:
        """The number of the run that goes first."""


@dataclass(frozen=True, slots=True)
class FIFO:
    """First submitted, first granted: a client waits for all that others submitted before it."""

    def choose(self, view: PolicyView) -> int:
        """See :class:`Policy`."""
        return min(view.candidates, key=lambda c: c.order).run


@dataclass(frozen=True, slots=True)
class Priority:
    """The highest priority first; clients share the devices equally among equal priorities."""

    def choose(self, view: PolicyView) -> int:
        """See :class:`Policy`."""
        used = view.used
        return min(
            view.candidates, key=lambda c: (-c.priority, used.get(c.client, 0.0), c.order)
        ).run


@dataclass(frozen=True, slots=True)
class ProportionalShare:
    """Device time in proportion to *weights*, among those who want it.

    weights: positive numbers by name; who is not named weighs 1.
    by: ``"client"``: names are those of clients (``lab.name``, ``lab.clients``);
        ``"program"``: those of programs, whoever runs them.

    The others get what nobody wants.  Shares hold from the moment at which
    somebody comes (back, after a second or more): who was alone before owes
    nothing.  Among those who stay the past counts half after ten seconds.
    Raises ValueError for weights that are none.
    """

    weights: Mapping[str, float] = field(default_factory=dict)
    by: str = "client"

    def __post_init__(self) -> None:
        if self.by not in ("client", "program"):
            raise ValueError(f"shares are by 'client' or by 'program', not by {self.by!r}")
        if not isinstance(self.weights, Mapping):
            raise ValueError(
                f"weights are numbers by name, like {{'ann': 2}}, not {self.weights!r}"
            )
        for name, weight in self.weights.items():
            if not isinstance(name, str):
                raise ValueError(f"weights are by name, and {name!r} is not text")
            number = isinstance(weight, int | float) and math.isfinite(weight)
            if not number or weight <= 0:
                raise ValueError(
                    f"the weight of {name!r} is {weight!r}; weights are positive numbers"
                )

    def choose(self, view: PolicyView) -> int:
        """See :class:`Policy`."""
        used = view.used if self.by == "client" else view.programs
        return min(
            view.candidates, key=lambda c: rank(self, c.client, c.program, c.order, used)
        ).run


def rank(
    shares: ProportionalShare, client: str, program: str, order: int, used: Mapping[str, float]
) -> tuple[float, int]:
    """The run of the least rank goes first.  used: device seconds by name."""
    name = client if shares.by == "client" else program
    return used.get(name, 0.0) / shares.weights.get(name, 1.0), order


@dataclass(frozen=True, slots=True)
class ShortestFirst:
    """The run with the least measured device time left first."""

    def choose(self, view: PolicyView) -> int:
        """See :class:`Policy`."""
        return min(view.candidates, key=lambda c: (c.remaining, c.order)).run


BuiltIn = FIFO | Priority | ProportionalShare | ShortestFirst
"""Policies that are part of the core, and travel as data."""

INITIAL = ProportionalShare()
"""The policy with which a lab begins: nobody waits for all that another client has submitted."""


@dataclass(frozen=True, slots=True)
class RemotePolicy:
    """A policy that runs elsewhere: it is asked by a command and answers by an event.

    name: what its author calls it.  number: which one; never used twice.  places: whether it also
    chooses islands.
    """

    name: str
    number: int
    places: bool = False


def name_of(policy: object) -> str:
    """The name of a policy for people."""
    return policy.name if isinstance(policy, RemotePolicy) else type(policy).__name__


def places(policy: object) -> bool:
    """Whether a policy also chooses islands for slices."""
    if isinstance(policy, RemotePolicy):
        return policy.places
    return callable(getattr(policy, "place", None))


def ask(policy: Policy, view: PolicyView | PlaceView) -> int | Failure:
    """The policy's choice, or why it is not one.  User code never raises out of here.

    A run, or of islands which of the candidates, from 0.
    """
    chosen: Any
    try:
        chosen = policy.choose(view) if isinstance(view, PolicyView) else _place(policy, view)
    except Exception as error:
        method = "choose" if isinstance(view, PolicyView) else "place"
        return Failure(
            "policy",
            f"policy {name_of(policy)} raised {type(error).__name__}: {error}",
            f"correct {method}() and set the policy again",
            line=_line_in(policy, error.__traceback__),
        )
    if isinstance(view, PlaceView):
        islands = [c.island for c in view.candidates]
        if isinstance(chosen, str) and chosen in islands:
            return islands.index(chosen)
        return Failure(
            "policy",
            f"policy {name_of(policy)} chose {repr(chosen)[:80]}, which is none of the islands"
            f" ({', '.join(islands[:8])})",
            "place() must return the island of one of view.candidates",
        )
    if any(c.run == chosen for c in view.candidates) and not isinstance(chosen, bool):
        return int(chosen)
    return ineligible(name_of(policy), chosen, (c.run for c in view.candidates))


def _place(policy: Any, view: PlaceView) -> object:
    return policy.place(view)


def ineligible(name: str, chosen: object, runs: Iterable[int]) -> Failure:
    """The failure of a policy that chose what is no run of a candidate."""
    some = ", ".join(str(run) for run in islice(runs, 8))
    return Failure(
        "policy",
        f"policy {name} chose {repr(chosen)[:80]}, which is none of the eligible runs ({some})",
        "choose() must return the run of one of view.candidates",
    )


def _line_in(policy: Policy, trace: TracebackType | None) -> Line:
    """Where an exception passed last in the file, or the cell, of the policy's ``choose``."""
    code = getattr(policy.choose, "__code__", None)
    found = Line()
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if code is not None and file == code.co_filename:
            found = Line(file, trace.tb_lineno, "")
        trace = trace.tb_next
    return found


def validate(policy: object) -> Failure | None:
    """Try a copy of a policy on a few views, before it is installed."""
    if isinstance(policy, type):
        return Failure(
            "policy",
            f"{policy.__name__} is a class, and a policy is an object",
            f"write {policy.__name__}()",
        )
    if not isinstance(policy, Policy) or not callable(policy.choose):
        return Failure(
            "policy",
            f"{type(policy).__name__} is not a policy: it has no method choose(view)",
            "write a class with choose(self, view) that returns the run of a candidate",
        )
    try:
        trial = copy.deepcopy(policy)
    except Exception as error:
        return Failure(
            "policy",
            f"policy {name_of(policy)} cannot be copied ({type(error).__name__}: {error}),"
            " and a lab keeps a copy of its own",
            "keep only plain data in its attributes",
        )
    for view in (*_TRIALS, *(_PLACES if places(trial) else ())):
        answer = ask(trial, view)
        if isinstance(answer, Failure):
            return answer
    return None


def _trial(n: int) -> Candidate:
    client, program = f"kernel-{1 + n % 2}", f"p{n}"
    return Candidate(
        n, client, program, n % 2, n, 0.1 * n, 0.01 * n, 0.02, 4 * n, n > 2, overtaken=0
    )


_SOME = (_trial(1), _trial(2), _trial(3))
_TRIALS = (
    PolicyView(0.0, _SOME[:2]),
    PolicyView(1.0, _SOME),
    PolicyView(
        2.0,
        _SOME[1:],
        MappingProxyType({"kernel-1": 1.5}),
        MappingProxyType({"p1": 0.5}),
    ),
)
"""Views that a policy must have an answer for: nobody known, and somebody known."""

_PLACES = (
    PlaceView(
        0.0, "kernel-1", (4,),
        (Place("island0", "cpu", 1, 4, 0, 0), Place("island1", "cpu", 2, 8, 1, 4)),
    ),
)  # fmt: skip
