"""Lanes: the FIFO queues in front of the devices.

Problem: JAX's CPU client runs cheap programs in whoever calls, and its order
is first in, first out only for one calling thread.  So each footprint has one
thread that makes its calls, in the order in which they were handed over.  What
is in flight must be bounded (more than 32 multi-device launches of one CPU
client can hang it), and somebody must see when a gang ends without keeping the
caller waiting.

How: one thread of a lane makes the calls, as soon as less than
:data:`IN_FLIGHT` are unfinished; another one for each set of devices (on CPUs
there is only one to a lane) waits for the ends in the same order and stamps
them.  A gang began when it was launched or when its devices became free,
whichever came later.

Rule for maintainers: a job never raises into a lane; if a lane's own code
does, the host must end (``on_death``), because devices without a lane hang.
No polling.

Paper: section 4.4 (gang-scheduled FIFO device queues), section 5.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any, Protocol

IN_FLIGHT = 8


class Job(Protocol):
    """One gang, as far as a lane is concerned.

    devices: the host's own numbers of the devices that it holds.
    alone: nothing else of the lane may be in flight with it.
    """

    devices: tuple[int, ...]

    def start(self) -> Any:
        """Launch it; returns what :meth:`wait` waits for.  May raise."""

    def wait(self, receipt: Any) -> None:
        """Until its devices are done with it.  Raises what went wrong there."""

    def over(self, times: Times, error: BaseException | None) -> None:
        """It is over; called in a thread of the lane, in launch order for its devices."""


class Times:
    """Seconds on this process's monotonic clock.

    called, returned: of the launching call.  start, end: on the devices.
    """

    __slots__ = ("called", "end", "returned", "start")

    def __init__(self, called: float, returned: float, start: float, end: float) -> None:
        self.called = called
        self.returned = returned
        self.start = start
        self.end = end


class _Busy:
    """When the devices of a host were last seen to become free."""

    def __init__(self) -> None:
        self._until: dict[int, float] = {}
        self._lock = threading.Lock()

    def hold(self, devices: Iterable[int], since: float, end: float) -> float:
        """These were busy until *end* with something launched at *since*: when it began."""
        with self._lock:
            start = max([since, *(self._until.get(device, 0.0) for device in devices)])
            for device in devices:
                self._until[device] = end
        return min(start, end)


_Flight = tuple[Job, float, float, Any, BaseException | None]
"""A launched job, when the call was made and returned, its receipt, what the call raised."""


class Lane:
    """One FIFO queue with its threads."""

    def __init__(self, name: str, busy: _Busy, on_death: Callable[[BaseException], None]) -> None:
        self.name = name
        self._busy = busy
        self._on_death = on_death
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._unfinished: dict[Job, None] = {}
        self._flying: dict[tuple[int, ...], queue.SimpleQueue[_Flight | None]] = {}
        self._room = threading.Semaphore(IN_FLIGHT)
        self._threads: list[threading.Thread] = []
        self._start(f"lane {name}", self._launch)

    def _start(self, label: str, work: Callable[..., None], *args: Any) -> None:
        thread = threading.Thread(target=self._guarded, args=(work, *args), name=label, daemon=True)
        self._threads.append(thread)
        thread.start()

    def put(self, job: Job) -> None:
        """Hand over one gang; returns at once."""
        self._unfinished[job] = None
        self._jobs.put(job)

    @property
    def oldest(self) -> Job | None:
        """The first gang that was handed over and is not over."""
        return next(iter(tuple(self._unfinished)), None)

    def close(self) -> None:
        """End when everything that was handed over is done."""
        self._jobs.put(None)

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
        while (job := self._jobs.get()) is not None:
            self._room.acquire()
            called = time.monotonic()
            receipt, error = None, None
            try:
                receipt = job.start()
            except Exception as raised:
                error = raised
            flying = self._flying.get(job.devices)
            if flying is None:
                flying = self._flying[job.devices] = queue.SimpleQueue()
                self._start(f"ends of {self.name}", self._watch, flying)
            flying.put((job, called, time.monotonic(), receipt, error))
            # Between two gangs this thread must not keep the last one's arrays alive.
            del job, receipt, error
        for flying in self._flying.values():
            flying.put(None)

    def _watch(self, flying: queue.SimpleQueue[_Flight | None]) -> None:
        while (flight := flying.get()) is not None:
            job, called, returned, receipt, error = flight
            if error is None:
                try:
                    job.wait(receipt)
                except Exception as raised:
                    error = raised
            end = time.monotonic()
            start = self._busy.hold(job.devices, called, end)
            self._room.release()
            self._unfinished.pop(job, None)
            job.over(Times(called, returned, start, end), error)
            del flight, job, receipt, error


class Lanes:
    """All lanes of a host, made when they are first used.

    on_death: called when a lane's own code failed; the host cannot go on.
    """

    def __init__(self, on_death: Callable[[BaseException], None]) -> None:
        self._on_death = on_death
        self._busy = _Busy()
        self._lanes: dict[str, Lane] = {}

    def put(self, lane: str, job: Job) -> None:
        """Hand a gang to its lane.  Always from the same thread."""
        known = self._lanes.get(lane)
        if known is None:
            known = self._lanes[lane] = Lane(lane, self._busy, self._on_death)
        known.put(job)

    def oldest(self, lane: str) -> Job | None:
        """The first gang that a lane was handed and that is not over."""
        known = self._lanes.get(lane)
        return known.oldest if known is not None else None

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
