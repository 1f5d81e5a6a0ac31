"""A Python function over flat leaves: the form in which code is exported and sent.

Problem: users' functions take and return pytrees of any kind (NamedTuples,
dataclasses, optimiser states, modules).  The cluster should neither know nor
need these classes: only leaves travel, and the tree structure stays with the
client.

Rule for maintainers: imports nothing of the client that imports more, because a
pickled :class:`FlatFunction` is unpickled in a device process.

Paper: section 4.2 (compiled functions).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from pathways_lab.client.functions import scopes


class FlatFunction:
    """``function`` called with leaves, returning leaves.

    tree: structure of ``(positional arguments, keyword arguments)`` without
        the static ones.
    static: ``(position or name, value)`` of the static arguments, ascending.
    out_tree: structure of the result, known after the first call.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        tree: Any,
        static: Sequence[tuple[int | str, Any]] = (),
        name: str = "",
    ) -> None:
        self.function = function
        self.tree = tree
        self.static = tuple(static)
        self.out_tree: Any = None
        # JAX names the compiled module after it.
        self.__name__ = self.__qualname__ = name or getattr(function, "__name__", "function")

    def __call__(self, *leaves: Any) -> list[Any]:
        given, named = jax.tree.unflatten(self.tree, leaves)
        args, kwargs = with_static(given, named, self.static)
        # Also on a host, where nobody else says so: what it calls or compiles is part of it.
        with scopes.entered(scopes.Body(self.__name__)):
            flat, self.out_tree = jax.tree.flatten(self.function(*args, **kwargs))
        return flat


class Narrow:
    """A flat function that is traced outside of x64, with arguments that x64 has made elsewhere.

    JAX keeps their types only where x64 is on: so it is on around the function, and off in it.
    """

    def __init__(self, call: Callable[..., Any]) -> None:
        self.call = call
        self.__name__ = self.__qualname__ = call.__name__

    def __call__(self, *leaves: Any) -> list[Any]:
        with jax.enable_x64(False):
            flat: list[Any] = self.call(*leaves)
        return flat


def with_static(
    args: Sequence[Any], kwargs: dict[str, Any], static: Sequence[tuple[int | str, Any]]
) -> tuple[list[Any], dict[str, Any]]:
    """Dynamic arguments with the static ones, ascending by position, put back."""
    full = list(args)
    for where, value in static:
        if isinstance(where, int):
            full.insert(where, value)
    named = {where: value for where, value in static if isinstance(where, str)}
    return full, {**kwargs, **named}
