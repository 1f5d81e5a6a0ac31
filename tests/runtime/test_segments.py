"""Large buffers through shared memory: intact, reused, never left behind, never trusted blindly."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import gc
import mmap
import os
import random
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from pathways_lab.transport import shared_memory
from pathways_lab.transport.auth import new_key
from pathways_lab.transport.buffer_pool import Pages, size_class
from pathways_lab.transport.framing import Decoder, WireError, encode
from pathways_lab.transport.link import Link
from pathways_lab.transport.reactor import Reactor
from pathways_lab.transport.shared_memory import SHARED_FROM, SPAN, Arena, Borrower, Lender, _Gaps
from tests.runtime.processes import until

pytestmark = pytest.mark.skipif(not shared_memory.SUPPORTED, reason="no sealed shared memory here")
KEY = new_key()
MIB = 1 << 20


class Ends:
    """Two reactors and a link between them; what arrived at either."""

    def __init__(self, address: str) -> None:
        self.got: list[tuple[dict[str, Any], list[memoryview]]] = []
        self.accepted: list[Link] = []
        self.closed: list[str] = []
        self.server = Reactor(
            "server", self._message, self._closed, lambda link, _: self.accepted.append(link)
        )
        self.client = Reactor("client", self._message, self._closed)
        real = self.server.listen(address, KEY, {"name": "server"}, bulk=True)
        self.server.start()
        self.client.start()
        self.link = self.client.connect(real, KEY, {"name": "client"}, bulk=True)

    def _message(self, link: Link, op: str, fields: dict[str, Any], buffers: Any) -> None:
        self.got.append((fields, buffers))

    def _closed(self, link: Link, reason: str) -> None:
        self.closed.append(reason)

    def take(self) -> tuple[dict[str, Any], list[memoryview]]:
        until(lambda: self.got)
        return self.got.pop(0)

    def share(self) -> None:
        """Have both ends lend: the first large message of each goes through its socket."""
        self.link.send("a", {}, [bytes(SHARED_FROM)])
        self.take()
        self.accepted[0].send("a", {}, [bytes(SHARED_FROM)])
        self.take()
        for link in (self.link, self.accepted[0]):
            until(lambda link=link: lender_of(link)._shared)  # type: ignore[misc]

    def close(self) -> None:
        self.client.close()
        self.server.close()


def lender_of(link: Link) -> Lender:
    assert link._lender is not None
    return link._lender


@pytest.fixture
def ends(tmp_path: Path) -> Iterator[Ends]:
    made = Ends(f"unix:{tmp_path}/s")
    made.share()
    yield made
    made.close()


def arenas() -> int:
    """How many mappings of arenas this process has."""
    return Path("/proc/self/maps").read_text().count("memfd:pathways-lab")


def memory_of(arena: Arena) -> int:
    """Bytes of memory that an arena has taken."""
    return 512 * os.fstat(arena.descriptor).st_blocks


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_both_directions_go_through_shared_memory(ends: Ends) -> None:
    data = np.random.default_rng(0).integers(0, 256, MIB, dtype=np.uint8)
    ends.link.send("there", {"n": 1}, [data, b"", data[:100]])
    fields, there = ends.take()
    assert fields == {"n": 1}
    assert [bytes(part) for part in there] == [data.tobytes(), b"", data[:100].tobytes()]
    ends.accepted[0].send("back", {}, [there[0]])
    assert bytes(ends.take()[1][0]) == data.tobytes()
    assert ends.link.lent_messages == ends.accepted[0].lent_messages == 1


def test_what_comes_before_the_other_end_has_mapped_the_arena_goes_through_the_socket(
    tmp_path: Path,
) -> None:
    ends = Ends(f"unix:{tmp_path}/s")
    ends.link.send("a", {}, [b"x" * MIB])
    assert bytes(ends.take()[1][0]) == b"x" * MIB
    assert ends.link.lent_messages == 0
    until(lambda: lender_of(ends.link)._shared)
    ends.link.send("a", {}, [b"y" * MIB])
    assert bytes(ends.take()[1][0]) == b"y" * MIB
    assert ends.link.lent_messages == 1
    ends.close()


def test_neither_many_nor_kept_buffers_take_descriptors(ends: Ends) -> None:
    before, kept = descriptors(), []
    for number in range(300):
        ends.link.send("a", {}, [np.full(SHARED_FROM, number % 251, np.uint8)])
        kept.append(ends.take()[1][0])
    assert ends.link.lent_messages == 300
    assert descriptors() == before
    assert all(part[-1] == number % 251 for number, part in enumerate(kept))


@contextlib.contextmanager
def few_descriptors(more: int) -> Iterator[None]:
    """This process may have so many more descriptors than it has."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.dup(0)
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free + more, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_process_that_can_open_nothing_more_gets_all_bytes(tmp_path: Path) -> None:
    ends = Ends(f"unix:{tmp_path}/s")
    until(lambda: ends.accepted)
    with few_descriptors(0):
        ends.link.send("a", {}, [b"x" * MIB])
        assert bytes(ends.take()[1][0]) == b"x" * MIB
    assert lender_of(ends.link)._arena is None
    assert ends.closed == []
    ends.close()


