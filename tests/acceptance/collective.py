"""A collective whose result is known, and what tests of lost hosts look at."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

import pathways_lab as pw

SECONDS = 60.0
V = np.arange(8, dtype=np.float32)


def total(on: pw.Slice) -> Any:
    """A compiled function: every element becomes the sum of all, by a collective."""

    def body(block: jax.Array) -> Any:
        return block * 0 + jax.lax.psum(block.sum(), "x")

    summed = jax.shard_map(body, mesh=on.mesh, in_specs=P("x"), out_specs=P("x"))
    return pw.jit(summed, on=on, in_shardings=P("x"), out_shardings=P("x"))


def right(handle: Any, values: Any = V) -> None:
    """The sum of *values* is in every element."""
    np.testing.assert_array_equal(handle.result(timeout=SECONDS), np.full_like(V, values.sum()))


def pids(lab: pw.Lab) -> dict[str, int]:
    """Process ids of the device processes, by host."""
    return {host.name: host.pid for island in lab.islands for host in island.hosts}
