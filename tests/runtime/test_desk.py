"""What clients bring to a host before it is complete is bounded, by client."""

from __future__ import annotations

import mmap
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from pathways_lab.core.errors import Failure
from pathways_lab.core.program.layout import Layout
from pathways_lab.core.slices.topology import SliceBinding
from pathways_lab.runtime.data_messages import Ask, Put, upload_fields
from pathways_lab.runtime.host.client_io import Desk, Fetch
from pathways_lab.transport.codec import unpack_fields
from pathways_lab.transport.handshake import Refused
from tests.runtime.launch_kit import BYTES, Bench, PlanBuilder, binding, grant, value

ANN, EVE = 1, 2
GIB = 1 << 30


class Buffers(dict[int, Any]):
    """Those of a launcher.  uploaded: bytes of complete uploads, by client."""

    def __init__(self) -> None:
        super().__init__()
        self.uploaded: Counter[int] = Counter()


class Link(SimpleNamespace):
    """A client's link.  Compared by identity, as links are."""

    __hash__ = object.__hash__
    __eq__ = object.__eq__

    def __init__(self, holder: int) -> None:
        super().__init__(holder=holder, peer={"role": "client"})


@pytest.fixture(params=["before its slice is known", "with a part missing"])
def desk(request: pytest.FixtureRequest) -> Desk:
    """Of a host with two devices of 64 MiB, where uploads wait for one of two reasons."""
    launcher: Any = SimpleNamespace(
        buffers=Buffers(), memory=SimpleNamespace(limit=64 << 20), forget_fetches=lambda of: None
    )
    never: Any = None
    place: Any = SimpleNamespace(numbers=(0, 1)) if "part" in request.param else None
    return Desk("h", b"", launcher, tenants(place), never, never, never)


def tenants(place: Any) -> Any:
    """They have one slice, in this place."""
    bound = None if place is None else SimpleNamespace(generation=0)
    return SimpleNamespace(where=lambda _: place, binding=lambda _: bound)


def test_what_is_for_no_device_of_a_slice_that_moves_ends_nobody_but_its_sender() -> None:
    sent: list[Any] = []
    never: Any = None
    launcher: Any = SimpleNamespace(buffers=Buffers(), memory=SimpleNamespace(limit=64 << 20))
    desk = Desk("h", b"", launcher, tenants(None), never, never, never)
    sending: Any = desk
    sending.send_on = lambda *put: sent.append(put)
    link, high = Link(EVE), EVE << 32
    layout = Layout((("x", 2),), (("x",),))
    fields = upload_fields(high | 1, high | 1, [2], "uint8", layout)
    for right in (0, 1):
        desk.put(link, unpack_fields(Put, {**fields, "devices": [right]}), [memoryview(b"a")])
    # Before anything is known of the slice.
    desk.put(link, unpack_fields(Put, {**fields, "devices": [2]}), [memoryview(b"a")])
    moved = SliceBinding(high | 1, "eve", "i", (2,), ("x",), (("g", 0), ("g", 1)), "cpu", 1)
    assert [list(parts) for _, parts in desk.take_early(moved)] == [[0], [1]]
    desk.moved[high | 1] = moved
    with pytest.raises(ValueError, match="is for its devices"):
        desk.put(link, unpack_fields(Put, {**fields, "devices": [2]}), [memoryview(b"a")])
    assert sent == []


# Nobody touches these bytes, so they are no memory.
PART = memoryview(mmap.mmap(-1, GIB))


def put(desk: Desk, link: Any, number: int) -> None:
    """One of two parts of an upload: 1 GiB."""
    high = link.holder << 32
    layout = Layout((("x", 2),), (("x",),))
    fields = upload_fields(high | number, high | 1, [2 * GIB], "uint8", layout)
    desk.put(link, unpack_fields(Put, {**fields, "devices": [0]}), [PART])


@pytest.mark.parametrize("links", [1, 7])
def test_what_a_client_has_not_finished_is_bounded_over_all_its_links(
    desk: Desk, links: int
) -> None:
    ways = [Link(EVE) for _ in range(links)]
    for number in range(4):
        put(desk, ways[number % links], number)
    for way in ways:
        with pytest.raises(ValueError, match="uploads of client 2 that are not complete"):
            put(desk, way, 9)
    put(desk, Link(ANN), 1)
    desk.closed(ways[0])
    put(desk, Link(EVE), 9)


def test_what_a_client_has_uploaded_and_nobody_reads_is_bounded_too(desk: Desk) -> None:
    """By what may be incomplete, and the memory of all devices: one has 64 MiB here."""
    uploaded = desk._launcher.buffers.uploaded
    uploaded[EVE] = uploaded[ANN] = 4 * GIB + (64 << 20) - GIB
    put(desk, Link(EVE), 1)
    with pytest.raises(ValueError, match="uploads of client 2 that no computation has read take 4"):
        put(desk, Link(EVE), 2)
    put(desk, Link(ANN), 1)
    uploaded[EVE] -= GIB
    put(desk, Link(EVE), 2)


