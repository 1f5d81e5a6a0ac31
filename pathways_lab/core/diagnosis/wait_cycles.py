"""Cycles of waits: can these launches deadlock, and who waits for whom?

Problem: devices are FIFO queues that cannot be interrupted, collectives wait
for all their partners, and gangs wait for the results of others.  When hosts
launch in different orders, these waits can form a cycle.  This module finds
it: for given orders exactly (:func:`find_cycle`), and from programs alone,
when nobody orders their launches, by looking for orders that would do it
(:func:`possible_cycle`).

Rule for maintainers: pure functions of names; the running system asks them to
explain a hang, teaching asks them to predict one.

Paper: section 2 (deadlock of communicating computations), section 4.4.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from pathways_lab.core.program.plans import PlanIndex
from pathways_lab.core.program.program import Call

Name = Hashable
Queue = Hashable


@dataclass(frozen=True, slots=True)
class Launch:
    """One gang.  queues: the FIFO queues (hosts or devices) on all of which it must have its turn.

    after: gangs whose results it needs.
    """

    name: Name
    queues: tuple[Queue, ...]
    after: tuple[Name, ...] = ()


@dataclass(frozen=True, slots=True)
class Wait:
    """*gang* waits for *behind*: in queue *at*, or for its result (then *at* is None)."""

    gang: Name
    behind: Name
    at: Queue | None = None

    def __str__(self) -> str:
        if self.at is None:
            return f"{self.gang} waits for the result of {self.behind}"
        return f"{self.gang} waits on {self.at} behind {self.behind}"


def launches(index: PlanIndex, run: str) -> tuple[Launch, ...]:
    """The gangs of a run of a plan, one queue per host; transfers only pass results on."""
    calls = {
        i: (run, s.node.name or i, i)
        for i, s in enumerate(index.plan.steps)
        if isinstance(s.node, Call)
    }
    needs: dict[int, tuple[Name, ...]] = {}
    found = []
    for i in range(len(index.plan.steps)):
        direct: dict[Name, None] = {}
        for p in index.producers[i]:
            direct.update(dict.fromkeys((calls[p],) if p in calls else needs[p]))
        needs[i] = tuple(direct)
        if i in calls:
            found.append(Launch(calls[i], index.step_hosts[i], needs[i]))
    return tuple(found)


def find_cycle(
    gangs: Iterable[Launch], orders: Mapping[Queue, Sequence[Name]], streams: int = 1
) -> tuple[Wait, ...]:
    """The cycle of waits that these orders lead to, or ().

    Where a gang waits for one that was never launched there is no cycle: then
    the chain of waits that ends in it, *behind* being None.
    orders: by queue, gangs in the order in which they are launched there.
    streams: how many gangs a queue runs at once.
    Whatever can end ends, in whatever order: what is left can never move.
    """
    by_name = {g.name: g for g in gangs}
    left = {q: [n for n in order if n in by_name] for q, order in orders.items()}
    readers: dict[Name, list[Name]] = {}
    for gang in by_name.values():
        for maker in gang.after:
            readers.setdefault(maker, []).append(gang.name)
    unfinished = dict.fromkeys(by_name)
    looked_at = list(by_name)
    while looked_at:
        ended = [n for n in looked_at if not _waits(by_name[n], left, unfinished, streams)]
        moved: dict[Name, None] = {}  # only who waited for what has ended may go on
        for name in ended:
            del unfinished[name]
            moved.update(dict.fromkeys(readers.get(name, ())))
            for queue in by_name[name].queues:
                left[queue].remove(name)
                moved.update(dict.fromkeys(left[queue][:streams]))
        looked_at = [n for n in moved if n in unfinished]
    path: list[Wait] = []
    at = next(iter(unfinished), None)
    seen: dict[Name, int] = {}
    while at is not None and at not in seen:
        seen[at] = len(path)
        waits = _waits(by_name[at], left, unfinished, streams)
        known = [w for w in waits if w.behind in unfinished]
        if not known:
            return (*path, waits[0])  # what it waits for was never launched
        path.append(known[0])
        at = known[0].behind
    return tuple(path[seen[at] :]) if at is not None else ()


def _waits(
    gang: Launch,
    left: Mapping[Queue, Sequence[Name]],
    unfinished: Mapping[Name, None],
    streams: int,
) -> list[Wait]:
    """The gangs that a gang waits for now."""
    found = []
    for queue in gang.queues:
        running = left.get(queue, ())[:streams]
        if gang.name not in running:
            found += [Wait(gang.name, other, queue) for other in running] or [
                Wait(gang.name, None, queue)
            ]
    found += [Wait(gang.name, other) for other in gang.after if other in unfinished]
    return found


def possible_cycle(
    programs: Mapping[str, Sequence[Launch]],
    launcher: Callable[[Queue], Hashable] = lambda queue: queue,
) -> tuple[tuple[Wait, ...], dict[Queue, tuple[Name, ...]]]:
    """A cycle of waits that uncoordinated launching could lead to, with orders that do.

    programs: by name, the gangs of one run of it in program order; each launcher
    keeps that order and mixes programs as it likes.
    launcher: who launches onto a queue, in one order for all queues of his.
    Returns ``((), {})`` when no mix of orders can deadlock.
    """
    of = {g.name: program for program, gangs in programs.items() for g in gangs}
    edges: dict[Name, list[Wait]] = {}
    for program, gangs in programs.items():
        for number, gang in enumerate(gangs):
            found = [Wait(gang.name, other) for other in gang.after]
            for theirs, rivals in programs.items():
                for rival in gangs[:number] if theirs == program else rivals:
                    shared = [q for q in gang.queues if q in rival.queues]
                    found += [Wait(gang.name, rival.name, q) for q in shared]
            edges[gang.name] = found
    for start in edges:
        cycle = _shortest(start, edges, of, launcher)
        if cycle:
            meetings = [w for w in cycle if of[w.gang] != of[w.behind]]
            return cycle, _orders(programs, meetings, launcher)
    return (), {}


def _shortest(
    start: Name,
    edges: Mapping[Name, Sequence[Wait]],
    of: Mapping[Name, str],
    launcher: Callable[[Queue], Hashable],
) -> tuple[Wait, ...]:
    """The shortest cycle through *start* in which programs meet at each launcher at most once.

    A launcher has one order: it cannot have each of two programs before the other.
    """
    paths: deque[tuple[Wait, ...]] = deque((w,) for w in edges[start])
    while paths:
        path = paths.popleft()
        at = path[-1].behind
        met = [launcher(w.at) for w in path if of[w.gang] != of[w.behind]]
        if len(set(met)) < len(met):
            continue
        if at == start:
            return path
        if not any(w.gang == at for w in path):
            paths.extend((*path, w) for w in edges[at])
    return ()


def _orders(
    programs: Mapping[str, Sequence[Launch]],
    meetings: Sequence[Wait],
    launcher: Callable[[Queue], Hashable],
) -> dict[Queue, tuple[Name, ...]]:
    """Orders by queue that lead to the cycle: on each, one program goes before the others."""
    of = {g.name: program for program, gangs in programs.items() for g in gangs}
    first = {launcher(w.at): of[w.behind] for w in meetings}
    found: dict[Queue, tuple[Name, ...]] = {}
    for queue in dict.fromkeys(q for gangs in programs.values() for g in gangs for q in g.queues):
        ahead = first.get(launcher(queue))
        ranked = [p for p in programs if p == ahead]
        ranked += [p for p in programs if p != ahead]
        found[queue] = tuple(g.name for p in ranked for g in programs[p] if queue in g.queues)
    return found
