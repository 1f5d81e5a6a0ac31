"""The work for a call grows with its arrays, and no faster: comparisons are counted, not time."""

from __future__ import annotations

import pytest

from pathways_lab.executor.local_array import Slot
from pathways_lab.testing import Script, Sketch
from tests.runtime.launch_kit import Bench, PlanBuilder, binding, grant


class Number(int):
    """A buffer's number, every comparison of which is counted."""

    compared = 0

    def __eq__(self, other: object) -> bool:
        Number.compared += 1
        return int(self) == other

    __hash__ = int.__hash__


def in_the_core(arrays: int) -> int:
    """Comparisons of numbers for one run that consumes all its inputs."""
    script = Script(memory=2**20)
    where = script.slice(4)
    sketch = Sketch("step")
    inputs = [sketch.input(where, 4) for _ in range(arrays)]
    made = sketch.call("f", where, inputs, [4] * arrays, donated=tuple(range(arrays)))
    plan = script.register(sketch.output(*made))
    buffers = [Number(script.upload(where, 4)) for _ in range(arrays)]
    Number.compared = 0
    run = script.submit(plan, buffers)
    assert run.run not in script.ended
    return Number.compared


def on_a_host(arrays: int, monkeypatch: pytest.MonkeyPatch) -> int:
    """Comparisons of arrays for one gang that consumes all its inputs."""
    compared = 0

    def count(mine: Slot, other: object) -> bool:
        nonlocal compared
        compared += 1
        return mine is other

    bench = Bench(binding(1, 0, 1))
    names = [f"a{n}" for n in range(arrays)]
    made = [f"b{n}" for n in range(arrays)]
    plan = PlanBuilder().call(1, "f", names, made, donated=tuple(range(arrays))).plan(names, made)
    bench.launcher.program(plan)
    monkeypatch.setattr(Slot, "__eq__", count)
    bench.grant(
        grant(7, plan, inputs=(None,) * arrays, outputs=tuple(range(70, 70 + arrays))),
        **{f"_{n}": "A" for n in range(arrays)},
    )
    bench.done("f")
    monkeypatch.undo()
    assert not bench.launch("f").copies
    return compared


def test_nothing_is_compared_with_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    assert in_the_core(512) <= 4.5 * in_the_core(128) + 100
    assert on_a_host(512, monkeypatch) <= 4.5 * on_a_host(128, monkeypatch) + 100
