"""One connection of HTTP/2, frame by frame."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from hpack import Decoder, Encoder
from hypothesis import given, settings
from hypothesis import strategies as st

from pathways_lab.door.protocol import http2
from pathways_lab.door.protocol.http2 import (
    ACK,
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    GOAWAY,
    HEADERS,
    PADDED,
    PING,
    PREFACE,
    PRIORITY,
    PUSH,
    RST_STREAM,
    SETTINGS,
    WINDOW,
    Call,
    Connection,
)
from pathways_lab.door.protocol.status import EXHAUSTED, INTERNAL, INVALID, UNIMPLEMENTED, Status

Frame = tuple[int, int, int, bytes]


class Echo:
    """Answers each message with itself, and the end with an end."""

    def __init__(self, call: Call, heard: list[Any]) -> None:
        self.call, self.heard = call, heard

    def messages(self, several: Sequence[bytes]) -> None:
        for one in several:
            if one == b"fails":
                raise ZeroDivisionError("nonsense")
            self.heard.append(one)
            self.call.answer(one)

    def said_all(self) -> None:
        self.call.end()

    def gone(self) -> None:
        self.heard.append("gone")


def frame(kind: int, flags: int, number: int, data: bytes = b"") -> bytes:
    return struct.pack(">HBBBI", len(data) >> 8, len(data) & 255, kind, flags, number) + data


def message(data: bytes) -> bytes:
    return struct.pack(">BI", 0, len(data)) + data


def block(path: str = "/service/method", **more: str) -> bytes:
    names = {":method": "POST", ":path": path, **more}
    made: bytes = Encoder().encode(list(names.items()))
    return made


def setting(name: int, value: int) -> bytes:
    return frame(SETTINGS, 0, 0, struct.pack(">HI", name, value))


BEGIN = frame(HEADERS, END_HEADERS, 1, block())


class Client:
    """The other end.  heard: by what served its calls."""

    def __init__(self, serve: Callable[[Call, list[Any]], Any] = Echo) -> None:
        self.heard: list[Any] = []
        self._link, other = socket.socketpair()
        self._link.settimeout(20)
        self._decoder = Decoder()
        self.connection = Connection(other, lambda call: serve(call, self.heard))
        self.thread = threading.Thread(target=self.connection.run)
        self.thread.start()

    def send(self, *frames: bytes) -> None:
        self._link.sendall(b"".join(frames))

    def frames(self) -> Iterator[Frame]:
        """What comes, until the door ends it."""
        while head := self._read(9):
            high, low, kind, flags, number = struct.unpack(">HBBBI", head)
            yield kind, flags, number, self._read(high << 8 | low)

    def _read(self, size: int) -> bytes:
        return self._link.recv(size, socket.MSG_WAITALL) if size else b""

    def answers(self, number: int = 1) -> tuple[bytes, int, str]:
        """All bytes of a call, how it ended, and why."""
        data = b""
        for kind, flags, of, come in self.frames():
            headers = dict(self._decoder.decode(come)) if kind == HEADERS else {}
            if of == number and kind == DATA:
                data += come
            elif of == number and kind == HEADERS and flags & END_STREAM:
                return data, int(headers["grpc-status"]), headers.get("grpc-message", "")
        raise AssertionError("the connection ended before the call")

    def leave(self) -> None:
        self._link.close()
        self.thread.join(20)
        assert not self.thread.is_alive()


@contextlib.contextmanager
def client(serve: Callable[[Call, list[Any]], Any] = Echo) -> Iterator[Client]:
    made = Client(serve)
    try:
        made.send(PREFACE)
        yield made
    finally:
        made.leave()


def test_a_call_is_answered_and_over_once():
    with client() as one:
        one.send(setting(3, 5), BEGIN, frame(DATA, END_STREAM, 1, message(b"a") + message(b"b")))
        assert one.answers() == (message(b"a") + message(b"b"), 0, "")
        assert one.heard == [b"a", b"b", "gone"]


@settings(max_examples=60, deadline=None)
@given(
    several=st.lists(st.binary(max_size=40), max_size=5),
    cuts=st.lists(st.integers(1, 30), max_size=20),
    pad=st.integers(0, 20),
    data=st.data(),
)
def test_messages_come_whole_however_they_are_cut(several, cuts, pad, data):
    """Into frames, and those into reads; headers too."""
    left, frames = b"".join(map(message, several)), []
    for size in cuts:
        frames.append(frame(DATA, PADDED, 1, bytes([pad]) + left[:size] + bytes(pad)))
        left = left[size:]
    head = bytes(5) + block()
    at = data.draw(st.integers(5, len(head)))
    begin = frame(HEADERS, PRIORITY, 1, head[:at]) + frame(CONTINUATION, 4, 1, head[at:])
    sent = b"".join([begin, *frames, frame(DATA, END_STREAM, 1, left)])
    with client() as one:
        for at in range(0, len(sent), 23):
            one.send(sent[at : at + 23])
        assert one.answers()[0] == b"".join(map(message, several))


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        (frame(DATA, 0, 0)[:2] + b"\xff" + frame(DATA, 0, 0)[3:], None),
        (struct.pack(">HBBBI", 1 << 15, 0, DATA, 0, 1), "a frame of"),
        (frame(DATA, 0, 3), "data of no call"),
        (frame(HEADERS, END_HEADERS, 2, block()), "a call with the number 2"),
        (frame(CONTINUATION, END_HEADERS, 1), "headers that another frame cuts"),
        (frame(HEADERS, 0, 3, b"") + frame(PING, 0, 0, bytes(8)), "headers that another"),
        (frame(HEADERS, 0, 3) + frame(CONTINUATION, END_HEADERS, 5), "headers of another call"),
        (frame(HEADERS, 0, 3) + frame(CONTINUATION, 0, 3, bytes(1 << 17)), "or too many"),
        (frame(HEADERS, END_HEADERS, 3, b"\xff\xff\xff"), "headers: "),
        (frame(HEADERS, END_HEADERS | PADDED, 3, b"\x09"), "nothing but padding"),
        (frame(SETTINGS, 0, 0, b"\x00"), "settings that are cut"),
        (setting(http2.FIRST_WINDOW, 1 << 31), "a window of"),
        (setting(http2.LARGEST_FRAME, 100), "frames of 100 bytes"),
        (frame(WINDOW, 0, 0, bytes(4)), "0 bytes more"),
        (frame(WINDOW, 0, 1, b"\x7f\xff\xff\xff"), "bytes more"),
        (frame(WINDOW, 0, 0, b"\x00"), "a window that is cut"),
        (frame(PING, 0, 0, b"ping"), "a ping of another size"),
        (frame(PUSH, 0, 1), "a client promises nothing"),
        (frame(DATA, 0, 1, bytes(200)), "more than there is room for"),
        (frame(DATA, END_STREAM, 1, b"\x00") + frame(DATA, 0, 1, b"\x00"), "data after the last"),
    ],
)  # fmt: skip
def test_what_breaks_http2_ends_the_connection_and_says_why(monkeypatch, wrong, why):
    monkeypatch.setattr(http2, "AHEAD", 100)

    class Silent(Echo):
        def said_all(self) -> None:
            """It goes on."""

    with client(Silent) as one:
        one.send(BEGIN, wrong)
        if why is None:
            return  # half a frame is waited for
        said = [data for kind, *_, data in one.frames() if kind == GOAWAY]
        assert len(said) == 1
        assert why in said[0][8:].decode()
        assert said[0][4:8] != bytes(4)
    assert one.heard[-1:] == ["gone"]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 10), st.integers(0, 255), st.integers(0, 5),
                          st.binary(max_size=12)), max_size=8), st.binary(max_size=30))  # fmt: skip
def test_no_bytes_raise_anything(frames, rest):
    """The thread of a connection would end, and its client wait for ever."""
    raised: list[Any] = []
    hook, threading.excepthook = threading.excepthook, raised.append
    try:
        with client() as one:
            one.send(b"".join(frame(*each) for each in frames) + rest)
    except OSError:
        pass  # it was ended before all was sent
    finally:
        threading.excepthook = hook
    assert not raised
    assert one.heard.count("gone") <= 3


def test_another_protocol_is_not_answered():
    one = Client()
    one.send(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
    with contextlib.suppress(ConnectionResetError):
        assert all(kind in (SETTINGS, WINDOW) for kind, *_ in one.frames())
    one.leave()


@pytest.mark.parametrize(
    ("frames", "code", "why"),
    [
        ([BEGIN, frame(DATA, 0, 1, b"\x01" + message(b"x")[1:])], UNIMPLEMENTED, "compressed"),
        ([BEGIN, frame(DATA, 0, 1, b"\x00\xff\xff\xff\xff")], EXHAUSTED, "a message of"),
        ([BEGIN, frame(DATA, 0, 1, message(b"fails"))], INTERNAL, "ZeroDivisionError: nonsense"),
        ([frame(HEADERS, 4, 1, block(**{"x-bin": "?"}))], INVALID, "x-bin is not base64"),
        ([frame(HEADERS, 4, 1, block("/refused"))], INVALID, "100% refused \u00e9"),
    ],
)  # fmt: skip
def test_what_breaks_a_call_ends_it_and_no_other(monkeypatch, frames, code, why):
    monkeypatch.setattr(http2, "LARGEST", 1000)

    def serve(call: Call, heard: list[Any]) -> Echo:
        if call.method == "/refused":
            raise Status(INVALID, "100% refused \u00e9")
        return Echo(call, heard)

    with client(serve) as one:
        one.send(*frames)
        _, said, text = one.answers()
        from urllib.parse import unquote

        assert (said, why in unquote(text)) == (code, True)
        one.send(frame(HEADERS, END_HEADERS, 3, block()))
        one.send(frame(DATA, 0, 1, b"late"), frame(DATA, END_STREAM, 3, message(b"y")))
        assert one.answers(3) == (message(b"y"), 0, "")


def test_metadata_are_decoded():
    seen: dict[str, bytes] = {}

    def serve(call: Call, heard: list[Any]) -> Echo:
        seen.update(call.metadata)
        return Echo(call, heard)

    with client(serve) as one:
        one.send(frame(HEADERS, END_HEADERS | END_STREAM, 1, block(**{"k-bin": "AP8", "k": "v"})))
        one.answers()
    assert (seen["k-bin"], seen["k"]) == (b"\x00\xff", b"v")


def test_answers_wait_for_the_room_that_the_client_has():
    with client() as one:
        one.send(setting(http2.FIRST_WINDOW, 10), BEGIN)
        one.send(frame(DATA, END_STREAM, 1, message(bytes(30))))
        come = 0
        for kind, _, number, data in one.frames():
            if kind == DATA:
                come += len(data)
                assert come <= 35
                more = 10 if come < 20 else 15
                grant = frame(WINDOW, 0, 1, struct.pack(">I", more))
                raised = setting(http2.FIRST_WINDOW, 20)
                one.send(raised if come == 10 else grant)
            if (kind, number) == (HEADERS, 1) and come == 35:
                return
    raise AssertionError("the answer never came whole")


def test_the_connection_has_room_too():
    with client() as one:
        one.send(setting(http2.FIRST_WINDOW, 1 << 20), BEGIN)
        data = message(bytes(100_000))
        for at in range(0, len(data), 16_000):
            one.send(frame(DATA, 0, 1, data[at : at + 16_000]))
        come = 0
        for kind, _, number, part in one.frames():
            come += len(part) if kind == DATA else 0
            if kind == DATA and come == 65_535:
                one.send(frame(WINDOW, 0, 0, struct.pack(">I", 40_000)))
            assert number == 0 or come <= 105_535
            if come == len(data):
                return
    raise AssertionError("the answer never came whole")


class Waiting(Echo):
    """The first call's first message is answered when the second call has said something."""

    def __init__(self, call: Call, heard: list[Any]) -> None:
        super().__init__(call, heard)
        self.busy = False

    def messages(self, several: Sequence[bytes]) -> None:
        self.heard += several
        if self.call.number == 1 and not self.busy:
            self.busy = True
            while b"there" not in self.heard and self.call.read_on():
                pass
            self.heard.append("went on")


