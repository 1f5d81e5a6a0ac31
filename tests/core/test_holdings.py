"""The answer about the memory of devices explains every byte that the ledger counts."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from pathways_lab.core.memory import holdings as module
from pathways_lab.core.memory.holdings import Holding, Holdings, size
from pathways_lab.core.memory.store import BufferRecord
from pathways_lab.core.messages import (
    BufferDeclared,
    ClientJoined,
    Command,
    Event,
    HandlePublished,
    HandleTaken,
)
from pathways_lab.core.messages.elastic import ResumeRequested, SuspendRequested
from pathways_lab.core.program.program import Line
from pathways_lab.core.scheduling.rules import Rules
from pathways_lab.sim.world import World
from pathways_lab.testing import Script, Sketch
from tests.sim.drafts import Shape
from tests.sim.generate import RandomClient, random_machine

ME, BOB = "kernel-1", "bob"
NUMBER = 2 << 32 | 1
SHAPE = Shape(islands=2, clients=3, runs=10, reuse=0.4, lose=0.0, leave=0.3, share=0.3)
ONE_BY_ONE = Rules(window=0.0, ahead=0.001, least=1)
"""Gangs get their places one by one, so that runs keep reservations while they run."""


def asked(script: Script, client: str = ME) -> dict[int, Holding]:
    return {value.buffer: value for value in script.control.holdings(client).values}


def guest(script: Script, name: str = BOB) -> None:
    """A client that decides for nobody else."""
    script.send(ClientJoined(0.0, "join", name, owner=False))


def by_device(found: Holdings) -> dict[tuple[str, int], int]:
    """Bytes on every device, summed over the values of an answer."""
    where = {binding.slice: binding.devices for binding in found.slices}
    sums: Counter[tuple[str, int]] = Counter()
    for value in found.values:
        if value.state != "suspended":
            sums.update(dict.fromkeys(where[value.slice], value.nbytes))
    return sums


def test_values_add_up_to_what_the_ledger_counts() -> None:
    assert sum(map(looked_at, range(12))) > 40


def looked_at(seed: int) -> int:
    """How often there were values and runs in a random world; looked at after each event."""
    world = World(random_machine(random.Random(seed), SHAPE), seed, ONE_BY_ONE)
    looked = 0

    def look(event: Event, commands: list[Command]) -> None:
        nonlocal looked
        control = world.control
        client = next(iter(control.clients), None)
        if client is None:
            return
        found, ledger = control.holdings(client), control.state.store.ledger
        looked += bool(found.values and found.runs)
        sums = by_device(found)
        assert {use.device: use.values for use in found.devices if use.values} == {
            device: nbytes for device, nbytes in sums.items() if nbytes
        }
        used = zip(ledger.cells, ledger.used, strict=True)
        counted = sum([cell.devices * nbytes for cell, nbytes in used])
        reserved = sum([run.nbytes for run in found.runs])
        assert sum(sums.values()) + reserved == counted
        assert sum(found.clients.values()) == counted
        assert sum([use.reserved for use in found.devices]) == reserved

    world.observers.append(look)
    for n in range(1, SHAPE.clients + 1):
        RandomClient(world, f"kernel-{n}", n, SHAPE, random.Random(seed * 1000 + n)).begin()
    if seed % 2:
        world.agenda.after(0.02, world.lose, sorted(world.hosts)[0])
    world.agenda.run(calls=200_000)
    return looked


def test_it_is_said_why_each_value_is_kept() -> None:
    script = Script()
    where = script.slice(2)
    line = Line("cell.py", 3, "x = put(...)")
    script.send(BufferDeclared(0.0, "up", ME, 1, where, 8, name="x", line=line))
    assert asked(script)[1] == Holding(
        1, ME, where, 8, "promised", "", "x", line,
        ("a handle is held", "uploaded, and no run has read it"),
    )  # fmt: skip
    script.arrive(1, where)
    plan = script.register(Sketch("step").chain(where, "f", nbytes=8))
    runs = [script.submit(plan, [1]) for _ in range(2)]
    value = asked(script)[1]
    assert value.state == "resident"
    assert value.why == (
        "a handle is held",
        f"run {runs[0].run & 0xFFFFFFFF} of 'step' and 1 more of it read it",
    )
    made = asked(script)[runs[0].outputs[0]]
    assert (made.program, made.name, made.line) == ("step", "f.0", Line("sketch.py", 1, "f(...)"))
    assert made.why == (
        "a handle is held", f"run {runs[0].run & 0xFFFFFFFF} of 'step' makes it"
    )  # fmt: skip
    script.drop(1)
    assert 1 not in asked(script), "the last reader has its place, and the ledger its bytes"
    script.finish_all()
    assert asked(script)[runs[0].outputs[0]].why == ("a handle is held",)


@pytest.mark.parametrize("owner", [True, False])
def test_of_many_values_the_largest_are_described_and_the_others_counted(
    owner: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control plane does nothing else meanwhile: its work is for those that it describes."""
    script = Script()
    script.send(ClientJoined(0.0, "join", BOB, NUMBER >> 32, owner=owner))
    where = script.slice(2, client=BOB)
    sizes = [random.Random(n).randrange(4, 400) for n in range(600)]
    numbers = [script.upload(where, nbytes, client=BOB) for nbytes in sizes]
    read = numbers[sizes.index(max(sizes))]
    plan = script.register(Sketch("p").chain(where, "f", nbytes=max(sizes)), client=BOB)
    script.submit(plan, [read], client=BOB)
    sizes.append(max(sizes))
    described: list[int] = []
    why = module._why

    def counted(state: object, buffer: BufferRecord, *more: object) -> object:
        described.append(buffer.id)
        return why(state, buffer, *more)  # type: ignore[arg-type]

    monkeypatch.setattr(module, "_why", counted)
    for most in (1, 7, 50):
        described.clear()
        found = script.control.holdings(BOB, most)
        assert len(found.values) == len(described) == most
        assert [value.nbytes for value in found.values] == sorted(sizes, reverse=True)[:most]
        assert found.others == 601 - most
        shown = 2 * sum([value.nbytes for value in found.values])
        assert shown + found.others_bytes == 2 * sum(sizes)
        assert found.devices == script.control.holdings(BOB).devices
        assert found.clients == script.control.holdings(BOB).clients
    assert any("of 'p' reads it" in text for text in found.values[0].why)


