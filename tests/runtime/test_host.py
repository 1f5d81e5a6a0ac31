"""A real device process, driven over real links by a control plane that the test plays."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from tests.runtime.fake_control import Lab, Program, spans
from tests.runtime.host_kit import HOST, binding, code, layout

pytestmark = pytest.mark.cluster


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    made = Lab()
    yield made
    made.close()


def test_compile_grant_launch_fetch(lab: Lab) -> None:
    """The thin path: one slice, one function, one run, its value and its records."""
    on = lab.bind(binding(1, (2, 2), [0, 1, 2, 3]))
    cut = layout(on, "a", "b")
    kind = ((4, 6), "float32")
    double = code(lambda x: (x * 2,), on, [(kind, cut)], [(kind, cut)], name="double")
    lab.prepare(double)
    program = Program("thin").value("x", 1, *kind, cut).call(double, ["x"], ["y"])
    plan = lab.program(program.plan(["x"], ["y"]))
    data = np.arange(24, dtype=np.float32).reshape(4, 6)
    lab.grant(11, plan, [data], [110])
    assert np.array_equal(lab.fetch(110, program["y"]), data * 2)
    lab.run_over(11, plan)
    assert lab.failed == {}
    (gang,) = spans(lab.records, "gang")
    assert (gang.host, gang.devices, gang.run, gang.node) == (HOST, (0, 1, 2, 3), 11, "double")
    assert gang.line == "cell.py:3: y = f(x)"
    assert gang.start < gang.end
    (compiled,) = spans(lab.records, "compile")
    assert compiled.end < gang.start
    assert any(
        r.kind == "launched" for r in lab.records if hasattr(r, "time") and hasattr(r, "kind")
    )