def test_a_call_reads_on_in_the_middle_of_its_own_message(monkeypatch):
    """And its client may send no more than there is room for until it goes on."""
    monkeypatch.setattr(http2, "AHEAD", 1000)
    with client(Waiting) as one:
        other = frame(HEADERS, END_HEADERS, 3, block())
        one.send(BEGIN, frame(DATA, 0, 1, message(b"first")), other)
        one.send(frame(DATA, 0, 1, message(b"x" * 700)), frame(PING, 0, 0, bytes(8)))
        kinds = [kind for kind, _, number, _ in _until_ping(one) if number == 1]
        assert WINDOW not in kinds, "it may not send more yet"
        one.send(frame(DATA, 0, 3, message(b"there")))
        assert any((kind, number) == (WINDOW, 1) for kind, _, number, _ in one.frames())
        assert one.heard == [b"first", b"x" * 700, b"there", "went on"]


def _until_ping(one: Client) -> list[Frame]:
    come = []
    for each in one.frames():
        come.append(each)
        if each[0] == PING:
            assert each[1] == ACK
            return come
    raise AssertionError("the connection ended")


def test_a_call_that_waits_hears_that_its_client_has_gone():
    for end in (frame(RST_STREAM, 0, 1, bytes(4)), None):
        with client(Waiting) as one:
            one.send(BEGIN, frame(DATA, 0, 1, message(b"first")))
            if end is not None:
                one.send(end, frame(PING, 0, 0, bytes(8)))
                _until_ping(one)
        assert one.heard == [b"first", *(["gone", "went on"] if end else ["went on", "gone"])]


