"""Clients that compete: two threads and two processes, collectives over the same devices.

``python -m tests.acceptance.competing --rounds 200`` starts a lab of two islands
of two hosts, and four clients that submit so many runs each: sums over two
hosts, over one mesh axis or both, of random sizes, on either island, over both, or
from one to the other, up to eight at once, in an order of their own, while the policy
changes and a policy of chance decides whose turn it is.  Every result is
compared with NumPy's.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

import pathways_lab as pw

FLIGHT = 8


class ByChance:
    """A policy of a user's own: anybody."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)

    def choose(self, view: pw.PolicyView) -> int:
        return self.rng.choice(view.candidates).run


def programs(lab: pw.Lab) -> list[tuple[Callable[..., Any], Callable[[Any], Any]]]:
    """Programs of one client, each with what NumPy says."""
    found: list[tuple[Callable[..., Any], Callable[[Any], Any]]] = []
    ends = []
    for islands in (["island0"], ["island1"], ["island0", "island1"]):
        on = lab.slice((2, 2), ("h", "d"), islands=islands)
        for axes in (("h",), ("d",), ("h", "d")):
            found.append((summed(on, axes), lambda v, a=axes: expected(v, a)))
        ends.append(summed(on, ("h",)))
    near, far, wide = ends

    @pw.program
    def across(v: Any) -> Any:
        return far(jax.numpy.concatenate([near(v)] * 2))

    @pw.program
    def wider(v: Any) -> Any:
        return wide(jax.numpy.concatenate([near(v)] * 2))

    for program in (across, wider):
        found.append(
            (program, lambda v: expected(np.concatenate([expected(v, ("h",))] * 2), ("h",)))
        )
    return found


def summed(on: pw.Slice, axes: tuple[str, ...]) -> Any:
    """Blocks of a matrix summed over mesh axes."""
    out = P(*(None if axis in axes else axis for axis in ("h", "d")))

    def body(block: jax.Array) -> Any:
        return jax.lax.psum(block, axes)

    mapped = jax.shard_map(body, mesh=on.mesh, in_specs=P("h", "d"), out_specs=out)
    return pw.jit(mapped, on=on, in_shardings=P("h", "d"), out_shardings=out)


def expected(v: Any, axes: tuple[str, ...]) -> Any:
    """The same with NumPy."""
    rows, columns = v.shape
    blocks = v.reshape(2, rows // 2, 2, columns // 2)
    kept = blocks.sum(axis=tuple({"h": 0, "d": 2}[a] for a in axes), keepdims=True)
    return kept.reshape(kept.shape[0] * rows // 2, kept.shape[2] * columns // 2)


def compete(lab: pw.Lab, seed: int, rounds: int) -> int:
    """Submit so many runs and check every result; returns how many were right."""
    rng = random.Random(seed)
    known = programs(lab)
    flying: deque[tuple[Any, Any]] = deque()
    right = 0

    def check() -> int:
        handle, value = flying.popleft()
        np.testing.assert_array_equal(handle.result(timeout=120), value)
        return 1

    for number in range(rounds):
        program, value_of = rng.choice(known)
        size = rng.choice((4, 8))
        v = np.full((size, 4), float(seed * 1000 + number), np.float32)
        v += np.arange(v.size, dtype=np.float32).reshape(v.shape)
        flying.append((program(v), value_of(v)))
        while len(flying) > rng.randrange(FLIGHT):
            right += check()
    while flying:
        right += check()
    return right


def run(rounds: int, seed: int = 0, lab: pw.Lab | None = None) -> dict[str, float]:
    """Two threads and two processes, *rounds* each.  Raises what goes wrong in any of them."""
    if lab is None:
        with pw.start(islands=2, hosts_per_island=2, devices_per_host=2, progress=False) as lab:
            return run(rounds, seed, lab)
    assert lab.embedded is not None
    failures: list[BaseException] = []
    counts: list[int] = []

    def thread(name: str, number: int) -> None:
        try:
            with pw.Lab(lab.embedded.control, name=name) as client:
                counts.append(compete(client, number, rounds))
        except BaseException as error:
            failures.append(error)

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "lab.json"
        lab.invite(path)
        begun = time.monotonic()
        processes = [
            subprocess.Popen(
                [sys.executable, "-m", "tests.acceptance.competing", "--client", str(path),
                 "--rounds", str(rounds), "--seed", str(seed + n)],
                stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2],
            )
            for n in (1, 2)
        ]  # fmt: skip
        threads = [threading.Thread(target=thread, args=(f"thread{n}", seed + n)) for n in (3, 4)]
        for each in threads:
            each.start()
        policies = (ByChance(seed), pw.FIFO(), pw.ShortestFirst(), pw.ProportionalShare())
        changes = 0
        while any(t.is_alive() for t in threads) or any(p.poll() is None for p in processes):
            lab.policy = policies[changes % len(policies)]
            changes += 1
            time.sleep(0.5)
        for process in processes:
            said, _ = process.communicate()
            if process.returncode:
                failures.append(RuntimeError(f"a client process ended with {process.returncode}"))
            else:
                counts.append(int(said.split()[-1]))
    if failures:
        raise failures[0]
    seconds = time.monotonic() - begun
    return {"right": sum(counts), "wanted": 4 * rounds, "seconds": seconds, "policies": changes}


def main() -> None:
    """The command, and one of its client processes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--client", help="a lab file: be one of the client processes")
    chosen = parser.parse_args()
    if chosen.client:
        with pw.connect(chosen.client, name=f"process{os.getpid()}") as lab:
            print(compete(lab, chosen.seed, chosen.rounds), flush=True)
        return
    found = run(chosen.rounds, chosen.seed)
    print(", ".join(f"{name} {value:g}" for name, value in found.items()))


if __name__ == "__main__":
    main()
