"""The requests of one client program, kind by kind.

How: requests come in order in one thread and submit to the lab in that order; whatever must be
waited for (a value, that it is there) is awaited in the loop, and answered from there.

Rule for maintainers: a request whose name has no method is an error status that names it.
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Callable
from typing import Any

from pathways_lab.client.code.export import PLATFORMS
from pathways_lab.core.errors import PathwaysError
from pathways_lab.door.arrays import Arrays
from pathways_lab.door.functions import Functions
from pathways_lab.door.protocol.messages import message
from pathways_lab.door.protocol.server import Reply
from pathways_lab.door.protocol.status import INVALID, UNIMPLEMENTED, Status


class Session(Arrays, Functions):
    """One client program on the lab."""

    def handle(self, kind: str, request: Any, reply: Reply) -> None:
        """Serve one request: see :class:`pathways_lab.door.protocol.server.Handler`."""
        served: Callable[[Any, Reply], Any] | None = getattr(self, f"_{kind}", None)
        try:
            if served is None:
                raise Status(UNIMPLEMENTED, f"{kind} is not served by this door")
            answer = served(request, reply)
        except Exception as error:
            why = self._status(kind, error)
            self._make_none(_names(request), why)
            raise why from None
        if answer is not None:
            reply(answer)

    def end(self) -> None:
        """The client is gone: nothing of it stays."""
        self._arrays.clear()
        self._unmade.clear()
        self._futures.clear()
        self._programs.clear()
        self._prepared.clear()
        self._turns.clear()
        for place in self._slices.values():
            with contextlib.suppress(PathwaysError):  # the lab may have gone before
                place.release()

    # --- devices --------------------------------------------------------------------------

    def _init_request(self, request: Any, reply: Reply) -> Any:
        platform = PLATFORMS.get(self._kind, self._kind)
        made = message("InitResponse")(
            platform_name=platform,
            platform_version="Pathways Lab",
            platform_id=platform_id(platform),
            process_index=0,
            runtime_type="pathways_lab",
        )
        for name, whether in _ATTRIBUTES.items():
            made.client_attributes.attributes[name].bool_value = whether
        for number, (island, host, local) in enumerate(self._owned):
            text = f"LabDevice(id={number}, island={island}, host={host}, device={local})"
            device = made.all_devices.add(
                id=number, local_device_id=number, local_hardware_id=number,
                platform_name=platform, device_kind=self._kind, default_memory_id=number,
                debug_string=text, to_string=text,
            )  # fmt: skip
            device.memory_ids.append(number)
            for name, said in (("island", island), ("host", host)):
                device.attributes.attributes[name].string_value = said.encode()
            if island in self._slice_index:
                index = device.attributes.attributes["slice_index"]
                index.int64_value = self._slice_index[island]
            made.addressable_device_ids.append(number)
            made.primary_device_ids.append(number)
            memory = made.memories.add(
                id=number, memory_space_kind="device", kind_id=0,
                debug_string=f"memory of {text}", to_string=f"memory of {text}",
            )  # fmt: skip
            memory.device_ids.append(number)
        return made

    def _get_default_device_assignment_request(self, request: Any, reply: Reply) -> Any:
        if not 0 < request.num_replicas * request.num_partitions <= len(self._owned):
            text = (
                f"{request.num_replicas} x {request.num_partitions} devices of {len(self._owned)}"
            )
            raise Status(INVALID, text)
        made = message("GetDefaultDeviceAssignmentResponse")()
        assignment = made.device_assignment
        assignment.replica_count = request.num_replicas
        assignment.computation_count = request.num_partitions
        for partition in range(request.num_partitions):
            entry = assignment.computation_devices.add()
            entry.replica_device_ids.extend(
                replica * request.num_partitions + partition
                for replica in range(request.num_replicas)
            )
        return made

    def _get_default_layout_request(self, request: Any, reply: Reply) -> Any:
        order = ",".join(str(n) for n in reversed(range(len(request.dims))))
        return message("GetDefaultLayoutResponse")(serialized_pjrt_layout=f"{{{order}}}".encode())

    # --- what is waited for ------------------------------------------------------------------

    def _check_future_request(self, request: Any, reply: Reply) -> None:
        waited, made = self._futured(request.future_handle), message("CheckFutureResponse")()
        self._when_there("check_future_request", reply, waited, made)

    def _check_value_ready_request(self, request: Any, reply: Reply) -> None:
        waited = [self._value(number) for number in request.value_handles]
        made = message("CheckValueReadyResponse")()
        self._when_there("check_value_ready_request", reply, waited, made)


_ATTRIBUTES = {"serialize_with_sdy": True, "supports_executable_serialization": False}
"""JAX asks its client for the first when it exports, and for the second before it writes what it
has compiled to a cache of its own."""

_NAMES = ("result_array_handle", "result_handle", "result_handles", "array_handles")
"""Fields of requests in which the client names arrays that are to be made."""


def _names(request: Any) -> list[int]:
    """The numbers of the arrays that a request was to make."""
    fields = {field.name: value for field, value in request.ListFields()}
    if any(name.startswith("result") for name in fields):
        fields.pop("array_handles", None)
    elif "specs" not in fields and "array_specs" not in fields:
        return []
    named = [fields[name] for name in _NAMES if name in fields]
    return [n for each in named for n in ([each] if isinstance(each, int) else each) if n]


def platform_id(name: str) -> int:
    """A number of a platform, the same in every process."""
    return zlib.crc32(name.encode())
