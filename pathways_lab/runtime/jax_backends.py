"""One more backend for JAX, in a process that may have used JAX before.

Problem: JAX chooses its backends once, at its first use, and remembers in many caches what belongs
to them.  A notebook imports JAX, tries something, and then starts a lab.

How: the client becomes a backend under a name, and the default one; all that JAX remembers of
backends and of compiled functions is forgotten.  Arrays from before stay where they are.  A call
that takes such an array and arrays of the new backend gets a copy of it through host memory; JAX
does this for no client that is not its own.  Handles, too, may be made what JAX takes as arrays.

Rule for maintainers: a door to private JAX as :mod:`.jax_private` is, for this only; a test in
``tests/door/test_in_process.py`` shows all of it.

Paper: section 3 ("a plug-in replacement for JAX's backend").
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax._src import array as _array
from jax._src import core as _core
from jax._src import dtypes as _dtypes
from jax._src import pjit as _pjit
from jax._src import xla_bridge as _xla_bridge
from jax._src.interpreters import pxla as _pxla
from jax._src.lax import lax as _lax

NAMES = frozenset((*dir(_array.ArrayImpl), "_base_array", "_impl"))
"""Attributes and methods of JAX's arrays and random keys, of which handles have some."""
_Handler = Callable[[Sequence[Any], Sequence[Any], Sequence[Any], Sequence[Any]], Sequence[Any]]


def enter(name: str, client: Any) -> Callable[[], None]:
    """Make *client* the default backend of this process, and a backend called *name*.

    The result takes it back.  Raises RuntimeError when there is one of that name.
    """
    known = _xla_bridge.backends()
    if name in known:
        raise RuntimeError(f"JAX has a backend {name!r} already in this process")
    state: Any = vars(_xla_bridge)
    before = state["_default_backend"]
    known[name] = client
    state["_default_backend"] = client
    _forget()

    def leave() -> None:
        known.pop(name, None)
        state["_default_backend"] = before
        _forget()

    return leave


def _forget() -> None:
    for each in list(vars(_xla_bridge).values()):
        if callable(clear := getattr(each, "cache_clear", None)):
            clear()
    # Functions compiled before would go on with the devices of before.
    jax.clear_caches()


def _client(sharding: Any) -> Any:
    return next(iter(sharding._internal_device_list)).client


@functools.cache
def carry_arrays_across() -> None:
    """From now on calls and copies take arrays of any client, through host memory if need be."""
    handlers: Any = _pxla.shard_arg_handlers
    handler: _Handler = handlers[_array.ArrayImpl]
    from_host: _Handler = handlers[np.ndarray]

    def shard(xs: Any, shardings: Any, layouts: Any, semantics: Any) -> Sequence[Any]:
        foreign = [
            _client(x.sharding) is not _client(sharding)
            for x, sharding in zip(xs, shardings, strict=True)
        ]
        if not any(foreign):
            return handler(xs, shardings, layouts, semantics)
        made: list[Any] = []
        for one, x, *where in zip(foreign, xs, shardings, layouts, semantics, strict=True):
            call = from_host if one else handler
            made += call([np.asarray(x) if one else x], *([each] for each in where))
        return made

    handlers[_array.ArrayImpl] = shard


def weakened(array: Any) -> Any:
    """The same elements, of a type that gives way to others."""
    return _lax._convert_element_type(array, weak_type=True)


def take(
    kind: type, sharding: Callable[[Any], Any], arrays: Callable[[Sequence[Any]], Sequence[Any]]
) -> Callable[[], None]:
    """From now on JAX takes objects of *kind*, which have the type of an array, as arrays.

    sharding: that of the array of one.  arrays: the arrays of several, for a call that reads them.
    The result takes it back.
    """

    def described(x: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding(x), weak_type=x.weak_type)

    def shard(xs: Any, shardings: Any, layouts: Any, semantics: Any) -> Sequence[Any]:
        made: Sequence[Any] = _pxla.shard_args(shardings, layouts, semantics, arrays(xs))
        return made

    meta: Any = _pjit.convert_to_metaty
    handlers: Any = _pxla.shard_arg_handlers
    types: Any = _core.pytype_aval_mappings
    types[kind] = lambda x: types[jax.ShapeDtypeStruct](described(x))
    handlers[kind] = shard
    _dtypes.register_canonicalize_value_handler(kind, None)
    vars(_pjit)["convert_to_metaty"] = lambda x: meta(described(x) if type(x) is kind else x)
    # Functions of jax.numpy ask for it before anything else.
    kind.__jax_array__ = lambda x: arrays([x])[0]  # type: ignore[attr-defined]

    def undo() -> None:
        vars(_pjit)["convert_to_metaty"] = meta
        del types[kind], handlers[kind], kind.__jax_array__  # type: ignore[attr-defined]

    return undo
