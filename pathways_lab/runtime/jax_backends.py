"""One more backend for JAX, in a process that may have used JAX before.

Problem: JAX chooses its backends once, at its first use, and remembers in many caches what belongs
to them.  A notebook imports JAX, tries something, and then starts a lab.

How: the client becomes a backend under a name, and the default one; all that JAX remembers of
backends and of compiled functions is forgotten.  Arrays from before stay where they are.  A call
that takes such an array and arrays of the new backend gets a copy of it through host memory; JAX
does this for no client that is not its own.

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
from jax._src import xla_bridge as _xla_bridge
from jax._src.interpreters import pxla as _pxla

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
