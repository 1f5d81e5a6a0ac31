"""Uploads and fetches of clients, at their host.

Problem: clients send and fetch bytes over links of their own, in no order with
the messages of the control plane: a part of an upload may come before this host has
heard of its slice, a fetch before its buffer exists, and the client may vanish
in the middle.  And clients may be curious, or worse: each has proved its number
when it connected, and may touch no value that bears another number.

Rule for maintainers: runs in the reactor's thread; the transfer engine handles bytes.
A client's message is typed and within its bounds
(:mod:`pathways_lab.runtime.data_messages`) and may be wrong all the same: that raises
ValueError, which closes its link and changes nothing.  Rights are checked
before anything else is looked at.  Waiting requests are counted by client, never by a scan.

Paper: section 4.2 (data move between client and hosts only on demand).
"""

from __future__ import annotations

import contextlib
import hmac
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pathways_lab.core.errors import Failure
from pathways_lab.core.program.bundles import leaf
from pathways_lab.core.program.program import SliceId, Value
from pathways_lab.core.slices.topology import SliceBinding
from pathways_lab.executor.actions import Action, Serve
from pathways_lab.executor.launcher import Launcher
from pathways_lab.runtime import arrays
from pathways_lab.runtime.data_messages import Ask, Put, upload_fields
from pathways_lab.runtime.devices import Place
from pathways_lab.runtime.host.local_slices import Tenants
from pathways_lab.runtime.host.peers import Peers
from pathways_lab.runtime.host.reports import Reports
from pathways_lab.runtime.host.transfer_engine import Exchange
from pathways_lab.transport.auth import ticket_of
from pathways_lab.transport.codec import pack, unpack_fields
from pathways_lab.transport.handshake import Refused
from pathways_lab.transport.link import Link, LinkClosed

Buffers = list[memoryview]
_UNFINISHED = 4
"""Memories of a device, of 1 GiB at least, that a client may fill on a host with uploads that are
not complete."""
_LINKS = 256
"""Links that a client may have to a host: its own, and those of workers that upload for it."""
_RECORD = 16 << 10
"""Bytes that count for a message that waits, however little it carries."""
_ASKED = 1 << 18
"""Questions that one link may have open."""


def unfinished_bytes(memory: int | None) -> int:
    """Bytes that a client may leave incomplete where devices have so much memory."""
    return _UNFINISHED * max(memory or 0, 1 << 30)


@dataclass(frozen=True, slots=True)
class _Letter:
    """A message with shards.  link: None from this host itself."""

    link: Link | None
    put: Put
    buffers: Buffers

    @property
    def nbytes(self) -> int:
        """Counted for the client that sent it."""
        return max(_RECORD, sum([len(data) for data in self.buffers]))


@dataclass(slots=True)
class _Upload:
    """Parts of an upload, by device number, and the messages in which they came."""

    value: Value
    parts: dict[int, Any] = field(default_factory=dict)
    letters: list[_Letter] = field(default_factory=list)


@dataclass(frozen=True, slots=True, eq=False)
class Fetch:
    """A question of a client: some shards of a buffer.

    slice: where it is, or 0: not said.  leaf: which array, where it is a bundle.
    """

    link: Link
    id: int
    devices: tuple[int, ...]
    slice: SliceId = 0
    leaf: int = 0


