"""The kernel's side of host computations: Dask tasks, and the workers that they run on.

Problem: every element of every feed of a lab is a task that somebody must submit, hear of and
end; its buffers are promised to runs before it begins, so each must arrive or be given up,
whatever happens to the worker, the feed, the slice or the lab.

How: one Dask client for all feeds of a lab.  A thread hears of tasks that have ended (Dask's own
callbacks need threads that are gone when an interpreter ends); another ends feeds that nobody has
any more, and replaces workers of an embedded lab that have died.  Tasks themselves:
:mod:`pathways_lab.client.feeds.worker_tasks`.

Rule for maintainers: these threads report and settle, and call nothing of the user's.  Whatever
was declared arrives or is given up.

Paper: section 4.2 (host computations), section 4.6 (errors reach whoever depends on them).
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import queue
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from pathways_lab.client.code import layouts
from pathways_lab.client.feeds import worker_tasks
from pathways_lab.client.feeds.worker_tasks import Door, Leaf, Parcel, Sent
from pathways_lab.client.functions import array_types
from pathways_lab.client.functions.array_types import ArrayType, shard_bytes
from pathways_lab.client.lab.devices import Slice
from pathways_lab.client.lab.tags import current
from pathways_lab.client.parts import Parts
from pathways_lab.client.session import failures
from pathways_lab.client.session.handles import Handle
from pathways_lab.client.session.pending import Buffer
from pathways_lab.client.session.waiting import Pending
from pathways_lab.core.errors import Failure, PathwaysError
from pathways_lab.core.program.layout import Layout
from pathways_lab.core.program.program import Line
from pathways_lab.runtime.cluster.feed_worker import FEEDS
from pathways_lab.timeline.records import Span
from pathways_lab.transport import record_encoding
from pathways_lab.transport.codec import pack

if TYPE_CHECKING:
    import distributed

_RETRIES = 2
"""How often Dask repeats a task that could not reach a host."""
_LOOK = 0.5
"""Seconds between two looks at whether the workers for feeds live."""
_STEPS = 1 << 32
"""Steps of a feed at most between two priorities."""
_FETCH = 2.0
"""Seconds after which a task's result, which is small, is asked for anew."""
ENDED = "a feed ends with its lab and when it is closed: make a new one with lab.feed(...)"


class Described(Pending):
    """The types of all elements of a feed, once its first one is made."""

    def __init__(self) -> None:
        super().__init__()
        self.tree: Any = None
        self.leaves: tuple[Leaf, ...] = ()


@dataclass(frozen=True, slots=True)
class Place:
    """Where one array of every element goes."""

    kind: ArrayType
    slice: Slice
    layout: Layout

    @classmethod
    def of(cls, leaf: Leaf, on: Slice, requested: Any) -> Place:
        """Raises PathwaysError for what JAX cannot hold, or the sharding cannot cut."""
        kind = array_types.host_type(np.broadcast_to(np.empty((), leaf.dtype), leaf.shape))
        if kind is None:
            raise array_types.no_array(leaf, str(leaf))
        if requested is None:
            return cls(kind, on, layouts.replicated(on, len(kind.shape)))
        return cls(kind, on, layouts.layout_of(requested, on, kind))


class Lent:
    """An element on its way or there: whether its handles are gone, and its buffers.

    taken: the caller has had it, so it may be read and is made to the end.
    """

    def __init__(self, handles: list[Handle], buffers: list[Buffer]) -> None:
        self.taken = False
        self._handles = [weakref.ref(handle) for handle in handles]
        self._buffers = [weakref.ref(buffer) for buffer in buffers]

    @property
    def let_go(self) -> bool:
        handles = [handle() for handle in self._handles]
        return all(handle is None or handle.is_deleted() for handle in handles)

    @property
    def over(self) -> bool:
        """Neither a handle nor a run has it any more."""
        return all(buffer() is None for buffer in self._buffers)


