"""Requests about arrays: made of bytes, taken apart, put together, moved, read, given up.

Rule for maintainers: a method for each kind of request, named as it; see :mod:`.session`.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np

from pathways_lab.client.functions.array_types import ArrayType
from pathways_lab.core.errors import PathwaysError
from pathways_lab.door import dtypes, shardings, values
from pathways_lab.door.messages import message
from pathways_lab.door.server import INTERNAL, INVALID, UNIMPLEMENTED, Reply, Status
from pathways_lab.door.shardings import Placing
from pathways_lab.door.state import State
from pathways_lab.door.values import Failed, Value, Whole
from pathways_lab.runtime.arrays import element_of, index


class Arrays(State):
    """The part of a session that has to do with arrays."""

    def _typed(self, dtype: Any, shape: Any, sharding: Any) -> tuple[ArrayType, Placing]:
        dims = tuple(shape.dims)
        return ArrayType(dims, dtypes.of_kind(dtype)), shardings.placing_of(sharding, len(dims))

    def _specified(self, spec: Any) -> tuple[ArrayType, Placing]:
        return self._typed(spec.dtype, spec.shape, spec.sharding)

    def _host_array(self, buffer: Any) -> np.ndarray[Any, Any]:
        """The bytes that the client sent, as an array."""
        data = self._buffers.take(buffer.host_buffer_handle)
        element = element_of(dtypes.of_kind(buffer.dtype)).dtype
        shape = tuple(buffer.shape.dims)
        strides = tuple(buffer.byte_strides.strides) if buffer.HasField("byte_strides") else None
        if any(s < 0 for s in strides or ()):
            raise Status(INVALID, "an array with a negative stride")
        return np.ndarray(shape, element, data, 0, strides)

    def _put(self, kind: ArrayType, placing: Placing, data: np.ndarray[Any, Any]) -> Value:
        place = self.slice_of(placing.on)
        put = self._lab.session.put
        stored = placing.stored(kind)
        return Whole(kind, placing, put(data, stored, place, placing.layout, "device_put"))

    def _make_arrays_from_host_buffer_shards_request(self, request: Any, reply: Reply) -> Any:
        made = message("MakeArraysFromHostBufferShardsResponse")()
        numbers = list(request.array_handles) or [0] * len(request.specs)
        for number, spec in zip(numbers, request.specs, strict=True):
            parts = [self._host_array(buffer) for buffer in spec.host_buffers]
            kind, placing = self._specified(spec.array_spec)
            found, stored = placing.boxes(kind), placing.stored(kind).shape
            if len(parts) == 1 and parts[0].shape == stored:
                data = parts[0]
            else:
                data = np.empty(stored, parts[0].dtype)
                for part, where in zip(parts, spec.addressable_shard_indices, strict=True):
                    data[index(found[where.indices[0]])] = part
            made.array_handles.append(self._keep(number, self._put(kind, placing, data)))
        return made

    def _make_array_from_host_buffer_request(self, request: Any, reply: Reply) -> Any:
        data = self._host_array(request)
        kind, placing = self._typed(request.dtype, request.shape, request.sharding)
        number = self._keep(request.array_handle, self._put(kind, placing, data))
        return message("MakeArrayFromHostBufferResponse")(array_handle=number)

    def _make_error_arrays_request(self, request: Any, reply: Reply) -> Any:
        made = message("MakeErrorArraysResponse")()
        why = Status(request.error.code or INTERNAL, request.error.message)
        numbers = list(request.array_handles) or [0] * len(request.array_specs)
        for number, spec in zip(numbers, request.array_specs, strict=True):
            kind, placing = self._specified(spec)
            made.array_handles.append(self._keep(number, Failed(kind, placing, why)))
        return made

    def _assemble_array_from_single_device_arrays_request(self, request: Any, reply: Reply) -> Any:
        parts = [self._value(number) for number in request.single_device_array_handles]
        shape = tuple(request.shape.dims)
        dtype = parts[0].kind.dtype if parts else dtypes.of_kind(request.dtype)
        placing = shardings.placing_of(request.sharding, len(shape))
        if len(parts) != len(placing.devices):
            raise Status(INVALID, f"{len(parts)} shards for {len(placing.devices)} devices")
        value = values.joined(ArrayType(shape, dtype), placing, parts, self)
        self._consume(request.copy_semantics, request.single_device_array_handles)
        made = message("AssembleArrayFromSingleDeviceArraysResponse")
        return made(array_handle=self._keep(request.result_handle, value))

    def _disassemble_into_single_device_arrays_request(self, request: Any, reply: Reply) -> Any:
        found = values.shards(self._value(request.array_handle), self)
        numbers = list(request.result_handles) or [0] * len(found)
        if len(numbers) != len(found):
            raise Status(INVALID, f"{len(numbers)} names for {len(found)} shards")
        self._consume(request.copy_semantics, [request.array_handle])
        made = message("DisassembleIntoSingleDeviceArraysResponse")()
        made.array_handles.extend(map(self._keep, numbers, found))
        return made

    def _remap_arrays_request(self, request: Any, reply: Reply) -> Any:
        plan = request.plan
        given = [self._value(number) for number in request.array_handles]
        taken: list[dict[int, tuple[Value, int]]] = [{} for _ in plan.output_specs]
        for one in plan.mappings:
            source, target = (
                itertools.chain.from_iterable(map(range, *ends))
                for ends in (
                    (one.from_start, one.from_end, one.from_step),
                    (one.to_start, one.to_end, one.to_step),
                )
            )
            for number, place in zip(source, target, strict=True):
                taken[one.out_array][place] = given[one.in_array], number
        numbers = list(request.result_handles) or [0] * len(taken)
        made = message("RemapArraysResponse")()
        for number, spec, found in zip(numbers, plan.output_specs, taken, strict=True):
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
        numbers = list(request.result_handles) or [0] * len(request.array_handles)
        for number, given in zip(numbers, request.array_handles, strict=True):
            value = self._value(given)
            devices = tuple(request.device_ids) or value.placing.devices
            placing = replace(value.placing, devices=devices)
            made.array_handles.append(self._keep(number, self._moved(value, placing)))
        self._consume(request.copy_semantics, request.array_handles)
        return made

    def _reshard_arrays_request(self, request: Any, reply: Reply) -> Any:
        made = message("ReshardArraysResponse")()
        numbers = list(request.result_handles) or [0] * len(request.array_handles)
        for number, given, spec in zip(
            numbers, request.array_handles, request.array_specs, strict=True
        ):
            _, placing = self._specified(spec)
            value = self._moved(self._value(given), placing)
            made.array_handles.append(self._keep(number, value))
        self._consume(request.copy_semantics, request.array_handles)
        return made

    def _moved(self, value: Value, placing: Placing) -> Value:
        if value.placing == placing:
            value.shared = True
            return value
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
            self._buffers.put(number, strided(data, strides))
            return message("CopyToHostBufferResponse")()

        def answered(result: Any) -> None:
            if isinstance(result, Exception):
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
            self._arrays.pop(number, None)
            self._deleted.add(number)
        return message("DeleteArrayResponse")(deletion_future_handle=self._future(None))

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


def strided(data: np.ndarray[Any, Any], strides: tuple[int, ...] | None) -> bytes:
    """An array's bytes as the client wants them in its memory."""
    if strides is None or data.size == 0:
        return data.tobytes()
    order = sorted(range(data.ndim), key=lambda n: -strides[n])
    return np.ascontiguousarray(data.transpose(order)).tobytes()
