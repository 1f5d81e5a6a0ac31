"""The paper's Figure 2: right numbers, one message captured, four without."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

import pathways_lab as pw
from tests.client.kit import FakeLab


def test_figure_two_captured_and_not(fake: FakeLab) -> None:
    a, b, c = (
        pw.pmap(f, devices=fake.slice(2).tpus)
        for f in (lambda x: x * 2.0, lambda x: x + 1.0, lambda x: x / 2.0)
    )

    def f(v: Any) -> Any:
        x = a(v)
        y = b(x)
        z = a(c(x))
        return y, z

    captured = pw.program(f)
    v = np.array([1.0, 2.0])
    for function, messages in ((captured, 1), (f, 4)):
        before = fake.count("submit")
        y, z = jax.device_get(function(v))
        np.testing.assert_array_equal(y, [3.0, 5.0])
        np.testing.assert_array_equal(z, [2.0, 4.0])
        assert fake.count("submit") - before == messages
    assert fake.count("function") == 3
    assert captured.last is not None
    assert len([s for s in captured.last.prepared.plan.steps if hasattr(s.node, "function")]) == 4
