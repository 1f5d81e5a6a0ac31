"""Every schedule holds exactly as many bytes on each device as its plan says beforehand.

Each device is filled until a run has no more room than its plan's bound.  A bound that is too low,
or bytes that are freed too late, make the run wait for ever; one that is too high is not reached.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import pathways_lab as pw
from pathways_lab.client.lab.devices import Slice
from pathways_lab.client.program.graph import Argument
from pathways_lab.client.program.program import ProgramFunction
from pathways_lab.core.program.program import Call
from pathways_lab.core.slices.topology import Owned
from pathways_lab.pipeline.schedules import SCHEDULES
from pathways_lab.timeline.records import Sample, Span
from tests.pipeline.mpmd_kit import OPTIMIZER, named, scan, weights

pytestmark = pytest.mark.cluster

STAGES, MICROBATCHES, WIDTH, ROWS = 3, 6, 16, 64
PARTS = [f"part{number}" for number in range(2 * STAGES)]
LIMIT = 1 << 20
SECONDS = 10.0
X = weights(MICROBATCHES * ROWS, WIDTH, seed=1)


@pytest.fixture(scope="module")
def lab() -> Iterator[pw.Lab]:
    with pw.start(2, 1, 2, memory=LIMIT, platform="cpu", progress=False) as started:
        yield started


@pytest.fixture(scope="module")
def slices(lab: pw.Lab) -> list[Slice]:
    return [lab.slice(1, axes="data", island=f"island{number % 2}") for number in range(STAGES)]


def layer(w: Any, x: Any) -> Any:
    return jnp.tanh(x @ w)


def error(y: Any, labels: Any) -> Any:
    return jnp.mean((y - labels) ** 2)


def samples(lab: pw.Lab) -> list[tuple[Owned, int, int]]:
    """What hosts have said of their devices: bytes in use, and the most since they last did."""
    return [
        ((r.host, r.args["device"]), int(r.value), r.args["most"])
        for r in lab.timeline.records
        if isinstance(r, Sample) and r.name == "memory"
    ]


def temporary(lab: pw.Lab) -> dict[str, int]:
    """What hosts have said of functions that they compiled: bytes that they take while they run."""
    spans = [r for r in lab.timeline.records if isinstance(r, Span) and r.kind == "compile"]
    return {span.args["function"]: span.args["temporary"] for span in spans}


def until(right: Callable[[], bool]) -> None:
    """Wait, not for ever: what did not come is seen afterwards."""
    deadline = time.monotonic() + SECONDS
    while not right() and time.monotonic() < deadline:
        time.sleep(0.01)


def wait(results: Any) -> None:
    for handle in jax.tree.leaves(results):
        handle.result(timeout=SECONDS)


def measured(
    lab: pw.Lab, slices: list[Slice], program: ProgramFunction, *given: Any
) -> tuple[Mapping[Owned, int], Mapping[Owned, int]]:
    """By device, the plan's bound, and what a run held at most with no more room than that."""
    captured = program.capture(*given)
    called = {node.function for node in captured.program.nodes if isinstance(node, Call)}
    until(lambda: called <= {*temporary(lab)})
    bound = captured.memory(temporary(lab))
    inputs = dict.fromkeys(bound, 0)
    for handle in jax.tree.leaves(given):
        inputs[handle.slice.binding.devices[0]] += handle.nbytes
    room = {on: on.binding.devices[0] for on in slices}
    fills = [
        pw.jit(lambda n: jnp.zeros(n, jnp.uint8), on=on, static_argnums=0)(LIMIT - bound[device])
        for on, device in room.items()
    ]
    wait(fills)
    full = {device: LIMIT - bound[device] + inputs[device] for device in bound}
    until(lambda: {device: used for device, used, _ in samples(lab)} == full)
    before = len(samples(lab))
    results = program(*given)
    wait(results)
    found = dict.fromkeys(bound, 0)

    def reached() -> bool:
        for device, _, most in samples(lab)[before:]:
            found[device] = max(found[device], most - (LIMIT - bound[device]))
        return found == bound

    until(reached)
    return bound, found


def third(
    lab: pw.Lab, slices: list[Slice], program: ProgramFunction, start: Callable[[], Any]
) -> tuple[Mapping[Owned, int], Mapping[Owned, int]]:
    """The third step: its state and its batch are on devices, and nothing is compiled for it."""
    state = program(*start(), X, X)[:-1]
    assert program.last is not None
    assert program.last.prepared is not None
    at = {
        r.source.index: r.slice
        for r in program.last.prepared.inputs
        if isinstance(r.source, Argument)
    }
    batch = [pw.jit(lambda x: x * 1, on=at[argument])(X) for argument in sorted(at)[-2:]]
    state = program(*state, *batch)[:-1]
    wait((state, batch))
    return measured(lab, slices, program, *state, *batch)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_step_holds_what_its_plan_says(lab: pw.Lab, slices: list[Slice], schedule: str) -> None:
    parts = [named(name, layer) for name in PARTS]

    def loss(own: Any, x: Any, labels: Any) -> Any:
        for part, w in zip(parts, own, strict=True):
            x = part(w, x)
        return error(x, labels)

    table = SCHEDULES[schedule](STAGES, MICROBATCHES)
    each = len(PARTS) // table.stages
    on = {name: slices[table.slices[number // each]] for number, name in enumerate(PARTS)}
    step = pw.mpmd.jit(
        scan(loss, MICROBATCHES), on=on, schedule=schedule, donate_argnums=(0, 1)
    )  # fmt: skip
    own = [weights(WIDTH, WIDTH, seed=seed) for seed in range(len(PARTS))]
    bound, found = third(lab, slices, step, lambda: (own, OPTIMIZER.init(own)))
    assert found == bound


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_pipeline_holds_what_its_plan_says(
    lab: pw.Lab, slices: list[Slice], schedule: str
) -> None:
    layers = [(layer, weights(WIDTH, WIDTH, seed=seed)) for seed in range(len(PARTS))]
    pipe = pw.pipeline(
        layers, slices, loss=error, optimizer=optax.adam(1e-2), example=X[:ROWS],
        schedule=schedule, microbatches=MICROBATCHES,
    )  # fmt: skip
    bound, found = third(lab, slices, pipe.program, lambda: (pipe.init(),))
    assert found == bound
