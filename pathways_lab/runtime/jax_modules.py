"""StableHLO modules that another process has lowered: read, and changed where hosts need it.

Problem: a program whose devices are a lab sends modules instead of functions.  All that is known of
one is its text; and an argument or result that is *unreduced*, which is the sum of what the
devices hold, is no array whose bytes could be moved.

How: MLIR's own Python reads modules.  An unreduced array is stored as a *stack*: one more
dimension, the first, is cut over the unreduced axes, so each device holds its own summand.
:func:`stacked` puts the conversions into the module.

Rule for maintainers: a door to private JAX as :mod:`.jax_private` is, for modules only; a test in
``tests/runtime/test_jax_modules.py`` names what moved.

Paper: section 4.2 (registering computations).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from jax._src import compiler as _compiler
from jaxlib import _jax
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import sdy
from jaxlib.mlir.dialects import stablehlo as _stablehlo

from pathways_lab.core.program.layout import Layout
from pathways_lab.runtime.jax_private import make_cpu_client, shared_context

_TOKEN = "!stablehlo.token"


Reordered = dict[int, tuple[Layout, tuple[int, ...]]]
"""Layouts over meshes of reordered devices, and the position of each of a mesh's devices."""


@dataclass(frozen=True)
class Signature:
    """Types and layouts of a module's main function, as MLIR and XLA say them.

    inputs, outputs: shape, and MLIR's word for the element type.  donors: numbers of arguments
    that it may overwrite, each with the result that takes its memory, where that is decided.
    partitions, replicas: devices that it is written for.  calls: targets of its custom calls.
    tokens: so many of the first arguments and results are tokens of ordered effects, which are
    empty arrays to whoever calls it.  token_outputs: numbers of all results that are tokens.
    reordered_inputs, reordered_outputs: those over a mesh of reordered devices, by number.
    unreduced: some of its arguments or results are sums of what devices hold.
    """

    name: str
    inputs: tuple[tuple[tuple[int, ...], str], ...]
    outputs: tuple[tuple[tuple[int, ...], str], ...]
    donors: dict[int, int | None]
    partitions: int
    replicas: int
    calls: frozenset[str]
    tokens: int
    token_outputs: frozenset[int]
    reordered_inputs: Reordered
    reordered_outputs: Reordered
    unreduced: bool


def read_signature(module: bytes) -> Signature:
    """Read a portable artefact's main function.  Raises ValueError for what is none."""
    with shared_context():
        try:
            parsed = _jax.mlir.deserialize_portable_artifact(module)
        except Exception as error:
            raise ValueError(f"no StableHLO: {error}") from None
        about = parsed.operation.attributes
        main: Any = ir.SymbolTable(parsed.operation)["main"]
        given = ir.FunctionType(ir.TypeAttr(main.attributes["function_type"]).value)
        meshes = dict(_meshes(parsed))
        ins = _entries(main, "arg_attrs", given.inputs)
        outs = _entries(main, "res_attrs", given.results)
        donors: dict[int, int | None] = {}
        for number, named in enumerate(ins):
            if named is not None and "tf.aliasing_output" in named:
                donors[number] = ir.IntegerAttr(named["tf.aliasing_output"]).value
            elif named is not None and "jax.buffer_donor" in named:
                donors[number] = None
        calls: set[str] = set()

        def seen(operation: Any) -> Any:
            if operation.name == "stablehlo.custom_call":
                calls.add(ir.StringAttr(operation.attributes["call_target_name"]).value)
            return ir.WalkResult.ADVANCE

        parsed.operation.walk(seen)
        return Signature(
            ir.StringAttr(about["sym_name"]).value if "sym_name" in about else "main",
            tuple(_tensor(kind) for kind in given.inputs),
            tuple(_tensor(kind) for kind in given.results),
            donors,
            _number(about, "mhlo.num_partitions"),
            _number(about, "mhlo.num_replicas"),
            frozenset(calls),
            sum(str(kind) == _TOKEN for kind in given.inputs),
            frozenset(n for n, kind in enumerate(given.results) if str(kind) == _TOKEN),
            _reordered(ins, meshes),
            _reordered(outs, meshes),
            any(_sum(entry, meshes) for entry in (*ins, *outs)),
        )


def _reordered(entries: list[Any], meshes: dict[str, Any]) -> Reordered:
    all_placed = [None if entry is None else _placed(entry, meshes) for entry in entries]
    return {
        number: (Layout(tuple(placed.mesh.items()), placed.dimensions), placed.order)
        for number, placed in enumerate(all_placed)
        if placed is not None and placed.order
    }


def hlo_text(module: bytes, devices: int) -> str:
    """The program that XLA makes of a portable artefact for so many CPU devices."""
    client = make_cpu_client(devices)
    assigned = np.arange(devices).reshape(1, devices)
    options = _compiler.get_compile_options(1, devices, assigned)
    chosen = _jax.DeviceList(tuple(client.devices()))
    with shared_context():
        parsed = _jax.mlir.deserialize_portable_artifact(module)
        made = client.compile_and_load(parsed, chosen, options)
    return "\n\n".join(each.to_string() for each in made.hlo_modules())


