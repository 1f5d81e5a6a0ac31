"""Device queues (lanes): the FIFO queues in front of the devices.

Problem: JAX's CPU client runs cheap programs in the calling thread, and its order
is first in, first out only for one calling thread.  So each footprint has one
launch thread, which makes its calls in the order in which they were handed over.  The
launches in flight must be bounded (more than 32 multi-device launches of one CPU
client can hang it).  Some thread must see when a gang ends, without keeping the
caller waiting.  And to wake a thread costs more than a small gang.

How: after each launch the launch thread also looks which gangs have
ended meanwhile, and waits for the oldest one when :data:`IN_FLIGHT` are
unfinished.  While it has nothing to launch it reads the host's links itself, so that a grant
is launched by the thread that it came to, and as long as it polls them it goes on to look
for ends.  Only when it sleeps, or has several sets of devices to look after (as on
accelerators), does another thread, one for each set, wait for the ends.  Either way ends are
seen one after the other, in launch order.  A gang began when it was launched or when
its devices became free, whichever came later.

Rule for maintainers: a job never raises into a device queue; if a queue's own code
does, the host must end (``on_death``), because devices without a queue hang.
No polling but that of :mod:`pathways_lab.transport.busy_poll`.  Before the launch thread sleeps it
wakes the thread that sees the rest.

Paper: section 4.4 (gang-scheduled FIFO device queues), section 5.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from pathways_lab.transport.reactor import Reactor

IN_FLIGHT = 8
_BRIEF = 0.001
"""The launch thread may stop reading its links for so many seconds; after that the reactor's own
thread takes over."""
_MEMORY = 0.8
"""How much of the longest such time counts the next time: it may be as long again."""


class Job(Protocol):
    """Gangs, as far as a lane is concerned.  devices: the host's own numbers of those they hold."""

    devices: tuple[int, ...]

    def start(self) -> None:
        """Launch it."""

    def rest(self) -> Job | None:
        """After :meth:`start`: what of it was not launched, to be launched next."""

    def ready(self) -> bool:
        """Whether :meth:`wait` would return at once."""

    def wait(self) -> None:
        """Until its devices are done with it."""

    def over(self, start: float) -> None:
        """It is over; called in a thread of the lane, in launch order for its devices.

        start: monotonic seconds when it was launched or its devices became free, whichever was
            later.
        """


class _Busy:
    """When the devices of a host were last seen to become free, by the clock *now* (seconds)."""

    def __init__(self, now: Callable[[], float]) -> None:
        self.now = now
        self._until: dict[int, float] = {}
        self._lock = threading.Lock()

    def hold(self, devices: Iterable[int], since: float, end: float) -> float:
        """These were busy until *end* with something launched at *since*: when it began."""
        start, until = since, self._until
        with self._lock:
            for device in devices:
                busy = until.get(device, 0.0)
                if busy > start:
                    start = busy
                until[device] = end
        return start if start < end else end


class _Flights:
    """The launches in flight on one set of devices, and when each was made, oldest first.

    The holder of *token* sees ends; *wake* tells the thread that does nothing else.
    """

    __slots__ = ("busy", "flying", "token", "unfinished", "wake")

    def __init__(self, busy: _Busy, unfinished: dict[Job, None]) -> None:
        self.busy = busy
        self.unfinished = unfinished
        self.flying: deque[tuple[Job, float]] = deque()
        self.token = threading.Lock()
        self.wake: queue.SimpleQueue[bool] = queue.SimpleQueue()

    def see_one(self, *, wait: bool) -> bool:
        """See the oldest one end; False when there is none, or it has not.  With the token."""
        if not self.flying:
            return False
        job, called = self.flying[0]
        if not (wait or job.ready()):
            return False
        job.wait()
        start = self.busy.hold(job.devices, called, self.busy.now())
        self.flying.popleft()
        self.unfinished.pop(job, None)
        job.over(start)
        return True

    def see(self) -> bool:
        """See what has ended, unless another thread is about to; whether anything has."""
        seen = False
        if self.flying and self.token.acquire(blocking=False):
            try:
                while self.see_one(wait=False):
                    seen = True
            finally:
                self.token.release()
        return seen

    def make_room(self) -> None:
        """Wait until one more may be launched."""
        while len(self.flying) >= IN_FLIGHT:
            with self.token:
                if len(self.flying) >= IN_FLIGHT:
                    self.see_one(wait=True)


