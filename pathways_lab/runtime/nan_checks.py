"""Whether a gang computes with numbers: which element is the first that is none.

Problem: a NaN in the loss says nothing of where it came from, and values are
looked at long after, if ever.  So a function can be compiled with one more
result: of each of its arguments and results, which element is the first NaN
(or infinity).  It is computed where the values are, and all hosts of the gang
learn the same.

Rule for maintainers: in the same computation as the function itself, so that no host
launches anything that the others do not.  Names are those of JAX's settings.

Paper: section 4.5 (failures are told to what depends on them).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pathways_lab.core.errors import Failure, PathwaysError
from pathways_lab.core.program.layout import boxes
from pathways_lab.core.program.program import Call, Value
from pathways_lab.core.slices.topology import SliceBinding
from pathways_lab.runtime.arrays import dtype_of

TESTS = ("debug_nans", "debug_infs")
"""JAX's names of what gangs are tested for."""
_FINE, _NAN, _INFINITY = range(3)


@dataclass(frozen=True, slots=True)
class Check:
    """The tests of a function."""

    nans: bool = False
    infs: bool = False

    @classmethod
    def of(cls, checks: Collection[str]) -> Check | None:
        """The tests of these names; None: there is none."""
        wanted = [name in checks for name in TESTS]
        return cls(*wanted) if any(wanted) else None

    def verdict(self, leaves: Sequence[Any]) -> jax.Array:
        """While compiling: of each leaf a kind, and the index of its first such element."""
        found = [self._first(leaf) for leaf in leaves if _tested(leaf.dtype)]
        return jnp.stack([jnp.int32(0), *(number for leaf in found for number in leaf)])

    def _first(self, leaf: Any) -> list[Any]:
        nan = jnp.isnan(leaf)
        bad = (nan & self.nans) | (jnp.isinf(leaf) & self.infs)
        # To ask whether is one quick look; where is asked of few.
        fine = jnp.zeros(1 + leaf.ndim, jnp.int32)
        return list(jax.lax.cond(jnp.any(bad), _where, lambda *_: fine, bad, nan))


def _where(bad: Any, nan: Any) -> Any:
    """The kind of the first one in row-major order, and its index."""
    index = []
    # One axis after the other: no reshaping, which would bring shards together.
    for axis, size in enumerate(bad.shape):
        at = jax.lax.broadcasted_iota(jnp.int32, bad.shape, axis)
        first = jnp.min(jnp.where(bad, at, size), initial=size)
        bad &= at == first
        index.append(first.astype(jnp.int32))
    kind = jnp.where(jnp.any(bad & nan), _NAN, _INFINITY)
    return jnp.stack([kind.astype(jnp.int32), *index])


class NotANumber(PathwaysError):
    """A gang was given, or has made, an element that is no number."""


def complain(
    verdict: Any, call: Call, inputs: Sequence[Value], outputs: Sequence[Value],
    binding: SliceBinding,
) -> None:  # fmt: skip
    """Raises NotANumber for the first leaf in which a verdict has found something."""
    numbers = iter(np.asarray(verdict.addressable_data(0)).tolist()[1:])
    for what, values in (("argument", inputs), ("result", outputs)):
        for position, value in enumerate(values):
            if not _tested(dtype_of(value.dtype)):
                continue
            kind, *index = [next(numbers) for _ in range(1 + len(value.shape))]
            if kind != _FINE:
                raise NotANumber(_failure(kind, index, call, what, position, value, binding))


def _failure(
    kind: int, index: list[int], call: Call, what: str, position: int, value: Value,
    binding: SliceBinding,
) -> Failure:  # fmt: skip
    name = call.name or "a gang"
    no_number = "a NaN" if kind == _NAN else "an infinity"
    did = "was given" if what == "argument" else "has made"
    called = f" {value.name!r}" if value.name and value.name != name else ""
    type_ = f"{value.dtype}[{','.join(map(str, value.shape))}]"
    where = f"element {index} of its {what} {position}{called} ({type_})"
    remedy = "look at what makes its value at that line"
    if what == "argument":
        remedy = "look at where that argument comes from: it was uploaded so, or made unchecked"
    elif kind == _NAN:
        remedy += "; lab.check_nans(infs=True) also finds infinities, of which NaNs are made"
    assert value.layout is not None
    number = next(
        number
        for number, box in enumerate(boxes(value.layout, value.shape))
        if all(start <= at < stop for at, (start, stop) in zip(index, box, strict=True))
    )
    host, local = binding.devices[number]
    message = f"{name} {did} {no_number}: {where}, in the shard of device {number} of its slice"
    return Failure("execute", message, remedy, host=host, device=str(local))


def _tested(dtype: Any) -> bool:
    return bool(jnp.issubdtype(dtype, jnp.inexact))
