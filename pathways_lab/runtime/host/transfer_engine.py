"""Transfers, uploads and fetches: shards out of and into this host's devices.

Problem: the launcher says *that* a transfer begins and wants to know when its
shards are there; the bytes must go directly between hosts, only those that the
other side needs, and nothing may wait for a host that is slow.

How: one thread does all slicing, copying and assembling; it never waits, for
it is given only sources that are there.  When that thread has nothing to do, the
submitting thread does small work itself: to hand it over would cost more.  A
part that is a whole shard becomes the shard's memory as it is; parts of a shard
are put together in aligned memory, which JAX then takes without a copy.  Devices
of a host that want the same box share its memory.

Rule for maintainers: everything here but :meth:`Exchange.submit` runs one after
the other, in the order of submitting.  Never hold more of an array than shards of this
host's devices (the tests count).  Every problem becomes the failure of the
transfer or upload that has it.

Paper: section 4.3 (sharded transfers), section 4.5.
"""

from __future__ import annotations

import queue
import threading
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import numpy as np

from pathways_lab.core.errors import Failure
from pathways_lab.core.program.layout import Box
from pathways_lab.core.program.program import Plan, Transfer, Value
from pathways_lab.executor.actions import Receive, Send
from pathways_lab.executor.buffers import Past
from pathways_lab.executor.steps import Key
from pathways_lab.executor.transfer_routes import Group, Route
from pathways_lab.runtime import arrays
from pathways_lab.runtime.data_messages import PARTS, Part, Parts
from pathways_lab.runtime.devices import Place
from pathways_lab.runtime.host.peers import Peers
from pathways_lab.transport.codec import pack_fields

SMALL = 64 * 1024
"""Bytes from which on the thread of the exchange copies, and nobody else.

Parts of fewer bytes travel together: a message costs more than their bytes.
"""


@dataclass(frozen=True, slots=True)
class Arrived:
    """How a transfer ended on its receiving side.

    end: when that was known, on the control plane's clock.
    start: when its first part was sent, on the same clock, or None.
    sources: hosts that parts came from.  nbytes: what came from other hosts.
    """

    action: Receive
    end: float
    payload: jax.Array | None
    failure: Failure | None
    start: float | None = None
    sources: tuple[str, ...] = ()
    nbytes: int = 0


Sent = Callable[[Send, "Failure | None", float, float, int], Any]
"""``(action, failure, start, end, nbytes)``: all parts are on their way, or cannot be."""


@dataclass(slots=True)
class _Incoming:
    action: Receive
    place: Place
    done: Callable[[Arrived], Any]
    groups: dict[int, Group]
    missing: dict[int, set[Box]]
    parts: dict[int, Any] = field(default_factory=dict)
    """By group: the shard, or what is there of it."""
    start: float | None = None
    nbytes: int = 0


