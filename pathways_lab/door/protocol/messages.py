"""Message classes of the IFRT proxy protocol, made from what the installed jaxlib carries.

Problem: JAX's wheel has the whole client of the protocol and no server.  The descriptors of its
messages are in the wheel's shared library, since the client's own code registers them.

How: a descriptor is a serialised ``FileDescriptorProto``, whose first field is the file's name.
The name is searched for in the library, and the message ends where the next thing is no
field of a ``FileDescriptorProto`` any more.

Rule for maintainers: nothing of the protocol is written down but names, and what is not found
is said by name.  The classes are those of the installed version, so they never lag behind it.
"""

from __future__ import annotations

import functools
import mmap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jaxlib
import jaxlib.version
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError

SERVICE = "xla/python/ifrt_proxy/common/grpc_ifrt_service.proto"
_ROOTS = (
    SERVICE,
    "xla/python/ifrt/sharding_serdes.proto",
    "xla/python/ifrt/custom_call_program.proto",
    "xla/python/ifrt/ir/ifrt_ir_program.proto",
    "xla/python/ifrt/ir/ifrt_ir_compile_options.proto",
    "xla/python/pjrt_ifrt/xla_sharding.proto",
    "xla/python/pjrt_ifrt/xla_compiler.proto",
)
"""Files of the service itself, and of what messages carry as serialised bytes."""
_PLAIN = "google/protobuf/"
_FIELDS = range(1, 15)
"""Numbers of the fields of a FileDescriptorProto."""
_LONGEST = 1 << 20
_VARINT, _BYTES = 0, 2


class ProtocolMissing(RuntimeError):
    """The installed jaxlib does not carry the protocol where it is looked for."""


def _varint(data: Any, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        shift += 7
        if not byte & 0x80:
            return value, at


def _end(data: Any, start: int) -> int:
    """Where the fields of a file's descriptor that begins at *start* end."""
    at = start
    while at < len(data) and at - start < _LONGEST:
        key, after = _varint(data, at)
        if key >> 3 not in _FIELDS or key & 7 not in (_VARINT, _BYTES):
            break
        length, after = _varint(data, after)
        if key & 7 == _BYTES:
            if after + length > len(data):
                break
            after += length
        # The library may go on with the next file's name, which is the first field again.
        if key >> 3 == 1 and at != start:
            break
        at = after
    return at


def _candidates(data: Any, name: str) -> Iterator[Any]:
    head = b"\x0a" + bytes([len(name)]) + name.encode()
    at = data.find(head)
    while at >= 0:
        found = descriptor_pb2.FileDescriptorProto()
        try:
            found.ParseFromString(bytes(data[at : _end(data, at)]))
        except DecodeError:
            found.Clear()
        if found.name == name and (found.message_type or found.enum_type or found.service):
            yield found
        at = data.find(head, at + 1)


def _version() -> str:
    return f"jaxlib {jaxlib.version.__version__}"


def _library() -> Path:
    folder = Path(jaxlib.__file__).parent
    for name in ("libjax_common.so", "libjax_common.dylib", "jax_common.dll"):
        if (folder / name).exists():
            return folder / name
    raise ProtocolMissing(f"{_version()} has no library jax_common")


@functools.cache
def _files() -> dict[str, Any]:
    """The descriptors of the service and of all that it imports, by name."""
    found: dict[str, Any] = {}
    with (
        _library().open("rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data,
    ):
        wanted = [*_ROOTS]
        while wanted:
            name = wanted.pop()
            if name in found or name.startswith(_PLAIN):
                continue
            descriptor = next(_candidates(data, name), None)
            if descriptor is None:
                raise ProtocolMissing(f"{_version()} carries no descriptor {name}")
            found[name] = descriptor
            wanted += descriptor.dependency
    return found


@functools.cache
def classes() -> dict[str, Any]:
    """Every message class of the protocol, by its full name.  Raises ProtocolMissing."""
    pool = descriptor_pool.DescriptorPool()
    for name in (
        "any", "duration", "timestamp", "wrappers", "struct", "empty", "descriptor",
    ):  # fmt: skip
        module = __import__(f"google.protobuf.{name}_pb2", fromlist=["DESCRIPTOR"])
        pool.AddSerializedFile(module.DESCRIPTOR.serialized_pb)
    files, added = dict(_files()), set[str]()

    def add(name: str) -> None:
        if name in added or name.startswith(_PLAIN):
            return
        added.add(name)
        for other in files[name].dependency:
            add(other)
        pool.Add(files[name])

    for name in files:
        add(name)
    return dict(message_factory.GetMessageClassesForFiles(sorted(files), pool))


def message(name: str) -> Any:
    """The class of a message of the protocol, by its own name (``IfrtRequest``).

    Raises ProtocolMissing where this jaxlib has no such message.
    """
    found = classes().get(f"xla.ifrt.proxy.{name}") or classes().get(f"xla.ifrt.{name}")
    if found is None:
        found = classes().get(f"xla.{name}") or classes().get(name)
    if found is None:
        raise ProtocolMissing(f"{_version()} has no message {name}")
    return found


def method_names() -> dict[str, tuple[str, str]]:
    """Request and answer of each method of the service, by the method's name."""
    (service,) = _files()[SERVICE].service
    return {m.name: (m.input_type.strip("."), m.output_type.strip(".")) for m in service.method}


def service_name() -> str:
    """The full name of the service."""
    file = _files()[SERVICE]
    return f"{file.package}.{file.service[0].name}"