def test_a_client_has_only_so_many_links_to_a_host(desk: Desk) -> None:
    hello = {"role": "client"}
    links = [Link(EVE) for _ in range(256)]
    for link in links:
        desk.meet(link, hello)
    with pytest.raises(Refused, match="client 2 has 256 links to h already"):
        desk.meet(Link(EVE), hello)
    desk.meet(Link(ANN), hello)
    desk.closed(links[7])
    desk.meet(Link(EVE), hello)


def test_an_upload_that_comes_again_is_not_taken_again(desk: Desk) -> None:
    """Whoever sent it did not live to hear that it had come."""
    there: Any = desk._launcher.buffers
    there[ANN << 32 | 7] = object()
    put(desk, Link(ANN), 7)
    assert not desk._uploads
    assert not any(desk._early.values())


def test_nobody_answers_a_client_whose_link_is_gone() -> None:
    forgotten: list[Any] = []
    never: Any = None
    launcher: Any = SimpleNamespace(forget_fetches=forgotten.append)
    desk = Desk("h", b"", launcher, never, never, never, never)
    ann, eve = Link(ANN), Link(EVE)
    desk.closed(ann)
    (gone,) = forgotten
    assert gone(Fetch(ann, 1, (0,)))
    assert not gone(Fetch(eve, 1, (0,)))


@pytest.mark.parametrize("end", [Desk.parted, Desk.closed])
def test_a_host_that_leaves_hands_over_what_clients_have_asked_for(end: Any) -> None:
    asked: list[Fetch] = []
    never: Any = None
    launcher: Any = SimpleNamespace(
        fetch=lambda fetch, buffer: asked.append(fetch),
        # Nothing will ever make the second value.
        forget_fetches=lambda which: [which(fetch) for fetch in asked[1:]],
    )
    desk = Desk("h", b"", launcher, never, never, never, never)
    ann, told, over = Link(ANN), [], []
    ann.send = lambda op, fields, buffers=(): told.append(op)
    for number in (1, 2):
        desk.fetch(ann, Ask(number, ANN << 32 | number, (0,)), [])
    desk.hand_over(lambda: over.append(True))
    assert (told, over) == ([], [])
    desk.refuse(asked[0], Failure("lost", "any answer will do"))
    assert (told, over) == (["fetch-failed", "parting"], []), "it may still be on its way"
    end(desk, ann)
    assert over == [True]


def test_a_host_that_leaves_and_that_nobody_asks_goes_at_once() -> None:
    never: Any = None
    launcher: Any = SimpleNamespace(forget_fetches=lambda which: None)
    over: list[bool] = []
    desk = Desk("h", b"", launcher, never, never, never, never)
    desk.hand_over(lambda: over.append(True))
    assert over == [True]


def test_what_has_come_of_a_dropped_upload_is_not_kept() -> None:
    never: Any = None
    launcher: Any = SimpleNamespace(buffers=Buffers(), memory=SimpleNamespace(limit=64 << 20))
    place: Any = SimpleNamespace(numbers=(0, 1))
    desk = Desk("h", b"", launcher, tenants(place), never, never, never)
    put(desk, Link(ANN), 7)
    assert desk._uploads
    desk.free((ANN << 32 | 7,))
    assert not desk._uploads


def test_uploads_count_for_their_client_until_a_gang_has_them_or_they_are_gone() -> None:
    bench = Bench(binding(1, 0, 1))
    ann, eve = 1 << 32, 2 << 32
    uploaded = bench.launcher.buffers.uploaded
    for buffer in (ann | 1, ann | 2, eve | 1, eve | 2):
        bench.take(bench.launcher.uploaded(buffer, value(1, "u"), "payload"))
    bench.take(bench.launcher.uploaded(eve | 3, value(1, "u"), Failure("lost", "its link broke")))
    assert uploaded == {1: 4 * BYTES, 2: 4 * BYTES}, "on two devices each"
    bench.take(bench.launcher.free((ann | 1, eve | 9)))
    bench.take(bench.launcher.uploaded(eve | 9, value(1, "u"), "payload"))
    assert uploaded == {1: 2 * BYTES, 2: 4 * BYTES}
    plan = PlanBuilder().call(1, "f", ["a"], ["b"]).plan(["a"], ["b"])
    bench.launcher.program(plan)
    bench.grant(grant(1, plan, inputs=(eve | 1,), outputs=(eve | 4,)))
    bench.done("f")
    assert uploaded == {1: 2 * BYTES, 2: 2 * BYTES}
    bench.take(bench.launcher.unbind(1))
    assert not uploaded
