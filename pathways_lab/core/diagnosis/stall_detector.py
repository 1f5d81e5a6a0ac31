"""Notices a stall, asks the hosts about it, and explains it as a story.

Problem: hosts that wait for each other report nothing.  When granted gangs are
late the control plane asks their hosts which gangs they have launched, and joins
the answers with its own knowledge into a story.  Long work is legal, so the
detector ends nothing, except where the order is off, and then only a cycle that
every host confirms.

Rule for maintainers: no sockets and no clock here; one round of questions at a
time.  The driver acts on a story.

Paper: section 4.4.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pathways_lab.core.diagnosis.overdue import Overdue
from pathways_lab.core.diagnosis.stall import Seen, explain
from pathways_lab.core.diagnosis.stall_story import Stuck

LATE = 2.0
"""Seconds after which a granted gang is worth a question."""
PERIOD = 0.25
"""Seconds between two looks."""
_ANSWER = 1.0
"""How long hosts have for an answer, which costs them microseconds."""

Told = Callable[[Stuck | None], object]


class Watchdog:
    """Looks at what is late; one per control plane.

    overdue(seconds, now): the core's.  ask(hosts, number): send them a question.
    tell(story, now): a story that is new, or a deadlock that goes on.
    each(story, now): every story, also one that was told before.
    """

    def __init__(
        self,
        overdue: Callable[[float, float], Sequence[Overdue]],
        ask: Callable[[Sequence[str], int], None],
        tell: Callable[[Stuck, float], object],
        each: Callable[[Stuck, float], object] = lambda story, now: None,
    ) -> None:
        self._each = each
        self._overdue = overdue
        self._ask = ask
        self._tell = tell
        self._number = 0
        self._asked: set[str] = set()
        self._since = 0.0
        self._answers: dict[str, tuple[Seen, ...]] = {}
        self._curious: list[tuple[float, Told]] = []
        self._late = LATE
        self._last: tuple[object, ...] = ()

    def look(self, now: float, late: float = LATE) -> None:
        """Called every :data:`PERIOD`.  late: seconds after which a gang is."""
        self._late = late
        if self._asked:
            if now - self._since > _ANSWER:
                self._conclude(now)
        elif self._overdue(late, now):
            self._begin(now)
        else:
            self._last = ()

    def wonder(self, now: float, late: float, told: Told) -> None:
        """Somebody asks: he is told a story, or None when nothing is that late."""
        if not self._overdue(late, now):
            told(None)
            return
        self._curious.append((late, told))
        if not self._asked:
            self._begin(now)

    def answered(self, host: str, number: int, seen: tuple[Seen, ...], now: float) -> None:
        """A host said what it has launched."""
        if number == self._number and host in self._asked:
            self._asked.discard(host)
            self._answers[host] = seen
            if not self._asked:
                self._conclude(now)

    def lost(self, host: str, now: float) -> None:
        """A host is gone: nobody waits for its answer."""
        if host in self._asked:
            self._asked.discard(host)
            if not self._asked:
                self._conclude(now)

    def _begin(self, now: float) -> None:
        hosts = sorted({host for gang in self._overdue(0.0, now) for host in gang.hosts})
        self._number += 1
        self._answers, self._since = {}, now
        self._asked = set(hosts)
        if hosts:
            self._ask(hosts, self._number)
        else:
            self._conclude(now)

    def _conclude(self, now: float) -> None:
        silent, self._asked = sorted(self._asked), set()
        story = explain(self._overdue(0.0, now), self._answers, silent)
        curious, self._curious = self._curious, []
        # Late gangs may have ended while hosts were asked, and the others are not late.
        for late, told in curious:
            told(story if self._overdue(late, now) else None)
        if story is None or not self._overdue(self._late, now):
            return
        what = (story.kind, *((gang.run, gang.step) for gang in story.gangs), story.silent)
        if what != self._last or story.kind == "deadlock":
            self._last = what
            self._tell(story, now)
        self._each(story, now)
