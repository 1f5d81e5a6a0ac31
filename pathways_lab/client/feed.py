"""``lab.feed``: input pipelines as host computations, beside the devices and ahead of them.

Problem: a training loop needs a new batch for every step.  Made in the kernel, it makes the
devices wait and takes the interpreter that dispatches; made where gangs are launched, it takes
what they need.

How: element *k* is one Dask task on a worker that owns no devices.  Its buffers are declared when
the task is submitted, so handles to them can go into programs at once, and a gang that reads
them is granted when every host has its parts.  The task sends them to the hosts itself.  Tasks are
submitted in the order of their steps; at most *prefetch* elements are ahead of what was taken,
and :meth:`Feed.__next__` waits while runs still have to read as many that the caller has let go.
What nobody reads yet has no claim on the memory of devices
(:mod:`pathways_lab.core.uploads`).

Rule for maintainers: callbacks run in Dask's threads: they report and settle, and call nothing of
the user's.  A finalizer only enqueues.  Whatever was declared arrives or is given up.

Paper: section 4.2 (host computations in program order), section 4.5 (what is not known yet is
waited for where it is needed), section 4.6 (back-pressure).
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import jax
import numpy as np

from pathways_lab.client import arrays, failures, host_tasks, layouts
from pathways_lab.client.arrays import ArrayType, shard_bytes
from pathways_lab.client.devices import Slice
from pathways_lab.client.handles import Handle
from pathways_lab.client.host_tasks import Door, Leaf, Parcel, Sent
from pathways_lab.client.pending import Buffer
from pathways_lab.client.program import targets_of
from pathways_lab.client.session import Session
from pathways_lab.client.waiting import Pending
from pathways_lab.core.errors import Failure, PathwaysError
from pathways_lab.core.layout import Layout
from pathways_lab.core.program import Line
from pathways_lab.runtime import chronicle
from pathways_lab.runtime.attach import ControlAddress
from pathways_lab.runtime.codec import pack
from pathways_lab.runtime.embedded import EmbeddedCluster
from pathways_lab.runtime.feeder import FEEDS
from pathways_lab.timeline.log import Timeline
from pathways_lab.timeline.records import Span

if TYPE_CHECKING:
    import distributed

_RETRIES = 2
"""How often Dask repeats a task that could not reach a host."""
_LOOK = 0.5
"""Seconds between two looks at whether the workers for feeds live."""
_ENDED = "a feed ends with its lab and when it is closed: make a new one with lab.feed(...)"


class Home(Protocol):
    """What host computations need of their lab."""

    session: Session
    embedded: EmbeddedCluster | None
    timeline: Timeline
    _control: ControlAddress

    @property
    def closed(self) -> bool: ...

    def dask_client(self) -> distributed.Client: ...

    def _remember(self, written: list[bytes]) -> None: ...


class Feeding:
    """The part of a lab that has to do with host computations."""

    def feed(
        self,
        make: Callable[[int], Any],
        on: Any,
        *,
        prefetch: int = 2,
        steps: int | None = None,
        name: str = "feed",
    ) -> Feed:
        """Elements that a function makes for every step, beside the devices and ahead of them.

        make: ``make(step)`` returns a pytree of NumPy arrays, always of the same structure,
            shapes and dtypes.  It runs as a Dask task, on a worker that owns no devices, from
            step 0 on, and may be run again for a step when its worker dies: the same step gives
            the same element.  It is sent once; keep large data out of its closure and load
            them inside.
        on: a slice (each array on every device), a sharding over its mesh, or a pytree prefix
            of these for what *make* returns.
        prefetch: so many elements are made and sent before they are taken (0: none).
        steps: how many there are; None: no end.
        name: in errors and in the timeline.

        An iterator over pytrees of handles.  They are there at once, except for the first one,
        whose types come from *make*; a run that reads one begins when it has come.  The bytes go
        from the worker to the hosts, never through this kernel.  An embedded lab starts the
        worker (two seconds) with its first feed; a Dask cluster of your own needs one started
        with ``--resources "pathways-feed=1"``.

        When *make* raises, exactly the runs that read that element fail, with its traceback;
        without a first element there are no types, and ``next`` raises.

        Raises PathwaysError when no worker is there for it, or *on* is no place.

        >>> with lab.feed(lambda step: load(step), s.sharding(P("data")), steps=100) as batches:
        ...     for batch in batches:                        # doctest: +SKIP
        ...         w, loss = train(w, batch)
        """
        if prefetch < 0 or (steps is not None and steps < 0):
            raise failures.failure(
                "refused",
                f"prefetch={prefetch!r} and steps={steps!r} of {name}: neither is negative",
                "for example lab.feed(make, s, prefetch=2, steps=100)",
            )
        return Feed(self._host_tasks, make, on, prefetch, steps, name)

    @functools.cached_property
    def _host_tasks(self) -> HostTasks:
        return HostTasks(self)  # type: ignore[arg-type]


class Feed(Iterator[Any]):
    """What :meth:`Lab.feed` returns: iterate over it, or call ``next``; a context manager.

    name: in errors and in the timeline.
    """

    def __init__(
        self,
        tasks: HostTasks,
        make: Callable[[int], Any],
        on: Any,
        prefetch: int,
        steps: int | None,
        name: str,
    ) -> None:
        self.name = name
        self._tasks = tasks
        self._on = on
        self._prefetch = prefetch
        self._steps = steps
        self._next = 0
        self._number = tasks.new_number()
        self._places: list[_Place] | None = None
        self._tree: Any = None
        self._ahead: deque[tuple[list[Handle], _Lent]] = deque()
        self._lent: deque[_Lent] = deque()
        self._taking = threading.Lock()
        self._ended: Failure | None = None
        self._first = _Described()
        self._end = weakref.finalize(self, tasks.forget.put, self._number)
        self._end.atexit = False
        if steps != 0:
            tasks.begin(self._number, make, name, self._first)

    def __iter__(self) -> Feed:
        return self

    def __next__(self) -> Any:
        """The handles of the next element; waits for back-pressure only (see :meth:`Lab.feed`)."""
        with self._taking:
            if self._ended is not None:
                raise PathwaysError(self._ended)
            if not self._ahead and self._next == self._steps:
                raise StopIteration
            if self._places is None:
                self._learn()
            self._wait_for_readers()
            self._fill(max(1, self._prefetch))
            taken, lent = self._ahead.popleft()
            self._lent.append(lent)
            self._fill(self._prefetch)
            return jax.tree.unflatten(self._tree, taken)

    def close(self) -> None:
        """Make no more elements.  Those that were taken still come; again is fine."""
        if self._ended is None:
            self._ended = Failure("refused", f"{self.name} was closed", _ENDED)
        if self._end.detach() is not None:
            self._tasks.wake()
            with self._taking:
                self._ahead.clear()
            self._tasks.end(self._number)

    def __enter__(self) -> Feed:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        count = "" if self._steps is None else f" of {self._steps}"
        taken = self._next - len(self._ahead)
        state = "closed" if self._ended else f"{taken}{count} taken, {len(self._ahead)} ahead"
        return f"<Feed {self.name}: {state}>"

    def _wait(self, done: Callable[[], bool], what: str) -> None:
        self._tasks.wait(lambda: done() or self._ended is not None, f"{what} of {self.name}")
        if self._ended is not None:
            raise PathwaysError(self._ended)

    def _learn(self) -> None:
        """Wait for what the first element looks like, and where its arrays go."""
        first = self._first
        self._wait(lambda: first.done, "the first element")
        if first.failure is not None:
            self._ended = first.failure
            raise PathwaysError(first.failure)
        self._tree = jax.tree.structure(first.tree)
        targets = targets_of(self._on, first.tree, f"the places of {self.name}")
        self._places = [
            _Place.of(leaf, on, requested)
            for leaf, (on, requested) in zip(first.leaves, targets, strict=True)
        ]

    def _wait_for_readers(self) -> None:
        most = max(1, self._prefetch)
        if self._unread() > most:
            self._tasks.flush()
            self._wait(lambda: self._unread() <= most, "readers")

    def _unread(self) -> int:
        """Elements that the caller has let go, and that runs have not read yet."""
        self._lent = deque(lent for lent in self._lent if not lent.over)
        return sum([lent.let_go for lent in self._lent])

    def _fill(self, count: int) -> None:
        """Have *count* elements on their way that nobody has taken."""
        assert self._places is not None
        while len(self._ahead) < count and self._next != self._steps:
            step, self._next = self._next, self._next + 1
            self._ahead.append(
                self._tasks.submit(self._number, step, self._first.leaves, self._places)
            )


class _Described(Pending):
    """What all elements of a feed look like, once its first one is made."""

    def __init__(self) -> None:
        super().__init__()
        self.tree: Any = None
        self.leaves: tuple[Leaf, ...] = ()


@dataclass(frozen=True, slots=True)
class _Place:
    """Where one array of every element goes."""

    kind: ArrayType
    slice: Slice
    layout: Layout

    @classmethod
    def of(cls, leaf: Leaf, on: Slice, requested: Any) -> _Place:
        """Raises PathwaysError for what JAX cannot hold, or the sharding cannot cut."""
        kind = arrays.host_type(np.broadcast_to(np.empty((), leaf.dtype), leaf.shape))
        if kind is None:
            raise arrays.no_array(leaf, str(leaf))
        if requested is None:
            return cls(kind, on, layouts.replicated(on, len(kind.shape)))
        return cls(kind, on, layouts.layout_of(requested, on, kind))


class _Lent:
    """An element that was taken: whether its handles are gone, and its buffers."""

    def __init__(self, handles: list[Handle], buffers: list[Buffer]) -> None:
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
    lent: _Lent | None = None
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

    def __init__(self, lab: Home) -> None:
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
        threading.Thread(target=self._hear, name="pathways feeds' tasks", daemon=True).start()
        self._keeper = threading.Thread(target=self._keep, name="pathways feeds", daemon=True)
        self._keeper.start()

    def _find_workers(self) -> None:
        embedded = self._lab.embedded
        if embedded is not None:
            embedded.add_feeders(1)
            return
        workers = self._dask.scheduler_info(n_workers=-1)["workers"].values()
        if not any(FEEDS in worker.get("resources", {}) for worker in workers):
            raise failures.failure(
                "refused",
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
        if connection.closed is not None:
            raise PathwaysError(connection.closed)

    def wake(self) -> None:
        """Have those who wait look again."""
        self._connection.board.settle((), None)

    def flush(self) -> None:
        """Have runs and drops leave that somebody is about to wait for."""
        self._connection.flush(drops=True)

    # --- tasks ------------------------------------------------------------------------------

    def begin(
        self, number: int, make: Callable[[int], Any], name: str, described: _Described
    ) -> None:
        """Have the first element of a feed made, and learn what it looks like."""
        held = self._submit(host_tasks.hold, make, key=self._key(number, "make"))
        first = self._submit(host_tasks.make_element, held, 0, name, key=self._key(number, "first"))
        about = self._submit(host_tasks.describe, first, key=self._key(number, "types"))
        with self._lock:
            self._sources[number] = _Source(name, held, first, about)
        self._listen(about, functools.partial(self._learnt, name, described))

    def submit(
        self, number: int, step: int, like: tuple[Leaf, ...], places: list[_Place]
    ) -> tuple[list[Handle], _Lent]:
        """Declare the buffers of one element, and have it made and sent to them."""
        source = self._sources[number]
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
                    host_tasks.send, source.first, *arguments, key=self._key(number, step)
                )
            else:
                future = self._submit(
                    host_tasks.make_and_send, source.make, step, *arguments,
                    key=self._key(number, step), priority=-step,
                )  # fmt: skip
            task.future = future
            self._listen(future, functools.partial(self._over, task, source.name))
        except BaseException as error:
            self._ended(task, _not_made(source.name, step, error))
            raise
        handles = [
            Handle(
                self._session, buffer, place.kind, place.slice, place.layout,
                f"{source.name}[{step}]{leaf.name}",
            )
            for buffer, place, leaf in zip(buffers, places, like, strict=True)
        ]  # fmt: skip
        task.lent = _Lent(handles, buffers)
        return handles, task.lent

    def _declare(self, place: _Place) -> Buffer:
        connection, on = self._connection, place.slice
        if on.released:
            raise failures.failure(
                "refused", f"slice {on.name} was released", "ask for a new one: lab.slice(...)"
            )
        buffer = connection.new_buffer()
        description = {
            "buffer": buffer.id,
            "slice": on.id,
            "nbytes": shard_bytes(place.kind, place.layout),
            "ahead": True,
        }
        connection.send("declare", description)
        return buffer

    def _parcel(self, buffer: Buffer, place: _Place) -> Parcel:
        binding = place.slice.binding
        by_host: dict[str, list[int]] = {}
        for device, (host, _) in enumerate(binding.devices):
            by_host.setdefault(host, []).append(device)
        hosts = tuple(
            (host, self._session.data.address(host), tuple(devices))
            for host, devices in by_host.items()
        )
        kind = place.kind
        return Parcel(
            buffer.id, place.slice.id, binding.generation, kind.dtype, place.layout, hosts
        )

    def _submit(self, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
        return self._dask.submit(
            function, *args, resources={FEEDS: 1}, pure=False, retries=_RETRIES, **options
        )

    def _key(self, number: int, what: object) -> str:
        return f"pathways-feed-{self._connection.number}-{number}-{what}"

    # --- in the thread that hears of tasks ----------------------------------------------------

    def _listen(self, future: Any, heard: Callable[[Any], None]) -> None:
        """heard(future) when it has ended."""
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
                    heard(future)

    def _learnt(self, name: str, described: _Described, future: distributed.Future[Any]) -> None:
        failure: Failure | None
        try:
            found = future.result()
        except BaseException as error:
            failure = _not_made(name, 0, error)
        else:
            failure = found if isinstance(found, Failure) else None
            if failure is None:
                described.tree, described.leaves = found
        self._connection.board.settle((described,), failure)

    def _over(self, task: _Task, name: str, future: distributed.Future[Any]) -> None:
        """A task has ended, in whatever way."""
        try:
            sent: Sent = future.result()
        except BaseException as error:
            failure: Failure | None = _not_made(name, task.step, error)
        else:
            failure = sent.failure
            self._record(name, task.step, sent)
        self._ended(task, failure)

    def _ended(self, task: _Task, failure: Failure | None) -> None:
        with self._lock:
            known = self._tasks.pop((task.feed, task.step), None) is task
        task.future = None
        if known and failure is not None:
            self._give_up(task, failure)

    def _give_up(self, task: _Task, failure: Failure) -> None:
        """Whoever reads the element is told; who has no handle any more needs no message."""
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
        self._connection.reactor.call_soon(lab._remember, [chronicle.write(span)])

    # --- the end --------------------------------------------------------------------------------

    def end(self, number: int) -> None:
        """A feed makes no more elements; those under way that nobody has are given up."""
        with contextlib.suppress(PathwaysError):
            self.flush()
        with self._lock:
            source = self._sources.pop(number, None)
            mine = [task for task in self._tasks.values() if task.feed == number]
            tasks = [task for task in mine if task.lent is None or task.lent.over]
            for task in tasks:
                del self._tasks[number, task.step]
        if source is None:
            return
        with contextlib.suppress(Exception):  # the Dask scheduler may be gone
            self._dask.cancel([task.future for task in tasks if task.future is not None])
        for task in tasks:
            what = f"{source.name} was closed before its element {task.step} had come"
            self._give_up(task, Failure("cancelled", what, _ENDED, node=source.name))

    def close(self) -> None:
        """The lab ends: what is under way ends with this client."""
        self._closing = True
        self._expected.release()
        self.forget.put(None)
        self._keeper.join()
        with self._lock:
            self._sources.clear()
            self._tasks.clear()
        with contextlib.suppress(Exception):
            self._dask.close(timeout=1)


def _not_made(name: str, step: int, error: BaseException) -> Failure:
    return Failure(
        "lost",
        f"element {step} of {name} did not come to its hosts: {type(error).__name__}: {error}",
        "the workers for feeds, or the hosts of its slice, have ended too often",
        node=name,
        line=Line(),
    )
