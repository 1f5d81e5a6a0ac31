"""One authenticated connection that any thread may write to.

Problem: a message must leave in the thread that has it (a hand-over to
another thread costs milliseconds while Python code is busy), two ends that
fill each other's buffers must not wait for each other, and Ctrl-C may strike
between any two instructions of the main thread without tearing the stream.

How: a frame is first appended to a queue, by one atomic operation; then the
calling thread writes as much of the queue as the socket takes without
waiting; the reactor writes the rest when the socket is ready.  Sending never
waits for the other end.  Everything that is needed to continue after an
interrupt is one attribute, replaced at once (see :meth:`Link._pump`).

Rule for maintainers: between two bytecodes of the main thread any exception
may appear.  Every state that the writer leaves behind, at every instruction,
must be one from which the next writer continues correctly.  Never send from a
finalizer: it may run inside the writer.

Paper: section 4.5.
"""

from __future__ import annotations

import contextlib
import math
import os
import socket
import ssl
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from pathways_lab.transport.clock_sync import ANSWER, Beat, Difference
from pathways_lab.transport.deferred_signals import HeldBack
from pathways_lab.transport.forks import leave_at_fork
from pathways_lab.transport.framing import Decoder, Letter, Message, WireError, bytes_of, encode
from pathways_lab.transport.handshake import SILENCE, broken, is_through, machine_of, no_sign, tune
from pathways_lab.transport.shared_memory import (
    SHARED_FROM,
    SUPPORTED,
    Arena,
    Borrower,
    Lender,
    SegmentError,
)

if TYPE_CHECKING:
    from typing_extensions import Buffer

_E = TypeVar("_E", bound=Exception)
_VECTORS = 64
"""Pieces of memory given to the kernel in one call."""
_OFFER = "\0offer"
"""Message between two links themselves: here is the arena that large buffers will lie in."""
_TAKEN = "\0taken"
"""The answer: whether it can be used."""
_RETURN = "\0return"
"""The same: parts of the arena that are not used any more."""
_COUNT = "\0count"
"""The same: how many messages were sent before this one."""
_ASK = "\0ask"
"""The same: is anybody there, and what does the clock say; asked at this time."""
_TELL = "\0tell"
"""The answer: that time, and the clock."""
_READ_BUDGET = 64 << 10
"""Bytes read from one link before the others get their turn: some 0.1 ms over TLS."""


def _bare(error: _E) -> _E:
    """An error like this one, without a traceback or a cause; copies have these, where Dask is."""
    return type(error)(*error.args)


class LinkClosed(ConnectionError):
    """The link is closed; ``str()`` says why."""


class Owner(Protocol):
    """The part of a reactor that a link needs; all callable from any thread."""

    def wants_write(self, link: Link) -> None:
        """Write the link's queue when its socket is ready."""

    def wants_close(self, link: Link, reason: str, broken: bool = False) -> None:
        """Close the link in the reactor's thread.

        broken: writing found its end, so what had come before is delivered first.
        """

    def is_current(self) -> bool:
        """Whether the calling thread is the reactor's."""


class _Frame:
    """One encoded message in the queue.  Compared by identity.

    counts: it tells how many went before it, which is known when it is written.
    """

    __slots__ = ("counts", "descriptor", "pieces", "size")

    def __init__(self, pieces: list[memoryview], carries: Arena | None = None) -> None:
        self.pieces = pieces
        # The arena whose descriptor goes along with the first byte.
        self.descriptor = carries
        self.counts = False
        self.size = len(pieces[0]) if len(pieces) == 1 else sum([len(p) for p in pieces])


