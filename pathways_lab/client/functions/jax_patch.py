"""JAX's own names, routed here when a call carries virtual devices.

Problem: existing JAX code should run on slices with nothing changed but its
devices: ``jax.jit`` with shardings over ``slice.mesh``, ``jax.pmap`` with
``devices=slice.tpus``, ``jax.device_put`` to such a sharding.

Rule for maintainers: these three names only; a call without virtual devices
goes to JAX untouched; what was replaced is restored, in any order of nesting.

Paper: section 3 ("user code changes only its devices").
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax

from pathways_lab.client.code import layouts
from pathways_lab.client.functions.arguments import is_placement
from pathways_lab.client.functions.jit import CompiledFunction
from pathways_lab.client.functions.pmap import pmap
from pathways_lab.client.lab.devices import Slice, VirtualDevice
from pathways_lab.client.program.program import device_put
from pathways_lab.client.session import failures

_KNOWN = (
    *("in_shardings", "out_shardings", "static_argnums", "static_argnames"),
    *("donate_argnums", "donate_argnames"),
)
_HARMLESS = ("inline", "keep_unused")

_lock = threading.Lock()
_originals: dict[str, Any] = {}
_users = 0


def load() -> None:
    """Route calls with virtual devices.  Each load needs its own unload."""
    global _users
    with _lock:
        _users += 1
        if _users == 1:
            for name, routed in (("jit", _jit), ("pmap", _pmap), ("device_put", _device_put)):
                original = getattr(jax, name)
                _originals[name] = original
                setattr(jax, name, functools.wraps(original)(functools.partial(routed, original)))


def unload() -> None:
    """The inverse of :func:`load`."""
    global _users
    with _lock:
        if _users == 0:
            return
        _users -= 1
        if _users == 0:
            for name, original in _originals.items():
                setattr(jax, name, original)
            _originals.clear()


@contextlib.contextmanager
def patched() -> Iterator[None]:
    """``with pw.patched():`` for scripts: JAX's names take virtual devices."""
    load()
    try:
        yield
    finally:
        unload()


def _is_virtual(shardings: Any) -> bool:
    entries = jax.tree.leaves(shardings, is_leaf=is_placement)
    return any(map(layouts.is_virtual, entries))


def _jit(original: Callable[..., Any], function: Any = None, /, **options: Any) -> Any:
    if not _is_virtual((options.get("in_shardings"), options.get("out_shardings"))):
        return original(**options) if function is None else original(function, **options)
    unknown = [
        name
        for name, value in options.items()
        if name not in (*_KNOWN, *_HARMLESS) and value is not None
    ]
    if unknown:
        raise failures.refused(
            f"jax.jit over virtual devices does not take {', '.join(unknown)}",
            f"it takes {', '.join(_KNOWN)}",
        )
    taken = {name: value for name, value in options.items() if name in _KNOWN}
    if function is None:
        return lambda given: CompiledFunction(given, **taken)
    return CompiledFunction(function, **taken)


def _pmap(
    original: Callable[..., Any], function: Any, axis_name: Any = None, **options: Any
) -> Any:
    devices = options.get("devices")
    found = [devices] if isinstance(devices, Slice) else list(devices or ())
    if not any(isinstance(device, VirtualDevice | Slice) for device in found):
        return original(function, axis_name, **options)
    rest = {name: value for name, value in options.items() if name not in ("backend",)}
    return pmap(function, axis_name, **rest)


def _device_put(original: Callable[..., Any], tree: Any, device: Any = None, **options: Any) -> Any:
    targets = jax.tree.leaves(device, is_leaf=lambda x: isinstance(x, Slice | VirtualDevice))
    virtual = any(
        isinstance(target, Slice | VirtualDevice) or layouts.is_virtual(target)
        for target in targets
    )
    return device_put(tree, device) if virtual else original(tree, device, **options)
