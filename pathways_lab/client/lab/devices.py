"""Virtual devices, and the slices that they are cut into.

Problem: a user's program names devices before it is known where they are, in
a process that owns none.  A :class:`VirtualDevice` looks to JAX like a device,
so that ``jax.sharding.Mesh``, shardings, ``shard_map``, tracing and lowering
work on it unchanged; nothing can be computed on it here.  A :class:`Slice` is
a mesh of them that the control plane has bound to physical devices of one
island.

Rule for maintainers: no connection is made here; a slice knows its lab only
through :class:`Owner`.

Paper: section 3 (virtual device sets), section 4.1 (resource manager).
"""

from __future__ import annotations

import functools
import html
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import jax
from jax.core import Tracer
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pathways_lab.client.functions.array_types import ArrayType
from pathways_lab.client.session import failures, in_jax
from pathways_lab.core.errors import Failure, PathwaysError
from pathways_lab.core.program.layout import Layout
from pathways_lab.core.program.program import SliceId, slice_name
from pathways_lab.core.slices.topology import SliceBinding
from pathways_lab.runtime import virtual_devices as bindings
from pathways_lab.runtime.devices import mesh_of
from pathways_lab.timeline.text_table import TextTable

ONCE = "use each axis of the slice's mesh at most once, and None for a dimension that stays whole"
"""The remedy for a spec that names an axis twice."""


class Owner(Protocol):
    """The part of a lab that a slice needs."""

    @property
    def session(self) -> Any:
        """The connection and what runs on it."""

    def release_slice(self, slice_id: SliceId) -> None:
        """Give the devices back."""

    def rebind_slice(self, slice_id: SliceId, island: str | None) -> SliceBinding:
        """Other devices for a slice that has lost its own."""

    def slice_state(self, slice_id: SliceId) -> str:
        """``"bound"``, ``"suspended"`` or ``"lost"``."""


class VirtualClient:
    """The part of ``device.client`` that JAX asks for: only names."""

    runtime_type = "virtual"

    def __init__(self, platform: str) -> None:
        self.platform = platform

    def process_index(self) -> int:
        """That of this process: arrays on the slice are for it to make and to read."""
        return 0

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"virtual devices have no {name!r}\n  remedy: lab.open_door().devices are JAX's own;"
            " pw.jit, pw.pmap and pw.device_put take virtual ones"
        )


class VirtualDevice:
    """One device of a slice: goes where JAX takes a device.

    id: unique in this kernel.  slice: the :class:`Slice`.  number: row-major
    position in it.  host: the physical host behind it.
    """

    def __init__(self, owner: Slice, number: int, identity: int) -> None:
        self.slice = owner
        self.number = number
        self.id = identity
        self.local_hardware_id = number
        self.process_index = 0
        self.platform = owner.kind
        self.device_kind = f"virtual {owner.kind}"
        self.client = owner.client

    @property
    def host(self) -> str:
        return self.slice.binding.devices[self.number][0]

    def __repr__(self) -> str:
        return f"VirtualDevice({self.slice.name}, {self.number})"

    __str__ = __repr__

    def __reduce__(self) -> tuple[Any, ...]:
        return _device_of, (self.slice, self.number)


_KERNEL = os.urandom(8)
"""Tells this process's identities from those of others."""
_next_identity = 0


def _identities(count: int) -> range:
    global _next_identity
    first, _next_identity = _next_identity, _next_identity + count
    return range(first, first + count)


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Placed:
    """The type, layout and slice that many arrays share: one object for them all.

    So a call like an earlier one is known by what its arguments are, without comparing it.
    """

    type: ArrayType
    slice: Slice
    layout: Layout


