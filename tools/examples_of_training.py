"""Examples of models in parts; a page of :mod:`tools.examples`, and run before the others.

Rule for maintainers: short, and what it says of a result it asserts.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import pathways_lab as pw
from tools.showing import shows


def dense(weights: Any, a: Any) -> Any:
    return jnp.tanh(a @ weights)


def error(y: Any, labels: Any) -> Any:
    return jnp.mean((y - labels) ** 2)


@shows("pw.mpmd.load", "pw.mpmd.LoadedProgram")
def loading(s: pw.Slice, t: pw.Slice, x: Any) -> None:
    embed = pw.jit(lambda a: a + 1, on=s, name="embed")
    head = pw.jit(lambda a: a.sum(), on=t, name="head")
    printed = pw.program(lambda a: head(embed(a))).mlir(x)  # or of Shardy's own partitioner
    step = pw.mpmd.load(printed, on={s.name: s, t.name: t})
    (total,) = step(x)
    assert float(total) == 36.0
    assert step.in_shardings[0].mesh.size == 2


@shows("pw.mpmd.named", "pw.mpmd.jit", "pw.mpmd.Step", "pw.mpmd.Fragment", "CapturedProgram.memory")
def in_parts(s: pw.Slice, t: pw.Slice) -> None:
    encode, decode = pw.mpmd.named("encoder", dense), pw.mpmd.named("decoder", dense)

    def loss(both: Any, a: Any, b: Any) -> Any:
        return error(decode(both[1], encode(both[0], a)), b)

    def train_step(both: Any, a: Any, b: Any) -> Any:  # for one device, with two microbatches
        total = [jax.value_and_grad(loss)(both, *rows) for rows in zip(a, b, strict=True)]
        value, slope = jax.tree.map(lambda *parts: sum(parts) / 2, *total)
        return jax.tree.map(lambda w, d: w - 0.1 * d, both, slope), value

    step = pw.mpmd.jit(
        train_step, on={"encoder": s, "decoder": t}, schedule="1f1b", donate_argnums=0
    )
    data = np.ones((2, 4, 4), np.float32)
    both, first = step([np.eye(4, dtype=np.float32)] * 2, data, data)  # one message
    held = step.capture(both, data, data).memory()  # by device, the most bytes of a run
    both, second = step(both, data, data)
    assert float(second) < float(first)
    assert max(held.values()) > 2 * 4 * 4 * 4
    assert (both[0].slice, both[1].slice) == (s, t)
    assert [f.microbatch for f in step.fragments if f.kind == "backward"] == [0, 0, 1, 1]


@shows("pw.what_if", "WhatIf.before", "WhatIf.after", "WhatIf.error", "WhatIf.compare")
def another_way(lab: pw.Lab, s: pw.Slice, t: pw.Slice) -> None:
    first, second = pw.mpmd.named("first", dense), pw.mpmd.named("second", dense)

    def step(both: Any, rows: Any) -> Any:
        return [jnp.mean(second(both[1], first(both[0], a))) for a in rows]  # microbatches

    step = pw.mpmd.jit(step, on={"first": s, "second": t}, name="two parts")
    with lab.timeline.recording() as recording:
        jax.block_until_ready(step([np.eye(4, dtype=np.float32)] * 2, np.ones((2, 4, 4))))
    found = pw.what_if(recording, dcn=2)  # a network between islands that is twice as fast
    print(found)  # where the time goes, measured and then
    print(f"{found.before:.3f} s now (replayed {found.error:+.0%} off), {found.after:.3f} s then")
    found.compare(recording)  # once it was measured: later predictions say how good this was
    pw.what_if(recording, speed={"forward_first": 2.0})


@shows("pw.search", "Search.best", "Search.winner", "Candidate.measured", "Candidate.error")
def searching(lab: pw.Lab, s: pw.Slice, t: pw.Slice) -> None:
    first, second = pw.mpmd.named("first", dense), pw.mpmd.named("second", dense)

    def train_step(both: Any, a: Any, microbatches: int = 2) -> Any:
        def loss(both: Any, a: Any) -> Any:
            return jnp.mean(second(both[1], first(both[0], a)))

        rows = a.reshape(microbatches, -1, 4)
        slopes = [jax.grad(loss)(both, rows[m]) for m in range(microbatches)]
        return jax.tree.map(lambda w, *d: w - 0.1 * sum(d), both, *slopes)

    step = pw.mpmd.jit(train_step, on={"first": s, "second": t}, schedule="gpipe")
    both, a = [np.eye(4, dtype=np.float32)] * 2, np.ones((8, 4), np.float32)
    step.place(both, a)  # types are known from now on
    found = pw.search(step, lab, over=("schedule",), seconds=10, few=1, progress=False)
    print(found)  # ways, predicted and measured
    print(found.winner.way, found.winner.measured, found.winner.error)  # error: how far it was off
    both = found.best(both, a)


@shows("pw.pipeline", "pw.pipeline.Pipeline")
def pipelining(s: pw.Slice, t: pw.Slice) -> None:
    layers = [(dense, np.eye(4, dtype=np.float32)) for _ in range(2)]
    data = np.ones((4, 4), np.float32)
    pipe = pw.pipeline(
        layers, [s, t], loss=error, optimizer=optax.sgd(0.1), example=data[:2],
        schedule="1f1b", microbatches=2, priority=-1, data={"job": "night"},
    )  # fmt: skip
    _, loss = pipe.step(pipe.init(), data, data)
    assert float(loss) > 0
    print(pipe.planned().text())


@shows("pw.data_parallel", "pw.pipeline.DataParallel")
def several_islands(s: pw.Slice, t: pw.Slice) -> None:
    layers = [(dense, np.eye(4, dtype=np.float32))]
    data = np.ones((4, 4), np.float32)
    both = pw.data_parallel(
        layers, [s, t], loss=error, optimizer=optax.sgd(0.1), example=data, chunks=1, priority=-1
    )
    _, loss = both.step(both.init(), data, data)
    assert float(loss) > 0


@shows("pw.compare")
def comparing(lab: pw.Lab) -> None:
    layers = [(dense, np.eye(4, dtype=np.float32)) for _ in range(2)]
    data = np.ones((4, 4), np.float32)
    found = pw.compare(
        layers, ["spmd"], loss=error, optimizer=optax.sgd(0.1), batch=(data, data), lab=lab, steps=1
    )
    assert found["spmd"].seconds > 0


@shows(
    "pw.pipeline.Comparison",
    "pw.pipeline.gpipe", "pw.pipeline.one_forward_one_backward", "pw.pipeline.interleaved",
    "pw.pipeline.circular", "pw.pipeline.eager_one_forward_one_backward",
    "pw.pipeline.zero_bubble", "pw.pipeline.zero_bubble_h2", "pw.pipeline.dual_pipe_v",
    "pw.pipeline.Schedule", "pw.pipeline.Table", "pw.pipeline.Task",
    "pw.pipeline.Costs",
)  # fmt: skip
def scheduling() -> None:
    schedules = (
        pw.pipeline.gpipe(2, 4),  # type: ignore[attr-defined]
        pw.pipeline.one_forward_one_backward(2, 4),  # type: ignore[attr-defined]
        pw.pipeline.interleaved(2, 4),  # type: ignore[attr-defined]
        pw.pipeline.zero_bubble(2, 4),  # type: ignore[attr-defined]
        pw.pipeline.circular(2, 4),  # type: ignore[attr-defined]
        pw.pipeline.eager_one_forward_one_backward(2, 4),  # type: ignore[attr-defined]
        pw.pipeline.zero_bubble_h2(2, 4),  # type: ignore[attr-defined]
        pw.pipeline.dual_pipe_v(2, 4),  # type: ignore[attr-defined]
    )
    bubbles = [each.timed(pw.pipeline.Costs()).bubble for each in schedules]  # type: ignore[attr-defined]
    assert bubbles[0] == bubbles[1] > bubbles[3]
    own = pw.pipeline.Schedule.read("mine", "F0 F1 .  B0 B1\n.  F0 B0 F1 B1")  # type: ignore[attr-defined]
    assert own.problem() is None
    # By comparison: the oldest microbatch first.
    oldest = pw.pipeline.Comparison(lambda task, other: task.microbatch < other.microbatch)  # type: ignore[attr-defined]
    assert callable(oldest.before)