def test_a_descriptor_that_finds_no_room_is_no_lie(hostile: Hostile) -> None:
    arena = Arena()
    with few_descriptors(0):
        hostile.send(None, [], [arena.descriptor])
        assert not hostile.borrower.take(arena.size)
    hostile.send(None, [], [arena.descriptor])
    assert hostile.borrower.take(arena.size)


def test_an_end_that_cannot_map_the_arena_says_so_and_gets_all_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends = Ends(f"unix:{tmp_path}/s")
    monkeypatch.setattr(Borrower, "take", lambda self, size: False)
    for number in range(3):
        ends.link.send("a", {}, [bytes([number]) * MIB])
        assert bytes(ends.take()[1][0]) == bytes([number]) * MIB
        until(lambda: lender_of(ends.link)._arena is None)
    assert ends.link.lent_messages == 0
    assert ends.closed == []
    ends.close()


def test_arenas_leave_most_descriptors_to_others() -> None:
    first = os.dup(0)
    taken = [first]
    with few_descriptors(30):
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        while taken[-1] < soft // 4:
            taken.append(os.dup(0))
        with pytest.raises(OSError, match="Too many open files"):
            Arena()
    for descriptor in taken:
        os.close(descriptor)
    assert Arena().descriptor == first


def test_ends_that_do_not_agree_use_the_socket(ends: Ends, tmp_path: Path) -> None:
    plain = ends.server.listen(f"unix:{tmp_path}/plain", KEY, {"name": "server"})
    shared = ends.server.listen(f"unix:{tmp_path}/shared", KEY, {"name": "server"}, bulk=True)
    for address, bulk in ((plain, True), (shared, False)):
        link = ends.client.connect(address, KEY, {}, bulk=bulk)
        link.send("a", {}, [bytes(MIB)])
        assert len(ends.take()[1][0]) == MIB
        assert link.lent_messages == 0


def test_the_accepting_end_waits_until_descriptors_cannot_be_lost(tmp_path: Path) -> None:
    """What it says right behind its hello may be read before the other end has a link."""
    ends = Ends(f"unix:{tmp_path}/s")
    until(lambda: ends.accepted)
    ends.accepted[0].send("early", {}, [bytes(MIB)])
    assert len(ends.take()[1][0]) == MIB
    assert ends.accepted[0].lent_messages == 0
    ends.close()


KINDS = [np.uint8, np.float32, np.int64, np.complex64, np.bool_, ml_dtypes.bfloat16]


@pytest.fixture(params=["shared", "no-room", "tcp"])
def on_path(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Ends]:
    if request.param == "no-room":
        monkeypatch.setattr(shared_memory, "MOST", 0)
    ends = Ends("tcp://127.0.0.1:0" if request.param == "tcp" else f"unix:{tmp_path}/s")
    ends.link.send("a", {}, [bytes(MIB)])
    ends.take()
    if request.param != "tcp":
        until(lambda: lender_of(ends.link)._shared)
    yield ends
    assert (ends.link.lent_messages > 0) == (request.param == "shared")
    ends.close()


def test_random_sizes_types_and_layouts(on_path: Ends) -> None:
    ends, draw, values, kept = on_path, random.Random(7), np.random.default_rng(7), []
    for number in range(60):
        arrays = []
        for _ in range(draw.randint(1, 4)):
            shape = [draw.choice([0, 1, 64, 257, 600, 900]) for _ in range(draw.randint(0, 2))]
            array = (values.random(shape) * 100).astype(draw.choice(KINDS))
            array = np.array(array.T if draw.random() < 0.3 else np.flip(array), order="C")
            arrays.append(array)
        wire = [array.reshape(-1).view(np.uint8) for array in arrays]
        ends.link.send("a", {"n": number}, wire)
        fields, parts = ends.take()
        assert fields["n"] == number
        for array, part in zip(arrays, parts, strict=True):
            assert bytes(part) == array.tobytes()
        if draw.random() < 0.3:
            # The receiver keeps some: nothing that comes later may touch them.
            kept += [(part, array.tobytes()) for part, array in zip(parts, arrays, strict=True)]
    assert all(bytes(part) == content for part, content in kept)


