"""Laws: slices are rectangles where the grid allows, loads stay within one, refusals explain."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pathways_lab.core.errors import Failure
from pathways_lab.core.messages import HostJoined
from pathways_lab.core.slices.placement import place
from pathways_lab.core.slices.slices import ResourceManager
from pathways_lab.core.slices.topology import SliceBinding, SliceRequest

AXES = ("x", "y", "z")


def machine(
    islands: int = 1,
    hosts: int = 1,
    devices: int = 4,
    *,
    block: tuple[int, ...] = (),
    kind: str = "cpu",
    memory: int = 100,
) -> ResourceManager:
    resources = ResourceManager()
    for i, h in itertools.product(range(islands), range(hosts)):
        join(resources, f"island{i}/host{h}", devices, block, kind, memory)
    return resources


def join(
    resources: ResourceManager, host: str, devices: int, block: tuple[int, ...] = (),
    kind: str = "cpu", memory: int = 100, site: str = "",
) -> None:  # fmt: skip
    island = host.partition("/")[0]
    resources.join(HostJoined(0.0, "join", host, island, devices, kind, memory, block, site))


def bind(resources: ResourceManager, number: int, *shape: int, **wishes: object) -> SliceBinding:
    request = SliceRequest(shape, AXES[: len(shape)], **wishes)  # type: ignore[arg-type]
    found = resources.bind(number, "kernel-1", request)
    assert isinstance(found, SliceBinding), found
    return found


def refusal(resources: ResourceManager, *shape: int, **wishes: object) -> Failure:
    request = SliceRequest(shape, AXES[: len(shape)], **wishes)  # type: ignore[arg-type]
    found = resources.bind(99, "kernel-1", request)
    assert isinstance(found, Failure)
    return found


@settings(deadline=None)
@given(st.data())
def test_a_mesh_is_a_rectangle_of_the_grid_whenever_one_is_free_of_obstacles(
    data: st.DataObject,
) -> None:
    grid = data.draw(st.lists(st.integers(1, 4), min_size=2, max_size=3).map(tuple))
    shape = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3).map(tuple))
    loads = data.draw(
        st.lists(st.sampled_from((0, 0, 1, 2, None)), min_size=math.prod(grid),
                 max_size=math.prod(grid))
    )  # fmt: skip
    found = place(grid, loads, shape)
    rectangles = list(rectangles_of(grid, loads, shape))
    if rectangles:
        assert found is not None
        assert set(found[1]) in rectangles
        best = min(max(loads[d] or 0 for d in r) for r in rectangles)
        assert max(loads[d] or 0 for d in found[1]) == best
    if found is not None:
        devices = found[1]
        assert len(set(devices)) == math.prod(shape)
        assert all(loads[d] is not None for d in devices)
        if not rectangles:  # then a run of consecutive devices
            count = math.prod(grid)
            assert devices == tuple((devices[0] + n) % count for n in range(len(devices)))


def rectangles_of(grid: tuple[int, ...], loads: list[int | None], shape: tuple[int, ...]):
    """Every set of devices that is a box of the grid with the mesh's extents, the slow way."""
    wide = sorted(size for size in shape if size > 1)
    cells = list(itertools.product(*(range(g) for g in grid)))
    for low, high in itertools.product(cells, cells):
        extent = [h - a + 1 for a, h in zip(low, high, strict=True)]
        if min(extent) < 1 or sorted(e for e in extent if e > 1) != wide:
            continue
        inside = {
            n
            for n, cell in enumerate(cells)
            if all(a <= c <= h for a, c, h in zip(low, cell, high, strict=True))
        }
        if all(loads[n] is not None for n in inside):
            yield inside


@settings(max_examples=300, deadline=None)
@given(st.integers(1, 12), st.data())
def test_loads_of_a_row_stay_within_one_of_each_other(count: int, data: st.DataObject) -> None:
    """k programs on n devices, of any sizes."""
    resources = machine(devices=count)
    for number in range(1, 12):
        bind(resources, number, data.draw(st.integers(1, count)))
        loads = resources.hosts["island0/host0"].loads
        assert max(loads) - min(loads) <= 1, loads


def test_unshared_devices_come_first_over_all_islands() -> None:
    resources = machine(islands=2, devices=2)
    islands = [bind(resources, n, 1).island for n in range(1, 5)]
    assert sorted(islands) == ["island0", "island0", "island1", "island1"]
    assert bind(resources, 5, 2).devices  # shared, and allowed


def test_mesh_neighbours_are_grid_neighbours_also_when_turned() -> None:
    resources = machine(hosts=2, devices=4, block=(1, 4))  # a 2 x 4 grid
    tall = bind(resources, 1, 4, 2)
    places = [
        (0 if host == "island0/host0" else 1, device) for host, device in tall.devices
    ]  # row-major over the mesh (4, 2)
    for i, j in itertools.product(range(4), range(2)):
        assert places[i * 2 + j] == (j, i)


def test_three_dimensions() -> None:
    resources = machine(hosts=2, devices=4, block=(1, 2, 2))
    cube = bind(resources, 1, 2, 2, 2)
    assert len(set(cube.devices)) == 8
    assert cube.hosts == ("island0/host0", "island0/host1")


