"""JAX's shardings as layouts, and back.

Problem: users write ``NamedSharding`` and ``PartitionSpec`` over the mesh of a
slice; the core knows only :class:`~pathways_lab.core.program.layout.Layout`.  A layout
may use another mesh than the slice's own (``jax.pmap`` and ``shard_map`` make
theirs), as long as it numbers the same devices in the same order.

Rule for maintainers: everything that cannot be expressed is refused here, by
name; nothing is dropped silently.

Paper: section 4.2 (sharded logical buffers).
"""

from __future__ import annotations

import math
from typing import Any, TypeGuard

from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, Sharding

from pathways_lab.client.functions.array_types import ArrayType
from pathways_lab.client.lab.devices import ONCE, Slice, VirtualDevice
from pathways_lab.client.session import failures, in_jax
from pathways_lab.core.program.layout import Box, Layout, boxes
from pathways_lab.runtime.devices import spec_of

Requested = NamedSharding | PartitionSpec | None
"""How a user may say where one leaf goes; None leaves it open."""


def slice_of_mesh(mesh: Any) -> Slice | None:
    """The slice whose devices a mesh is made of, also of JAX's devices by a door; None without one.

    Raises PathwaysError for a mesh of some or of reordered devices of a slice.
    """
    if not isinstance(mesh, Mesh) or mesh.empty:
        return None
    devices = list(mesh.devices.flat)
    if not isinstance(devices[0], VirtualDevice):
        return None if in_jax.door is None else in_jax.door.slice_of(mesh)
    owner = devices[0].slice
    if devices != list(owner.devices):
        raise failures.capture_failure(
            f"a mesh of {len(devices)} devices is not slice {owner.name}"
            f" ({len(owner.devices)} devices, in their own order)",
            "use slice.mesh, or reshape slice.devices without leaving out or reordering any",
        )
    return owner


def slice_of_sharding(sharding: Any) -> Slice | None:
    """The slice behind a ``NamedSharding``; None without one."""
    return slice_of_mesh(sharding.mesh) if isinstance(sharding, NamedSharding) else None


def is_virtual(sharding: Any) -> bool:
    """Whether it is a ``NamedSharding`` over virtual devices."""
    found = slice_of_sharding(sharding)
    return found is not None and isinstance(sharding.mesh.devices.flat[0], VirtualDevice)


def is_explicit(requested: Any) -> TypeGuard[NamedSharding]:
    """Whether a sharding is part of its array's type: its mesh has explicit axes."""
    return isinstance(requested, NamedSharding) and AxisType.Explicit in requested.mesh.axis_types


def check_requested(entry: Any, what: str) -> Requested:
    """*entry* if it is a way to say where a leaf goes; else an error that names *what*."""
    if entry is None or isinstance(entry, NamedSharding | PartitionSpec):
        return entry
    if isinstance(entry, Sharding):
        entry = type(entry).__name__
    raise failures.capture_failure(
        f"{what} is {entry!r}; a slice takes a PartitionSpec, a NamedSharding over slice.mesh,"
        " or None",
        "for example jax.sharding.PartitionSpec(slice.axes[0])",
    )


def layout_of(requested: NamedSharding | PartitionSpec, on: Slice, kind: ArrayType) -> Layout:
    """The layout of an array under a sharding.

    Raises PathwaysError when it has more dimensions than the array, cuts it
    unevenly, or belongs to other devices than those of *on*.
    """
    spec: Any = requested
    mesh: Any = on.mesh
    if isinstance(requested, NamedSharding):
        owner = slice_of_sharding(requested)
        # Slices on the same devices have one mesh in JAX.
        if owner is None or (owner is not on and owner.binding.devices != on.binding.devices):
            raise failures.capture_failure(
                f"a sharding over {owner.name if owner else 'local devices'} cannot place a value"
                f" on slice {on.name}",
                f"use a sharding over the mesh of slice {on.name}",
            )
        if requested.memory_kind not in (None, "device"):
            raise failures.capture_failure(
                f"memory kind {requested.memory_kind!r} is not supported",
                "leave it out: values live in the devices' own memory",
            )
        spec, mesh = requested.spec, requested.mesh
    failures.check_axes(mesh.shape)
    axes = tuple((str(name), int(size)) for name, size in mesh.shape.items())
    cuts = [_axes_of(entry, dict(axes), spec) for entry in spec]
    if len(cuts) > len(kind.shape):
        raise failures.capture_failure(
            f"{spec} names {len(cuts)} dimensions, and the array is {kind}",
            "give at most one entry per dimension",
        )
    names = [name for cut in cuts for name in cut]
    if len(set(names)) < len(names):
        raise failures.capture_failure(
            f"{spec} names an axis twice, and an axis cuts one dimension", ONCE
        )
    cuts += [()] * (len(kind.shape) - len(cuts))
    layout = Layout(axes, tuple(cuts))
    uneven = _uneven(layout, kind.shape)
    if uneven is not None:
        parts = math.prod(dict(axes)[name] for name in cuts[uneven])
        raise failures.capture_failure(
            f"{spec} cuts dimension {uneven} of {kind} into {parts} parts,"
            f" and {kind.shape[uneven]} is not divisible by {parts}",
            "pad the array, or leave this dimension uncut",
        )
    return layout


