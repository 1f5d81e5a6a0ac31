"""Dataclasses travel as plain data and come back equal; nothing else comes back."""

from __future__ import annotations

import typing

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pathways_lab.core import messages as m
from pathways_lab.core.errors import Failure
from pathways_lab.core.layout import Layout
from pathways_lab.core.program import Call, Line, Plan, Step, Transfer, Value
from pathways_lab.core.topology import SliceRequest
from pathways_lab.runtime.codec import CodecError, pack, pack_fields, unpack, unpack_fields
from pathways_lab.timeline.records import Record, Span

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


@settings(deadline=None)
@given(st.data())
def test_every_event_and_command_survives(data: st.DataObject) -> None:
    union = data.draw(st.sampled_from([m.Event, m.Command]))
    classes = [c for c in typing.get_args(union) if c not in ENDS]
    cls = data.draw(st.sampled_from(classes))
    value = data.draw(st.from_type(cls).filter(lambda v: "nan" not in repr(v)))
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
        (SliceRequest, ["SliceRequest", ["2"], ["x"], None, None, 0, []], "SliceRequest.shape"),
        (SliceRequest, ["SliceRequest", [2], ["x"], None, None, 0], "has 6 fields"),
        (SliceRequest, ["Failure"], "got a 'Failure'"),
        (SliceRequest, "hello", "expected one of"),
        (
            SliceRequest,
            ["SliceRequest", [True], ["x"], None, None, 0, []],
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
