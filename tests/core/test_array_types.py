"""Law: :func:`shard_bytes` says what JAX says of an array, and refuses whatever is none."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pathways_lab.core.program.array_types import DEVICES, ELEMENT_BYTES, SHARD_BYTES, shard_bytes
from pathways_lab.core.program.layout import Layout

ROW = Layout((("x", 2),), (("x",),))
WHOLE = Layout((("x", 2),), ((),))


def test_the_bytes_of_a_shard() -> None:
    assert shard_bytes((4,), "float32", ROW) == 8
    assert shard_bytes((4,), "float32", WHOLE) == 16
    assert shard_bytes((), "bfloat16", Layout((("x", 2),), ())) == 2
    assert shard_bytes((4,), "key<fry>", ROW) == 16
    assert shard_bytes((0,), "int8", ROW) == 0


@pytest.mark.parametrize(
    ("shape", "dtype", "layout", "said"),
    [
        ((4,), "f4,(", ROW, "is not a type"),
        ((4,), "(((", ROW, "is not a type"),
        ((4,), "float32 ", ROW, "is not a type"),
        ((4,), "O", ROW, "is not a type"),
        ((4,), "object", ROW, "is not a type"),
        ((-4,), "float32", ROW, "a dimension of"),
        ((3,), "float32", ROW, "cannot be cut"),
        ((1 << 62,), "float32", ROW, "a dimension of"),
        ((SHARD_BYTES, 4), "float32", Layout((("x", 1),), ((), ())), "more than"),
        ((4,) * 65, "float32", Layout((), ((),) * 65), "too many"),
        ((4,), "float32", Layout((("x", 0),), (("x",),)), "a mesh of"),
        ((4,), "float32", Layout((("x", -2), ("y", -2)), ((),)), "a mesh of"),
        ((4,), "float32", Layout((("x", DEVICES), ("y", 2)), ((),)), "a mesh of"),
        ((4,), "float32", Layout((("x", 2), ("x", 2)), ((),)), "one name"),
        ((4,), "float32", Layout((("x", 2),), (("x", "x"),)), "twice"),
        ((4,), "float32", Layout((("x", 2),), (("y",),)), "does not have"),
        ((4, 4), "float32", ROW, "2 dimensions, and 1"),
    ],
)
def test_what_is_no_array_is_named(
    shape: tuple[int, ...], dtype: str, layout: Layout, said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        shard_bytes(shape, dtype, layout)


_size = st.one_of(st.integers(-2, 5), st.integers())
_axes = st.text("xyz", min_size=1, max_size=1)


@given(
    st.lists(_size, max_size=4).map(tuple),
    st.one_of(st.sampled_from(sorted(ELEMENT_BYTES)), st.text(max_size=4)),
    st.lists(st.tuples(_axes, _size), max_size=3).map(tuple),
    st.lists(st.lists(_axes, max_size=2).map(tuple), max_size=4).map(tuple),
)
def test_it_answers_or_refuses(
    shape: tuple[int, ...],
    dtype: str,
    mesh: tuple[tuple[str, int], ...],
    spec: tuple[tuple[str, ...], ...],
) -> None:
    try:
        size = shard_bytes(shape, dtype, Layout(mesh, spec))
    except ValueError:
        return
    sizes = dict(mesh)
    parts = math.prod(sizes[axis] for axes in spec for axis in axes)
    assert size * parts == math.prod(shape) * ELEMENT_BYTES[dtype]
    assert 0 <= size <= SHARD_BYTES
