"""A value on a device decides on a real lab: what is not taken is neither computed nor sent."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import pathways_lab as pw
from pathways_lab.timeline.records import Event, Span
from tests.runtime.processes import until

pytestmark = pytest.mark.cluster


def of_runs(lab: pw.Lab, name: str) -> list[list[str]]:
    """For each run of a program, in order, what devices did: names of calls, or "transfer"."""
    records = lab.timeline.records
    submitted = [r for r in records if isinstance(r, Event) and r.kind == "submitted"]
    runs = [r.run for r in submitted if r.program == name]
    return [
        [r.node if r.kind == "gang" else r.kind for r in records
         if isinstance(r, Span) and r.kind in ("gang", "transfer") and r.run == run]
        for run in runs
    ]  # fmt: skip


def test_a_branch_that_is_not_taken_computes_and_sends_nothing(lab: pw.Lab) -> None:
    with lab.slice(2, island="island0") as here, lab.slice(2, island="island1") as there:
        double = pw.jit(lambda x: x * 2, on=here, name="double")
        less = pw.jit(lambda x: x - 3, on=there, name="less")

        @pw.program
        def choose(x: Any) -> Any:
            x = double(x)
            return pw.cond(x.sum() > 0, double, lambda v: double(less(v)), x)

        for value, expected in ((1.0, 4.0), (-1.0, -10.0)):
            assert choose(np.full(4, value, np.float32)).result(timeout=60)[0] == expected
        # Each host tells in order, so what it did in the first run is known then too.
        until(
            lambda: (
                [{"double", "less", "transfer"} <= set(r) for r in of_runs(lab, "choose")][1:]
                == [True]
            )
        )
        first, _ = of_runs(lab, "choose")
        assert "double" in first
        assert not {"less", "transfer"} & set(first)


def test_a_loop_over_islands_is_one_run(lab: pw.Lab) -> None:
    """A hundred turns, decided between hosts and control plane; the client submits once."""
    with lab.slice(2, island="island0") as here, lab.slice(2, island="island1") as there:
        one = pw.jit(lambda x: x + 1, on=here, name="one")
        more = pw.jit(lambda x: x + 2, on=there, name="more")

        @pw.program
        def loop(x: Any) -> Any:
            return pw.until(lambda v: v[0] >= 300, lambda v: more(one(v)), x, at_most=120)

        assert loop(np.zeros(4, np.float32)).result(timeout=60)[0] == 300.0
        until(
            lambda: (
                [r.count("one") == r.count("more") == 100 for r in of_runs(lab, "loop")] == [True]
            )
        )
