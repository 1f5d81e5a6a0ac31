"""Messages as bytes: pure encoding and decoding, no sockets.

Problem: small control messages and large array shards share one stream; the
small ones must cost microseconds and the large ones no copy.  A frame is

    4 bytes    length of the header, big endian
    header     msgpack of ``[op, fields, [length of buffer 0, ...]]``
    buffers    their raw bytes, back to back

so a reader knows every length before the bytes come, and receives a large
buffer straight into the memory in which it stays.  When both ends share memory
(:mod:`pathways_lab.transport.shared_memory`), the header of a message whose buffers lie
there has a fourth entry that says where, and no buffers follow.

Rule for maintainers: whatever bytes arrive, the decoder either yields
well-formed messages or raises :class:`WireError`; it allocates nothing that
the limits do not allow, and it never unpickles.  Both ends run the same
:data:`VERSION` of this module: the authentication compares it.

Paper: section 4.5 (dispatch over low-latency messages).
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import msgpack

from pathways_lab.transport.buffer_pool import Pages
from pathways_lab.transport.shared_memory import Borrower, Claim, SegmentError

if TYPE_CHECKING:
    from typing_extensions import Buffer

VERSION = 3

_PREFIX = struct.Struct("!I")
_TEXT = {str}
_STAGE = 64 * 1024
"""Bytes of the staging area in which small frames are received."""
_JOIN = 32 * 1024
"""Buffers up to this total are copied behind the header: cheaper than one more vector."""
_PAGES = 64 * 1024
"""Buffers from this size on get pages of their own: aligned, and warm from earlier ones."""


class WireError(Exception):
    """Bytes that are no frame, or a message that cannot be one.  Closes only its own link."""


class Message(NamedTuple):
    """One decoded message.  The buffers are writable memory owned by the receiver."""

    op: str
    fields: dict[str, Any]
    buffers: list[memoryview]
    size: int
    """Bytes that it took on the wire."""


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of one incoming frame, in bytes and counts.

    header: bytes of the msgpack header.  buffers: number of raw buffers.
    body: bytes of all raw buffers together.
    """

    header: int = 64 << 20
    buffers: int = 1 << 16
    body: int = 1 << 38

    def check(self, op: str, header: int, buffers: int, body: int) -> None:
        """Raises WireError for a message that is over them."""
        if header > self.header:
            raise WireError(
                f"message {op[:40]!r} has a header of {header:,} bytes; the limit is"
                f" {self.header:,}"
            )
        if buffers > self.buffers or body > self.body:
            raise WireError(
                f"message {op[:40]!r} has {buffers:,} buffers of {body:,} bytes; the limits are"
                f" {self.buffers:,} and {self.body:,}"
            )


TO_CONTROL = Limits(body=1 << 30)
"""Limits of messages to the control plane: a plan of some hundred thousand steps; code or
arguments of 1 GiB.  The builder of a message checks it (:meth:`Letter.check`): too large, it ends
the link.
"""


def bytes_of(buffer: Buffer) -> memoryview:
    """The memory of a buffer as bytes.  Raises WireError when it is not in one piece."""
    view = memoryview(buffer)
    if view.nbytes == 0:
        return memoryview(b"")
    if not view.c_contiguous:
        raise WireError("cannot send a buffer that is not contiguous in C order: copy it first")
    return view if view.format == "B" and view.ndim == 1 else view.cast("B")


def encode(
    op: str,
    fields: dict[str, Any] | None = None,
    buffers: Sequence[Buffer] = (),
    claim: Claim | None = None,
) -> list[memoryview]:
    """The frame of one message, as pieces of memory to be written in order.

    Small buffers are copied.  Large ones are borrowed: they must not change
    before they are written.  claim: where they lie in the arena of the link, and do not follow.
    Raises WireError for what msgpack cannot carry.
    """
    views = [bytes_of(buffer) for buffer in buffers]
    content: list[Any] = [op, fields or {}, [view.nbytes for view in views]]
    if claim is not None:
        content.append(claim)
    try:
        header: bytes = _packed(content)
    except (TypeError, ValueError, OverflowError) as error:
        raise WireError(f"message {op!r} cannot be encoded: {error}") from error
    head = _PREFIX.pack(len(header)) + header
    if claim is not None or not views:
        return [memoryview(head)]
    if sum(view.nbytes for view in views) <= _JOIN:
        return [memoryview(b"".join((head, *views)))]
    return [memoryview(head), *(view for view in views if view.nbytes)]


def _packed(content: Any) -> bytes:
    try:
        packed: bytes = msgpack.packb(content)
    except UnicodeEncodeError:
        # Half a character, in what user code said: shown as its number.
        packed = msgpack.packb(content, unicode_errors="backslashreplace")
    return packed


class Letter:
    """One message, for one link or many: encoded once, when the first one writes it.

    passing: its buffers may change as soon as it is sent; what is written later has a copy of them.
    """

    __slots__ = ("_pieces", "buffers", "fields", "op", "passing")

    def __init__(
        self,
        op: str,
        fields: dict[str, Any] | None = None,
        buffers: Sequence[Buffer] = (),
        passing: bool = False,
    ) -> None:
        self.passing = passing
        self.op = op
        self.fields = fields
        self.buffers = buffers
        self._pieces: list[memoryview] | None = None

    @property
    def pieces(self) -> list[memoryview]:
        """Its frame, see :func:`encode`.  Raises WireError."""
        if self._pieces is None:
            if self.passing:
                # Here, because a process that passes nothing on need not load it.
                import numpy as np

                # NumPy lets other threads run meanwhile.
                self.buffers = [np.array(bytes_of(buffer)).data for buffer in self.buffers]
            self._pieces = encode(self.op, self.fields, self.buffers)
        return self._pieces

    def check(self, limits: Limits) -> None:
        """Raises WireError when it is over *limits*, which close the link at its other end."""
        body = sum([bytes_of(buffer).nbytes for buffer in self.buffers])
        limits.check(self.op, sum(map(len, self.pieces)) - body, len(self.buffers), body)


