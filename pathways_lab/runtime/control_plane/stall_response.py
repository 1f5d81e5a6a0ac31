"""The response to a standstill: all clients are told, and owners' rules end it.

Problem: hosts that wait for each other must be named within seconds, wherever
that happens; but only where a client switched the order off is it certain
enough, and wanted, that the wait is ended: then its gangs fail with the story,
the hosts' common runtime is cut and formed again, and the island goes on.  The rules of
owners say the rest (:mod:`pathways_lab.core.diagnosis.stall_actions`).

Rule for maintainers: who waits for whom is found elsewhere; here it is told,
and acted on.  Long work is never ended, unless an owner has said so.

Paper: section 4.4.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from pathways_lab.core import messages as m
from pathways_lab.core.diagnosis.heartbeat import Pulse
from pathways_lab.core.diagnosis.overdue import GangId
from pathways_lab.core.diagnosis.stall import Seen
from pathways_lab.core.diagnosis.stall_actions import Acts
from pathways_lab.core.diagnosis.stall_detector import LATE, Told, Watchdog
from pathways_lab.core.diagnosis.stall_story import Stuck
from pathways_lab.core.errors import Failure
from pathways_lab.core.program.program import Call, SliceId
from pathways_lab.core.scheduling.unordered_launch import Races
from pathways_lab.runtime.control_plane.lost_hosts import Driver
from pathways_lab.runtime.control_plane.outbox import Switchboard
from pathways_lab.runtime.control_plane.record_writer import Diary
from pathways_lab.runtime.islands.process_groups import Formations
from pathways_lab.timeline.records import Event
from pathways_lab.transport.clock_sync import machine
from pathways_lab.transport.codec import pack

_REMEDY = (
    "in one order, which is what everybody else gets, both end;"
    " pw.possible_deadlock(...) tells it beforehand, from the programs alone"
)


class Standstill:
    """Watches one control plane's islands."""

    def __init__(
        self,
        rim: Driver,
        formations: Formations,
        races: Races,
        peers: Switchboard,
        diary: Diary,
    ) -> None:
        self._rim = rim
        self._registry = rim.registry
        self._formations = formations
        self._races = races
        self._overdue = rim.overdue
        self._peers = peers
        self._diary = diary
        self._now = 0.0
        self._watchdog = Watchdog(rim.overdue, self._ask, self._told, self._each)
        self.acts = Acts(self._report, self._fail, rim.restart_host)
        self._pulse = Pulse(lambda host: peers.host(host, "pulse", {}))
        self._silent: dict[str, float] = {}
        self._seen: object = None
        self._ended: set[tuple[int, int]] = set()
        """Gangs that were given up and that hosts have not reported yet."""

    def look(self, now: float) -> None:
        """Now and then."""
        patient = min(self._registry.disorder.values(), default=LATE)
        self._watchdog.look(now, min(LATE, patient / 2) if self._races else LATE)
        self._now = now
        self._pulse.look(now)
        before, self._silent = self._silent, self._pulse.silent(now)
        if self._silent or before:
            self._told_silent(before, now)

    def heard(self, host: str, now: float) -> None:
        """A host has said something."""
        self._pulse.heard(host, now)

    def wonder(self, now: float, late: float, told: Told) -> None:
        """A client asks what is late."""

        def and_missing(story: Stuck | None) -> None:
            silent = tuple(self._silent)
            down = tuple(f"{name} is down: {d.told}" for name, d in self._registry.down.items())
            if story is None and (silent or down):
                story = Stuck("silent" if silent else "down", (), (), silent)
            told(story if story is None else dataclasses.replace(story, down=down))

        self._watchdog.wonder(now, late, and_missing)

    def answered(self, host: str, number: int, seen: tuple[Seen, ...], now: float) -> None:
        """A host says what it has launched."""
        self._watchdog.answered(host, number, seen, now)

    def host_lost(self, host: str, now: float) -> None:
        self._watchdog.lost(host, now)
        self._pulse.lost(host)
        self._silent.pop(host, None)

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
            self._peers.host(host, "progress", {"number": number})

    def _told(self, story: Stuck, now: float) -> None:
        first = story.gangs[0]
        what = (story.kind, *((gang.run, gang.step) for gang in story.gangs), story.silent)
        slices = self._slices(story.gangs)
        islands = sorted({self._island(slice_id) for slice_id in slices})
        if what != self._seen:
            self._seen = what
            args = {"text": str(story), "story": pack(story)}
            self._diary.remember(
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

    def _each(self, story: Stuck, now: float) -> None:
        self._now = now
        self.acts.story(story, LATE, now)

    def _told_silent(self, before: Mapping[str, float], now: float) -> None:
        """Hosts have fallen silent, still are, or answer again."""
        for host in self._silent.keys() - before.keys():
            seen = self._registry.hosts[host]
            text = f"{host} does not answer, for {self._silent[host]:.1f} s"
            told = f"stuck, not dead: {text}"
            if seen.machine not in ("", machine()):
                # It may be stopped, and its machine, or the way there, may be gone.
                told = text = (
                    f"no word from {host} on {seen.hostname} for {self._silent[host]:.1f} s"
                )
            self._diary.remember(Event("silent", now, seen.island, host, args={"text": text}))
            bound = [b for b in self._registry.bindings.values() if host in b.hosts]
            for client in {b.client for b in bound}:
                self._rim.print_at(client, 0, told)
        for host in before.keys() - self._silent.keys():
            if host in self._registry.hosts:
                island = self._registry.hosts[host].island
                text = f"{host} answers again"
                self._diary.remember(Event("answers", now, island, host, args={"text": text}))
        self.acts.silent(tuple(self._silent.items()))

    # --- as told ---------------------------------------------------------------------------

    def _report(self, story: Stuck) -> None:
        for client in dict.fromkeys(gang.client for gang in story.gangs):
            run = next(gang.run for gang in story.gangs if gang.client == client)
            self._rim.print_at(client, run, str(story))

    def _fail(self, gang: GangId, failure: Failure) -> None:
        """The run of a gang; where hosts are in it together, what goes on there is ended."""
        slices = self._formations.together(self._slices_of(gang))
        runs, shared = {gang[0]}, any(self._formations.of_slice(s) is not None for s in slices)
        if shared:
            runs = {g.run for g in self._overdue(0.0, self._now) if slices & self._slices([g])}
        self._rim.happened(m.GivenUp(self._now, "watchdog", failure, runs=tuple(sorted(runs))))
        if shared:
            self._formations.renew(slices, failure)

    # --- the end of a deadlock --------------------------------------------------------------

    def _give_up(self, slices: Collection[SliceId], failure: Failure, now: float) -> None:
        """Everything granted on these slices, and on those with the same devices, fails."""
        slices = self._formations.together(slices)
        granted = self._overdue(0.0, now)
        gangs = tuple(g.id for g in granted if slices & self._slices([g]))
        self._ended = {*self._ended.intersection(g.id for g in granted), *gangs}
        self._rim.happened(m.GivenUp(now, "watchdog", failure, gangs))
        self._formations.renew(slices, failure)

    def _slices(self, gangs: Iterable[Any]) -> set[SliceId]:
        return set().union(*(self._slices_of((gang.run, gang.step)) for gang in gangs))

    def _slices_of(self, gang: GangId) -> set[SliceId]:
        _, key = self._registry.programs.get(gang[0], ("", ""))
        known = self._registry.plans.get(key)
        node = known[1].steps[gang[1]].node if known is not None else None
        return {node.slice} if isinstance(node, Call) else set()

    def _island(self, slice_id: SliceId) -> str:
        binding = self._registry.bindings.get(slice_id)
        return binding.island if binding is not None else ""
