"""The door of this process, by which JAX has the devices of a lab and arrays of its handles.

Problem: handles are values for JAX too, and what makes arrays of them stands above the client.

Rule for maintainers: set and taken back by :mod:`pathways_lab.door.in_process`; the client works
without one.

Paper: section 3 (a plug-in replacement for JAX's backend).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import jax

from pathways_lab.client.lab import hooks
from pathways_lab.client.session import failures
from pathways_lab.core.errors import PathwaysError


class Door(Protocol):
    """The part of an open door that the client needs.  lab: the one whose devices JAX has."""

    lab: Any

    def knows(self, handle: Any) -> bool:
        """Whether it is a handle of the lab whose devices are JAX's."""

    def sharding(self, handle: Any) -> jax.sharding.NamedSharding | None:
        """How JAX's array of a handle is cut; None on devices that are newer than the door."""

    def device(self, place: Any, number: int) -> Any:
        """JAX's device for one of a slice's."""

    def mesh_of(self, place: Any) -> jax.sharding.Mesh | None:
        """A slice of the lab as a mesh of JAX's devices; None for slices that it does not know."""

    def slice_of(self, mesh: Any) -> Any:
        """The slice of which it is JAX's mesh, if it is one."""

    def arrays(self, handles: Sequence[Any]) -> Sequence[Any]:
        """JAX's arrays of handles."""

    def holds(self, value: Any) -> bool:
        """Whether it is an array of JAX's own on the lab's devices."""

    def close(self) -> None:
        """JAX has the devices no more."""

    def handles(self, leaves: list[Any]) -> list[Any]:
        """Handles in place of JAX's arrays on the lab; the same list where there is none."""


door: Door | None = None
"""The open one."""


def needed(session: Any) -> Door:
    """The door to the lab of a session, which opens at its first use.

    Raises PathwaysError when none opens.
    """
    if door is not None and door.lab.session is session:
        return door
    lab = None if session is None or session.lab is None else session.lab()
    if lab is None or hooks.open_door is None:
        raise failures.refused(
            "no lab is there whose devices JAX could have", "start one: pw.start()"
        )
    opened: Door = hooks.open_door(lab)
    return opened


def is_array(handle: Any) -> bool:
    """Whether JAX takes a handle as an array: JAX has the devices of its lab, or of none yet."""
    return handle.session.lab is not None if door is None else door.knows(handle)


def computes_on(place: Any) -> bool:
    """Whether JAX may compute on a slice, which is a lab's; without one where arguments are."""
    return place is None or (place.owner is not None and place.owner.session.lab is not None)


def arrays(handles: Sequence[Any]) -> Sequence[Any]:
    """JAX's arrays of handles.

    Raises PathwaysError when one has failed, or is of another lab than that whose devices JAX has.
    """
    own = door
    for handle in handles:
        if (failure := handle.failure) is not None:
            raise PathwaysError(failure)
        own = needed(handle.session)
    return [] if own is None else own.arrays(handles)