class Link:
    """One connected, authenticated socket.
    name: who is at the other end (``"island0/host1"``, ``"kernel-1"``).
    peer: the hello of the other end.
    tag: whatever the owner of the reactor wants to remember with the link.
    holder: whose key the connecting end has proved; on the accepting end.
    taker: takes the socket after the hellos, since no messages follow; on the accepting end.
    clock: on the connecting end, between this process's monotonic clock and the other one.
    sent_messages, received_messages: counters.
    heard: when something came last, on the monotonic clock.
    """

    def __init__(
        self,
        owner: Owner,
        sock: socket.socket,
        name: str,
        peer: dict[str, Any],
        decoder: Decoder,
        tag: Any = None,
    ) -> None:
        sock.setblocking(False)
        self.name = name
        self.peer = peer
        self.tag = tag
        self.holder = 0
        self.taker: Callable[[Any], object] | None = None
        self.clock = Difference()
        self._beat: tuple[Beat, Callable[[float], object]] | None = None
        self._silence = SILENCE
        self.sent_messages = self.received_messages = 0
        self._owner = owner
        self._sock = sock
        # One SSL object must not be used by two threads, and its writes cannot
        # be interrupted safely: with TLS the reactor's thread does them all.
        self._tls = isinstance(sock, ssl.SSLSocket)
        self._write: Callable[[list[memoryview]], int] = (
            self._write_encrypted if self._tls else sock.sendmsg
        )
        self._decoder = decoder
        self._lender: Lender | None = None
        self._borrower: Borrower | None = None
        self._lending = threading.Lock()
        self._closed: str | None = None
        # Why nothing more will be read, while what came before is delivered.
        # Bare ones, and others like them are raised: a traceback has the frames of whoever wrote or
        # waited here, with the handles that they wait for, for as long as somebody has the link.
        self._ended: WireError | OSError | None = None
        # Why the connection broke: a socket tells that once, and then an end.
        self._found: OSError | None = None
        self._connected = False
        self._blocked = False
        self._writing = threading.Lock()
        self._queue: deque[_Frame] = deque()
        # The batch being written: its frames, their total size, the bytes that
        # are known to be written, the result of the last write, not yet added,
        # and how many frames went before.
        self._batch: tuple[tuple[_Frame, ...], int, int, list[int], int] = ((), 0, 0, [], 0)
        self._counted = 0
        self._came = 0
        self.heard = time.monotonic()
        self._at = machine_of(sock, peer)
        leave_at_fork(self)

    def __repr__(self) -> str:
        state = "open" if self._closed is None else f"closed: {self._closed}"
        return f"<Link to {self.name}, {state}>"

    @property
    def closed(self) -> str | None:
        """Why the link is closed, or None while it is open."""
        return self._closed

    @property
    def certified(self) -> bool:
        """Whether the other end has shown a certificate of the lab's authority."""
        return isinstance(self._sock, ssl.SSLSocket) and bool(self._sock.getpeercert(True))

    @property
    def who(self) -> str:
        """The other end, and its machine where that is another one."""
        return self.name + self._at

    def broken(self, error: OSError) -> str:
        """Why it breaks, in words."""
        return broken(self.who, error, time.monotonic() - self.heard)

    def bear(self, silence: float = SILENCE) -> None:
        """It breaks when the other end's machine gives no sign for so many seconds."""
        self._silence = silence
        with contextlib.suppress(OSError):  # it is closed
            tune(self._sock, silence)

    def beat(self, tell: Callable[[float], object]) -> None:
        """Ask every second whether the other end is there, and for its clock, on another machine.

        tell(seconds): called once when it has said nothing for so long, and with 0.0 when it
        answers again; in the reactor's thread.
        """
        if self._at:
            self._beat = Beat(time.monotonic()), tell

    @property
    def pending(self) -> int:
        """Bytes, about, that were sent but not yet taken by the operating system."""
        return sum(frame.size for frame in tuple(self._queue))

    def send(
        self,
        op: str,
        fields: dict[str, Any] | None = None,
        buffers: Sequence[Buffer] = (),
        passing: bool = False,
    ) -> int:
        """Send one message, from any thread, without waiting; its bytes, as in Message.size.

        Messages arrive whole and in the order of their sending.  Large buffers are borrowed until
        written (:attr:`pending`): they must not change, unless they are *passing*.

        An interrupt (KeyboardInterrupt) that comes out of this call leaves the
        stream intact; the message was then sent either wholly or not at all,
        and the caller cannot know which.

        Raises LinkClosed, and WireError for what cannot be encoded.
        """
        return self.forward(Letter(op, fields, buffers, passing))

    def forward(self, letter: Letter) -> int:
        """The same of a message that other links may send too."""
        if self._closed is not None:
            raise LinkClosed(self._closed)
        try:
            if letter.buffers and self._lends:
                size = self._queue_shared(letter)
            else:
                frame = _Frame(letter.pieces)
                size = frame.size
                self._queue.append(frame)
            if self._tls and not self._owner.is_current():
                self._owner.wants_write(self)
            else:
                self._pump()
        except BaseException as error:
            if isinstance(error, OSError) and error.errno is not None:
                reason = self._closed or self.broken(error)
                self._owner.wants_close(self, reason, broken=True)
                raise LinkClosed(reason) from error
            # An interrupt: the frame may be queued with nobody to write it.
            self._owner.wants_write(self)
            raise
        return size

    @property
    def _lends(self) -> bool:
        # The end that accepted may be heard before the other end is a link, which
        # would lose a descriptor: it begins when it has heard of that link.
        return self._lender is not None and (self._connected or self.received_messages > 0)

    def _queue_shared(self, letter: Letter) -> int:
        """Queue a message whose buffers, if large, lie in shared memory, if there is any."""
        views = [bytes_of(buffer) for buffer in letter.buffers]
        nbytes = sum([len(view) for view in views])
        # A part that is lent and not announced would be lost.
        with HeldBack(), self._lending:
            lender = self._lender if nbytes >= SHARED_FROM else None
            claim = None if lender is None else lender.lend(views)
            if lender is None or claim is None:
                offer = None if lender is None else lender.offer()
                if offer is not None:
                    self._queue.append(_Frame(encode(_OFFER, {"size": offer.size}), offer))
                frame = _Frame(letter.pieces)
                self._queue.append(frame)
                return frame.size
            try:
                frame = _Frame(encode(letter.op, letter.fields, views, claim))
            except WireError:
                lender.returned([claim])
                raise
            self._queue.append(frame)
        return frame.size + nbytes

    def close(self, reason: str = "closed by this end") -> None:
        """Close, from any thread; what the operating system has already taken is delivered."""
        self._owner.wants_close(self, reason)

    # --- the rest is for the reactor ------------------------------------------

    def share(self, connected: bool) -> None:
        """Large buffers go through shared memory, where that is possible.

        connected: this is the end that connected.  Both ends do it, or neither.
        """
        if SUPPORTED and self._sock.family == socket.AF_UNIX and not self._tls:
            self._connected = connected
            self._lender = Lender()
            self._borrower = Borrower()
            self._decoder.borrower = self._borrower

    @property
    def lent_messages(self) -> int:
        """How many messages went through shared memory."""
        return 0 if self._lender is None else self._lender.lent_messages

    def begin(self, came: int) -> None:
        """So many messages came over this socket before it was a link."""
        self._came = came

    def count(self) -> None:
        """Let the other end compare how many messages were sent with how many came."""
        if self._closed is None and self._counted != self.sent_messages:
            frame = _Frame(encode(_COUNT, {"sent": 0}))
            frame.counts = True
            self._queue.append(frame)
            self._counted = self.sent_messages + len(self._queue)
            self._owner.wants_write(self)

    def sweep(self, now: float) -> None:
        """Now and then, in the reactor's thread."""
        self.give_back()
        self.count()
        if self._beat is None or self._closed is not None:
            return
        beat, tell = self._beat
        with contextlib.suppress(LinkClosed):
            if beat.due(now):
                self.send(_ASK, {"asked": now})
        if (seconds := beat.silent(self.heard, now)) is not None:
            tell(seconds)
        if self._unheard > self._silence:
            self._owner.wants_close(self, self.broken(no_sign()))

    @property
    def _unheard(self) -> float:
        """For how many seconds an answer is missing, where no system notices that."""
        beat = self._beat if is_through(self._sock) else None
        return 0.0 if beat is None else beat[0].waits(time.monotonic())

    def give_back(self) -> None:
        """Tell the other end which parts of its arena are not used here any more."""
        if self._borrower is not None and self._closed is None:
            claims = self._borrower.unused()
            if claims:
                with contextlib.suppress(LinkClosed):
                    self.send(_RETURN, {"parts": claims})

    @property
    def sock(self) -> socket.socket:
        return self._sock

    @property
    def backlog(self) -> bool:
        """Whether something is queued."""
        return bool(self._queue)

    def unblock(self) -> bool:
        """The socket is ready for writing: write.  True when nothing is left."""
        self._blocked = False
        self._pump()
        return not self._queue

    def _pump(self) -> None:
        """Write the queue until it is empty or the socket takes no more.

        ``self._batch`` changes only by whole assignments.  The one thing that
        must never be lost is how many bytes the kernel took: ``extend(map())``
        moves that number from the system call into the batch's list inside one
        C call, where no interrupt can come between.
        """
        with self._writing:
            while not self._blocked:
                frames, total, offset, results, before = self._batch
                if results:
                    offset += results[0]
                if offset < total:
                    results = []
                    self._batch = (frames, total, offset, results, before)
                    pieces = (_rest(frames, offset),)
                    carried = frames[0].descriptor if offset == 0 else None
                    try:
                        if carried is None:
                            results.extend(map(self._write, pieces))
                        else:
                            results.extend(map(self._sock.sendmsg, pieces, _rights(carried)))
                    except (BlockingIOError, ssl.SSLWantWriteError, ssl.SSLWantReadError):
                        self._blocked = True
                        self._owner.wants_write(self)
                    except OSError as error:
                        self._find(error)
                        raise
                    continue
                # Retire these frames (again, if interrupted while doing so), and
                # begin the next batch.
                for frame in frames:
                    if self._queue and self._queue[0] is frame:
                        self._queue.popleft()
                        self.sent_messages += 1
                before += len(frames)
                count = len(self._queue)
                if count == 0:
                    self._batch = ((), 0, 0, [], before)
                    return
                if count == 1:
                    frame = self._queue[0]
                    if frame.counts:
                        _fill((frame,), before)
                    self._batch = ((frame,), frame.size, 0, [], before)
                else:
                    frames = _together([self._queue[i] for i in range(min(count, _VECTORS))])
                    _fill(frames, before)
                    self._batch = (frames, sum([frame.size for frame in frames]), 0, [], before)

    def _write_encrypted(self, pieces: list[memoryview]) -> int:
        self._look()
        return self._sock.send(pieces[0])

    def _look(self) -> None:
        """Before TLS does, to which every error of its socket is an end."""
        if code := self._sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self._find(OSError(code, os.strerror(code)))

    def _find(self, error: OSError) -> None:
        # Where it timed out, has no route or was reset, nobody has closed it.
        if isinstance(error, ConnectionResetError) or not isinstance(
            error, ConnectionError | ssl.SSLError
        ):
            self._found = _bare(error)

    def receive(self) -> list[Message]:
        """Read what is there.  Raises WireError, LinkClosed, OSError, after what came before."""
        if self._ended is not None:
            raise _bare(self._ended)
        messages: list[Message] = []
        try:
            self._receive(messages)
        except (WireError, OSError) as error:
            if not messages:
                raise
            # Deliver first.  A socket tells an error only once, and a decoder that failed
            # cannot go on, so neither is asked again.
            self._ended = _bare(error)
        return messages

    @property
    def hidden(self) -> bool:
        """Whether reading finds what no selector sees: decrypted bytes, or why it ended."""
        return self._ended is not None or (
            isinstance(self._sock, ssl.SSLSocket) and self._sock.pending() > 0
        )

    def _receive(self, messages: list[Message]) -> None:
        budget = _READ_BUDGET
        while budget > 0:
            space = self._decoder.space()
            if self._tls:
                self._look()
            try:
                if self._borrower is None:
                    count = self._sock.recv_into(space)
                else:
                    count = self._borrower.receive(self._sock, space)
            except SegmentError as error:
                raise WireError(str(error)) from None
            except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
                return
            if count == 0:
                if self._found is not None:
                    raise _bare(self._found)
                if self._unheard > ANSWER:
                    raise no_sign()
                raise LinkClosed(f"{self.who} closed the connection")
            self.heard = time.monotonic()
            budget -= count
            self._decoder.advance(count, messages)
            if count < len(space) and not self._tls:
                return

    def admit(self, messages: list[Message]) -> list[Message]:
        """The messages that came, in the order of sending, without those between the links.

        Raises WireError, and LinkClosed when messages were lost or repeated on the way.
        """
        ours = False
        for message in messages:
            if message.op[:1] == "\0":
                ours = True
                self._between(message)
            self._came += 1
            self.received_messages += 1
        self.give_back()
        return [message for message in messages if message.op[:1] != "\0"] if ours else messages

    def _between(self, message: Message) -> None:
        """A message of the other link itself."""
        if message.op == _RETURN and self._lender is not None:
            try:
                self._lender.returned(message.fields["parts"])
            except (SegmentError, KeyError, TypeError) as error:
                raise WireError(f"a wrong return of shared memory: {error}") from None
        elif message.op == _OFFER and self._borrower is not None:
            try:
                taken = self._borrower.take(message.fields.get("size"))
            except SegmentError as error:
                raise WireError(f"a wrong offer of shared memory: {error}") from None
            with contextlib.suppress(LinkClosed):
                self.send(_TAKEN, {"taken": taken})
        elif message.op == _TAKEN and self._lender is not None:
            self._lender.answered(message.fields.get("taken"))
        elif message.op in (_ASK, _TELL):
            self._answer(message)
        elif message.op == _COUNT and message.fields.get("sent") != self._came:
            raise LinkClosed(
                f"messages of {self.name} were lost or repeated on the way:"
                f" {message.fields.get('sent')} were sent, {self._came} came"
            )

    def _answer(self, message: Message) -> None:
        asked = _moment(message.fields.get("asked"))
        if message.op == _TELL:
            self.clock.learn(asked, _moment(message.fields.get("clock")), time.monotonic())
            return
        with contextlib.suppress(LinkClosed):
            self.send(_TELL, {"asked": asked, "clock": time.monotonic()})

    def leave_to_parent(self) -> None:
        """This process is a fork: no byte more may come from it, and the other end not wait."""
        self._closed = self._closed or "it is the parent process's"
        self._sock.close()

    def shut(self, reason: str) -> None:
        """Mark closed and close the socket; the reactor has forgotten it already."""
        self._closed = reason
        self._ended = None
        # Not while a thread writes: the number of the socket may be used anew.
        with self._writing:
            self._queue.clear()
            self._batch = ((), 0, 0, [], 0)
            self._sock.close()
        with self._lending:
            self._lender = None
        if self._borrower is not None:
            self._borrower.close()