@dataclass(slots=True)
class _Task:
    """An element under way."""

    feed: int
    step: int
    buffers: list[int] = field(default_factory=list)
    lent: Lent | None = None
    future: distributed.Future[Any] | None = None


@dataclass(slots=True)
class _Source:
    """A feed as its tasks know it.

    make: the user's function, on workers.  first: element 0.  about: what it looks like.
    """

    name: str
    make: distributed.Future[Any]
    first: distributed.Future[Any]
    about: distributed.Future[Any]


class HostTasks:
    """The Dask tasks of a lab's feeds, and the workers that they run on.

    forget: numbers of feeds that nobody has any more; None: the lab ends.
    """

    def __init__(self, lab: Parts) -> None:
        import distributed

        connection = lab.session.connection
        self.forget: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._lab = lab
        self._session = lab.session
        self._connection = connection
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._sources: dict[int, _Source] = {}
        self._tasks: dict[tuple[int, int], _Task] = {}
        pems = lab._control.tls
        self._door = Door(connection.name, connection.number, connection.data_key, pems)
        self._dask = lab.dask_client()
        try:
            self._find_workers()
        except BaseException:
            self._dask.close()
            raise
        self._completed = distributed.as_completed(loop=self._dask.loop)
        self._heard: dict[str, Callable[[Any], None]] = {}
        self._expected = threading.Semaphore(0)
        self._closing = False
        self._hearer = threading.Thread(
            target=self._hear, name="pathways feeds' tasks", daemon=True
        )
        self._hearer.start()
        self._keeper = threading.Thread(target=self._keep, name="pathways feeds", daemon=True)
        self._keeper.start()

    def _find_workers(self) -> None:
        embedded = self._lab.embedded
        if embedded is not None:
            embedded.add_feeders(1)
            return
        workers = self._dask.scheduler_info(n_workers=-1)["workers"].values()
        if not any(FEEDS in worker.get("resources", {}) for worker in workers):
            raise failures.refused(
                f"none of the {len(workers)} workers of the lab's Dask cluster makes elements of"
                f" feeds: one that does has the resource {FEEDS!r} and owns no devices",
                f'start one more with: dask worker ... --resources "{FEEDS}=1"',
            )

    def _keep(self) -> None:
        """In a thread of its own: ends feeds that are gone, replaces workers that have died."""
        while True:
            try:
                number = self.forget.get(timeout=_LOOK)
            except queue.Empty:
                if self._lab.embedded is not None and not self._lab.closed:
                    with contextlib.suppress(PathwaysError):
                        self._lab.embedded.add_feeders(1)
                continue
            if number is None:
                return
            self.end(number)

    def new_number(self) -> int:
        return next(self._numbers)

    def wait(self, done: Callable[[], bool], what: str) -> None:
        """Until *done()*.  Raises PathwaysError when the lab is gone; Ctrl-C gets through."""
        connection = self._connection
        connection.board.wait(lambda: done() or connection.closed is not None, None, what)
        connection.check()

    def wake(self) -> None:
        """Have those who wait look again."""
        self._connection.board.settle((), None)

    def flush(self) -> None:
        """Have runs and drops leave that somebody is about to wait for."""
        self._connection.flush(drops=True)

    # --- tasks ------------------------------------------------------------------------------

    def begin(
        self, number: int, make: Callable[[int], Any], name: str, described: Described
    ) -> None:
        """Have the first element of a feed made, and learn what it looks like."""
        held = self._submit(worker_tasks.hold, make, key=self._key(number, "make"))
        first = self._submit(
            worker_tasks.make_element, held, 0, name, key=self._key(number, "first")
        )
        about = self._submit(worker_tasks.describe, first, key=self._key(number, "types"))
        with self._lock:
            self._sources[number] = _Source(name, held, first, about)
        self._listen(about, functools.partial(self._learnt, name, described))

    def submit(
        self, number: int, step: int, like: tuple[Leaf, ...], places: list[Place]
    ) -> tuple[list[Handle], Lent]:
        """Declare the buffers of one element, and have it made and sent to them.

        Raises PathwaysError when the lab, its slice or a host of it is gone.
        """
        self._connection.check()
        source = self._sources.get(number)
        if source is None:  # another thread ends it, or the lab
            raise failures.failure("lost", f"element {step} will not be made", ENDED)
        task = _Task(number, step)
        with self._lock:
            self._tasks[number, step] = task
        try:
            buffers: list[Buffer] = []
            for place in places:
                buffers.append(self._declare(place))
                task.buffers.append(buffers[-1].id)
            to = tuple(map(self._parcel, buffers, places))
            arguments = source.name, self._door, like, to
            if step == 0:
                future = self._submit(
                    worker_tasks.send, source.first, *arguments, key=self._key(number, step)
                )
            else:
                future = self._submit(
                    worker_tasks.make_and_send, source.make, step, *arguments,
                    key=self._key(number, step), step=step,
                )  # fmt: skip
            task.future = future
            self._listen(future, functools.partial(self._over, task, source.name))
        except BaseException as error:
            self._ended(task, _not_made(source.name, step, error))
            raise
        handles = [
            Handle(
                self._session,
                buffer,
                place.slice.placed(place.kind, place.layout),
                f"{source.name}[{step}]{leaf.name}",
            )
            for buffer, place, leaf in zip(buffers, places, like, strict=True)
        ]  # fmt: skip
        task.lent = Lent(handles, buffers)
        return handles, task.lent

    def _declare(self, place: Place) -> Buffer:
        connection, on = self._connection, place.slice
        on.check()
        buffer = connection.new_buffer()
        buffer.fed = True
        description = {
            "buffer": buffer.id,
            "slice": on.id,
            "nbytes": shard_bytes(place.kind, place.layout),
            "ahead": True,
            "name": "feed",
        }
        connection.send("declare", description)
        return buffer

    def _parcel(self, buffer: Buffer, place: Place) -> Parcel:
        binding = place.slice.binding
        hosts = tuple(
            (host, self._session.data.address(host), devices)
            for host, devices in binding.by_host.items()
        )
        kind = place.kind
        return Parcel(
            buffer.id, place.slice.id, binding.generation, kind.dtype, place.layout, hosts
        )

    def _submit(
        self, function: Callable[..., Any], *args: Any, step: int = 0, **options: Any
    ) -> Any:
        """The higher priority goes first, and then the earlier step."""
        own = current().over(self._connection.tag).priority or 0
        return self._dask.submit(
            function, *args, resources={FEEDS: 1}, pure=False, retries=_RETRIES,
            priority=own * _STEPS - step, **options
        )  # fmt: skip

    def _key(self, number: int, what: object) -> str:
        # Each one anew: what failed is submitted again, and Dask knows a key as long as anybody,
        # perhaps an error's traceback, has its future.
        return f"pathways-feed-{self._connection.number}-{number}-{self.new_number()}-{what}"

    # --- in the thread that hears of tasks ----------------------------------------------------

    def _listen(self, future: Any, heard: Callable[[Any], None]) -> None:
        """heard(outcome) when it has ended: its result, or what it raised."""
        self._heard[future.key] = heard
        self._completed.add(future)
        self._expected.release()

    def _hear(self) -> None:
        # Dask's own callbacks need threads that are gone when an interpreter ends.
        while True:
            self._expected.acquire()
            if self._closing:
                return
            with contextlib.suppress(StopIteration):
                future = next(self._completed)
                heard = self._heard.pop(future.key, None)
                if heard is not None and not future.cancelled():
                    self._fetch(future, heard)

    def _fetch(self, future: distributed.Future[Any], heard: Callable[[Any], None]) -> None:
        try:
            outcome = future.result(timeout=_FETCH)
        except BaseException as error:
            if isinstance(error, TimeoutError) and future.status != "error":
                # Dask tries for half a minute to reach a worker that has died before it was
                # asked.  Asked anew, it takes what another worker has made since.
                self._listen(future, heard)
                return
            outcome = error
        heard(outcome)

    def _learnt(self, name: str, described: Described, found: Any) -> None:
        failure: Failure | None
        if isinstance(found, BaseException):
            failure = _not_made(name, 0, found)
        else:
            failure = found if isinstance(found, Failure) else None
            if failure is None:
                described.tree, described.leaves = found
        self._connection.board.settle((described,), failure)

    def _over(self, task: _Task, name: str, outcome: Sent | BaseException) -> None:
        """A task has ended, in whatever way."""
        if isinstance(outcome, BaseException):
            failure: Failure | None = _not_made(name, task.step, outcome)
        else:
            failure = outcome.failure
            self._record(name, task.step, outcome)
        self._ended(task, failure)

    def _ended(self, task: _Task, failure: Failure | None) -> None:
        with self._lock:
            known = self._tasks.get((task.feed, task.step)) is task
            if known:
                del self._tasks[task.feed, task.step]
        task.future = None
        if known and failure is not None:
            self._give_up(task, failure)

    def _give_up(self, task: _Task, failure: Failure) -> None:
        """Readers of the element are told; a client without a handle to it needs no message."""
        packed = pack(failure)
        for buffer in task.buffers:
            with contextlib.suppress(PathwaysError):
                self._connection.send("lose-upload", {"buffer": buffer, "failure": packed})

    def _record(self, name: str, step: int, sent: Sent) -> None:
        """On the timeline's clock: workers say times of day."""
        lab = self._lab
        offset = lab.timeline.clock() - time.time()
        span = Span(
            "host-computation",
            sent.start + offset,
            sent.end + offset,
            "",
            sent.worker,
            program=name,
            node=f"{name}[{step}]",
            client=self._connection.name,
            args={"step": step, "made": sent.made + offset, "nbytes": sent.nbytes},
        )
        self._connection.reactor.call_soon(lab._remember, [record_encoding.write(span)])

    # --- the end --------------------------------------------------------------------------------

    def end(self, number: int) -> None:
        """A feed makes no more elements; those under way that nobody has taken are given up.

        Not those that were taken and are over: they may be read already, and Dask's word of
        them, which the timeline's record is made from, still on its way.
        """
        with contextlib.suppress(PathwaysError):
            self.flush()
        with self._lock:
            source = self._sources.pop(number, None)
            mine = [task for task in self._tasks.values() if task.feed == number]
            tasks = [task for task in mine if task.lent is None or not task.lent.taken]
            for task in tasks:
                del self._tasks[number, task.step]
        if source is None:
            return
        with contextlib.suppress(Exception):  # the Dask scheduler may be gone
            self._dask.cancel([task.future for task in tasks if task.future is not None])
        for task in tasks:
            what = f"{source.name} was closed before its element {task.step} had come"
            self._give_up(task, Failure("cancelled", what, ENDED, node=source.name))

    def close(self) -> None:
        """The lab ends: what is under way ends with this client."""
        self._closing = True
        self._expected.release()
        self._completed.clear()  # nobody is waited for
        self.forget.put(None)
        self._keeper.join()
        self._hearer.join(_FETCH)
        # A future that goes while Dask's client takes its leave sends one more message, to a
        # scheduler that has closed the link already: Dask logs that as an error.
        with contextlib.suppress(Exception):
            self._dask.close(timeout=1)
        with self._lock:
            self._sources.clear()
            self._tasks.clear()


def _not_made(name: str, step: int, error: BaseException) -> Failure:
    return Failure(
        "lost",
        f"element {step} of {name} did not come to its hosts: {type(error).__name__}: {error}",
        "the workers for feeds, or the hosts of its slice, have ended too often",
        node=name,
        line=Line(),
    )
