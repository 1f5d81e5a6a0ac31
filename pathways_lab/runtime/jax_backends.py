"""One more backend for JAX, in a process that may have used JAX before.

Problem: JAX chooses its backends once, at its first use, and remembers in many caches what belongs
to them.  A notebook imports JAX, tries something, and then starts a lab.

How: the client becomes a backend under a name, and where asked the default one; all that JAX
remembers of backends and of compiled functions is then forgotten.  Arrays from before stay where
they are.  A call that takes such an array and arrays of the new backend gets a copy of it through
host memory; JAX does this for no client that is not its own.  Handles, too, may be made what JAX
takes as arrays, and devices may stand for those that JAX computes on.

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
from jax._src import dispatch as _dispatch
from jax._src import dtypes as _dtypes
from jax._src import pjit as _pjit
from jax._src import xla_bridge as _xla_bridge
from jax._src.interpreters import pxla as _pxla
from jax._src.lax import lax as _lax
from jax._src.sharding_impls import GSPMDSharding as _GSPMDSharding
from jax.sharding import Mesh, NamedSharding, Sharding
from jaxlib import _jax

NAMES = frozenset((*dir(_array.ArrayImpl), "_base_array", "_impl"))
"""Attributes and methods of JAX's arrays and random keys, of which handles have some."""
_DeviceList: Any = _jax.DeviceList
_Handler = Callable[[Sequence[Any], Sequence[Any], Sequence[Any], Sequence[Any]], Sequence[Any]]


def enter(name: str, client: Any) -> Callable[[], None]:
    """Make *client* a backend called *name* of this process.

    The result takes it back.  Raises RuntimeError when there is one of that name.
    """
    known = _xla_bridge.backends()
    if name in known:
        raise RuntimeError(f"JAX has a backend {name!r} already in this process")
    known[name] = client

    def leave() -> None:
        known.pop(name, None)
        _forget()

    return leave


def prefer(client: Any) -> Callable[[], None]:
    """Make the client of a backend the default one.  The result takes it back."""
    state: Any = vars(_xla_bridge)
    before = state["_default_backend"]

    def use(one: Any) -> None:
        state["_default_backend"] = one
        _forget()

    use(client)
    return functools.partial(use, before)


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


@functools.cache
def no_memory_statistics(runtime: str) -> None:
    """From now on ``memory_stats()`` of devices of this runtime is None, as of CPU devices.

    JAX's method raises for every client that is not its own.
    """
    devices: Any = _jax.Device
    statistics = devices.memory_stats

    def memory_stats(self: Any) -> Any:
        """Memory statistics of this device, by name; None if there are none."""
        return None if self.client.runtime_type == runtime else statistics(self)

    devices.memory_stats = memory_stats


def weakened(array: Any) -> Any:
    """The same elements, of a type that gives way to others."""
    return _lax._convert_element_type(array, weak_type=True)


def take(
    kind: type,
    sharding: Callable[[Any], Any],
    value: Callable[[Any], Any],
    arrays: Callable[[Sequence[Any]], Sequence[Any]],
) -> None:
    """From now on JAX takes objects of *kind*, which have the type of an array, as arrays.

    sharding: that of the array of one.  value: one as a value in the scope where JAX reads it.
    arrays: the arrays of several, for a call that reads them.
    """

    def described(x: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding(x), weak_type=x.weak_type)

    def shard(xs: Any, shardings: Any, layouts: Any, semantics: Any) -> Sequence[Any]:
        made: Sequence[Any] = _pxla.shard_args(shardings, layouts, semantics, arrays(xs))
        return made

    meta: Any = _pjit.convert_to_metaty
    types: Any = _core.pytype_aval_mappings
    types[kind] = lambda x: types[jax.ShapeDtypeStruct](described(x))
    handlers: Any = _pxla.shard_arg_handlers
    handlers[kind] = shard
    _dtypes.register_canonicalize_value_handler(kind, None)
    vars(_pjit)["convert_to_metaty"] = lambda x: meta(described(x) if type(x) is kind else x)
    # Functions of jax.numpy ask for it before anything else.
    kind.__jax_array__ = value  # type: ignore[attr-defined]


def stand_for(kind: type, real: Callable[[Any], Any]) -> None:
    """From now on JAX computes with devices of *kind* on those for which they stand.

    real: that for which one stands.  JAX asks where it compiles or copies, and where arrays are on
    such ones already.
    """

    def replaced(x: Any) -> Any:
        if isinstance(x, kind):
            return real(x)
        if type(x) in (tuple, list):
            return type(x)(map(replaced, x))
        if not isinstance(_first_device(x), kind):
            return x
        if isinstance(x, Mesh):
            devices = np.array([*map(real, x.devices.flat)]).reshape(x.devices.shape)
            return Mesh(devices, x.axis_names, axis_types=x.axis_types)
        if isinstance(x, NamedSharding):
            return x.update(mesh=replaced(x.mesh))
        if isinstance(x, _GSPMDSharding):
            return _GSPMDSharding(replaced(x._internal_device_list), x._hlo_sharding)
        return _DeviceList(tuple(map(real, x)))

    def mixed(*shardings: Any) -> bool:
        devices = filter(None, map(_first_device, shardings))
        return len({isinstance(device, kind) for device in devices}) > 1

    def resolved(args: Any, shardings: Any) -> Any:
        if mixed(*(arg.sharding for arg in args), *shardings):
            shardings = replaced(tuple(shardings))
        return resolve(args, shardings)

    def assigned(shardings: Any, mesh: Any) -> Any:
        asked = [*shardings]
        if mixed(mesh, *(each for each, *_ in asked)):
            asked, mesh = [(replaced(each), *more) for each, *more in asked], replaced(mesh)
        return assign(asked, mesh)

    def compiled(*args: Any, backend: Any, device_list: Any, **options: Any) -> Any:
        if isinstance(_first_device(device_list), kind):
            device_list = replaced(device_list)
            backend = device_list[0].client
            args = replaced(args)
            options = {name: replaced(each) for name, each in options.items()}
        return compile_(*args, backend=backend, device_list=device_list, **options)

    def put(x: Any, *, device: Any, **options: Any) -> Any:
        return put_(x, device=replaced(device), **options)

    def put_shards(aval: Any, sharding: Any, xs: Any, devices: Any, *rest: Any, **more: Any) -> Any:
        return put_shards_(aval, replaced(sharding), xs, replaced(devices), *rest, **more)

    resolve = _pjit._resolve_in_shardings
    executables: Any = _pxla.UnloadedMeshExecutable
    assign, compile_ = _pxla._get_and_check_device_assignment, executables.from_hlo
    put_, put_shards_ = _dispatch._device_put_impl, _pxla.batched_device_put
    vars(_pjit)["_resolve_in_shardings"] = resolved
    vars(_pxla)["_get_and_check_device_assignment"] = assigned
    executables.from_hlo = staticmethod(compiled)
    vars(_dispatch)["_device_put_impl"] = put
    vars(_pxla)["batched_device_put"] = put_shards


def _first_device(x: Any) -> Any:
    """A device on which it is, if it is on devices."""
    if isinstance(x, NamedSharding):
        x = x.mesh
    if isinstance(x, Mesh):
        return x.devices.flat[0] if x.devices.size else None
    if isinstance(x, Sharding):
        x = x._internal_device_list
    return x[0] if isinstance(x, _DeviceList) else None