class Exchange:
    """The transfer engine: it moves shards.

    clock: the control plane's clock.  post(done, *args): hand a result over in the
        reactor's thread.  on_death: its own code failed; the host must end.
    memory: where shards are put together.
    """

    def __init__(
        self,
        host: str,
        peers: Peers,
        clock: Callable[[], float],
        post: Callable[..., None],
        on_death: Callable[[BaseException], None],
    ) -> None:
        self.memory = arrays.Memory()
        self._host = host
        self._peers = peers
        self._clock = clock
        self._post = post
        self._on_death = on_death
        self._incoming: dict[Key, _Incoming] = {}
        self._early: dict[int, list[tuple[int, Callable[[], None]]]] = {}
        """By run, step and what to do: parts that came before their receiving side was ready."""
        self._doubtful: dict[int, list[tuple[Key, str, str]]] = {}
        """By run: steps, hosts and reasons, of parts that may have come over a broken link."""
        self._over: Past[int] = Past()
        self._cancelled: Past[Key] = Past()
        self._jobs: queue.SimpleQueue[tuple[Callable[..., None], tuple[Any, ...]] | None]
        self._jobs = queue.SimpleQueue()
        self._working = threading.Lock()
        self._counting = threading.Lock()
        self._waiting = 0
        self._thread = threading.Thread(target=self._run, name="exchange", daemon=True)
        self._thread.start()

    def submit(self, function: Callable[..., None], *args: Any, nbytes: int = SMALL) -> None:
        """Run it, in the order of submitting.  From any thread.

        nbytes: about so many are copied; what is below :data:`SMALL` may be done at once.
        """
        with self._counting:
            here = nbytes < SMALL and not self._waiting and self._working.acquire(blocking=False)
            if not here:
                self._waiting += 1
                self._jobs.put((function, args))
        if here:
            try:
                function(*args)
            except BaseException as error:
                self._on_death(error)
            finally:
                self._working.release()

    def close(self) -> None:
        self._jobs.put(None)

    def _run(self) -> None:
        try:
            while (job := self._jobs.get()) is not None:
                with self._working:
                    job[0](*job[1])
                del job
                with self._counting:
                    self._waiting -= 1
        except BaseException as error:
            self._on_death(error)

    # --- sending ----------------------------------------------------------------------

    def send(self, action: Send, place: Place, route: Route, done: Sent) -> None:
        """Give away the parts of a settled source."""
        start, failure = self._clock(), action.failure

        def posted_all(error: Exception | None, nbytes: int) -> None:
            """All pieces are on their way, or cannot be.  In any thread."""
            why = None if error is None else self._failure(action.plan, action.node, error)
            self._post(done, action, why, start, self._clock(), nbytes)

        if failure is None:
            letters = _Letters(posted_all)
            try:
                self._send_parts(action, place, route, start, letters)
            except Exception as error:
                failure = self._failure(action.plan, action.node, error)
            else:
                letters.expected()
                return
        self._tell_receivers(action.key, route, failure)
        self._post(done, action, failure, start, self._clock(), 0)

    def _send_parts(
        self, action: Send, place: Place, route: Route, start: float, letters: _Letters
    ) -> None:
        payload = action.source.payload
        if payload is None:
            raise RuntimeError("the source of the transfer is not on its devices")
        shards = arrays.shards_of(payload, place) if route.sends else {}
        views: dict[int, np.ndarray[Any, Any]] = {}
        parcels: dict[str, _Parcel] = {}
        for send in route.sends:
            origin = route.origins[send.source]
            if (
                send.host == self._host
                and send.box == origin
                and _on_accelerator(shards[send.source])
            ):
                self._part(action.key, send.target, send.box, shards[send.source], start)
                continue
            if send.source not in views:
                views[send.source] = np.asarray(shards[send.source])
            part = views[send.source][arrays.index(send.box, origin)]
            if send.host == self._host:
                self._part(action.key, send.target, send.box, part, start)
                continue
            part = np.asarray(part, order="C")
            rows = arrays.rows_with_values(part) if action.node.trimmed else None
            data = arrays.as_bytes(part if rows is None else part[slice(*rows)])
            parcel = parcels.setdefault(send.host, _Parcel())
            if parcel.parts and not parcel.fits(data):
                self._post_parcel(send.host, action.key, start, parcel, letters)
                parcel = parcels[send.host] = _Parcel()
            parcel.add(Part(send.target, send.box, rows, send.onward), data)
        for host, parcel in parcels.items():
            self._post_parcel(host, action.key, start, parcel, letters)

    def _post_parcel(
        self, host: str, key: Key, start: float, parcel: _Parcel, letters: _Letters
    ) -> None:
        fields = pack_fields(Parts(*key, tuple(parcel.parts), start))
        self._peers.send(host, "parts", fields, parcel.buffers, letters.add(parcel.nbytes))

    def _tell_receivers(self, key: Key, route: Route, failure: Failure) -> None:
        """There will be no data: those who wait for it shall know at once."""
        self._tell(route.receivers - {self._host}, key, failure)
        if self._host not in route.receivers:
            return
        if key in self._incoming:
            self._fail(key, failure)
        else:
            self._keep(key, lambda: self._fail(key, failure))

    def _tell(self, hosts: Iterable[str], key: Key, failure: Failure) -> None:
        fields = pack_fields(Parts(*key, failure=failure))
        for host in hosts:
            self._peers.send(host, "parts", fields, [], lambda error: None)

    # --- receiving --------------------------------------------------------------------

    def receive(
        self, action: Receive, place: Place, route: Route, done: Callable[[Arrived], Any]
    ) -> None:
        """Parts will come; some may have come before."""
        if action.key in self._cancelled or action.key[0] in self._over:
            return
        incoming = _Incoming(
            action,
            place,
            done,
            {group.target: group for group in route.groups},
            {group.target: {piece.box for piece in group.pieces} for group in route.groups},
        )
        self._incoming[action.key] = incoming
        dtype = arrays.physical_of(incoming.action.target.value).dtype
        for group in route.groups:
            if not group.pieces:
                incoming.parts[group.target] = np.empty(_extent(group.box), dtype)
                del incoming.missing[group.target]
        run, step = action.key
        early = self._early.pop(run, [])
        others = [entry for entry in early if entry[0] != step]
        if others:
            self._early[run] = others
        for at, take in early:
            if at == step:
                take()
        self._finish_if_whole(incoming)
        for doubtful, host, reason in self._doubtful.get(run, ()):
            if doubtful == action.key:
                self._fail_if_from(host, incoming, reason)

    def _keep(self, key: Key, take: Callable[[], None]) -> None:
        """Something came for a transfer whose receiving side is not ready, or not any more."""
        if key[0] not in self._over and key not in self._cancelled:
            self._early.setdefault(key[0], []).append((key[1], take))

    def parts(self, message: Parts, pairs: Sequence[tuple[Part, Any]]) -> None:
        """A message of another host: parts of a transfer, or that there will be none."""
        for part, data in pairs:
            if part.onward:
                # At once, and also where nobody waits for it here: others do.
                (host, target), *onward = part.onward
                passed = replace(part, target=target, onward=tuple(onward))
                fields = pack_fields(replace(message, parts=(passed,)))
                self._peers.send(host, "parts", fields, [data], lambda error: None)
        self._take(message, pairs)

    def _take(self, message: Parts, pairs: Sequence[tuple[Part, Any]]) -> None:
        key = (message.run, message.step)
        incoming = self._incoming.get(key)
        if incoming is None:
            self._keep(key, lambda: self._take(message, pairs))
            return
        try:
            if message.failure is not None:
                self._fail(key, message.failure)
                return
            dtype = arrays.physical_of(incoming.action.target.value).dtype
            for part, data in pairs:
                incoming.nbytes += len(data)
                whole = self._whole(data, _extent(part.box), dtype, part.rows)
                self._part(key, part.target, part.box, whole, message.sent)
        except Exception as error:
            self._fail(key, self._problem(error))

    def _whole(
        self, data: Any, shape: tuple[int, ...], dtype: Any, rows: tuple[int, int] | None
    ) -> np.ndarray[Any, Any]:
        """The array of a box, of which these rows came.  Raises ValueError."""
        if rows is None:
            return arrays.from_bytes(data, shape, dtype)
        first, last = rows
        if not (shape and 0 <= first <= last <= shape[0]):
            raise ValueError(f"rows {first} to {last} of a shard {dtype}{list(shape)}")
        whole = self.memory.take(shape, dtype)
        whole[first:last] = arrays.from_bytes(data, (last - first, *shape[1:]), dtype)
        whole[:first] = whole[last:] = np.zeros((), dtype)
        return whole

    def _part(self, key: Key, target: int, box: Box, part: Any, sent: float) -> None:
        """One part is here, as NumPy, or as a whole shard on a device."""
        incoming = self._incoming.get(key)
        if incoming is None:
            # From this host itself, whose target devices are still being opened.
            self._keep(key, lambda: self._part(key, target, box, part, sent))
            return
        incoming.start = sent if incoming.start is None else min(sent, incoming.start)
        missing = incoming.missing.get(target, set())
        if box not in missing:
            raise ValueError(f"an unexpected part {box} for device {target}")
        group = incoming.groups[target]
        if box == group.box:
            incoming.parts[target] = part
        else:
            if target not in incoming.parts:
                dtype = arrays.physical_of(incoming.action.target.value).dtype
                incoming.parts[target] = self.memory.take(_extent(group.box), dtype)
            incoming.parts[target][arrays.index(box, group.box)] = part
        missing.remove(box)
        if not missing:
            del incoming.missing[target]
            self._finish_if_whole(incoming)

    def _finish_if_whole(self, incoming: _Incoming) -> None:
        if incoming.missing or self._incoming.get(incoming.action.key) is not incoming:
            return
        del self._incoming[incoming.action.key]
        shards = {
            device: incoming.parts[group.target]
            for group in incoming.groups.values()
            for device in group.devices
        }
        sources = {piece.owner for g in incoming.groups.values() for piece in g.pieces}
        try:
            payload = arrays.join(incoming.action.target.value, incoming.place, shards)
        except Exception as error:
            self._arrived(incoming, None, self._problem(error))
        else:
            self._arrived(
                incoming, payload, None, incoming.start, tuple(sorted(sources)), incoming.nbytes
            )

    def _arrived(self, incoming: _Incoming, payload: Any, *how: Any) -> None:
        self._post(incoming.done, Arrived(incoming.action, self._clock(), payload, *how))

    def _fail(self, key: Key, failure: Failure) -> None:
        incoming = self._incoming.pop(key, None)
        if incoming is not None:
            self._arrived(incoming, None, failure)

    def cancel(self, key: Key) -> None:
        """Nobody waits for this transfer any more."""
        self._cancelled.add(key)
        self._incoming.pop(key, None)

    def run_over(self, run: int) -> None:
        """Late pieces of this run are thrown away."""
        self._over.add(run)
        self._early.pop(run, None)
        self._doubtful.pop(run, None)

    def peer_lost(self, host: str, reason: str, unfinished: Iterable[Key] = ()) -> None:
        """The link from a host broke: parts that it sent may be lost.

        unfinished: steps that are known here, also transfers whose turn has not come.
        """
        for key in unfinished:
            if key not in self._incoming and key[0] not in self._over:
                self._doubtful.setdefault(key[0], []).append((key, host, reason))
        for incoming in tuple(self._incoming.values()):
            self._fail_if_from(host, incoming, reason)

    def _fail_if_from(self, host: str, incoming: _Incoming, reason: str) -> None:
        """A transfer that lacks parts of a host which will not send them again."""
        key = incoming.action.key
        if self._incoming.get(key) is not incoming:
            return
        lost = [
            piece
            for target, boxes in incoming.missing.items()
            for piece in incoming.groups[target].pieces
            if piece.sender == host and piece.box in boxes
        ]
        if lost:
            text = f"the connection from host {host} to {self._host} broke during a transfer"
            remedy = "run the program again"
            failure = Failure("lost", f"{text}: {reason}", remedy, host=self._host)
            self._fail(key, failure)
            self._tell({taker for piece in lost for taker, _ in piece.onward}, key, failure)

    # --- uploads and fetches ------------------------------------------------------------

    def upload(
        self,
        value: Value,
        place: Place,
        parts: dict[int, Any],
        done: Callable[[arrays.OnDemand | list[arrays.OnDemand] | Failure], Any],
    ) -> None:
        """All bytes of an upload for this host are here, by device number."""
        try:
            result: arrays.OnDemand | list[arrays.OnDemand] | Failure = arrays.upload(
                parts, value, place
            )
        except Exception as error:
            result = self._problem(error)
        self._post(done, result)

    def take_home(
        self,
        payloads: Sequence[Any],
        place: Any,
        done: Callable[[list[dict[int, Any]] | Failure], Any],
    ) -> None:
        """Copies, in the host's own memory, of the shards of values of a slice."""
        try:
            result: list[dict[int, Any]] | Failure = [
                {n: np.array(shard, order="C") for n, shard in arrays.shards_of(p, place).items()}
                for p in payloads
            ]
        except Exception as error:
            result = self._problem(error, "taken from")
        self._post(done, result)

    def read(
        self,
        payload: Any,
        place: Place,
        devices: tuple[int, ...],
        done: Callable[[list[memoryview] | Failure], Any],
    ) -> None:
        """The bytes of some shards, as views of their memory where devices are CPUs."""
        try:
            if payload is None:
                raise RuntimeError("its value is gone")
            shards = arrays.shards_of(payload, place)
            result: list[memoryview] | Failure = [
                arrays.as_bytes(np.asarray(shards[device])) for device in devices
            ]
        except Exception as error:
            result = self._problem(error, "read from")
        self._post(done, result)

    # --- failures -------------------------------------------------------------------------

    def _failure(self, plan: Plan, node: Transfer, error: Exception) -> Failure:
        return Failure(
            "lost" if isinstance(error, ConnectionError) else "execute",
            f"{node.name} from {self._host} failed: {error}",
            program=plan.name,
            node=node.name,
            host=self._host,
            line=node.line,
            details="".join(traceback.format_exception(error)),
        )

    def _problem(self, error: Exception, done: str = "put on") -> Failure:
        return Failure(
            "execute",
            f"an array could not be {done} the devices of {self._host}:"
            f" {str(error) or type(error).__name__}",
            host=self._host,
            details="".join(traceback.format_exception(error)),
        )


