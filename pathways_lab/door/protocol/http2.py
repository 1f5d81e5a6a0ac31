"""Calls of gRPC over one connection of HTTP/2, on the side of the server.

Problem: gRPC's own server for Python hands every message from thread to thread, which takes ten
times as long as a door takes for a call; and messages that came together are served one by one.

How: one thread reads what has come and has all of it served before it reads on.  Its answers
leave together at the end of such a turn, those of other threads at once.  A request that needs
bytes which have not come yet reads on in the middle of it (:meth:`Call.read_on`).

Rule for maintainers: nothing of the door's own protocol here.  Bytes that break HTTP/2 end the
connection; those that break gRPC, and whatever a service raises, end the call.  Messages are
served by the thread of the connection only, and never with a lock held.

Source: RFC 9113 (HTTP/2), RFC 7541 (HPACK), and gRPC's own "gRPC over HTTP2".
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import functools
import logging
import math
import select
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol
from urllib.parse import quote

import psutil
from hpack import Decoder, Encoder, HPACKError, NeverIndexedHeaderTuple

from pathways_lab.door.protocol.status import EXHAUSTED, INTERNAL, INVALID, UNIMPLEMENTED, Status

log = logging.getLogger("pathways_lab.door")
"""Faults of the door itself, and nothing else; they are in the log of its process."""

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS, PUSH, PING, GOAWAY, WINDOW, CONTINUATION = (
    0, 1, 3, 4, 5, 6, 7, 8, 9,
)  # fmt: skip
"""Kinds of frames; all others mean nothing to a server."""
ACK = END_STREAM = 0x1
END_HEADERS, PADDED, PRIORITY = 0x4, 0x8, 0x20
PROTOCOL_ERROR, FLOW_CONTROL_ERROR, CLOSED, FRAME_SIZE_ERROR, REFUSED, COMPRESSION_ERROR = (
    1, 3, 5, 6, 7, 9,
)  # fmt: skip
STREAMS, FIRST_WINDOW, LARGEST_FRAME = 3, 4, 5
"""Settings."""
_FRAME = struct.Struct(">HBBBI")
_SETTING = struct.Struct(">HI")
_NUMBER = struct.Struct(">I")
_PREFIX = struct.Struct(">BI")
"""A message begins with whether it is compressed, and its length."""

_USUAL_WINDOW, _USUAL_FRAME, _MOST = 65_535, 16_384, (1 << 31) - 1
FRAME = 1 << 20
"""Bytes of the largest frame that a client may send."""
AHEAD = 1 << 26
"""Bytes of one call that a client may send before they are taken."""
CALLS = 1 << 12
"""Most calls of a connection at once."""
_HEADERS = 1 << 16
"""Bytes of the headers of a call, at most."""
_READ = 1 << 18
_GRANT = 1 << 28
LARGEST = psutil.virtual_memory().total // 2
"""Bytes of the largest message."""
_TEXT = 1000
"""Characters of a reason: clients take no more of headers than some thousand."""


class Broken(Exception):
    """The client speaks no HTTP/2.  code: of its errors."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = code


class Served(Protocol):
    """A service of one call.  An exception ends the call: a Status as it is."""

    def messages(self, several: Sequence[bytes]) -> None:
        """These have come."""

    def said_all(self) -> None:
        """No more will come."""

    def gone(self) -> None:
        """The call is over, whoever has ended it; once, by any thread."""


class Call:
    """One call.  method: its path.  metadata: by name; what a name in "-bin" has is decoded."""

    def __init__(
        self, connection: Connection, number: int, method: str, metadata: Mapping[str, bytes]
    ) -> None:
        self.method = method
        self.metadata = metadata
        self._connection = connection
        # Of the connection:
        self.number = number
        self.window = 0
        self.left: deque[memoryview] = deque()
        self.begun = self.said_all = self.serving = False
        self.end_said: tuple[int, str] | None = None
        self.come = bytearray()
        self.taken = 0
        self.served: Served | None = None

    def answer(self, data: bytes) -> None:
        """Send one message.  Any thread; nothing where the call is over."""
        self._connection.send(self, data)

    def end(self, code: int = 0, text: str = "") -> None:
        """There are no more answers.  Any thread."""
        self._connection.end(self, code, text)

    @property
    def unread(self) -> int:
        """Answers for which the client has no room."""
        return len(self.left)

    def read_on(self, seconds: float | None = None) -> bool:
        """Take what comes next, for so long at most (for ever); False when the call is over.

        By the thread of the connection, in the middle of serving this call, whose client may
        send :data:`AHEAD` bytes meanwhile.
        """
        return self._connection.turn(seconds) and self._connection.knows(self)

    def wake(self) -> None:
        """End :meth:`read_on`, whatever it waits for.  Any thread."""
        self._connection.wake()


