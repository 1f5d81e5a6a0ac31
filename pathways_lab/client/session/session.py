"""Running prepared programs: arguments in, handles out.

Problem: a run must cost the client one message, whatever its size; arguments
ride in it when they are small and are uploaded to their devices before when
they are not; handles go in by their ids.

Rule for maintainers: everything that a run needs is decided in
:class:`Prepared`; here nothing is traced, lowered or exported.  From the moment a buffer has an
id until a handle has it nothing may be interrupted: nobody would drop it.

Paper: section 4.2 (client), section 4.4 (one message per subgraph).
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from pathways_lab.client.functions import array_types
from pathways_lab.client.functions.array_types import SMALL, ArrayType, shard_bytes
from pathways_lab.client.lab.devices import Placed, Slice
from pathways_lab.client.program.bundled import apart, with_bundles
from pathways_lab.client.program.graph import Argument, Constant, Held, Prepared, Ref
from pathways_lab.client.session import failures, lateness
from pathways_lab.client.session.call_batching import Calls
from pathways_lab.client.session.connection import Connection
from pathways_lab.client.session.habits import FEW, learn
from pathways_lab.client.session.handles import Handle, end, end_bundle
from pathways_lab.client.session.pending import Buffer, Bundle
from pathways_lab.client.session.transfers import DataLinks
from pathways_lab.client.session.upload_limit import Large, Room
from pathways_lab.client.session.waiting import Pending
from pathways_lab.core.errors import Failure, PathwaysError
from pathways_lab.core.program.layout import Layout
from pathways_lab.transport.deferred_signals import HeldBack

_INLINE_CONSTANT = 1024
"""Constants up to this many bytes ride in every run; larger ones are uploaded once."""
_OUTPUTS = 10_000


class Session:
    """One lab's connection, and what runs on it.

    outputs: text that user code printed on hosts and nobody has shown yet.
    checks: what the gangs of runs are tested for from now on, as JAX's settings call it.
    show_output: a front end's own way to show it, called in the reactor's
        thread; it answers False for what shall be printed by whoever waits.
    """

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.data = DataLinks(connection)
        self.outputs: deque[dict[str, Any]] = deque(maxlen=_OUTPUTS)
        self.show_output: Callable[[dict[str, Any]], bool] | None = None
        self.lab: Callable[[], Any] | None = None
        """The lab of which it is, if there is one."""
        self.checks: frozenset[str] = frozenset()
        self._constants: weakref.WeakKeyDictionary[Prepared, dict[int, Handle]] = (
            weakref.WeakKeyDictionary()
        )
        self._calls = Calls(connection)
        self.room = Room(connection)
        self._uploading = threading.Lock()
        self._splitting = threading.RLock()
        connection.on_output = self._printed
        connection.on_tick = self._take_thinned_apart
        connection.link.beat(self._silent)

    # --- runs -------------------------------------------------------------------------

    def run(self, prepared: Prepared, leaves: Sequence[Any]) -> list[Handle]:
        """Submit one run.  leaves: the flat arguments.  Handles, one per output, at once.

        Raises PathwaysError when a handle is dead or a slice was released.
        """
        prepared = self._as_wanted(prepared)
        self._check(prepared)
        binder = _Binder(self, leaves)
        buffers = [binder.bind(prepared, number, ref) for number, ref in enumerate(prepared.inputs)]
        self._check_donation(prepared, buffers)
        with HeldBack():
            self.connection.registered.add(prepared)
            made = self.connection.submit(prepared.plan, buffers, binder.arguments, binder.payload)
            binder.donate(prepared)
            return self._handles(prepared, made, binder.large)

    def call(self, prepared: Prepared, leaves: Sequence[Any]) -> list[Handle]:
        """The same for a call outside of programs: it may be sent together with later ones."""
        prepared = self._as_wanted(prepared)
        self._check(prepared)
        if prepared.may_have_bundles:
            return self._call_with_bundles(prepared, leaves)
        binder = _Binder(self, leaves)
        buffers = [binder.bind(prepared, number, ref) for number, ref in enumerate(prepared.inputs)]
        self._check_donation(prepared, buffers)
        return self._add(prepared, binder, buffers)

    def _call_with_bundles(self, prepared: Prepared, leaves: Sequence[Any]) -> list[Handle]:
        """The same where arguments and results may be bundles."""
        while True:
            binder = _Binder(self, leaves)
            form, buffers = self._bind_bundles(prepared, binder)
            self._check_donation(form, buffers)
            with self._splitting:
                # Another thread may have taken one apart meanwhile.
                if not any(bundle.over for bundle in binder.bundles.values()):
                    return self._add(form, binder, buffers)

    def _add(
        self, prepared: Prepared, binder: _Binder, buffers: Sequence[Buffer | None]
    ) -> list[Handle]:
        donate = functools.partial(binder.donate, prepared) if prepared.donated else None
        with HeldBack():
            made = self._calls.add(prepared, buffers, binder.arguments, binder.payload, donate)
            return self._handles(prepared, made, binder.large)

    def repeat(
        self, prepared: Prepared, order: Sequence[int], leaves: Sequence[Handle]
    ) -> list[Handle]:
        """The same where all inputs are handles, few, and none of them is donated.

        order: which of *leaves* each input is.
        """
        prepared = self._as_wanted(prepared)
        self._check(prepared)
        buffers = [buffer_of(leaves[index], self) for index in order]
        with HeldBack():
            return self._handles(prepared, self._calls.add(prepared, buffers))

    def _as_wanted(self, prepared: Prepared) -> Prepared:
        return prepared.checked(self.checks) if self.checks else prepared

    def _check(self, prepared: Prepared) -> None:
        """Wait until there is room for a run.  Raises PathwaysError when a slice was released."""
        self.connection.make_room(prepared.plan)
        prepared.check()

    def _bind_bundles(
        self, prepared: Prepared, binder: _Binder
    ) -> tuple[Prepared, list[Buffer | None]]:
        """The call in the form that its arguments and its habit ask for, and its inputs."""
        found = self._bundles_in(binder.leaves)
        given = tuple([(at, at + len(bundle.watches)) for at, bundle in found.items()])
        buffers: list[Buffer | None] = []
        at = 0
        while at < len(binder.leaves):
            bundle = found.get(at)
            if bundle is None:
                buffers.append(binder.bind(prepared, len(buffers), prepared.inputs[at]))
                at += 1
            else:
                buffers.append(binder.take(len(buffers), bundle))
                at += len(bundle.watches)
        learn(buffers)
        return with_bundles(prepared, given, prepared.habit.ranges), buffers

    def _bundles_in(self, leaves: Sequence[Any]) -> dict[int, Bundle]:
        """By position, the bundles that are passed whole; the others are taken apart."""
        found: dict[Bundle, int] = {}
        at = 0
        while at < len(leaves):
            leaf = leaves[at]
            bundle: Bundle | None = leaf._bundle if type(leaf) is Handle else None
            if bundle is None or bundle.over or leaf.session is not self:
                at += 1
            elif bundle not in found and bundle.at(leaves, at):
                found[bundle] = at
                at += len(bundle.watches)
            else:
                self.take_apart(bundle)
                found.pop(bundle, None)
        return {at: bundle for bundle, at in found.items()}

    def take_apart(self, bundle: Bundle) -> None:
        """Give the arrays of a bundle buffers of their own; those without a handle go."""
        connection = self.connection
        with self._splitting, HeldBack():
            if bundle.over:
                return
            last = bundle.first + len(bundle.watches)
            assert isinstance(bundle.maker, Prepared)
            whole, prepared = bundle.buffer, apart(bundle.maker, bundle.first, last)
            bundle.over = True
            try:
                made = self._calls.add(prepared, [whole], donate=lambda: connection.drop(whole.id))
            except BaseException:
                bundle.over = False  # its arrays have no other buffers
                raise
            connection.thinned.pop(bundle, None)
            bundle.habit.taken_apart()
            there = whole.done and whole.failure is None
            for place, (buffer, watch) in enumerate(zip(made, bundle.watches, strict=True)):
                buffer.habit, buffer.place = bundle.habit, bundle.first + place
                buffer.done = buffer.done or there
                handle = watch()
                if handle is not None:
                    handle.alone(buffer, watch)
                elif watch.id:  # it is in the queue of those that are gone
                    watch.id, watch.bundle = buffer.id, None
                else:
                    connection.drop(buffer.id)

    def _take_thinned_apart(self) -> None:
        """Bundles that are used in part: what has no handle for a while is freed."""
        thinned = self.connection.thinned
        if not thinned or not self._splitting.acquire(blocking=False):
            return  # the reactor's thread waits for nobody
        try:
            for bundle, left in tuple(thinned.items()):
                if bundle.over or not bundle.left:
                    del thinned[bundle]
                elif bundle.left == left:
                    bundle.cut()
                    self.take_apart(bundle)
                else:
                    thinned[bundle] = bundle.left
        finally:
            self._splitting.release()

    def _check_donation(self, prepared: Prepared, buffers: Sequence[Buffer | None]) -> None:
        """Raises PathwaysError while the handles are as they were."""
        if not prepared.donated:
            return
        passed = Counter(buffers)
        shared: dict[int, tuple[Buffer, Failure]] = {}
        for number, why in prepared.donated.items():
            buffer = buffers[number]
            if buffer is not None and passed[buffer] > 1:
                raise failures.refused(
                    f"the same handle is passed twice, and {why.node!r} donates one of them",
                    "pass a copy (handle + 0), or do not donate the argument",
                    line=why.line,
                )
            if buffer is not None and buffer.shared:
                shared[buffer.id] = buffer, why
        if not shared:
            return
        refused = self.connection.questions.not_donated([buffer for buffer, *_ in shared.values()])
        if refused is not None:
            number, message, remedy = refused
            _, why = shared[number]
            raise failures.refused(message, remedy, node=why.node, line=why.line)

    def _handles(
        self, prepared: Prepared, made: Sequence[Buffer], large: Sequence[Large] = ()
    ) -> list[Handle]:
        if large:
            self.room.take(made, large)
        if not prepared.results:
            handles = [
                Handle(self, buffer, placed, name)
                for buffer, (placed, name) in zip(made, prepared.made, strict=True)
            ]
            if len(made) >= FEW:
                for place, buffer in enumerate(made):
                    buffer.habit, buffer.place = prepared.habit, place
            return handles
        handles = []
        for buffer, (first, last) in zip(made, prepared.results, strict=True):
            if last == first + 1:
                handles.append(Handle(self, buffer, *prepared.made[first]))
                buffer.habit, buffer.place = prepared.habit, first
                continue
            bundle = buffer.handle = Bundle(buffer, prepared, first)
            for place, (placed, name) in enumerate(prepared.made[first:last]):
                handles.append(Handle(self, buffer, placed, name, bundle, place))
            bundle.left = last - first
            prepared.habit.made(1)
        return handles

    def put(self, leaf: Any, kind: ArrayType, on: Slice, layout: Layout, name: str = "") -> Handle:
        """A host array on the devices of a slice."""
        on.check()
        return self._upload(array_types.host_bytes(leaf, kind, name), on.placed(kind, layout), name)

    def _upload(self, data: np.ndarray[Any, Any], placed: Placed, name: str) -> Handle:
        handle: Handle | None = None
        try:
            with HeldBack():
                buffer = self.connection.new_buffer()
                handle = Handle(self, buffer, placed, name)
            # It may take long, so Ctrl-C gets through: then all goes that is there of it.
            self.data.upload(buffer, data, placed, name)
            return handle
        except BaseException:
            if handle is not None:
                # At once: a traceback may keep the handle for long.
                self.connection.drop(handle.buffer_id)
            raise

    def constant(self, prepared: Prepared, number: int, ref: Ref, source: Constant) -> Handle:
        """The uploaded form of a constant of a program, made once."""
        with self._uploading:
            known = self._constants.setdefault(prepared, {})
            handle = known.get(number)
            if handle is None or handle.failure is not None:
                handle = known[number] = self._upload(source.data, ref.placed, ref.name)
            return handle

    # --- waiting ------------------------------------------------------------------------

    def wait(self, handle: Handle, done: Callable[[], bool], timeout: float | None) -> None:
        """Wait for something of *handle*; prints what user code printed meanwhile.

        Ctrl-C returns at once and cancels what is not granted of the handle's
        run and of the runs that it waits for.
        """
        self.connection.awaited(handle.pending)
        self.data.hurry(handle.pending)
        if not done():
            self.connection.own_work.waits()
        what = f"the value of {handle.name or 'the handle'} ({handle.type})"
        begun, left = time.monotonic(), timeout
        try:
            while True:
                lateness.wait(
                    self.connection, lambda: done() or self._unshown(), left, what, timeout
                )
                self.flush_outputs()
                if done():
                    return
                if timeout is not None:
                    left = max(0.0, begun + timeout - time.monotonic())
        except KeyboardInterrupt:
            with contextlib.suppress(PathwaysError):
                self.connection.cancel([handle.pending])
            raise

    async def ended(self, entry: Pending) -> None:
        """Wait in a running event loop."""
        self.connection.flush()
        if entry.done:
            return
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()

        def wake() -> None:
            if not future.done():
                future.set_result(None)

        def wake_soon() -> None:
            # The loop may have been closed meanwhile: then nobody waits.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(wake)

        self.connection.board.when_done(entry, wake_soon)
        await future

    def when_ended(self, handles: Sequence[Handle], call: Callable[[], None]) -> None:
        """Call once all of them have values, or never will: now, or later in another thread."""
        self.connection.flush()
        self.connection.board.when_all([handle.pending for handle in handles], call)

    def cancel(
        self,
        *handles: Handle,
        runs: Sequence[int] = (),
        steps: Sequence[tuple[int, Sequence[int]]] = (),
    ) -> dict[str, Any]:
        """Have values, whole runs, or steps of runs cancelled; what the control plane answers."""
        buffers = [handle.buffer_id for handle in handles]
        asked = {"buffers": buffers, "runs": list(runs), "steps": list(steps)}
        return self.connection.questions.ask("cancel", asked).fields

    # --- what user code prints on hosts ---------------------------------------------------

    def _printed(self, fields: dict[str, Any]) -> None:
        show = self.show_output
        if show is None or not show(fields):
            self.outputs.append(fields)
            self.connection.board.settle((), None)

    def print_later(self, source: str, text: str) -> None:
        """Have text printed by whoever waits next, with its source before every line."""
        self._printed({"host": source, "device": None, "text": text})

    def _silent(self, seconds: float) -> None:
        """The control plane has said nothing for so long, or, with 0.0, answers again."""
        who = self.connection.link.who
        text = f"no word from {who} for {seconds:.1f} s" if seconds else f"{who} answers again"
        self.print_later("watchdog", text)

    def _unshown(self) -> bool:
        return bool(self.outputs)

    def flush_outputs(self) -> None:
        """Print, in the calling thread, what user code printed on hosts."""
        while self.outputs:
            with contextlib.suppress(IndexError):
                print(labelled(self.outputs.popleft()), end="", flush=True)


def labelled(output: dict[str, Any]) -> str:
    """Printed text with host and device before every line."""
    device = output.get("device")
    where = str(output["host"]) + ("" if device is None else f" device {device}")
    lines = str(output["text"]).splitlines() or [""]
    return "".join(f"[{where}] {line}\n" for line in lines)


class _Binder:
    """Binds the inputs of one run."""

    def __init__(self, session: Session, leaves: Sequence[Any]) -> None:
        self.session = session
        self.leaves = leaves
        self.payload: list[bytes] = []
        self.arguments: dict[int, int] = {}
        self.handles: dict[int, Handle] = {}
        self.bundles: dict[int, Bundle] = {}
        self.large: list[Large] = []
        self._places: dict[int, int] = {}

    def bind(self, prepared: Prepared, number: int, ref: Ref) -> Buffer | None:
        """The buffer of an input; None when its bytes ride in the message."""
        source = ref.source
        if isinstance(source, Held):
            return self._handle(number, source.handle)
        if isinstance(source, Constant):
            if source.data.nbytes > _INLINE_CONSTANT:
                return self._handle(number, self.session.constant(prepared, number, ref, source))
            self._ride(number, source.data.tobytes())
            return None
        assert isinstance(source, Argument)
        leaf = self.leaves[source.index]
        if type(leaf) is Handle:
            return self._handle(number, leaf)
        if ref.type.nbytes > SMALL:
            on, layout = ref.slice, _known(ref)
            if large := self.session.room.wait(on, shard_bytes(ref.type, layout)):
                self.large.append(large)
            return self._handle(number, self.session.put(leaf, ref.type, on, layout, ref.name))
        place = self._places.get(source.index)
        if place is not None:
            self.arguments[number] = place
        else:
            self._ride(number, array_types.host_bytes(leaf, ref.type, ref.name).tobytes())
            self._places[source.index] = self.arguments[number]
        return None

    def take(self, number: int, bundle: Bundle) -> Buffer:
        """The buffer of an input that is a whole bundle.  Raises PathwaysError if it failed."""
        if bundle.buffer.failure is not None:
            raise PathwaysError(bundle.buffer.failure)
        self.bundles[number] = bundle
        return bundle.buffer

    def donate(self, prepared: Prepared) -> None:
        """Handles whose arrays the run consumes are dead from now on."""
        gone: dict[int, tuple[Failure, list[Handle]]] = {}  # by identity: to hash one is slow
        for number, why in prepared.donated.items():
            handle = self.handles.get(number)
            if (bundle := self.bundles.get(number)) is not None:
                end_bundle(bundle, why, self.session.connection)
            if handle is not None:
                gone.setdefault(id(why), (why, []))[1].append(handle)
        for why, handles in gone.values():
            end(handles, why)

    def _ride(self, number: int, data: bytes) -> None:
        self.arguments[number] = len(self.payload)
        self.payload.append(data)

    def _handle(self, number: int, handle: Handle) -> Buffer:
        self.handles[number] = handle
        return buffer_of(handle, self.session)


def buffer_of(handle: Handle, session: Session) -> Buffer:
    """The buffer that a run of this session reads.  Raises PathwaysError when it cannot."""
    if handle.session is not session:
        raise failures.refused(
            f"handle {handle.name or handle.type} belongs to another lab",
            "fetch it with handle.result() and pass the array",
        )
    return handle.buffer


def _known(ref: Ref) -> Layout:
    assert ref.layout is not None, "a prepared program has all layouts"
    return ref.layout