class Slice:
    """A mesh of virtual devices on one island, or on several.

    shape, axes: sizes and names of the mesh axes.  binding: the physical
    devices, which may become others.  gone: why its lab is gone, if it is.
    taken: it is another client's; values on it were taken by name, nothing is computed there.
    Use :attr:`mesh` wherever JAX takes a mesh, and ``on=slice`` in ``pw.jit``.
    """

    _ends = 0
    """How many slices were released in this process."""

    def __init__(self, binding: SliceBinding, owner: Owner | None = None) -> None:
        self.binding = binding
        self.id = binding.slice
        self.name = slice_name(binding.slice)
        self.shape = binding.shape
        self.axes = binding.axes
        self.kind = binding.kind
        self.client = VirtualClient(binding.kind)
        self.released = self.taken = False
        self.gone: Failure | None = None
        self.owner = owner
        self._placed: weakref.WeakValueDictionary[tuple[ArrayType, Layout], Placed] = (
            weakref.WeakValueDictionary()
        )
        identities = _identities(len(binding.devices))
        self.devices: tuple[VirtualDevice, ...] = tuple(
            VirtualDevice(self, number, identity) for number, identity in enumerate(identities)
        )
        self._identity = (_KERNEL, identities.start)
        _slices[self._identity] = self

    @property
    def tpus(self) -> list[VirtualDevice]:
        """The devices, as the paper names them, whatever their kind."""
        return list(self.devices)

    @property
    def island(self) -> str:
        """The island on which its devices are; of a slice that spans several, the first."""
        return self.binding.island

    @property
    def islands(self) -> tuple[str, ...]:
        """The islands that it spans, usually one."""
        return self.binding.islands

    @property
    def hosts(self) -> tuple[str, ...]:
        """The host of each device."""
        return tuple(host for host, _ in self.binding.devices)

    @property
    def axis_sizes(self) -> tuple[tuple[str, int], ...]:
        """``((axis name, size), ...)``: the mesh of a layout."""
        return tuple(zip(self.axes, self.shape, strict=True))

    @property
    def mesh(self) -> Mesh:
        """The slice as a ``jax.sharding.Mesh``, also for JAX's own functions.

        Its devices are virtual ones, and JAX's own once JAX has the lab's.
        """
        real = None if in_jax.door is None else in_jax.door.mesh_of(self)
        return real or self._virtual

    @functools.cached_property
    def _virtual(self) -> Mesh:
        return self.mesh_of(self.axis_sizes)

    def mesh_of(self, axes: tuple[tuple[str, int], ...]) -> Mesh:
        """The virtual devices, in the same order, as a mesh of other axes."""
        return mesh_of(self.devices, axes)

    def sharding(self, spec: PartitionSpec | None = None) -> NamedSharding:
        """``NamedSharding(slice.mesh, spec)``; without *spec* a whole copy on each device."""
        try:
            return NamedSharding(self.mesh, PartitionSpec() if spec is None else spec)
        except Exception as error:
            raise failures.refused(
                f"{spec!r} does not fit slice {self.name}: a PartitionSpec names each of its axes"
                f" ({', '.join(self.axes)}) at most once, and no others",
                ONCE,
            ) from error

    def holding(self, leaf: Any) -> Any:
        """A value of code that JAX compiles is here, cut in any way; others stay as they are."""
        if not isinstance(leaf, Tracer):
            return leaf
        spec = PartitionSpec(*[PartitionSpec.UNCONSTRAINED] * leaf.ndim)
        return jax.lax.with_sharding_constraint(leaf, self.sharding(spec))

    def placed(self, kind: ArrayType, layout: Layout) -> Placed:
        """Arrays of a type in a layout, here."""
        known = self._placed.get((kind, layout))
        return known or self._placed.setdefault((kind, layout), Placed(kind, self, layout))

    def release(self) -> None:
        """Give the devices back.  Its values stay until nobody has a handle to them.

        Runs that wait for a place on it are cancelled; what has one still ends.
        """
        if not self.released:
            owner = self.owner
            self.end()
            if owner is not None:
                owner.release_slice(self.id)

    def end(self, gone: Failure | None = None) -> None:
        """It is released.  gone: why, when it is with its lab.

        JAX remembers meshes long after their last use, and would remember the lab with them.
        """
        self.released, self.owner, self.gone = True, None, gone
        Slice._ends += 1

    def check(self) -> None:
        """Raises PathwaysError when it was released, or its lab is gone."""
        if self.gone is not None:
            raise PathwaysError(self.gone)
        if self.released:
            raise failures.refused(
                f"slice {self.name} was released", "ask for a new one: lab.slice(...)"
            )

    def rebind(self, island: str | None = None) -> Slice:
        """Get other devices for a slice that has lost its own; the same slice, to work with again.

        island: where; None: wherever there is room, best where it was.

        The virtual devices, the mesh and its shardings stay, and so do compiled
        functions and programs: nothing is captured, lowered or exported again, and
        a host that has compiled the code for these devices does not do it again.
        The values on it are lost: put them there again.  Raises PathwaysError when
        the slice is not lost, or there is no room.
        """
        self.check()
        if self.owner is None:
            raise failures.refused(
                f"slice {self.name} belongs to no running lab",
                "ask for one of your own: lab.slice(...)",
            )
        self.binding = self.owner.rebind_slice(self.id, island)
        return self

    @property
    def state(self) -> str:
        """``"bound"`` to devices, ``"suspended"``, ``"lost"`` with them, or ``"released"``.

        When its lab is closed, so are its slices.
        """
        if self.released or self.owner is None:
            return "released" if self.released else "bound"
        return self.owner.slice_state(self.id)

    def __enter__(self) -> Slice:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def __len__(self) -> int:
        return len(self.devices)

    def __repr__(self) -> str:
        axes = ", ".join(f"{name}={size}" for name, size in self.axis_sizes)
        state = "" if self.state == "bound" else f", {self.state}"
        return f"<Slice {self.name} ({axes}) on {' and '.join(self.islands)}{state}>"

    def _repr_html_(self) -> str:
        rows = [
            (str(d.number), host, str(local))
            for d, (host, local) in zip(self.devices, self.binding.devices, strict=True)
        ]
        table = TextTable(rows, ("device", "host", "its device"), "><>")._repr_html_()
        return f"<details><summary>{html.escape(repr(self))}</summary>{table}</details>"

    def __reduce__(self) -> tuple[Any, ...]:
        return _restored, (self.binding, self._identity)


