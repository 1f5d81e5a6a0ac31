"""What is done about a standstill: told to everybody, and ended where it was asked for.

Problem: hosts that wait for each other must be named within seconds, wherever
that happens; but only where a client switched the order off is it certain
enough, and wanted, that the wait is ended: then its gangs fail with the story,
the hosts' common runtime is cut and formed again, and the island goes on.

Rule for maintainers: who waits for whom is found elsewhere; here it is told,
and acted on.  Long work is never ended.

Paper: section 4.4.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

from pathways_lab.core import messages as m
from pathways_lab.core.errors import Failure
from pathways_lab.core.overdue import Overdue
from pathways_lab.core.program import Call, SliceId
from pathways_lab.core.story import Stuck
from pathways_lab.core.stuck import Seen
from pathways_lab.runtime.codec import pack, unpack
from pathways_lab.runtime.formations import Formations
from pathways_lab.runtime.races import Races
from pathways_lab.runtime.registry import Registry
from pathways_lab.runtime.watchdog import LATE, Told, Watchdog
from pathways_lab.timeline.records import Event

_REMEDY = (
    "in one order, which is what everybody else gets, both end;"
    " pw.possible_deadlock(...) tells it beforehand, from the programs alone"
)


class Standstill:
    """Watches one control plane's islands.

    overdue: the core's.  happened(event): to the core.  tell(host, op, fields).
    remember(event): in the timeline.
    """

    def __init__(
        self,
        registry: Registry,
        formations: Formations,
        races: Races,
        overdue: Callable[[float, float], Sequence[Overdue]],
        happened: Callable[[m.Event], None],
        tell: Callable[[str, str, dict[str, Any]], object],
        remember: Callable[[Event], None],
    ) -> None:
        self._registry = registry
        self._formations = formations
        self._races = races
        self._overdue = overdue
        self._happened = happened
        self._tell_host = tell
        self._remember = remember
        self._watchdog = Watchdog(overdue, self._ask, self._told)
        self._seen: object = None
        self._ended: set[tuple[int, int]] = set()
        """Gangs that were given up and that hosts have not reported yet."""

    def look(self, now: float) -> None:
        """Now and then."""
        patient = min(self._registry.disorder.values(), default=LATE)
        self._watchdog.look(now, min(LATE, patient / 2) if self._races else LATE)

    def wonder(self, now: float, late: float, told: Told) -> None:
        """A client asks what is late."""
        self._watchdog.wonder(now, late, told)

    def answered(self, host: str, fields: dict[str, Any], now: float) -> None:
        """A host says what it has launched.  Raises CodecError, KeyError, TypeError."""
        seen = tuple(unpack(Seen, entry) for entry in fields["gangs"])
        self._watchdog.answered(host, int(fields["number"]), seen, now)

    def host_lost(self, host: str, now: float) -> None:
        self._watchdog.lost(host, now)

    def lease_ends(self, island: str, client: str, now: float) -> None:
        """Before the core is told: nothing that was launched without order outlives its lease."""
        left = [
            gang
            for gang in self._overdue(0.0, now)
            if gang.run in self._races and gang.client == client and gang.id not in self._ended
        ]
        slices = {s for s in self._slices(left) if self._island(s) == island}
        if slices:
            why = f"the lease of {island} ended while its gangs waited for each other"
            self._give_up(slices, Failure("deadlock", why), now)

    # --- stories -------------------------------------------------------------------------

    def _ask(self, hosts: Sequence[str], number: int) -> None:
        for host in hosts:
            self._tell_host(host, "progress", {"number": number})

    def _told(self, story: Stuck, now: float) -> None:
        first = story.gangs[0]
        what = (story.kind, *((gang.run, gang.step) for gang in story.gangs), story.silent)
        slices = self._slices(story.gangs)
        islands = sorted({self._island(slice_id) for slice_id in slices})
        if what != self._seen:
            self._seen = what
            args = {"text": str(story), "story": pack(story)}
            self._remember(
                Event(
                    story.kind, now, islands[0] if islands else "", run=first.run, step=first.step,
                    program=first.program, node=first.node, client=first.client, args=args,
                )
            )  # fmt: skip
        patience = max((self._registry.disorder.get(i, float("inf")) for i in islands), default=0)
        raced = all(gang.run in self._races for gang in story.gangs)
        ended = self._ended.issuperset((gang.run, gang.step) for gang in story.gangs)
        if story.kind == "deadlock" and raced and story.seconds >= patience and not ended:
            failure = Failure(
                "deadlock",
                f"launched without order, these wait for each other for ever: {story.headline}"
                f" (ended after {story.seconds:.1f} s)",
                _REMEDY,
                line=first.line,
                story=story,
                details=str(story),
            )
            self._give_up(slices, failure, now)

    # --- the end of a deadlock --------------------------------------------------------------

    def _give_up(self, slices: Collection[SliceId], failure: Failure, now: float) -> None:
        """Everything granted on these slices, and on those with the same devices, fails."""
        slices = self._formations.together(slices)
        granted = self._overdue(0.0, now)
        gangs = tuple(g.id for g in granted if slices & self._slices([g]))
        self._ended = {*self._ended.intersection(g.id for g in granted), *gangs}
        self._happened(m.GangsGivenUp(now, "watchdog", gangs, failure))
        self._formations.renew(slices, failure)

    def _slices(self, gangs: Iterable[Any]) -> set[SliceId]:
        found = set()
        for gang in gangs:
            _, key = self._registry.programs.get(gang.run, ("", ""))
            known = self._registry.plans.get(key)
            node = known[1].steps[gang.step].node if known is not None else None
            if isinstance(node, Call):
                found.add(node.slice)
        return found

    def _island(self, slice_id: SliceId) -> str:
        binding = self._registry.bindings.get(slice_id)
        return binding.island if binding is not None else ""
