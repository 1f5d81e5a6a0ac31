"""Right requests of every kind, and what a client remembers of those that were answered.

Rule for maintainers: a maker for each kind of request that the door serves, named as it; other
kinds are made from their descriptors.
"""

from __future__ import annotations

import functools
import itertools
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import export
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec
from jaxlib import _jax
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import stablehlo

from pathways_lab.client.code.tiles import whole
from pathways_lab.client.functions.array_types import ArrayType
from pathways_lab.core.program.layout import Layout, boxes
from pathways_lab.door import dtypes, shardings
from pathways_lab.door.protocol.messages import message
from pathways_lab.door.shardings import Placing
from pathways_lab.runtime import jax_callbacks
from pathways_lab.runtime.arrays import element_of, index
from tests.pipeline.spelling import spelled

PAIRS = ((0, 1), (2, 3))
"""Devices of each island."""
SINGLES = tuple((device,) for pair in PAIRS for device in pair)
TYPES = ("float32", "float32", "float32", "int32", "bool", "bfloat16", "int4")
SHAPES = ((4, 2), (4, 2), (4, 2), (4,), (), (0, 3))
KIND = ArrayType((4, 2), "float32")
"""Of what programs take."""
_LAID_OUT = 1 << 20
"""Elements up to which strides are read off an array in memory; some are said to have 10^10."""
_MOST = 40
"""Arrays that a client keeps before it destroys some."""


@dataclass(frozen=True)
class Code:
    """A program. places: of its arguments, of the type :data:`KIND`.  results: how many."""

    name: str
    module: bytes
    devices: tuple[int, ...]
    places: tuple[Placing, ...]
    results: int = 1
    donated: tuple[int, ...] = ()
    meshes: bool = False

    @property
    def program(self) -> tuple[str, bytes]:
        """Its kind, and as it travels."""
        if not self.meshes:
            return "xla::ifrt::XlaProgram", self.module
        made = message("IfrtIrProgramProto")(ifrt_program=self.module)
        return "xla::ifrt::IfrtIRProgram", bytes(made.SerializeToString())

    @property
    def options(self) -> tuple[str, bytes]:
        """Compile options that name the devices."""
        if not self.meshes:
            return "xla::ifrt::XlaCompileOptions", options_of(self.devices)
        made = message("IfrtIrCompileOptionsProto")(device_ids=self.devices)
        return "xla::ifrt::IfrtIRCompileOptions", bytes(made.SerializeToString())


_SIZE = "x".join(map(str, KIND.shape))
_FROM, _TO = (
    f"!ifrt.array<tensor<{_SIZE}xf32>, #ifrt.sharding_param<1x1 to [0] on 1>, [{n}]>"
    for n in (0, 1)
)
MESHES = spelled(f"""
module @jit_over {{
  func.func public @main(%x: {_FROM}) -> {_TO} attributes {{ifrt.function}} {{
    %y, %c = ifrt.CopyArrays(%x) : ({_FROM}) -> {_TO}
    %z, %d = ifrt.Call @twice::@main(%y) on devices [1] {{ifrt.mesh_name = "there"}}
      : ({_TO}) -> {_TO}
    return %z : {_TO}
  }}
  module @twice attributes {{sym_visibility = "private"}} {{
    func.func @main(%x: tensor<{_SIZE}xf32>) -> tensor<{_SIZE}xf32> {{
      %0 = stablehlo.add %x, %x : tensor<{_SIZE}xf32>
      return %0 : tensor<{_SIZE}xf32>
    }}
  }}
}}
""")
"""IFRT IR: a copy to another device, and a fragment there."""


def placings(kind: ArrayType) -> list[Placing]:
    """Where an array may be."""
    ndim = len(kind.shape)
    found = [Placing(devices, whole(len(devices), ndim)) for devices in (*SINGLES, *PAIRS, (1, 0))]
    if kind.shape and kind.shape[0] % 2 == 0:
        found += [Placing(devices, _cut(ndim)) for devices in PAIRS]
    return found


