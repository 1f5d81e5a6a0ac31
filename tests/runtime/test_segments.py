"""Large buffers through shared memory: intact, reused, never left behind, never trusted blindly."""

from __future__ import annotations

import errno
import fcntl
import gc
import mmap
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from pathways_lab.runtime import segments
from pathways_lab.runtime.auth import new_key
from pathways_lab.runtime.link import Link
from pathways_lab.runtime.pages import Pages, size_class
from pathways_lab.runtime.reactor import Reactor
from pathways_lab.runtime.segments import SHARED_FROM, Borrower, Lender, Segment
from pathways_lab.runtime.wire import Decoder, WireError, encode
from tests.runtime.processes import until

pytestmark = pytest.mark.skipif(not segments.SUPPORTED, reason="no sealed shared memory here")
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

    def close(self) -> None:
        self.client.close()
        self.server.close()


@pytest.fixture
def ends(tmp_path: Path) -> Iterator[Ends]:
    made = Ends(f"unix:{tmp_path}/s")
    yield made
    made.close()


def segments_of(pid: int | str = "self") -> int:
    """How many mappings of segments a process has."""
    return Path(f"/proc/{pid}/maps").read_text().count("memfd:pathways-lab")


def test_both_directions_go_through_shared_memory(ends: Ends) -> None:
    data = np.random.default_rng(0).integers(0, 256, MIB, dtype=np.uint8)
    ends.link.send("there", {"n": 1}, [data, b"", data[:100]])
    fields, there = ends.take()
    assert fields == {"n": 1}
    assert [bytes(part) for part in there] == [data.tobytes(), b"", data[:100].tobytes()]
    ends.accepted[0].send("back", {}, [there[0]])
    assert bytes(ends.take()[1][0]) == data.tobytes()
    assert ends.link.lent_messages == ends.accepted[0].lent_messages == 1
    assert ends.link.received_messages == 1


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


