"""Shardings of the protocol as layouts, and back.

Problem: XLA says how an array is cut by an array of device positions (a tile assignment), the lab
by named axes of a mesh.  Two ways to say the same must come out as the same layout, since the lab
moves an array whose layout differs from the wanted one.

An *unreduced* array is the sum of what its devices hold.  The lab knows no such arrays; it
stores a *stack* of the summands, whose first dimension is cut over the axes of the sum.

Rule for maintainers: pure; what no mesh can express raises
:class:`~pathways_lab.client.code.tiles.Inexpressible` by name.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pathways_lab.client.code.tiles import Inexpressible, layout_of_tiles, tiles_of, whole
from pathways_lab.client.functions.array_types import ArrayType
from pathways_lab.core.program import layout as layouts
from pathways_lab.core.program.layout import Box, Layout
from pathways_lab.door.protocol.messages import message


@dataclass(frozen=True)
class Placing:
    """Where an array is: its devices, as the client counts them, and how the lab's value is cut.

    stacked: the array is unreduced, and the value is the stack of its summands.
    order: positions of the devices in the order in which the layout means them; () where that is
        the client's own.
    """

    devices: tuple[int, ...]
    layout: Layout
    stacked: bool = False
    order: tuple[int, ...] = ()

    @property
    def on(self) -> tuple[int, ...]:
        """The devices of the lab's value, in its order."""
        return tuple(self.devices[n] for n in self.order) if self.order else self.devices

    def stored(self, kind: ArrayType) -> ArrayType:
        """The type of the lab's value for an array of this type."""
        return ArrayType((self._summands, *kind.shape), kind.dtype) if self.stacked else kind

    def boxes(self, kind: ArrayType) -> tuple[Box, ...]:
        """The part of the lab's value on each device."""
        found = layouts.boxes(self.layout, self.stored(kind).shape)
        if not self.order:
            return found
        return tuple(box for _, box in sorted(zip(self.order, found, strict=True)))

    @property
    def _summands(self) -> int:
        sizes = dict(self.layout.mesh)
        return math.prod(sizes[axis] for axis in self.layout.spec[0])

    @property
    def replicated(self) -> bool:
        """Whether each device has all of it."""
        return not any(self.layout.spec)


_DIMENSIONS = 64
"""Most dimensions of NumPy."""
REPLICATED, MAXIMAL, OTHER, UNREDUCED = 0, 1, 3, 6
"""Types of an OpSharding."""


def placed(
    devices: tuple[int, ...], tiles: np.ndarray[Any, Any], ndim: int, stacked: bool
) -> Placing:
    """Where an array of *ndim* dimensions is by its tile assignment.

    Positions that are no mesh of the devices as they come are one of them in another order.
    """
    ndim += stacked
    try:
        return Placing(devices, layout_of_tiles(tiles, len(devices), ndim), stacked)
    except Inexpressible:
        counted = np.arange(tiles.size).reshape(tiles.shape)
        order = tuple(int(position) for position in tiles.flat)
        return Placing(devices, layout_of_tiles(counted, len(devices), ndim), stacked, order)


def placing_of_boxes(devices: tuple[int, ...], boxes: Sequence[Box], stacked: bool) -> Placing:
    """Where an array is of which each device has this part."""
    holders: dict[Box, list[int]] = {}
    for position, box in enumerate(boxes):
        holders.setdefault(box, []).append(position)
    cuts = [len({box[dimension] for box in holders}) for dimension in range(len(boxes[0]))]
    tiles = np.array([holders[box] for box in sorted(holders)]).reshape(*cuts, -1)
    return placed(devices, tiles, len(cuts) - stacked, stacked)


def reordered(devices: tuple[int, ...], layout: Layout, order: Sequence[int]) -> Placing:
    """Where a layout over a mesh places an array; order: the device at each place of the mesh."""
    return placed(devices, np.array(order)[tiles_of(layout)], len(layout.spec), False)


def placing_of_op(op: Any, devices: tuple[int, ...], ndim: int) -> Placing:
    """Where an ``OpSharding`` places an array of *ndim* dimensions over these devices."""
    count = len(devices)
    if op.type == REPLICATED or count == 1:
        return Placing(devices, whole(count, ndim))
    if op.type == UNREDUCED:
        return Placing(devices, Layout((("a0", count),), (("a0",), *[()] * ndim)), True)
    if op.type != OTHER or op.HasField("named_sharding"):
        raise Inexpressible(f"an OpSharding of type {op.type} places nothing over a mesh")
    dims = list(op.tile_assignment_dimensions)
    iota, perm = list(op.iota_reshape_dims), list(op.iota_transpose_perm)
    size = math.prod(iota) if iota else len(op.tile_assignment_devices)
    if size != count or math.prod(dims) != count or not ndim <= len(dims) <= _DIMENSIONS:
        raise Inexpressible(f"{size} tiles in {len(dims)} dimensions for {count} devices")
    if min(*iota, *dims, 1) < 1 or sorted(perm) != [*range(len(iota))]:
        raise Inexpressible(f"tiles {iota} in the order {perm}")
    if iota:
        tiles = np.arange(count).reshape(iota).transpose(perm)
    else:
        tiles = np.array(list(op.tile_assignment_devices))
    if sorted(tiles.flat) != list(range(count)):
        raise Inexpressible(f"{tiles.size} tiles for {count} devices")
    others = list(op.last_tile_dims)
    if any(kind not in (REPLICATED, UNREDUCED) for kind in others):
        raise Inexpressible("a sharding with manual dimensions")
    if ndim + len(others) > len(dims):
        raise Inexpressible(f"{len(others)} kinds of tiles beside {ndim} of {len(dims)} dimensions")
    tiles = tiles.reshape(dims)
    stacked = UNREDUCED in others
    if stacked:
        first = len(dims) - len(others) + others.index(UNREDUCED)
        tiles = np.moveaxis(tiles, first, 0)
    return placed(devices, tiles, ndim, stacked)


