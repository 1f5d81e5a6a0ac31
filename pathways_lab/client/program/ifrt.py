"""``pw.mpmd.load``: programs that Shardy's MPMD partitioner made, on slices.

Problem: upstream's ``mpmd.jit(step, config).lower(...)`` cuts a training step into fragments on
meshes with copies between them, and no open runtime runs what comes out.

How: fragments are compiled functions on slices, copies are transfers; a function that calls them in
the module's order is captured as any other program, so views, policies, ``mlir()`` and the
simulator know it.

Rule for maintainers: order, places and donation are the module's; nothing is cut or moved here that
it does not say.

Paper: section 4.2 (lowering).  Source of the partitioner: https://github.com/openxla/shardy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding

from pathways_lab.client.code import modules, tiles
from pathways_lab.client.code.export import PLATFORMS
from pathways_lab.client.code.layouts import sharding_of
from pathways_lab.client.functions.array_types import ArrayType
from pathways_lab.client.functions.jit import CompiledFunction
from pathways_lab.client.lab.devices import Slice
from pathways_lab.client.program.program import ProgramFunction, device_put
from pathways_lab.client.session import failures
from pathways_lab.core.program.layout import Layout
from pathways_lab.runtime import jax_ifrt, jax_modules
from pathways_lab.runtime.jax_ifrt import Devices, FragmentCall, MeshProgram

On = Mapping[str, Slice] | Sequence[Slice]


class LoadedProgram(ProgramFunction):
    """A partitioned program on slices: it takes flat arrays and returns a list of handles.

    in_shardings, out_shardings: where each array is wanted, and each result is.
    layouts: of the module's values.
    lowered: what upstream lowered; the program is called like its function, and without it flat.
    """

    def __init__(
        self,
        read: MeshProgram,
        slices: Mapping[Devices, Slice],
        layouts: Sequence[Layout],
        name: str,
        lowered: Any = None,
    ) -> None:
        self._read, self._slices, self._layouts = read, slices, layouts
        self._lowered = lowered
        self._functions: dict[Any, CompiledFunction] = {}
        self._last_read: dict[int, int] = {}
        for at, step in enumerate(read.steps):
            self._last_read.update(dict.fromkeys(step.inputs, at))
        self._calls = {
            at: self._call(at, step)
            for at, step in enumerate(read.steps)
            if isinstance(step, FragmentCall)
        }
        self.in_shardings = [self._sharding(number) for number in read.inputs]
        self.out_shardings = [self._sharding(number) for number in read.outputs]
        walk = self._walk if lowered is None else self._walk_as_lowered
        super().__init__(walk, name=name or read.name)

    @property
    def slices(self) -> tuple[Slice, ...]:
        """Those that it runs on."""
        return tuple(self._slices.values())

    def _walk_as_lowered(self, *args: Any) -> Any:
        lowered = self._lowered
        leaves = [*lowered.const_args, *lowered.input_tree.flatten_up_to(args)]
        made = self._walk(*[leaves[number] for number in sorted(lowered.kept_inputs_indices)])
        return jax.tree.unflatten(lowered.output_tree, made)

    def _walk(self, *args: Any) -> list[Any]:
        """The steps in their order; called when the program is captured."""
        read = self._read
        if len(args) != len(read.inputs):
            raise failures.capture_failure(
                f"{self.name!r} takes {len(read.inputs)} arrays, and was called with {len(args)}",
                "pass them flat, in the order of the module's main function",
                program=self.name,
            )
        values = {
            number: device_put(arg, self._sharding(number))
            for number, arg in zip(read.inputs, args, strict=True)
        }
        for at, step in enumerate(read.steps):
            given = [values[number] for number in step.inputs]
            if isinstance(step, FragmentCall):
                made = self._calls[at](*given)
            else:
                made = [
                    device_put(value, self._sharding(number))
                    for value, number in zip(given, step.outputs, strict=True)
                ]
            values.update(zip(step.outputs, made, strict=True))
        return [values[number] for number in read.outputs]

    def _sharding(self, number: int) -> NamedSharding:
        return sharding_of(self._layouts[number], self._slices[self._devices(number)])

    def _devices(self, number: int) -> Devices:
        return self._read.values[number].devices

    def _call(self, at: int, step: FragmentCall) -> CompiledFunction:
        """The function of a call; equal calls have one."""
        read = self._read
        kept = {*read.outputs, *read.inputs} - read.donated
        donated = tuple(
            position
            for position in step.donated
            if (number := step.inputs[position]) not in kept and self._last_read[number] == at
        )
        numbers = (*step.inputs, *step.outputs)
        placed = tuple(self._layouts[number] for number in numbers)
        kinds = tuple(type_of(read.values[number]) for number in numbers)
        key = step.fragment, step.devices, donated, kinds, placed
        known = self._functions.get(key)
        if known is None:
            known = self._functions[key] = self._function(*key, len(step.inputs))
        return known

    def _told(self, fragment: str, devices: Devices) -> str:
        """A fragment's name in views, without the program's and the mesh's."""
        told = fragment.removesuffix(f".{self._read.name}")
        return told.removesuffix(f"_{self._read.meshes.get(devices, '')}")

    def _function(
        self,
        fragment: str,
        devices: Devices,
        donated: tuple[int, ...],
        kinds: tuple[ArrayType, ...],
        placed: tuple[Layout, ...],
        inputs: int,
    ) -> CompiledFunction:
        on, code = self._slices[devices], self._read.fragments[fragment]
        asks = [target for target in jax_modules.read_signature(code).calls if "callback" in target]
        if asks:
            raise ValueError(f"fragment {fragment!r} calls back into Python ({asks[0]})")
        exported = modules.exported(
            code, fragment, kinds[:inputs], kinds[inputs:], placed,
            len(devices), PLATFORMS.get(on.kind, on.kind),
        )  # fmt: skip
        shardings = [sharding_of(layout, on) for layout in placed]
        return CompiledFunction(
            exported.call, on=on, name=self._told(fragment, devices), donate_argnums=donated,
            in_shardings=tuple(shardings[:inputs]), out_shardings=shardings[inputs:],
        )  # fmt: skip


