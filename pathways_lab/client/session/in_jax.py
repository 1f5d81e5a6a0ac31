"""The door of this process, where one is open: JAX's devices are a lab's.

Problem: with an open door handles are values for JAX too, and what makes arrays of them stands
above the client.

Rule for maintainers: set and taken back by :mod:`pathways_lab.door.in_process`; the client works
without one.

Paper: section 3 (a plug-in replacement for JAX's backend).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, Protocol

import jax


class Door(Protocol):
    """The part of an open door that the client needs."""

    @property
    def names(self) -> Collection[str]:
        """The attributes of JAX's arrays."""

    def knows(self, handle: Any) -> bool:
        """Whether it is a handle of the lab whose devices are JAX's."""

    def sharding(self, handle: Any) -> jax.sharding.NamedSharding:
        """How JAX's array of a handle is cut."""

    def mesh_of(self, place: Any) -> jax.sharding.Mesh | None:
        """A slice of the lab as a mesh of JAX's devices; None for slices that it does not know."""

    def slice_of(self, mesh: Any) -> Any:
        """The slice of which it is JAX's mesh, if it is one."""

    def arrays(self, handles: Sequence[Any]) -> Sequence[Any]:
        """JAX's arrays of handles."""

    def handles(self, leaves: list[Any]) -> list[Any]:
        """Handles in place of JAX's arrays on the lab; the same list where there is none."""


door: Door | None = None
