"""The Dask tasks of a feed, on workers that launch nothing.

Problem: an element is made by a function of the user's on one machine and read by devices on
others.  Its bytes go from the process that made it to the hosts of its slice, over the same
links and by the same messages as a client's uploads, and pass neither through the kernel nor
through Dask.  A task may be repeated, on another worker, when one dies.

How: a worker comes to the hosts' doors with the key of the client whose feed it is, so it can do
there what that client can, and no more.  A task ends when every host has said that it has its
parts; what it returns is small.

Rule for maintainers: tasks are pure: the same step gives the same bytes under the same number,
and hosts take them once.  An exception of the user's function is a result, so that Dask repeats a
task only for other causes.

Paper: section 4.2 (host computations), section 4.5 (data go directly to who needs them).
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pathways_lab.client.code import source_lines
from pathways_lab.core.errors import Failure
from pathways_lab.core.program.layout import Layout, boxes
from pathways_lab.core.program.program import Line
from pathways_lab.runtime.arrays import as_bytes, index
from pathways_lab.runtime.data_messages import distinct, upload_fields
from pathways_lab.transport import tls
from pathways_lab.transport.codec import unpack
from pathways_lab.transport.link import Link
from pathways_lab.transport.reactor import Reactor

_PATIENCE = 60.0
"""Seconds for which a host may say nothing of what was sent to it."""


@dataclass(frozen=True, slots=True)
class Door:
    """As whom tasks come to hosts.  holder, key: the client's number, and its key there.

    pems: the lab's certificates, where links leave the machine.
    """

    client: str
    holder: int
    key: bytes = field(repr=False)
    pems: dict[str, str] | None = field(repr=False)


@dataclass(frozen=True, slots=True)
class Leaf:
    """One array of an element, as the user's function returns it.  name: its path in the tree."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    def __str__(self) -> str:
        return f"{self.name or 'the array'} {self.dtype}[{','.join(map(str, self.shape))}]"


@dataclass(frozen=True, slots=True)
class Parcel:
    """Where the bytes of one leaf go: as buffer *buffer* to the devices of a slice.

    dtype: in which they travel.  hosts: name, address, and device numbers of the slice.
    """

    buffer: int
    slice: int
    generation: int
    dtype: str
    layout: Layout
    hosts: tuple[tuple[str, str, tuple[int, ...]], ...]


@dataclass(frozen=True, slots=True)
class Made:
    """The result of a step: flat leaves and their tree, or why there are none.

    start, end: seconds since 1970, while the user's function ran.  line: that of the function.
    """

    step: int
    leaves: tuple[Any, ...]
    tree: Any
    failure: Failure | None
    start: float
    end: float
    line: Line = field(default_factory=Line)


@dataclass(frozen=True, slots=True)
class Sent:
    """How the task of a step ended.  worker: Dask's name of where it ran; times as in Made."""

    worker: str
    start: float
    made: float
    end: float
    nbytes: int
    failure: Failure | None


# --- the tasks --------------------------------------------------------------------------


def hold(make: Callable[[int], Any]) -> Callable[[int], Any]:
    """The user's function, kept on workers: Dask sends it once, and not with every task."""
    return make


def make_element(make: Callable[[int], Any], step: int, feed: str) -> Made:
    """Call the user's function for one step."""
    start = time.time()
    try:
        tree = make(step)
        leaves = tuple([np.asarray(leaf) for leaf in jax.tree.leaves(tree)])
        tree, line = jax.tree.map(lambda _: 0, tree), source_lines.of_function(make)
        return Made(step, leaves, tree, None, start, time.time(), line)
    except Exception as error:
        text = f"{type(error).__name__}: {error}".removesuffix(": ")
        failure = Failure(
            "execute",
            f"element {step} of {feed} could not be made: its function raised {text}",
            "correct the function and make a new feed; other elements are not affected",
            node=feed,
            host=_worker(),
            line=source_lines.of_traceback(error.__traceback__),
            details="".join(traceback.format_exception(error)),
        )
        return Made(step, (), None, failure, start, time.time())


def describe(made: Made) -> tuple[Any, tuple[Leaf, ...]] | Failure:
    """The form of all elements: the tree (its leaves are 0), and its leaves."""
    return made.failure or (made.tree, _described(made))


def send(made: Made, feed: str, door: Door, like: tuple[Leaf, ...], to: tuple[Parcel, ...]) -> Sent:
    """Send an element to its hosts, and wait until they have it.

    Raises what goes wrong on the way: then Dask may try again.
    """
    failure = made.failure
    if failure is None and _described(made) != like:
        failure = Failure(
            "execute",
            f"element {made.step} of {feed} is {_listed(_described(made))}, and its first one was"
            f" {_listed(like)}: programs are compiled for one structure and one type of each array",
            "return the same for every step: pad a last, smaller one, or leave it out",
            node=feed,
            host=_worker(),
            line=made.line,
        )
    nbytes = 0
    if failure is None:
        nbytes, failure = _Deliveries.of(door).deliver(to, made.leaves)
    return Sent(_worker(), made.start, made.end, time.time(), nbytes, failure)