def _cut(ndim: int) -> Layout:
    return Layout((("a0", 2),), (("a0",), *((),) * (ndim - 1)))


@functools.cache
def codes() -> tuple[Code, ...]:
    """Programs: on one device, on two, with a donation, over meshes, with a callback."""
    struct = jax.ShapeDtypeStruct(KIND.shape, jnp.float32)
    mesh = NamedSharding(AbstractMesh((2,), ("d",)), PartitionSpec("d"))
    cut = jax.ShapeDtypeStruct(KIND.shape, jnp.float32, sharding=mesh)

    def module(function: Callable[..., Any], *given: Any, **options: Any) -> bytes:
        made = export.export(jax.jit(function, **options), platforms=("cpu",))(*given)
        return bytes(made.mlir_module_serialized)

    def halves(x: Any) -> Any:
        return x * 2 + 1

    def asks(x: Any) -> Any:
        return jax.pure_callback(lambda x: x, struct, x)

    lowered = jax.jit(asks).trace(struct).lower(lowering_platforms=("cpu",))
    parsed: Any = lowered.compiler_ir()
    with parsed.context:
        number = ir.IntegerAttr.get(ir.IntegerType.get_signless(64), 1)
        parsed.operation.attributes[jax_callbacks.NUMBERS] = ir.ArrayAttr.get([number])
    first = Placing((0,), whole(1, 2))
    return (
        Code("add", module(jnp.add, struct, struct), (0,), (first, first)),
        Code(
            "both",
            module(lambda x, y: (x * 2, y.sum()), struct, struct, donate_argnums=0),
            (2,), (Placing((2,), whole(1, 2)), first), 2, (0,),
        ),
        Code("halves", module(halves, cut), (0, 1), (Placing((0, 1), _cut(2)),)),
        Code("none", module(lambda: jnp.arange(3)), (3,), ()),
        Code("meshes", MESHES.encode(), (1, 2), (Placing((1,), whole(1, 2)),), meshes=True),
        Code("asks", artefact(parsed), (1,), (Placing((1,), whole(1, 2)),)),
    )  # fmt: skip


def artefact(parsed: Any) -> bytes:
    """A module as it travels."""
    weeks = stablehlo.StablehloCompatibilityRequirement.WEEK_4
    version = stablehlo.get_version_from_compatibility_requirement(weeks)
    return bytes(_jax.mlir.serialize_portable_artifact(parsed, version, True))


def options_of(devices: Sequence[int]) -> bytes:
    """Compile options that name devices."""
    made = message("XlaCompileOptionsProto")()
    assignment = made.compile_options.executable_build_options.device_assignment
    for device in devices:
        assignment.computation_devices.add().replica_device_ids.append(device)
    return bytes(made.SerializeToString())


def shape_of(dims: Sequence[int]) -> Any:
    return message("ShapeProto")(dims=dims)


def spec_of(kind: ArrayType, placing: Placing) -> Any:
    """An ``ArraySpecProto``."""
    return message("ArraySpecProto")(
        dtype=dtypes.proto(kind.dtype),
        shape=shape_of(kind.shape),
        sharding=shardings.sharding_proto(placing),
    )