def _moment(value: object) -> float:
    if type(value) is float and math.isfinite(value):
        return value
    raise WireError(f"a malformed pulse: {value!r:.40} is no time")


def _together(frames: list[_Frame]) -> tuple[_Frame, ...]:
    """The first of these frames that can be written at once: one with a descriptor goes alone."""
    for place, frame in enumerate(frames):
        if frame.descriptor is not None:
            return tuple(frames[: max(1, place)])
    return tuple(frames)


def _fill(frames: tuple[_Frame, ...], before: int) -> None:
    """Write into frames that count how many go before them; again is fine."""
    for place, frame in enumerate(frames):
        if frame.counts:
            frame.pieces = encode(_COUNT, {"sent": before + place})
            frame.size = len(frame.pieces[0])


def _rights(arena: Arena) -> tuple[list[tuple[int, int, bytes]]]:
    """The ancillary data that carry an arena's descriptor."""
    return ([(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack("i", arena.descriptor))],)


def _rest(frames: tuple[_Frame, ...], offset: int) -> list[memoryview]:
    """The rest of a batch after *offset* bytes, at most _VECTORS pieces."""
    if offset == 0 and len(frames) == 1 and len(frames[0].pieces) <= _VECTORS:
        return frames[0].pieces
    pieces: list[memoryview] = []
    for frame in frames:
        if offset >= frame.size:
            offset -= frame.size
            continue
        for piece in frame.pieces:
            if offset >= len(piece):
                offset -= len(piece)
                continue
            pieces.append(piece[offset:] if offset else piece)
            offset = 0
            if len(pieces) == _VECTORS:
                return pieces
    return pieces
