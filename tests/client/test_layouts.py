"""Layouts agree with ``NamedSharding``, both ways; covers are covers; moves keep what they can."""

from __future__ import annotations

import math
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import pathways_lab as pw
from pathways_lab.client.code import layouts
from pathways_lab.client.functions.array_types import ArrayType, shard_bytes
from pathways_lab.client.session.transfers import DataLinks
from pathways_lab.core.program.layout import boxes, intersect, shard_shape
from tests.client.kit import FakeLab, a_slice


@st.composite
def placements(draw: Any) -> tuple[Any, NamedSharding, ArrayType]:
    """A slice, a sharding over its mesh, and an array that it cuts evenly."""
    shape = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3).map(tuple))
    on = a_slice(*shape)
    axes = list(draw(st.permutations(on.axes)))
    sizes = dict(on.axis_sizes)
    spec: list[Any] = []
    extents = []
    for _ in range(draw(st.integers(0, 3))):
        taken = tuple(axes.pop() for _ in range(draw(st.integers(0, len(axes)))))
        spec.append(taken[0] if len(taken) == 1 else taken or None)
        parts = math.prod(sizes[a] for a in taken)
        extents.append(parts * draw(st.integers(0 if not taken else 1, 3)))
    return on, NamedSharding(on.mesh, P(*spec)), ArrayType(tuple(extents), "float32")


@settings(max_examples=150, deadline=None)
@given(placements())
def test_boxes_are_those_of_jax(placement: Any) -> None:
    on, sharding, kind = placement
    layout = layouts.layout_of(sharding, on, kind)
    theirs = sharding.devices_indices_map(kind.shape)
    for device, box in zip(on.devices, boxes(layout, kind.shape), strict=True):
        want = tuple(
            index.indices(extent)[:2]
            for index, extent in zip(theirs[device], kind.shape, strict=True)
        )
        assert box == want
    assert shard_shape(layout, kind.shape) == sharding.shard_shape(kind.shape)
    back = layouts.sharding_of(layout, on)
    assert back.is_equivalent_to(sharding, len(kind.shape))
    assert shard_bytes(kind, layout) == 4 * math.prod(sharding.shard_shape(kind.shape))


@settings(max_examples=100, deadline=None)
@given(placements())
def test_a_cover_holds_every_element_once(placement: Any) -> None:
    on, sharding, kind = placement
    layout = layouts.layout_of(sharding, on, kind)
    cover = layouts.cover(layout, kind.shape, on.hosts)
    found = list(cover.values())
    assert sum(math.prod(b - a for a, b in box) for box in found) == math.prod(kind.shape)
    if math.prod(kind.shape):
        assert all(
            intersect(a, b) is None or a == () for i, a in enumerate(found) for b in found[:i]
        )
    assert all(boxes(layout, kind.shape)[device] == box for device, box in cover.items())


def test_a_replicated_array_comes_from_one_host() -> None:
    on = a_slice(2, 4, axes=("a", "b"))
    layout = layouts.layout_of(P(None, "a"), on, ArrayType((3, 4), "float32"))
    cover = layouts.cover(layout, (3, 4), on.hosts)
    assert len({on.hosts[device] for device in cover}) == 2
    layout = layouts.layout_of(P(), on, ArrayType((3,), "float32"))
    assert list(layouts.cover(layout, (3,), on.hosts)) == [0]


@settings(max_examples=100, deadline=None)
@given(placements(), st.lists(st.integers(1, 4), min_size=1, max_size=3))
def test_layouts_carry_over_as_far_as_the_other_mesh_allows(placement: Any, shape: Any) -> None:
    on, sharding, kind = placement
    other = a_slice(*shape)
    layout = layouts.layout_of(sharding, on, kind)
    carried = layouts.carried_over(layout, other, kind)
    assert layouts.fits(carried, kind, other)
    for old, new in zip(layout.spec, carried.spec, strict=True):
        assert [axis for axis in old if axis in new] == list(new)
    if other.axis_sizes == on.axis_sizes:
        assert carried == layout


def test_virtual_devices_never_become_a_backend() -> None:
    on = a_slice(2)
    assert repr(on.devices[0]).startswith("VirtualDevice(s")
    assert jax.tree.leaves(on.mesh.devices.tolist())[0] is on.devices[0]


def test_an_axis_that_is_named_twice_is_refused_with_the_way_out(fake: FakeLab) -> None:
    on = fake.slice(2, 2, axes=("a", "b"))
    twice = P("a", "a")
    for use in (
        lambda: on.sharding(twice),
        lambda: on.sharding(P(("a", "b"), "a")),
        lambda: pw.jit(lambda x: x, on=on, in_shardings=twice)(np.ones((4, 4))),
        lambda: pw.jit(lambda x: x, on=on, out_shardings=twice)(np.ones((4, 4))),
        lambda: pw.device_put(np.ones((4, 4)), on.sharding(twice)),
    ):
        with pytest.raises(pw.PathwaysError, match=r"twice|at most once") as caught:
            use()
        assert "at most once, and None" in caught.value.failure.remedy


def test_entries_that_do_not_fit_are_counted_in_the_users_words(fake: FakeLab) -> None:
    on = fake.slice(2, axes=("a",))
    pair = pw.jit(lambda x: x, on=on, in_shardings=(P("a"), P()))
    with pytest.raises(pw.PathwaysError, match=r"^in_shardings has 2 entries, .* is for has 1\n"):
        pair(np.ones(4))
    tree = pw.jit(lambda x: x["a"], on=on, in_shardings=({"b": P("a")},))
    with pytest.raises(pw.PathwaysError, match=r"at key path in_shardings\[0\]") as caught:
        tree({"a": np.ones(4)})
    assert "tree_map" not in str(caught.value)


def test_bytes_that_devices_of_a_host_have_in_common_travel_once(
    fake: FakeLab, monkeypatch: Any
) -> None:
    sent: list[int] = []
    send = DataLinks._send

    def counted(self: Any, host: str, op: str, fields: Any, *buffers: Any) -> None:
        sent.append(sum([memoryview(data).nbytes for data in buffers[0]]) if buffers else 0)
        send(self, host, op, fields, *buffers)

    monkeypatch.setattr(DataLinks, "_send", counted)
    on, x = fake.slice(4, axes="a"), np.arange(8.0, dtype=np.float32)
    hosts = on.binding.by_host
    assert len(hosts) < 4
    for spec, parts in ((P(), 1), (P("a"), len(hosts))):
        handle = pw.device_put(x, on.sharding(spec)).block_until_ready()
        assert sent == [x.nbytes // parts for _ in hosts]
        assert handle.result().tolist() == x.tolist()
        sent.clear()
