"""JAX's settings that change what Python is traced to: named, taken along, put in force again.

Problem: code that calls back into Python travels as a function, and its host traces it once
more.  There JAX has its own settings; under other ones the same Python is other code: random
numbers of another generator, 32 bits where the user has 64.

Rule for maintainers: values are plain, because they travel; JAX's public settings only.

Paper: section 4.2 (registering computations).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import jax

_SETTINGS: dict[str, Any] = {
    "default_matmul_precision": jax.default_matmul_precision,
    "default_prng_impl": jax.default_prng_impl,
    "enable_x64": jax.enable_x64,
    "numpy_dtype_promotion": jax.numpy_dtype_promotion,
    "numpy_rank_promotion": jax.numpy_rank_promotion,
    "threefry_partitionable": jax.threefry_partitionable,
}

TESTS = ("debug_nans", "debug_infs")
"""JAX's names of what gangs are tested for (:mod:`pathways_lab.runtime.nan_checks`): no business of
tracing, for values come later."""


def in_force() -> dict[str, Any]:
    """What this thread has set."""
    values = {name: getattr(jax.config, f"jax_{name}") for name in _SETTINGS}
    # Some are enumerations of text.
    return {name: str(v) if isinstance(v, str) else v for name, v in values.items()}


@contextlib.contextmanager
def under(settings: Mapping[str, Any]) -> Iterator[None]:
    """While active, this thread has *settings*.  Raises KeyError for one that is none of these."""
    with contextlib.ExitStack() as stack:
        for name, value in settings.items():
            if name in TESTS:
                continue
            stack.enter_context(_SETTINGS[name](value))
        yield