def test_a_run_that_waits_is_told_from_one_that_has_its_place() -> None:
    script = Script(rules=ONE_BY_ONE)
    where = script.slice(1)
    buffer = script.upload(where, 8)
    plan = script.register(Sketch("step").chain(where, "f", nbytes=8))
    other = script.register(Sketch("late").chain(where, "g", nbytes=8))
    script.submit(plan)
    late = script.submit(other, [buffer])
    script.drop(buffer)
    assert asked(script)[buffer].why == (f"waiting run {late.run & 0xFFFFFFFF} of 'late' reads it",)


def test_a_suspended_value_takes_nothing_of_devices_and_is_told() -> None:
    script = Script()
    where = script.slice(2)
    buffer = script.upload(where, 8)
    script.send(SuspendRequested(0.0, "suspend", ME, ME, 7))
    found = script.control.holdings(ME)
    assert found.values[0].state == "suspended"
    assert found.values[0].why[-1] == "its slice is suspended: it is in its hosts' memory"
    assert not any(use.values or use.reserved for use in found.devices)
    script.send(ResumeRequested(0.0, "resume", ME, ME, None, 8))
    assert asked(script)[buffer].state == "resident"
    assert len([use for use in script.control.holdings(ME).devices if use.values == 8]) == 2


def test_a_guest_reads_names_of_its_own_values_only_and_sums_of_all() -> None:
    script = Script()
    guest(script)
    mine, his = script.slice(2), script.slice(2, client=BOB)
    plan = script.register(Sketch("secret").chain(mine, "f", nbytes=8))
    run = script.submit(plan)
    own = script.upload(his, 4, client=BOB)
    found = script.control.holdings(BOB)
    assert [value.buffer for value in found.values] == [own]
    assert not found.runs
    assert [binding.slice for binding in found.slices] == [his]
    assert "secret" not in repr(found)
    assert found.clients[ME] >= 16
    assert set(asked(script)) == {own, run.outputs[0]}, "an owner reads all"


def test_of_what_it_has_taken_a_guest_reads_no_more_than_the_name_it_took() -> None:
    script = Script()
    guest(script)
    mine = script.slice(2)
    plan = script.register(Sketch("secret").chain(mine, "f", nbytes=8))
    run = script.submit(plan)
    script.send(HandlePublished(0.0, "publish", ME, "w", (run.outputs[0],)))
    script.send(HandleTaken(0.0, "take", BOB, "w", (NUMBER,)))
    found = script.control.holdings(BOB)
    assert found.values == (
        Holding(
            NUMBER, ME, mine, 8, "promised", "", "", Line(),
            ("its owner has a handle", "published as 'w'", f"taken by {BOB}",
             f"a run of {ME} makes it"),
        ),
    )  # fmt: skip
    assert "secret" not in repr(found)


@pytest.mark.parametrize(
    ("nbytes", "told"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "0.977 KiB"),
        (1 << 20, "1 MiB"),
        (1 << 50, "1.02e+03 TiB"),
    ],
)
def test_sizes_are_short(nbytes: int, told: str) -> None:
    assert size(nbytes) == told
