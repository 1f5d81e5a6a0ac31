"""Simulated transfers: from the hosts of one slice to those of another.

Problem: when a transfer may be sent and where there is room for it, launchers
decide; how long it takes may be rough: it begins when all its sources are there,
and every target host receives its shards through one interface, one after the other.
Bytes that come before there is room for them wait in the host's own memory.

Rule for maintainers: no piece of a shard is modelled; the bytes of an exchange
are those of the target's shards.  Devices of one host that need the same one share it,
as on real hosts.

Paper: section 4.3 (sharded edges), section 4.5 (transfers over the DCN).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from pathways_lab.core.errors import Failure
from pathways_lab.core.program.layout import Box, Layout, boxes
from pathways_lab.core.slices.topology import SliceBinding
from pathways_lab.executor.actions import Receive, Send
from pathways_lab.executor.steps import Key
from pathways_lab.sim.parts import HostPort, WorldPort


@functools.lru_cache(maxsize=256)
def shards(layout: Layout, shape: tuple[int, ...], on: SliceBinding) -> Mapping[str, int]:
    """By host, how many different shards its devices hold."""
    found: dict[str, set[Box]] = {}
    for (host, _), box in zip(on.devices, boxes(layout, shape), strict=True):
        found.setdefault(host, set()).add(box)
    return {host: len(different) for host, different in found.items()}


@dataclass(slots=True, eq=False)
class Movement:
    """A transfer on all its hosts.

    origins: all sending hosts.  sent: those whose bytes exist and have not left.
    sources: hosts whose bytes do not exist yet.
    targets: receiving hosts that have not got theirs, and how many different shards each needs.
    arrived: hosts whose bytes have come.  waiting: what hosts have room for.
    content, failure: of the value that moves.
    """

    origins: Mapping[str, object]
    targets: dict[str, int]
    sources: set[str]
    start: float = -1.0
    sent: list[tuple[HostPort, Key]] = field(default_factory=list)
    arrived: set[str] = field(default_factory=set)
    waiting: dict[str, tuple[HostPort, Receive]] = field(default_factory=dict)
    content: int | None = None
    failure: Failure | None = None


class Network:
    """All transfers under way.  late(source, target): how much later one of hosts arrives."""

    def __init__(self, world: WorldPort) -> None:
        self.world = world
        self.moving: dict[int, dict[int, Movement]] = {}
        """By run and step."""
        self.late: Callable[[str, str], float] = lambda source, target: 0.0

    def _movement(self, action: Send | Receive) -> Movement:
        run, step = action.key
        found = self.moving.setdefault(run, {}).get(step)
        if found is None:
            values, world = action.plan.values, self.world
            source, made = values[action.node.input].slice, values[action.node.output]
            assert source is not None
            assert made.slice is not None
            origins = world.local[source]
            needs = shards(made.layout, made.shape, world.bindings[made.slice])
            found = self.moving[run][step] = Movement(origins, dict(needs), set(origins))
        return found

    def send(self, host: HostPort, action: Send) -> None:
        """The bytes of one source host exist, or never will."""
        movement = self._movement(action)
        movement.sources.discard(host.name)
        movement.sent.append((host, action.key))
        movement.failure = movement.failure or action.failure
        if not movement.sources:
            movement.content = action.source.payload
            movement.start = last = self.world.agenda.now
            for name, count in movement.targets.items():
                target = self.world.host(name)
                if target is not None:
                    arrival = self._arrival(host, target, action, count)
                    last = max(last, arrival)
                    self.world.agenda.at(arrival, self._arrive, movement, name, action.key)
            self.world.agenda.at(last, self._left, movement)

    def _arrival(self, source: HostPort, target: HostPort, action: Send, count: int) -> float:
        costs = self.world.machine.costs
        nbytes = count * action.plan.values[action.node.output].nbytes
        if source is target:
            latency, rate = costs.local_latency, costs.local
        elif source.island == target.island:
            latency, rate = costs.island_latency, costs.island
        else:
            latency, rate = costs.dcn_latency, costs.dcn
        now = self.world.agenda.now
        target.ingress = max(target.ingress, now) + self.world.vary(nbytes / rate)
        late = self.late(source.name, target.name)
        return target.ingress + self.world.vary(latency) + late

    def _arrive(self, movement: Movement, name: str, key: Key) -> None:
        movement.arrived.add(name)
        self._deliver(movement, name, key)

    def _left(self, movement: Movement) -> None:
        """All bytes have left their sources."""
        sent, movement.sent = movement.sent, []
        for host, key in sent:
            if self.world.alive(host):
                host.sent(key, None)

    def receive(self, host: HostPort, action: Receive) -> None:
        """A host has room for its bytes."""
        movement = self._movement(action)
        movement.waiting[host.name] = host, action
        self._deliver(movement, host.name, action.key)

    def _deliver(self, movement: Movement, name: str, key: Key) -> None:
        if name not in movement.arrived or name not in movement.waiting:
            return
        host, action = movement.waiting.pop(name)
        del movement.targets[name]
        if not movement.targets:
            self.moving.get(key[0], {}).pop(key[1], None)
        if self.world.alive(host):
            now, content = self.world.agenda.now, movement.content
            self.world.memory.transfer(host, action, movement.origins, movement.start, now)
            host.received(action, content, movement.failure)

    def cancel(self, host: HostPort, key: Key) -> None:
        """A host waits for its bytes no more."""
        movement = self.moving.get(key[0], {}).get(key[1])
        if movement is not None:
            movement.waiting.pop(host.name, None)

    def give_up(self, run: int) -> None:
        """A run ends early: no host keeps what it would send to others."""
        for movement in self.moving.pop(run, {}).values():
            self._left(movement)
