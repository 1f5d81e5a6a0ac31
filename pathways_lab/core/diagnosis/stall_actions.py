"""Actions of the watchdog, as owners of the lab have set them.

Problem: most stalls are long work, which is legal.  The rest are computations
that never end and hosts that do not answer.  Only the owner can tell one from the
other; so the owner says beforehand how long a wait may be, and which action
follows.

Rule for maintainers: no sockets and no clock here.  An action hits the one gang
that all others wait for, and the hosts that hold it up; it never hits a waiting
gang.

Paper: section 4.4.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from pathways_lab.core.diagnosis.overdue import GangId
from pathways_lab.core.diagnosis.stall_story import Stuck
from pathways_lab.core.errors import Failure

Action = Literal["report", "fail", "restart"]


@dataclass(frozen=True, slots=True)
class OnStuck:
    """The reaction of a lab when everybody has waited for one gang for *after* seconds.

    action: ``"report"``: it is told where the run was started, and that is all.
        ``"fail"``: the run fails, with the story.  ``"restart"``: the hosts that hold it up are
        restarted; what is on them fails.
    silence: seconds after which a host that does not answer at all is restarted,
        whatever the action; None: never.
    owner: who has said so, or "".
    """

    action: str = "report"
    after: float = 30.0
    silence: float | None = 60.0
    owner: str = ""

    def wrong(self) -> str:
        """Why it cannot be so, or ""."""
        if self.action not in get_args(Action):
            return f"the watchdog can report, fail or restart, and not {str(self.action)[:40]!r}"
        times = (self.after,) if self.silence is None else (self.after, self.silence)
        if not all(type(t) in (int, float) and t > 0 for t in times):
            return f"after={self.after!r} and silence={self.silence!r} are seconds, more than 0"
        return ""


class Acts:
    """Does what *told* says.

    tell(story): to the clients whose gangs take part.  fail(gang, failure): its run.
    restart(host, reason).
    """

    def __init__(
        self,
        tell: Callable[[Stuck], object],
        fail: Callable[[GangId, Failure], object],
        restart: Callable[[str, str], object],
    ) -> None:
        self.told = OnStuck()
        self._tell = tell
        self._fail = fail
        self._restart = restart
        self._culprit: tuple[GangId, float] = ((0, 0), 0.0)
        self._acted: tuple[object, ...] = ()

    def story(self, story: Stuck, late: float, now: float) -> None:
        """A story, as often as it is found.  late: seconds after which a gang is in one."""
        culprit = story.culprit
        if culprit is None:
            return
        gang = culprit.run, culprit.step
        if self._culprit[0] != gang:
            self._culprit = gang, now - late
        waited, told = now - self._culprit[1], self.told
        if waited < told.after or self._acted == (gang, told):
            return
        self._acted = gang, told
        remedy = f'lab.on_stuck("report") lets it wait; it is {told.owner or "the lab"}\'s rule'
        hosts = story.silent or culprit.inside
        if told.action == "report":
            self._tell(story)
        elif told.action == "restart" and hosts:
            reason = f"everybody has waited {waited:.1f} s for it: {story.headline}"
            for host in hosts:
                self._restart(host, reason)
        else:
            text = f"everybody has waited {waited:.1f} s for this: {story.headline}"
            self._fail(gang, Failure("stuck", text, remedy, story=story, line=culprit.line))

    def silent(self, hosts: Sequence[tuple[str, float]]) -> None:
        """Hosts that do not answer, and for how long."""
        told = self.told
        patience = float("inf") if told.silence is None else told.silence
        if told.action == "restart":
            patience = min(patience, told.after)
        for host, seconds in hosts:
            if seconds >= patience:
                self._restart(host, f"it has not answered for {seconds:.1f} s")