class Later(Echo):
    """Answers in another thread."""

    def said_all(self) -> None:
        def answer() -> None:
            self.call.answer(b"later")
            self.call.end()

        threading.Thread(target=answer).start()


def test_what_other_threads_answer_leaves_at_once():
    with client(Later) as one:
        one.send(frame(HEADERS, END_HEADERS | END_STREAM, 1, block()))
        assert one.answers() == (message(b"later"), 0, "")


def test_what_came_together_is_answered_together():
    class Counted(socket.socket):
        sent = 0

        def sendall(self, *given: Any) -> None:
            Counted.sent += 1
            super().sendall(*given)

    left, right = socket.socketpair()
    with left, Counted(fileno=right.detach()) as counted:
        left.sendall(PREFACE + BEGIN + b"".join([frame(DATA, 0, 1, message(b"x"))] * 1000))
        left.shutdown(socket.SHUT_WR)
        Connection(counted, lambda call: Echo(call, [])).run()
    assert Counted.sent <= 3


def test_calls_are_so_many_at_once(monkeypatch):
    monkeypatch.setattr(http2, "CALLS", 1)
    with client() as one:
        one.send(BEGIN, frame(HEADERS, END_HEADERS, 3, block()), frame(PING, 0, 0, bytes(8)))
        assert [n for kind, _, n, _ in _until_ping(one) if kind == RST_STREAM] == [3]