class Requests:
    """A client's arrays, programs and futures by its numbers, and requests about them.

    store: sends bytes beside the session.  arrays: those that should be there.
    """

    def __init__(self, rng: random.Random, store: Callable[[int, bytes], None]) -> None:
        self._rng = rng
        self._store = store
        self._numbers = itertools.count(1)
        self.arrays: dict[int, tuple[ArrayType, Placing]] = {}
        self.programs: dict[int, Code] = {}
        self.futures: list[int] = []
        self.buffers: list[int] = []

    @property
    def numbers(self) -> list[int]:
        """All that mean something."""
        last = next(self._numbers)
        known = [*self.arrays, *self.programs, *self.futures[-9:], *self.buffers[-9:]]
        return [*known, *range(max(1, last - 3), last + 2), 1 << 60]

    def one(self, kind: str) -> Any:
        """The fields of a right request of that kind."""
        return getattr(self, f"_{kind}")()

    def kinds(self) -> list[str]:
        """Those that there is a maker for."""
        return [name[1:] for name in dir(self) if name.endswith("_request")]

    def learn(self, kind: str, asked: Any, answer: Any) -> None:
        """A request was answered, and not with an error."""
        learn = getattr(self, f"_learn_{kind.removesuffix('_request')}", None)
        if learn is not None:
            learn(asked, answer)

    # --- what is drawn ----------------------------------------------------------------------

    def _some(self, *only: tuple[ArrayType, Placing]) -> int:
        """An array, one of that type and placing where there is one; else one is not there."""
        known = [n for n, what in self.arrays.items() if not only or what in only]
        return self._rng.choice(known) if known else 1 << 40

    def _of(self, number: int) -> tuple[ArrayType, Placing]:
        return self.arrays.get(number, (KIND, Placing((0,), whole(1, 2))))

    def _program(self) -> int:
        return self._rng.choice([*self.programs]) if self.programs else 1 << 40

    def _bytes(self, kind: ArrayType) -> int:
        """Bytes that are on their way; their number."""
        number = next(self._numbers)
        data = np.zeros(kind.shape, element_of(kind.dtype).dtype).tobytes()
        self._store(number, data)
        return number

    def _copied(self) -> int:
        return self._rng.choice((0, 1, 2, 2, 2, 3))

    # --- arrays -----------------------------------------------------------------------------

    def _new(self) -> tuple[ArrayType, Placing]:
        kind = KIND
        if self._rng.random() < 0.4:
            kind = ArrayType(self._rng.choice(SHAPES), self._rng.choice(TYPES))
        return kind, self._rng.choice(placings(kind))

    def _make_array_from_host_buffer_request(self) -> Any:
        kind, placing = self._new()
        made = message("MakeArrayFromHostBufferRequest")(
            dtype=dtypes.proto(kind.dtype),
            shape=shape_of(kind.shape),
            sharding=shardings.sharding_proto(placing),
            host_buffer_handle=self._bytes(kind),
            array_handle=next(self._numbers),
        )
        if self._rng.random() < 0.3:
            strides = np.empty(kind.shape, element_of(kind.dtype).dtype).strides
            made.byte_strides.strides.extend(strides)
            made.byte_strides.SetInParent()
        return made

    def _learn_make_array_from_host_buffer(self, asked: Any, answer: Any) -> None:
        self._learned(answer.array_handle, asked)

    def _learned(self, number: int, spec: Any) -> None:
        kind = ArrayType(tuple(spec.shape.dims), dtypes.of_kind(spec.dtype))
        self.arrays[number] = kind, shardings.placing_of(spec.sharding, len(kind.shape))

    def _remap_arrays_request(self) -> Any:
        number = self._some()
        kind, placing = self._of(number)
        count = len(placing.devices)
        made = message("RemapArraysRequest")(
            array_handles=[number],
            copy_semantics=self._copied(),
            result_handles=[next(self._numbers)],
        )
        made.plan.input_specs.append(spec_of(kind, placing))
        made.plan.output_specs.append(spec_of(kind, placing))
        mapping = made.plan.mappings.add(in_array=0, out_array=0)
        for name, value in (("start", 0), ("end", count), ("step", 1)):
            getattr(mapping, f"from_{name}").append(value)
            getattr(mapping, f"to_{name}").append(value)
        return made

    def _make_arrays_from_host_buffer_shards_request(self) -> Any:
        made = message("MakeArraysFromHostBufferShardsRequest")()
        for _ in range(self._rng.choice((1, 1, 2))):
            kind, placing = self._new()
            spec = made.specs.add(array_spec=spec_of(kind, placing))
            found = boxes(placing.layout, kind.shape)
            for box in dict.fromkeys(found):
                shape = tuple(stop - start for start, stop in box)
                same = [n for n, other in enumerate(found) if other == box]
                spec.addressable_shard_indices.add(indices=same)
                spec.host_buffers.add(
                    dtype=dtypes.proto(kind.dtype),
                    shape=shape_of(shape),
                    host_buffer_handle=self._bytes(ArrayType(shape, kind.dtype)),
                )
            made.array_handles.append(next(self._numbers))
        return made

    def _learn_make_arrays_from_host_buffer_shards(self, asked: Any, answer: Any) -> None:
        for number, spec in zip(answer.array_handles, asked.specs, strict=True):
            self._learned(number, spec.array_spec)

    def _make_error_arrays_request(self) -> Any:
        made = message("MakeErrorArraysRequest")()
        made.error.code, made.error.message = 9, "it failed"
        made.array_specs.append(spec_of(*self._new()))
        made.array_handles.append(next(self._numbers))
        return made

    def _learn_make_error_arrays(self, asked: Any, answer: Any) -> None:
        for number, spec in zip(answer.array_handles, asked.array_specs, strict=True):
            self._learned(number, spec)

    def _assemble_array_from_single_device_arrays_request(self) -> Any:
        pair = self._rng.choice(PAIRS)
        halves = [
            self._some((ArrayType((2, 2), "float32"), Placing((d,), whole(1, 2)))) for d in pair
        ]
        made = message("AssembleArrayFromSingleDeviceArraysRequest")(
            shape=shape_of(KIND.shape),
            sharding=shardings.sharding_proto(Placing(pair, _cut(2))),
            single_device_array_handles=halves,
            copy_semantics=self._copied(),
            result_handle=next(self._numbers),
            dtype=dtypes.proto("float32"),
        )
        return made

    def _learn_assemble_array_from_single_device_arrays(self, asked: Any, answer: Any) -> None:
        part, _ = self._of(asked.single_device_array_handles[0])
        kind = ArrayType(tuple(asked.shape.dims), part.dtype)
        self._consumed(asked, asked.single_device_array_handles)
        placing = shardings.placing_of(asked.sharding, len(kind.shape))
        self.arrays[answer.array_handle] = kind, placing

    def _consumed(self, asked: Any, numbers: Sequence[int]) -> None:
        if asked.copy_semantics == 3:
            for number in numbers:
                self.arrays.pop(number, None)

    def _disassemble_into_single_device_arrays_request(self) -> Any:
        number = self._some(*[(KIND, Placing(pair, _cut(2))) for pair in PAIRS])
        _, placing = self._of(number)
        names = [next(self._numbers) for _ in placing.devices]
        made = message("DisassembleIntoSingleDeviceArraysRequest")
        return made(array_handle=number, copy_semantics=self._copied(), result_handles=names)

    def _learn_disassemble_into_single_device_arrays(self, asked: Any, answer: Any) -> None:
        known = self.arrays.get(asked.array_handle)
        self._consumed(asked, [asked.array_handle])
        if known is None:  # the change named an array that this client has forgotten
            return
        kind, placing = known
        found = boxes(placing.layout, kind.shape)
        for number, box, device in zip(answer.array_handles, found, placing.devices, strict=True):
            shape = tuple(stop - start for start, stop in box)
            single = Placing((device,), whole(1, len(shape)))
            self.arrays[number] = ArrayType(shape, kind.dtype), single

    def _fully_replicated_shard_request(self) -> Any:
        return message("FullyReplicatedShardRequest")(
            array_handle=self._some(),
            copy_semantics=self._copied(),
            result_handle=next(self._numbers),
        )

    def _learn_fully_replicated_shard(self, asked: Any, answer: Any) -> None:
        kind, placing = self._of(asked.array_handle)
        self._consumed(asked, [asked.array_handle])
        single = Placing(placing.devices[:1], whole(1, len(kind.shape)))
        self.arrays[answer.array_handle] = kind, single

    def _copy_arrays_request(self) -> Any:
        number = self._some()
        _, placing = self._of(number)
        made = message("CopyArraysRequest")(
            array_handles=[number],
            device_ids=self._rng.choice(PAIRS if len(placing.devices) > 1 else SINGLES),
            copy_semantics=self._copied(),
            result_handles=[next(self._numbers)],
        )
        if self._rng.random() < 0.5:
            made.memory_kind = "device"
        return made

    def _learn_copy_arrays(self, asked: Any, answer: Any) -> None:
        found = [self._of(number) for number in asked.array_handles]
        self._consumed(asked, asked.array_handles)
        for number, (kind, placing) in zip(answer.array_handles, found, strict=True):
            devices = tuple(asked.device_ids) or placing.devices
            self.arrays[number] = kind, Placing(devices, placing.layout)

    def _reshard_arrays_request(self) -> Any:
        number = self._some()
        kind, _ = self._of(number)
        return message("ReshardArraysRequest")(
            array_handles=[number],
            array_specs=[spec_of(kind, self._rng.choice(placings(kind)))],
            copy_semantics=self._copied(),
            result_handles=[next(self._numbers)],
        )

    def _learn_reshard_arrays(self, asked: Any, answer: Any) -> None:
        self._consumed(asked, asked.array_handles)
        for number, spec in zip(answer.array_handles, asked.array_specs, strict=True):
            self._learned(number, spec)

    def _copy_to_host_buffer_request(self) -> Any:
        number = self._some()
        kind, _ = self._of(number)
        made = message("CopyToHostBufferRequest")(
            array_handle=number, host_buffer_handle=next(self._numbers)
        )
        self.buffers = [*self.buffers[-20:], made.host_buffer_handle]
        if self._rng.random() < 0.3 and math.prod(kind.shape) <= _LAID_OUT:
            order = self._rng.choice("CF")
            size = element_of(kind.dtype).dtype
            made.byte_strides.strides.extend(np.empty(kind.shape, size, order).strides)
            made.byte_strides.SetInParent()
        return made

    def _delete_array_request(self) -> Any:
        return message("DeleteArrayRequest")(array_handle=[self._some()])

    def _learn_delete_array(self, asked: Any, answer: Any) -> None:
        for number in asked.array_handle:
            self.arrays.pop(number, None)
        self.futures.append(answer.deletion_future_handle)

    def _is_array_deleted_request(self) -> Any:
        return message("IsArrayDeletedRequest")(array_handle=self._some())

    def _destruct_array_request(self) -> Any:
        count = max(1, len(self.arrays) - _MOST)
        known = [*self.arrays]
        numbers = self._rng.sample(known, min(count, len(known))) or [1 << 40]
        return message("DestructArrayRequest")(array_handle=numbers)

    def _learn_destruct_array(self, asked: Any, answer: Any) -> None:
        for number in asked.array_handle:
            self.arrays.pop(number, None)

    # --- programs -----------------------------------------------------------------------------

    def _compile_request(self) -> Any:
        return self.compile(self._rng.choice(codes()))

    @staticmethod
    def compile(code: Code) -> Any:
        """A request to compile it."""
        made = message("CompileRequest")()
        made.program.type_name, made.program.data = code.program
        made.compile_options.type_name, made.compile_options.data = code.options
        return made

    def _learn_compile(self, asked: Any, answer: Any) -> None:
        known = [code for code in codes() if code.program[1] == asked.program.data]
        where = tuple(answer.device_ids)
        for code in known:
            if code.devices == where:
                self.programs[answer.loaded_executable_handle] = code

    def _loaded_executable_execute_request(self) -> Any:
        number = self._program()
        code = self.programs.get(number, codes()[0])
        made = message("LoadedExecutableExecuteRequest")(
            loaded_executable_handle=number,
            args_handles=[self._some((KIND, place)) for place in code.places],
        )
        if self._rng.random() < 0.7:
            made.result_array_handle.extend(next(self._numbers) for _ in range(code.results))
            made.result_status_handle = next(self._numbers)
        else:
            made.execute_options.fill_status = self._rng.random() < 0.5
        if self._rng.random() < 0.5:
            made.execute_options.non_donatable_input_indices.append(0)
        return made

    def _learn_loaded_executable_execute(self, asked: Any, answer: Any) -> None:
        code = self.programs.get(asked.loaded_executable_handle)
        if code is None:
            return
        for position in set(code.donated) - {*asked.execute_options.non_donatable_input_indices}:
            self.arrays.pop(asked.args_handles[position], None)
        for output in answer.outputs:
            self._learned(output.array_handle, output)
        if code.name != "none" and asked.result_array_handle:
            elsewhere = {"asks": (1,), "meshes": (2,)}.get(code.name)
            place = Placing(elsewhere, whole(1, 2)) if elsewhere else code.places[0]
            self.arrays[asked.result_array_handle[0]] = KIND, place
        self.futures += [n for n in (asked.result_status_handle, answer.status_handle) if n]

    def _about_a_program(self, name: str) -> Any:
        return message(name)(loaded_executable_handle=self._program())

    def _loaded_executable_metadata_request(self) -> Any:
        return self._about_a_program("LoadedExecutableMetadataRequest")

    def _loaded_executable_cost_analysis_request(self) -> Any:
        return self._about_a_program("LoadedExecutableCostAnalysisRequest")

    def _loaded_executable_human_readable_program_text_request(self) -> Any:
        return self._about_a_program("LoadedExecutableHumanReadableProgramTextRequest")

    def _loaded_executable_is_deleted_request(self) -> Any:
        return self._about_a_program("LoadedExecutableIsDeletedRequest")

    def _loaded_executable_mpmd_metadata_request(self) -> Any:
        made = message("LoadedExecutableMpmdMetadataRequest")
        return made(mpmd_loaded_executable_handle=self._program())

    def _loaded_executable_delete_request(self) -> Any:
        return self._about_a_program("LoadedExecutableDeleteRequest")

    def _loaded_executable_destruct_request(self) -> Any:
        return self._about_a_program("LoadedExecutableDestructRequest")

    def _learn_loaded_executable_delete(self, asked: Any, answer: Any) -> None:
        self.programs.pop(asked.loaded_executable_handle, None)
        self.futures.append(answer.future_handle)

    def _learn_loaded_executable_destruct(self, asked: Any, answer: Any) -> None:
        self.programs.pop(asked.loaded_executable_handle, None)

    # --- the others -----------------------------------------------------------------------------

    def _init_request(self) -> Any:
        return message("InitRequest")()

    def _get_default_device_assignment_request(self) -> Any:
        made = message("GetDefaultDeviceAssignmentRequest")
        return made(num_replicas=1, num_partitions=self._rng.choice((1, 2, 4)))

    def _get_default_layout_request(self) -> Any:
        made = message("GetDefaultLayoutRequest")
        return made(dtype=dtypes.proto("float32"), dims=self._rng.choice(SHAPES), device_id=0)

    def _future(self) -> int:
        return self.futures.pop(0) if self.futures else 1 << 40

    def _check_future_request(self) -> Any:
        return message("CheckFutureRequest")(future_handle=self._future())

    def _loaded_executable_fetch_execute_result_request(self) -> Any:
        made = message("LoadedExecutableFetchExecuteResultRequest")
        return made(result_status_handle=self._future())

    def _check_value_ready_request(self) -> Any:
        return message("CheckValueReadyRequest")(value_handles=[self._some(), self._some()])


def expected(kind: ArrayType, box: Any = None) -> np.ndarray[Any, Any]:
    """An array with all elements different, or a part of it."""
    made = np.arange(math.prod(kind.shape)).astype(element_of(kind.dtype).dtype).reshape(kind.shape)
    return made if box is None else made[index(box)]
