"""What hosts take over data links: read as what it is, or refused with a ValueError."""

from __future__ import annotations

import dataclasses
import math
import random
from typing import Any

import jax.numpy as jnp
import pytest

from pathways_lab.core.errors import Failure
from pathways_lab.core.program.array_types import ELEMENT_BYTES
from pathways_lab.core.program.layout import Layout
from pathways_lab.runtime import arrays
from pathways_lab.runtime.data_messages import Ask, Part, Parts, Put, distinct, upload_fields
from pathways_lab.transport.codec import pack_fields, unpack_fields
from tests.runtime.mutate import STRANGE, Mutator

MESSAGES: tuple[Any, ...] = (
    Put(1 << 32 | 7, 1 << 32, (4, 2), "float32", Layout((("x", 2),), (("x",), ())), (0, 1), 3),
    Ask(5, 1 << 32 | 7, (0, 1), b"ticket", 1 << 32, 3),
    Parts(1 << 32 | 9, 2, (Part(1, ((0, 4), (2, 4))), Part(3, ((0, 4),), (1, 2))), 1.5),
    Parts(1 << 32 | 9, 2, failure=Failure("execute", "it failed")),
)


def test_types_are_those_of_jax() -> None:
    """Every numeric type of JAX's and every random key, with the bytes that they take here."""
    named = {
        jnp.dtype(kind).name
        for kind in vars(jnp).values()
        if isinstance(kind, type(jnp.float32)) and jnp.dtype(kind).name != "object"
    }
    keys = set(arrays._key_types())
    assert named | keys == ELEMENT_BYTES.keys()
    for name, size in ELEMENT_BYTES.items():
        assert arrays.element_of(name).itemsize == size


@pytest.mark.parametrize("message", MESSAGES)
def test_what_is_packed_is_read(message: Any) -> None:
    assert unpack_fields(type(message), pack_fields(message)) == message


def test_the_fields_of_an_upload_are_those_of_its_message() -> None:
    put = MESSAGES[0]
    fields = upload_fields(put.buffer, put.slice, put.shape, put.dtype, put.layout)
    assert unpack_fields(Put, {**fields, "devices": [0, 1], "generation": 3}) == put


def test_devices_that_have_the_same_shard_share_its_bytes() -> None:
    boxes = [((0, 2),), ((2, 4),), ((0, 2),)]
    own, sources = distinct(boxes)
    assert (own, sources) == (boxes[:2], (0, 1, 0))
    assert distinct(boxes[:2]) == (boxes[:2], ())
    put = dataclasses.replace(MESSAGES[0], devices=(4, 5, 6), sources=sources)
    assert put.parts(["a", "b"]) == {4: "a", 5: "b", 6: "a"}
    for buffers in ([], ["a"], ["a", "b", "c"]):
        with pytest.raises(ValueError, match="buffers are not the sources"):
            put.parts(buffers)
    with pytest.raises(ValueError, match="2 devices have 3 sources"):
        dataclasses.replace(put, devices=(4, 5))


@pytest.mark.parametrize("message", MESSAGES)
@pytest.mark.parametrize("strange", [math.inf, -math.inf, math.nan, -1, 1 << 63, True, None, "1"])
def test_no_number_is_infinite_negative_huge_or_something_else(message: Any, strange: Any) -> None:
    fields = pack_fields(message)
    numbers = [name for name, value in fields.items() if type(value) is int]
    lists = [name for name, value in fields.items() if isinstance(value, list) and value]
    assert numbers
    for name in numbers:
        with pytest.raises(ValueError, match=name):
            unpack_fields(type(message), {**fields, name: strange})
    for name in lists:
        with pytest.raises(ValueError):
            unpack_fields(type(message), {**fields, name: [strange]})


@pytest.mark.parametrize(
    "wrong",
    [
        {"dtype": "f4,("},
        {"dtype": "object"},
        {"layout": [[["x", 0]], [["x"], []]]},
        {"layout": [[["x", 1 << 62]], [[], []]]},
        {"shape": [1 << 62, 2]},
        {"devices": [0, 0]},
        {"devices": [1 << 62]},
    ],
)
def test_no_upload_is_of_what_is_no_array(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        unpack_fields(Put, {**pack_fields(MESSAGES[0]), **wrong})


def test_a_ticket_is_bytes_and_no_size() -> None:
    fields = pack_fields(MESSAGES[1])
    for ticket in (1 << 40, -1, 1 << 62, [1], "ticket", 1.0):
        with pytest.raises(ValueError, match="ticket"):
            unpack_fields(Ask, {**fields, "ticket": ticket})


@pytest.mark.parametrize("message", MESSAGES)
def test_whatever_comes_is_read_or_refused(message: Any) -> None:
    mutator = Mutator(random.Random(0), STRANGE)
    fields, read_well = pack_fields(message), 0
    for _ in range(2000):
        try:
            found = unpack_fields(type(message), mutator.fields(fields))
        except ValueError:
            continue
        read_well += 1
        # What was read can be written, and is then the same.
        assert unpack_fields(type(message), pack_fields(dataclasses.replace(found))) == found
    assert 20 < read_well < 1500
