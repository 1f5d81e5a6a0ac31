"""Experts on real hosts: gangs and bytes are those of the rows, forward and backward."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pathways_lab as pw
from pathways_lab.timeline.records import Event, Span
from tests.runtime.processes import until

pytestmark = pytest.mark.cluster

ROWS, WIDTH, CUT = 64, 16, 20
SIZES = (8, 16, 32, 64)
ROW = 4 * WIDTH
LOADS = {
    "even": np.arange(ROWS) % 4,
    "skewed": np.repeat([0, 2], [ROWS - 5, 5]),
    "one": np.full(ROWS, 3),
}


def spans(lab: pw.Lab, since: int) -> list[Span]:
    return [r for r in lab.timeline.records[since:] if isinstance(r, Span)]


def sent(lab: pw.Lab, since: int) -> list[int]:
    """Bytes of rows that hosts have sent, by size."""
    found = [s.args.get("nbytes", 0) for s in spans(lab, since) if s.kind == "send"]
    return sorted(nbytes for nbytes in found if nbytes >= ROW)


@pytest.mark.parametrize("load", LOADS)
def test_only_experts_with_rows_compute_and_only_rows_travel(lab: pw.Lab, load: str) -> None:
    """Rows are on two slices; each sends its own."""
    homes = [lab.slice(1, island="island0") for _ in range(2)]
    places = [lab.slice(1, island="island1") for _ in range(4)]
    moe = pw.experts(expert, on=places, sizes=SIZES, route=lambda x, choice: (choice, x[:, :1]))
    rng = np.random.default_rng(0)
    weights = [rng.normal(size=(WIDTH, WIDTH)).astype(np.float32) for _ in places]
    there = [pw.device_put(w, place) for w, place in zip(weights, places, strict=True)]
    x = rng.normal(size=(ROWS, WIDTH)).astype(np.float32)
    choices = [own.astype(np.int32)[:, None] for own in np.split(LOADS[load], [CUT])]
    rows, chosen = pw.device_put((np.split(x, [CUT]), choices), (homes, homes))
    try:
        counts = [count for own in choices for count in np.bincount(own.ravel()) if count]
        there_and_back = sorted(ROW * count for count in counts for _ in range(2))
        for _ in range(2):  # the first time it compiles
            since = len(lab.timeline.records)
            found = jax.device_get(moe(there, rows, chosen))
            until(lambda since=since: sent(lab, since) == there_and_back, 10)
        expected = [x[n, 0] * expert(weights[LOADS[load][n]], x[n]) for n in range(ROWS)]
        np.testing.assert_allclose(np.concatenate(found), expected, rtol=1e-4, atol=1e-5)
        told = {
            record.args["expert"]: record.args["rows"]
            for record in lab.timeline.records[since:]
            if isinstance(record, Event) and record.kind == "rows"
        }
        assert [told[n] for n in range(4)] == np.bincount(LOADS[load], minlength=4).tolist()
        gangs = [s for s in spans(lab, since) if s.kind == "gang" and s.node == "expert"]
        assert len(gangs) == len(set(LOADS[load]))
    finally:
        for place in (*homes, *places):
            place.release()


def expert(w: Any, rows: Any) -> Any:
    return jnp.tanh(rows @ w)
