"""Refuses models that would train otherwise in parts than in one piece, with the reason.

Problem: a stage has its own parameters and its own part of the optimizer's memory.  Weights that
two layers share would become two that drift apart, and an optimizer that looks at all gradients
together (a norm over all of them, whether any is infinite) would look at a stage's only: the
training goes on, and comes to something else than on one device.

How: shared weights are the same array in two layers.  The optimizer is traced, for two steps; what
the changes of one part depend on is followed through it, without a device.

Rule for maintainers: only a model that is sure to differ is refused; in doubt it goes on.

Paper: section 5.3.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from pathways_lab.client.functions import scopes
from pathways_lab.client.session.handles import Handle
from pathways_lab.core.errors import refused
from pathways_lab.runtime import jax_private


def check_shared(parameters: Sequence[Any]) -> None:
    """Raises PathwaysError for an array that two layers have.  parameters: by layer.

    An array whose entries are all equal (zeros, ones) is a beginning that may be given to many.
    """
    owners: dict[int, int] = {}
    for number, own in enumerate(parameters):
        for path, leaf in jax.tree.leaves_with_path(own):
            if not isinstance(leaf, np.ndarray | jax.Array | Handle):
                continue
            other = owners.setdefault(id(leaf), number)
            if other != number and not _is_beginning(leaf):
                raise refused(
                    f"layers {other} and {number} have the same array"
                    f" (parameters{jax.tree_util.keystr(path)}): in a pipeline shared weights"
                    " would become two that drift apart",
                    "give each a copy if they are to differ: jax.tree.map(np.copy, parameters);"
                    " pw.mpmd.jit trains what stays shared, in a step of your own",
                )


def _is_beginning(leaf: Any) -> bool:
    if isinstance(leaf, Handle):
        return False
    data = np.asarray(leaf).ravel()
    return bool((data == data[:1]).all())


def check_optimizer(optimizer: Any, parameters: Sequence[Any], parts: Sequence[range]) -> None:
    """Raises PathwaysError where the changes of one part depend on another part's gradients.

    optimizer: with optax's ``init`` and ``update``.  parameters: by layer.  parts: of layers.
    """
    if len(parts) < 2:
        return
    looked = _unlike(parameters, parts[0])
    owners = [n for n, own in looked.items() for _ in jax.tree.leaves(own)]
    needs = _needs(optimizer, tuple(looked.values()), [n in parts[0] for n in owners])
    for layer, needed in zip(owners, needs, strict=True):
        if needed:
            raise refused(
                "the optimizer looks at all parameters together: what it does to the first part"
                f" of the layers (up to {parts[0].stop - 1}) depends on layer {layer}. Here"
                " each part has an optimizer of its own, which would come to other parameters"
                " than on one device",
                "a step of your own with pw.mpmd.jit, where it looks at all; or one that treats"
                " every array by itself (optax.clip in place of clip_by_global_norm)",
            )


def _unlike(parameters: Sequence[Any], first: range) -> dict[int, Any]:
    """The types of layers of which there are no like ones, by number: enough to ask about."""
    found: dict[Any, tuple[int, Any]] = {}
    for number, own in enumerate(parameters):
        types = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), own)
        key = (number in first, jax.tree.structure(types), *jax.tree.leaves(types))
        found.setdefault(key, (number, types))
    return dict(found.values())


def _needs(optimizer: Any, parameters: Any, first: list[bool]) -> list[bool]:
    """By array: whether the changes of *first* ones depend on it, and it is none of them.

    None does where the optimizer cannot be traced: whoever uses it is told why.
    """
    leaves, tree = jax.tree.flatten(parameters)
    count = len(leaves)

    def twice(*flat: Any) -> list[Any]:
        own, *gradients = (jax.tree.unflatten(tree, flat[n::3]) for n in range(3))
        memory, changes = optimizer.init(own), []
        for gradient in gradients:
            made, memory = optimizer.update(gradient, memory, own)
            changes += jax.tree.leaves(made)
        return changes

    try:
        with scopes.entered(scopes.Body("optimizer")):
            closed = jax.make_jaxpr(twice)(*(leaf for leaf in leaves for _ in range(3)))
    except Exception:
        return [False] * count
    if len(closed.out_avals) != 2 * count:
        return [False] * count
    used = jax_private.needed(closed.jaxpr, first * 2)
    return [any(used[3 * n : 3 * n + 3]) and not first[n] for n in range(count)]
