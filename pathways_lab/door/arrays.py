"""Requests about arrays: made of bytes, taken apart, put together, moved, read, given up.

Rule for maintainers: a method for each kind of request, named as it; see :mod:`.session`.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from pathways_lab.client.functions.array_types import ArrayType
from pathways_lab.client.session.handles import Handle
from pathways_lab.core.errors import PathwaysError
from pathways_lab.door import dtypes, strings, values
from pathways_lab.door.protocol.buffers import ROOM
from pathways_lab.door.protocol.messages import message
from pathways_lab.door.protocol.server import Reply
from pathways_lab.door.protocol.status import EXHAUSTED, INTERNAL, INVALID, UNIMPLEMENTED, Status
from pathways_lab.door.shardings import Placing
from pathways_lab.door.state import State
from pathways_lab.door.strings import Strings
from pathways_lab.door.values import Failed, Sent, Value, Whole
from pathways_lab.runtime.arrays import element_of, index

_FEW = 1024
"""Bytes up to which an array goes with the call that takes it."""


class Arrays(State):
    """The part of a session that has to do with arrays."""

    def _specified(self, spec: Any) -> tuple[ArrayType, Placing]:
        return self._typed(spec.dtype, spec.shape, spec.sharding)

    def _host_array(self, buffer: Any, kind: ArrayType) -> np.ndarray[Any, Any]:
        """The bytes that the client sent, as an array of that type, and of no other."""
        said = ArrayType(tuple(buffer.shape.dims), dtypes.of_kind(buffer.dtype))
        data = self._buffers.take(buffer.host_buffer_handle)
        if said != kind:
            raise Status(INVALID, f"bytes of {said} for an array of {kind}")
        if kind.dtype == strings.NAME:
            return strings.from_wire(data, kind.shape)
        _check_size(kind)
        element = element_of(kind.dtype).dtype
        strides = _dense(kind.shape, element.itemsize)
        if buffer.HasField("byte_strides"):
            strides = tuple(buffer.byte_strides.strides)
        if len(strides) != len(kind.shape) or any(step < 0 for step in strides):
            raise Status(INVALID, f"strides {strides!s:.200} of an array of {kind}")
        # NumPy's own check overflows.
        last = sum((n - 1) * step for n, step in zip(kind.shape, strides, strict=True))
        if 0 not in kind.shape and last + element.itemsize > len(data):
            text = f"{len(data):,} bytes for {kind} with the strides {strides!s:.200}"
            raise Status(INVALID, text)
        return np.ndarray(kind.shape, element, data, 0, strides)

    def _put(self, kind: ArrayType, placing: Placing, data: np.ndarray[Any, Any]) -> Value:
        if kind.dtype == strings.NAME:
            return Strings(kind, placing, data)
        place = self.slice_of(placing.on)
        stored = placing.stored(kind)

        def put(data: np.ndarray[Any, Any]) -> Handle:
            return self._lab.session.put(data, stored, place, placing.layout, "device_put")

        if data.nbytes <= _FEW:
            return Sent(kind, placing, data, put)
        return Whole(kind, placing, put(data))

    def _make_arrays_from_host_buffer_shards_request(self, request: Any, reply: Reply) -> Any:
        made = message("MakeArraysFromHostBufferShardsResponse")()
        for number, spec in _named(request.array_handles, request.specs):
            kind, placing = self._specified(spec.array_spec)
            data = self._whole_array(spec, kind, placing)
            made.array_handles.append(self._keep(number, self._put(kind, placing, data)))
        return made

    def _whole_array(self, spec: Any, kind: ArrayType, placing: Placing) -> Any:
        """The lab's value for an array of which the client sent the parts."""
        found, stored = placing.boxes(kind), placing.stored(kind)
        if kind.dtype != strings.NAME:
            _check_size(stored)
        held = [tuple(where.indices) for where in spec.addressable_shard_indices]
        if sorted(n for each in held for n in each) != [*range(len(found))] or not all(held):
            raise Status(INVALID, f"shards {held} of an array on {len(found)} devices")
        if len(spec.host_buffers) != len(held):
            raise Status(INVALID, f"bytes of {len(spec.host_buffers)} shards of {len(held)}")
        parts = []
        for buffer, (device, *_) in zip(spec.host_buffers, held, strict=True):
            # A summand comes without the dimension in which they are stacked.
            box = found[device][1:] if placing.stacked else found[device]
            shape = tuple(stop - start for start, stop in box)
            parts.append(self._host_array(buffer, ArrayType(shape, kind.dtype)))
        if parts[0].shape == stored.shape:
            return parts[0]
        data = np.empty(stored.shape, parts[0].dtype)
        for part, devices in zip(parts, held, strict=True):
            for box in {found[device] for device in devices}:  # equal shards come once
                data[index(box)] = part
        return data

    def _make_array_from_host_buffer_request(self, request: Any, reply: Reply) -> Any:
        kind, placing = self._typed(request.dtype, request.shape, request.sharding)
        data = self._host_array(request, kind)
        number = self._keep(request.array_handle, self._put(kind, placing, data))
        return message("MakeArrayFromHostBufferResponse")(array_handle=number)

    def _make_error_arrays_request(self, request: Any, reply: Reply) -> Any:
        made = message("MakeErrorArraysResponse")()
        code = request.error.code if request.error.code in _CODES else INTERNAL
        why = Status(code, request.error.message or "an array that its program made as an error")
        for number, spec in _named(request.array_handles, request.array_specs):
            kind, placing = self._specified(spec)
            made.array_handles.append(self._keep(number, Failed(kind, placing, why)))
        return made

    def _assemble_array_from_single_device_arrays_request(self, request: Any, reply: Reply) -> Any:
        parts = [self._value(number) for number in request.single_device_array_handles]
        dtype = dtypes.proto(parts[0].kind.dtype) if parts else request.dtype
        kind, placing = self._typed(dtype, request.shape, request.sharding)
        if len(parts) != len(placing.devices):
            raise Status(INVALID, f"{len(parts)} shards for {len(placing.devices)} devices")
        for part, box in zip(parts, placing.boxes(kind), strict=True):
            own = box[1:] if placing.stacked else box
            wanted = ArrayType(tuple(stop - start for start, stop in own), kind.dtype)
            if part.kind != wanted:
                raise Status(INVALID, f"a shard of {part.kind} where {wanted} is one of {kind}")
        join = strings.joined if kind.dtype == strings.NAME else self._join
        value = join(kind, placing, parts)
        self._consume(request.copy_semantics, request.single_device_array_handles)
        made = message("AssembleArrayFromSingleDeviceArraysResponse")
        return made(array_handle=self._keep(request.result_handle, value))

    def _join(self, kind: ArrayType, placing: Placing, parts: Sequence[Value]) -> Value:
        return values.joined(kind, placing, parts, self)

    def _disassemble_into_single_device_arrays_request(self, request: Any, reply: Reply) -> Any:
        found = values.shards(self._value(request.array_handle), self)
        named = _named(request.result_handles, found)
        self._consume(request.copy_semantics, [request.array_handle])
        made = message("DisassembleIntoSingleDeviceArraysResponse")()
        made.array_handles.extend(self._keep(number, shard) for number, shard in named)
        return made

    def _remap_arrays_request(self, request: Any, reply: Reply) -> Any:
        plan = request.plan
        given = [self._value(number) for number in request.array_handles]
        taken: list[dict[int, tuple[Value, int]]] = [{} for _ in plan.output_specs]
        for one in plan.mappings:
            if not (0 <= one.in_array < len(given) and 0 <= one.out_array < len(taken)):
                raise Status(INVALID, f"array {one.in_array} or {one.out_array}, of which none is")
            value = given[one.in_array]
            source = _places(one.from_start, one.from_end, one.from_step, value.placing.devices)
            target = _places(one.to_start, one.to_end, one.to_step, self._owned)
            if len(source) != len(target):
                raise Status(INVALID, f"{len(source)} shards for {len(target)} places")
            taken[one.out_array].update(
                {place: (value, number) for number, place in zip(source, target, strict=True)}
            )
        made = message("RemapArraysResponse")()
        described = zip(plan.output_specs, taken, strict=True)
        for number, (spec, found) in _named(request.result_handles, list(described)):
            kind, placing = self._specified(spec)
            if sorted(found) != list(range(len(placing.devices))):
                raise Status(INVALID, f"{len(found)} shards for {len(placing.devices)} devices")
            (first, _), order = found[0], [found[place][1] for place in range(len(found))]
            if first.kind == kind and all(of is first for of, _ in found.values()):
                value = values.rearranged(first, order, placing, self)
            else:
                parts = [values.shards(found[n][0], self)[found[n][1]] for n in range(len(found))]
                value = values.joined(kind, placing, parts, self)
            made.array_handles.append(self._keep(number, value))
        self._consume(request.copy_semantics, request.array_handles)
        return made

    def _fully_replicated_shard_request(self, request: Any, reply: Reply) -> Any:
        value = self._value(request.array_handle)
        if not value.placing.replicated:
            raise Status(INVALID, "not every device has all of this array")
        self._consume(request.copy_semantics, [request.array_handle])
        number = self._keep(request.result_handle, values.shards(value, self)[0])
        return message("FullyReplicatedShardResponse")(array_handle=number)

    def _copy_arrays_request(self, request: Any, reply: Reply) -> Any:
        if request.HasField("memory_kind") and request.memory_kind not in ("", "device"):
            raise Status(UNIMPLEMENTED, f"copy_arrays_request: memory kind {request.memory_kind!r}")
        made = message("CopyArraysResponse")()
        for number, given in _named(request.result_handles, request.array_handles):
            value = self._value(given)
            devices = tuple(request.device_ids) or value.placing.devices
            self._check_devices(devices)
            if len(devices) != len(value.placing.devices):
                have = len(value.placing.devices)
                raise Status(INVALID, f"a copy on {len(devices)} devices of an array on {have}")
            placing = replace(value.placing, devices=devices)
            made.array_handles.append(self._keep(number, self._moved(value, placing)))
        self._consume(request.copy_semantics, request.array_handles)
        return made

    def _reshard_arrays_request(self, request: Any, reply: Reply) -> Any:
        made = message("ReshardArraysResponse")()
        if len(request.array_specs) != len(request.array_handles):
            count = len(request.array_handles)
            raise Status(INVALID, f"{len(request.array_specs)} types for {count} arrays")
        named = _named(request.result_handles, request.array_handles)
        for (number, given), spec in zip(named, request.array_specs, strict=True):
            kind, placing = self._specified(spec)
            value = self._value(given)
            if value.kind != kind:
                raise Status(INVALID, f"an array of {value.kind}, said to be {kind}")
            made.array_handles.append(self._keep(number, self._moved(value, placing)))
        self._consume(request.copy_semantics, request.array_handles)
        return made

    def _moved(self, value: Value, placing: Placing) -> Value:
        if value.placing == placing:
            value.shared = True
            return value
        if isinstance(value, Strings):
            raise Status(UNIMPLEMENTED, "arrays of strings stay where they are")
        if value.placing.stacked != placing.stacked:
            raise Status(UNIMPLEMENTED, "unreduced arrays are reduced by computations only")
        try:
            handle = values.moved(value.handle(), placing, self)
        except PathwaysError as error:
            return Failed(value.kind, placing, error)
        return Whole(value.kind, placing, handle)

    def _copy_to_host_buffer_request(self, request: Any, reply: Reply) -> None:
        kind, number = "copy_to_host_buffer_request", request.host_buffer_handle
        strides = tuple(request.byte_strides.strides) if request.HasField("byte_strides") else None

        async def copied(value: Value) -> Any:
            if value.placing.stacked:
                raise Status(INVALID, "an unreduced array is read shard by shard")
            data = await value.read()
            if value.kind.dtype == strings.NAME:
                self._buffers.put(number, strings.to_wire(data))
                return message("CopyToHostBufferResponse")()
            _check_dense(data, strides)
            self._buffers.put(number, strided(data, strides))
            return message("CopyToHostBufferResponse")()

        def answered(result: Any) -> None:
            if isinstance(result, Status):
                with contextlib.suppress(Status):  # it may be that there is no room
                    self._buffers.put(number, result)
            reply(result)

        try:
            value = self._value(request.array_handle)
        except Status as error:
            answered(error)
            return
        self._later(kind, answered, copied(value))

    def _delete_array_request(self, request: Any, reply: Reply) -> Any:
        for number in request.array_handle:
            self._delete(number)
        return message("DeleteArrayResponse")(deletion_future_handle=self._future())

    def _is_array_deleted_request(self, request: Any, reply: Reply) -> Any:
        number = request.array_handle
        gone = number in self._deleted or number not in self._arrays
        return message("IsArrayDeletedResponse")(deleted=gone)

    def _destruct_array_request(self, request: Any, reply: Reply) -> Any:
        for number in request.array_handle:
            self._arrays.pop(number, None)
            self._deleted.discard(number)
            self._unmade.pop(number, None)
        return message("DestructArrayResponse")()


