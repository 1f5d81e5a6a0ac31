"""A large pipeline: how long its capture takes, and what is sent and kept of it.

    python -m benchmarks.capturing [--layers 62] [--microbatches 64] [--stages 16]

The step of a layered model over so many slices, a device each, is captured, and two steps run in
a lab of four hosts.  What travels is read off the lab's own records of
messages.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import Counter
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import msgpack
import numpy as np

import pathways_lab as pw
from benchmarks.harness.report import markdown
from pathways_lab.core.program.folding import fold, folded
from pathways_lab.timeline.log import Recording
from pathways_lab.timeline.records import Event
from pathways_lab.transport.codec import pack

HOSTS = 4
WIDTH, EXAMPLES = 8, 2
"""Small, so that only what the lab itself does is seen."""


SCHEDULES = ("1f1b", "zero-bubble")


@dataclass(frozen=True)
class Found:
    """One schedule.

    capture, step: seconds.  steps: of the plan.  plan: its bytes, as each host gets it once.
    code: bytes of each compiled function.  sent: of a later step, by kind of message.
    memory: the bound of each device.
    """

    HEADS = (
        "capture", "a step", "steps of the plan", "message of a step", "plan, once to each host",
        "functions, once", "grants of a step, to all hosts", "reports of a step, with its records",
        "bound of a device",
    )  # fmt: skip

    capture: float
    step: float
    steps: int
    plan: int
    code: dict[str, int]
    sent: Counter[str]
    memory: list[int]

    def told(self) -> tuple[str, ...]:
        return (
            f"{self.capture:.1f} s", f"{self.step:.1f} s", f"{self.steps:,}",
            f"{self.sent['submit']:,} bytes", f"{self.plan:,} bytes",
            f"{len(self.code)}, {sum(self.code.values()):,} bytes",
            f"{self.sent['grant']:,} bytes", f"{self.sent['report']:,} bytes",
            f"{min(self.memory):,} to {max(self.memory):,} bytes",
        )  # fmt: skip


def dense(w: Any, x: Any) -> Any:
    return jnp.tanh(x @ w)


def mean(y: Any, labels: Any) -> Any:
    return jnp.mean((y - labels) ** 2)


def sent(recording: Recording) -> Counter[str]:
    """Bytes of messages by kind."""
    found: Counter[str] = Counter()
    for record in recording.records:
        if isinstance(record, Event) and record.kind == "message" and record.time > recording.start:
            found[str(record.args["kind"])] += int(record.args["bytes"])
    return found


def measured(lab: pw.Lab, layers: int, microbatches: int, stages: int, schedule: str) -> Found:
    """The step with this schedule; a first one compiles, a second one is looked at."""
    import optax

    slices = [lab.slice(1, island=f"island{n * HOSTS // stages}") for n in range(stages)]
    x = np.ones((microbatches * EXAMPLES, WIDTH), np.float32)
    pipe = pw.pipeline(
        [(dense, np.eye(WIDTH, dtype=np.float32)) for _ in range(layers)], slices, loss=mean,
        optimizer=optax.adam(1e-3), example=x[:EXAMPLES], schedule=schedule,
        microbatches=microbatches,
    )  # fmt: skip
    state = pipe.init()
    jax.block_until_ready(state)
    begun = time.perf_counter()
    captured = pipe.program.capture(state, x, x)
    took = time.perf_counter() - begun
    for _ in range(2):
        with lab.timeline.recording() as recording:
            begun = time.perf_counter()
            state, _ = pipe.step(state, x, x)
            jax.block_until_ready(state)
            step = time.perf_counter() - begun
    prepared = captured.prepared
    assert prepared is not None
    plan = msgpack.packb(pack(folded(fold(prepared.plan))))
    code = {function.key: len(function.blob) for function, _ in prepared.functions}
    for on in slices:
        on.release()
    return Found(
        took, step, len(prepared.plan.steps), len(plan), code, sent(recording),
        [*captured.memory().values()],
    )  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=62)
    parser.add_argument("--microbatches", type=int, default=64)
    parser.add_argument("--stages", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=10.0, help="for the capture, at most")
    given = parser.parse_args()
    print(
        f"{given.layers} layers, {given.microbatches} microbatches, {given.stages} stages on"
        f" {HOSTS} hosts, load {os.getloadavg()[0]:.1f}"
    )
    shape = given.layers, given.microbatches, given.stages
    with pw.start(HOSTS, 1, -(-given.stages // HOSTS), progress=False) as lab:
        found = {schedule: measured(lab, *shape, schedule) for schedule in SCHEDULES}
    told = [each.told() for each in found.values()]
    print(markdown([("", *found), *zip(Found.HEADS, *told, strict=True)]))
    return int(max(each.capture for each in found.values()) > given.seconds)


if __name__ == "__main__":
    sys.exit(main())
