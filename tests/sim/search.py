"""The search: does any random workload break the rules, or break without them?

``python -m tests.sim.search --seeds 10000`` runs that many workloads
with every rule in force and checks after every event, and at the end, that

* nothing is stuck: every run ended once, every handle resolved,
* gangs that share a device began in one order on all hosts, and each one once,
* nobody was overtaken more often than allowed,
* memory was never over its limit, and no client's over its quota,
* every handle that was resolved and is still kept has its value, and the right one,
  on all hosts of its slice (as long as these live),
* runs that make what is kept ahead go on when their client has left,
* nothing is left, in the core and on hosts, when all clients have gone, and what they kept
  was taken by clients that came back for it, and is right, or was ended by an owner.

Clients leave, or are killed in the middle of an upload; hosts die, come back,
stand still, report twice; devices and bytes are limited; islands are leased; programs are
dropped under their runs, and registered again.

``--without RULE`` switches one rule off and looks for a workload that breaks.

Rule for maintainers: a rule for which no counter-example is found is either
not needed or not tested; both are bugs.

Paper: none.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from pathways_lab.core.diagnosis.invariants import check
from pathways_lab.core.errors import InvalidTransition
from pathways_lab.core.messages import (
    ClientJoined,
    Command,
    Event,
    HandleTaken,
    HandleUnpublished,
    PolicyChosen,
    RunEnded,
    SlicesKept,
)
from pathways_lab.core.scheduling.policies import Policy, RemotePolicy
from pathways_lab.core.scheduling.rules import Rules
from pathways_lab.sim.parts import made_of
from pathways_lab.sim.world import World
from tests.sim.drafts import Shape
from tests.sim.elsewhere import Elsewhere
from tests.sim.generate import (
    RandomClient,
    random_machine,
    random_policy,
    uneven,
)

WITHOUT: Mapping[str, Mapping[str, Any]] = {
    "order": {"keep_order": False},
    "together": {"together": False},
    "predecessors": {"predecessors": False},
    "peak": {"peak": False},
    "liveness": {"liveness": False},
    "producers": {"producers": False},
    "stalemate": {"patience": None},
    "quotas": {"quotas": False},
    "overtaking": {"overtaking": None},
    "poison": {"launch_poisoned": False},
    "memory": {"wait_for_memory": False},
}
"""By the rule's name, what switches it off: of :class:`Rules`, or of the world."""

_WORLDS = ("keep_order", "launch_poisoned", "wait_for_memory")


FOCUS: Mapping[str, Shape] = {
    "liveness": Shape(hosts=1, clients=1, slices=2, nodes=20, runs=8, memory=(10, 22),
                      wide=1.0, donate=0.0, drop=1.0, reuse=0.2, cancel=0.0, fail=0.0, lose=0.0,
                      keep=1.0),
    "overtaking": Shape(programs=4, runs=30, nodes=2, memory=(50, 90), lose=0.0, keep=1.0),
    "poison": Shape(hosts=3, nodes=8, memory=(40, 60), fail=0.2, lose=0.0, cancel=0.0),
    "predecessors": Shape(runs=20, nodes=3, reuse=0.95, memory=(40, 60), lose=0.0),
    "quotas": Shape(limit=1.0, lease=0.2, share=0.2),
    "together": Shape(islands=3, clients=3, slices=4, runs=12, memory=(40, 80), span=0.8),
}  # fmt: skip
"""Where to look for what breaks without a rule; elsewhere it is rare."""

STORM = Shape(islands=3, hosts=3, clients=3, runs=12, memory=(20, 60), lose=0.7, leave=0.3,
              fail=0.08, cancel=0.2, limit=0.5, lease=0.3, share=0.4, kill=0.05, stop=0.6,
              repeat=0.1, forget=0.4, keep=0.5, release=0.03)  # fmt: skip
"""Everything that can go wrong does, often."""

STRAIGHT = replace(STORM, straight=0.95, nodes=12, wide=0.0, memory=(60, 120))
"""The same where hosts launch most gangs in rows."""

KEEPING = replace(STORM, stay=0.2, decide=0.2)
"""The same where clients keep what they have made, or will have, and come back for it."""

EXCHANGING = replace(
    STORM, exchange=1.0, runs=20, slices=4, memory=(80, 160), cancel=0.002, fail=0.001, lose=0.3,
    kill=0.0, release=0.0, lease=0.0, limit=0.0,
)  # fmt: skip
"""The same where programs send rows to experts, whose transfers overtake each other."""

