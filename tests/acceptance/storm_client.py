"""A client in a storm: ``... storm_client.py LABFILE NAME SEED``; it works until its input ends.

It computes on each of two islands, on both together and between them, keeps some
results and uses them again, and checks every value.  At the end it prints what it has
seen, as JSON.
"""

from __future__ import annotations

import json
import random
import sys
import threading
import time
from collections import Counter
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

import pathways_lab as pw

PATIENCE = 90.0
"""Seconds after which a value that has neither come nor failed counts as hung."""
V = np.arange(16, dtype=np.float32)


class Worker:
    """results: values that were right.  failed: why others did not come, and how often.

    last: the last reason of each kind, in full.
    """

    def __init__(self, lab: pw.Lab, seed: int) -> None:
        self.lab = lab
        self.random = random.Random(seed)
        self.results = 0
        self.failed: Counter[str] = Counter()
        self.last: dict[str, str] = {}
        self.wrong: list[str] = []
        self.longest = 0.0
        self._made: list[Any] = []
        self._failing = False

    def programs(self) -> list[Any]:
        """(program, what it computes), on slices that are there."""
        if self._made:
            return self._made
        sizes = {island.name: island.devices for island in self.lab.islands}
        names = [f"island{n}" for n in range(2)]
        whole = [self.lab.slice(sizes.get(name, 1), "x", island=name) for name in names]
        place = self.random.choice(names)
        part = self.lab.slice(max(1, sizes.get(place, 1) // 2), "x", island=place)
        wide = self.lab.slice(2 * min(sizes.get(name, 1) for name in names), "x", islands=names)

        def summed(on: pw.Slice) -> Any:
            body = jax.shard_map(
                lambda x: x + jax.lax.psum(x.sum(), "x"),
                mesh=on.mesh,
                in_specs=P("x"),
                out_specs=P("x"),
            )
            return pw.jit(body, on=on, in_shardings=P("x"), out_shardings=P("x"))

        left, right, both = (summed(on) for on in (*whole, wide))
        local = pw.jit(lambda x: pw.emulated(3)(x * 2), on=part)

        @pw.program
        def across(x: Any) -> Any:
            return right(left(x))

        @pw.program
        def back(x: Any) -> Any:
            return both(local(right(x)))

        def total(x: Any) -> Any:
            return x + x.sum()

        self._made = [
            (left, total),
            (right, total),
            (both, total),
            (local, lambda x: 2 * x),
            (across, lambda x: total(total(x))),
            (back, lambda x: total(2 * total(x))),
        ]
        self._slices = [*whole, part, wide]
        return self._made

    def burst(self) -> None:
        """A few runs in flight, some on the results of others."""
        flying: list[tuple[Any, Any]] = []
        try:
            made = self.programs()
            for _ in range(self.random.randint(1, 6)):
                f, expected = self.random.choice(made)
                if flying and self.random.random() < 0.4:
                    handle, value = self.random.choice(flying)
                    value = value % 8
                    flying.append((f(handle % 8), expected(value)))
                else:
                    x = V % self.random.randint(2, 9)
                    flying.append((f(x), expected(x)))
        except pw.PathwaysError as error:
            self.fail(error)
        for handle, value in flying:
            start = time.monotonic()
            try:
                found = handle.result(timeout=PATIENCE)
                if np.array_equal(found, value):
                    self.results += 1
                else:
                    self.wrong.append(f"{found} instead of {value}"[:300])
            except pw.PathwaysError as error:
                self.fail(error)
            except TimeoutError:
                self.wrong.append(f"hung: {self.lab.stuck(1.0)}"[:600])
            self.longest = max(self.longest, time.monotonic() - start)
        if self._failing:
            self._begin_again()

    def fail(self, error: pw.PathwaysError) -> None:
        """Whose fault was it?"""
        self._failing = True
        text = str(error)
        hosts = [f"island{i}/host{h}" for i in range(2) for h in range(2)]
        named = any(host in text for host in hosts) or "island" in text
        self.failed[error.failure.kind if named else f"unexplained: {text[:300]}"] += 1
        self.last[error.failure.kind] = text[:400]

    def _begin_again(self) -> None:
        """With slices that are there; nothing is under way on the old ones."""
        self._failing = False
        made, self._made = self._made, []
        if made:
            for on in self._slices:
                on.release()
        time.sleep(0.2)


def main() -> None:
    """See the module's docstring."""
    file, name, seed = sys.argv[1:]
    ended = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), ended.set()), daemon=True).start()
    lab = pw.connect(file, name=name)
    worker = Worker(lab, int(seed))
    told = 0.0
    while not ended.is_set():
        worker.burst()
        # Load, and not all that the machine can bear: others compute there too.
        time.sleep(worker.random.uniform(0.0, 0.1))
        if time.monotonic() > told + 0.2:
            told = time.monotonic()
            say(worker)
    say(worker)
    lab.close()


def say(worker: Worker) -> None:
    """What was seen so far."""
    seen = {
        "results": worker.results,
        "failed": dict(worker.failed),
        "last": worker.last,
        "wrong": worker.wrong,
        "longest": worker.longest,
    }
    print(json.dumps(seen), flush=True)


if __name__ == "__main__":
    main()
