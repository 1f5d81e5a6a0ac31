"""Compile options of a request: read for their devices, and checked.

Rule for maintainers: hosts of a lab compile with the lab's own options, so those of a request are
ignored; a wrong one is an error at once all the same, as in JAX.
"""

from __future__ import annotations

from typing import Any

from pathways_lab.door.protocol.messages import message
from pathways_lab.door.protocol.status import INVALID, Status

_BOOLEAN = ("true", "false")


def devices_of(data: bytes) -> tuple[int, ...]:
    """The devices that serialised options name.  Raises Status for an option that XLA lacks."""
    options = message("XlaCompileOptionsProto").FromString(data).compile_options
    for name, value in options.env_option_overrides.items():
        _check(name, value)
    build = options.executable_build_options
    if build.HasField("device_assignment"):
        named = [each.replica_device_ids for each in build.device_assignment.computation_devices]
        if any(len(each) != 1 for each in named):
            raise Status(INVALID, "a device assignment with other than one replica of each part")
        return tuple(int(device) for (device,) in named)
    return (max(build.device_ordinal, 0),)


def _check(name: str, value: Any) -> None:
    known: dict[str, Any] = {}
    for kind in ("DebugOptions", "ExecutableBuildOptionsProto"):
        known |= message(kind).DESCRIPTOR.fields_by_name
    field = known.get(name)
    if field is None:
        raise Status(INVALID, f"No such compile option: {name!r}")
    text = value.string_field if value.WhichOneof("value") == "string_field" else ""
    if field.type == field.TYPE_BOOL and text and text.lower() not in _BOOLEAN:
        raise Status(INVALID, f"{name}: {text!r} is not a valid bool value.")
