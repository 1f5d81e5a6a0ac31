"""A model of very many arrays, where processes may have few file descriptors.

``python -m tests.acceptance.descriptors --files 256 --arrays 2000`` starts a lab none of
whose processes may have more than 256 descriptors, uploads a model of so many arrays (half
of them the state of its optimizer), trains it and reads it back.  It prints the most
descriptors that each process had, and fails when one had more than half the limit.
"""

from __future__ import annotations

import argparse
import os
import resource
import sys
from collections import Counter
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import psutil

import pathways_lab as pw

State = tuple[list[pw.Handle], list[pw.Handle]]
RATE, MOMENTUM = 0.25, 0.5


class Most:
    """The most descriptors that each process of a lab had when it was looked at."""

    def __init__(self, lab: pw.Lab) -> None:
        assert lab.embedded is not None
        self.found: Counter[str] = Counter()
        self._pids = [("kernel", os.getpid())]
        self._pids += [(kind, pid) for kind, pids in lab.embedded.pids.items() for pid in pids]

    def look(self) -> None:
        for kind, pid in self._pids:
            name = f"{kind} {pid}"
            self.found[name] = max(self.found[name], psutil.Process(pid).num_fds())

    def lines(self) -> Iterator[str]:
        for name, number in self.found.most_common():
            yield f"{number:5} {name}"


def train(on: pw.Slice, arrays: int, elements: int, steps: int, most: Most) -> None:
    """Momentum descent of every parameter to 1, compared with NumPy."""
    begin = [np.full(elements, number, np.float32) for number in range(arrays // 2)]
    zero = np.zeros(elements, np.float32)
    state: State = (
        [pw.device_put(array, on) for array in begin],
        [pw.device_put(zero, on) for _ in begin],
    )
    jax.block_until_ready(state)
    most.look()

    def update(state: tuple[list[jax.Array], list[jax.Array]]) -> tuple[list[jax.Array], ...]:
        gradients = jax.grad(lambda ps: sum(jnp.sum((p - 1) ** 2) / 2 for p in ps))(state[0])
        speeds = [MOMENTUM * v + g for v, g in zip(state[1], gradients, strict=True)]
        return [p - RATE * v for p, v in zip(state[0], speeds, strict=True)], speeds

    step = pw.jit(update, on=on, donate_argnums=0)
    expected, speed = np.arange(arrays // 2, dtype=np.float32), np.zeros(1, np.float32)
    for _ in range(steps):
        state = step(state)
        most.look()
        speed = MOMENTUM * speed + (expected - 1)
        expected = expected - RATE * speed
    values, speeds = jax.device_get(state)
    most.look()
    for number, value in enumerate(values):
        np.testing.assert_allclose(value, np.full(elements, expected[number]), rtol=1e-5)
    assert len(speeds) == len(values)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--files", type=int, default=256)
    parser.add_argument("--arrays", type=int, default=2000)
    parser.add_argument("--elements", type=int, default=50_000)
    parser.add_argument("--steps", type=int, default=10)
    wanted = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted.files, wanted.files))
    with pw.start(islands=1, hosts_per_island=1, devices_per_host=2, memory="2 GB") as lab:
        most = Most(lab)
        train(lab.slice(2), wanted.arrays, wanted.elements, wanted.steps, most)
    print(*most.lines(), sep="\n")
    worst = max(most.found.values())
    print(f"{wanted.arrays} arrays, {wanted.steps} steps: at most {worst} of {wanted.files}")
    return int(worst > wanted.files // 2)


if __name__ == "__main__":
    sys.exit(main())
