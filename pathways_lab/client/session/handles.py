"""Handles: references to values that live on a slice, now or soon.

Problem: a program's results exist long after it is submitted, elsewhere, in
many pieces.  A :class:`Handle` is one reference to one logical array: it knows
shape, dtype and place at once, fetches the value when it is asked for, goes
into further programs without moving, and frees the array when it dies.

Rule for maintainers: that a handle is gone is noted without an instruction of Python's, since
Ctrl-C between two of them would lose it (:class:`.pending.Watch`).  One handle
per logical buffer, however many shards it has.

Paper: section 4.2 (opaque handles, one reference count per logical buffer).
"""

from __future__ import annotations

import math
import operator
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import jax
import numpy as np

from pathways_lab.client.code import layouts
from pathways_lab.client.functions import array_types
from pathways_lab.client.functions.array_types import ArrayType
from pathways_lab.client.functions.operators import Operators
from pathways_lab.client.lab.devices import Placed, Slice
from pathways_lab.client.session import in_jax
from pathways_lab.client.session.connection import Connection
from pathways_lab.client.session.pending import Buffer, Bundle, Watch
from pathways_lab.client.session.transfers import DataLinks, Fetch
from pathways_lab.client.session.waiting import Pending
from pathways_lab.core.errors import Failure, PathwaysError
from pathways_lab.core.program.layout import Layout
from pathways_lab.runtime import jax_private
from pathways_lab.runtime.arrays import dtype_of, is_key
from pathways_lab.runtime.jax_backends import NAMES
from pathways_lab.timeline.text_table import TextTable


class Home(Protocol):
    """The part of its session that a handle needs."""

    connection: Connection
    data: DataLinks
    outputs: deque[dict[str, Any]]
    lab: Callable[[], Any] | None

    def wait(self, handle: Handle, done: Callable[[], bool], timeout: float | None) -> None: ...

    async def ended(self, entry: Pending) -> None: ...

    def flush_outputs(self) -> None: ...

    def cancel(self, *handles: Handle) -> Any: ...

    def take_apart(self, bundle: Bundle) -> None: ...


_KEEP = 64 * 1024
"""Values up to this many bytes are kept by their handle once fetched."""