class Connection:
    """One client's connection.  service: begins to serve a call, or raises Status."""

    def __init__(self, link: socket.socket, service: Callable[[Call], Served]) -> None:
        self._link = link
        self._service = service
        self._thread = 0
        self._bell, self._ring = socket.socketpair()
        # Under the lock:
        self._lock = threading.Lock()
        self._out: list[bytes | memoryview] = []
        self._calls: dict[int, Call] = {}
        self._stuck: dict[int, Call] = {}
        self._window = self._first_window = _USUAL_WINDOW
        self._largest = _USUAL_FRAME
        self._over = False
        # Of its own thread:
        self._come = bytearray()
        self._at = self._last = self._taken = 0
        self._decoder = Decoder(_HEADERS)
        self._headers: tuple[int, int, bytes] | None = None

    def run(self) -> None:
        """Serve until the client has gone."""
        self._thread = threading.get_ident()
        settings = {STREAMS: CALLS, FIRST_WINDOW: AHEAD, LARGEST_FRAME: FRAME}
        said = b"".join(_SETTING.pack(*each) for each in settings.items())
        self._tell(_frame(SETTINGS, 0, 0, said), _grant(0, _MOST - _USUAL_WINDOW))
        try:
            begun = self._link.recv(len(PREFACE), socket.MSG_WAITALL) == PREFACE
        except OSError:
            begun = False
        while begun and self.turn():
            pass
        for number in list(self._calls):
            self._forget(number)
        for each in (self._link, self._bell, self._ring):
            each.close()

    def wake(self) -> None:
        """End a turn that waits with a limit of time.  Any thread."""
        if threading.get_ident() != self._thread:
            with contextlib.suppress(OSError):
                self._ring.send(b"!", socket.MSG_DONTWAIT)

    def close(self) -> None:
        """End it.  Any thread."""
        with contextlib.suppress(OSError):
            self._link.shutdown(socket.SHUT_RDWR)

    def turn(self, seconds: float | None = None) -> bool:
        """Have served what comes within so long (for ever); False when the client has gone.

        In the middle of another turn that is first one frame of those that came with it.
        """
        with self._lock:
            self._flush()
        try:
            if self._next():
                return True
            self._come += self._read(seconds)
            while not self._over and self._next():
                pass
        except Broken as error:
            with self._lock:
                said = _NUMBER.pack(self._last) + _NUMBER.pack(error.code) + str(error).encode()
                self._out.append(_frame(GOAWAY, 0, 0, said))
                self._flush()
            self._over = True
        return not self._over

    def _read(self, seconds: float | None) -> bytes:
        try:
            if seconds is not None:
                looked = select.poll()
                for each in (self._link, self._bell):
                    looked.register(each, select.POLLIN)
                ready = dict(looked.poll(math.ceil(1000 * seconds)))
                if self._bell.fileno() in ready:
                    self._bell.recv(_READ)
                if self._link.fileno() not in ready:
                    return b""
            data = self._link.recv(_READ)
        except (OSError, ValueError):
            data = b""
        self._over = self._over or not data
        return data

    def knows(self, call: Call) -> bool:
        """Whether a call is not over."""
        return call.number in self._calls

    # --- what comes ------------------------------------------------------------------------

    def _next(self) -> bool:
        """Take one frame; False when no whole one is there.  Raises Broken."""
        come, at = self._come, self._at
        there = len(come) - at
        if there >= _FRAME.size:
            high, low, kind, flags, number = _FRAME.unpack_from(come, at)
            size = high << 8 | low
            if size > FRAME:
                raise Broken(FRAME_SIZE_ERROR, f"a frame of {size:,} bytes; {FRAME:,} are most")
            if there >= _FRAME.size + size:
                begin = at + _FRAME.size
                self._at = begin + size
                with memoryview(come) as view:
                    data = bytes(view[begin : self._at])
                self._take(kind, flags, number & _MOST, data)
                return True
        del come[:at]
        self._at = 0
        return False

    def _take(self, kind: int, flags: int, number: int, data: bytes) -> None:
        if (kind == CONTINUATION) != (self._headers is not None):
            raise Broken(PROTOCOL_ERROR, "headers that another frame cuts, or goes on without")
        if kind == DATA:
            self._data(flags, number, data)
        elif kind == HEADERS:
            data = _unpadded(flags, data)
            self._more_headers(flags, number, data[5:] if flags & PRIORITY else data)
        elif kind == CONTINUATION and self._headers is not None:
            begun, before, block = self._headers
            if begun != number or len(block) + len(data) > _HEADERS:
                raise Broken(PROTOCOL_ERROR, "headers of another call, or too many")
            self._more_headers(before | flags & END_HEADERS, number, block + data)
        elif kind == RST_STREAM:
            self._forget(number)
        elif kind == SETTINGS and not flags & ACK:
            self._settings(data)
        elif kind == PING and not flags & ACK:
            _check(len(data) == 8, FRAME_SIZE_ERROR, "a ping of another size than eight")
            self._tell(_frame(PING, ACK, 0, data))
        elif kind == WINDOW:
            self._room(number, data)
        elif kind == PUSH:
            raise Broken(PROTOCOL_ERROR, "a client promises nothing")

    def _more_headers(self, flags: int, number: int, block: bytes) -> None:
        """Headers, or the first of them."""
        if not flags & END_HEADERS:
            self._headers = number, flags, block
            return
        self._headers = None
        try:
            headers = dict(self._decoder.decode(block, raw=True))
        except HPACKError as error:
            raise Broken(COMPRESSION_ERROR, f"headers: {error}") from None
        call = self._calls.get(number)
        if call is None and number > self._last:
            _check(number % 2 == 1, PROTOCOL_ERROR, f"a call with the number {number}")
            self._last = number
            call = self._begin(number, headers)
        if call is not None and flags & END_STREAM:
            self._said_all(call)

    def _begin(self, number: int, headers: dict[bytes, bytes]) -> Call | None:
        if len(self._calls) >= CALLS:
            self._tell(_frame(RST_STREAM, 0, number, _NUMBER.pack(REFUSED)))
            return None
        method = headers.get(b":path", b"").decode(errors="replace")
        metadata: dict[str, bytes] = {}
        call = Call(self, number, method, metadata)
        with self._lock:
            call.window = self._first_window
            self._calls[number] = call
        try:
            for name, value in headers.items():
                metadata[name.decode(errors="replace")] = _decoded(name, value)
            call.served = self._service(call)
        except Exception as error:
            _failed(call, error)
        return call

    def _data(self, flags: int, number: int, data: bytes) -> None:
        self._taken += len(data)
        if self._taken > _GRANT:
            self._tell(_grant(0, self._taken))
            self._taken = 0
        call = self._calls.get(number)
        if call is None:
            return _check(number <= self._last, PROTOCOL_ERROR, "data of no call")
        _check(not call.said_all, CLOSED, "data after the last")
        call.taken += len(data)
        _check(call.taken <= AHEAD, FLOW_CONTROL_ERROR, "more than there is room for")
        call.come += _unpadded(flags, data)
        before, call.serving = call.serving, True
        try:
            several = _messages(call.come)
            if several and call.served is not None:
                call.served.messages(several)
        except Exception as error:
            _failed(call, error)
        call.serving = before
        if call.taken > AHEAD // 2 and not call.serving and self.knows(call):
            self._tell(_grant(number, call.taken))
            call.taken = 0
        if flags & END_STREAM:
            self._said_all(call)

    def _said_all(self, call: Call) -> None:
        call.said_all = True
        if call.served is not None and self.knows(call):
            try:
                call.served.said_all()
            except Exception as error:
                _failed(call, error)

    def _forget(self, number: int) -> None:
        """The client has given a call up."""
        with self._lock:
            call = self._calls.pop(number, None)
            self._stuck.pop(number, None)
        if call is not None:
            _gone(call)

    def _settings(self, data: bytes) -> None:
        _check(len(data) % _SETTING.size == 0, FRAME_SIZE_ERROR, "settings that are cut")
        said = dict(_SETTING.iter_unpack(data))
        window = said.get(FIRST_WINDOW, self._first_window)
        _check(window <= _MOST, FLOW_CONTROL_ERROR, f"a window of {window:,} bytes")
        largest = said.get(LARGEST_FRAME, self._largest)
        _check(_USUAL_FRAME <= largest < 1 << 24, PROTOCOL_ERROR, f"frames of {largest:,} bytes")
        with self._lock:
            self._largest = largest
            for call in self._calls.values():
                call.window += window - self._first_window
            self._first_window = window
            self._out.append(_frame(SETTINGS, ACK, 0))
        self._push_all()

    def _room(self, number: int, data: bytes) -> None:
        """The client takes more bytes."""
        _check(len(data) == _NUMBER.size, FRAME_SIZE_ERROR, "a window that is cut")
        more = _NUMBER.unpack(data)[0] & _MOST
        with self._lock:
            call = self._calls.get(number)
            if number == 0:
                self._window += more
            elif call is not None:
                call.window += more
            window = self._window if call is None else call.window
            _check(more > 0 and window <= _MOST, FLOW_CONTROL_ERROR, f"{more:,} bytes more")
        self._push_all()

    # --- what goes -------------------------------------------------------------------------

    def send(self, call: Call, data: bytes) -> None:
        """One message of a call."""
        with self._lock:
            if not self.knows(call) or call.end_said is not None:
                return
            if not call.begun:
                call.begun = True
                self._out.append(_frame(HEADERS, END_HEADERS, call.number, _block(*_BEGIN)))
            call.left.append(memoryview(_PREFIX.pack(0, len(data)) + data))
            self._push(call)
            self._flush_of_others()

    def end(self, call: Call, code: int, text: str) -> None:
        """The last word of a call."""
        with self._lock:
            if not self.knows(call) or call.end_said is not None:
                return
            call.end_said = code, text
            over = self._push(call)
            self._flush_of_others()
        if over:
            _gone(call)

    def _push_all(self) -> None:
        """Send what there is room for now."""
        with self._lock:
            over = [call for call in list(self._stuck.values()) if self._push(call)]
        for call in over:
            _gone(call)

    def _push(self, call: Call) -> bool:
        """The same for one call; whether it is over with that.  Under the lock."""
        while call.left:
            piece = call.left[0]
            size = min(len(piece), call.window, self._window, self._largest)
            if size <= 0:
                self._stuck[call.number] = call
                return False
            head = _FRAME.pack(size >> 8, size & 255, DATA, 0, call.number)
            self._out += head, piece[:size]
            call.window -= size
            self._window -= size
            if size == len(piece):
                call.left.popleft()
            else:
                call.left[0] = piece[size:]
        self._stuck.pop(call.number, None)
        if call.end_said is None:
            return False
        block = _block(*(() if call.begun else _BEGIN), *_trailers(*call.end_said))
        self._out.append(_frame(HEADERS, END_HEADERS | END_STREAM, call.number, block))
        if not call.said_all:
            self._out.append(_frame(RST_STREAM, 0, call.number, _NUMBER.pack(0)))
        del self._calls[call.number]
        return True

    def _tell(self, *frames: bytes) -> None:
        with self._lock:
            self._out += frames

    def _flush_of_others(self) -> None:
        """Answers of other threads leave at once, and with them all before."""
        if threading.get_ident() != self._thread:
            self._flush()

    def _flush(self) -> None:
        if self._out:
            data = b"".join(self._out)
            self._out.clear()
            with contextlib.suppress(OSError):  # its thread hears that the client has gone
                self._link.sendall(data)