SPANNING = replace(STORM, span=0.6)
"""The same where most slices span islands."""

DECIDING = replace(
    STORM, decide=0.5, nodes=8, wide=0.0, memory=(30, 80), cancel=0.05, lose=0.3, release=0.0
)
"""The same where values on devices decide which of the calls run."""


def shape_of(seed: int, without: str = "") -> Shape:
    """What to draw from a seed: with every rule in force, all shapes in turn."""
    if without:
        return FOCUS.get(without, Shape())
    shapes = (Shape(), STORM, STRAIGHT, DECIDING, KEEPING, SPANNING, *FOCUS.values())
    return shapes[seed % len(shapes)]


@dataclass(frozen=True, slots=True)
class Verdict:
    """What one workload showed.  broken: what went wrong, or ""."""

    seed: int
    broken: str
    runs: int
    outcomes: Mapping[str, int]
    events: int


def search(
    seed: int, shape: Shape | None = None, without: str = "", checks: bool = True
) -> Verdict:
    """One workload of a shape, with every rule or without one."""
    rng = random.Random(seed)
    shape = shape or shape_of(seed, without)
    off = dict(WITHOUT[without]) if without else {}
    world_off = {k: off.pop(k) for k in _WORLDS if k in off}
    bound = rng.choice((2, 8, 64))
    rules = Rules(
        window=rng.choice((0.001, 0.005, 0.1)),
        ahead=rng.choice((0.002, 0.02, 0.2)),
        least=rng.choice((1, 2)),
        assumed=rng.choice((0.005, 0.1)),
        overtaking=bound,
    )
    if shape.straight:
        rules = replace(rules, window=0.5, ahead=1.0, assumed=0.005)  # many gangs in a window
    world = World(
        random_machine(rng, shape),
        seed,
        replace(rules, **off),
        vary=uneven(shape.spread),
        **world_off,
    )
    failing = random.Random(seed + 1)
    world.fails = lambda run, step, host: failing.random() < shape.fail
    world.choose = lambda run, value: made_of("decision", run, value) % 2
    chosen = random_policy(rng)
    policy: Policy | RemotePolicy = chosen
    if not without and seed % 3 == 0:
        policy = Elsewhere(world, chosen, random.Random(seed + 2)).remote
    if shape.exchange:
        lateness = random.Random(seed + 4)
        world.network.late = lambda source, target: lateness.expovariate(1 / 0.005)
    repeating = random.Random(seed + 3)
    if shape.repeat:
        world.repeats = lambda: repeating.random() < shape.repeat
    worst = [0]
    limits, going = _Limits(world), _Going(world)

    def watch(event: Event, commands: list[Command]) -> None:
        """After every event."""
        if checks:
            check(world.control)
            limits.check()
        going.watch(commands)
        if isinstance(event, ClientJoined) and event.client == "kernel-1":
            world.tell(event.client, lambda t: PolicyChosen(t, "policy", event.client, policy))
        for run in world.control.state.runs.values():
            worst[0] = max(worst[0], run.overtaken)

    world.observers.append(watch)
    clients = [
        RandomClient(world, f"kernel-{n}", n, shape, random.Random(seed * 1000 + n))
        for n in range(1, rng.randint(1, shape.clients) + 1)
    ]
    for client in clients:
        client.begin()
    while rng.random() < shape.lose:
        name, when = rng.choice(sorted(world.hosts)), rng.random() * 0.05
        world.agenda.after(when, world.lose, name)
        if rng.random() < 0.5:
            world.agenda.after(when + 0.02, world.join, name, name.partition("/")[0])
    while rng.random() < shape.stop:
        name, when = rng.choice(sorted(world.hosts)), rng.random() * 0.05
        world.agenda.after(when, world.stop, name, rng.random() * 0.1)
    broken = ""
    try:
        if world.agenda.run(calls=200_000) == 200_000:
            broken = "the simulation does not end"
        broken = (
            broken
            or _ended(world, clients)
            or _one_order(world)
            or _twice(world)
            or _kept(world, clients)
        )
        broken = broken or _over_limit(world)
        if worst[0] > bound:
            broken = broken or f"a run was overtaken {worst[0]} times, {bound} are allowed"
        for client in clients:
            client.drop_all()
            if not client.left:
                world.disconnect(client.name)
        world.agenda.run(calls=200_000)
        broken = broken or _come_back(world, clients, rng)
        world.agenda.run(calls=200_000)
        broken = broken or _empty(world)
    except (AssertionError, InvalidTransition) as error:
        broken = broken or f"{type(error).__name__}: {error}"
    outcomes: dict[str, int] = {}
    for client in clients:
        for told in client.ended.values():
            kind = told[0].failure.kind if told[0].failure else told[0].outcome
            outcomes[kind] = outcomes.get(kind, 0) + 1
    return Verdict(seed, broken, sum(len(c.runs) for c in clients), outcomes, world.agenda.made)


