"""Laws: whoever is bad is suspect, so nobody else is ever accused alone; what sets can tell is
found out, and what they cannot is left open."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pathways_lab.core.diagnosis.suspects import (
    Replay,
    agree,
    minority,
    next_set,
    sets_like,
    suspects,
    unchecked,
)
from pathways_lab.core.slices.topology import Owned

RIGHT = "right"
Islands = list[list[tuple[str, int]]]


def host(count: int, name: str = "h") -> list[Owned]:
    return [(name, number) for number in range(count)]


def on(numbers: str, made: Hashable) -> Replay:
    """Of devices of one host, a digit each."""
    return Replay(tuple(("h", int(number)) for number in numbers), made)


def named(devices: frozenset[Owned]) -> str:
    return "".join(str(number) for _, number in sorted(devices))


# --- alone --------------------------------------------------------------------------------------


@given(st.integers(1, 9), st.data())
def test_most_are_right_and_where_there_are_not_most_nobody_can_tell(
    count: int, data: st.DataObject
) -> None:
    bad = data.draw(st.sets(st.integers(0, count - 1)))
    sums = {device: f"wrong {device}" if device[1] in bad else RIGHT for device in host(count)}
    found = minority(sums)
    if 2 * len(bad) < count:
        assert found == {device for device in host(count) if device[1] in bad}
    elif count > 1:
        assert found is None


# --- together -----------------------------------------------------------------------------------


@given(st.data())
def test_who_is_bad_is_suspect_also_if_it_comes_and_goes(data: st.DataObject) -> None:
    devices = host(data.draw(st.integers(2, 8)))
    bad = data.draw(st.sampled_from(devices))
    some = st.lists(st.sampled_from(devices), min_size=1, unique=True).map(tuple)
    sets = data.draw(st.lists(some, min_size=1, max_size=6))
    wrong = st.sampled_from([RIGHT, "one", "other"])
    replays = [Replay(s, data.draw(wrong) if bad in s else RIGHT) for s in sets]
    assert agree(replays) or bad in suspects(replays)


@st.composite
def machines(draw: st.DrawFn) -> Islands:
    sizes = draw(st.lists(st.lists(st.integers(1, 4), min_size=1, max_size=3), min_size=1,
                          max_size=3))  # fmt: skip
    return [[(f"i{i}/h{h}", n) for h, n in enumerate(hosts)] for i, hosts in enumerate(sizes)]


@st.composite
def first_sets(draw: st.DrawFn, islands: Islands) -> tuple[Owned, ...]:
    there = [(h, d) for h, count in draw(st.sampled_from(islands)) for d in range(count)]
    return tuple(draw(st.lists(st.sampled_from(there), min_size=1, unique=True)))


def searched(
    first: tuple[Owned, ...],
    possible: Sequence[tuple[Owned, ...]],
    made: Callable[[tuple[Owned, ...]], Hashable],
) -> list[Replay]:
    replays = [Replay(first, made(first))]
    while (devices := next_set(replays, possible)) is not None:
        assert set(devices) not in [set(replay.devices) for replay in replays]
        replays.append(Replay(devices, made(devices)))
    return replays


@given(st.data())
def test_what_sets_can_tell_is_found_out(data: st.DataObject) -> None:
    islands = data.draw(machines())
    first = data.draw(first_sets(islands))
    possible = sets_like(first, islands)
    bad = data.draw(st.sampled_from(first))

    def made(devices: tuple[Owned, ...]) -> Hashable:
        return frozenset(devices) if bad in devices else RIGHT

    replays = searched(first, possible, made)
    everything = [Replay(devices, made(devices)) for devices in {*possible, first}]
    if agree(everything):
        assert agree(replays)
        assert bad in unchecked(replays), "nobody has compared it"
    else:
        assert not agree(replays)
        assert suspects(replays) == suspects(everything)
        assert bad in suspects(replays)


@given(st.data())
def test_where_all_agree_every_device_was_compared_if_that_can_be(data: st.DataObject) -> None:
    islands = data.draw(machines())
    first = data.draw(first_sets(islands))
    possible = sets_like(first, islands)
    replays = searched(first, possible, lambda _: RIGHT)
    everything = [Replay(devices, RIGHT) for devices in {*possible, first}]
    assert unchecked(replays) == unchecked(everything)
    assert len(replays) <= 1 + len(first)


@pytest.mark.parametrize(
    ("replays", "left"),
    [
        ([on("01", "x"), on("23", "y")], "0123"),
        ([on("01", "x"), on("23", "y"), on("45", "y")], "01"),
        ([on("01", "x"), on("23", "y"), on("45", "y"), on("12", "y")], "01"),
        ([on("01", "x"), on("23", "y"), on("45", "y"), on("12", "z")], "1"),
        ([on("01", "x"), on("23", "y"), on("45", "z")], ""),
    ],
    ids=["nobody can tell", "which set", "it may come and go", "which device", "more than one"],
)
def test_for_example(replays: list[Replay], left: str) -> None:
    assert named(suspects(replays)) == left


# --- sets ---------------------------------------------------------------------------------------


@given(st.data())
def test_sets_lie_on_hosts_as_the_first_one_does(data: st.DataObject) -> None:
    islands = data.draw(machines())
    first = data.draw(first_sets(islands))
    sizes = {host: count for island in islands for host, count in island}

    def pattern(devices: tuple[Owned, ...]) -> list[int]:
        order = list(dict.fromkeys(host for host, _ in devices))
        return [order.index(host) for host, _ in devices]

    found = sets_like(first, islands)
    assert len(found) <= 2 * sum(len(hosts) * max(n for _, n in hosts) for hosts in islands)
    for devices in found:
        assert len(set(devices)) == len(first)
        assert pattern(devices) == pattern(first)
        assert len({host.partition("/")[0] for host, _ in devices}) == 1
        assert all(number < sizes[host] for host, number in devices)