@pytest.mark.parametrize("path", ["shared", "no-room", "tcp"])
def test_random_sizes_types_and_layouts(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if path == "no-room":
        monkeypatch.setattr(segments, "MOST", 0)
    ends = Ends("tcp://127.0.0.1:0" if path == "tcp" else f"unix:{tmp_path}/s")
    draw, values = random.Random(7), np.random.default_rng(7)
    kept: list[tuple[memoryview, bytes]] = []
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
    assert (ends.link.lent_messages > 3) == (path == "shared")
    ends.close()


def test_segments_are_used_again(ends: Ends) -> None:
    for number in range(40):
        ends.link.send("a", {"n": number}, [np.full(MIB, number, np.uint8)])
        _, parts = ends.take()
        assert parts[0][5] == number
        del parts
        time.sleep(0.002)
    assert ends.link.lent_messages == 40
    assert segments_of() <= 2 * 6, "made anew instead of used again"


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
    until(lambda: segments_of() == 0)


def test_no_room_means_socket(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "no space left")

    monkeypatch.setattr(os, "posix_fallocate", full)
    ends.link.send("a", {}, [bytes(MIB)])
    assert len(ends.take()[1][0]) == MIB
    assert ends.link.lent_messages == 0
    assert segments_of() == 0
    monkeypatch.undo()
    # Not tried again at once: a try costs as much as the transfer.
    ends.link.send("a", {}, [bytes(MIB)])
    ends.take()
    assert ends.link.lent_messages == 0


def test_little_memory_means_socket(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments, "available_memory", lambda: 3 * MIB)
    ends.link.send("a", {}, [bytes(MIB)])
    ends.take()
    assert ends.link.lent_messages == 0


def test_old_segments_give_way_to_other_sizes(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments, "MOST", 3 * MIB)
    for size in (MIB, 3 * MIB, 200 * 1024, MIB, 3 * MIB):
        ends.link.send("a", {}, [bytes(size)])
        assert len(ends.take()[1][0]) == size
        until(lambda: ends.link._lender is not None and not ends.link._lender._lent)
    assert ends.link.lent_messages == 5
    borrower = ends.accepted[0]._borrower
    assert borrower is not None
    assert len(borrower._mapped) == 1, "what gave way is not kept at the other end"


def test_a_message_that_cannot_be_encoded_leaves_no_segment_on_loan(ends: Ends) -> None:
    lender = ends.link._lender
    assert lender is not None
    with pytest.raises(WireError):
        ends.link.send("a", {"thing": object()}, [bytes(MIB)])
    assert lender._lent == {}
    ends.link.send("a", {}, [bytes(MIB)])
    assert len(ends.take()[1][0]) == MIB
    assert lender._numbers == 1


CHILD = """
import sys, time
from pathways_lab.runtime.reactor import Reactor
reactor = Reactor("child", lambda *_: None, lambda *_: None)
reactor.start()
link = reactor.connect(sys.argv[1], bytes.fromhex(sys.argv[2]), {"name": "child"}, bulk=True)
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
        until(lambda: len(ends.got) == 4)
        child.send_signal(signal.SIGKILL)
        child.wait()
    until(lambda: ends.closed)
    assert [bytes(parts[0][:2]) for _, parts in ends.got] == [bytes([n, n]) for n in range(4)]
    ends.got.clear()
    gc.collect()
    until(lambda: segments_of() == 0)
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
        self.borrower = Borrower(lambda: None)
        self.decoder = Decoder()
        self.decoder.borrower = self.borrower

    def send(self, claim: Any, lengths: list[int], descriptors: list[int] = []) -> list[Any]:  # noqa: B006
        frame = encode("x", {}, [bytes(length) for length in lengths], claim)
        socket.send_fds(self.ours, frame, descriptors)
        count = self.borrower.receive(self.theirs, self.decoder.space())
        messages: list[Any] = []
        self.decoder.advance(count, messages)
        return messages

    def close(self) -> None:
        self.borrower.close()
        self.ours.close()
        self.theirs.close()


@pytest.fixture
def hostile() -> Iterator[Hostile]:
    made = Hostile()
    yield made
    made.close()


def test_a_fair_segment_is_taken(hostile: Hostile) -> None:
    segment = Segment(1, MIB)
    segment.memory[:3] = b"abc"
    (message,) = hostile.send((1, MIB, True, []), [3, 100], [segment.descriptor])
    assert bytes(message.buffers[0]) == b"abc"
    with pytest.raises(WireError, match="in use"):
        hostile.send((1, MIB, False, []), [3])


def test_a_segment_in_use_cannot_be_withdrawn(hostile: Hostile) -> None:
    first, second = Segment(1, MIB), Segment(2, MIB)
    (kept,) = hostile.send((1, MIB, True, []), [3], [first.descriptor])
    with pytest.raises(WireError, match="in use or unknown was withdrawn"):
        hostile.send((2, MIB, True, [1]), [3], [second.descriptor])
    assert len(kept.buffers[0]) == 3


def test_a_mapping_that_is_gone_leaves_no_descriptor(hostile: Hostile) -> None:
    segment = Segment(1, MIB)
    before = len(os.listdir("/proc/self/fd"))
    assert hostile.send((1, MIB, True, []), [3], [segment.descriptor])
    hostile.borrower.close()
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize(
    ("claim", "lengths", "given"),
    [
        ((1, MIB, True, []), [3], 0),
        ((1, MIB, False, []), [3], 0),
        ((1, 2 * MIB, True, []), [3], 1),
        ((1, MIB, True, []), [MIB, 1], 1),
        ((1, MIB, True, [7]), [3], 1),
        ((1, MIB, True, [[]]), [3], 1),
        (("1", MIB, True, []), [3], 1),
        ((1, MIB), [3], 1),
        (5, [3], 1),
        ((1, MIB, True, []), [3], 9),
    ],
)
def test_wrong_claims_are_refused(
    hostile: Hostile, claim: Any, lengths: list[int], given: int
) -> None:
    segment = Segment(1, MIB)
    with pytest.raises((WireError, segments.SegmentError)):
        hostile.send(claim, lengths, [segment.descriptor] * given)


def test_memory_that_could_be_taken_away_is_refused(hostile: Hostile) -> None:
    """Reading memory that was cut off kills a process: without the seal nothing is mapped."""
    descriptor = os.memfd_create("open", os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, MIB)
    with pytest.raises(WireError, match="sealed"):
        hostile.send((1, MIB, True, []), [3], [descriptor])
    os.close(descriptor)
    sealed = Segment(2, MIB)
    with pytest.raises(PermissionError):
        os.ftruncate(sealed.descriptor, 10)
    assert fcntl.fcntl(sealed.descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK


def test_links_without_shared_memory_refuse_claims() -> None:
    frame = b"".join(encode("x", {}, [b"abc"], (1, MIB, False, [])))
    with pytest.raises(WireError, match="shares no memory"):
        Decoder().feed(frame)


def test_a_false_return_closes_only_its_link(ends: Ends) -> None:
    ends.link.send("\0return", {"segments": [99]})
    until(lambda: len(ends.closed) == 2)
    assert any("not on loan" in reason for reason in ends.closed)


def test_descriptors_do_not_pile_up(hostile: Hostile) -> None:
    before = len(os.listdir("/proc/self/fd"))
    segment = Segment(1, MIB)
    for _ in range(8):
        hostile.send(None, [], [segment.descriptor])
    with pytest.raises(segments.SegmentError, match="too many"):
        hostile.send(None, [], [segment.descriptor])
    hostile.borrower.close()
    del segment
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


def test_pages_that_lie_unused_are_bounded() -> None:
    pages = Pages(keep=3 * MIB)
    for size in (MIB, 2 * MIB, 4 * MIB, MIB // 2):
        pages.take(size)
    assert pages._idle <= 3 * MIB
    assert sum(size * len(free) for size, free in pages._free.items()) == pages._idle


def test_a_lender_stops_at_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments, "MOST", MIB)
    lender = Lender()
    data = [memoryview(bytes(SHARED_FROM))]
    lent = [lender.lend(data) for _ in range(10)]
    assert sum(entry is not None for entry in lent) == MIB // size_class(SHARED_FROM)