_REGISTER = ("register the program first", "announce every compiled function for its slice first")
"""What clients are told that have not registered what they run."""


class _Going:
    """Runs that make what is kept ahead do not end because their client has left."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.clients: dict[int, str] = {}

    def watch(self, commands: list[Command]) -> None:
        """After every event.  A run that was cancelled before may be among them."""
        for command in commands:
            if isinstance(command, SlicesKept):
                runs = self.world.control.state.runs
                well = [run for run in command.runs if run not in runs or runs[run].cut is None]
                self.clients.update(dict.fromkeys(well, command.client))
            elif isinstance(command, RunEnded) and command.failure is not None:
                client, why = self.clients.get(command.run), command.failure.message
                gone = f"client {client} left" in why or f"was released by {client}" in why
                assert not gone, f"run {command.run} of {client} ended: {why}"


class _Limits:
    """Nobody who has reached a quota gets any more."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.before: dict[str, tuple[int, int]] = {}

    def check(self) -> None:
        """After every event.  What somebody had before a limit was set is his."""
        state = self.world.control.state
        for client in self.world.control.clients:
            quota = state.quotas.of(client)
            devices = sum(state.resources.held_by(client).values())
            now = devices, state.accounts.of(client).nbytes
            before = self.before.get(client, (0, 0))
            for most, had, has in zip((quota.devices, quota.nbytes), before, now, strict=True):
                assert most is None or has <= max(most, had), f"{client} has {has} of {most}"
            self.before[client] = now


def _kept(world: World, clients: list[RandomClient]) -> str:
    """Whatever was resolved and is still wanted is on its hosts, and is what it must be."""
    store, slices = world.control.state.store, world.control.slices
    made = {b: content for c in clients for b, content in c.contents.items()}
    for client in clients:
        if client.left:
            continue
        own = [b for b, handle in client.handles.items() if not handle.gone]
        wanted = {b: b for b in own} | client.taken
        for number, stored in wanted.items():
            told = client.resolved.get(number, [])
            if not told or told[-1].failure is not None:
                continue
            buffer = store.buffers.get(stored)
            if buffer is None or buffer.state != "resident":
                return f"{client.name} has handle {number}, and the store has nothing for it"
            if slices[buffer.slice].state == "lost":
                return f"handle {number} of {client.name} was lost, and nobody said so"
            for name in slices[buffer.slice].hosts:
                if lacks := world.hosts[name].lacks(stored, made[stored]):
                    return f"handle {number} of {client.name} has {lacks} on {name}"
    return ""


def _ended(world: World, clients: list[RandomClient]) -> str:
    """Every run of every client that stayed ended once, and its outputs with it."""
    for client in clients:
        if client.left:
            continue
        for run in client.runs:
            told = client.ended.get(run, [])
            if len(told) != 1:
                return f"run {run} of {client.name} ended {len(told)} times"
            failure = told[0].failure
            if failure is not None and failure.remedy in _REGISTER:
                return f"run {run} of {client.name}, which registers what it runs: {failure}"
            if failure is not None and failure.kind == "internal":
                return f"run {run} of {client.name}: {failure}"
        for buffer, run in client.outputs.items():
            told_of = client.resolved.get(buffer, [])
            if not told_of:
                return f"output {buffer} of run {run} never resolved"
            if any(r.failure is not None for r in told_of[:-1]) or len(told_of) > 2:
                return f"output {buffer} of run {run} resolved {len(told_of)} times"
    if world.control.state.runs:
        return f"runs {sorted(world.control.state.runs)} never ended"
    return ""


