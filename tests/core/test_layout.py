"""Law: an exchange covers every target element exactly once, from a device that holds it."""

from __future__ import annotations

import itertools
import math

from hypothesis import given, settings
from hypothesis import strategies as st

from pathways_lab.core.program.layout import Box, Layout, boxes, exchange, intersect, shard_shape

AXES = ("a", "b", "c")


@st.composite
def layouts(draw: st.DrawFn, dims: int) -> Layout:
    """Any mesh of 1 to 3 axes, cutting any dimensions, some axes replicating."""
    sizes = draw(st.lists(st.sampled_from((1, 2, 3, 4)), min_size=1, max_size=3))
    mesh = tuple(zip(AXES, sizes, strict=False))
    names = draw(st.permutations([name for name, _ in mesh]))
    spec: list[tuple[str, ...]] = [() for _ in range(dims)]
    for name in names:
        where = draw(st.integers(-1, dims - 1)) if dims else -1
        if where >= 0:
            spec[where] = (*spec[where], name)
    return Layout(mesh, tuple(spec))


@st.composite
def exchanges(draw: st.DrawFn) -> tuple[tuple[int, ...], Layout, Layout]:
    """A shape that both layouts cut evenly."""
    dims = draw(st.integers(0, 3))
    source, target = draw(layouts(dims)), draw(layouts(dims))
    shape = []
    for d in range(dims):
        cuts = [
            math.prod(dict(layout.mesh)[a] for a in layout.spec[d]) for layout in (source, target)
        ]
        shape.append(math.lcm(*cuts) * draw(st.integers(0, 2)))
    return tuple(shape), source, target


def elements(box: Box) -> set[tuple[int, ...]]:
    return set(itertools.product(*(range(lo, hi) for lo, hi in box)))


@settings(deadline=None)
@given(exchanges(), st.integers(1, 4), st.integers(1, 4))
def test_every_target_element_comes_once_from_a_device_that_has_it(
    case: tuple[tuple[int, ...], Layout, Layout], source_hosts: int, target_hosts: int
) -> None:
    shape, source, target = case
    homes = tuple(f"s{d % source_hosts}" for d in range(source.devices))
    aims = tuple(f"s{d % target_hosts}" for d in range(target.devices))
    holds, wants = boxes(source, shape), boxes(target, shape)
    got: dict[int, list[tuple[int, ...]]] = {d: [] for d in range(target.devices)}
    for piece in exchange(shape, source, target, homes, aims):
        assert intersect(piece.box, holds[piece.source]) == piece.box
        got[piece.target] += sorted(elements(piece.box))
    for device, came in got.items():
        wanted = elements(wants[device]) if 0 not in shape else set()
        assert sorted(came) == sorted(wanted)


@settings(deadline=None)
@given(exchanges())
def test_a_replica_on_the_targets_own_host_is_preferred(
    case: tuple[tuple[int, ...], Layout, Layout],
) -> None:
    shape, source, target = case
    homes = tuple(f"h{d % 2}" for d in range(source.devices))
    aims = tuple(f"h{d % 2}" for d in range(target.devices))
    holds = boxes(source, shape)
    for piece in exchange(shape, source, target, homes, aims):
        near = [
            d
            for d in range(source.devices)
            if homes[d] == aims[piece.target] and holds[d] == holds[piece.source]
        ]
        assert not near or homes[piece.source] == aims[piece.target]


def test_shards_and_boxes_of_a_mesh_with_a_replicating_axis() -> None:
    layout = Layout((("a", 2), ("b", 2)), (("b",), ()))
    assert shard_shape(layout, (4, 3)) == (2, 3)
    assert boxes(layout, (4, 3)) == (
        ((0, 2), (0, 3)),
        ((2, 4), (0, 3)),
        ((0, 2), (0, 3)),
        ((2, 4), (0, 3)),
    )


def test_scalars_travel_once_per_target() -> None:
    one, two = Layout((("a", 1),), ()), Layout((("a", 2),), ())
    assert len(exchange((), one, two, ("h",), ("h", "h"))) == 2