def load(module: Any, on: On, *, name: str = "") -> LoadedProgram:
    """A program that Shardy's MPMD partitioner made, as a program on slices.

        program = pw.mpmd.load(text, on={"mesh1": a, "mesh2": b})
        loss, grads = program(w1, w2, batch)

    module: IFRT IR, or its ``mpmd`` dialect when all is partitioned, as text, as bytecode, or as an
        MLIR module; or what upstream's ``mpmd.jit(function, config).lower(...)`` returns: then the
        program is called like that function.  ``program.mlir()`` is such a module, unless the
        program decides while it runs: IFRT IR has no conditions.
    on: a slice for each mesh, by its name, or in the order of the meshes' devices.
    name: of the program in views; without one the module's.

    All of it is one run and one message.  Arguments go where the module wants them; they are
    consumed only where it says so.

    Raises PathwaysError for a module that cannot be read or run, and for slices that do not fit it.
    """
    lowered = module if hasattr(module, "compiler_ir") else None
    if lowered is not None:
        module = lowered.compiler_ir("ifrt")
    if not isinstance(module, str | bytes):
        module = module.operation.get_asm(enable_debug_info=False)
    try:
        read = jax_ifrt.read(module)
        slices = _slices(read, on, _meshes(lowered))
        # In words of the slices' own axes, where they can say it.
        layouts = [
            tiles.over(layout_of(value), slices[value.devices].axis_sizes) for value in read.values
        ]
        return LoadedProgram(read, slices, layouts, name, lowered)
    except (ValueError, KeyError) as error:
        raise failures.capture_failure(
            f"a partitioned program cannot be loaded: {error}",
            "load IFRT IR as `lower()` of Shardy's mpmd.jit gives it, or program.mlir() of a"
            " program without decisions",
        ) from error


def _meshes(lowered: Any) -> dict[Devices, str]:
    """Upstream counts devices through its topology, mesh after mesh."""
    found: dict[Devices, str] = {}
    first = 0
    for name, mesh in () if lowered is None else lowered.topology.items():
        found[tuple(range(first, first + mesh.size))] = name
        first += mesh.size
    return found


def _slices(read: MeshProgram, on: On, meshes: Mapping[Devices, str]) -> dict[Devices, Slice]:
    """The slice of each group of devices."""
    names = {**read.meshes, **meshes}
    groups = sorted({value.devices for value in read.values})
    told = ", ".join(f"{names.get(each, 'a mesh')} of {len(each)} devices" for each in groups)
    if isinstance(on, Mapping):
        missing = [each for each in groups if names.get(each) not in on]
        if missing:
            raise failures.capture_failure(
                f"on= names slices for {', '.join(on) or 'nothing'}, and the module has {told}",
                "give a slice for each mesh: on={name: lab.slice(...)}",
            )
        found = {each: on[names[each]] for each in groups}
    else:
        if len(on) != len(groups):
            raise failures.capture_failure(
                f"on= has {len(on)} slices, and the module has {told}",
                "give a slice for each mesh, in this order",
            )
        found = dict(zip(groups, on, strict=True))
    for devices, place in found.items():
        if len(place.devices) != len(devices):
            raise failures.capture_failure(
                f"slice {place.name} has {len(place.devices)} devices, and the module has {told}",
                f"ask for a slice of {len(devices)} devices",
            )
    return found


def type_of(value: jax_ifrt.Array) -> ArrayType:
    """The type of a value.  Raises ValueError for elements that JAX does not have."""
    dtype = modules.dtype_of_word(value.word)
    if dtype is None:
        raise ValueError(f"arrays of the type {value.word}")
    return ArrayType(value.shape, dtype)


def layout_of(value: jax_ifrt.Array) -> Layout:
    """How a value lies on its devices.  Raises ValueError for what no mesh can express."""
    return tiles.layout_of_tiles(value.tiles, len(value.devices), len(value.shape))