@dataclass(eq=False, repr=False)
class Desk:
    """Uploads and fetches of one host.

    key: of the door at which clients come in.
    devices: how many this host has.
    moved: where slices lie that have left this host, or moved within it.
    """

    _host: str
    _key: bytes
    _launcher: Launcher
    _tenants: Tenants
    _exchange: Exchange
    _peers: Peers
    _reports: Reports
    _devices: int = 1
    moved: dict[SliceId, SliceBinding] = field(default_factory=dict, init=False)
    _uploads: dict[int, _Upload] = field(default_factory=dict, init=False)
    _early: dict[SliceId, list[_Letter]] = field(default_factory=dict, init=False)
    _waiting: Counter[int] = field(default_factory=Counter, init=False)
    """Bytes of what is not complete, by client."""
    _asked: Counter[Link] = field(default_factory=Counter, init=False)
    _links: dict[int, Link] = field(default_factory=dict, init=False)
    _open: Counter[int] = field(default_factory=Counter, init=False)
    """Links by client."""
    _parting: set[Link] | None = field(default=None, init=False)
    _over: Callable[[], None] | None = field(default=None, init=False)
    _newest: int = field(default=0, init=False)
    _present: frozenset[int] = field(default_factory=frozenset, init=False)

    # --- uploads ------------------------------------------------------------------------

    def put(self, link: Link, put: Put, buffers: Buffers) -> list[Action]:
        """Shards of an upload for devices of this host; or of a slice that moves here."""
        if link.peer["role"] != "host":
            self._check_own(link, put.slice, "slice")
            self._check_own(link, put.buffer, "buffer")
            self._check_room(link, buffers)
            if self._launcher.buffers.get(put.buffer) is not None:
                return []  # who sent it did not live to hear of it, and it was sent again
        moved = self.moved.get(put.slice)
        if moved is not None and put.generation < moved.generation:
            # Its client had not heard yet where the slice lies now.
            parts = put.parts(buffers)
            if not parts.keys() <= set(range(len(moved.devices))):
                devices = f"devices {sorted(parts)}, and has {len(moved.devices)}"
                raise ValueError(f"an upload for slice {put.slice} is for its {devices}")
            return self.send_on(moved, fields_of(put.buffer, put.value), parts)
        return self._put(_Letter(link, put, buffers))

    def send_on(
        self, binding: SliceBinding, fields: dict[str, Any], parts: Mapping[int, Any]
    ) -> list[Action]:
        """Shards, by virtual device, to the hosts of these devices; this one may be among them."""
        actions: list[Action] = []
        by_host: dict[str, list[int]] = {}
        for number in parts:
            by_host.setdefault(binding.devices[number][0], []).append(number)
        for host, numbers in by_host.items():
            letter = {**fields, "devices": numbers, "generation": binding.generation}
            data = [parts[number] for number in numbers]
            if host == self._host:
                actions += self._put(_Letter(None, unpack_fields(Put, letter), data))
            else:

                def done(error: Exception | None, host: str = host) -> None:
                    if error is not None:
                        why = f"a value could not be sent to {host}: {error}"
                        self._reports.unmoved(binding.slice, why)

                self._exchange.submit(self._peers.send, host, "put", letter, data, done)
        return actions

    def _put(self, letter: _Letter) -> list[Action]:
        put = letter.put
        slice_id, buffer, value = put.slice, put.buffer, put.value
        parts = put.parts(letter.buffers)  # refused while its sender is known
        place, binding = self._tenants.where(slice_id), self._tenants.binding(slice_id)
        here = binding.generation if binding is not None else -1
        if place is None or here < put.generation:
            # The client heard of the slice before we did, or its devices are being opened.
            self._wait(letter)
            return []
        if isinstance(place, Failure):
            return self._uploaded(buffer, value, place, here)
        if strange := parts.keys() - set(place.numbers):
            raise ValueError(
                f"devices {sorted(strange)} of slice {slice_id} are not on {self._host}"
            )
        upload = self._uploads.setdefault(buffer, _Upload(value))
        upload.letters.append(letter)
        upload.parts.update(parts)
        self._count(letter, 1)
        if len(upload.parts) == len(place.numbers):
            del self._uploads[buffer]

            def put_together(result: Any) -> list[Action]:
                self._uncount(upload)
                return self._uploaded(buffer, value, result, here)

            self._exchange.submit(
                self._exchange.upload,
                value,
                place,
                upload.parts,
                put_together,
                nbytes=value.nbytes * len(place.numbers),
            )
        return []

    def _check_room(self, link: Link, more: Buffers) -> None:
        """Raise ValueError for more than a client may leave here; it may come by many links.

        The devices' memory counts for complete uploads only.  The control plane has no part in
        it: it reserves memory on devices, and the bytes are here whether it has done so or not.
        """
        waiting, complete = self._waiting[link.holder], self._launcher.buffers.uploaded[link.holder]
        memory = self._launcher.memory.limit or 0
        most = unfinished_bytes(memory)
        nbytes = sum([len(data) for data in more])
        if waiting and waiting + nbytes > most:
            raise ValueError(
                f"uploads of client {link.holder} that are not complete take {waiting:,} bytes of"
                f" {self._host}; {most:,} are allowed"
            )
        most += memory * self._devices
        if complete and complete + waiting + nbytes > most:
            raise ValueError(
                f"uploads of client {link.holder} that no computation has read take"
                f" {complete + waiting:,} bytes of {self._host}; {most:,} are allowed: drop handles"
                " of uploads, or wait for the runs that read them"
            )

    def _count(self, letter: _Letter, sign: int) -> None:
        if letter.link is not None:
            self._waiting[letter.link.holder] += sign * letter.nbytes

    def _wait(self, letter: _Letter) -> None:
        """For the devices of its slice."""
        self._early.setdefault(letter.put.slice, []).append(letter)
        self._count(letter, 1)

    def _take_early(self, slice_id: SliceId) -> list[_Letter]:
        letters = self._early.pop(slice_id, [])
        for letter in letters:
            self._count(letter, -1)
        return letters

    def _forget_upload(self, buffer: int) -> None:
        upload = self._uploads.pop(buffer, None)
        if upload is not None:
            self._uncount(upload)

    def _uncount(self, upload: _Upload) -> None:
        for letter in upload.letters:
            self._count(letter, -1)

    def _uploaded(self, buffer: int, value: Value, result: Any, generation: int) -> list[Action]:
        assert value.slice is not None
        moved = self.moved.get(value.slice)
        if moved is not None and generation < moved.generation:
            # The slice has moved while its bytes were being put together.
            parts = None if isinstance(result, Failure) else arrays.at_home(result)
            return [] if parts is None else self.send_on(moved, fields_of(buffer, value), parts)
        # Also when it failed: whoever uses it is told why; waiting would be for nothing.
        self._reports.resident(buffer)
        if self._tenants.where(value.slice) is None:
            return []
        return self._launcher.uploaded(buffer, value, result)

    def opened(self, slice_id: SliceId) -> list[Action]:
        """The slice's devices are known now: take what came too early."""
        actions: list[Action] = []
        for letter in self._take_early(slice_id):
            try:
                actions += self._put(letter)
            except ValueError as error:
                if letter.link is None:
                    raise
                letter.link.close(f"{self._host} did not understand 'put': {error!r}")
        return actions

    def unfinished(self, slice_id: SliceId) -> list[tuple[int, Value, dict[int, Any]]]:
        """Uploads to a slice of which parts are missing, taken out: buffer, value, parts."""
        found = [(b, u) for b, u in self._uploads.items() if u.value.slice == slice_id]
        for buffer, _ in found:
            self._forget_upload(buffer)
        return [(buffer, upload.value, upload.parts) for buffer, upload in found]

    def take_early(self, binding: SliceBinding) -> list[tuple[dict[str, Any], dict[int, Any]]]:
        """Shards that came before the slice's devices were open, taken out.

        Nothing was known of these devices when they came: what is for others is dropped.
        """
        letters = self._take_early(binding.slice)
        early = [
            (fields_of(each.put.buffer, each.put.value), each.put.parts(each.buffers))
            for each in letters
        ]
        devices = set(range(len(binding.devices)))
        return [(fields, parts) for fields, parts in early if parts.keys() <= devices]

    def redirect(self, binding: SliceBinding) -> None:
        """Clients that wait for values of a slice that has moved shall ask there."""
        asked: list[Fetch] = []

        def of_slice(fetch: object) -> bool:
            if isinstance(fetch, Fetch) and fetch.slice == binding.slice:
                asked.append(fetch)
                return True
            return False

        self._launcher.forget_fetches(of_slice)
        for fetch in asked:
            self._answer(fetch, "fetch-moved", {"binding": pack(binding)}, [])

    def free(self, buffers: tuple[int, ...]) -> None:
        """The client has dropped these; parts of them may still be coming."""
        for buffer in buffers:
            self._forget_upload(buffer)

    # --- fetches ------------------------------------------------------------------------

    def fetch(self, link: Link, ask: Ask, _: Buffers) -> list[Action]:
        """A client wants shards; it is answered when they are there."""
        buffer = ask.buffer
        if ask.ticket is None:
            self._check_own(link, buffer, "buffer")
        elif not hmac.compare_digest(ask.ticket, ticket_of(self._key, buffer, link.holder)):
            raise ValueError(f"this ticket does not let client {link.holder} read {buffer}")
        if self._asked[link] >= _ASKED:
            raise ValueError(f"{_ASKED:,} questions of client {link.holder} are open already")
        fetch = self._asking(Fetch(link, ask.id, ask.devices, ask.slice, ask.leaf))
        moved = self.moved.get(ask.slice)
        if moved is not None and ask.generation < moved.generation:
            self._answer(fetch, "fetch-moved", {"binding": pack(moved)}, [])
            return []
        return self._launcher.fetch(fetch, buffer)

    def _asking(self, fetch: Fetch) -> Fetch:
        self._asked[fetch.link] += 1
        return fetch

    def expect(self, client: int, number: int, buffer: int) -> list[Action]:
        """A client that waits for each call is told when this is there, without asking."""
        link = self._links.get(client)
        if link is None:
            return []
        return self._launcher.fetch(self._asking(Fetch(link, number, ())), buffer)

    def serve(self, serve: Serve) -> list[Action]:
        """The launcher has what a fetch asked for."""
        fetch = serve.fetch
        assert isinstance(fetch, Fetch)
        if not fetch.devices:
            # Only whether it is there was asked.
            self._answer(fetch, "fetched", {}, [])
            return self._launcher.served(serve.slot, serve.reader)
        place = self._tenants.where(serve.slot.value.slice)
        if not isinstance(place, Place):
            released = Failure("lost", "the slice of the buffer was released")
            return self._served(serve, serve.slot.value, place or released)
        value, payload = serve.slot.value, serve.slot.payload
        if value.leaves:
            if fetch.leaf >= (count := len(value.leaves)):
                wrong = Failure("refused", f"array {fetch.leaf} of a bundle that has {count}")
                return self._served(serve, value, wrong)
            value, payload = leaf(value, fetch.leaf), payload[fetch.leaf]
        self._exchange.submit(
            self._exchange.read,
            payload,
            place,
            fetch.devices,
            lambda result: self._served(serve, value, result),
            nbytes=value.nbytes * len(fetch.devices),
        )
        return []

    def _served(
        self, serve: Serve, value: Value, result: list[memoryview] | Failure
    ) -> list[Action]:
        fetch = serve.fetch
        assert isinstance(fetch, Fetch)
        if isinstance(result, Failure):
            self.refuse(fetch, serve.slot.failure or result)
        else:
            shape = list(arrays.logical_shard(value))
            self._answer(fetch, "fetched", {"shape": shape, "dtype": value.dtype}, result)
        return self._launcher.served(serve.slot, serve.reader)

    def refuse(self, fetch: Fetch, failure: Failure) -> None:
        """There is nothing to be had."""
        self._answer(fetch, "fetch-failed", {"failure": pack(failure)}, [])

    def _answer(self, fetch: Fetch, op: str, fields: dict[str, Any], buffers: Buffers) -> None:
        self._asked[fetch.link] -= 1
        with contextlib.suppress(LinkClosed):
            fetch.link.send(op, {"id": fetch.id, **fields}, buffers)
        self._part()

    # --- the end of this host ---------------------------------------------------------------

    def hand_over(self, over: Callable[[], None]) -> None:
        """Nothing runs here any more: over() when clients have all that they have asked for.

        The control plane tells clients of what will never be here.
        """
        self._over = over

        def never(fetch: object) -> bool:
            assert isinstance(fetch, Fetch)
            self._asked[fetch.link] -= 1
            return True

        self._launcher.forget_fetches(never)
        self._part()

    def parted(self, link: Link, *_: object) -> None:
        """A client has taken everything that came before it was asked."""
        if self._parting is not None:
            self._parting.discard(link)
            self._part()

    def _part(self) -> None:
        if self._over is None or any(count > 0 for count in self._asked.values()):
            return
        if self._parting is None:
            # What a link has taken may still be on its way: its other end has to say so.
            self._parting = set(self._asked)
            for link in tuple(self._parting):
                try:
                    link.send("parting", {})
                except LinkClosed:
                    self._parting.discard(link)
        if not self._parting:
            over, self._over = self._over, None
            over()

    # --- who may ----------------------------------------------------------------------------

    def meet(self, link: Link, hello: dict[str, Any]) -> dict[str, Any]:
        """Somebody has proved a key of this door.  Raises Refused."""
        role = hello.get("role")
        if role not in ("host", "client") or (link.holder and role == "host"):
            raise Refused("hosts and clients meet here, each with a key of its own")
        if self._gone(link):
            raise Refused(f"client {link.holder} has left the lab")
        if role == "client":
            if self._open[link.holder] >= _LINKS:
                raise Refused(f"client {link.holder} has {_LINKS} links to {self._host} already")
            self._open[link.holder] += 1
            self._links[link.holder] = link
        return {"role": "host", "name": self._host}

    def clients(self, newest: int, present: Iterable[int], links: Iterable[Link]) -> None:
        """Numbers of the clients that are connected, up to *newest*: the others have left.

        links: those that are open now; nobody who has left is heard any more.
        """
        self._newest, self._present = newest, frozenset(present)
        self.moved = {s: b for s, b in self.moved.items() if s >> 32 in self._present}
        for link in links:
            if self._gone(link):
                link.close("this client has left the lab")

    def _gone(self, link: Link) -> bool:
        return 0 < link.holder <= self._newest and link.holder not in self._present

    def _check_own(self, link: Link, identity: int, what: str) -> None:
        if identity >> 32 != link.holder:
            raise ValueError(f"{what} {identity} does not belong to client {link.holder}")

    # --- clients that go ------------------------------------------------------------------

    def closed(self, link: Link) -> None:
        """A client's link is gone, with what it had not finished."""
        if link.peer.get("role") == "client":
            self._open[link.holder] -= 1
            if not self._open[link.holder]:
                del self._open[link.holder]
        if self._links.get(link.holder) is link:
            del self._links[link.holder]
        self._launcher.forget_fetches(lambda f: isinstance(f, Fetch) and f.link is link)
        self._asked.pop(link, None)
        self.parted(link)
        of_link = [b for b, u in self._uploads.items() if any(k.link is link for k in u.letters)]
        for buffer in of_link:
            self._forget_upload(buffer)
        slices = [s for s, early in self._early.items() if any(k.link is link for k in early)]
        for slice_id in slices:
            for letter in self._take_early(slice_id):
                if letter.link is not link:
                    self._wait(letter)


def fields_of(buffer: int, value: Value) -> dict[str, Any]:
    """The description of a value that is uploaded, for any devices."""
    assert value.slice is not None
    return upload_fields(buffer, value.slice, value.shape, value.dtype, value.layout, value.leaves)
