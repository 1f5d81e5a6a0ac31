"""Runs under way: cancelled by ``lab.cancel(...)``, bounded by ``lab.window``.

Problem: what was asked for may not be wanted any more while it waits.  The control plane ends
what has no place yet, and says what came too late.  The further ahead places are given, the
longer others wait behind them.

Rule for maintainers: a part of :class:`pathways_lab.Lab`; thin, like it.

Paper: section 4.6 (ownership).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, repeat
from typing import Any, Protocol, runtime_checkable

import jax

from pathways_lab.client.functions import array_types
from pathways_lab.client.lab import slice_request
from pathways_lab.client.program.graph import Prepared
from pathways_lab.client.session import failures
from pathways_lab.client.session.handles import Handle
from pathways_lab.client.session.session import Session
from pathways_lab.core.program.program import Plan


@runtime_checkable
class Runs(Protocol):
    """A function or program whose calls are runs.  ready: what these have come to."""

    @property
    def ready(self) -> tuple[Prepared, ...]: ...


@dataclass(frozen=True, slots=True)
class Cancelled:
    """The cancelled runs that are not over, and the state of each.

    cancelled: so many end, and nothing of them had begun.
    begun: so many end when what has its place on devices has ended.
    going: so many go on: all that was named has its place already, or other results of them
        are wanted.
    """

    cancelled: int
    begun: int
    going: int


class UnderWay:
    """The part of a lab that has to do with what is under way."""

    session: Session

    def cancel(self, *wanted: Any) -> Cancelled:
        """Cancel what is not wanted any more; without arguments, all runs of this client.

        wanted: any of these, or pytrees of them.
            Handles, such as a program returns: the gangs that make these values, and all that
            depends on them, are not computed as far as they have no place on devices yet; a run
            of which nothing else is wanted ends.
            A function that ``pw.jit`` or ``pw.pmap`` has made, or a program: all runs of it that
            this client has submitted.  A call inside of a program belongs to that program.
            The name of one, such as ``%%pw_program`` gives, as text: all runs that are called so.

        A computation that has begun cannot be interrupted: it ends on its devices.  Reading a
        cancelled handle raises PathwaysError (``error.failure.kind == "cancelled"``).  Values that
        are there stay; so do runs of other clients, unless they read what is cancelled.
        Raises PathwaysError for anything else, and for handles of another lab.

        >>> lab.cancel(out)                                  # doctest: +SKIP
        Cancelled(cancelled=1, begun=0, going=0)
        >>> lab.cancel(train)                                # doctest: +SKIP
        Cancelled(cancelled=12, begun=1, going=0)
        """
        connection = self.session.connection
        connection.flush()
        handles, names, keys = self._named(wanted)
        whole: list[int] = []
        steps: list[tuple[int, list[int]]] = []
        for run in connection.runs:
            meant = [not wanted or p.name in names or p.key in keys for p in run.plans]
            if all(meant):
                whole.append(run.id)
            elif any(meant):
                steps.append((run.id, _steps(run.plans, meant)))
        answer = self.session.cancel(*handles, runs=whole, steps=steps)
        return Cancelled(answer["cancelled"], answer["begun"], answer["going"])

    @property
    def window(self) -> float:
        """Seconds of device time that may be granted and unfinished on a device (0.1).

            lab.window = 0.0

        A gang whose place is granted cannot be overtaken any more.  So this holds for a program
        that is alone on its devices.  Where several that the policy tells apart (equal shares:
        clients; priorities: programs too) have asked for the same devices within a second, gangs of
        2 ms or more among them, 10 ms of work or two gangs are granted, whichever is more: so long
        does a run wait that the policy prefers.
        Until a gang of a function has ended on a slice, two of it have their places.  0: a
        gang has its place when its devices have nothing left to do, which costs them the time
        of a message between any two gangs.  A slice (``lab.slice(..., window=...)``) and a
        function or program (``pw.jit(..., window=...)``) may ask for less: the least holds.

        Setting holds for all clients, from the next grants on; only owners of the lab can.
        """
        return float(
            self.session.connection.questions.ask("window", {"seconds": None}).fields["seconds"]
        )

    @window.setter
    def window(self, seconds: float) -> None:
        told = {"seconds": slice_request.seconds("window", seconds)}
        self.session.connection.questions.ask("window", told)

    def _named(self, wanted: tuple[Any, ...]) -> tuple[list[Handle], set[str], set[str]]:
        """Handles whose values are not there yet, names of programs, keys of plans."""
        handles: list[Handle] = []
        keys: set[str] = set()
        for leaf in jax.tree.leaves([each for each in wanted if not isinstance(each, str)]):
            method = getattr(leaf, "__func__", leaf)
            if isinstance(leaf, Handle) and leaf.session is self.session:
                if not leaf.is_ready():  # else it is there, failed, or another run's by now
                    handles.append(leaf)
            elif isinstance(method, Runs):
                keys.update(plan.key for prepared in method.ready for plan in prepared.plans)
            elif isinstance(leaf, Handle) or array_types.host_type(leaf) is None:
                raise failures.refused(
                    "lab.cancel takes handles of this lab, functions of pw.jit and pw.pmap,"
                    f" programs, and names of these, not {leaf!r:.80}",
                    "cancel what calls have returned: lab.cancel(out); all calls of a function:"
                    " lab.cancel(f); or all that this client has submitted: lab.cancel()",
                )
        return handles, {each for each in wanted if isinstance(each, str)}, keys


def _steps(plans: Sequence[Plan], meant: Sequence[bool]) -> list[int]:
    """The steps of those plans that are meant, counted through all that travel as one run."""
    counts = [repeat(each, len(plan.steps)) for plan, each in zip(plans, meant, strict=True)]
    return [step for step, each in enumerate(chain.from_iterable(counts)) if each]
