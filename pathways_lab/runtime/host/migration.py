"""Values of suspended slices: into the host's own memory, and on to other hosts.

Problem: a client's slices give their devices away for a while, and may come
back on others, without the client's help; its handles must stay good, also
those that it reads meanwhile, and its uploads and questions may come at any
moment, also to hosts that the slice has left.

How: a parked value is stored like an upload before its first reader, as shards in the
host's memory (:class:`pathways_lab.runtime.arrays.OnDemand`).  A slice that
comes back to its devices needs nothing else.  One that moves keeps its mesh, so
each shard goes whole to the host of its virtual device, as an upload of that
host's; and a host that was left sends on what still comes for the slice.

Rule for maintainers: runs in the reactor's thread; the transfer engine handles bytes.  A
binding's generation says which devices a message means.

Paper: section 4.2 (suspend, resume, migration of a client's slices).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pathways_lab.core.errors import Failure
from pathways_lab.core.program.bundles import arrays_of
from pathways_lab.core.program.program import SliceId, Value
from pathways_lab.core.slices.topology import SliceBinding
from pathways_lab.executor.actions import Action
from pathways_lab.executor.launcher import Launcher
from pathways_lab.executor.local_array import READY, Slot
from pathways_lab.runtime import arrays
from pathways_lab.runtime.devices import Place
from pathways_lab.runtime.host.client_io import Desk, fields_of
from pathways_lab.runtime.host.local_slices import Tenants
from pathways_lab.runtime.host.reports import Reports
from pathways_lab.runtime.host.transfer_engine import Exchange

Shards = Mapping[int, Any]


@dataclass(eq=False, repr=False)
class Parking:
    """The slices of one host that are suspended, or that have moved."""

    _host: str
    _launcher: Launcher
    _tenants: Tenants
    _desk: Desk
    _exchange: Exchange
    _reports: Reports

    # --- off the devices -------------------------------------------------------------------

    def park(self, slice_id: SliceId) -> None:
        """Nothing runs on the slice: take its values into the host's own memory."""
        place = self._tenants.where(slice_id)
        slots = self._slots(slice_id) if isinstance(place, Place) else {}
        for slot in slots.values():
            self._launcher.buffers.use(slot)
        payloads = arrays.spread([slot.payload for slot in slots.values()])
        self._exchange.submit(
            self._exchange.take_home,
            payloads,
            place,
            lambda homes: self._parked(slice_id, list(slots.values()), homes),
        )

    def _slots(self, slice_id: SliceId) -> dict[int, Slot]:
        """By buffer, what has its value here."""
        buffers = self._launcher.buffers
        found = {number: buffers.get(number) for number in buffers.on_slice(slice_id)}
        return {
            number: slot
            for number, slot in found.items()
            if slot is not None and slot.state == READY and slot.payload is not None
        }

    def _parked(
        self, slice_id: SliceId, slots: Sequence[Slot], homes: Sequence[Shards] | Failure
    ) -> list[Action]:
        buffers = self._launcher.buffers
        if isinstance(homes, Failure):
            for slot in slots:
                buffers.release(slot)
            self._reports.unmoved(slice_id, homes.message)
            return []
        values = [slot.value for slot in slots]
        leaves = zip(arrays_of(values), homes, strict=True)
        parked = [self._home(slice_id, value, shards) for value, shards in leaves]
        for slot, payload in zip(slots, arrays.gathered(parked, values), strict=True):
            if slot.payload is not None:
                slot.payload = payload
                buffers.uncount(slot)
            buffers.release(slot)
        self._reports.parked(slice_id)
        return self._launcher.free(())  # there is room for what waited

    def _home(self, slice_id: SliceId, value: Value, shards: Shards) -> arrays.OnDemand:
        return arrays.OnDemand(value, lambda _: shards, lambda: self._tenants.place(slice_id))

    # --- to other hosts --------------------------------------------------------------------

    def move(self, binding: SliceBinding) -> list[Action]:
        """The slice lies elsewhere from now on, also if partly here: send on what it has."""
        slice_id = binding.slice
        values: list[tuple[int, Value, Shards]] = []
        for number, slot in self._slots(slice_id).items():
            data = arrays.at_home(slot.payload)
            if data is None:
                self._reports.unmoved(slice_id, f"a value of it was not parked on {self._host}")
                return []
            values.append((number, slot.value, data))
        values += self._desk.unfinished(slice_id)
        early = self._desk.take_early(binding)
        actions = self._tenants.leave(slice_id)
        self._desk.moved[slice_id] = binding
        self._desk.redirect(binding)
        for number, value, parts in values:
            actions += self._desk.send_on(binding, fields_of(number, value), parts)
        for fields, parts in early:
            actions += self._desk.send_on(binding, fields, parts)
        self._reports.moved(slice_id)
        return actions
