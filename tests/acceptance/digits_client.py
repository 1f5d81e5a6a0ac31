"""The quickstart's program as a client process: ``... digits_client.py LABFILE NAME EPOCHS``.

It trains over two islands, waits for a line before it begins, and prints one line of JSON.
"""

from __future__ import annotations

import json
import sys
import time
from functools import reduce
from typing import Any

import numpy as np
import psutil
from jax.sharding import PartitionSpec as P

import pathways_lab as pw
from pathways_lab.workloads import digits

MICROBATCHES, RATE, SIZE = 4, 0.1, 256


def train(lab: pw.Lab, epochs: int) -> dict[str, Any]:
    """The losses, and the seconds of the first and of the later steps."""
    rows, whole = P("data"), P()
    left, right = (lab.slice((4,), axes=("data",), island=name) for name in ("island0", "island1"))
    forward = pw.jit(digits.forward, on=left, in_shardings=(whole, rows), out_shardings=rows)
    head = pw.jit(
        digits.head, on=right, in_shardings=(whole, rows, rows), out_shardings=(whole, whole, rows)
    )
    backward = pw.jit(
        digits.backward, on=left, in_shardings=(whole, rows, rows), out_shardings=whole
    )

    @pw.program
    def step(stage1: Any, stage2: Any, batch: Any) -> Any:
        parts = batch.split(MICROBATCHES)
        hs = [forward(stage1, part.images) for part in parts]
        heads = [head(stage2, h, part.labels) for h, part in zip(hs, parts, strict=True)]
        backs = [
            backward(stage1, part.images, of_h)
            for part, (_, _, of_h) in zip(parts, heads, strict=True)
        ]
        mean = sum(loss for loss, _, _ in heads) / MICROBATCHES
        of_stage2 = reduce(digits.add, [g for _, g, _ in heads])
        return (
            digits.update(stage1, reduce(digits.add, backs), RATE, MICROBATCHES),
            digits.update(stage2, of_stage2, RATE, MICROBATCHES),
            mean,
        )

    data = digits.load()
    stage1, stage2 = digits.init()
    losses, seconds = [], []
    for _ in range(epochs):
        for start in range(0, len(data.images), SIZE):
            images, labels = data.images[start : start + SIZE], data.labels[start : start + SIZE]
            begun = time.monotonic()
            stage1, stage2, mean = step(stage1, stage2, digits.Batch(images, labels))
            losses.append(float(mean))
            seconds.append(time.monotonic() - begun)
    return {"losses": losses, "first": seconds[0], "steps": seconds[1:]}


def main() -> None:
    """See the module's docstring."""
    file, name, epochs = sys.argv[1], sys.argv[2], int(sys.argv[3])
    begun = time.monotonic()
    with pw.connect(file, name=name) as lab:
        connected = time.monotonic() - begun
        print("there", flush=True)
        sys.stdin.readline()
        found = train(lab, epochs)
    found["steps"] = [float(np.median(found["steps"])), max(found["steps"])]
    memory = psutil.Process().memory_full_info()
    print(json.dumps({**found, "connected": connected, "uss": memory.uss}), flush=True)


if __name__ == "__main__":
    main()
