"""A simulated cluster: the real core, simulated hosts, links and clients.

Problem: policies, sizes and faults must be tried out without a cluster, and
with exactly the decisions that the cluster would make.  So the core that
decides here is the one that decides there; this module is its rim: it owns the
time, and carries events and commands.

Rule for maintainers: messages on one link never overtake each other (unless
the rule of one order is switched off on purpose); random numbers come from the
one generator, in the order of the agenda.

Paper: section 5 (the configurations that can be simulated here).
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Hashable
from typing import Protocol

from pathways_lab.core import messages as m
from pathways_lab.core.control import Control
from pathways_lab.core.diagnosis.wait_cycles import Launch, Wait, find_cycle
from pathways_lab.core.errors import Failure
from pathways_lab.core.messages import elastic as em
from pathways_lab.core.program.folding import fold, folded, laid_out
from pathways_lab.core.program.program import Plan, SliceId, ValueId
from pathways_lab.core.scheduling.rules import Rules
from pathways_lab.core.slices.topology import SliceBinding, locals_of
from pathways_lab.executor.ends import Ends
from pathways_lab.sim.agenda import Agenda
from pathways_lab.sim.cores import Cores
from pathways_lab.sim.host import Host
from pathways_lab.sim.machine import FunctionCost, Machine
from pathways_lab.sim.network import Network
from pathways_lab.sim.parts import Gang, HostPort, Part
from pathways_lab.sim.remember import Memory


class Client(Protocol):
    """The driver of the simulation: it answers the control plane's messages."""

    name: str

    def told(self, command: m.Command) -> None:
        """A message from the control plane."""


DISORDER = Rules(ahead=0.2, window=0.1, assumed=0.005)
"""Where order is off, gangs meet only when several are granted before one has ended."""


