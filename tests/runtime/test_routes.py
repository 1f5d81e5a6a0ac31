"""Both ends of a transfer agree, every element arrives once per host, nothing more is sent."""

from __future__ import annotations

from unittest.mock import patch

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from pathways_lab.core.program.layout import Layout
from pathways_lab.core.slices.topology import SliceBinding
from pathways_lab.executor import transfer_routes
from pathways_lab.executor.transfer_routes import route
from pathways_lab.runtime.arrays import index


@st.composite
def ends(draw: st.DrawFn, rank: int) -> tuple[Layout, SliceBinding]:
    """A layout over 1 to 8 devices on 1 to 3 hosts, and where they are."""
    sizes = draw(st.lists(st.sampled_from([1, 2, 4]), min_size=1, max_size=2))
    axes = tuple((f"a{n}", size) for n, size in enumerate(sizes))
    spec: list[tuple[str, ...]] = [() for _ in range(rank)]
    for name, _ in axes:
        place = draw(st.integers(-1, rank - 1))
        if place >= 0:
            spec[place] += (name,)
    layout = Layout(axes, tuple(spec))
    hosts = draw(st.lists(st.sampled_from("ABC"), min_size=layout.devices, max_size=layout.devices))
    devices = tuple((host, number) for number, host in enumerate(hosts))
    return layout, SliceBinding(1, "k", "i", (layout.devices,), ("x",), devices, "cpu")


@settings(max_examples=150, deadline=None)
@given(st.data(), st.integers(0, 2), st.booleans())
def test_hosts_agree_and_every_element_arrives_once(
    data: st.DataObject, rank: int, apart: bool
) -> None:
    """Also where pieces go from host to host, in parts of 12 elements."""
    shape = (16,) * rank
    source, source_binding = data.draw(ends(rank))
    target, target_binding = data.draw(ends(rank))
    hosts = {h for b in (source_binding, target_binding) for h, _ in b.devices}
    bindings = source_binding, target_binding
    with patch.object(transfer_routes, "_PART", 12):
        route.cache_clear()
        routes = {h: route(shape, source, target, *bindings, h, apart) for h in sorted(hosts)}
        route.cache_clear()
    sent = set()
    for name, made in routes.items():
        for send in made.sends:
            sender = name
            for host, group in ((send.host, send.target), *send.onward):
                sent.add((sender, host, group, send.box, send.source))
                sender = host
    expected = set()
    owners = {(host, number) for number, (host, _) in enumerate(source_binding.devices)}
    served: set[int] = set()
    for name, made in routes.items():
        for group in made.groups:
            filled = np.zeros(shape, np.int8)
            for piece in group.pieces:
                filled[index(piece.box)] += 1
                expected.add((piece.sender, name, group.target, piece.box, piece.source))
                assert (piece.owner, piece.source) in owners
            assert (filled[index(group.box)] == 1).all()
            assert filled.sum() == filled[index(group.box)].size
            assert all(target_binding.devices[d][0] == name for d in group.devices)
            assert not served & set(group.devices)
            served |= set(group.devices)
    assert sent == expected
    assert served == set(range(target.devices))


def test_replicas_on_one_host_are_sent_once() -> None:
    """Four devices that want the whole array: one copy crosses the wire."""
    whole = Layout((("x", 4),), ((),))
    near = SliceBinding(1, "k", "i", (4,), ("x",), tuple(("A", n) for n in range(4)), "cpu")
    far = SliceBinding(2, "k", "j", (4,), ("x",), tuple(("B", n) for n in range(4)), "cpu")
    made = route((8,), whole, whole, near, far, "A")
    assert [(s.host, s.box) for s in made.sends] == [("B", ((0, 8),))]
    (group,) = route((8,), whole, whole, near, far, "B").groups
    assert group.devices == (0, 1, 2, 3)


def test_a_large_copy_for_several_machines_leaves_its_owner_once_and_goes_on() -> None:
    """In parts, so that the next machine has the first ones while the last ones come."""
    one, three = Layout((("x", 1),), ((), ())), Layout((("x", 3),), ((), ()))
    here = SliceBinding(1, "k", "i", (1,), ("x",), (("A", 0),), "cpu")
    there = SliceBinding(2, "k", "j", (3,), ("x",), tuple((h, 0) for h in "BCD"), "cpu")
    shape = (1024, 1024)
    direct = route(shape, one, three, here, there, "A")
    assert [(s.host, s.onward) for s in direct.sends] == [("B", ()), ("C", ()), ("D", ())]
    made = route(shape, one, three, here, there, "A", True)
    assert {(s.host, s.target, s.onward) for s in made.sends} == {("B", 0, (("C", 1), ("D", 2)))}
    parts = [s.box for s in made.sends]
    assert parts == [((256 * n, 256 * (n + 1)), (0, 1024)) for n in range(4)]
    assert made.receivers == {"B", "C", "D"}
    (group,) = route(shape, one, three, here, there, "C", True).groups
    assert [(p.box, p.owner, p.sender, p.onward) for p in group.pieces] == [
        (part, "A", "B", (("D", 2),)) for part in parts
    ]
    small = route((8, 8), one, three, here, there, "A", True)
    assert [s.host for s in small.sends] == ["B", "C", "D"], "the way over others takes longer"


def test_nothing_is_sent_of_an_empty_array() -> None:
    one = Layout((("x", 1),), ((),))
    here = SliceBinding(1, "k", "i", (1,), ("x",), (("A", 0),), "cpu")
    there = SliceBinding(2, "k", "j", (1,), ("x",), (("B", 0),), "cpu")
    assert route((0,), one, one, here, there, "A").sends == ()
    (group,) = route((0,), one, one, here, there, "B").groups
    assert group.pieces == ()
