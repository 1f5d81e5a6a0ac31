"""What a lab does about runs that are under way: ``handle.cancel()``, ``lab.cancel(...)``.

Problem: what was asked for may not be wanted any more while it waits.  The control plane ends
what has no place yet, and says what came too late.

Rule for maintainers: a part of :class:`pathways_lab.Lab`; thin, like it.

Paper: section 4.6 (ownership).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax

from pathways_lab.client import arrays, failures
from pathways_lab.client.handles import Handle
from pathways_lab.client.session import Session


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

    def _handles(self, trees: tuple[Any, ...]) -> list[Handle]:
        found = []
        for leaf in jax.tree.leaves(trees):
            if isinstance(leaf, Handle) and leaf.session is self.session:
                found.append(leaf)
            elif isinstance(leaf, Handle) or arrays.host_type(leaf) is None:
                raise failures.failure(
                    "refused",
                    f"lab.cancel takes handles of this lab, not {leaf!r:.80}",
                    "cancel what its calls have returned: lab.cancel(out); or all that this"
                    " client has submitted: lab.cancel()",
                )
        return found