def _one_order(world: World) -> str:
    """The orders of all devices together have no cycle."""
    after: dict[tuple[int, int], set[tuple[int, int]]] = {}
    for host in world.hosts.values():
        last: dict[int, tuple[int, int]] = {}
        for run, step, devices in host.launches:
            for device in devices:
                if device in last:
                    after.setdefault(last[device], set()).add((run, step))
                last[device] = run, step
    state: dict[tuple[int, int], int] = {}
    for first in after:
        stack = [(first, iter(sorted(after[first])))]
        if first in state:
            continue
        state[first] = 1
        while stack:
            gang, rest = stack[-1]
            for following in rest:
                if state.get(following) == 1:
                    return f"gangs {gang} and {following} began in different orders"
                if following not in state:
                    state[following] = 1
                    stack.append((following, iter(sorted(after.get(following, ())))))
                    break
            else:
                state[gang] = 2
                stack.pop()
    return ""


def _twice(world: World) -> str:
    """No host launched a gang twice."""
    for host in world.hosts.values():
        gangs = [(run, step) for run, step, _ in host.launches]
        if len(gangs) != len(set(gangs)):
            return f"{host.name} launched a gang twice"
    return ""


def _over_limit(world: World) -> str:
    """No device ever held more than it has."""
    for host in world.hosts.values():
        most = max(host.launcher.memory.most.values(), default=0)
        if most > world.machine.of(host.island).memory:
            return f"a device of {host.name} held {most} bytes"
    return ""


def _come_back(world: World, clients: list[RandomClient], rng: random.Random) -> str:
    """For everything that is kept its client comes back and takes it, or an owner ends it."""
    broken = ""
    for number, (name, kept) in enumerate(sorted(world.control.sharing.names.items()), 90):
        comer = kept[0] if rng.random() < 0.5 else f"owner-{number}"
        client = RandomClient(world, comer, number, Shape(), rng)
        world.connect(client, number)
        taken = (number << 32) + 1
        client.send(lambda t, c=client, n=name, b=taken: HandleTaken(t, "take", c.name, n, (b,)))
        world.agenda.run(calls=200_000)
        client.contents = {b: content for c in clients for b, content in c.contents.items()}
        broken = broken or _kept(world, [client])
        client.send(lambda t, c=client, n=name: HandleUnpublished(t, "end", c.name, n))
        world.agenda.run(calls=200_000)
        world.disconnect(comer)
        world.agenda.run(calls=200_000)
    return broken


def _empty(world: World) -> str:
    """Nothing is left of clients that have gone."""
    state = world.control.state
    if state.functions.records or world.control.forgetting.functions:
        return f"functions {list(state.functions.records)} are left behind"
    if state.runs or state.store.buffers or world.control.slices:
        return (
            f"left behind: runs {list(state.runs)}, buffers {list(state.store.buffers)},"
            f" slices {list(world.control.slices)}"
        )
    for host in world.hosts.values():
        launcher = host.launcher
        if any(launcher.memory.used.values()):
            return f"{host.name} still holds {launcher.memory.used}"
        if len(launcher.buffers) or launcher.runs:
            return f"{host.name} still keeps {len(launcher.buffers)} buffers, runs {launcher.runs}"
    if any(row.nbytes for row in state.accounts.rows.values()):
        return f"accounts still count {state.accounts.rows}"
    if world.control.bookings.line or state.resources.leases or world.control.sharing.names:
        return "somebody who has gone still waits, leases or publishes"
    if world.control.keeping.seats:
        return f"slices are kept for {list(world.control.keeping.seats)}"
    return ""


def main(arguments: list[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="tests.sim.search", description=__doc__)
    parser.add_argument("--seeds", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--without", choices=sorted(WITHOUT), default="")
    parser.add_argument("--exchanges", action="store_true", help="of rows with experts, only")
    parser.add_argument("--keep-going", action="store_true", help="count all that break")
    chosen = parser.parse_args(arguments)
    outcomes: dict[str, int] = {}
    broken = runs = events = 0
    for seed in range(chosen.first, chosen.first + chosen.seeds):
        shape = EXCHANGING if chosen.exchanges else None
        verdict = search(seed, shape, without=chosen.without)
        runs += verdict.runs
        events += verdict.events
        for kind, count in verdict.outcomes.items():
            outcomes[kind] = outcomes.get(kind, 0) + count
        if verdict.broken:
            broken += 1
            print(f"seed {seed}: {verdict.broken}")
            if not chosen.keep_going:
                break
    print(f"{chosen.seeds} workloads, {runs} runs, {events} events, {broken} broken; {outcomes}")
    return int(bool(broken) != bool(chosen.without))


if __name__ == "__main__":
    sys.exit(main())