_slices: weakref.WeakValueDictionary[tuple[bytes, int], Slice] = weakref.WeakValueDictionary()
"""Labs number their slices by themselves, so a kernel with two labs may have a number twice."""


def _restored(binding: SliceBinding, identity: tuple[bytes, int]) -> Any:
    """An unpickled slice: itself in its kernel; on a host its mesh of real devices."""
    known = _slices.get(identity)
    return known if known is not None else HostSlice(binding)


def _device_of(owner: Any, number: int) -> Any:
    """An unpickled virtual device, of what its slice is here."""
    return owner.devices[number]


class HostSlice:
    """A slice as code on its hosts sees it: its mesh, of physical devices."""

    def __init__(self, binding: SliceBinding) -> None:
        self.binding = binding
        self.id, self.shape, self.axes = binding.slice, binding.shape, binding.axes
        self.island, self.kind = binding.island, binding.kind

    @functools.cached_property
    def devices(self) -> tuple[Any, ...]:
        """Raises PathwaysError on a host that has no part in the slice."""
        return tuple(
            bindings.device(self.id, number) for number in range(len(self.binding.devices))
        )

    @property
    def tpus(self) -> list[Any]:
        return list(self.devices)

    @functools.cached_property
    def mesh(self) -> Mesh:
        return mesh_of(self.devices, tuple(zip(self.axes, self.shape, strict=True)))

    def sharding(self, spec: PartitionSpec | None = None) -> NamedSharding:
        return NamedSharding(self.mesh, PartitionSpec() if spec is None else spec)


def slice_of_devices(devices: Sequence[Any] | Slice) -> Slice:
    """The slice that a sequence of virtual devices makes up.

    Raises PathwaysError for local devices and for parts of a slice.
    """
    if isinstance(devices, Slice):
        return devices
    found = list(devices) if isinstance(devices, Iterable) else [devices]
    if not found or not all(isinstance(device, VirtualDevice) for device in found):
        raise failures.refused(
            f"devices={found!r} are not the virtual devices of a slice",
            "pass slice.tpus, or the slice itself",
        )
    owner: Slice = found[0].slice
    if found != list(owner.devices):
        raise failures.refused(
            f"{len(found)} devices are not slice {owner.name} ({len(owner.devices)} devices,"
            " in their own order)",
            f"ask for a slice of {len(found)} devices: add_slice(tpu_devices={len(found)})",
        )
    return owner


class Releasable(Protocol):
    """Something that uses slices."""

    @property
    def released(self) -> bool:
        """Whether one of them was released."""


_K = TypeVar("_K")
_R = TypeVar("_R", bound=Releasable)


class OnSlices(dict[_K, _R]):
    """Entries that use slices: :meth:`add` drops those whose slices were released since the last.

    Other threads may look entries up, or add some, at any time.  An addition costs the same
    however many there are, as long as no slice is released.
    """

    _ends = 0

    def add(self, key: _K, new: _R) -> None:
        """One more entry."""
        if self._ends != (ends := Slice._ends):
            self._ends = ends
            for known, entry in [*self.items()]:
                if entry.released:
                    self.pop(known, None)
        self[key] = new


class VirtualDeviceSet:
    """A set of slices that are asked for one by one (the paper's way to ask)."""

    def __init__(self, make: Callable[..., Slice]) -> None:
        self._make = make
        self.slices: list[Slice] = []

    def add_slice(
        self,
        tpu_devices: int | tuple[int, ...],
        *,
        axes: tuple[str, ...] | None = None,
        island: str | None = None,
        islands: int | Sequence[str] | None = None,
        kind: str | None = None,
        memory: int | str = 0,
    ) -> Slice:
        """A slice of so many devices, or of a mesh shape, of whatever kind the cluster has."""
        made = self._make(
            tpu_devices, axes, island=island, islands=islands, kind=kind, memory=memory
        )
        self.slices.append(made)
        return made

    @property
    def devices(self) -> list[VirtualDevice]:
        """All devices of the set, slice by slice."""
        return [device for entry in self.slices for device in entry.devices]

    def __iter__(self) -> Iterator[Slice]:
        return iter(self.slices)

    def __repr__(self) -> str:
        return f"<VirtualDeviceSet of {len(self.slices)} slices, {len(self.devices)} devices>"