def op_sharding(placing: Placing) -> Any:
    """A placing as ``OpSharding`` over its devices."""
    op = message("OpSharding")()
    layout = placing.layout
    if not any(layout.spec):
        op.type = REPLICATED
        return op
    tiles = tiles_of(layout)
    if placing.order:
        tiles = np.array(placing.order)[tiles]
    op.type = OTHER
    if placing.stacked:
        tiles = np.moveaxis(tiles, 0, -1)
        if tiles.shape[-1] == tiles.size:
            op.type = UNREDUCED
            return op
    op.tile_assignment_devices.extend(int(x) for x in tiles.flat)
    dims = list(tiles.shape)
    if placing.stacked:
        op.last_tile_dims.extend([REPLICATED, UNREDUCED])
        if dims[-2] == 1:
            del dims[-2], op.last_tile_dims[0]
    elif dims[-1] > 1:
        op.replicate_on_last_tile_dim = True
    else:
        dims.pop()
    op.tile_assignment_dimensions.extend(dims)
    return op


# --- as they travel -----------------------------------------------------------------------

_HLO = "xla::ifrt::HloSharding"
_SINGLE = "xla::ifrt::SingleDeviceSharding"
_EVEN = "xla::ifrt::ConcreteEvenSharding"


def placing_of(sharding: Any, ndim: int) -> Placing:
    """The placing that a ``ShardingProto`` means for an array of so many dimensions.

    Raises Inexpressible.
    """
    if ndim > _DIMENSIONS:
        raise Inexpressible(f"arrays of {ndim} dimensions: {_DIMENSIONS} are the most")
    kind, data = sharding.serialized_sharding.type_name, sharding.serialized_sharding.data
    if kind == _SINGLE:
        single = message("SingleDeviceShardingProto").FromString(data)
        _check_memory(single)
        return Placing((single.device_id,), whole(1, ndim))
    if kind == _HLO:
        hlo = message("HloShardingProto").FromString(data)
        _check_memory(hlo)
        devices = tuple(hlo.devices.device_ids)
        return placing_of_op(hlo.xla_op_sharding, devices, ndim)
    if kind == _EVEN:
        even = message("ConcreteEvenShardingProto").FromString(data)
        _check_memory(even)
        devices = tuple(even.devices.device_ids)
        dims, parts = list(even.shape.dims), list(even.shard_shape.dims)
        if not len(dims) == len(parts) == ndim or min(*dims, *parts, 0) < 0:
            raise Inexpressible(f"shards {parts} of an array {dims} of {ndim} dimensions")
        cuts = [a // b if b else 1 for a, b in zip(dims, parts, strict=True)]
        if not math.prod(cuts) or len(devices) % math.prod(cuts):
            raise Inexpressible(f"shards {parts} of an array {dims} on {len(devices)} devices")
        tiles = np.arange(len(devices)).reshape(*cuts, -1)
        return Placing(devices, layout_of_tiles(tiles, len(devices), ndim))
    raise Inexpressible(f"shardings of the kind {kind!r} are not served")


def _check_memory(proto: Any) -> None:
    kind = proto.memory_kind if proto.HasField("memory_kind") else "device"
    if kind not in ("", "device"):
        raise Inexpressible(f"memory kind {kind!r} is not served: values live on devices")


def sharding_proto(placing: Placing) -> Any:
    """A placing as ``ShardingProto``."""
    made = message("ShardingProto")()
    if len(placing.devices) == 1:
        single = message("SingleDeviceShardingProto")(device_id=placing.devices[0])
        single.memory_kind = "device"
        made.serialized_sharding.type_name = _SINGLE
        made.serialized_sharding.data = single.SerializeToString()
        return made
    hlo = message("HloShardingProto")()
    hlo.devices.device_ids.extend(placing.devices)
    hlo.memory_kind = "device"
    hlo.xla_op_sharding.CopyFrom(op_sharding(placing))
    made.serialized_sharding.type_name = _HLO
    made.serialized_sharding.data = hlo.SerializeToString()
    return made
