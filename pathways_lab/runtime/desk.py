"""The host's desk for clients: uploads that come in, values that are asked for.

Problem: clients send and fetch bytes over links of their own, in no order with
what the control plane says: a part of an upload may come before this host has
heard of its slice, a fetch before its buffer exists, and the client may vanish
in the middle.  And clients may be curious, or worse: each has proved its number
when it connected, and has no business with what bears another's.

Rule for maintainers: runs in the reactor's thread; bytes are handled by the
exchange.  What a client sends may be wrong: that raises ValueError, KeyError
or TypeError, which closes its link and changes nothing.  Rights are checked
before anything else is looked at.

Paper: section 4.2 (data move between client and hosts only on demand).
"""

from __future__ import annotations

import hmac
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pathways_lab.core.errors import Failure
from pathways_lab.core.layout import Layout
from pathways_lab.core.program import SliceId, Value
from pathways_lab.core.topology import SliceBinding
from pathways_lab.runtime import arrays
from pathways_lab.runtime.actions import Action, Serve
from pathways_lab.runtime.auth import ticket_of
from pathways_lab.runtime.codec import pack, unpack
from pathways_lab.runtime.devices import Place
from pathways_lab.runtime.exchange import Exchange
from pathways_lab.runtime.handshake import Refused
from pathways_lab.runtime.launch import Launcher
from pathways_lab.runtime.link import Link, LinkClosed

Buffers = list[memoryview]
Where = Callable[[SliceId | None], Place | Failure | None]


_UNFINISHED = 4
"""Memories of a device, of 1 GiB at least, that a client may fill on a host with uploads that are
not complete."""


@dataclass(slots=True)
class _Upload:
    """Parts of an upload, by device number."""

    value: Value
    parts: dict[int, Any] = field(default_factory=dict)
    links: set[Link] = field(default_factory=set)


@dataclass(frozen=True, slots=True, eq=False)
class Fetch:
    """A question of a client: some shards of a buffer.  slice: where it is, or 0: not said."""

    link: Link
    id: int
    devices: tuple[int, ...]
    slice: SliceId = 0