def _number(attributes: Any, name: str) -> int:
    return int(ir.IntegerAttr(attributes[name]).value) if name in attributes else 1


def _tensor(kind: Any) -> tuple[tuple[int, ...], str]:
    if str(kind) == _TOKEN:
        return (0,), "i1"
    tensor = ir.RankedTensorType(kind)
    return tuple(tensor.shape), str(tensor.element_type)


# --- tokens ---------------------------------------------------------------------------------


def without_tokens(module: bytes) -> bytes:
    """The module with empty arrays for the tokens among its arguments and results.

    For modules that call nothing outside: an order of nothing needs no tokens.
    """
    with shared_context() as context, ir.Location.unknown(context):
        parsed = _jax.mlir.deserialize_portable_artifact(module)
        main: Any = ir.SymbolTable(parsed.operation)["main"]
        kind = ir.FunctionType(ir.TypeAttr(main.attributes["function_type"]).value)
        empty: Any = ir.RankedTensorType.get([0], ir.IntegerType.get_signless(1))
        elements: Any = np.zeros(0, np.bool_)
        nothing: Any = ir.DenseElementsAttr.get(elements, type=empty)
        body = main.regions[0].blocks[0]
        inputs = [empty if str(each) == _TOKEN else each for each in kind.inputs]
        outputs = [empty if str(each) == _TOKEN else each for each in kind.results]
        for argument, new in zip(list(body.arguments), inputs, strict=True):
            if new is empty:
                with ir.InsertionPoint.at_block_begin(body):
                    argument.replace_all_uses_with(_stablehlo.AfterAllOp([]).result)
                argument.set_type(empty)
        end = list(body.operations)[-1]
        with ir.InsertionPoint(end):
            for number, new in enumerate(outputs):
                if new is empty:
                    end.operands[number] = _stablehlo.ConstantOp(nothing).result
        _retype(main, inputs, outputs)
        for which in ("arg_attrs", "res_attrs"):
            if which in main.attributes:
                main.attributes[which] = ir.ArrayAttr.get(
                    [_without(entry, "jax.token") for entry in main.attributes[which]]
                )
        return written(parsed)


def _without(entry: Any, name: str) -> Any:
    attributes: Any = ir.DictAttr(entry)
    return ir.DictAttr.get({each.name: each.attr for each in attributes if each.name != name})


def _retype(main: Any, inputs: list[Any], outputs: list[Any]) -> None:
    main.attributes["function_type"] = ir.TypeAttr.get(ir.FunctionType.get(inputs, outputs))


def written(parsed: Any) -> bytes:
    """A module as a portable artefact, verified."""
    parsed.operation.verify()
    version = _stablehlo.get_version_from_compatibility_requirement(
        _stablehlo.StablehloCompatibilityRequirement.WEEK_4
    )
    return bytes(_jax.mlir.serialize_portable_artifact(parsed, version, True))


# --- unreduced arrays -----------------------------------------------------------------------


@dataclass(frozen=True)
class Stacked:
    """A module without unreduced arguments and results.

    inputs, outputs: for each, whether it is a stack now.
    """

    module: bytes
    inputs: tuple[bool, ...]
    outputs: tuple[bool, ...]