_CODES = range(1, 17)
"""Codes of a status that says why."""


def _named(names: Sequence[int], given: Sequence[Any]) -> list[tuple[int, Any]]:
    """Pairs of the client's number, or 0, and what it is for.  Raises Status."""
    if names and len(names) != len(given):
        raise Status(INVALID, f"{len(names)} names for {len(given)} arrays")
    return list(zip(names or [0] * len(given), given, strict=True))


def _places(
    starts: Sequence[int], ends: Sequence[int], steps: Sequence[int], of: Sequence[object]
) -> list[int]:
    """The shards that a remap plan names.  of: one entry for each there is.  Raises Status."""
    if not len(starts) == len(ends) == len(steps):
        raise Status(INVALID, "shards of an array, named by ends of different numbers")
    ranges = list(zip(starts, ends, steps, strict=True))
    if any(not 0 <= start <= end <= len(of) or step < 1 for start, end, step in ranges):
        raise Status(INVALID, f"shards {ranges!s:.200} of an array on {len(of)} devices")
    return [n for each in ranges for n in range(*each)]


def _check_size(kind: ArrayType) -> None:
    """Raises Status when an array has too many bytes to be made here."""
    if kind.nbytes > ROOM:
        raise Status(EXHAUSTED, f"an array of {kind.nbytes:,} bytes, where {ROOM:,} are the most")


