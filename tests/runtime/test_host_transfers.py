"""Transfers between real device processes agree with the array that was uploaded."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pathways_lab.core.program.layout import Layout
from pathways_lab.core.slices.topology import SliceBinding
from pathways_lab.executor.transfer_routes import route
from tests.runtime.fake_control import Data, FetchFailed, Lab, Program, spans
from tests.runtime.host_kit import binding, code, key_array, layout

pytestmark = pytest.mark.cluster

NEAR, FAR = "island0/host0", "island1/host0"
numbers = itertools.count(1)


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    made = Lab([NEAR, FAR])
    yield made
    made.close()


def slice_(lab: Lab, host: str, mesh: tuple[int, ...], first: int = 0) -> SliceBinding:
    devices = range(first, first + math.prod(mesh))
    return lab.bind(binding(next(numbers), mesh, list(devices), host))


def transfer(
    lab: Lab,
    data: np.ndarray,
    dtype: str,
    source: tuple[SliceBinding, Layout],
    target: tuple[SliceBinding, Layout],
    shape: tuple[int, ...] | None = None,
) -> tuple[np.ndarray, int]:
    """Upload, transfer, fetch: the array at the target, and its run."""
    number = next(numbers)
    shape = data.shape if shape is None else shape
    program = Program(f"move {number}").value("x", source[0].slice, shape, dtype, source[1])
    program.move("x", "y", target[0].slice, target[1])
    plan = lab.program(program.plan(["x"], ["y"]))
    lab.put(9_000_000 + number, program["x"], data)
    lab.grant(number, plan, [9_000_000 + number], [5_000_000 + number])
    out = lab.fetch(5_000_000 + number, program["y"])
    lab.run_over(number, plan)
    lab.broadcast("free", buffers=[9_000_000 + number, 5_000_000 + number])
    for end in (source[0], target[0]):
        lab.broadcast("unbind", slice=end.slice)
    return out, number


MESHES = [(1,), (2,), (4,), (2, 2), (1, 4), (2, 1), (1, 2, 2)]


@st.composite
def ends(draw: st.DrawFn, rank: int) -> tuple[str, tuple[int, ...], tuple[tuple[int, ...], ...]]:
    """A host, a mesh, and for each dimension the mesh axes that cut it."""
    mesh = draw(st.sampled_from(MESHES))
    spec: list[list[int]] = [[] for _ in range(rank)]
    for axis in range(len(mesh)):
        place = draw(st.integers(-1, rank - 1))
        if place >= 0:
            spec[place].append(axis)
    return draw(st.sampled_from([NEAR, FAR])), mesh, tuple(tuple(axes) for axes in spec)


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    data=st.data(),
    rank=st.integers(0, 3),
    dtype=st.sampled_from(["float32", "bfloat16", "int8", "bool", "uint32", "float64"]),
)
def test_any_pair_of_layouts(lab: Lab, data: st.DataObject, rank: int, dtype: str) -> None:
    """Every host gets exactly what it needs, and no array passes through the controller."""
    shape = tuple(data.draw(st.sampled_from([4, 8, 12, 0])) for _ in range(rank))
    made = []
    for _ in range(2):
        host, mesh, spec = data.draw(ends(rank))
        on = slice_(lab, host, mesh)
        made.append((on, layout(on, *(tuple("abc"[a] for a in axes) for axes in spec))))
    whole = (np.arange(math.prod(shape)) % 120).reshape(shape).astype(jnp.dtype(dtype))
    out, run = transfer(lab, whole, dtype, made[0], made[1])
    assert out.dtype == whole.dtype
    assert np.array_equal(out, whole)
    (arrived,) = [s for s in spans(lab.records, "transfer") if s.run == run]
    target_host = made[1][0].hosts[0]
    assert arrived.host == target_host
    way = route(shape, made[0][1], made[1][1], made[0][0], made[1][0], target_host)
    other = sum(
        math.prod(stop - start for start, stop in piece.box)
        for group in way.groups
        for piece in group.pieces
        if piece.owner != target_host
    )
    assert arrived.args["nbytes"] == other * whole.dtype.itemsize


@pytest.mark.parametrize("dtype", ["key<fry>", "key<rbg>"])
def test_random_keys(lab: Lab, dtype: str) -> None:
    near, far = slice_(lab, NEAR, (4,)), slice_(lab, FAR, (2,))
    data = key_array(3, (8,), dtype)
    out, _ = transfer(
        lab, data, dtype, (near, layout(near, "a")), (far, layout(far, "a")), shape=(8,)
    )
    assert np.array_equal(out, data)


def test_a_large_array(lab: Lab) -> None:
    """Large enough for memory of its own, for pages, and for several writes."""
    near, far = slice_(lab, NEAR, (4,)), slice_(lab, FAR, (2, 2))
    data = np.arange(4 << 20, dtype=np.float32).reshape(2048, 2048)
    out, _ = transfer(
        lab, data, "float32", (near, layout(near, "a", None)), (far, layout(far, None, "b"))
    )
    assert np.array_equal(out, data)


# --- aliased memory and donation ------------------------------------------------------------


@pytest.mark.parametrize("donated", ["source", "copy"])
@pytest.mark.parametrize("same_devices", [True, False])
def test_donating_one_end_of_an_alias_does_not_change_the_other(
    lab: Lab, donated: str, same_devices: bool
) -> None:
    """On one host a whole shard is shared, not copied; overwriting it must not be seen."""
    number = next(numbers)
    near = slice_(lab, NEAR, (2,))
    far = slice_(lab, NEAR, (2,), 0 if same_devices else 2)
    kind = ((64, 1024), "float32")
    cuts = {near.slice: layout(near, "a", None), far.slice: layout(far, "a", None)}
    on = near if donated == "source" else far
    make = code(lambda: (jnp.ones(kind[0]),), near, [], [(kind, cuts[near.slice])])
    spoil = code(
        lambda x: (x * 0 - 5,),
        on,
        [(kind, cuts[on.slice])],
        [(kind, cuts[on.slice])],
        donated=(0,),
    )
    for made in (make, spoil):
        lab.prepare(made)
    program = Program(f"alias {number}").call(make, [], ["x"])
    program.move("x", "y", far.slice, cuts[far.slice])
    program.call(spoil, ["x" if donated == "source" else "y"], ["z"])
    kept = "y" if donated == "source" else "x"
    plan = lab.program(program.plan([], ["z", kept]))
    lab.grant(number, plan, [], [3000 + number, 4000 + number])
    assert (lab.fetch(3000 + number, program["z"]) == -5).all()
    assert (lab.fetch(4000 + number, program[kept]) == 1).all()
    lab.run_over(number, plan)
    lab.broadcast("free", buffers=[3000 + number, 4000 + number])


def test_replicas_share_memory_and_survive_donation(lab: Lab) -> None:
    """One host copy behind four devices: a donation must copy, on every device."""
    number = next(numbers)
    near, far = slice_(lab, NEAR, (1,)), slice_(lab, FAR, (4,))
    kind = ((256, 256), "float32")
    whole = layout(far, None, None)
    add = code(lambda x: (x + 1,), far, [(kind, whole)], [(kind, whole)], donated=(0,))
    lab.prepare(add)
    program = Program(f"replicas {number}")
    program.value("x", near.slice, *kind, layout(near, None, None))
    program.move("x", "y", far.slice, whole).call(add, ["y"], ["z"])
    plan = lab.program(program.plan(["x"], ["z"]))
    data = np.random.default_rng(0).standard_normal(kind[0]).astype(np.float32)
    lab.put(5000, program["x"], data)
    lab.grant(number, plan, [5000], [5001])
    assert np.array_equal(lab.fetch(5001, program["z"]), data + 1)
    assert np.array_equal(lab.fetch(5000, program["x"]), data)
    lab.broadcast("free", buffers=[5000, 5001])


# --- failures -----------------------------------------------------------------------------------


def test_a_failed_source_fails_the_other_side_at_once(lab: Lab) -> None:
    number = next(numbers)
    near, far = slice_(lab, NEAR, (2,)), slice_(lab, FAR, (2,))
    kind = ((4,), "float32")
    cut = {s.slice: layout(s, "a") for s in (near, far)}
    double = code(lambda x: (x * 2,), far, [(kind, cut[far.slice])], [(kind, cut[far.slice])])
    lab.prepare(double)
    program = Program(f"fails {number}").value("x", near.slice, *kind, cut[near.slice])
    program.move("x", "y", far.slice, cut[far.slice]).call(double, ["y"], ["z"])
    plan = lab.program(program.plan(["x"], ["z"]))
    lab.grant(number, plan, [999_999], [6000])  # a buffer that nobody uploaded
    lab.run_over(number, plan)
    causes = {(h, s): f.message for (h, r, s), f in lab.failed.items() if r == number}
    assert set(causes) == {(NEAR, 0), (FAR, 0), (FAR, 1)}
    assert len(set(causes.values())) == 1, "one cause for all"
    with pytest.raises(FetchFailed, match="999999"):
        lab.fetch(6000, program["z"])
    gang = next(s for s in spans(lab.records, "gang") if s.run == number)
    assert gang.args["poisoned"] is True


def test_pieces_that_come_before_the_grant_are_kept(lab: Lab) -> None:
    """The sender is granted earlier than the receiver, on another link."""
    number = next(numbers)
    near, far = slice_(lab, NEAR, (2,)), slice_(lab, FAR, (2,))
    program = Program(f"early {number}").value("x", near.slice, (4,), "int32", layout(near, "a"))
    program.move("x", "y", far.slice, layout(far, "a"))
    plan = lab.program(program.plan(["x"], ["y"]))
    lab.put(7000, program["x"], np.arange(4, dtype=np.int32))
    lab.grant(number, plan, [7000], [7001], hosts=(NEAR,))
    lab.wait(lambda: (NEAR, number, 0) in lab.finished)
    lab.grant(number, plan, [7000], [7001], hosts=(FAR,))
    assert lab.fetch(7001, program["y"]).tolist() == [0, 1, 2, 3]


def test_a_run_that_is_aborted_waits_for_no_piece(lab: Lab) -> None:
    number = next(numbers)
    near, far = slice_(lab, NEAR, (1,)), slice_(lab, FAR, (1,))
    program = Program(f"abort {number}").value("x", near.slice, (4,), "int32", layout(near, None))
    program.move("x", "y", far.slice, layout(far, None))
    plan = lab.program(program.plan(["x"], ["y"]))
    lab.grant(number, plan, [8000], [8001], hosts=(FAR,))  # the source's host never hears of it
    with pytest.raises(AssertionError, match="no answer"):
        lab.fetch(8001, program["y"], timeout=0.2)
    lab.links[FAR].send("abort", {"run": number})
    with pytest.raises(FetchFailed, match="ended by the control plane"):
        lab.fetch(8001, program["y"])
    lab.wait(lambda: (FAR, number, 0) in lab.failed)
    assert lab.failed[FAR, number, 0].kind == "cancelled"


@pytest.mark.parametrize(
    ("op", "fields"), [("put", {"slice": 1}), ("parts", {"run": 1}), ("nonsense", {})]
)
def test_malformed_messages_close_their_link_only(lab: Lab, op: str, fields: dict) -> None:
    client = Data(lab, NEAR)
    client.link.send(op, fields)
    assert client.closed.wait(60)
    near = slice_(lab, NEAR, (2,))
    data = np.arange(4, dtype=np.float32)
    out, _ = transfer(lab, data, "float32", (near, layout(near, "a")), (near, layout(near, None)))
    assert np.array_equal(out, data)