@dataclass(slots=True)
class _Parcel:
    """Parts of one transfer to one host that travel together."""

    parts: list[Part] = field(default_factory=list)
    buffers: list[memoryview] = field(default_factory=list)
    nbytes: int = 0

    def fits(self, data: memoryview) -> bool:
        return len(self.parts) < PARTS and self.nbytes + data.nbytes < SMALL

    def add(self, part: Part, data: memoryview) -> None:
        self.parts.append(part)
        self.buffers.append(data)
        self.nbytes += data.nbytes


class _Letters:
    """Counts the messages of one transfer until all are on their way."""

    def __init__(self, done: Callable[[Exception | None, int], None]) -> None:
        self._done = done
        self._open = 1
        self._error: Exception | None = None
        self._nbytes = 0
        self._lock = threading.Lock()

    def add(self, nbytes: int) -> Callable[[Exception | None], None]:
        with self._lock:
            self._open += 1
            self._nbytes += nbytes
        return self._one

    def expected(self) -> None:
        """All pieces were added."""
        self._one(None)

    def _one(self, error: Exception | None) -> None:
        with self._lock:
            self._open -= 1
            self._error = self._error or error
            last = self._open == 0
        if last:
            self._done(self._error, self._nbytes)


def _extent(box: Box) -> tuple[int, ...]:
    return tuple(stop - start for start, stop in box)


def _on_accelerator(shard: Any) -> bool:
    return isinstance(shard, jax.Array) and next(iter(shard.devices())).platform != "cpu"