def make_and_send(
    make: Callable[[int], Any],
    step: int,
    feed: str,
    door: Door,
    like: tuple[Leaf, ...],
    to: tuple[Parcel, ...],
) -> Sent:
    """Both, as one task: only the first element is described before it is sent."""
    return send(make_element(make, step, feed), feed, door, like, to)


def _described(made: Made) -> tuple[Leaf, ...]:
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(made.tree)]
    return tuple(
        Leaf(path, leaf.shape, str(leaf.dtype))
        for path, leaf in zip(paths, made.leaves, strict=True)
    )


def _listed(leaves: Sequence[Leaf]) -> str:
    return ", ".join(map(str, leaves)) or "nothing"


def _worker() -> str:
    import distributed

    return str(distributed.get_worker().name)


# --- on the way to the hosts --------------------------------------------------------------


class _Deliveries:
    """This process's links to the hosts, as one client."""

    _all: dict[Door, _Deliveries] = {}  # noqa: RUF012
    _lock = threading.Lock()

    @classmethod
    def of(cls, door: Door) -> _Deliveries:
        """Those of a client; made when they are first needed."""
        with cls._lock:
            key = Door(door.client, door.holder, door.key, None)
            if key not in cls._all:
                cls._all[key] = _Deliveries(door)
            return cls._all[key]

    def __init__(self, door: Door) -> None:
        self._door = door
        self._context = tls.client_context(door.pems)
        self._links: dict[str, Link] = {}
        self._numbers = itertools.count(1)
        self._open: dict[int, _Answer] = {}
        self._reactor = Reactor("pathways-feed", self._message, self._closed)
        self._reactor.start()

    def deliver(
        self, parcels: Sequence[Parcel], leaves: Sequence[Any]
    ) -> tuple[int, Failure | None]:
        """Send the leaves; the bytes sent, and why a host could not take them.

        Raises OSError (also LinkClosed and TimeoutError) when a host is not reached.
        """
        nbytes = 0
        answers: list[_Answer] = []
        for parcel, leaf in zip(parcels, leaves, strict=True):
            data = np.asarray(leaf, dtype=np.dtype(jnp.dtype(parcel.dtype)), order="C")
            places = boxes(parcel.layout, data.shape)
            fields = upload_fields(
                parcel.buffer, parcel.slice, data.shape, parcel.dtype, parcel.layout
            )
            fields["generation"] = parcel.generation
            for host, address, devices in parcel.hosts:
                own, sources = distinct([places[device] for device in devices])
                parts = [as_bytes(np.ascontiguousarray(data[index(box)])) for box in own]
                nbytes += sum([part.nbytes for part in parts])
                link = self._link(host, address)
                answer = _Answer(link)
                number = next(self._numbers)
                self._open[number] = answer
                answers.append(answer)
                link.send("put", {**fields, "devices": list(devices), "sources": sources}, parts)
                # Answered when it is there: without devices nothing is sent back.
                link.send("fetch", {"id": number, "buffer": parcel.buffer, "devices": []})
        for answer in answers:
            if not answer.came.wait(_PATIENCE):
                raise TimeoutError(f"{answer.link.name} said nothing for {_PATIENCE:g} s")
            if answer.lost:
                raise ConnectionError(f"{answer.link.name}: {answer.lost}")
        return nbytes, next((a.failure for a in answers if a.failure is not None), None)

    def _link(self, host: str, address: str) -> Link:
        link = self._links.get(host)
        if link is None or link.closed is not None:
            door = self._door
            link = self._links[host] = self._reactor.connect(
                address,
                door.key,
                {"role": "client", "name": door.client},
                name=host,
                context=self._context,
                bulk=True,
                holder=door.holder,
            )
        return link

    # --- in the reactor's thread ----------------------------------------------------------

    def _message(
        self, link: Link, op: str, fields: dict[str, Any], buffers: list[memoryview]
    ) -> None:
        answer = self._open.pop(fields.get("id", 0), None)
        if answer is None:
            return
        if op == "fetch-failed":
            answer.failure = unpack(Failure, fields["failure"])
        answer.came.set()

    def _closed(self, link: Link, reason: str) -> None:
        for number, answer in tuple(self._open.items()):
            if answer.link is link:
                del self._open[number]
                answer.lost = reason or "the link was closed"
                answer.came.set()
        if all(other.closed is not None for other in tuple(self._links.values())):
            # The client has left, or all its hosts have.
            with self._lock:
                for door in [d for d, deliveries in self._all.items() if deliveries is self]:
                    del self._all[door]
            threading.Thread(target=self._end, name="pathways-feed end", daemon=True).start()

    def _end(self) -> None:
        with contextlib.suppress(Exception):
            self._reactor.close("the client has left")


class _Answer:
    """The answer of a host about a parcel.  lost: why it will never answer."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self.came = threading.Event()
        self.failure: Failure | None = None
        self.lost = ""
