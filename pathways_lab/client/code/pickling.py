"""Functions as bytes that another machine can run: by value, the user's modules too.

Problem: cloudpickle sends functions of importable modules by name only, and a
host can import installed packages but not the file beside the user's notebook.
So modules that are the user's own travel by value for the moment of the dump.
And objects are made again without arguments, which ``jax.custom_vjp`` refuses.

Rule for maintainers: what is "the user's own" is decided by
:mod:`~pathways_lab.client.code.source_lines` alone; the registry of cloudpickle is global
and left as it was found.

Paper: section 4.2 (registering computations).
"""

from __future__ import annotations

import contextlib
import copyreg
import sys
import threading
import types
from collections.abc import Iterator
from typing import Any

import cloudpickle
import jax

from pathways_lab.client.code import source_lines

_lock = threading.Lock()


def dumps(value: Any) -> bytes:
    """Pickle *value* with everything of the user's own in it.  Raises what pickling raises."""
    with _lock, _by_value(_own_modules()):
        return bytes(cloudpickle.dumps(value))


def _custom_vjp(made: Any) -> tuple[Any, ...]:
    return copyreg.__newobj__, (type(made), made.fun), vars(made)  # type: ignore[attr-defined]


copyreg.pickle(jax.custom_vjp, _custom_vjp)


def _own_modules() -> list[types.ModuleType]:
    """Loaded modules that are neither installed nor part of Pathways Lab."""
    return [
        module
        for name, module in tuple(sys.modules.items())
        if isinstance(module, types.ModuleType)
        and name.partition(".")[0] not in ("__main__", "pathways_lab")
        and source_lines.is_own(getattr(module, "__file__", None) or "<frozen")
    ]


@contextlib.contextmanager
def _by_value(modules: list[types.ModuleType]) -> Iterator[None]:
    known = cloudpickle.list_registry_pickle_by_value()
    # The registry goes by name, and one module may be loaded under several.
    fresh = {m.__name__: m for m in modules if m.__name__ not in known}
    registered = []
    try:
        for module in fresh.values():
            with contextlib.suppress(ValueError):
                cloudpickle.register_pickle_by_value(module)
                registered.append(module)
        yield
    finally:
        for module in registered:
            cloudpickle.unregister_pickle_by_value(module)