def _frame(kind: int, flags: int, number: int, data: bytes = b"") -> bytes:
    size = len(data)
    return _FRAME.pack(size >> 8, size & 255, kind, flags, number) + data


def _grant(number: int, size: int) -> bytes:
    return _frame(WINDOW, 0, number, _NUMBER.pack(size))


def _check(right: bool, code: int, text: str) -> None:
    if not right:
        raise Broken(code, text)


def _gone(call: Call) -> None:
    if call.served is not None:
        call.served.gone()


def _failed(call: Call, error: Exception) -> None:
    """End a call with what was raised."""
    if not isinstance(error, Status):
        log.error("%s", call.method, exc_info=error)
        error = Status(INTERNAL, f"{type(error).__name__}: {error}")
    call.end(error.code, str(error))


def _unpadded(flags: int, data: bytes) -> bytes:
    if not flags & PADDED:
        return data
    _check(len(data) > 0 and data[0] < len(data), PROTOCOL_ERROR, "nothing but padding")
    return data[1 : len(data) - data[0]]


def _messages(come: bytearray) -> list[bytes]:
    """Take the messages that are whole.  Raises Status."""
    several, at = [], 0
    while len(come) - at >= _PREFIX.size:
        compressed, size = _PREFIX.unpack_from(come, at)
        if compressed:
            raise Status(UNIMPLEMENTED, "messages may not be compressed")
        if size > LARGEST:
            raise Status(EXHAUSTED, f"a message of {size:,} bytes; {LARGEST:,} are most")
        begin = at + _PREFIX.size
        if len(come) < begin + size:
            break
        at = begin + size
        with memoryview(come) as view:
            several.append(bytes(view[begin:at]))
    del come[:at]
    return several


def _decoded(name: bytes, value: bytes) -> bytes:
    """The value of a header.  Raises Status."""
    if not name.endswith(b"-bin"):
        return value
    try:
        return base64.b64decode(value + b"=" * (-len(value) % 4), validate=True)
    except binascii.Error:
        raise Status(INVALID, f"{name.decode(errors='replace')} is not base64") from None


_BEGIN = (":status", "200"), ("content-type", "application/grpc")


def _trailers(code: int, text: str) -> list[tuple[str, str]]:
    said = [("grpc-status", str(code))]
    if text:
        said.append(("grpc-message", quote(text[:_TEXT], safe=" !#$&'()*+,/:;=?@[]")))
    return said


@functools.lru_cache(64)
def _block(*headers: tuple[str, str]) -> bytes:
    """Headers as bytes that mean the same at any time."""
    made: bytes = Encoder().encode([NeverIndexedHeaderTuple(*h) for h in headers], huffman=False)
    return made
