"""The quickstart's training step, as tests and their client processes run it."""

from __future__ import annotations

from functools import reduce
from typing import Any

import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

import pathways_lab as pw
from pathways_lab.workloads import digits

MICROBATCHES, RATE, BATCH = 4, 0.1, 256


def pipeline(left: pw.Slice, right: pw.Slice, rows: P) -> Any:
    """The training step of the quickstart as one program over two slices."""
    whole = P()
    forward = pw.jit(digits.forward, on=left, in_shardings=(whole, rows), out_shardings=rows)
    head = pw.jit(
        digits.head, on=right, in_shardings=(whole, rows, rows), out_shardings=(whole, whole, rows)
    )
    backward = pw.jit(
        digits.backward, on=left, in_shardings=(whole, rows, rows), out_shardings=whole
    )

    @pw.program
    def train_step(stage1: Any, stage2: Any, batch: digits.Batch) -> Any:
        parts = batch.split(MICROBATCHES)
        hs = [forward(stage1, part.images) for part in parts]
        heads = [head(stage2, h, part.labels) for h, part in zip(hs, parts, strict=True)]
        backs = [
            backward(stage1, part.images, of_h)
            for part, (_, _, of_h) in zip(parts, heads, strict=True)
        ]
        of_stage1 = reduce(digits.add, backs)
        of_stage2 = reduce(digits.add, [g for _, g, _ in heads])
        return (
            digits.update(stage1, of_stage1, RATE, MICROBATCHES),
            digits.update(stage2, of_stage2, RATE, MICROBATCHES),
            jnp.mean(jnp.stack([loss for loss, _, _ in heads])),
        )

    return train_step
