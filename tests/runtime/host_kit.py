"""Slices, exported functions and arrays for tests of the device process."""

from __future__ import annotations

import functools
import itertools
import pickle
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import cloudpickle
import jax
import numpy as np
from jax import export
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pathways_lab.core.program.layout import Layout
from pathways_lab.core.program.program import Line
from pathways_lab.core.slices.topology import SliceBinding
from pathways_lab.runtime import emulated, jax_callbacks, jax_private
from pathways_lab.runtime.arrays import is_key, key_implementation, key_type
from pathways_lab.runtime.host.compiler import Code
from pathways_lab.transport.codec import pack

HOST = "island0/host0"
_numbers = itertools.count()


def binding(
    slice_id: int,
    shape: tuple[int, ...],
    devices: Sequence[int | tuple[str, int]],
    host: str = HOST,
) -> SliceBinding:
    """A slice with axes "a", "b", ...; devices are numbers on *host* or pairs."""
    owned = tuple((host, d) if isinstance(d, int) else d for d in devices)
    axes = tuple("abc"[: len(shape)])
    return SliceBinding(slice_id, "kernel-1", host.partition("/")[0], shape, axes, owned, "cpu")


def layout(slice_: SliceBinding, *spec: str | tuple[str, ...] | None) -> Layout:
    """``layout(s, "a", None)`` is ``P("a", None)`` over the slice's mesh."""
    cut = tuple(() if a is None else (a,) if isinstance(a, str) else a for a in spec)
    return Layout(tuple(zip(slice_.axes, slice_.shape, strict=True)), cut)


class _Platform:
    platform, runtime_type = "cpu", "none"


class _StandIn:
    """What a virtual device is to JAX when it lowers."""

    platform, device_kind, process_index, client = "cpu", "cpu", 0, _Platform()

    def __init__(self, number: int) -> None:
        self.id = self.local_hardware_id = number


_stand_in = functools.cache(_StandIn)


def mesh_of(layout: Layout) -> Mesh:
    """The mesh of a layout as a client lowers code for it."""
    devices = np.array([_stand_in(n) for n in range(layout.devices)], dtype=object)
    names = tuple(name for name, _ in layout.mesh)
    return Mesh(devices.reshape([size for _, size in layout.mesh]), names)


Type = tuple[tuple[int, ...], str]


def code(
    function: Callable[..., Any],
    slice_: SliceBinding,
    ins: Sequence[tuple[Type, Layout]],
    outs: Sequence[tuple[Type, Layout]],
    *,
    donated: tuple[int, ...] = (),
    kind: str = "export",
    dumps: Callable[[Any], bytes] = cloudpickle.dumps,
    name: str = "",
) -> Code:
    """*function* of flat leaves as it would travel from a client.

    kind: ``"callbacks"`` for what calls back into Python; dumps: pickles what it calls.
    """
    shardings = [
        NamedSharding(mesh_of(place), PartitionSpec(*(axes or None for axes in place.spec)))
        for _, place in (*ins, *outs)
    ]
    structs = [
        jax.ShapeDtypeStruct(shape, key_type(dtype) if is_key(dtype) else dtype, sharding=sharding)
        for ((shape, dtype), _), sharding in zip(ins, shardings, strict=False)
    ]
    targets = (emulated.TARGET, jax_callbacks.TARGET)
    checks = [export.DisabledSafetyCheck.custom_call(target) for target in targets]
    jitted = jax.jit(function, out_shardings=tuple(shardings[len(ins) :]))
    exporter = export.export(jitted, platforms=["cpu"], disabled_checks=checks)
    blob: Any
    with jax_private.exporting_without_backend():
        if kind == "export":
            blob = exporter(*structs).serialize()
        else:
            blob = pickle.dumps(jax_callbacks.export(lambda: exporter(*structs), dumps)[0])
    return Code(
        f"function-{next(_numbers)}",
        slice_.slice,
        kind,
        name or getattr(function, "__name__", "function"),
        tuple(place for _, place in ins),
        tuple(place for _, place in outs),
        tuple(kind for kind, _ in ins),
        tuple(kind for kind, _ in outs),
        donated,
        Line("cell.py", 3, "y = f(x)"),
        blob=blob,
    )


_kept: list[Any] = []


def _take(number: int) -> Any:
    return _kept[number]


class Kept:
    """Pickles as a reference to a value of this process."""

    def __init__(self, value: Any) -> None:
        self.number = len(_kept)
        _kept.append(value)

    def __reduce__(self) -> Any:
        return _take, (self.number,)


def kept(value: Any) -> bytes:
    """What stays in this process, as if it had been pickled."""
    return pickle.dumps(Kept(value))


class Raises:
    """Cannot be unpickled: it raises RuntimeError."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __reduce__(self) -> Any:
        return exec, (f"raise RuntimeError({self.text!r})",)


def broken(made: Code, text: str) -> Code:
    """The same, but a host that compiles it raises RuntimeError."""
    return replace(made, kind="callbacks", blob=pickle.dumps(Raises(text)))


def wire(made: Code) -> dict[str, Any]:
    """The fields of the message that announces a function."""
    return {
        "function": made.function,
        "slice": made.slice,
        "kind": made.kind,
        "name": made.name,
        "in_layouts": [pack(place) for place in made.in_layouts],
        "out_layouts": [pack(place) for place in made.out_layouts],
        "in_types": [[list(shape), dtype] for shape, dtype in made.in_types],
        "out_types": [[list(shape), dtype] for shape, dtype in made.out_types],
        "donated": list(made.donated),
        "line": pack(made.line),
        "loop": None if made.loop is None else pack(made.loop),
        "checks": list(made.checks),
    }


def key_array(seed: int, shape: tuple[int, ...] = (), dtype: str = "key<fry>") -> Any:
    """Random keys' data as NumPy, as they travel."""
    keys = jax.random.key(seed, impl=key_implementation(dtype))
    keys = jax.random.split(keys, shape) if shape else keys
    return np.asarray(jax.random.key_data(keys))