class Lane:
    """One FIFO queue with its threads."""

    def __init__(
        self,
        name: str,
        busy: _Busy,
        on_death: Callable[[BaseException], None],
        links: Reactor | None = None,
    ) -> None:
        self.name = name
        self._links = links
        self._busy = busy
        self._on_death = on_death
        self._jobs: queue.SimpleQueue[tuple[Job, ...] | None] = queue.SimpleQueue()
        self._flights: dict[tuple[int, ...], _Flights] = {}
        self._unfinished: dict[Job, None] = {}
        self._idle = True
        self._threads: list[threading.Thread] = []
        self._start(f"lane {name}", self._launch)

    def _start(self, label: str, work: Callable[..., None], *args: Any) -> None:
        thread = threading.Thread(target=self._guarded, args=(work, *args), name=label, daemon=True)
        self._threads.append(thread)
        thread.start()

    def put(self, jobs: tuple[Job, ...]) -> None:
        """Hand over gangs; returns at once."""
        self._unfinished.update(dict.fromkeys(jobs))
        self._jobs.put(jobs)
        if self._links is not None:
            self._links.nudge()

    @property
    def oldest(self) -> Job | None:
        """The first gang that was handed over and is not over."""
        return next(iter(tuple(self._unfinished)), None)

    @property
    def empty(self) -> bool:
        """Whether all that was handed over is over."""
        return not self._unfinished

    def close(self) -> None:
        """End when everything that was handed over is done."""
        self._jobs.put(None)
        if self._links is not None:
            self._links.nudge()

    def join(self, timeout: float) -> None:
        """Wait for the end after :meth:`close`, of each thread at most *timeout* seconds."""
        for thread in self._threads:
            thread.join(timeout)

    def _guarded(self, work: Callable[..., None], *args: Any) -> None:
        try:
            work(*args)
        except BaseException as error:
            self._on_death(error)

    def _launch(self) -> None:
        away = 0.0
        while True:
            if self._jobs.empty():
                if self._links is not None:
                    self._links.lead(lambda: not self._jobs.empty(), watch=self)
                    if away > _BRIEF:
                        self._links.take_back()
                if self._jobs.empty():
                    self.leave()
            jobs = self._jobs.get()
            if jobs is None:
                break
            self._idle = False
            began = time.monotonic()
            for job in jobs:
                self._launch_one(job)
                rest = job.rest()
                while rest is not None:
                    self._unfinished[rest] = None
                    self._launch_one(rest)
                    rest = rest.rest()
            # Between two gangs this thread must not keep the last one's arrays alive.
            del job, jobs
            away = max(time.monotonic() - began, _MEMORY * away)
        self._idle = True
        for flights in self._flights.values():
            flights.wake.put(False)

    def look(self) -> bool:
        """See what has ended while there is nothing to launch; whether anything has."""
        return len(self._flights) == 1 and any(each.see() for each in self._flights.values())

    def leave(self) -> None:
        """Let the other threads see the ends."""
        if not self._idle:
            self._idle = True
            for flights in self._flights.values():
                if flights.flying:
                    flights.wake.put(True)

    def _launch_one(self, job: Job) -> None:
        flights = self._flights.get(job.devices)
        if flights is None:
            flights = self._flights[job.devices] = _Flights(self._busy, self._unfinished)
            self._start(f"ends of {self.name}", self._watch, flights)
            for known in self._flights.values():
                known.wake.put(True)  # this thread has looked after the first set alone
        if len(flights.flying) >= IN_FLIGHT:
            flights.make_room()
        called = self._busy.now()
        job.start()
        flights.flying.append((job, called))
        if len(self._flights) == 1:
            flights.see()
        else:
            flights.wake.put(True)

    def _watch(self, flights: _Flights) -> None:
        """See the ends of a set of devices while the launching thread does not."""
        going = True
        while going:
            going = flights.wake.get()
            while flights.flying and (self._idle or len(self._flights) > 1):
                with flights.token:
                    flights.see_one(wait=True)


class Lanes:
    """All lanes of a host, made when they are first used.

    on_death: called when a lane's own code failed; the host cannot go on.
    links: read by a lane that has nothing to launch.
    clock: monotonic seconds, for when gangs begin and end.
    """

    def __init__(
        self,
        on_death: Callable[[BaseException], None],
        links: Reactor | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._on_death = on_death
        self._links = links
        self._busy = _Busy(clock)
        self._lanes: dict[str, Lane] = {}

    def put(self, lane: str, *jobs: Job) -> None:
        """Hand gangs to their lane.  Always from the same thread."""
        known = self._lanes.get(lane)
        if known is None:
            known = self._lanes[lane] = Lane(lane, self._busy, self._on_death, self._links)
        known.put(jobs)

    def find(self, lane: str) -> Lane | None:
        """The lane of this name, if it was used; it may be looked at when it is dropped, too."""
        return self._lanes.get(lane)

    def drop(self, lane: str) -> None:
        """Nobody will use this lane again; what it was handed is still done."""
        known = self._lanes.pop(lane, None)
        if known is not None:
            known.close()

    def close(self, timeout: float = 1.0) -> None:
        """End all lanes, waiting for each at most *timeout* seconds."""
        lanes = list(self._lanes.values())
        self._lanes.clear()
        for lane in lanes:
            lane.close()
        for lane in lanes:
            lane.join(timeout)
