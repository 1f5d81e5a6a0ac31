"""What a lab has to do with faults: ``lab.stuck()``, ``lab.on_stuck(...)``, ``lab.chaos``.

Problem: a lab that stands still must say why, do as it was told, and let itself
be tried.

Rule for maintainers: a part of :class:`pathways_lab.Lab`; thin, like it.

Paper: section 4.4, section 4.6.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from pathways_lab.client import failures
from pathways_lab.client.chaos import Chaos
from pathways_lab.client.session import Session
from pathways_lab.core.story import Stuck
from pathways_lab.runtime import attach
from pathways_lab.runtime.acts import Action, OnStuck
from pathways_lab.runtime.attach import ControlAddress
from pathways_lab.runtime.codec import unpack
from pathways_lab.runtime.embedded import EmbeddedCluster

if TYPE_CHECKING:
    import distributed


class Care:
    """The part of a lab that has to do with faults."""

    session: Session
    embedded: EmbeddedCluster | None
    _control: ControlAddress
    _target: Any = None
    """What was given to ``pw.connect``, if that was something of Dask's."""

    def stuck(self, seconds: float = 1.0) -> Stuck | None:
        """What was launched so long ago and has not ended, and who waits there for whom.

        Hosts are asked, and nothing is disturbed: long work is legal.  The answer
        prints as a story, and shows as a figure in a notebook; None: nothing is late,
        and all hosts answer.
        """
        packed = self.session.connection.questions.ask("stuck", {"seconds": seconds})["story"]
        return None if packed is None else unpack(Stuck, packed)

    def on_stuck(
        self, action: Action, *, after: float = 30.0, silence: float | None = 60.0
    ) -> OnStuck:
        """Say what the lab does when all wait for one gang, or a host does not answer.

        action: what is done when everybody has waited for one gang for *after* seconds.
            ``"report"``: the story is printed where its run was started.  ``"fail"``:
            that run fails, and its error tells the story; what cannot be interrupted
            still ends on its devices.  ``"restart"``: the device processes that hold
            it up, or do not answer, are restarted; what is on them fails.
        silence: seconds after which a host that does not answer anything is
            restarted, whatever the action (None: never).

        It holds for all clients, and only owners of the lab can say it.  A lab begins
        with ``lab.on_stuck("report", after=30, silence=60)``; long work is legal.

        >>> lab.on_stuck("restart", after=10)                # doctest: +SKIP
        """
        told = OnStuck(action, after, silence)
        wrong = told.wrong()
        if wrong:
            raise failures.failure("refused", wrong, 'lab.on_stuck("restart", after=10)')
        fields = {"action": action, "after": float(after), "silence": silence}
        return unpack(
            OnStuck, self.session.connection.questions.ask("watchdog", {"told": fields})["told"]
        )

    @property
    def watchdog(self) -> OnStuck:
        """What the lab does about what is stuck, and who has said so (:meth:`on_stuck`)."""
        return unpack(OnStuck, self.session.connection.questions.ask("watchdog", {})["told"])

    @functools.cached_property
    def chaos(self) -> Chaos:
        """Faults on purpose, with the outcome said first and looked at afterwards.

        ``kill(host)``, ``hang(host, seconds)``, ``slow(host, factor)``, ``lose(island)``,
        ``delay``, ``drop``, ``duplicate``, ``partition`` of what is said between two
        islands or hosts, ``fill_memory(host)``, ``lose_client()``, ``lose_scheduler()``.
        Everything about them is real.  Only owners of the lab can do this: who holds
        the credentials of its Dask cluster.

        >>> with lab.chaos.kill("island0/host1") as fault:   # doctest: +SKIP
        ...     out = train(w, x)
        >>> fault                                            # doctest: +SKIP
        """
        return Chaos(self, self._control)  # type: ignore[arg-type]

    def dask_client(self) -> distributed.Client:
        """A Dask client of the lab's cluster; the caller closes it."""
        self.session.connection.check()
        if self.embedded is not None:
            return self.embedded.dask_client()
        if self._target is not None:
            return attach.dask_client(self._target)
        raise failures.failure(
            "refused",
            "this lab was not started here, and not connected to through Dask",
            "use the distributed.Client of the cluster",
        )
