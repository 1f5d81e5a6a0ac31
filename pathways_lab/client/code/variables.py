"""Which variable of the user's holds which handle.

Problem: a handle has no name that its user knows; the variable has.

Rule for maintainers: looked for when somebody asks, in the user's own scopes; a name
that is said is one that works when it is typed.

Paper: section 4.2 (opaque handles).
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping
from types import FrameType, ModuleType
from typing import Any

import jax

from pathways_lab.client.code import source_lines
from pathways_lab.client.session.handles import Handle

_LARGE = 100_000
"""Containers of more elements hold data and no handles."""


def of_caller() -> dict[int, str]:
    """By the number of its buffer, what the user calls a handle: ``"w"``, ``"params['w']"``.

    The plainest of several names; the notebook's own (``_``, ``Out[3]``) come last.
    """
    found: dict[int, str] = {}
    for scope in _scopes(sys._getframe(1)):
        for name in sorted(scope, key=lambda name: name.startswith("_") or name in _HISTORY):
            for path, handle in _handles(scope[name]):
                found.setdefault(handle.buffer_id, f"{name}{path}")
    return found


_HISTORY = ("In", "Out")


def _scopes(frame: FrameType | None) -> Iterator[Mapping[str, Any]]:
    """The scopes of the user's code that called, the innermost first; then the notebook's."""
    while frame is not None:
        if source_lines.is_own(frame.f_code.co_filename):
            yield dict(frame.f_locals)
            if frame.f_locals is not frame.f_globals:
                yield dict(frame.f_globals)
            break
        frame = frame.f_back
    yield dict(vars(sys.modules["__main__"]))


def _handles(value: Any) -> Iterator[tuple[str, Handle]]:
    """Handles in a value, each with the way there."""
    if isinstance(value, Handle):
        yield "", value
    elif not isinstance(value, ModuleType | type):
        leaves: list[tuple[Any, Any]] = []
        # Whatever a class of the user's does when it is taken apart.
        with contextlib.suppress(Exception):
            leaves = jax.tree_util.tree_flatten_with_path(value, _is_data)[0]
        for path, leaf in leaves:
            if isinstance(leaf, Handle):
                yield jax.tree_util.keystr(path), leaf


def _is_data(value: Any) -> bool:
    return isinstance(value, dict | list | tuple) and len(value) > _LARGE