@dataclass(frozen=True)
class _Placed:
    """How one argument or result is cut.

    mesh: axes and sizes.  order: positions of its devices, where they are not as they come.
    axes: those over which the array is a sum.
    """

    reference: Any
    mesh: dict[str, int]
    order: tuple[int, ...]
    axes: tuple[str, ...]
    dimensions: tuple[tuple[str, ...], ...]

    @property
    def count(self) -> int:
        return math.prod(self.mesh[axis] for axis in self.axes)

    def whole(self, kind: Any) -> Any:
        """The type of the stack."""
        return ir.RankedTensorType.get([self.count, *kind.shape], kind.element_type)

    def summand(self, kind: Any) -> Any:
        """The type of what one device holds."""
        cuts = [math.prod(self.mesh[axis] for axis in axes) for axes in self.dimensions]
        shape = [size // cut for size, cut in zip(kind.shape, cuts, strict=True)]
        return ir.RankedTensorType.get(shape, kind.element_type)

    def sharding(self, stack: bool) -> Any:
        dimensions = (self.axes, *self.dimensions) if stack else self.dimensions
        return sdy.TensorShardingAttr.get(
            self.reference,
            [
                sdy.DimensionShardingAttr.get([sdy.AxisRefAttr.get(a) for a in axes], True)
                for axes in dimensions
            ],
            unreduced_axes=[] if stack else [sdy.AxisRefAttr.get(a) for a in self.axes],
        )

    def converted(self, value: Any, kind: Any, stack: bool) -> Any:
        """*value* as a stack, or a stack as an array of the type *kind*."""
        sides = [self.sharding(not stack), self.sharding(stack)]
        ins, outs = [sdy.TensorShardingPerValueAttr.get([each]) for each in sides]
        made = sdy.ManualComputationOp(
            [self.whole(kind) if stack else kind],
            [value],
            ins,
            outs,
            sdy.ManualAxesAttr.get([ir.StringAttr.get(axis) for axis in self.mesh]),
        )
        one = self.summand(kind)
        in_stack = ir.RankedTensorType.get([1, *one.shape], one.element_type)
        given, wanted = (one, in_stack) if stack else (in_stack, one)
        block = ir.Block.create_at_start(made.body, [given])
        with ir.InsertionPoint(block):
            reshaped = _stablehlo.ReshapeOp(wanted, block.arguments[0])
            sdy.ReturnOp([reshaped.result])
        return made.results[0]


def stacked(module: bytes) -> Stacked:
    """The module with stacks for its unreduced arguments and results.

    Raises ValueError where a mesh has its devices in another order.
    """
    with shared_context() as context, ir.Location.unknown(context):
        parsed = _jax.mlir.deserialize_portable_artifact(module)
        main: Any = ir.SymbolTable(parsed.operation)["main"]
        kind = ir.FunctionType(ir.TypeAttr(main.attributes["function_type"]).value)
        meshes = dict(_meshes(parsed))
        given = [_sum(entry, meshes) for entry in _entries(main, "arg_attrs", kind.inputs)]
        made = [_sum(entry, meshes) for entry in _entries(main, "res_attrs", kind.results)]
        found = [tuple(each is not None for each in sums) for sums in (given, made)]
        body = main.regions[0].blocks[0]
        inputs, outputs = list(kind.inputs), list(kind.results)
        for number, each in enumerate(given):
            if each is not None:
                _stack_input(body, number, each)
                inputs[number] = body.arguments[number].type
        end = list(body.operations)[-1]
        for number, each in enumerate(made):
            if each is not None:
                tensor = ir.RankedTensorType(outputs[number])
                with ir.InsertionPoint(end):
                    end.operands[number] = each.converted(end.operands[number], tensor, True)
                outputs[number] = end.operands[number].type
        _retype(main, inputs, outputs)
        for which, sums in (("arg_attrs", given), ("res_attrs", made)):
            if any(sums):
                _place(main, which, sums)
        return Stacked(written(parsed), *found)


def _stack_input(body: Any, number: int, each: _Placed) -> None:
    argument = body.arguments[number]
    tensor = ir.RankedTensorType(argument.type)
    users = [(use.owner, use.operand_number) for use in argument.uses]
    argument.set_type(each.whole(tensor))
    with ir.InsertionPoint.at_block_begin(body):
        value = each.converted(argument, tensor, False)
    for owner, operand in users:
        owner.operands[operand] = value


def _place(main: Any, which: str, sums: list[_Placed | None]) -> None:
    entries = []
    for entry, each in zip(main.attributes[which], sums, strict=True):
        attributes: Any = ir.DictAttr(entry)
        named = {each.name: each.attr for each in attributes}
        if each is not None:
            named["sdy.sharding"] = each.sharding(True)
        entries.append(ir.DictAttr.get(named))
    main.attributes[which] = ir.ArrayAttr.get(entries)


def _entries(main: Any, which: str, kinds: Any) -> list[Any]:
    if which not in main.attributes:
        return [None] * len(kinds)
    return [ir.DictAttr(entry) for entry in ir.ArrayAttr(main.attributes[which])]


def _meshes(parsed: Any) -> Iterator[tuple[str, Any]]:
    for operation in parsed.body.operations:
        if operation.operation.name == "sdy.mesh":
            attributes = operation.operation.attributes
            yield (
                f"@{ir.StringAttr(attributes['sym_name']).value}",
                sdy.MeshAttr(attributes["mesh"]),
            )


def _placed(entry: Any, meshes: dict[str, Any]) -> _Placed | None:
    """How an argument or result with these attributes is cut; None where nothing is said."""
    if "sdy.sharding" not in entry:
        return None
    sharding = sdy.TensorShardingAttr(entry["sdy.sharding"])
    reference = sharding.mesh_or_ref
    mesh = meshes.get(str(reference))
    mesh = sdy.MeshAttr(reference) if mesh is None else mesh
    sizes = {axis.name: axis.size for axis in map(sdy.MeshAxisAttr, mesh.axes)}
    named = {sdy.AxisRefAttr(axis).name for axis in sharding.unreduced_axes}
    dimensions = tuple(
        tuple(sdy.AxisRefAttr(axis).name for axis in sdy.DimensionShardingAttr(dimension).axes)
        for dimension in sharding.dimension_shardings
    )
    axes = tuple(axis for axis in sizes if axis in named)
    if (axes or mesh.device_ids) and "(" in str(sharding):
        raise ValueError(f"{sharding}: an axis is cut")
    return _Placed(reference, sizes, tuple(mesh.device_ids), axes, dimensions)


def _sum(entry: Any, meshes: dict[str, Any]) -> _Placed | None:
    """The same for what is a sum; None for all else."""
    placed = None if entry is None else _placed(entry, meshes)
    if placed is None or placed.count == 1:
        return None
    if placed.order:
        raise ValueError("an unreduced array over a mesh of reordered devices")
    return placed
