"""The one place of a process that reads its links, accepts new ones, keeps timers.

Problem: every process of the lab talks to several others at once; handlers
must see messages one at a time and in order, and no peer, however slow, wrong
or hostile, may stop the others from being heard.  And a thread that waits for
an answer must not wait for another thread to read it: that hop costs as much
as the whole round trip.

How: the reactor has a thread of its own, which reads when no other thread waits.  A
thread that waits takes its place (:meth:`Reactor.lead`): it reads the links
itself until it has its answer, while the own thread stands back.  The thread that
handles messages, calls and timers holds the *role*: there is one at a time,
and it counts as the reactor's thread while it does.

Rule for maintainers: the timers and the set of links belong to the holder of the
role; other threads hand work over with :meth:`Reactor.call_soon`.  Any number
of threads may wait in the selector, so readiness is a hint: read and write
without blocking.  A handler that raises is reported and survived.  Handlers
never block, and never call :meth:`Reactor.connect`.

Paper: section 4.5.
"""

from __future__ import annotations

import contextlib
import functools
import heapq
import itertools
import math
import selectors
import socket
import ssl
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from pathways_lab.transport import addresses
from pathways_lab.transport.buffer_pool import tidy
from pathways_lab.transport.busy_poll import SECONDS, Ready, Vigil, Watch
from pathways_lab.transport.dask_comms import Comms, is_comm
from pathways_lab.transport.deferred_signals import HeldBack
from pathways_lab.transport.framing import Limits, Message, WireError, encode
from pathways_lab.transport.handshake import Arrival, Refused, check_versions, meet, stamps
from pathways_lab.transport.link import Link, LinkClosed
from pathways_lab.transport.listener import Listener, Reception

OnMessage = Callable[[Link, str, dict[str, Any], list[memoryview]], None]
OnClose = Callable[[Link, str], None]
OnOpen = Callable[[Link, dict[str, Any]], None]
Hello = dict[str, Any] | Callable[[Link, dict[str, Any]], dict[str, Any]]

_BULK = "bulk"
"""In a hello: this end would share memory on this link."""
_PASSES = 4
"""Calls that calls lead to are done at once, unless it goes on and on."""
_SWEEP_SECONDS = 0.5
"""How long a frame can stay behind whose sender was interrupted twice at the worst moment."""


class Trouble(Protocol):
    """Something between two ends that delays, loses or repeats messages."""

    def on_the_way(self, link: Link, messages: list[Message]) -> list[Message]:
        """Take *messages*, return those to handle now.  Later ones go to :meth:`Reactor.admit`."""


