"""The meaning of a virtual device in this process.

Problem: code that travels by pickle refers to virtual devices, alone or in a
mesh.  In a device process they must become the physical devices to which their
slice is bound; in the kernel that made them they are themselves again, by
:mod:`pathways_lab.client.lab.devices`.  Other code that binds slices in a
process registers its resolver here.

Rule for maintainers: no state but the list of resolvers; the last one that was
registered and knows the slice answers.

Paper: section 4.1 (virtual devices are bound late).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pathways_lab.core.errors import refused
from pathways_lab.core.program.program import SliceId, slice_name

Resolver = Callable[[SliceId, int], Any]
"""``(slice, row-major device number) -> device``, or None for an unknown slice."""

_resolvers: list[Resolver] = []


def resolve_with(resolver: Resolver) -> Callable[[], None]:
    """Let *resolver* answer first from now on; the result takes it back."""
    _resolvers.append(resolver)
    return lambda: _resolvers.remove(resolver)


def device(slice_id: SliceId, number: int) -> Any:
    """The device behind a virtual one.  Raises PathwaysError where nobody knows the slice."""
    for resolver in reversed(_resolvers):
        found = resolver(slice_id, number)
        if found is not None:
            return found
    raise refused(
        f"device {number} of slice {slice_name(slice_id)} means nothing in this process",
        "virtual devices travel only with compiled functions that run on their slice",
    )
