"""Shardings of the protocol and layouts say the same, and one thing in one way."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec
from jaxlib import xla_client

from pathways_lab.client.code.tiles import Inexpressible, canonical, layout_of_tiles, whole
from pathways_lab.client.functions.array_types import ArrayType
from pathways_lab.core.program.layout import Layout, boxes
from pathways_lab.door.protocol.messages import message
from pathways_lab.door.shardings import (
    Placing,
    op_sharding,
    placing_of,
    placing_of_op,
    reordered,
    sharding_proto,
)

ENTRIES = (None, "x", "y", "z", ("x", "y"), ("y", "x"), ("x", "z"), ("z", "x", "y"))


def names(entry: object) -> tuple[str, ...]:
    return () if entry is None else entry if isinstance(entry, tuple) else (entry,)


DEVICES = tuple(range(12, 24))
SPECS = [
    spec
    for spec in itertools.product(ENTRIES, repeat=2)
    if len({n for e in spec for n in names(e)}) == sum(len(names(e)) for e in spec)
]


MESH = AbstractMesh((2, 3, 2), ("x", "y", "z"), (AxisType.Explicit,) * 3)


def hlo(spec: tuple[object, ...], unreduced: tuple[str, ...] = ()) -> xla_client.HloSharding:
    spec = PartitionSpec(*spec, unreduced=set(unreduced))
    return NamedSharding(MESH, spec)._to_xla_hlo_sharding(2)


@pytest.mark.parametrize("spec", SPECS)
def test_a_sharding_comes_back_as_it_was(spec):
    given = message("OpSharding").FromString(hlo(spec).to_proto().SerializeToString())
    made = placing_of_op(given, DEVICES, 2)
    layout = made.layout
    assert made == Placing(DEVICES, layout)
    back = xla_client.OpSharding()
    back.ParseFromString(op_sharding(made).SerializeToString())
    assert xla_client.HloSharding.from_proto(back) == hlo(spec)
    assert canonical(layout) == layout
    named = Layout((("x", 2), ("y", 3), ("z", 2)), tuple(map(names, spec)))
    assert canonical(named) == layout
    assert boxes(named, (12, 12)) == boxes(layout, (12, 12))


SUMS = [
    (spec, axes)
    for spec in SPECS
    for count in (1, 2, 3)
    for axes in itertools.combinations("xyz", count)
    if not set(axes) & {name for entry in spec for name in names(entry)}
]


@pytest.mark.parametrize(("spec", "axes"), SUMS)
def test_an_unreduced_array_is_a_stack_that_is_cut_over_the_axes_of_the_sum(spec, axes):
    given = message("OpSharding").FromString(hlo(spec, axes).to_proto().SerializeToString())
    made = placing_of_op(given, DEVICES, 2)
    assert made.stacked
    named = Layout((("x", 2), ("y", 3), ("z", 2)), (axes, *map(names, spec)))
    kind = ArrayType((12, 12), "int32")
    assert made.stored(kind).shape == (math.prod(dict(named.mesh)[axis] for axis in axes), 12, 12)
    assert made.boxes(kind) == boxes(named, made.stored(kind).shape)
    assert not made.replicated
    back = xla_client.OpSharding()
    back.ParseFromString(op_sharding(made).SerializeToString())
    assert xla_client.HloSharding.from_proto(back) == hlo(spec, axes)
    assert placing_of(sharding_proto(made), 2) == made


@pytest.mark.parametrize("order", [(0, 1, 3, 2), (3, 2, 1, 0), (1, 2, 3, 0), (0, 2, 1, 3)])
def test_positions_in_any_order_are_those_of_reordered_devices(order):
    layout = Layout((("x", 2), ("y", 2)), (("x", "y"),))
    made = reordered((4, 5, 6, 7), layout, order)
    kind = ArrayType((8,), "int32")
    where = made.boxes(kind)
    assert [where[position] for position in order] == [(((n, n + 2)),) for n in (0, 2, 4, 6)]
    if made.order:
        assert made.on == tuple(4 + position for position in order)
    op = op_sharding(made)
    assert tuple(op.tile_assignment_devices) == order
    assert placing_of_op(op, (4, 5, 6, 7), 1) == made


@pytest.mark.parametrize("tiles", [[0, 1, 3, 2], [3, 2, 1, 0], [1, 2, 3, 0]])
def test_devices_in_no_order_are_refused(tiles):
    with pytest.raises(Inexpressible):
        layout_of_tiles(np.array(tiles), 4, 1)


def test_manual_shardings_are_refused():
    op = message("OpSharding")(type=4)
    with pytest.raises(Inexpressible, match="type 4"):
        placing_of_op(op, (0, 1, 2, 3), 1)


SIZES = st.lists(st.sampled_from((1, 1, 2, 2, 4, -1, 3)), max_size=4)


@given(
    dims=SIZES,
    order=st.permutations(range(4)) | st.lists(st.integers(-1, 4), max_size=5),
    iota=SIZES,
    perm=st.permutations(range(2)) | st.lists(st.integers(-1, 3), max_size=3),
    last=st.lists(st.sampled_from((0, 6, 6, 4)), max_size=3),
    ndim=st.integers(0, 3),
)
@example(dims=[2, 2], order=[0, 1, 2, 3], iota=[], perm=[], last=[6], ndim=2)
def test_a_sharding_places_an_array_on_each_device_or_is_refused(
    dims, order, iota, perm, last, ndim
):
    op = message("OpSharding")(
        type=3, tile_assignment_dimensions=dims, tile_assignment_devices=order,
        iota_reshape_dims=iota, iota_transpose_perm=perm, last_tile_dims=last,
    )  # fmt: skip
    try:
        found = placing_of_op(op, (5, 6, 7, 8), ndim)
    except Inexpressible:
        return
    assert len(found.boxes(ArrayType((8,) * ndim, "float32"))) == 4


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
