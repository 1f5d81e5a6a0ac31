"""Accounts of clients add up to what the machine did, counted independently of them."""

from __future__ import annotations

import math
import random

import pytest

from pathways_lab.core.memory import accounts
from pathways_lab.core.memory.accounts import Accounts
from pathways_lab.core.messages import Command, Event
from pathways_lab.sim.world import World
from pathways_lab.testing import Script, Sketch
from pathways_lab.timeline.records import Span
from tests.sim.drafts import Shape
from tests.sim.generate import RandomClient, random_machine

SHAPE = Shape(islands=2, clients=3, runs=10, reuse=0.4, lose=0.0, leave=0.3)


def workload(seed: int) -> tuple[World, dict[str, float]]:
    """A random workload, and what was held and moved, as seen from outside."""
    rng = random.Random(seed)
    world = World(random_machine(rng, SHAPE), seed)
    seen = {"byte_seconds": 0.0, "time": 0.0, "used": 0.0}

    def watch(event: Event, commands: list[Command]) -> None:
        seen["byte_seconds"] += seen["used"] * (event.time - seen["time"])
        ledger = world.control.state.store.ledger
        used = zip(ledger.cells, ledger.used, strict=True)
        seen["used"] = float(sum(cell.devices * nbytes for cell, nbytes in used))
        seen["time"] = event.time

    world.observers.append(watch)
    for n in range(1, SHAPE.clients + 1):
        RandomClient(world, f"kernel-{n}", n, SHAPE, random.Random(seed * 1000 + n)).begin()
    if seed % 2:
        world.agenda.after(0.02, world.lose, sorted(world.hosts)[0])
    world.agenda.run(calls=200_000)
    return world, seen


@pytest.mark.parametrize("seed", range(12))
def test_rows_add_up_to_what_the_machine_did(seed: int) -> None:
    world, seen = workload(seed)
    rows = {name: used for name, (used, _) in world.control.accounts(seen["time"]).items()}
    assert set(rows) <= {"kernel-1", "kernel-2", "kernel-3"}
    total = sum(used.byte_seconds for used in rows.values())
    assert math.isclose(total, seen["byte_seconds"], rel_tol=1e-9, abs_tol=1e-9)
    assert sum(used.nbytes for used in rows.values()) == seen["used"]
    if seed % 2:
        return  # what a lost host did is not reported
    spans = [r for r in world.memory.records if isinstance(r, Span)]
    for name, used in rows.items():
        mine = [s for s in spans if s.client == name]
        gangs = [s for s in mine if s.kind == "gang"]
        held = sum((s.end - s.start) * len(s.devices) for s in gangs)
        assert math.isclose(used.device_seconds, held, rel_tol=0.2, abs_tol=1e-3), name
        island_of = {h.name: h.island for h in world.hosts.values()}
        crossed = [
            s for s in mine
            if s.kind == "transfer" and island_of[str(s.args["source"]).split(", ")[0]] != s.island
        ]  # fmt: skip
        assert bool(crossed) >= bool(used.dcn_bytes), name


def test_bytes_that_cross_count_once_for_each_host_that_gets_them() -> None:
    script = Script(islands=2, hosts=2, devices=2)
    here, there = script.slice(4, island="island0"), script.slice(4, island="island1")
    sketch = Sketch("move")
    (made,) = sketch.call("f", here, [sketch.input(here, 10)], [10])
    (last,) = sketch.call("g", there, [made], [10])
    run = script.submit(script.register(sketch.output(last)))
    script.finish_all(seconds=0.5)
    assert script.ended[run.run].outcome == "finished"
    used, _ = script.control.accounts(script.time)["kernel-1"]
    assert used.dcn_bytes == 20  # whole on every device, so once for each of two hosts
    assert (used.gangs, used.device_seconds) == (2, 2 * 4 * 0.5)


def test_who_left_long_ago_shares_a_row(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(accounts, "_ROWS", 3)
    book = Accounts()
    for n in range(10):
        book.time = float(n)
        book.change(f"c{n}", 5)
        book.gang(f"c{n}", 1.0)
        book.time = float(n + 1)
        book.change(f"c{n}", -5)
    found = book.statement(20.0)
    assert len(found) <= 4
    assert sum(row.gangs for row in found.values()) == 10
    assert sum(row.byte_seconds for row in found.values()) == 50.0


def test_gangs_that_were_over_at_once_count_too() -> None:
    script = Script(islands=1, hosts=1, devices=1)
    on, sketch = script.slice(1), Sketch("quick")
    (made,) = sketch.call("f", on, [sketch.input(on, 10)], [10])
    (last,) = sketch.call("g", on, [made], [10])
    script.submit(script.register(sketch.output(last)))
    script.finish_all(seconds=0.0)
    ((used, _),) = script.control.accounts(0.0).values()
    assert (used.gangs, used.device_seconds) == (2, 0.0)
