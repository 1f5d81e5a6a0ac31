"""Shardings of the protocol and layouts say the same, and one thing in one way."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec
from jaxlib import xla_client

from pathways_lab.core.program.layout import Layout, boxes
from pathways_lab.door.messages import message
from pathways_lab.door.shardings import (
    Inexpressible,
    Placing,
    canonical,
    layout_of,
    layout_of_tiles,
    op_sharding,
    placing_of,
    sharding_proto,
    whole,
)

ENTRIES = (None, "x", "y", "z", ("x", "y"), ("y", "x"), ("x", "z"), ("z", "x", "y"))


def names(entry: object) -> tuple[str, ...]:
    return () if entry is None else entry if isinstance(entry, tuple) else (entry,)


SPECS = [
    spec
    for spec in itertools.product(ENTRIES, repeat=2)
    if len({n for e in spec for n in names(e)}) == sum(len(names(e)) for e in spec)
]


def hlo(spec: tuple[object, ...]) -> xla_client.HloSharding:
    mesh = AbstractMesh((2, 3, 2), ("x", "y", "z"))
    return NamedSharding(mesh, PartitionSpec(*spec))._to_xla_hlo_sharding(2)


@pytest.mark.parametrize("spec", SPECS)
def test_a_sharding_comes_back_as_it_was(spec):
    given = message("OpSharding").FromString(hlo(spec).to_proto().SerializeToString())
    layout = layout_of(given, 12, 2)
    back = xla_client.OpSharding()
    back.ParseFromString(op_sharding(layout).SerializeToString())
    assert xla_client.HloSharding.from_proto(back) == hlo(spec)
    assert canonical(layout) == layout
    named = Layout((("x", 2), ("y", 3), ("z", 2)), tuple(map(names, spec)))
    assert canonical(named) == layout
    assert boxes(named, (12, 12)) == boxes(layout, (12, 12))


@pytest.mark.parametrize("tiles", [[0, 1, 3, 2], [3, 2, 1, 0], [1, 2, 3, 0]])
def test_devices_in_no_order_are_refused(tiles):
    with pytest.raises(Inexpressible):
        layout_of_tiles(np.array(tiles), 4, 1)


def test_manual_shardings_are_refused():
    op = message("OpSharding")(type=4)
    with pytest.raises(Inexpressible, match="type 4"):
        layout_of(op, 4, 1)


@pytest.mark.parametrize(
    "placing",
    [
        Placing((3,), whole(1, 2)),
        Placing((4, 5, 6, 7), whole(4, 2)),
        Placing((0, 1, 2, 3), Layout((("a0", 2), ("a1", 2)), (("a1",), ()))),
    ],
)
def test_a_placing_comes_back_as_it_was(placing):
    assert placing_of(sharding_proto(placing), 2) == placing


def test_memory_of_the_host_is_refused_by_name():
    made = sharding_proto(Placing((3,), whole(1, 2)))
    single = message("SingleDeviceShardingProto")(device_id=3, memory_kind="pinned_host")
    made.serialized_sharding.data = single.SerializeToString()
    with pytest.raises(Inexpressible, match="pinned_host"):
        placing_of(made, 2)
