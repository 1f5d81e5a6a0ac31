"""Values between the kernel and the hosts: uploads and fetches.

Problem: bytes never pass through the control plane.  The kernel talks to the
hosts directly, over links made on demand: an upload sends each host only the
shards of its own devices; a fetch asks the fewest devices that together hold
the array, and puts the parts together in the thread that wants it.

Rule for maintainers: handlers run in the reactor's thread and only store; the
waiting thread copies.  An upload sends a copy that never changes.

Paper: section 4.2 (data reach the client only when asked for).
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from pathways_lab.client.code import layouts, source_lines
from pathways_lab.client.functions.array_types import ArrayType, shard_bytes
from pathways_lab.client.lab.devices import Placed, Slice
from pathways_lab.client.session import failures
from pathways_lab.client.session.connection import Connection
from pathways_lab.client.session.pending import Buffer
from pathways_lab.client.session.waiting import Pending
from pathways_lab.core.errors import Failure, PathwaysError
from pathways_lab.core.program.layout import Box, Layout, boxes
from pathways_lab.core.program.program import Line
from pathways_lab.core.slices.topology import SliceBinding
from pathways_lab.runtime.arrays import as_bytes, element_of, index
from pathways_lab.runtime.data_messages import distinct, upload_fields
from pathways_lab.transport.auth import AuthenticationError
from pathways_lab.transport.codec import pack, unpack
from pathways_lab.transport.dask_comms import scheduler_of, through
from pathways_lab.transport.handshake import is_silence
from pathways_lab.transport.link import Link, LinkClosed

_ATTEMPT = 5.0
"""Seconds for one attempt to connect; the operating system's own come seldom after a while."""
_PAUSE = 0.1
"""Seconds between two: where no way leads to a machine an attempt ends at once."""
_ANYWHERE: Mapping[str, int] = {}


class Fetch(Pending):
    """Parts of one array on their way.  parts: by device number.

    hosts: which devices each is asked for; of some only whether the value is there.
    unheard: witnesses of the buffer that have not said that it is there.
    moved: the array lies elsewhere by now, and must be asked for again.
    """

    __slots__ = ("buffer", "cover", "hosts", "missing", "moved", "parts", "unheard")

    def __init__(self, buffer: Buffer, cover: dict[int, Box], hosts: dict[str, list[int]]) -> None:
        super().__init__()
        self.buffer = buffer
        self.cover = cover
        self.hosts = hosts
        self.moved = False
        self.missing = set(cover)
        self.unheard = set(buffer.witnesses)
        self.parts: dict[int, memoryview] = {}


