"""What a lab does about runs that are under way: ``lab.cancel(...)``, ``lab.window``.

Problem: what was asked for may not be wanted any more while it waits.  The control plane ends
what has no place yet, and says what came too late.  The further ahead places are given, the
longer others wait behind them.

Rule for maintainers: a part of :class:`pathways_lab.Lab`; thin, like it.

Paper: section 4.6 (ownership).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax

from pathways_lab.client.functions import array_types
from pathways_lab.client.lab import slice_request
from pathways_lab.client.session import failures
from pathways_lab.client.session.handles import Handle
from pathways_lab.client.session.session import Session


@dataclass(frozen=True, slots=True)
class Cancelled:
    """What has become of the runs that were to be cancelled, and are not over.

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

    def cancel(self, *trees: Any) -> Cancelled:
        """Cancel what is not wanted any more; without arguments, all runs of this client.

        trees: pytrees of handles, such as a program returns.  The gangs that make these values,
            and all that depends on them, are not computed as far as they have no place on
            devices yet; a run of which nothing else is wanted ends.

        What has begun cannot be interrupted: it ends on its devices.  Reading a cancelled
        handle raises PathwaysError (``error.failure.kind == "cancelled"``).  Values that are
        there stay; so do runs of other clients, unless they read what is cancelled.
        Raises PathwaysError for what is no handle of this lab.

        >>> lab.cancel(out)                                  # doctest: +SKIP
        Cancelled(cancelled=1, begun=0, going=0)
        """
        if trees:
            answer = self.session.cancel(*self._handles(trees))
        else:
            connection = self.session.connection
            connection.flush()
            answer = self.session.cancel(runs=[run.id for run in connection.runs])
        return Cancelled(answer["cancelled"], answer["begun"], answer["going"])

    @property
    def window(self) -> float:
        """Seconds of device time that may be granted and unfinished on a device (0.1).

            lab.window = 0.0

        A gang whose place is granted cannot be overtaken any more: so long do runs of the
        highest priority wait for others, or for two gangs where one takes longer than half of
        it.  Until a gang of a function has ended on a slice, two of it have their places.  0: a
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

    def _handles(self, trees: tuple[Any, ...]) -> list[Handle]:
        found = []
        for leaf in jax.tree.leaves(trees):
            if isinstance(leaf, Handle) and leaf.session is self.session:
                if not leaf.is_ready():  # else it is there, failed, or another run's by now
                    found.append(leaf)
            elif isinstance(leaf, Handle) or array_types.host_type(leaf) is None:
                raise failures.failure(
                    "refused",
                    f"lab.cancel takes handles of this lab, not {leaf!r:.80}",
                    "cancel what its calls have returned: lab.cancel(out); or all that this"
                    " client has submitted: lab.cancel()",
                )
        return found