class World:
    """Control plane, hosts, network and clients in simulated time.

    keep_order: hosts hear of grants in the order in which they were made; without
        it each grant travels on its own, and *lag* may hold it up.
    launch_poisoned: gangs whose input is missing are launched all the same.
    wait_for_memory: hosts launch what fits into their devices' memory, and nothing else.
    fails: whether a step fails on a host, given ``(run, step, host)``.
    choose: the case that a value decides, given ``(run, value)``; 1: the first branch of a
        condition, and another turn of a loop.
    repeats: whether a host's report comes twice.
    pace: how many times as long a gang takes, given its hosts.
    decide: asks the core; whoever wants to listen puts itself before it.
    memory: the records of what happened, when *remember*.
    absent: hosts of the machine that are not there yet.
    """

    def __init__(
        self,
        machine: Machine,
        seed: int = 0,
        rules: Rules | None = None,
        *,
        keep_order: bool = True,
        launch_poisoned: bool = True,
        wait_for_memory: bool = True,
        remember: bool = True,
        absent: frozenset[str] = frozenset(),
        vary: Callable[[random.Random, float], float] | None = None,
    ) -> None:
        self.machine = machine
        self.random = random.Random(seed)
        self.agenda = Agenda()
        self.cores = Cores(self.agenda, machine.cores)
        self.control = Control(rules or (Rules() if keep_order else DISORDER))
        self.decide: Callable[[m.Event], list[m.Command]] = self.control.handle
        self.network = Network(self)
        self.keep_order = keep_order
        self.launch_poisoned = launch_poisoned
        self.wait_for_memory = wait_for_memory
        self.lag: Callable[[m.Grant], float] = lambda grant: 0.0
        self.fails: Callable[[int, int, str], bool] = lambda run, step, host: False
        self.choose: Callable[[int, int], int] = lambda run, value: 1
        self.repeats: Callable[[], bool] = lambda: False
        self.pace: Callable[[tuple[str, ...]], float] = lambda hosts: 1.0
        self.observers: list[Callable[[m.Event, list[m.Command]], None]] = []
        self.memory = Memory(remember)
        self.remember = remember
        self.hosts: dict[str, Host] = {}
        self.clients: dict[str, Client] = {}
        self.plans: dict[str, Plan] = {}
        self.islands: dict[SliceId, tuple[str, ...]] = {}
        self.local: dict[SliceId, dict[str, tuple[int, ...]]] = {}
        self.bindings: dict[SliceId, SliceBinding] = {}
        self.lanes: dict[SliceId, str] = {}
        self._members: dict[SliceId, list[Host | None]] = {}
        self._gangs: dict[tuple[int, int], Gang] = {}
        self._links: dict[str, float] = {}
        self._linked: dict[str, Host] = {}
        self._vary = vary
        self._busy = 0.0
        self._due = math.inf
        for host, island in machine.hosts():
            if host not in absent:
                self.join(host, island)

    # --- time and links ----------------------------------------------------------

    def vary(self, seconds: float) -> float:
        """A duration with the machine's jitter."""
        if self._vary is not None:
            return self._vary(self.random, seconds)
        return seconds * (1.0 + self.machine.costs.jitter * (self.random.random() - 0.5))

    def _carry(self, link: str, call: Callable[..., None], *args: object) -> None:
        """Deliver over a link: later messages arrive later."""
        due = max(self.agenda.now, self._busy) + self.vary(self.machine.costs.control_latency)
        self._links[link] = due = max(due, self._links.get(link, 0.0))
        self.agenda.at(due, call, *args)

    def tell(self, link: str, make: Callable[[float], m.Event]) -> None:
        """Send an event to the control plane; *make* gets the time of its arrival."""
        self._carry(f"{link}>", self._handle, make)

    def _handle(self, make: Callable[[float], m.Event]) -> None:
        event = make(self.agenda.now)
        if isinstance(event, m.HostReport) and event.host not in self.hosts:
            return
        if isinstance(event, m.ProgramRegistered):
            self.plans[event.plan.key] = laid_out(folded(fold(event.plan)))
        commands = self.decide(event)
        self.memory.happened(event, commands)
        costs = self.machine.costs
        if isinstance(event, m.RunSubmitted):
            self.cores.work(costs.run_work)
        thinking = costs.hearing if isinstance(event, m.HostReport) else costs.decision
        self._busy = max(self._busy, self.agenda.now) + thinking
        for command in commands:
            self._carry_out(command)
        for observer in self.observers:
            observer(event, commands)
        self._wait_for_due()

    def _wait_for_due(self) -> None:
        """The core hears the time when it wants to."""
        due = self.control.due
        if due < self._due:
            self._due = due
            self.agenda.at(due, self._when_due)

    def _when_due(self) -> None:
        self._due = math.inf
        if self.control.due <= self.agenda.now:
            self._handle(lambda time: m.PatienceEnded(time, "clock"))
        self._wait_for_due()

    def _carry_out(self, command: m.Command) -> None:
        match command:
            case m.Grant():
                if self.keep_order:
                    self._to_host(command.host, Host.grant, command)
                else:
                    delay = self.vary(self.machine.costs.control_latency) + self.lag(command)
                    self.agenda.after(
                        delay, self._if_alive, self._linked.get(command.host), Host.grant, command
                    )
            case m.FreeBuffers():
                for host in command.hosts:
                    self._to_host(host, Host.free, command.buffers)
            case m.AbortRun():
                for host in command.hosts:
                    self._to_host(host, Host.abort, command.run)
            case m.Prepare():
                for host in command.hosts:
                    self._to_host(host, self._compile, command)
            case m.SliceBound():
                self._bind(command.binding)
                self._to_client(command.client, command)
            case (
                m.Refused()
                | m.Resolved()
                | m.RunEnded()
                | m.PolicySet()
                | m.Taken()
                | m.SliceWaiting()
            ):
                self._to_client(command.client, command)
            case m.SliceFreed() | em.SliceWithdrawn():
                for host in command.hosts:
                    self._to_host(host, Host.unbind, command.slice)
            case m.ProgramsForgotten():
                for host in command.hosts:
                    self._to_host(host, Host.forget, command.plans, command.functions)
            case m.ShareProgram():
                for host in command.hosts:
                    self._to_host(host, Host.program, self.plans[command.plan])

    def _to_client(self, name: str, command: m.Command) -> None:
        client = self.clients.get(name)
        if client is not None:
            self._carry(f">{name}", client.told, command)

    def _to_host(self, name: str, call: Callable[..., None], *args: object) -> None:
        """Over the link of the device process that the control plane knows by this name."""
        self._carry(name, self._if_alive, self._linked.get(name), call, *args)

    def _if_alive(self, host: Host | None, call: Callable[..., None], *args: object) -> None:
        if self.alive(host):
            call(host, *args)

    def _bind(self, binding: SliceBinding) -> None:
        local = locals_of(binding)
        self.bindings[binding.slice] = binding
        self._members[binding.slice] = [self.hosts.get(h) for h in local]
        self.local[binding.slice] = {h: tuple(sorted(d)) for h, d in local.items()}
        self.islands[binding.slice] = binding.islands
        self.lanes[binding.slice] = "+".join([f"{h}:{d}" for h, d in sorted(binding.devices)])

    # --- hosts -----------------------------------------------------------------------

    def alive(self, host: HostPort | None) -> bool:
        """Whether this very device process still runs."""
        return host is not None and self.hosts.get(host.name) is host

    @property
    def carrier(self) -> Network:
        """The network."""
        return self.network

    def host(self, name: str) -> Host | None:
        """A living host."""
        return self.hosts.get(name)

    def join(self, name: str, island: str) -> None:
        """A device process starts (and replaces one of the same name)."""
        self.lose(name, "its device process was replaced")
        host = self.hosts[name] = Host(self, name, island)
        of = self.machine.of(island)

        def joined(time: float) -> m.Event:
            self._linked[name] = host  # what was for one of the same name never comes here
            return m.HostJoined(
                time, "join", name, island, of.devices_per_host, of.kind, of.memory, of.block
            )

        self.tell(name, joined)

    def lose(self, name: str, reason: str = "it was killed") -> None:
        """A device process dies; collectives with it fail on the others."""
        host = self.hosts.pop(name, None)
        if host is None:
            return
        self.tell(name, lambda t: m.HostLost(t, "lost", name, reason))
        for gang in list(self._gangs.values()):
            if name in gang.hosts:
                self._break_soon(gang)

    def _compile(self, host: Host, command: m.Prepare) -> None:
        cost, now = self.machine.cost(command.function), self.agenda.now
        seconds = self.vary(cost.compile)
        self.agenda.after(
            seconds, self._if_alive, host, self._compiled, command, cost.temporary, now
        )

    def _compiled(self, host: Host, command: m.Prepare, temporary: int, start: float) -> None:
        name = host.name
        host.compiled(command.function, command.slice, temporary)
        self.memory.compiled(name, command.function, command.slice, start, self.agenda.now)
        ready = ((command.function, command.slice, temporary, None),)
        self.tell(name, lambda t: m.HostReport(t, "compiled", name, compiled=ready))

    def report(self, host: HostPort, ends: Ends, resident: tuple[int, ...]) -> None:
        """Takes the report that a host has gathered."""
        ended, failed = ends.ended, tuple(ends.failed)
        for _ in range(1 + self.repeats()):
            if self.alive(host):
                self.tell(
                    host.name,
                    lambda t: m.HostReport(t, "report", host.name, ended, failed, resident),
                )

    def decided(self, host: HostPort, run: int, value: ValueId) -> None:
        """A host has read a value that decides, and says so at once."""
        case = self.choose(run, value)
        for _ in range(1 + self.repeats()):
            self.tell(
                host.name,
                lambda t: m.HostReport(t, "report", host.name, decided=((run, value, case),)),
            )

    def stop(self, name: str, seconds: float) -> None:
        """For so long nothing reaches a host, and nothing comes from it."""
        until = self.agenda.now + seconds
        for link in (name, f"{name}>"):
            self._links[link] = max(until, self._links.get(link, 0.0))
        host = self.hosts.get(name)
        if host is not None:
            host.ingress = max(host.ingress, until)
            host.thread = max(host.thread, until)

    # --- gangs -----------------------------------------------------------------------

    def gang(self, part: Part, cost: FunctionCost) -> Gang:
        """The gang that this is a part of."""
        key, node = (part.run, part.step), part.call
        found = self._gangs.get(key)
        if found is None:
            hosts = tuple(self.local[node.slice])
            speed = min(self.machine.of(island).speed for island in self.islands[node.slice])
            seconds = self.vary(cost.seconds) * self.pace(hosts) / speed
            found = Gang(*key, hosts, seconds, cost.cores, cost.collective)
            found.broken = any(not self.alive(h) for h in self._members[node.slice])
            self._gangs[key] = found
        return found

    def come(self, part: Part) -> None:
        """All devices of a gang on one host have its turn."""
        gang = part.gang
        assert gang is not None
        gang.come.append(part)
        if gang.broken:
            self._break_soon(gang)
        elif not gang.collective:
            self.cores.compute(
                self.vary(gang.seconds), gang.cores * len(part.devices),
                self._part_ends, part, self.agenda.now, gang.seconds,
            )  # fmt: skip
        elif len(gang.come) == len(gang.hosts):
            gang.start = self.agenda.now
            devices = sum(len(part.devices) for part in gang.come)
            self.cores.compute(gang.seconds, gang.cores * devices, self._gang_ends, gang)

    def _gang_ends(self, gang: Gang) -> None:
        if self._gangs.pop((gang.run, gang.step), None) is not None:
            for part in gang.come:
                self._part_ends(part, gang.start, gang.seconds)

    def _part_ends(self, part: Part, start: float, seconds: float) -> None:
        host = part.host
        if part.over or not self.alive(host):
            return
        failure = None
        if self.fails(part.run, part.step, host.name):
            failure = Failure("execute", "the computation failed (simulated)")
        self.memory.gang(part, start, self.agenda.now, failure is not None)
        host.part_ended(part, seconds, failure)

    def _break_soon(self, gang: Gang) -> None:
        """A collective has lost a partner: the others notice."""
        gang.broken = True
        self.agenda.after(self.vary(self.machine.costs.notice), self._break, gang)

    def _break(self, gang: Gang) -> None:
        """A collective that has lost a partner fails where it was entered."""
        parts, gang.come = gang.come, []
        for part in parts:
            if self.alive(part.host) and not part.over:
                part.host.part_ended(
                    part, 0.0, Failure("lost", "a partner of the collective was lost")
                )

    def stuck(self) -> tuple[Wait, ...]:
        """The cycle in which gangs wait for each other on devices, or ()."""
        gangs: dict[tuple[int, int], Launch] = {}
        orders: dict[Hashable, list[Hashable]] = {}
        for host in self.hosts.values():
            for run, step, where in host.line():
                queues = [(h, d) for h, local in self.local[where].items() for d in local]
                gangs[run, step] = Launch((run, step), tuple(queues))
                for device in self.local[where][host.name]:
                    orders.setdefault((host.name, device), []).append((run, step))
        return find_cycle(gangs.values(), orders, self.machine.streams)

    # --- clients ---------------------------------------------------------------------

    def connect(self, client: Client, number: int = 0) -> None:
        """A client connects.  number: the high 32 bits of its ids."""
        self.clients[client.name] = client
        self.tell(client.name, lambda t: m.ClientJoined(t, "join", client.name, number))

    def disconnect(self, name: str, reason: str = "closed") -> None:
        """A client goes, or dies."""
        self.clients.pop(name, None)
        self.tell(name, lambda t: m.ClientLeft(t, "leave", name, reason))

    def declare(
        self,
        client: str,
        buffer: int,
        where: SliceId,
        nbytes: int,
        hosts: int | None = None,
        said: bool = True,
    ) -> None:
        """A client uploads a buffer: it says so, and its bytes come to the hosts.

        hosts: only to so many of them, because the client dies in the middle.  said: also
        False because of that.
        """
        if said:
            self.tell(
                client, lambda t: m.BufferDeclared(t, "declare", client, buffer, where, nbytes)
            )
        # To the very processes that the slice was bound to: others listen at other addresses.
        there = list(zip(self._members[where], self.local[where].values(), strict=True))
        for host, devices in there[:hosts]:
            seconds = nbytes * len(devices) / self.machine.costs.dcn
            delay = self.vary(self.machine.costs.dcn_latency + seconds)
            self.agenda.after(delay, self._if_alive, host, Host.upload, buffer, where, nbytes)