class Desk:
    """Uploads and fetches of one host.

    key: of the door at which clients come in.
    where(slice): its place, why it has none, or None while that is not known.
    carry_out: for the launcher's actions.  resident(buffer): report it.
    binding(slice): where it lies, as far as this host was told.
    moved: where slices lie that have left this host, or moved within it.
    send_on(binding, fields, parts): what came for devices of other hosts.
    """

    def __init__(
        self,
        host: str,
        key: bytes,
        launcher: Launcher,
        exchange: Exchange,
        where: Where,
        carry_out: Callable[[list[Action]], None],
        resident: Callable[[int], None],
        binding: Callable[[SliceId], SliceBinding | None],
    ) -> None:
        self.moved: dict[SliceId, SliceBinding] = {}
        self.send_on: Callable[[SliceBinding, dict[str, Any], dict[int, Any]], None]
        self._binding = binding
        self._host = host
        self._key = key
        self._launcher = launcher
        self._exchange = exchange
        self._where = where
        self._carry_out = carry_out
        self._resident = resident
        self._uploads: dict[int, _Upload] = {}
        self._early: dict[SliceId, list[tuple[Link | None, dict[str, Any], Buffers]]] = {}
        self._links: dict[int, Link] = {}
        self._newest = 0
        self._present: frozenset[int] = frozenset()

    # --- uploads ------------------------------------------------------------------------

    def put(self, link: Link, fields: dict[str, Any], buffers: Buffers) -> None:
        """Shards of an upload for devices of this host; or of a slice that moves here."""
        slice_id, buffer = int(fields["slice"]), int(fields["buffer"])
        if link.peer["role"] != "host":
            self._check_own(link, slice_id, "slice")
            self._check_own(link, buffer, "buffer")
            self._check_room(link, buffers)
            if self._launcher.buffers.get(buffer) is not None:
                return  # who sent it did not live to hear of it, and it was sent again
        moved = self.moved.get(slice_id)
        if moved is not None and int(fields.get("generation", 0)) < moved.generation:
            # Its client had not heard yet where the slice lies now.
            _value(fields)
            parts = _parts(fields, buffers)
            if not parts.keys() <= set(range(len(moved.devices))):
                devices = f"devices {sorted(parts)}, and has {len(moved.devices)}"
                raise ValueError(f"an upload for slice {slice_id} is for its {devices}")
            self.send_on(moved, _plain(fields), parts)
            return
        self._put(link, fields, buffers)

    def put_here(self, fields: dict[str, Any], buffers: Buffers) -> None:
        """Shards that lie on this host already, of a slice that moves within it."""
        self._put(None, fields, buffers)

    def _put(self, link: Link | None, fields: dict[str, Any], buffers: Buffers) -> None:
        slice_id, buffer = int(fields["slice"]), int(fields["buffer"])
        value, parts = _value(fields), _parts(fields, buffers)  # refused while its sender is known
        place, binding = self._where(slice_id), self._binding(slice_id)
        here = binding.generation if binding is not None else -1
        if place is None or here < int(fields.get("generation", 0)):
            # The client heard of the slice before we did, or its devices are being opened.
            self._early.setdefault(slice_id, []).append((link, fields, buffers))
            return
        if isinstance(place, Failure):
            self._uploaded(buffer, value, place, here)
            return
        upload = self._uploads.setdefault(buffer, _Upload(value))
        if link is not None:
            upload.links.add(link)
        for device, data in parts.items():
            if device not in place.numbers:
                raise ValueError(f"device {device} of slice {slice_id} is not on {self._host}")
            upload.parts[device] = data
        if len(upload.parts) == len(place.numbers):
            del self._uploads[buffer]
            self._exchange.submit(
                self._exchange.upload,
                value,
                place,
                upload.parts,
                lambda result: self._uploaded(buffer, value, result, here),
                nbytes=value.nbytes * len(place.numbers),
            )

    def _check_room(self, link: Link, more: Buffers) -> None:
        """What is not complete is counted by nobody else; a client may come by many links."""
        holder = link.holder
        uploads = [u for u in self._uploads.values() if any(k.holder == holder for k in u.links)]
        early = [p for puts in self._early.values() for p in puts if p[0] and p[0].holder == holder]
        parts = [d for u in uploads for d in u.parts.values()] + [d for p in early for d in p[2]]
        waiting = sum([len(data) for data in parts])
        most = _UNFINISHED * max(self._launcher.memory.limit or 0, 1 << 30)
        if waiting and waiting + sum([len(data) for data in more]) > most:
            raise ValueError(
                f"uploads of client {link.holder} that are not complete take {waiting:,} bytes of"
                f" {self._host}; {most:,} are allowed"
            )

    def _uploaded(self, buffer: int, value: Value, result: Any, generation: int) -> None:
        assert value.slice is not None
        moved = self.moved.get(value.slice)
        if moved is not None and generation < moved.generation:
            # The slice has moved while its bytes were being put together.
            if isinstance(result, arrays.OnDemand) and (shards := result.shards()) is not None:
                fields = arrays.upload_fields(
                    buffer, value.slice, value.shape, value.dtype, value.layout
                )
                parts = {n: arrays.as_bytes(shard) for n, shard in shards.items()}
                self.send_on(moved, fields, parts)
            return
        if self._where(value.slice) is not None:
            self._carry_out(self._launcher.uploaded(buffer, value, result))
        # Also when it failed: whoever uses it is told why; waiting would be for nothing.
        self._resident(buffer)

    def opened(self, slice_id: SliceId) -> None:
        """The slice's devices are known now: take what came too early."""
        for link, fields, buffers in self._early.pop(slice_id, []):
            try:
                self._put(link, fields, buffers)
            except (KeyError, TypeError, ValueError) as error:
                if link is None:
                    raise
                link.close(f"{self._host} did not understand 'put': {error!r}")

    def unfinished(self, slice_id: SliceId) -> list[tuple[int, Value, dict[int, Any]]]:
        """Uploads to a slice of which parts are missing, taken out: buffer, value, parts."""
        found = [(b, u) for b, u in self._uploads.items() if u.value.slice == slice_id]
        for buffer, _ in found:
            del self._uploads[buffer]
        return [(buffer, upload.value, upload.parts) for buffer, upload in found]

    def take_early(self, binding: SliceBinding) -> list[tuple[dict[str, Any], dict[int, Any]]]:
        """Shards that came before the slice's devices were open, taken out.

        Nothing was known of these devices when they came: what is for others is dropped.
        """
        early = [
            (_plain(fields), _parts(fields, buffers))
            for _, fields, buffers in self._early.pop(binding.slice, [])
        ]
        devices = set(range(len(binding.devices)))
        return [(fields, parts) for fields, parts in early if parts.keys() <= devices]

    def redirect(self, binding: SliceBinding) -> None:
        """Who waits for values of a slice that has moved shall ask there."""
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
            self._uploads.pop(buffer, None)

    # --- fetches ------------------------------------------------------------------------

    def fetch(self, link: Link, fields: dict[str, Any], _: Buffers) -> None:
        """A client wants shards; it is answered when they are there."""
        buffer = int(fields["buffer"])
        ticket = fields.get("ticket")
        if ticket is None:
            self._check_own(link, buffer, "buffer")
        elif not hmac.compare_digest(bytes(ticket), ticket_of(self._key, buffer, link.holder)):
            raise ValueError(f"this ticket does not let client {link.holder} read {buffer}")
        devices = tuple(int(d) for d in fields["devices"])
        fetch = Fetch(link, int(fields["id"]), devices, int(fields.get("slice", 0)))
        moved = self.moved.get(fetch.slice)
        if moved is not None and int(fields.get("generation", 0)) < moved.generation:
            self._answer(fetch, "fetch-moved", {"binding": pack(moved)}, [])
            return
        self._carry_out(self._launcher.fetch(fetch, buffer))

    def expect(self, client: int, number: int, buffer: int) -> None:
        """A client that waits for each call is told when this is there, without asking."""
        link = self._links.get(client)
        if link is not None:
            self._carry_out(self._launcher.fetch(Fetch(link, number, ()), buffer))

    def serve(self, serve: Serve) -> None:
        """The launcher has what a fetch asked for."""
        fetch = serve.fetch
        assert isinstance(fetch, Fetch)
        if not fetch.devices:
            # Only whether it is there was asked.
            self._answer(fetch, "fetched", {}, [])
            self._carry_out(self._launcher.served(serve.slot, serve.reader))
            return
        place = self._where(serve.slot.value.slice)
        if not isinstance(place, Place):
            released = Failure("lost", "the slice of the buffer was released")
            self._served(serve, place or released)
            return
        self._exchange.submit(
            self._exchange.read,
            serve.slot.payload,
            place,
            fetch.devices,
            lambda result: self._served(serve, result),
            nbytes=serve.slot.value.nbytes * len(fetch.devices),
        )

    def _served(self, serve: Serve, result: list[memoryview] | Failure) -> None:
        value, fetch = serve.slot.value, serve.fetch
        assert isinstance(fetch, Fetch)
        if isinstance(result, Failure):
            self.refuse(fetch, serve.slot.failure or result)
        else:
            shape = list(arrays.logical_shard(value))
            self._answer(fetch, "fetched", {"shape": shape, "dtype": value.dtype}, result)
        self._carry_out(self._launcher.served(serve.slot, serve.reader))

    def refuse(self, fetch: Fetch, failure: Failure) -> None:
        """There is nothing to be had."""
        self._answer(fetch, "fetch-failed", {"failure": pack(failure)}, [])

    def _answer(self, fetch: Fetch, op: str, fields: dict[str, Any], buffers: Buffers) -> None:
        try:
            fetch.link.send(op, {"id": fetch.id, **fields}, buffers)
        except LinkClosed:
            return

    # --- who may ----------------------------------------------------------------------------

    def meet(self, link: Link, hello: dict[str, Any]) -> dict[str, Any]:
        """Somebody has proved a key of this door.  Raises Refused."""
        role = hello.get("role")
        if role not in ("host", "client") or (link.holder and role == "host"):
            raise Refused("hosts and clients meet here, each with a key of its own")
        if self._gone(link):
            raise Refused(f"client {link.holder} has left the lab")
        if role == "client":
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
        if self._links.get(link.holder) is link:
            del self._links[link.holder]
        self._launcher.forget_fetches(lambda f: isinstance(f, Fetch) and f.link is link)
        for buffer in [b for b, upload in self._uploads.items() if link in upload.links]:
            del self._uploads[buffer]
        for puts in self._early.values():
            puts[:] = [put for put in puts if put[0] is not link]


def _value(fields: Mapping[str, Any]) -> Value:
    """What is uploaded.  Raises KeyError, ValueError and TypeError for what is no array."""
    layout = unpack(Layout, fields["layout"])
    return arrays.with_bytes(
        tuple(fields["shape"]), str(fields["dtype"]), int(fields["slice"]), layout
    )


def _parts(fields: Mapping[str, Any], buffers: Buffers) -> dict[int, Any]:
    """Shards by virtual device.  Raises ValueError and TypeError for what are none."""
    return {int(device): part for device, part in zip(fields["devices"], buffers, strict=True)}


def _plain(fields: dict[str, Any]) -> dict[str, Any]:
    """What a letter says of its array, whatever its devices."""
    return {name: fields[name] for name in ("buffer", "slice", "shape", "dtype", "layout")}
