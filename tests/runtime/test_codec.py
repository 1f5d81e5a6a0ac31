"""Dataclasses travel as plain data and come back equal; nothing else comes back."""

from __future__ import annotations

import dataclasses
import math
import re
import typing
from typing import Annotated, Literal

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pathways_lab.core import messages as m
from pathways_lab.core.diagnosis.stall_story import Stuck
from pathways_lab.core.errors import Failure
from pathways_lab.core.program.layout import Layout
from pathways_lab.core.program.program import Call, Line, Plan, Step, Transfer, Value
from pathways_lab.core.scheduling.policies import Candidate
from pathways_lab.core.slices.topology import SliceRequest
from pathways_lab.timeline.records import Record, Span
from pathways_lab.transport.codec import (
    PACKED,
    CodecError,
    Within,
    pack,
    pack_fields,
    unpack,
    unpack_fields,
)

LAYOUT = Layout((("x", 2),), (("x",), ()))
PLAN = Plan(
    key="k",
    name="p",
    values=(Value((4, 2), "float32", 3, LAYOUT, 16), Value((), "bfloat16", None, None, 2)),
    steps=(
        Step(Call("f", 3, (0,), (1,), (0,), "n", Line("a.py", 3, "f(x)")), (0,)),
        Step(Transfer(0, 1)),
    ),
    inputs=(0,),
    outputs=(1,),
    slices=(3,),
)


def over_the_wire(value: object) -> object:
    return msgpack.unpackb(msgpack.packb(pack(value)))


def test_a_plan_survives_with_its_unions_and_nones() -> None:
    assert unpack(Plan, over_the_wire(PLAN)) == PLAN


def test_a_union_is_told_apart_by_class_name() -> None:
    span = Span("gang", 1.0, 2.0, "i", "h", (0, 1), args={"seq": 3, "name": "x"})
    assert unpack(Record, over_the_wire(span)) == span


ENDS = (m.PolicyChosen, m.PolicySet)
"""Made and read at the rim: they hold objects."""


DATA = st.lists(st.tuples(st.text(), st.none() | st.booleans() | st.text())).map(tuple)
STORIES = st.builds(
    Stuck, st.sampled_from(["none", "deadlock", "silent"]), arrows=st.just(())
)  # others check themselves

PLANS = st.builds(
    Plan,
    values=st.lists(st.from_type(Value)).map(tuple),
    steps=st.lists(st.from_type(Step)).map(tuple),
)
"""Their sequences may be of any kind, and are tuples when they arrive."""


@settings(deadline=None)
@given(st.data())
def test_every_event_and_command_survives(data: st.DataObject) -> None:
    union = data.draw(st.sampled_from([m.Event, m.Command]))
    classes = [c for c in typing.get_args(union) if c not in ENDS]
    cls = data.draw(st.sampled_from(classes))
    st.register_type_strategy(Stuck, STORIES)
    st.register_type_strategy(Plan, PLANS)
    st.register_type_strategy(m.RunSubmitted, st.builds(m.RunSubmitted, data=DATA))
    st.register_type_strategy(Candidate, st.builds(Candidate, data=DATA.map(dict)))
    value = data.draw(
        st.from_type(cls).filter(
            lambda v: not {"nan", "inf"} & {*re.findall(r"\b(?:nan|inf)\b", repr(pack(v)))}
        )
    )
    assert unpack(union, _listed(pack(value))) == value


def _listed(plain: object) -> object:
    """What msgpack makes of it, without its limit of 64 bits for the random integers."""
    if isinstance(plain, list | tuple):
        return [_listed(item) for item in plain]
    if isinstance(plain, dict):
        return {key: _listed(item) for key, item in plain.items()}
    return plain


@pytest.mark.parametrize(
    ("cls", "value", "says"),
    [
        (
            SliceRequest,
            ["SliceRequest", ["2"], ["x"], None, None, 0, [], None, []],
            "SliceRequest.shape",
        ),
        (SliceRequest, ["SliceRequest", [2], ["x"], None, None, 0], "has 8 fields"),
        (SliceRequest, ["Failure"], "got a 'Failure'"),
        (SliceRequest, "hello", "expected one of"),
        (
            SliceRequest,
            ["SliceRequest", [True], ["x"], None, None, 0, [], None, []],
            "expected int, got True",
        ),
        (Failure, ["Failure", *["x"] * 7, 5, "x", None], "Failure.line: Line has 3 fields"),
    ],
)
def test_ill_typed_data_is_refused_with_the_field(cls: type, value: object, says: str) -> None:
    with pytest.raises(CodecError, match=says):
        unpack(cls, value)


