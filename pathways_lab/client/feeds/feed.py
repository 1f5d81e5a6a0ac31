"""``lab.feed``: input pipelines as host computations, beside the devices and ahead of them.

Problem: a training loop needs a new batch for every step.  Made in the kernel, it makes the
devices wait and takes the interpreter that dispatches; made where gangs are launched, it takes
what they need.

How: element *k* is one Dask task on a worker that owns no devices.  Its buffers are declared when
the task is submitted, so handles to them can go into programs at once, and a gang that reads
them is granted when every host has its parts.  The task sends them to the hosts itself.  Tasks are
submitted in the order of their steps; at most *prefetch* elements are ahead of what was taken,
and :meth:`Feed.__next__` waits while runs still have to read as many that the caller has let go.
An element without a reader has no claim on the memory of devices
(:mod:`pathways_lab.core.memory.uploads`).

Rule for maintainers: all tasks are submitted by the caller of ``next``, so that an unused feed
does nothing.  A finalizer only enqueues.

Paper: section 4.2 (host computations in program order), section 4.5 (what is not known yet is
waited for where it is needed), section 4.6 (back-pressure).
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import jax

from pathways_lab.client.feeds.feed_tasks import ENDED, Described, HostTasks, Lent, Place
from pathways_lab.client.lab import slice_request
from pathways_lab.client.lab.tags import NOTHING, Tag, beneath
from pathways_lab.client.parts import Parts
from pathways_lab.client.program.program import targets_of
from pathways_lab.client.session.handles import Handle
from pathways_lab.core.errors import Failure, PathwaysError


class Feeding(Parts):
    """The part of a lab that has to do with host computations."""

    def feed(
        self,
        make: Callable[[int], Any],
        on: Any,
        *,
        prefetch: int = 2,
        steps: int | None = None,
        name: str = "feed",
        priority: int | None = None,
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
        priority: of two feeds that wait for one worker, the one with the higher priority goes
            on; a block of :func:`pathways_lab.tagged` around goes before it.  A feed has no runs:
            policies see those that read its elements, each with a priority of its own.

        An iterator over pytrees of handles.  They are there at once, except for the first one,
        whose types come from *make*; a run that reads one begins when it has come.  The bytes go
        from the worker to the hosts, never through this kernel.  An embedded lab starts the
        worker (two seconds) with its first feed; a Dask cluster of your own needs one started
        with ``--resources "pathways-feed=1"``.

        When *make* raises, exactly the runs that read that element fail, with its traceback;
        without a first element there are no types, and ``next`` raises.  It raises too while a
        host is gone, and loses nothing: the next call goes on with the same element.

        Raises PathwaysError when no worker is there for it, or *on* is no place.

        >>> with lab.feed(lambda step: load(step), s.sharding(P("data")), steps=100) as batches:
        ...     for batch in batches:                        # doctest: +SKIP
        ...         w, loss = train(w, batch)
        """
        self.session.connection.check()
        make = slice_request.function("make", make)
        prefetch = slice_request.count("prefetch", prefetch, least=0)
        if steps is not None:
            steps = slice_request.count("steps", steps, least=0)
        return Feed(self._host_tasks, make, on, prefetch, steps, name, Tag.of(priority, None))

    @functools.cached_property
    def _host_tasks(self) -> HostTasks:
        return HostTasks(self)


class Feed(Iterator[Any]):
    """The elements of :meth:`Lab.feed`: iterate over it, or call ``next``; a context manager.

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
        tag: Tag = NOTHING,
    ) -> None:
        self.name = name
        self._tag = tag
        self._tasks = tasks
        self._on = on
        self._prefetch = prefetch
        self._steps = steps
        self._next = 0
        self._number = tasks.new_number()
        self._places: list[Place] | None = None
        self._tree: Any = None
        self._ahead: deque[tuple[list[Handle], Lent]] = deque()
        self._lent: deque[Lent] = deque()
        self._taking = threading.Lock()
        self._ended: Failure | None = None
        self._first = Described()
        self._end = weakref.finalize(self, tasks.forget.put, self._number)
        self._end.atexit = False
        if steps != 0:
            with beneath(tag):
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
            self._fill(self._prefetch + 1)  # before one is taken: it may raise
            taken, lent = self._ahead.popleft()
            lent.taken = True
            self._lent.append(lent)
            return jax.tree.unflatten(self._tree, taken)

    def close(self) -> None:
        """Make no more elements.  Those that were taken still come; again is fine."""
        if self._ended is None:
            self._ended = Failure("refused", f"{self.name} was closed", ENDED)
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
        targets = targets_of(self._on, first.tree, f"the place of {self.name}")
        self._places = [
            Place.of(leaf, on, requested)
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
            with beneath(self._tag):
                made = self._tasks.submit(
                    self._number, self._next, self._first.leaves, self._places
                )
            self._ahead.append(made)
            self._next += 1  # not before: what could not be submitted comes with the next call