_pages = Pages()


def _memory(size: int) -> memoryview:
    """Writable memory of *size* bytes, page aligned when it is large.  Raises WireError."""
    try:
        return _pages.take(size) if size >= _PAGES else memoryview(bytearray(size))
    except (MemoryError, OSError) as error:
        raise WireError(f"there is no memory for {size:,} bytes of a message") from error


class Decoder:
    """Turns a byte stream into messages, whatever its chunks.

    A socket is read with ``n = sock.recv_into(decoder.space())`` and
    ``decoder.advance(n, messages)``; bytes at hand are given to :meth:`feed`.  After a
    WireError the decoder is useless, as is the stream.

    borrower: finds the buffers of messages that came through shared memory; None
        where there is none.
    """

    def __init__(self, limits: Limits = Limits()) -> None:
        self.borrower: Borrower | None = None
        self._limits = limits
        self._stage = memoryview(bytearray(_STAGE))
        self._start = self._end = 0
        # A header or buffer that does not fit the stage is received here instead.
        self._target: memoryview | None = None
        self._filled = 0
        self._need: int | None = None
        self._head: tuple[str, dict[str, Any], list[int]] | None = None
        self._buffers: list[memoryview] = []
        self._size = 0

    def space(self) -> memoryview:
        """Where the next received bytes belong; never empty."""
        if self._target is not None:
            return self._target[self._filled :]
        if self._start == self._end:
            self._start = self._end = 0
        elif self._end == _STAGE:
            rest = self._end - self._start
            self._stage[:rest] = bytes(self._stage[self._start : self._end])
            self._start, self._end = 0, rest
        return self._stage[self._end :]

    def advance(self, count: int, messages: list[Message]) -> None:
        """*count* bytes were put into :meth:`space`: add the messages that they complete.

        After a WireError those that came before what is wrong are there.
        """
        if self._target is None:
            self._end += count
        else:
            self._filled += count
            if self._filled < len(self._target):
                return
            whole, self._target = self._target, None
            self._item(whole, messages)
        self._parse(messages)

    def feed(self, data: Buffer) -> list[Message]:
        """Take bytes at hand; the messages that they complete."""
        messages: list[Message] = []
        rest = memoryview(data)
        while rest:
            space = self.space()
            count = min(len(space), len(rest))
            space[:count] = rest[:count]
            self.advance(count, messages)
            rest = rest[count:]
        return messages

    def _parse(self, messages: list[Message]) -> None:
        while self._target is None:
            available = self._end - self._start
            if self._need is None:
                if available < _PREFIX.size:
                    return
                (self._need,) = _PREFIX.unpack_from(self._stage, self._start)
                self._start += _PREFIX.size
                if self._need > self._limits.header:
                    raise WireError(
                        f"a header of {self._need} bytes is over the limit {self._limits.header}"
                    )
                self._size = _PREFIX.size + self._need
                continue
            if available >= self._need:
                stop = self._start + self._need
                part = self._stage[self._start : stop]
                self._start = stop
                if self._head is not None:
                    own = _memory(len(part))
                    own[:] = part
                    part = own
                self._item(part, messages)
            elif self._head is None and self._need <= _STAGE // 2:
                # Wait in the stage; space() makes room when the end is reached.
                return
            else:
                self._target = _memory(self._need)
                self._target[:available] = self._stage[self._start : self._end]
                self._filled = available
                self._start = self._end

    def _item(self, data: memoryview, messages: list[Message]) -> None:
        """One whole header or buffer is here."""
        if self._head is None:
            self._head = self._checked_head(data)
        else:
            self._buffers.append(data)
        op, fields, lengths = self._head
        while len(self._buffers) < len(lengths) and not lengths[len(self._buffers)]:
            self._buffers.append(memoryview(bytearray()))
        if len(self._buffers) < len(lengths):
            self._need = lengths[len(self._buffers)]
            return
        messages.append(Message(op, fields, self._buffers, self._size))
        self._need, self._head, self._buffers = None, None, []

    def _checked_head(self, data: memoryview) -> tuple[str, dict[str, Any], list[int]]:
        try:
            head = msgpack.unpackb(data, strict_map_key=False)
        except Exception as error:  # msgpack raises many types; all mean the same here
            raise WireError(f"the header is not msgpack: {error or type(error).__name__}") from None
        if not (isinstance(head, list) and 3 <= len(head) <= 4):
            raise WireError("the header is not [op, fields, lengths]")
        op, fields, lengths = head[:3]
        if not (isinstance(op, str) and isinstance(fields, dict) and isinstance(lengths, list)):
            raise WireError("the header is not [text, map, list]")
        if not {*map(type, fields)} <= _TEXT:
            raise WireError(f"message {op[:40]!r} has a field whose name is not text")
        if lengths:
            self._check_lengths(op, lengths)
        if len(head) == 4:
            try:
                if self.borrower is None:
                    raise SegmentError("this link shares no memory")
                self._buffers = self.borrower.views(head[3], lengths)
            except SegmentError as error:
                raise WireError(f"message {op[:40]!r}: {error}") from None
        return op, fields, lengths

    def _check_lengths(self, op: str, lengths: list[Any]) -> None:
        if not all(type(length) is int and length >= 0 for length in lengths):
            raise WireError(f"message {op[:40]!r} has a buffer length that is not a size")
        total = sum(lengths)
        self._limits.check(op, 0, len(lengths), total)
        self._size += total