class Reactor:
    """One thread that reads all links of a process.

    on_message(link, op, fields, buffers): a message; the buffers are its own memory.
    on_close(link, reason): called once for every link that was open.
    on_open(link, peer_hello): an accepted link is ready (not for connected ones).
    on_error(text): a handler raised; text is its traceback (default: standard error).
    limits: what one incoming message may claim.
    awake: whoever waits looks for messages while they come fast: see :mod:`.busy_poll`.
    stand_back: seconds for which its own thread leaves the links to the next that will wait.

    All of them are called in the reactor's thread.
    """

    def __init__(
        self,
        name: str,
        on_message: OnMessage,
        on_close: OnClose,
        on_open: OnOpen | None = None,
        *,
        on_error: Callable[[str], None] | None = None,
        limits: Limits | None = None,
        awake: bool = False,
        stand_back: float = 0.002,
    ) -> None:
        self.name = name
        self._malformed = 0
        self.message_bytes = 0
        """Size on the wire of the message whose handler runs."""
        self.trouble: Trouble | None = None
        """Trouble on the way of messages that came; for faults on purpose."""
        self._on_message = on_message
        self._on_close = on_close
        self._on_open = on_open
        self._on_error = on_error or (lambda text: print(text, file=sys.stderr, flush=True))
        self._limits = limits or Limits()
        self._selector = selectors.DefaultSelector()
        self._asleep, self._patient = self._selector.select, stand_back
        self._vigil = Vigil(self._asleep, SECONDS if awake else 0.0)
        self._links: dict[Link, int] = {}
        self._reception = Reception(self._selector, self.call_later)
        self._comms = Comms(name)
        self._calls: deque[tuple[Callable[..., Any], tuple[Any, ...]]] = deque()
        self._timers: list[tuple[float, int, Callable[..., Any], tuple[Any, ...]]] = []
        self._numbers = itertools.count()
        self._swept = time.monotonic()
        self._stopping = False
        self._thread: threading.Thread | None = None
        self._role = threading.Lock()
        self._holder: threading.Thread | None = None
        self._leading = threading.Lock()
        self._leader: threading.Thread | None = None
        self._leads = 0
        self._led_at = -math.inf
        self._rest = threading.Event()
        self._parked = False
        self._done = threading.Event()
        self._awake = False
        self._waker, self._wakee = socket.socketpair()
        self._waker.setblocking(False)
        self._wakee.setblocking(False)
        self._selector.register(self._wakee, selectors.EVENT_READ, self._drain_wakes)

    # --- from any thread --------------------------------------------------------

    def listen(
        self,
        address: str,
        key: bytes,
        hello: Hello,
        *,
        tag: Any = None,
        context: ssl.SSLContext | None = None,
        bulk: bool = False,
        limits: Limits | None = None,
    ) -> str:
        """Accept connections at *address*; the real one (port 0, or a range, becomes a number).

        hello: this end's hello, or a function of the new link and the hello of
            the other end that returns it; it may set ``link.name`` and ``link.taker``, and raises
            Refused to turn the other end away with a reason.
        tag: becomes ``link.tag`` of accepted links.
        bulk: large buffers go through shared memory where both ends say so and can.
        limits: of this door, where they are others than the reactor's.
        """
        # Nothing but bytes goes through a comm.
        greet = functools.partial(self._greet, hello, tag, bulk and not is_comm(address))
        limits = limits or self._limits
        if is_comm(address):
            listener = Listener(None, address, key, None, greet, limits)
            self.call_soon(self._reception.open, listener)
            take = functools.partial(self.call_soon, self._reception.take, listener)
            return self._comms.listen(address, context, take)
        sock = addresses.listening(address)
        listener = Listener(sock, addresses.of_listener(sock), key, context, greet, limits)
        self.call_soon(self._reception.open, listener)
        return listener.address

    def connect(
        self,
        address: str,
        key: bytes,
        hello: dict[str, Any],
        timeout: float = 10.0,
        *,
        tag: Any = None,
        name: str | None = None,
        context: ssl.SSLContext | None = None,
        retry: bool = False,
        bulk: bool = False,
        holder: int = 0,
        quiet: Callable[[float], object] | None = None,
    ) -> Link:
        """A link to *address*; waits until both ends are authenticated and greeted.

        retry: the other end may not listen yet: try until the timeout.
        bulk: large buffers go through shared memory where both ends say so and can.
        name: what to call the other end (default: the name in its hello).
        holder: whose key it is, at doors of many (:mod:`pathways_lab.transport.auth`).
        quiet: see :func:`pathways_lab.transport.handshake.meet`.
        ``link.peer`` is its hello, ``link.clock`` the difference of clocks.
        Raises Refused, AuthenticationError, WireError, TimeoutError, OSError.
        """
        if self.is_current():
            raise RuntimeError("connect() waits: use connect_soon() in the reactor's thread")
        bulk = bulk and not is_comm(address)
        if bulk:
            hello = {**hello, _BULK: True}
        deadline, left = time.monotonic() + timeout, timeout
        while True:
            try:
                dial = self._comms.dial
                sock, decoder, messages, apart = meet(
                    address, key, hello, left, self._limits, context, dial, holder, quiet
                )
                break
            except (FileNotFoundError, ConnectionRefusedError):
                time.sleep(0.01 if retry else 0.0)
                left = deadline - time.monotonic()
                if not retry or left <= 0:
                    raise
        peer = messages[0].fields
        link = Link(self, sock, name or str(peer.get("name", address)), peer, decoder, tag)
        link.clock = apart
        if bulk and peer.get(_BULK) is True:
            link.share(connected=True)
        link.begin(came=1)
        self.call_soon(self._add_link, link, messages[1:])
        return link

    def connect_soon(
        self,
        address: str,
        key: bytes,
        hello: dict[str, Any],
        done: Callable[[Link | Exception], Any],
        timeout: float = 10.0,
        **options: Any,
    ) -> None:
        """Like connect, without waiting: done(link or exception) in the reactor's thread."""

        def work() -> None:
            try:
                result: Link | Exception = self.connect(address, key, hello, timeout, **options)
            except Exception as error:
                result = error
            self.call_soon(done, result)

        threading.Thread(target=work, name=f"{self.name}-connect", daemon=True).start()

    def call_soon(self, function: Callable[..., Any], *args: Any) -> None:
        """Run function(*args) in the reactor's thread; calls keep their order."""
        self._calls.append((function, args))
        if not self.is_current():
            self._wake()

    def call_here(self, function: Callable[..., Any], *args: Any) -> None:
        """The same, at once and in the calling thread where no other one handles anything."""
        self._calls.append((function, args))
        if self.is_current():
            return
        if not self._role.acquire(blocking=False):
            return self._wake()
        first = self._timers[0] if self._timers else None
        try:
            self._holder = threading.current_thread()
            self._handle([])
            earlier = bool(self._timers) and self._timers[0] is not first
        finally:
            self._holder = None
            self._role.release()
        # The thread in the selector knows neither of new calls nor of an earlier timer.
        if self._calls or (earlier and not self._standing_back()):
            self._wake()

    def call_later(self, seconds: float, function: Callable[..., Any], *args: Any) -> None:
        """Run function(*args) in the reactor's thread after *seconds*."""
        due = time.monotonic() + seconds
        self._calls.append((self._add_timer, ((due, next(self._numbers), function, args),)))
        # A thread that stands back comes back soon enough.
        if not self._standing_back() and not self.is_current():
            self._wake()

    def is_current(self) -> bool:
        """Whether the calling thread is the reactor's: whether it handles messages now."""
        return self._holder is threading.current_thread()

    @property
    def rejected(self) -> int:
        """Connections and streams closed because they were foreign or malformed."""
        return self._malformed + self._reception.rejected

    @property
    def links(self) -> tuple[Link, ...]:
        """The open links."""
        return tuple(self._links)

    def lead(
        self, done: Callable[[], bool], timeout: float | None = None, watch: Watch | None = None
    ) -> bool:
        """Wait until *done()*, reading the links in this thread meanwhile.

        done: asked again after whatever was handled; :meth:`nudge` has it asked.
        timeout: seconds.  Returns also when they are over or the reactor ends.
        watch: also looked at meanwhile, until the thread sleeps.

        False at once when another thread leads, or this one handles a message: wait
        in another way then.  Ctrl-C gets through, between two messages.
        """
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        select = functools.partial(self._vigil.select, watch=watch)
        with HeldBack(self.nudge) as interrupt:
            if self.is_current() or not self._leading.acquire(blocking=False):
                return False
            began = time.monotonic()
            self._leader = threading.current_thread()
            self._leads += 1
            try:
                while not (interrupt.struck or self._stopping or done()):
                    left = deadline - time.monotonic()
                    if left <= 0:
                        break
                    self._turn(select, min(left, self._patience()))
            finally:
                self._leader = None
                self._leading.release()
                # After the release: whoever saw this lead last so long is told of its end.
                ended = self._led_at = time.monotonic()
                if ended - began >= self._patient or self._stopping or self._calls:
                    self._rest.set()
        return True

    def nudge(self) -> None:
        """Something happened that the leading thread may wait for.  From any thread."""
        leader = self._leader
        if leader is not None and not (leader is self._holder and self.is_current()):
            self._wake()

    def take_back(self) -> None:
        """The leading thread will be busy: the reactor's own thread reads until one leads again."""
        self._led_at = -math.inf
        self._rest.set()

    def start(self) -> None:
        """Run in a thread of its own."""
        self._thread = threading.Thread(target=self._run, name=self.name, daemon=True)
        self._thread.start()

    def run_forever(self) -> None:
        """Run in the calling thread, until :meth:`close`."""
        self._thread = threading.current_thread()
        self._run()

    def close(self, reason: str = "closed by this end") -> None:
        """Close links and listeners and end the thread.  Again is fine; waits for the end."""
        self.call_soon(self._stop, reason)
        if self._thread is None:
            self._thread = threading.current_thread()
            self._run()
        elif not self.is_current():
            self._done.wait(10.0)

    # --- Owner, for links ---------------------------------------------------------

    def wants_write(self, link: Link) -> None:
        self.call_soon(self._watch, link)

    def wants_close(self, link: Link, reason: str, broken: bool = False) -> None:
        self.call_soon(self._broke if broken else self._close_link, link, reason)

    # --- in the reactor's thread ----------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._stand_back()
                # Where others lead, they are busy now, and need the interpreter.
                self._turn(self._asleep if self._leads else self._vigil.select, self._patience())
                # One of two threads in a selector is woken: it may have been meant for the other.
                self.nudge()
        finally:
            self._end()

    def _stand_back(self) -> None:
        """Leave the links to a thread that leads, and that will probably lead again soon.

        Two threads that wait in one selector are both woken by every message.
        """
        while not self._stopping:
            lead = self._leads
            led = self._leading.locked()
            if not led and time.monotonic() - self._led_at >= self._patient:
                return
            self._parked = True
            called = self._rest.wait(self._patient)
            self._parked = False
            if called:
                self._rest.clear()
                if not self._leading.locked():
                    return
            elif led and self._leads == lead and self._leading.locked():
                # A long wait: whoever leads says when it is over.
                self._rest.wait(_SWEEP_SECONDS)

    def _turn(self, select: Callable[[float], Ready], patience: float) -> None:
        """Wait for something at most so long, and handle what there is."""
        ready = select(patience)
        with self._role:
            self._holder = threading.current_thread()
            try:
                self._handle(ready)
            finally:
                self._holder = None

    def _handle(self, ready: Ready) -> None:
        for key, events in ready:
            self._guarded(key.data, events)
        self._awake = False
        for _ in range(_PASSES):
            for _ in range(len(self._calls)):
                function, args = self._calls.popleft()
                self._guarded(function, *args)
        now = time.monotonic()
        while self._timers and self._timers[0][0] <= now:
            _, _, function, args = heapq.heappop(self._timers)
            self._guarded(function, *args)
        if now - self._swept >= _SWEEP_SECONDS:
            self._swept = now
            for link in tuple(self._links):
                if link.backlog:
                    self._watch(link)
                link.sweep(now)
            tidy()

    def _patience(self) -> float:
        if self._calls or self._stopping:
            return 0.0
        for due, *_ in self._timers[:1]:  # whoever has the role may take it out meanwhile
            return min(_SWEEP_SECONDS, max(0.0, due - time.monotonic()))
        return _SWEEP_SECONDS

    def _guarded(self, function: Callable[..., Any], *args: Any) -> None:
        try:
            function(*args)
        except Exception:
            self._on_error(f"{self.name}: a handler failed\n{traceback.format_exc()}")

    def _wake(self) -> None:
        """The thread that waits in the selector comes out of it, now or when it goes in.

        A system call lets another thread of Python go on, for milliseconds if it
        is busy: none is made when nobody is in the selector.
        """
        if self._standing_back():
            self._rest.set()
        elif not self._awake:
            self._awake = True
            with contextlib.suppress(OSError):
                self._waker.send(b"\0")
            if not self._leading.locked():
                self._rest.set()

    def _standing_back(self) -> bool:
        """Whether nobody is in the selector, and whoever goes there looks for calls first."""
        return self._parked and self._leader is None

    def _drain_wakes(self, _events: int) -> None:
        with contextlib.suppress(OSError):
            self._wakee.recv(4096)

    def _add_timer(self, timer: tuple[float, int, Callable[..., Any], tuple[Any, ...]]) -> None:
        heapq.heappush(self._timers, timer)

    def _greet(
        self, hello: Hello, tag: Any, bulk: bool, arrival: Arrival, messages: list[Message]
    ) -> None:
        """An arrival has proved the key and sent its hello: answer, and it is a link."""
        peer = messages[0].fields
        name = str(peer.get("name", "?"))[:200]
        link = Link(self, arrival.sock, name, peer, arrival.decoder, tag)
        link.holder = arrival.holder
        try:
            check_versions(peer, name)
            answer = hello(link, peer) if callable(hello) else hello
        except Refused as refusal:
            with contextlib.suppress(OSError):
                arrival.sock.send(b"".join(encode("refused", {"reason": str(refusal)})))
            self._reception.turn_away(arrival)
            return
        except Exception:
            self._reception.turn_away(arrival)
            raise
        self._reception.admit(arrival)
        if link.taker is not None:
            with contextlib.suppress(OSError):
                arrival.sock.send(b"".join(encode("hello", {**answer, **stamps()})))
            link.taker(arrival.sock)
            return
        if bulk and peer.get(_BULK) is True:
            answer = {**answer, _BULK: True}
            link.share(connected=False)
        self._add_link(link, [])
        with contextlib.suppress(LinkClosed):
            link.send("hello", {**answer, **stamps()})
        if self._on_open is not None:
            self._on_open(link, peer)
        self.admit(link, messages[1:])

    def _add_link(self, link: Link, messages: list[Message]) -> None:
        if self._stopping:
            return link.shut("closed by this end")
        self._links[link] = selectors.EVENT_READ
        ready = functools.partial(self._ready, link)
        self._selector.register(link.sock, selectors.EVENT_READ, ready)
        self.admit(link, messages)
        if link.backlog:
            self._watch(link)
        if isinstance(link.sock, ssl.SSLSocket):
            # Decrypted bytes may wait inside, where no selector sees them.
            self.call_soon(self._read, link)

    def _watch(
        self, link: Link, events: int = selectors.EVENT_READ | selectors.EVENT_WRITE
    ) -> None:
        if link in self._links and self._links[link] != events:
            self._links[link] = events
            self._selector.modify(link.sock, events, self._selector.get_key(link.sock).data)

    def _ready(self, link: Link, events: int) -> None:
        if events & selectors.EVENT_WRITE:
            try:
                if link.unblock():
                    self._watch(link, selectors.EVENT_READ)
            except OSError as error:
                self._broke(link, link.broken(error))
        if events & selectors.EVENT_READ:
            self._read(link)

    def _read(self, link: Link) -> None:
        """Take in what has come over a link, in one turn of it."""
        came = self._taken(link, link.receive) if link in self._links else None
        if came is None:
            return
        self.admit(link, came if self.trouble is None else self.trouble.on_the_way(link, came))
        if link in self._links and link.hidden:
            self.call_soon(self._read, link)

    def _broke(self, link: Link, reason: str) -> None:
        """Nothing more can be written: close it when what came before is delivered."""
        heard = -1.0
        while link in self._links and heard != link.heard:
            heard = link.heard
            self._read(link)
        self._close_link(link, reason)

    def admit(self, link: Link, messages: list[Message]) -> None:
        """These came over a link, in this order.  In the reactor's thread."""
        for message in self._taken(link, link.admit, messages) or ():
            self._deliver(link, message)

    def _taken(
        self, link: Link, take: Callable[..., list[Message]], *args: Any
    ) -> list[Message] | None:
        """The result of take(*args); None when it closed the link, or must close it."""
        try:
            return take(*args)
        except WireError as error:
            self._malformed += 1
            reason = f"{link.name} sent a malformed message: {error}"
        except LinkClosed as closed:
            reason = str(closed)
        except OSError as error:
            reason = link.broken(error)
        self._close_link(link, reason)
        return None

    def _deliver(self, link: Link, message: Message) -> None:
        if link in self._links:
            self.message_bytes = message.size
            self._guarded(self._on_message, link, message.op, message.fields, message.buffers)

    def _close_link(self, link: Link, reason: str) -> None:
        if self._links.pop(link, None) is None:
            return
        self._selector.unregister(link.sock)
        if link.backlog:
            # Last words, as far as the socket takes them.
            with contextlib.suppress(OSError):
                link.unblock()
        link.shut(reason)
        self._guarded(self._on_close, link, reason)

    def _stop(self, reason: str) -> None:
        self._stopping = True
        self._reception.close()
        for link in tuple(self._links):
            self._close_link(link, reason)

    def _end(self) -> None:
        # Nobody may be in the selector when it is closed.
        with self._leading:
            if self._done.is_set():
                return
            self._comms.close()
            self._done.set()
            self._selector.close()
            self._waker.close()
            self._wakee.close()
