"""The faults of ``lab.chaos`` in simulated time: the same every time, and survived."""

from __future__ import annotations

import random

import pytest

from pathways_lab.core.diagnosis.invariants import check
from pathways_lab.sim.world import World
from pathways_lab.timeline.records import Span
from tests.sim.chaos import Chaos
from tests.sim.drafts import Shape
from tests.sim.generate import RandomClient, random_machine, uneven
from tests.sim.search import _empty, _ended, _kept, _one_order

SHAPE = Shape(islands=2, hosts=2, clients=3, runs=10, memory=(40, 60), lose=0.0)


def begin(seed: int) -> tuple[World, Chaos, list[RandomClient]]:
    """Clients at work on two islands of two hosts."""
    rng = random.Random(seed)
    while True:
        machine = random_machine(rng, SHAPE)
        if machine.islands == machine.hosts_per_island == 2:
            break
    world = World(machine, seed, vary=uneven(2.0))
    world.observers.append(lambda event, commands: check(world.control))
    clients = [
        RandomClient(world, f"kernel-{n}", n, SHAPE, random.Random(seed * 10 + n))
        for n in range(1, 4)
    ]
    for client in clients:
        client.begin()
    return world, Chaos(world), clients


def everything(chaos: Chaos, rng: random.Random) -> None:
    """One of each, at random moments."""
    hosts = [f"island{i}/host{h}" for i in range(2) for h in range(2)]
    chaos.kill(rng.choice(hosts), at=rng.random() * 0.05)
    chaos.hang(rng.choice(hosts), 0.05, at=rng.random() * 0.05)
    chaos.slow(rng.choice(hosts), 5.0, 0.05, at=rng.random() * 0.05)
    chaos.delay("island0", "island1", 3.0, 0.05, at=rng.random() * 0.05)
    chaos.partition("island0", "island1/host1", 0.05, at=rng.random() * 0.05)
    chaos.drop("control", rng.choice(hosts), at=rng.random() * 0.05)
    chaos.lose(f"island{rng.randrange(2)}", at=0.08)
    clients = rng.choice(("kernel-1", "kernel-2"))
    chaos.lose_client(clients, at=rng.random() * 0.1)


def outcome(seed: int) -> tuple[str, int, float]:
    """What was broken, how many events there were, and how long it took."""
    world, chaos, clients = begin(seed)
    everything(chaos, random.Random(seed))
    assert world.agenda.run(calls=200_000) < 200_000
    for client in clients:
        client.left = client.left or client.name not in world.clients
    broken = _ended(world, clients) or _one_order(world) or _kept(world, clients)
    for client in clients:
        client.drop_all()
        if not client.left:
            world.disconnect(client.name)
    world.agenda.run(calls=200_000)
    return broken or _empty(world), world.agenda.made, world.agenda.now


@pytest.mark.parametrize("seed", range(20))
def test_every_fault_at_random_moments(seed: int) -> None:
    first = outcome(seed)
    assert first[0] == ""
    assert outcome(seed) == first, "the same every time"


def crossings(world: World) -> list[Span]:
    return [r for r in world.memory.records if isinstance(r, Span) and r.kind == "transfer"]


def test_nothing_crosses_a_partition_and_all_arrives_after_it() -> None:
    seed = next(s for s in range(10) if _crosses(s))
    world, chaos, clients = begin(seed)
    chaos.partition("island0", "island1", 1.0)
    world.agenda.run(calls=200_000)
    assert _ended(world, clients) == ""
    assert min(end for end in _ends(world)) >= 1.0


def _ends(world: World) -> list[float]:
    """When what went from one island to another had arrived."""
    return [s.end for s in crossings(world) if _islands(world, s) == 2]


def _islands(world: World, span: Span) -> int:
    names = f"{span.args['source']}, {span.args['target']}".split(", ")
    return len({name.partition("/")[0] for name in names})


def _crosses(seed: int) -> bool:
    world, _, _ = begin(seed)
    world.agenda.run(calls=200_000)
    return len(_ends(world)) > 2
