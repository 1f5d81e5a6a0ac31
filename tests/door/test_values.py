"""Arrays taken apart and put together: only written down, and read where they are."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from pathways_lab.client.code.tiles import whole
from pathways_lab.client.functions.array_types import ArrayType
from pathways_lab.core.program.layout import Layout
from pathways_lab.door.protocol.status import Status
from pathways_lab.door.shardings import Placing
from pathways_lab.door.values import Failed, Joined, Sent, Value, Whole, joined, rearranged, shards

KIND = ArrayType((4, 2), "int32")
DATA = np.arange(8, dtype=np.int32).reshape(4, 2)
CUT = Placing((4, 5, 6, 7), Layout((("a0", 2), ("a1", 2)), (("a1",), ())))
"""Two parts, each on two devices."""


class Handle:
    """A value of a lab; it counts how often it was fetched."""

    fetched = 0

    async def _awaited(self) -> np.ndarray[Any, Any]:
        self.fetched += 1
        return DATA


class Nowhere:
    """Nothing is made on the lab."""

    def slice_of(self, devices: tuple[int, ...]) -> Any:
        raise AssertionError(devices)


def array() -> tuple[Whole, Handle]:
    handle: Any = Handle()
    return Whole(KIND, CUT, handle), handle


def test_few_elements_go_with_their_first_call_and_lie_on_the_lab_for_the_next():
    made = []
    value = Sent(KIND, CUT, DATA, lambda data: made.append(data) or Handle())
    assert np.array_equal(asyncio.run(value.read()), DATA)
    assert value.argument() is DATA
    assert made == []
    assert value.argument() is value.argument() is value.handle()
    assert len(made) == 1


def test_all_shards_of_an_array_make_that_array():
    value, _ = array()
    parts = shards(value, Nowhere())
    assert [part.placing.devices for part in parts] == [(4,), (5,), (6,), (7,)]
    assert [part.kind.shape for part in parts] == [(2, 2)] * 4
    assert joined(KIND, CUT, parts, Nowhere()) is value


def test_shards_are_read_from_one_fetch():
    value, handle = array()

    async def read() -> list[np.ndarray[Any, Any]]:
        return list(await asyncio.gather(*(s.read() for s in shards(value, Nowhere()))))

    found = asyncio.run(read())
    assert handle.fetched == 1
    for part, wanted in zip(found, (DATA[:2], DATA[2:], DATA[:2], DATA[2:]), strict=True):
        assert np.array_equal(part, wanted)


def test_shards_in_another_order_make_another_array():
    value, _ = array()
    first, second, third, fourth = shards(value, Nowhere())
    other = joined(KIND, CUT, [second, first, fourth, third], Nowhere())
    assert isinstance(other, Joined)
    assert np.array_equal(asyncio.run(other.read()), np.roll(DATA, 4))
    assert shards(other, Nowhere()) == [second, first, fourth, third]


def test_nothing_overwrites_an_array_that_others_are_made_of():
    value, _ = array()
    assert value.given_up
    shards(value, Nowhere())
    assert not value.given_up


def test_shards_for_devices_in_another_order_belong_where_they_were():
    value, _ = array()
    first, second, third, fourth = shards(value, Nowhere())
    other = joined(KIND, CUT, [third, second, first, fourth], Nowhere())
    said = Placing((5, 4, 6, 7), Layout((("a0", 2), ("a1", 2)), (("a0",), ())))
    for of in (value, other):
        made = rearranged(of, [1, 0, 2, 3], said, Nowhere())
        assert set(zip(made.placing.devices, made.placing.boxes(KIND), strict=True)) == {
            (5, second.box), (4, first.box), (6, third.box), (7, fourth.box),
        }  # fmt: skip
        assert made.placing.boxes(KIND) != said.boxes(KIND)
        assert np.array_equal(*asyncio.run(both(made, of)))


async def both(*each: Value) -> list[np.ndarray[Any, Any]]:
    return [await value.read() for value in each]


def test_a_failed_part_fails_the_whole_and_all_its_parts():
    why = Status(13, "it broke")
    value, _ = array()
    *others, _ = shards(value, Nowhere())
    last = Failed(ArrayType((2, 2), "int32"), Placing((7,), whole(1, 2)), why)
    made = joined(KIND, CUT, [*others, last], Nowhere())
    for each in (made, *shards(made, Nowhere())):
        with pytest.raises(Status, match="it broke"):
            asyncio.run(each.read())
        with pytest.raises(Status, match="it broke"):
            each.handle()