def test_a_message_that_is_a_dataclass_travels_as_named_fields() -> None:
    report = m.HostReport(1.0, "c", "h", failed=((7, 2, Failure("lost", "gone")),))
    fields = msgpack.unpackb(msgpack.packb(pack_fields(report)))
    assert unpack_fields(m.HostReport, {**fields, "records": []}) == report
    del fields["compiled"], fields["resident"]
    assert unpack_fields(m.HostReport, fields) == report
    with pytest.raises(CodecError, match=r"HostReport\.host is missing"):
        unpack_fields(m.HostReport, {"time": 1.0, "cause": ""})


@dataclasses.dataclass(frozen=True, slots=True)
class Bounded:
    """One of each kind of bound."""

    count: Annotated[int, Within(0, 9)] = 0
    counts: tuple[Annotated[int, Within(0, 9)], ...] = ()
    share: Annotated[float, Within(0.0, 1.0)] = 0.0
    seconds: float = 0.0
    many: tuple[float, ...] = ()
    name: Annotated[str, Within(1, 3)] = "x"
    some: Annotated[tuple[int, ...], Within(0, 2)] = ()
    kind: Literal["a", "b"] = "a"
    line: Annotated[Line, PACKED] = Line()  # noqa: RUF009
    perhaps: Annotated[int, Within(1, 2)] | None = None
    shares: tuple[Annotated[float, Within(0.0, 5.0)], ...] = ()
    pairs: tuple[tuple[Annotated[int, Within(0, 9)], str | None], ...] = ()
    by: dict[str, int] = dataclasses.field(default_factory=dict)


LONG = 40
"""More entries than are looked at one by one."""


def test_what_is_within_its_bounds_survives() -> None:
    full = Bounded(9, (0, 9), 0.5, -3.0, (1.0, 1e308, 1e308), "xyz", (1, 2), "b", Line("f", 1), 2,
                   (5.0,) * LONG, ((1, "a"), (2, None)), {"a": 1})  # fmt: skip
    assert unpack_fields(Bounded, msgpack.unpackb(msgpack.packb(pack_fields(full)))) == full
    assert unpack(Bounded, over_the_wire(full)) == full
    assert unpack_fields(Bounded, {"by": {}}) == Bounded()
    long = Bounded(counts=(9,) * LONG)
    assert unpack_fields(Bounded, pack_fields(long)) == long, "their sum has no bound"


@pytest.mark.parametrize(
    "fields",
    [
        {"count": 10}, {"count": -1}, {"count": True}, {"counts": [0, 10]}, {"counts": [0, -1]},
        {"share": 1.5}, {"share": math.nan}, {"seconds": math.inf}, {"seconds": math.nan},
        {"seconds": 10**400}, {"many": [0.0, math.nan]}, {"many": [math.inf, -math.inf]},
        {"name": ""}, {"name": "long"}, {"some": [1, 2, 3]}, {"kind": "c"}, {"kind": None},
        {"line": ["", 1, ""]}, {"line": ["Plan"]}, {"perhaps": 3}, {"perhaps": "1"},
        *({"shares": [*[0.5] * LONG, wrong]} for wrong in (math.nan, 5.5, -0.5, math.inf, None)),
        *({"shares": [wrong, *[0.5] * LONG]} for wrong in (math.nan, 5.5, -0.5, -math.inf)),
        *({"counts": [*[3] * LONG, wrong]} for wrong in (10, -1, True, 1.0, None)),
        {"many": [*[0.0] * LONG, math.nan]}, {"counts": {}}, {"counts": ""}, {"counts": None},
        {"pairs": [[1]]}, {"pairs": [[1, "a", 2]]}, {"pairs": ["ab"]}, {"pairs": [{1: 2, 3: 4}]},
        {"pairs": [[10, "a"]]}, {"pairs": [[1, 2]]}, {"by": []}, {"by": {"a": "b"}},
    ],
)  # fmt: skip
def test_what_is_out_of_bounds_is_refused_with_the_field(fields: dict[str, object]) -> None:
    (name,) = fields
    with pytest.raises(CodecError, match=f"Bounded.{name}"):
        unpack_fields(Bounded, fields)