def _axes_of(entry: Any, sizes: dict[str, int], spec: Any) -> tuple[str, ...]:
    if entry is None:
        return ()
    names = entry if isinstance(entry, tuple) else (entry,)
    for name in names:
        if name not in sizes:
            raise failures.capture_failure(
                f"{spec} names axis {name!r}, and the mesh has {', '.join(map(repr, sizes))}",
                "use the axis names of the slice's mesh",
            )
    return tuple(names)


def _uneven(layout: Layout, shape: tuple[int, ...]) -> int | None:
    sizes = dict(layout.mesh)
    for dimension, (extent, axes) in enumerate(zip(shape, layout.spec, strict=True)):
        if extent % math.prod(sizes[name] for name in axes):
            return dimension
    return None


def fits(layout: Layout, kind: ArrayType, on: Slice) -> bool:
    """Whether a layout is one of this array on this slice."""
    return (
        layout.devices == len(on.devices)
        and len(layout.spec) == len(kind.shape)
        and _uneven(layout, kind.shape) is None
    )


def replicated(on: Slice, ndim: int) -> Layout:
    """A whole copy on each device."""
    return Layout(on.axis_sizes, ((),) * ndim)


def carried_over(layout: Layout, on: Slice, kind: ArrayType) -> Layout:
    """The nearest thing to *layout* on another slice: the cuts that its mesh also has.

    A dimension keeps those axes, major first, that the new mesh has too and
    that still cut it evenly.
    """
    if fits(layout, kind, on) and layout.mesh == on.axis_sizes:
        return layout
    sizes = dict(on.axis_sizes)
    spec = []
    for extent, axes in zip(kind.shape, layout.spec, strict=True):
        kept: list[str] = []
        for name in axes:
            if name in sizes and extent % math.prod(sizes[n] for n in (*kept, name)) == 0:
                kept.append(name)
        spec.append(tuple(kept))
    return Layout(on.axis_sizes, tuple(spec))


def sharding_of(layout: Layout, on: Slice, like: Mesh | None = None) -> NamedSharding:
    """The JAX sharding of a layout, over the virtual devices of its slice.

    like: a mesh of the slice whose devices stand for it in place of these.
    """
    if like is None:
        return NamedSharding(on.mesh_of(layout.mesh), spec_of(layout))
    names, sizes = zip(*layout.mesh, strict=True) if layout.mesh else ((), ())
    return NamedSharding(Mesh(like.devices.reshape(sizes), names), spec_of(layout))


def cover(layout: Layout, shape: tuple[int, ...], hosts: tuple[str, ...]) -> dict[int, Box]:
    """The fewest devices that together hold the whole array, with their boxes.

    hosts: the host of each device; the replica on the host that already serves
    most is taken, so that a replicated array comes from one host.
    """
    replicas: dict[Box, list[int]] = {}
    for device, box in enumerate(boxes(layout, shape)):
        replicas.setdefault(box, []).append(device)
    served: dict[str, int] = {}
    for devices in replicas.values():
        for host in {hosts[device] for device in devices}:
            served[host] = served.get(host, 0) + 1
    return {
        min(devices, key=lambda device: (-served[hosts[device]], device)): box
        for box, devices in replicas.items()
    }
