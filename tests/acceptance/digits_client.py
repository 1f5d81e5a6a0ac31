"""The quickstart's program as a client process: ``... digits_client.py LABFILE NAME EPOCHS``.

It trains over two islands, waits for a line before it begins, and prints one line of JSON.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import numpy as np
import psutil
from jax.sharding import PartitionSpec as P

import pathways_lab as pw
from pathways_lab.workloads import digits
from tests.acceptance.training import BATCH, pipeline


def train(lab: pw.Lab, epochs: int) -> dict[str, Any]:
    """The losses, and the seconds of the first and of the later steps."""
    left, right = (lab.slice((4,), axes=("data",), island=name) for name in ("island0", "island1"))
    step = pipeline(left, right, P("data"))
    data = digits.load()
    stage1, stage2 = digits.init()
    losses, seconds = [], []
    for _ in range(epochs):
        for start in range(0, len(data.images), BATCH):
            images, labels = data.images[start : start + BATCH], data.labels[start : start + BATCH]
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