def test_a_shape_that_the_grid_cannot_hold_becomes_a_run() -> None:
    resources = machine(devices=4)
    assert bind(resources, 1, 2, 2).devices == tuple(("island0/host0", d) for d in range(4))


@pytest.mark.parametrize(
    ("shape", "wishes", "words"),
    [
        ((5,), {}, "asked for 5 devices in shape (5,); island0 has 4 devices"),
        ((1,), {"kind": "tpu"}, "with kind tpu"),
        ((1,), {"island": "island7"}, "no island 'island7' for the slice; there is island0"),
        ((1,), {"memory": 101}, "at least 101 bytes per device"),
        ((0,), {}, "must have 1 to 3 sizes"),
        ((1, 1, 1, 1), {}, "must have 1 to 3 sizes"),
        ((1,), {"at": (("island0/host0", 4),)}, "1 devices in shape (1,) with device 4 of island0"),
        ((2,), {"at": (("island0/host0", 1),) * 2}, "needs 2 different devices, got (('island0/ho"),
    ],
)
def test_a_wish_that_cannot_be_met_says_what_was_asked_what_exists_and_what_to_do(
    shape: tuple[int, ...], wishes: dict[str, object], words: str
) -> None:
    failure = refusal(machine(), *shape, **wishes)
    assert words in failure.message
    assert failure.kind == "refused"
    assert failure.remedy


def test_constraints_choose_the_island() -> None:
    resources = machine()
    join(resources, "island1/host0", 4, kind="gpu", memory=500)
    assert bind(resources, 1, 1, kind="gpu").island == "island1"
    assert bind(resources, 2, 1, memory=200).island == "island1"
    assert bind(resources, 3, 1, island="island0").kind == "cpu"


def test_devices_that_are_named_are_bound_in_their_order_whoever_shares_them() -> None:
    resources = machine(islands=2, hosts=2, devices=2)
    at = (("island1/host1", 1), ("island1/host0", 0))
    for number in (1, 2):
        bound = bind(resources, number, 2, at=at)
        assert (bound.devices, bound.island) == (at, "island1")
    across = (at[0], ("island0/host0", 0))
    assert bind(resources, 3, 2, at=across).islands == ("island1", "island0")
    resources.leaving.add("island1/host0")
    assert "are about to leave" in refusal(resources, 2, at=at).message


def test_a_slice_on_named_devices_that_are_lost_goes_elsewhere() -> None:
    resources = machine(hosts=2, devices=1)
    bind(resources, 1, 1, at=(("island0/host1", 0),))
    resources.lose("island0/host1", Failure("lost", "it is gone"))
    again = resources.bind_again(1, None)
    assert isinstance(again, SliceBinding)
    assert again.hosts == ("island0/host0",)


def test_releasing_makes_devices_free_and_freeing_ends_the_slice() -> None:
    resources = machine()
    bind(resources, 1, 4)
    assert "0 of them unshared" in refusal(resources, 5).message
    resources.release(1)
    assert "4 of them unshared" in refusal(resources, 5).message
    assert resources.free(1).state == "freed"
    assert not resources.slices
    assert not resources.cells


def test_a_lost_host_loses_the_slices_that_touch_it_and_no_others() -> None:
    resources = machine(hosts=2, devices=2)
    near = bind(resources, 1, 2)
    far = bind(resources, 2, 2)
    both = bind(resources, 3, 4)
    dead = near.hosts[0]
    lost = resources.lose(dead, Failure("lost", "it is gone"))
    assert {r.binding.slice for r in lost} == {near.slice, both.slice}
    assert resources.slices[far.slice].state == "bound"
    assert resources.cells_of[near.slice] == ()
    assert resources.hosts[far.hosts[0]].loads == [1, 1]


def test_cells_are_the_devices_that_the_same_slices_cover() -> None:
    resources = machine(devices=4)
    bind(resources, 1, 2)
    bind(resources, 2, 4)
    assert {(c.slices, c.devices) for c in resources.cells} == {
        (frozenset({1, 2}), 2),
        (frozenset({2}), 2),
    }


def test_hosts_are_stacked_in_the_order_of_their_numbers() -> None:
    resources = machine(hosts=12, devices=1)
    assert bind(resources, 1, 12).hosts == tuple(f"island0/host{n}" for n in range(12))


def test_placing_on_2048_devices_is_quick() -> None:
    resources = machine(hosts=512, devices=4, block=(1, 4))
    assert len(bind(resources, 1, 32, 4).devices) == 128
    assert len(bind(resources, 2, 1000).devices) == 1000


def test_devices_by_host_are_numbered_as_the_slice_numbers_them() -> None:
    devices = (("h1", 3), ("h0", 0), ("h1", 2))
    binding = SliceBinding(1, "c", "i", (3,), ("x",), devices, "cpu")
    assert list(binding.by_host.items()) == [("h1", (0, 2)), ("h0", (1,))]
    assert tuple(binding.by_host) == binding.hosts
