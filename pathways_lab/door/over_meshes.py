"""Programs over several meshes: IFRT IR of a client, as one run of the lab.

Problem: what Shardy's MPMD partitioner made comes as one compile request, and a call of it names
the arrays of all meshes.

How: it is a program of the lab (:mod:`pathways_lab.client.program.ifrt`); a call is one run.

Rule for maintainers: positions in the module are positions in the options' list of devices.

Paper: section 4.2 (lowering).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import final

from pathways_lab.client.functions.array_types import ArrayType
from pathways_lab.client.lab.devices import Slice
from pathways_lab.client.program import ifrt
from pathways_lab.client.program.ifrt import LoadedProgram
from pathways_lab.door.protocol.messages import message
from pathways_lab.door.protocol.status import INVALID, Status
from pathways_lab.door.shardings import Placing
from pathways_lab.runtime import jax_ifrt
from pathways_lab.runtime.jax_ifrt import Devices, MeshProgram

TYPE = "xla::ifrt::IfrtIRProgram"


@final
@dataclass(frozen=True, eq=False)
class OverMeshes:
    """A program over several meshes.  devices: those of the client, in the module's order.

    donated: numbers of arguments that a call consumes.
    """

    name: str
    key: str
    devices: Devices
    program: MeshProgram
    in_kinds: tuple[ArrayType, ...]
    in_placings: tuple[Placing, ...]
    out_kinds: tuple[ArrayType, ...]
    out_placings: tuple[Placing, ...]
    donated: tuple[int, ...]
    tokens: frozenset[int] = frozenset()

    @property
    def results(self) -> int:
        """All of its results are the client's."""
        return len(self.out_kinds)

    @property
    def meshes(self) -> dict[str, Devices]:
        """The client's devices of each mesh, by its name."""
        return {name: self._named(group) for group, name in self.program.meshes.items()}

    def on(
        self, slice_of: Callable[[Devices], Slice], overwritten: tuple[int, ...]
    ) -> LoadedProgram:
        """The same on slices, which may overwrite these arguments only."""
        read = self.program
        groups = {value.devices for value in read.values}
        slices = {group: slice_of(self._named(group)) for group in groups}
        donated = frozenset(read.inputs[number] for number in overwritten)
        layouts = [ifrt.layout_of(value) for value in read.values]
        return LoadedProgram(replace(read, donated=donated), slices, layouts, self.name)

    def _named(self, positions: Devices) -> Devices:
        return tuple(self.devices[position] for position in positions)


def load(data: bytes, options: bytes) -> OverMeshes:
    """The program of a compile request.  Raises Status for what hosts cannot run."""
    said = message("IfrtIrProgramProto").FromString(data)
    devices = tuple(message("IfrtIrCompileOptionsProto").FromString(options).device_ids)
    try:
        read = jax_ifrt.read(said.ifrt_program)
        kinds = [ifrt.type_of(value) for value in read.values]
        placings = [
            Placing(tuple(devices[position] for position in value.devices), ifrt.layout_of(value))
            for value in read.values
        ]
    except (IndexError, ValueError) as error:
        raise Status(INVALID, f"compile_request: no IFRT IR: {error}") from None
    ins, outs = read.inputs, read.outputs
    return OverMeshes(
        read.name,
        hashlib.sha256(said.ifrt_program).hexdigest()[:32],
        devices,
        read,
        tuple([kinds[number] for number in ins]),
        tuple([placings[number] for number in ins]),
        tuple([kinds[number] for number in outs]),
        tuple([placings[number] for number in outs]),
        tuple(n for n, number in enumerate(ins) if number in read.donated),
    )
