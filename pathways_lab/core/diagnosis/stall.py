"""The story of a standstill: which host waits in which gang for whom.

Problem: a cluster that stands still looks the same from everywhere.  The
control plane knows which gangs it granted and which have not ended; each host
knows what it launched, and in what order.  Only together do they say whether
there is a cycle of waits, which will never end, or a chain that ends in a gang
which simply takes long, which is legal.

Rule for maintainers: pure; told by hosts, never guessed.  A cycle is called one
only when every host in it has launched the gang that it is said to be in.

Paper: section 2 (deadlock of communicating computations), section 4.4.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pathways_lab.core.diagnosis.overdue import GangId, Overdue
from pathways_lab.core.diagnosis.stall_story import Arrow, Member, Stuck
from pathways_lab.core.diagnosis.wait_cycles import Launch, Name, Queue, Wait, find_cycle

Link = tuple[GangId, GangId, str]
"""A gang, the one that it waits for, and the host where it does ("" for a result)."""

Queues = dict[tuple[str, int], list[GangId]]
"""By host and device: gangs in launch order."""

LAUNCHED = "launched"
QUEUED = "queued"
WAITING = "waiting"


@dataclass(frozen=True, slots=True)
class Seen:
    """A granted gang that has not ended, as one host knows it; hosts tell them in launch order.

    state: :data:`LAUNCHED` (it is on its devices), :data:`QUEUED` (its turn has not
        come), :data:`WAITING` (for inputs, or behind another gang).
    seconds: since it was launched; 0 before.
    devices: the host's own numbers.
    """

    run: int
    step: int
    state: str
    seconds: float
    devices: tuple[int, ...]


def explain(
    unfinished: Sequence[Overdue],
    seen: Mapping[str, Sequence[Seen]],
    silent: Sequence[str] = (),
) -> Stuck | None:
    """The cycle of waits, if there is one now; else the chain from the oldest gang; None: nothing.

    unfinished: all granted gangs that have not ended, the oldest first.
    seen: by host, what it told.  silent: hosts that told nothing.
    """
    known = {gang.id: gang for gang in unfinished}
    if not known:
        return None
    queues: Queues = {}
    state: dict[tuple[Name, str], str] = {}
    places: dict[GangId, list[Queue]] = {}
    for host, told in seen.items():
        for entry in told:
            gang = (entry.run, entry.step)
            if gang in known and host in known[gang].hosts:
                state[gang, host] = entry.state
                for device in entry.devices:
                    queues.setdefault((host, device), []).append(gang)
                    places.setdefault(gang, []).append((host, device))
    launches = [Launch(g.id, tuple(places.get(g.id, ())), g.needs) for g in unfinished]
    cycle = find_cycle(launches, dict(queues.items()))
    closed = bool(cycle) and cycle[-1].behind == cycle[0].gang
    if closed and all(_now(wait, queues, state) for wait in cycle):
        return _story("deadlock", _by_host(cycle), known, state, ())
    return _story("late", _chain(unfinished[0], known, queues), known, state, silent)


def _now(wait: Wait, queues: Queues, state: Mapping[tuple[Name, str], str]) -> bool:
    """Whether it waits already: the gang before it is launched, with nothing before that one."""
    if not isinstance(wait.at, tuple):
        return True
    front = queues[wait.at][0]
    return front == wait.behind and state[front, wait.at[0]] == LAUNCHED


def _by_host(waits: Sequence[Wait]) -> list[Link]:
    """Without the single devices."""
    found: dict[Link, None] = {}
    for wait in waits:
        host = wait.at[0] if isinstance(wait.at, tuple) else ""
        if isinstance(wait.gang, tuple) and isinstance(wait.behind, tuple):
            found[wait.gang, wait.behind, host] = None
    return list(found)


def _chain(first: Overdue, known: Mapping[GangId, Overdue], queues: Queues) -> list[Link]:
    """From a gang to what it waits for, to what that waits for ..., until one that only runs."""
    chain: list[Link] = []
    at, met = first.id, {first.id}
    while True:
        ahead = [
            (order[0], host)
            for (host, _), order in queues.items()
            if at in order and order[0] != at
        ]
        ahead += [(need, "") for need in known[at].needs if need in known]
        if not ahead or ahead[0][0] in met:
            return chain
        behind, host = ahead[0]
        chain.append((at, behind, host))
        at = behind
        met.add(at)


def _story(
    kind: str,
    waits: Sequence[Link],
    known: Mapping[GangId, Overdue],
    state: Mapping[tuple[Name, str], str],
    silent: Sequence[str],
) -> Stuck:
    ids = list(dict.fromkeys(g for gang, behind, _ in waits for g in (gang, behind)))
    ids = ids or [next(iter(known))]
    members = []
    for gang in ids:
        k = known[gang]
        holds = [host for _, behind, host in waits if behind == gang and host]
        launched = [host for host in k.hosts if state.get((gang, host)) == LAUNCHED]
        inside = tuple(dict.fromkeys(holds or launched))
        who = (k.run, k.step, k.client, k.program, k.node, k.line)
        members.append(Member(*who, inside, k.since, k.hosts))
    arrows = [Arrow(ids.index(gang), ids.index(behind), host) for gang, behind, host in waits]
    return Stuck(kind, tuple(members), tuple(arrows), tuple(silent))
