"""Launching, random: any mixture of grants, ends, failures and aborts keeps the laws."""

from __future__ import annotations

import random
from typing import Any

import pytest

from pathways_lab.core.errors import Failure
from pathways_lab.executor.actions import (
    Broken,
    Receive,
    Send,
)
from pathways_lab.executor.order import Order
from pathways_lab.executor.steps import Segment
from tests.runtime.launch_kit import HOST, Bench, PlanBuilder, binding, grant

BOOM = Failure("execute", "boom")
OTHER = "island0/host1"
FAR = "island1/host0"


def play(seed: int) -> None:
    """Random programs, completions, failures, an abort; asserts the laws."""
    rng = random.Random(seed)
    slices = [binding(1, 0, 1), binding(2, 1, 2), binding(3, 3), binding(4, 0, 1, 2, 3)]
    slices += [binding(5, 3), binding(9, 0, host=FAR)]
    bench = Bench(*slices)
    devices = {b.slice: {d for h, d in b.devices if h == HOST} for b in slices}
    bench.launcher.launches_alone("f2", 1)
    granted: dict[int, list[tuple[int, int]]] = {d: [] for d in range(4)}
    steps = 0
    for run in range(1, 7):
        build, made = PlanBuilder(f"plan{run}"), [("x", 9)]
        build.add(9, "x")
        for number in range(rng.randint(1, 8)):
            name, home = rng.choice(made)
            target = rng.choice([1, 2, 3, 4, 5])
            if home != target:
                build.move(name, target, f"m{number}")
                name = f"m{number}"
            donated = (0,) if home != target and rng.random() < 0.3 else ()
            build.call(target, f"f{rng.randint(0, 3)}", [name], [f"v{number}"], donated)
            made.append((f"v{number}", target))
        outputs = sorted({name for name, _ in made[1:] if rng.random() < 0.4})
        plan = build.plan(["x"], outputs)
        bench.launcher.program(plan)
        for index, step in enumerate(plan.steps):
            steps += 1
            for device in devices.get(getattr(step.node, "slice", 0), ()):
                granted[device].append((run, index))
        cut = rng.randint(1, len(plan.steps))
        ids = tuple(1000 * run + i for i in range(len(outputs)))
        bench.grant(grant(run, plan, last=cut, inputs=(77,), outputs=ids))
        if cut < len(plan.steps):
            bench.grant(grant(run, plan, first=cut, inputs=(77,), outputs=ids))
    launched: dict[int, list[tuple[int, int]]] = {d: [] for d in range(4)}
    flying: dict[str, list[Segment]] = {}
    todo: list[object] = []
    seen = 0
    aborted = rng.choice([0, 0, 3])
    while seen < len(bench.actions) or todo or any(flying.values()):
        for action in bench.actions[seen:]:
            seen += 1
            if isinstance(action, Segment):
                mine = devices[action.stretch.first.slice]
                for lane, gangs in flying.items():
                    busy = set().union(*(devices[g.stretch.first.slice] for g in gangs), set())
                    assert lane == action.lane or not busy & mine
                call = action.stretch.first
                alone = (call.function, call.slice) == ("f2", 1)
                assert not alone or not flying.get(action.lane)
                flying.setdefault(action.lane, []).append(action)
                for device in mine:
                    launched[device].append(action.key)
            elif isinstance(action, (Send, Receive)):
                todo.append(action)
            assert not isinstance(action, Broken)
        choices = [*todo, *(gangs[0] for gangs in flying.values() if gangs)]
        if not choices:
            break
        chosen = rng.choice(choices)
        failure = BOOM if rng.random() < 0.1 else None
        if isinstance(chosen, Segment):
            flying[chosen.lane].pop(0)
            bench.take(bench.launcher.done(chosen.key, [0.0], {0: failure} if failure else {}))
        elif isinstance(chosen, Send):
            todo.remove(chosen)
            bench.take(bench.launcher.sent(chosen.key, chosen.failure or failure))
        else:
            assert isinstance(chosen, Receive)
            todo.remove(chosen)
            bench.take(bench.launcher.received(chosen.key, "bytes", failure))
        if aborted and rng.random() < 0.2:
            bench.take(bench.launcher.abort(aborted, BOOM))
    assert launched == granted
    keys = [key for key, _ in bench.reports()]
    assert len(keys) == len(set(keys)) == steps
    assert bench.launcher.idle
    bench.take(bench.launcher.free(tuple(b for s in range(10) for b in _held(bench, s))))
    assert bench.memory() == 0
    assert bench.launcher.unfinished() == []


@pytest.mark.parametrize("seed", range(60))
def test_any_mixture_keeps_the_laws(seed: int) -> None:
    """Per device the launches follow the grants, lanes never share a busy device,
    every step is reported once, and nothing is left."""
    play(seed)


@pytest.mark.parametrize("law", ["order", "completion", "alone"])
def test_the_search_notices_a_missing_law(law: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = Order._before
    altered: dict[str, Any] = {
        "order": lambda self, gang: {},
        "completion": lambda self, gang: {
            g: False for g in before(self, gang) if not g.handed or g.lane == gang.lane
        },
        "alone": lambda self, gang: {
            g: done and g.lane != gang.lane for g, done in before(self, gang).items()
        },
    }
    monkeypatch.setattr(Order, "_before", altered[law])

    def passes(seed: int) -> bool:
        try:
            play(seed)
        except AssertionError:
            return False
        return True

    assert not all(passes(seed) for seed in range(60))


def _held(bench: Bench, slice_id: int) -> tuple[int, ...]:
    return bench.launcher.buffers.on_slice(slice_id)
