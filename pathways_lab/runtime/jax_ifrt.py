"""IFRT IR: programs over several meshes, as XLA's MPMD partitioner writes them.

Problem: Shardy's partitioner, which lies in every jaxlib, makes one module of a training step:
calls of compiled fragments on meshes, copies between them, donation.  It is MLIR of a dialect that
has no Python: neither its types nor its attributes can be asked.

How: the dialect comes into a context with the first module that is lowered to it there; from then
on MLIR's own Python walks the operations, and types are read as MLIR prints them.

Rule for maintainers: a door to private JAX as :mod:`.jax_private` is, for this dialect only; an
operation or attribute that is not known here is refused by name.

Source of the dialect: https://github.com/openxla/xla (xla/python/ifrt/ir).
"""

from __future__ import annotations

import importlib
import re
import sys
from dataclasses import dataclass
from typing import Any

import jax
import jaxlib
import numpy as np
from jaxlib import _jax
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import mpmd as _mpmd

from pathways_lab.runtime.jax_modules import written
from pathways_lab.runtime.jax_private import shared_context

Devices = tuple[int, ...]
_LONGEST = 500
"""Characters of what MLIR says of a module."""


@dataclass(frozen=True)
class Array:
    """The type of a value.

    shape, and MLIR's word for the element type.  devices: numbers in the program, in order.
    tiles: positions of devices, by part of each dimension and copy.
    """

    shape: tuple[int, ...]
    word: str
    devices: Devices
    tiles: np.ndarray[Any, Any]


@dataclass(frozen=True)
class FragmentCall:
    """A call of a fragment.  inputs, outputs: numbers of values.

    fragment: its name.  donated: positions of *inputs* that it may overwrite.
    """

    fragment: str
    devices: Devices
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    donated: tuple[int, ...]


@dataclass(frozen=True)
class Copies:
    """Values that go to other devices, or to other places on their own; one output for each."""

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


Step = FragmentCall | Copies