def test_what_passes_may_change_as_soon_as_it_is_sent(on_path: Ends) -> None:
    data = np.ones(16 * MIB, np.uint8)
    on_path.link.send("b", {}, [data], passing=True)
    data[:] = 0
    assert bytes(on_path.take()[1][0]) == bytes([1]) * 16 * MIB


def test_segments_are_used_again(ends: Ends) -> None:
    for number in range(40):
        ends.link.send("a", {"n": number}, [np.full(MIB, number, np.uint8)])
        _, parts = ends.take()
        assert parts[0][5] == number
        del parts
        # With each message those before it come back.
        until(lambda: len(lender_of(ends.link)._lent) <= 1)
    assert ends.link.lent_messages == 40
    arena = lender_of(ends.link)._arena
    assert arena is not None
    assert memory_of(arena) <= 6 * MIB, "made anew instead of used again"


def test_what_is_kept_stays_as_it_is(ends: Ends) -> None:
    kept = []
    for number in range(6):
        ends.link.send("a", {}, [np.full(MIB, number, np.uint8)])
        kept.append(np.frombuffer(ends.take()[1][0], np.uint8))
    assert [set(array.tolist()) for array in kept] == [{n} for n in range(6)]
    ends.link.close()
    until(lambda: len(ends.closed) == 2)
    # Also after the end of the link.
    assert [int(array[-1]) for array in kept] == list(range(6))
    del kept
    gc.collect()
    until(lambda: arenas() == 0)


def test_what_is_kept_after_the_end_of_a_link_keeps_no_other_memory(hostile: Hostile) -> None:
    arena = hostile.shares()
    arena.fill(0, 8 * MIB)
    messages = [hostile.send(start * MIB, [MIB])[0] for start in range(8)]
    del messages[5:], messages[:2]
    gc.collect()
    hostile.borrower.close()
    assert memory_of(arena) == 3 * MIB


def test_no_room_means_socket(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "no space left")

    monkeypatch.setattr(os, "posix_fallocate", full)
    ends.link.send("a", {}, [bytes(MIB)])
    assert len(ends.take()[1][0]) == MIB
    assert ends.link.lent_messages == 0
    monkeypatch.undo()
    # Not tried again at once: a try costs as much as the transfer.
    ends.link.send("a", {}, [bytes(MIB)])
    ends.take()
    assert ends.link.lent_messages == 0


def test_little_memory_means_socket(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory, "available_memory", lambda: 3 * MIB)
    ends.link.send("a", {}, [bytes(MIB)])
    ends.take()
    assert ends.link.lent_messages == 0


def test_old_segments_give_way_to_other_sizes(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory, "MOST", 3 * MIB)
    for size in (MIB, 3 * MIB, 200 * 1024, MIB, 3 * MIB):
        ends.link.send("a", {}, [bytes(size)])
        assert len(ends.take()[1][0]) == size
        until(lambda: not lender_of(ends.link)._lent)
    assert ends.link.lent_messages == 5
    arena = lender_of(ends.link)._arena
    assert arena is not None
    assert memory_of(arena) == 3 * MIB, "what gave way is not kept"


def test_a_message_that_cannot_be_encoded_leaves_nothing_on_loan(ends: Ends) -> None:
    lender = lender_of(ends.link)
    with pytest.raises(WireError):
        ends.link.send("a", {"thing": object()}, [bytes(MIB)])
    assert lender._lent == {}
    ends.link.send("a", {}, [bytes(MIB)])
    assert len(ends.take()[1][0]) == MIB
    assert lender._total == size_class(MIB)


CHILD = """
import sys, time
from pathways_lab.transport.reactor import Reactor
reactor = Reactor("child", lambda *_: None, lambda *_: None)
reactor.start()
link = reactor.connect(sys.argv[1], bytes.fromhex(sys.argv[2]), {"name": "child"}, bulk=True)
link.send("a", {"n": 9}, [bytes([9]) * (1 << 20)])
while not link._lender._shared:
    time.sleep(0.01)
for number in range(4):
    link.send("a", {"n": number}, [bytes([number]) * (1 << 20)])
assert link.lent_messages == 4
print("sent", flush=True)
time.sleep(60)
"""