class DataLinks:
    """The kernel's links to hosts, each made when it is first needed."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._links: dict[str, Link] = {}
        self._connecting: defaultdict[str, threading.Lock] = defaultdict(threading.Lock)
        """By host: a host that does not answer holds up nobody who asks another one."""
        self._dialled: set[str] = set()
        self._fetches: dict[tuple[str, int], Fetch] = {}
        self._fetched: Buffer | None = None
        self._waiting = False
        self._uploads: dict[str, weakref.WeakSet[Buffer]] = {}
        self._numbers = itertools.count(1)
        connection.on_data = self._message
        connection.on_data_closed = self._closed
        connection.expect = self._expect
        connection.expect_no_more = self._expect_no_more

    # --- up -----------------------------------------------------------------------

    def upload(self, buffer: Buffer, data: np.ndarray[Any, Any], placed: Placed, name: str) -> None:
        """Send *data* to where *placed* says; *buffer* is pending until it has arrived.

        data: the whole array as it travels (:func:`arrays.host_bytes`).
        """
        connection, kind, on, layout = self._connection, placed.type, placed.slice, placed.layout
        binding = on.binding
        places = boxes(layout, kind.shape)
        description = upload_fields(buffer.id, on.id, kind.shape, kind.dtype, layout)
        origin = {"name": name, "line": pack(source_lines.of_caller())}
        connection.send("declare", {**description, "nbytes": shard_bytes(kind, layout), **origin})
        description["generation"] = binding.generation
        for host, devices in binding.by_host.items():
            self._uploads.setdefault(host, weakref.WeakSet()).add(buffer)
            own, sources = distinct([places[device] for device in devices])
            parts = [np.ascontiguousarray(data[index(box)]) for box in own]
            fields = {**description, "devices": devices, "sources": sources}
            # The user may change the array as soon as it is sent.
            passing = any(np.may_share_memory(part, data) for part in parts)
            self._send(host, "put", fields, [as_bytes(part) for part in parts], passing)
            connection.traffic.uploads += 1

    # --- down ---------------------------------------------------------------------

    def fetch(
        self, buffer: Buffer, kind: ArrayType, on: Slice, layout: Layout, place: int = 0
    ) -> Fetch:
        """Ask for the whole array; hosts answer as soon as it is there.

        place: which one it is of a bundle.
        """
        binding = on.binding
        where = tuple(host for host, _ in binding.devices)
        cover = layouts.cover(layout, kind.shape, where)
        hosts: dict[str, list[int]] = {}
        for device in cover:
            hosts.setdefault(where[device], []).append(device)
        fetch = Fetch(buffer, cover, hosts)
        self._fetched = buffer
        self._connection.awaited(buffer)
        for host in hosts:
            self._ask(
                fetch, host, {"slice": on.id, "generation": binding.generation, "leaf": place}
            )
            self._connection.traffic.fetches += 1
        self._hear(fetch, buffer.witnesses.difference(hosts))
        return fetch

    def hurry(self, buffer: Buffer) -> None:
        """Somebody waits: have the witnesses of a buffer say themselves when it is there."""
        if buffer.witnesses:
            # The values of what is fetched say by themselves that they are there.
            self._waiting = buffer is not self._fetched
            self._hear(Fetch(buffer, {}, {}), buffer.witnesses)

    def _expect(self, buffer: Buffer) -> int:
        """The waiter for the last call will wait for this one: its witnesses are not to be asked.

        The number that goes with the run, under which they say that it is there; 0: they
        have to be asked, if it is waited for.
        """
        waiting, self._waiting = self._waiting, False
        links = [self._links.get(host) for host in buffer.witnesses] if waiting else []
        if not links or any(link is None or link.closed is not None for link in links):
            return 0
        fetch, number = Fetch(buffer, {}, {}), next(self._numbers)
        buffer.asked = True
        for host in buffer.witnesses:
            fetch.hosts[host] = []
            self._fetches[host, number] = fetch
        return number

    def _expect_no_more(self, buffer: Buffer, number: int) -> None:
        """The run that makes it is over."""
        for host in buffer.witnesses:
            self._fetches.pop((host, number), None)

    def _hear(self, fetch: Fetch, hosts: Iterable[str]) -> None:
        """Ask those who have to say no more than that it is there.  Never waits."""
        buffer = fetch.buffer
        if buffer.done or buffer.asked:
            return
        buffer.asked = True
        strange = [h for h in hosts if h not in self._links or self._links[h].closed is not None]
        for host in strange:
            self._dial(host)
        for host in () if strange else hosts:
            fetch.hosts[host] = []
            with contextlib.suppress(PathwaysError):
                self._ask(fetch, host)

    def _ask(self, fetch: Fetch, host: str, where: Mapping[str, int] = _ANYWHERE) -> None:
        number, buffer = next(self._numbers), fetch.buffer
        self._fetches[host, number] = fetch
        fields = {"id": number, "buffer": buffer.stored, "devices": fetch.hosts[host], **where}
        if buffer.ticket is not None:
            fields["ticket"] = buffer.ticket
        try:
            self._send(host, "fetch", fields)
        except PathwaysError as error:
            self._fetches.pop((host, number), None)
            if fetch.hosts[host]:
                self._connection.board.settle((fetch,), error.failure)

    @staticmethod
    def assemble(fetch: Fetch, kind: ArrayType) -> np.ndarray[Any, Any]:
        """The whole array, as it travels, from the parts of a fetch that is done."""
        element = element_of(kind.dtype)
        shape = (*kind.shape, *element.trailing)
        if len(fetch.cover) == 1:
            (part,) = fetch.parts.values()
            return np.frombuffer(part, element.dtype).reshape(shape)
        whole = np.empty(shape, element.dtype)
        for device, box in fetch.cover.items():
            extent = tuple(stop - start for start, stop in box)
            shard = np.frombuffer(fetch.parts[device], element.dtype)
            whole[index(box)] = shard.reshape((*extent, *element.trailing))
        return whole

    # --- links ----------------------------------------------------------------------

    def _send(
        self,
        host: str,
        op: str,
        fields: dict[str, Any],
        buffers: Any = (),
        passing: bool = False,
    ) -> None:
        try:
            self._link(host).send(op, fields, buffers, passing)
        except LinkClosed as error:
            raise PathwaysError(_unreachable(host, str(error))) from None

    def _link(self, host: str) -> Link:
        link = self._links.get(host)
        if link is not None and link.closed is None:
            return link
        with self._connecting[host]:
            link = self._links.get(host)
            if link is not None and link.closed is None:
                return link
            link = self._links[host] = self._connect(host)
            return link

    def _connect(self, host: str) -> Link:
        """A new link; a network that is cut is waited for as a link bears it that is there.

        A machine that has started anew refuses before the control plane knows of the loss, whose
        reason is the true one.
        """
        connection, key = self._connection, self._connection.data_key
        end = time.monotonic() + connection.silence
        while True:
            left, address = min(_ATTEMPT, end - time.monotonic()), self._way(host)
            try:
                return connection.reactor.connect(
                    address, key, self._hello, left, **self._options(host)
                )
            except (OSError, AuthenticationError) as error:
                passing = is_silence(error) or isinstance(error, ConnectionRefusedError)
                if not passing or time.monotonic() >= end:
                    raise PathwaysError(_unreachable(host, str(error))) from error
                time.sleep(_PAUSE)

    @property
    def _hello(self) -> dict[str, Any]:
        return {"role": "client", "name": self._connection.name}

    def _options(self, host: str) -> dict[str, Any]:
        connection = self._connection
        return {
            "name": host,
            "context": connection.context,
            "bulk": True,
            "holder": connection.number,
        }

    def _dial(self, host: str) -> None:
        """Have a link for later, without waiting for it."""
        if host in self._dialled:
            return
        self._dialled.add(host)

        def dialled(result: Link | Exception) -> None:
            self._dialled.discard(host)
            if isinstance(result, Exception):
                return
            if host in self._links and self._links[host].closed is None:
                result.close("there is another one")
            else:
                self._links[host] = result

        connection = self._connection
        with contextlib.suppress(PathwaysError):
            connection.reactor.connect_soon(
                self._way(host),
                connection.data_key,
                self._hello,
                dialled,
                **self._options(host),
            )

    def address(self, host: str) -> str:
        """Where a host takes data.  Raises PathwaysError when it is not in the lab."""
        return str(self._entry(host)["data_address"])

    def _way(self, host: str) -> str:
        """The same, from here: a client that reaches only Dask's scheduler goes through it."""
        scheduler = scheduler_of(self._connection.address)
        if not scheduler:
            return self.address(host)
        return through(scheduler, str(self._entry(host)["worker"]))

    def _entry(self, host: str) -> dict[str, Any]:
        for island in self._connection.topology["islands"]:
            for entry in island["hosts"]:
                if entry["name"] == host:
                    found: dict[str, Any] = entry
                    return found
        raise PathwaysError(_unreachable(host, "it is not in the lab any more"))

    # --- in the reactor's thread ------------------------------------------------------

    def _message(
        self, link: Link, op: str, fields: dict[str, Any], buffers: list[memoryview]
    ) -> None:
        host = link.name
        if op == "parting":
            with contextlib.suppress(LinkClosed):
                link.send("parted", {})
            return
        fetch = self._fetches.pop((host, fields.get("id", 0)), None)
        if fetch is None:
            return
        if op == "fetched":
            for device, part in zip(fetch.hosts[host], buffers, strict=True):
                fetch.parts[device] = part
                fetch.missing.discard(device)
            if not (fetch.missing or fetch.done):
                self._connection.board.settle((fetch,), None)
            if fetch.unheard:
                fetch.unheard.discard(host)
                if not fetch.unheard:
                    self._connection.vouch(fetch.buffer)
        elif op == "fetch-moved":
            self._connection.following.bound(unpack(SliceBinding, fields["binding"]))
            fetch.moved = True
            self._connection.board.settle((fetch,), None)
        elif fetch.hosts[host]:
            self._connection.board.settle((fetch,), unpack(Failure, fields["failure"]))

    def _closed(self, link: Link, reason: str) -> None:
        kept = self._links.get(link.name)
        if kept is not None and kept is not link and kept.closed is None:
            return  # a second one, over which nothing went
        for key in [key for key in tuple(self._fetches) if key[0] == link.name]:
            fetch = self._fetches.pop(key, None)
            if fetch is not None and fetch.hosts[link.name]:
                self._connection.board.settle((fetch,), _unreachable(link.name, reason))
        # Bytes that had not arrived are lost, also when the host itself lives on.
        for buffer in tuple(self._uploads.pop(link.name, ())):
            if not buffer.done:
                self._connection.board.settle((buffer,), _unreachable(link.name, reason))


def _unreachable(host: str, reason: str) -> Failure:
    return failures.failure(
        "lost",
        f"host {host} cannot be reached: {reason}",
        "values on other hosts are not affected; make the lost ones again",
        line=Line(),
    ).failure