@dataclass(frozen=True)
class MeshProgram:
    """A program over several meshes.

    values: types, by number.  fragments: portable artefacts of StableHLO, by name.
    donated: the inputs that it consumes.  meshes: names of groups of devices, where they have one.
    """

    name: str
    values: tuple[Array, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    donated: frozenset[int]
    steps: tuple[Step, ...]
    fragments: dict[str, bytes]
    meshes: dict[Devices, str]


def read(module: str | bytes) -> MeshProgram:
    """Read a module of IFRT IR, or of the ``mpmd`` dialect with nothing left to partition.

    Raises ValueError, in words, for all else.
    """
    with shared_context() as context, ir.Location.unknown(context):
        _load_dialects(context)
        try:
            parsed = ir.Module.parse(module)
        except ir.MLIRError as error:
            told = next((line for line in str(error).splitlines() if line.startswith("error:")), "")
            said = f"this is no module of IFRT IR or the mpmd dialect: {told[:_LONGEST]}"
            if "properties" in told:
                said += "; another jaxlib printed it: in MLIR's generic form all of them read it"
            raise ValueError(said) from None
        main, name = _main(parsed)
        if "topology" in main.attributes:
            if any(_kind(each).startswith("scf.") for each in main.regions[0].blocks[0].operations):
                raise ValueError(
                    f"{name!r} decides while it runs, and IFRT IR, to which modules are lowered,"
                    " has no conditions: such a module is for reading only"
                )
            try:
                _partitioner().lower_to_ifrt(parsed)
            except jax.errors.JaxRuntimeError as error:
                told = str(error).partition("\n")[0][:_LONGEST]
                raise ValueError(f"the partitioner does not lower it to IFRT IR: {told}") from None
            main, _ = _main(parsed)
        if "ifrt.function" not in main.attributes:
            raise ValueError(f"the main function {name!r} is no function of IFRT IR")
        return _Reader(parsed, main, name).program()


def _partitioner() -> Any:
    """Shardy's, in jaxlib, whose parts ask for each other by a name that they do not have."""
    sys.modules.setdefault("jax.jaxlib", jaxlib)
    sys.modules.setdefault("jax.jaxlib._jax", _jax)
    return importlib.import_module("jaxlib._sdy_mpmd")


def _load_dialects(context: Any) -> None:
    if not context.is_registered_operation("ifrt.Call"):
        _mpmd.register_dialect(context)
        mesh = '<"m" : <["x"=1]>>'
        nothing = f"func.func @main() attributes {{topology = #mpmd.topology<{mesh}>}} {{ return }}"
        _partitioner().lower_to_ifrt(ir.Module.parse(nothing))


def _main(parsed: Any) -> tuple[Any, str]:
    """The one public function, called ``main`` from now on, and the name of the program."""
    about = parsed.operation.attributes
    functions = [each.operation for each in parsed.body.operations if _kind(each) == "func.func"]
    public = [each for each in functions if "sym_visibility" not in each.attributes] or [
        each
        for each in functions
        if ir.StringAttr(each.attributes["sym_visibility"]).value == "public"
    ]
    if len(public) != 1:
        raise ValueError(f"the module has {len(public)} public functions, and a program is one")
    (main,) = public
    symbol = ir.StringAttr(main.attributes["sym_name"]).value
    name = symbol
    if symbol != "main":
        ir.SymbolTable.set_symbol_name(main, "main")
    elif "sym_name" in about:
        name = ir.StringAttr(about["sym_name"]).value.removeprefix("jit_")
    return main, name


def _kind(operation: Any) -> str:
    return str(operation.operation.name)


class _Reader:
    def __init__(self, parsed: Any, main: Any, name: str) -> None:
        self._main, self._name = main, name
        self._modules = {
            ir.StringAttr(each.operation.attributes["sym_name"]).value: each.operation
            for each in parsed.body.operations
            if _kind(each) == "builtin.module"
        }
        self._numbers: dict[Any, int] = {}
        self._values: list[Array] = []
        self._fragments: dict[str, bytes] = {}
        self._meshes: dict[Devices, str] = {}

    def program(self) -> MeshProgram:
        (block,) = self._main.regions[0].blocks
        inputs = tuple([self._new(argument) for argument in block.arguments])
        about = self._main.attributes
        named = list(ir.ArrayAttr(about["arg_attrs"])) if "arg_attrs" in about else []
        donated = [
            number
            for number, each in zip(inputs, named, strict=False)
            if "ifrt.donated" in ir.DictAttr(each)
        ]
        *body, end = block.operations
        steps = tuple([self._step(each.operation) for each in body])
        return MeshProgram(
            self._name, tuple(self._values), inputs,
            tuple([self._numbers[value] for value in end.operands]),
            frozenset(donated), steps, self._fragments, self._meshes,
        )  # fmt: skip

    def _new(self, value: Any) -> int:
        number = self._numbers[value] = len(self._values)
        self._values.append(_array(str(value.type)))
        return number

    def _step(self, op: Any) -> Step:
        inputs = tuple([self._numbers[v] for v in op.operands if v in self._numbers])
        outputs = tuple([self._new(v) for v in op.results if str(v.type) != "!ifrt.control"])
        if op.name in ("ifrt.CopyArrays", "ifrt.Reshard"):
            return Copies(inputs, outputs)
        if op.name != "ifrt.Call":
            raise ValueError(f"the operation {op.name} is not served: ifrt.Call and copies are")
        about = op.attributes
        devices = _numbers(str(about["devices"]))
        symbol = "::".join(ir.SymbolRefAttr(about["callee"]).value[:-1])
        if symbol not in self._fragments:
            self._fragments[symbol] = self._portable(symbol, len(devices))
        if "ifrt.mesh_name" in about:
            self._meshes.setdefault(devices, ir.StringAttr(about["ifrt.mesh_name"]).value)
        donated = (
            set(_numbers(str(about["donated_input_indices"])))
            if ("donated_input_indices" in about)
            else set()
        )
        donated.update(ir.DenseI32ArrayAttr(each)[0] for each in about["io_aliases"])
        return FragmentCall(symbol, devices, inputs, outputs, tuple(sorted(donated)))

    def _portable(self, symbol: str, devices: int) -> bytes:
        """A fragment as a module of its own."""
        made = ir.Module.parse(self._modules[symbol].get_asm(enable_debug_info=False))
        about = made.operation.attributes
        about["sym_name"] = ir.StringAttr.get(symbol)
        del about["sym_visibility"]
        for name, count in (("mhlo.num_partitions", devices), ("mhlo.num_replicas", 1)):
            about[name] = ir.IntegerAttr.get(ir.IntegerType.get_signless(32), count)
        return written(made)


_ARRAY = re.compile(
    r"!ifrt\.array<(?P<tensor>tensor<.*>), #ifrt\.sharding_param<(?P<cuts>.*) to"
    r" \[(?P<order>[\d, ]+)\] on (?P<axes>[\dx]+)>, \[(?P<devices>[\d, ]+)\]"
    r'(, memory_kind = "device")?>'
)


def _array(told: str) -> Array:
    found = _ARRAY.fullmatch(told)
    if found is None:
        raise ValueError(f"values of the type {told} are not served")
    tensor = ir.RankedTensorType(ir.Type.parse(found["tensor"]))
    cuts, axes = (_numbers(found[each]) for each in ("cuts", "axes"))
    order = _numbers(found["order"])
    # Axes count from the minor one, tiles from the major one.
    major = [len(axes) - 1 - axis for axis in reversed(order)]
    tiles = np.arange(np.prod(axes)).reshape(axes[::-1]).transpose(major).reshape(*cuts, -1)
    return Array(tuple(tensor.shape), str(tensor.element_type), _numbers(found["devices"]), tiles)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", text.removeprefix("array<i32").removeprefix("i32"))))