def _check_dense(data: np.ndarray[Any, Any], strides: tuple[int, ...] | None) -> None:
    """Raises Status unless an array's bytes lie close together with those strides."""
    if strides is None or data.size == 0:
        return
    order = sorted(range(data.ndim), key=lambda n: -strides[n]) if len(strides) == data.ndim else []
    wanted = _dense([data.shape[n] for n in order], data.itemsize)
    steps = [strides[n] for n in order if data.shape[n] > 1]
    dense = [step for n, step in zip(order, wanted, strict=True) if data.shape[n] > 1]
    if len(order) != data.ndim or steps != dense:
        text = f"strides {strides!s:.200} of an array of {data.dtype}{data.shape}"
        raise Status(INVALID, text)


def _dense(shape: Sequence[int], size: int) -> tuple[int, ...]:
    """The strides of an array whose elements lie close together, of C's order."""
    return tuple(size * math.prod(shape[n + 1 :]) for n in range(len(shape)))


def strided(data: np.ndarray[Any, Any], strides: tuple[int, ...] | None) -> bytes:
    """An array's bytes as the client wants them in its memory."""
    if strides is None or data.size == 0:
        return data.tobytes()
    order = sorted(range(data.ndim), key=lambda n: -strides[n])
    return np.ascontiguousarray(data.transpose(order)).tobytes()