@pytest.mark.cluster
def test_a_killed_sender_leaves_nothing_behind(tmp_path: Path) -> None:
    before = set(os.listdir("/dev/shm")) if Path("/dev/shm").is_dir() else set()
    ends = Ends(f"unix:{tmp_path}/s")
    address = ends.server.listen(f"unix:{tmp_path}/c", KEY, {"name": "server"}, bulk=True)
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, address, KEY.hex()], stdout=subprocess.PIPE
    )
    assert child.stdout is not None
    with child, child.stdout:
        assert child.stdout.readline() == b"sent\n"
        until(lambda: len(ends.got) == 5)
        child.send_signal(signal.SIGKILL)
        child.wait()
    until(lambda: ends.closed)
    assert [bytes(parts[0][:2]) for _, parts in ends.got] == [
        bytes([n, n]) for n in (9, 0, 1, 2, 3)
    ]
    ends.got.clear()
    gc.collect()
    until(lambda: arenas() == 0)
    ends.close()
    if Path("/dev/shm").is_dir():
        assert set(os.listdir("/dev/shm")) <= before


# --- what a wrong or hostile peer may try ------------------------------------------------


class Hostile:
    """Raw frames to a borrower, as they would come over a socket."""

    def __init__(self) -> None:
        self.ours, theirs = socket.socketpair()
        theirs.setblocking(False)
        self.theirs = theirs
        self.borrower = Borrower()
        self.decoder = Decoder()
        self.decoder.borrower = self.borrower

    def send(self, claim: Any, lengths: list[int], descriptors: list[int] = []) -> list[Any]:  # noqa: B006
        frame = encode("x", {}, [bytes(length) for length in lengths], claim)
        socket.send_fds(self.ours, frame, descriptors)
        count = self.borrower.receive(self.theirs, self.decoder.space())
        messages: list[Any] = []
        self.decoder.advance(count, messages)
        return messages

    def shares(self) -> Arena:
        """An arena that the borrower has mapped."""
        arena = Arena()
        self.send(None, [], [arena.descriptor])
        assert self.borrower.take(arena.size)
        return arena

    def close(self) -> None:
        self.borrower.close()
        self.ours.close()
        self.theirs.close()


@pytest.fixture
def hostile() -> Iterator[Hostile]:
    made = Hostile()
    yield made
    made.close()


def test_a_fair_claim_is_taken(hostile: Hostile) -> None:
    arena = hostile.shares()
    arena.memory[MIB : MIB + 3] = b"abc"
    (message,) = hostile.send(MIB, [3, 100])
    assert bytes(message.buffers[0]) == b"abc"
    with pytest.raises(WireError, match="in use"):
        hostile.send(MIB, [3])


def test_a_mapping_that_is_gone_leaves_no_descriptor(hostile: Hostile) -> None:
    before = descriptors()
    hostile.shares()
    hostile.borrower.close()
    assert descriptors() == before


@pytest.mark.parametrize(
    ("claim", "lengths"),
    [
        (SPAN, [3]),
        (SPAN - mmap.PAGESIZE, [mmap.PAGESIZE + 1]),
        (-mmap.PAGESIZE, [3]),
        (100, [3]),
        (0, []),
        ("1", [3]),
        (True, [3]),
        ([[]], [3]),
    ],
)
def test_wrong_claims_are_refused(hostile: Hostile, claim: Any, lengths: list[int]) -> None:
    arena = hostile.shares()
    arena.fill(SPAN - 2 * mmap.PAGESIZE, 2 * mmap.PAGESIZE)
    with pytest.raises(WireError):
        hostile.send(claim, lengths)


def test_a_claim_without_an_arena_is_refused(hostile: Hostile) -> None:
    with pytest.raises(WireError, match="is none"):
        hostile.send(0, [3])


def test_wrong_offers_are_refused(hostile: Hostile) -> None:
    arena = Arena()
    assert not hostile.borrower.take(arena.size), "it came without its descriptor"
    for size in (arena.size + 1, "1", None):
        hostile.send(None, [], [arena.descriptor])
        with pytest.raises(shared_memory.SegmentError):
            hostile.borrower.take(size)
    hostile.borrower.close()
    hostile.shares()
    with pytest.raises(shared_memory.SegmentError, match="twice"):
        hostile.borrower.take(arena.size)


