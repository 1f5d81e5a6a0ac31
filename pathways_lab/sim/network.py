"""Simulated transfers: from the hosts of one slice to those of another.

Problem: what decides order and memory must be exact (a source is kept until
its bytes have left, a receive buffer is taken in the order of the grants, early
bytes wait in the host's own memory); how long it takes may be rough: every
target host receives its shards through one interface, one after the other.

Rule for maintainers: no piece of a shard is modelled; the bytes of an exchange
are those of the target's shards.  Devices of one host that need the same one share it,
as on real hosts.

Paper: section 4.3 (sharded edges), section 4.5 (transfers over the DCN).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping

from pathways_lab.core.program.layout import Box, Layout, boxes
from pathways_lab.core.program.program import Transfer
from pathways_lab.core.slices.topology import SliceBinding
from pathways_lab.sim.parts import HostPort, Movement, Task, WorldPort


@functools.lru_cache(maxsize=256)
def shards(layout: Layout, shape: tuple[int, ...], on: SliceBinding) -> Mapping[str, int]:
    """By host, how many different shards its devices hold."""
    found: dict[str, set[Box]] = {}
    for (host, _), box in zip(on.devices, boxes(layout, shape), strict=True):
        found.setdefault(host, set()).add(box)
    return {host: len(different) for host, different in found.items()}


class Network:
    """All transfers under way.  late(source, target): how much later one of hosts arrives."""

    def __init__(self, world: WorldPort) -> None:
        self.world = world
        self.moving: dict[tuple[int, int], Movement] = {}
        self.late: Callable[[str, str], float] = lambda source, target: 0.0

    def begin(self, host: HostPort, task: Task) -> None:
        """A host has come to a transfer: what it must receive has room now."""
        world, node, here = self.world, task.info.node, task.run
        assert isinstance(node, Transfer)
        key = here.grant.run, task.step
        source, target = here.plan.values[node.input].slice, here.plan.values[node.output].slice
        assert source is not None and target is not None
        movement = self.moving.get(key)
        if movement is None:
            made = here.plan.values[node.output]
            movement = self.moving[key] = Movement(
                *key, tuple(world.local[source]),
                shards(made.layout, made.shape, world.bindings[target]),
                set(world.local[source]),
            )  # fmt: skip
            movement.roles = len(world.local[source]) + len(world.local[target])
        if here.aborted:
            movement.dead = True
        task.roles = (host.name in world.local[source]) + (host.name in world.local[target])
        if host.name in world.local[target]:
            host.receive(here.values[node.output])
            movement.waiting[host.name] = task
        if host.name in world.local[source]:
            value = here.values[node.input]
            value.sends.append(task)
            if value.done:
                self.ready(host, task)
        self._deliver(movement)

    def ready(self, host: HostPort, task: Task) -> None:
        """The bytes of one source host exist."""
        movement = self.moving[task.run.grant.run, task.step]
        movement.sources.discard(host.name)
        movement.content = task.run.values[task.info.used[0]].content
        movement.sent.append((host, task))
        if movement.dead:
            self._deliver(movement)
        elif not movement.sources:
            movement.start = self.world.agenda.now
            last = movement.start
            for name, count in movement.targets.items():
                target = self.world.host(name)
                if target is not None:
                    arrival = self._arrival(host, target, task, count)
                    last = max(last, arrival)
                    self.world.agenda.at(arrival, self._arrive, movement, name)
            self.world.agenda.at(last, self._left, movement)

    def _arrival(self, source: HostPort, target: HostPort, task: Task, count: int) -> float:
        costs, node, here = self.world.machine.costs, task.info.node, task.run
        assert isinstance(node, Transfer)
        nbytes = count * here.plan.values[node.output].nbytes
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

    def _arrive(self, movement: Movement, name: str) -> None:
        movement.arrived.add(name)
        self._deliver(movement)

    def _left(self, movement: Movement) -> None:
        """All bytes have left their sources."""
        sent, movement.sent = movement.sent, []
        for host, task in sent:
            if self.world.alive(host):
                host.sent(task)
                self._role_ended(movement, host, task)

    def _deliver(self, movement: Movement) -> None:
        for name, task in list(movement.waiting.items()):
            if name in movement.arrived or movement.dead:
                del movement.waiting[name]
                host = self.world.host(name)
                if host is not None:
                    value = task.run.values[task.info.made[0]]
                    value.content = movement.content if name in movement.arrived else 0
                    host.received(task, bad=name not in movement.arrived)
                    self._role_ended(movement, host, task)
        if movement.dead and movement.sent:
            self._left(movement)

    def _role_ended(self, movement: Movement, host: HostPort, task: Task) -> None:
        task.roles -= 1
        movement.roles -= 1
        if not movement.roles:
            self.moving.pop((movement.run, movement.step), None)
        if not task.roles:
            host.end(task, 0.0)
            self.world.memory.transfer(movement, host, task, self.world.agenda.now)

    def give_up(self, run: int) -> None:
        """A run ends early: none of its transfers is waited for."""
        for key, movement in list(self.moving.items()):
            if key[0] == run:
                movement.dead = True
                self._deliver(movement)
