"""A plan is refused for whatever would fail on its hosts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pathways_lab.core.program.layout import Layout
from pathways_lab.core.program.program import Call, Line, Plan, Step, Transfer, Value
from pathways_lab.core.program.wellformed import Types, check_values

LAYOUT = Layout((("x", 2),), (("x",),))
WHOLE = Layout((("x", 2),), ((),))
VALUES = (
    Value((4,), "float32", 1, LAYOUT, 8, "a"),
    Value((4,), "float32", 1, LAYOUT, 8, "b"),
    Value((4,), "float32", 2, WHOLE, 16, "c"),
)
STEPS = (
    Step(Call("f", 1, (0,), (1,), name="f", line=Line("a.py", 3, "f(x)"))),
    Step(Transfer(1, 2)),
)
PLAN = Plan("key", "p", VALUES, STEPS, (0,), (2,), (1, 2))
DEVICES = {1: 2, 2: 2}
LEAF = ((4,), "float32", LAYOUT)
FUNCTIONS = {("f", 1): Types((LEAF,), (LEAF,))}


def why(plan: Plan) -> str:
    failure = check_values(plan, DEVICES, FUNCTIONS)
    return "" if failure is None else failure.message


def test_a_plan_of_arrays_is_well_formed() -> None:
    assert why(PLAN) == ""
    assert check_values(PLAN, {}, {}) is None, "a slice that is not bound, a function not announced"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"dtype": "float33"}, "'float33' is not a type"),
        ({"dtype": "f4,(2,3)"}, "is not a type"),
        ({"shape": (-4,)}, "-4"),
        ({"shape": (5,)}, "cannot be cut"),
        ({"shape": (1 << 62,), "nbytes": 1 << 63}, "a dimension of 46"),
        ({"shape": ()}, "dimensions"),
        ({"nbytes": 7}, "8 bytes, and not 7"),
        ({"nbytes": -8}, "8 bytes, and not -8"),
        ({"layout": Layout((("x", 0),), (("x",),))}, "a mesh of"),
        ({"layout": Layout((("x", -2),), (("x",),))}, "a mesh of"),
        ({"layout": Layout((("x", 1 << 40),), ((),))}, "a mesh of"),
        ({"layout": Layout((("x", 4),), ((),)), "nbytes": 16}, "is not the slice's"),
        ({"layout": Layout((("x", 2),), (("y",),))}, "an axis"),
        ({"layout": None}, "without a layout"),
    ],
)
def test_a_value_that_is_no_array_is_refused(change: dict[str, Any], says: str) -> None:
    assert says in why(replace(PLAN, values=(replace(VALUES[0], **change), *VALUES[1:])))


def test_a_function_that_takes_other_arrays_is_refused_at_its_line() -> None:
    values = [replace(v, dtype="int32") for v in VALUES]
    failure = check_values(replace(PLAN, values=tuple(values)), DEVICES, FUNCTIONS)
    assert failure is not None
    assert "other arguments" in failure.message
    assert failure.line.number == 3
    fewer = replace(PLAN, steps=(Step(Call("f", 1, (0, 0), (1,), name="f")), STEPS[1]))
    assert "other arguments" in why(fewer)


def test_a_transfer_that_changes_the_type_is_refused() -> None:
    values = (*VALUES[:2], replace(VALUES[2], dtype="int32"))
    assert "changes the shape or type" in why(replace(PLAN, values=values))