def test_memory_that_could_be_taken_away_is_refused(hostile: Hostile) -> None:
    """Reading memory that was cut off kills a process: without the seal nothing is mapped."""
    descriptor = os.memfd_create("open", os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, MIB)
    hostile.send(None, [], [descriptor])
    with pytest.raises(shared_memory.SegmentError, match="sealed"):
        hostile.borrower.take(MIB)
    os.close(descriptor)
    sealed = Arena()
    with pytest.raises(PermissionError):
        os.ftruncate(sealed.descriptor, 10)
    assert fcntl.fcntl(sealed.descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK


def test_links_without_shared_memory_refuse_claims() -> None:
    frame = b"".join(encode("x", {}, [b"abc"], 0))
    with pytest.raises(WireError, match="shares no memory"):
        Decoder().feed(frame)


def test_a_false_return_closes_only_its_link(ends: Ends) -> None:
    ends.link.send("\0return", {"parts": [99]})
    until(lambda: len(ends.closed) == 2)
    assert any("not on loan" in reason for reason in ends.closed)


def test_descriptors_do_not_pile_up(hostile: Hostile) -> None:
    before = len(os.listdir("/proc/self/fd"))
    arena = Arena()
    for _ in range(8):
        hostile.send(None, [], [arena.descriptor])
    with pytest.raises(shared_memory.SegmentError, match="too many"):
        hostile.send(None, [], [arena.descriptor])
    hostile.borrower.close()
    del arena
    assert len(os.listdir("/proc/self/fd")) <= before


# --- memory ---------------------------------------------------------------------------------


def test_pages_come_back_when_the_last_view_is_gone() -> None:
    pages = Pages()
    view = pages.take(300_000)
    array = np.frombuffer(view, np.uint8)[10:20]
    del view
    other = pages.take(300_000)
    assert pages.allocated == 2 * size_class(300_000)
    del array, other
    again = pages.take(290_000)
    assert pages.allocated == 2 * size_class(300_000)
    assert again.nbytes == 290_000
    assert np.frombuffer(again, np.uint8).ctypes.data % mmap.PAGESIZE == 0


def test_nothing_of_pythons_runs_where_the_last_view_goes(hostile: Hostile) -> None:
    """That may be anywhere, and Ctrl-C would be lost there."""
    hostile.shares()
    pages = Pages()
    called: list[str] = []
    views = [pages.take(300_000), hostile.send(0, [MIB])[0].buffers[0]]

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            called.append(frame.f_code.co_name)

    sys.setprofile(note)
    del views[:]
    sys.setprofile(None)
    assert called == []
    assert hostile.borrower.unused() == [0]
    pages.tidy()
    assert pages._idle == size_class(300_000)


def test_pages_that_lie_unused_are_bounded() -> None:
    pages = Pages(keep=3 * MIB)
    for size in (MIB, 2 * MIB, 4 * MIB, MIB // 2):
        pages.take(size)
    assert pages._idle <= 3 * MIB
    assert sum(size * len(free) for size, free in pages._free.items()) == pages._idle


def test_a_lender_stops_at_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory, "MOST", MIB)
    lender = Lender()
    assert lender.offer() is not None
    lender.answered(True)
    data = [memoryview(bytes(SHARED_FROM))]
    lent = [lender.lend(data) for _ in range(10)]
    assert sum(entry is not None for entry in lent) == MIB // size_class(SHARED_FROM)


def test_parts_of_an_arena_never_meet_and_gaps_grow_together_again() -> None:
    draw, gaps = random.Random(5), _Gaps(1000)
    parts: dict[int, int] = {}
    for _ in range(3000):
        if parts and draw.random() < 0.5:
            start = draw.choice(sorted(parts))
            gaps.give(start, parts.pop(start))
        else:
            size = draw.randint(1, 90)
            place = gaps.take(size)
            if place is not None:
                parts[place] = size
        taken = [(start, start + size) for start, size in parts.items()]
        ends = sorted([*taken, *zip(gaps._starts, gaps._ends, strict=True)])
        assert [0, *(end for _, end in ends)] == [*(start for start, _ in ends), 1000]
        assert all(a < b for a, b in zip(gaps._ends, gaps._starts[1:], strict=False))
