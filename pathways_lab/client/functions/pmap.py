"""``pw.pmap``: one call per device along an axis, as in ``jax.pmap``.

Problem: the paper's examples, and much old code, map a function over the
leading axis of its arguments, one element per device.  That is a ``shard_map``
over a one-dimensional mesh with the mapped axis taken away inside and put back
outside, compiled like any other function.

Rule for maintainers: nothing of its own beyond axes; everything else is
``pw.jit``.

Paper: section 3, Figure 2.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from pathways_lab.client.functions.arguments import Numbers, broadcast
from pathways_lab.client.functions.jit import CompiledFunction
from pathways_lab.client.lab.devices import Slice, slice_of_devices
from pathways_lab.client.session import failures

_DEFAULT_AXIS = "devices"


def pmap(
    function: Callable[..., Any],
    axis_name: str | None = None,
    *,
    devices: Sequence[Any] | Slice,
    in_axes: Any = 0,
    out_axes: Any = 0,
    static_broadcasted_argnums: Numbers = (),
    donate_argnums: Numbers = (),
    axis_size: int | None = None,
    name: str | None = None,
) -> CompiledFunction:
    """Map *function* over an axis of its arguments, one element per device of a slice.

    axis_name: for collectives inside (``jax.lax.psum(x, axis_name)``).
    devices: ``slice.tpus``, or the slice.
    in_axes: per positional argument, or one for all: the mapped axis, or None
        for what every device gets whole; pytree prefixes as in ``jax.pmap``.
        Keyword arguments are mapped over their first axis.
    out_axes: a pytree prefix of where the mapped axis goes in the results.
    static_broadcasted_argnums, donate_argnums: as in ``jax.pmap``.
    axis_size: how many devices there must be, if it is said.
    name: in errors and in the timeline; default: the function's.

    Every mapped axis has exactly as many elements as there are devices;
    otherwise PathwaysError.
    """
    if not callable(function):
        raise TypeError(f"pw.pmap takes a function, got {type(function).__name__}")
    on = slice_of_devices(devices)
    label = str(name or getattr(function, "__name__", "pmap"))
    nums = static_broadcasted_argnums
    _check_whole(label, in_axes=in_axes, out_axes=out_axes, static_broadcasted_argnums=nums)
    if axis_size is not None and axis_size != len(on):
        raise failures.refused(
            f"pmap of {label!r} with axis_size={axis_size} over {len(on)} devices",
            f"ask for a slice of {axis_size} devices",
        )
    failures.check_axes([axis_name])
    static = frozenset((nums,) if isinstance(nums, int) else nums or ())
    mapped = _Mapped(function, axis_name or _DEFAULT_AXIS, on, in_axes, out_axes, static, label)
    sharded = functools.partial(jax.tree.map, mapped.sharding, is_leaf=_is_axis)
    return CompiledFunction(
        mapped,
        on=on,
        in_shardings=sharded(_without(in_axes, static)),
        out_shardings=sharded(out_axes),
        static_argnums=tuple(static) or None,
        donate_argnums=donate_argnums,
        kwargs_sharding=mapped.sharding(0),
        name=label,
    )


def _check_whole(name: str, **given: Any) -> None:
    """Axes and positions count from the front, as in ``jax.pmap``.  Raises PathwaysError."""
    for what, value in given.items():
        for leaf in jax.tree.leaves(value):
            if not (isinstance(leaf, int | np.integer) and leaf >= 0):
                raise failures.refused(
                    f"{what}={value!r:.60} of pmap of {name!r}: {leaf!r:.60} is not a whole number"
                    " from 0 on",
                    "count from the front (0, 1, ...); in in_axes None: all get all of it",
                )


def _is_axis(entry: Any) -> bool:
    return entry is None or isinstance(entry, int)


def _without(in_axes: Any, static: frozenset[int]) -> Any:
    """The axes of the dynamic positional arguments."""
    if isinstance(in_axes, list | tuple):
        return tuple(axes for number, axes in enumerate(in_axes) if number not in static)
    return in_axes


class _Mapped:
    """The mapped function over whole arrays."""

    def __init__(
        self,
        function: Callable[..., Any],
        axis: str,
        on: Slice,
        in_axes: Any,
        out_axes: Any,
        static: frozenset[int],
        name: str,
    ) -> None:
        self.function = function
        self.axis = axis
        self.slice = on
        self.mesh = on.mesh_of(((axis, len(on)),))
        self.in_axes = _without(in_axes, static)
        self.out_axes = out_axes
        self.static = static
        # The signature of the user's function, for names in errors.
        functools.update_wrapper(self, function, updated=())
        self.__name__ = name

    def spec(self, axis: int | None) -> PartitionSpec:
        """Cut along *axis*; None: a whole copy on each device."""
        return PartitionSpec() if axis is None else PartitionSpec(*[None] * axis, self.axis)

    def sharding(self, axis: int | None) -> NamedSharding:
        return NamedSharding(self.mesh, self.spec(axis))

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        dynamic = tuple(a for number, a in enumerate(args) if number not in self.static)
        axes = broadcast(self.in_axes, dynamic, "in_axes of pmap", _is_axis)
        axes += [0] * len(jax.tree.leaves(kwargs))
        leaves, tree = jax.tree.flatten((dynamic, kwargs))
        for leaf, axis in zip(leaves, axes, strict=True):
            self._check(leaf, axis)

        def one(*parts: Any) -> Any:
            squeezed = [
                part if axis is None else jnp.squeeze(part, axis)
                for part, axis in zip(parts, axes, strict=True)
            ]
            given, named = jax.tree.unflatten(tree, squeezed)
            rest = iter(given)
            full = [a if n in self.static else next(rest) for n, a in enumerate(args)]
            made, out_tree = jax.tree.flatten(self.function(*full, **named))
            results = jax.tree.unflatten(out_tree, made)
            out_axes = broadcast(self.out_axes, results, "out_axes of pmap", _is_axis)
            expanded = [
                leaf if axis is None else jnp.expand_dims(leaf, axis)
                for leaf, axis in zip(made, out_axes, strict=True)
            ]
            return jax.tree.unflatten(out_tree, expanded)

        return jax.shard_map(
            one,
            mesh=self.mesh,
            in_specs=tuple(map(self.spec, axes)),
            out_specs=jax.tree.map(self.spec, self.out_axes, is_leaf=_is_axis),
            check_vma=False,
        )(*leaves)

    def _check(self, leaf: Any, axis: int | None) -> None:
        shape, count = jnp.shape(leaf), len(self.slice)
        if axis is None:
            return
        if not 0 <= axis < len(shape):
            raise failures.capture_failure(
                f"pmap of {self.__name__!r} maps axis {axis} of an argument of shape {shape},"
                f" which has {len(shape)} dimensions",
                "in_axes=None for an argument that every device gets whole",
            )
        if shape[axis] != count:
            raise failures.capture_failure(
                f"pmap of {self.__name__!r} maps axis {axis} of an argument of shape {shape}:"
                f" size {shape[axis]}, and slice {self.slice.name} has {count} devices",
                f"give the axis size {count}, or ask for a slice of {shape[axis]} devices",
            )
