"""The work for a call grows with its arrays, and no faster: comparisons are counted, not time."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from pathways_lab.client.session.failures import donated_to
from pathways_lab.client.session.handles import Handle, end
from pathways_lab.client.session.pending import Buffer, Run
from pathways_lab.core.program.program import Line
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


def in_the_kernel(arrays: int) -> int:
    """Looks at outputs of one run, while one after the other is said to be there."""

    class Output:
        looks = 0

        def __init__(self) -> None:
            self.there = False

        @property
        def done(self) -> bool:
            Output.looks += 1
            return self.there

    outputs = [Output() for _ in range(arrays)]
    run = Run(1, (), tuple(outputs), ())  # type: ignore[arg-type]
    for output in outputs:
        assert not run.complete()
        output.there = True
    assert run.complete()
    return Output.looks


def test_handles_that_a_call_donates_end_together() -> None:
    settled: list[list[object]] = []
    connection = SimpleNamespace(
        gone=lambda watch: None,
        drop=lambda *numbers: None,
        board=SimpleNamespace(settle=lambda entries, why: settled.append(list(entries))),
    )
    session: Any = SimpleNamespace(connection=connection)
    handles = [Handle(session, Buffer(n, 7), None) for n in range(256)]  # type: ignore[arg-type]
    end(handles, donated_to("step", Line()))
    assert [len(entries) for entries in settled] == [256]
    assert all(handle.is_deleted() for handle in handles)


def test_nothing_is_compared_with_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    assert in_the_kernel(512) <= 4.5 * in_the_kernel(128) + 100
    assert in_the_core(512) <= 4.5 * in_the_core(128) + 100
    assert on_a_host(512, monkeypatch) <= 4.5 * on_a_host(128, monkeypatch) + 100