class Handle(Operators):
    """A sharded array on a slice, or the promise of one.

    placed: its type, its slice and how it is cut.
    name: what it is called in views and errors.
    bundle: with which it shares the buffer, if it does.  place: which of its arrays it is.
    """

    _fetch: Fetch | None = None
    _value: Any = None
    _ended: Failure | None = None
    in_jax: Any = None
    """JAX's own array of it, kept here by the door that made it."""

    # NumPy leaves operators with handles to the handle.
    __array_priority__ = 200

    def __init__(
        self,
        session: Home,
        buffer: Buffer,
        placed: Placed,
        name: str = "",
        bundle: Bundle | None = None,
        place: int = 0,
    ) -> None:
        self.placed = placed
        self.name = name
        self._session = session
        self._buffer = buffer
        self._bundle = bundle
        # For good: another thread may be asking for the array while the bundle is taken apart.
        self._place = place
        watch = Watch(self, session.connection.gone)
        watch.id, watch.bundle = buffer.id, bundle
        if bundle is None:
            buffer.handle = watch
        else:
            bundle.watches.append(watch)

    # --- what is known at once ----------------------------------------------------

    @property
    def type(self) -> ArrayType:
        """Shape, dtype, weak type."""
        return self.placed.type

    @property
    def slice(self) -> Slice:
        """Where it is."""
        return self.placed.slice

    @property
    def layout(self) -> Layout:
        """How it is cut."""
        return self.placed.layout

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of the whole array, along its axes."""
        return self.type.shape

    @property
    def dtype(self) -> Any:
        """JAX's dtype; of random keys JAX's type of keys."""
        return dtype_of(self.type.dtype)

    @property
    def weak_type(self) -> bool:
        """Whether it gives way to other types, as what Python numbers make does in JAX."""
        return self.type.weak

    @property
    def ndim(self) -> int:
        """How many axes it has."""
        return len(self.type.shape)

    @property
    def size(self) -> int:
        """How many elements it has."""
        return math.prod(self.type.shape)

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return int(self.dtype.itemsize)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole array."""
        return self.type.nbytes

    @property
    def sharding(self) -> jax.sharding.NamedSharding:
        """How it is cut: over its slice's virtual devices; over JAX's own where a door is open."""
        door = in_jax.door
        real = door.sharding(self) if door is not None and door.knows(self) else None
        return real or layouts.sharding_of(self.layout, self.slice)

    @property
    def state(self) -> str:
        """``"pending"``, ``"ready"``, ``"failed"`` or ``"dead"`` (donated or deleted)."""
        if self._consumed is not None:
            return "dead"
        if not self._buffer.done:
            return "pending"
        return "failed" if self._buffer.failure else "ready"

    def is_ready(self) -> bool:
        """Whether its value, or that it has none, is known: nothing here would wait."""
        return self._consumed is not None or self._buffer.done

    @property
    def failure(self) -> Failure | None:
        """Why it will never have a value, as far as known."""
        return self._consumed or self._buffer.failure

    @property
    def _consumed(self) -> Failure | None:
        bundle = self._bundle
        return self._ended or (bundle.ended if bundle is not None else None)

    # --- the value ------------------------------------------------------------------

    def block_until_ready(self) -> Handle:
        """Wait until the value is there (it stays where it is).

        Raises PathwaysError when it failed.  Ctrl-C cancels, of its run and of those that it
        waits for, what is not granted.
        """
        if not self._buffer.done:  # of hundreds of arrays only the first is waited for
            self._session.wait(self, lambda: self._buffer.done, None)
        elif self._session.outputs:
            self._session.flush_outputs()
        self._check()
        return self

    def result(self, timeout: float | None = None) -> Any:
        """The value: a NumPy array (read-only), or a JAX array of random keys.

        timeout: seconds; TimeoutError afterwards, and the run goes on.
        Raises PathwaysError when the value failed.  Ctrl-C cancels, of its run and of those
        that it waits for, what is not granted.
        """
        self._check()
        if self._value is not None:
            return self._value
        while True:
            fetch = self._fetching()
            self._session.wait(self, self._arrived, timeout)
            if not self._elsewhere(fetch):
                return self._finish(fetch)

    def _elsewhere(self, fetch: Fetch) -> bool:
        """Whether to ask again: its slice has moved, or it has left its bundle meanwhile."""
        return fetch.moved or (fetch.failure is not None and fetch.buffer is not self._buffer)

    def _arrived(self) -> bool:
        fetch, buffer = self._fetch, self._buffer
        return buffer.done and (buffer.failure is not None or fetch is None or fetch.done)

    def _fetching(self) -> Fetch:
        if self._fetch is None or self._fetch.failure is not None or self._fetch.moved:
            self._fetch = self._session.data.fetch(
                self._buffer, self.type, self.slice, self.layout, self._place
            )
        return self._fetch

    def _finish(self, fetch: Fetch) -> Any:
        """Put the parts together; small values are kept."""
        self._check()
        self._fetch = None
        if fetch.failure is not None:
            raise PathwaysError(fetch.failure)
        data = self._session.data.assemble(fetch, self.type)
        data.flags.writeable = False
        value = array_types.from_bytes(data, self.type.dtype)
        if self.nbytes <= _KEEP:
            self._value = value
        return value

    def _check(self) -> None:
        bundle = self._bundle
        if self._ended or self._buffer.failure or (bundle is not None and bundle.ended):
            failure = self.failure
            assert failure is not None
            raise PathwaysError(failure)

    def __await__(self) -> Generator[Any, None, Any]:
        """``await handle`` in any running loop: the same as :meth:`result`, without blocking."""
        return self._awaited().__await__()

    async def _awaited(self) -> Any:
        self._check()
        if self._value is not None:
            return self._value
        while True:
            fetch = self._fetching()
            await self._session.ended(self._buffer)
            if self._buffer.failure is None:
                await self._session.ended(fetch)
            if not self._elsewhere(fetch) or self._buffer.failure is not None:
                return self._finish(fetch)

    def copy_to_host_async(self) -> None:
        """Begin to fetch the value (``jax.device_get`` does this for all leaves first)."""
        if self._value is None and self.failure is None:
            self._fetching()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        if is_key(self.type.dtype):
            raise TypeError(
                "random keys have no NumPy form: use handle.result(), or jax.random.key_data"
                " in a compiled function"
            )
        return np.array(self.result(), dtype=dtype, copy=copy)

    def item(self, *index: int) -> Any:
        """The one element, or that at *index*, as a Python number."""
        return self.result().item(*index)

    def tolist(self) -> Any:
        """The value as nested lists of Python numbers."""
        return self.result().tolist()

    def __bool__(self) -> bool:
        return bool(self.result())

    def __int__(self) -> int:
        return int(self.result())

    def __float__(self) -> float:
        return float(self.result())

    def __complex__(self) -> complex:
        return complex(self.result())

    def __index__(self) -> int:
        return operator.index(self.result())

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of a scalar handle")
        return self.shape[0]

    def __iter__(self) -> Iterator[Any]:
        if not self.shape:
            raise TypeError("iteration over a scalar handle: handle.item() is its one value")
        return (self[index] for index in range(len(self)))

    def __format__(self, spec: str) -> str:
        return format(self.result() if self.shape else self.item(), spec) if spec else repr(self)

    if not TYPE_CHECKING:  # mypy knows what a handle is and has, and refuses the rest.

        @property
        def __class__(self) -> type:
            """A handle, and one of JAX's arrays."""
            return jax.Array if in_jax.is_array(self) else Handle

        def __getattr__(self, name: str) -> Any:
            if name in NAMES and self._session.lab is not None:
                return getattr(in_jax.arrays([self])[0], name)
            raise AttributeError(
                f"a handle has no {name!r}: handle.result() is its array in this kernel",
                name=name,
                obj=self,
            )

    def cancel(self) -> bool:
        """Cancel the computation of the value, if it has not begun; whether it was cancelled.

        The gang that makes it, with all its results, and what depends on them, is not computed,
        unless it has its place on the devices already: then the value comes, and the answer is
        False.  Other results of the same program go on; ``lab.cancel(out)`` cancels them all.
        Reading a cancelled handle raises PathwaysError (of the kind ``"cancelled"``).
        """
        if not self.is_ready():
            self._session.connection.flush()  # its call may not have left yet, and has no run then
            if self._buffer.run:
                self._session.cancel(self)
        return self.failure is not None and self.failure.kind == "cancelled"

    # --- the end of a handle ----------------------------------------------------------

    @property
    def buffer(self) -> Buffer:
        """The buffer, for a run that reads it: of this array alone.

        Raises PathwaysError when it is dead.
        """
        self._check()
        if self._bundle is not None:
            self._session.take_apart(self._bundle)
        return self._buffer

    @property
    def pending(self) -> Buffer:
        """The buffer, to wait for it: other arrays of the same call may share it."""
        return self._buffer

    @property
    def buffer_id(self) -> int:
        """The number of its buffer on the wire and in the timeline."""
        return self._buffer.id

    def alone(self, buffer: Buffer, watch: Watch) -> None:
        """It has a buffer of its own from now on, with the array that it had.

        watch: tells when it is gone, as before.
        """
        watch.id, watch.bundle = buffer.id, None
        self._buffer, self._bundle = buffer, None
        buffer.handle = watch
        if self._fetch is not None and not self._fetch.done:
            self._fetch.moved = True
            self._session.connection.board.settle((self._fetch,), None)

    @property
    def session(self) -> Home:
        """The lab's session in which it lives."""
        return self._session

    def delete(self) -> None:
        """Free the array now, without waiting for the last reference to go."""
        if self._consumed is None:
            if self._bundle is not None:
                self._session.take_apart(self._bundle)
            end([self], Failure("refused", f"this handle ({self.type}) was deleted"))

    def is_deleted(self) -> bool:
        """Whether it was deleted or donated."""
        return self._consumed is not None

    def __reduce__(self) -> Any:
        raise TypeError(
            "a handle cannot be pickled: its array stays on the devices. Pass it as an argument,"
            " or pickle handle.result()"
        )

    def __copy__(self) -> Handle:
        return self

    def __deepcopy__(self, memo: Any) -> Handle:
        return self

    # --- how it looks -------------------------------------------------------------------

    def __repr__(self) -> str:
        name = f" {self.name}" if self.name else ""
        where = f"{self.type} on {self.slice.name} {self.layout}"
        return f"<Handle{name}: {where}, {self._said()}>"

    def _said(self) -> str:
        if self.state == "pending":
            return "the value comes after the run"
        failure = self.failure
        return self.state if failure is None else f"{self.state}: {failure.message}"

    def _repr_html_(self) -> str:
        rows = [
            ("type", str(self.type)),
            ("slice", repr(self.slice)),
            ("layout", str(self.layout)),
            ("bytes", f"{self.nbytes:,}"),
            ("state", self._said()),
        ]
        return TextTable(rows, caption=f"handle {self.name}")._repr_html_()


def end(handles: Sequence[Handle], why: Failure) -> None:
    """These handles of one lab are dead from now on, all at once."""
    connection = handles[0]._session.connection
    for handle in handles:
        handle._ended = why
        handle._fetch = handle._value = handle.in_jax = None
    connection.drop(*[handle._buffer.id for handle in handles])
    # Nobody is told any more what became of the buffers: whoever waits for one hears it here.
    open_ = [handle._buffer for handle in handles if not handle._buffer.done]
    if open_:
        connection.board.settle(open_, why)


def end_bundle(bundle: Bundle, why: Failure, connection: Connection) -> None:
    """The same for all handles of a bundle: a call consumes their arrays."""
    bundle.end(why)
    connection.drop(bundle.buffer.id)
    if not bundle.buffer.done:
        connection.board.settle((bundle.buffer,), why)


def _fetched(tree: Any) -> Any:
    """A tree with arrays in place of handles."""
    return jax.device_get(tree) if any(type(x) is Handle for x in jax.tree.leaves(tree)) else tree


def _key(leaf: Any) -> Any:
    """JAX's random key in place of a handle of one."""
    return leaf.result() if type(leaf) is Handle and is_key(leaf.type.dtype) else leaf


jax_private.values_read_by(_fetched, _key)
