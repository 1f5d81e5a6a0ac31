"""Layers as people have them: functions with parameters, Flax NNX modules, Equinox modules.

Problem: a pipeline needs plain functions of parameters; libraries of models keep both
together in objects.

Rule for maintainers: no library is imported here; whoever has a module of one has
loaded it.  A module whose call changes it is refused, since a pipeline would lose that.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np

from pathways_lab.core.errors import refused
from pathways_lab.pipeline.apart import check_shared

Layer = Callable[[Any, Any], Any]
"""``layer(parameters, x) -> y``, a plain JAX function."""


def as_layers(given: Sequence[Any]) -> list[tuple[Layer, Any]]:
    """``(function, parameters)`` for each of: such a pair, an NNX module, an Equinox module.

    An NNX module is called with a batch, an Equinox module with one example at a time
    (by ``jax.vmap``), as is usual for each.  Raises PathwaysError for anything else, and for
    layers that share an array.
    """
    if not isinstance(given, Iterable):
        raise refused(
            f"layers={given!r:.60} is not a list of layers",
            "give [(function, parameters), ...], with function(parameters, x) -> y",
        )
    layers = [_parted(entry) for entry in given]
    check_shared([parameters for _, parameters in layers])
    return [_here(*pair) for pair in zip(given, layers, strict=True)]


def _here(given: Any, layer: tuple[Layer, Any]) -> tuple[Layer, Any]:
    """The state that a module had on a device of this process, as arrays of NumPy."""
    if isinstance(given, tuple):
        return layer
    return layer[0], jax.tree.map(np.asarray, layer[1])


def _parted(given: Any) -> tuple[Layer, Any]:
    """The function and the parameters, as they are."""
    if isinstance(given, tuple) and len(given) == 2 and callable(given[0]):
        return given
    nnx, equinox = sys.modules.get("flax.nnx"), sys.modules.get("equinox")
    if nnx is not None and isinstance(given, nnx.Module):
        return _nnx(nnx, given)
    if equinox is not None and isinstance(given, equinox.Module):
        return _equinox(equinox, given)
    raise refused(
        f"{type(given).__name__} is not a layer: a pair (function, parameters), a Flax NNX"
        " module or an Equinox module is one",
        "give (function, parameters) with function(parameters, x) -> y",
    )


def _nnx(nnx: Any, module: Any) -> tuple[Layer, Any]:
    graph, parameters, rest = nnx.split(module, nnx.Param, ...)
    if jax.tree.leaves(rest):
        raise refused(
            f"{type(module).__name__} has state beside its parameters (statistics, random"
            " numbers), and a pipeline would lose what its call changes",
            "leave out dropout and batch normalisation, or give (function, parameters)",
        )

    def layer(own: Any, x: Any) -> Any:
        return nnx.merge(graph, own, rest)(x)

    return layer, parameters


def _equinox(equinox: Any, module: Any) -> tuple[Layer, Any]:
    parameters, static = equinox.partition(module, equinox.is_inexact_array)

    def layer(own: Any, x: Any) -> Any:
        return jax.vmap(equinox.combine(own, static))(x)

    return layer, parameters
