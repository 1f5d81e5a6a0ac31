"""``pw.mpmd.named``: marks in ordinary JAX functions, which JAX's transformations keep.

Problem: a training step is differentiated, mapped and rematerialised before anybody sees its
equations, and each of them must still tell to which part of the model it belongs.

How: a marked part is an inner ``jax.jit`` whose name carries the mark.  JAX keeps the name of
such a call in everything that it makes of it: linearised, transposed, batched, recomputed.

Rule for maintainers: without ``pw.mpmd.jit`` around it, a mark changes no result.

Paper: section 3 (user code says what runs, the system where).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
from jax import jit as jax_jit  # JAX's own, also while routed

from pathways_lab.client.session import failures

_PREFIX = "part:"


def named(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function, as a part of a model that has a name.

    name: which part; ``pw.mpmd.jit(..., on={name: slice})`` says where it runs.  Several calls may
        have one name: they run in one place.
    function: any JAX function of pytrees; leaves that are no arrays (numbers of Python, texts,
        functions) stay as they are.

    >>> encode = pw.mpmd.named("encoder", encode)            # doctest: +SKIP

    ``jax.grad``, ``jax.vmap``, ``jax.checkpoint`` and ``jax.lax.scan`` around it keep the name.
    """
    if not isinstance(name, str) or not name or not callable(function):
        raise failures.refused(
            f"pw.mpmd.named({name!r:.60}, {function!r:.60}): a part has a name and a function",
            'pw.mpmd.named("encoder", encode)',
        )

    def part(args: Any, kwargs: Any) -> Any:
        args, kwargs = _opened((args, kwargs))
        return _closed(function(*args, **kwargs))

    part.__name__ = part.__qualname__ = marked(name)
    compiled = jax_jit(part)

    @functools.wraps(function, updated=())
    def called(*args: Any, **kwargs: Any) -> Any:
        return _opened(compiled(*_closed((args, kwargs))))

    return called


def marked(name: str) -> str:
    """The name of an inner ``jax.jit`` that is part *name*."""
    return _PREFIX + name


def name_of(equation: Any) -> str | None:
    """The part that a recorded equation is marked as; None where it has no mark."""
    name = equation.params.get("name")
    if isinstance(name, str) and name.startswith(_PREFIX):
        return name.removeprefix(_PREFIX)
    return None


def without_name(equation: Any) -> Any:
    """A recorded equation as if it had no mark: equal code of two parts is equal."""
    if name_of(equation) is None:
        return equation
    return equation.replace(params={**equation.params, "name": _PREFIX})


@jax.tree_util.register_static
@dataclass(frozen=True)
class _Plain:
    """A leaf that is no array: part of the code.  kind: 1, 1.0 and True are not the same."""

    value: Any
    kind: type


def _closed(tree: Any) -> Any:
    """Leaves that are no arrays become part of the structure."""
    return jax.tree.map(lambda x: x if hasattr(x, "dtype") else _Plain(x, type(x)), tree)


def _opened(tree: Any) -> Any:
    def value(leaf: Any) -> Any:
        return leaf.value if isinstance(leaf, _Plain) else leaf

    return jax.tree.map(value, tree, is_leaf=lambda x: isinstance(x, _Plain))
