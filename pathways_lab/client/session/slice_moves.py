"""Slices that follow their devices: told where they lie when that has changed.

Problem: a slice may get other devices without its client's help, while the
client holds it, and holds handles on it.

Rule for maintainers: called in the reactor's thread, but for :meth:`follow`, which any
thread may call.

Paper: section 4.1 (virtual devices can be bound to others).
"""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING

from pathways_lab.core.program.program import SliceId
from pathways_lab.core.slices.topology import SliceBinding

if TYPE_CHECKING:
    from pathways_lab.client.lab.devices import Slice


class Following:
    """The slices of one connection that somebody still has."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._slices: list[weakref.ref[Slice]] = []

    def follow(self, on: Slice) -> None:
        """Have the slice's binding changed when it gets other devices."""
        with self._lock:
            known = [entry for entry in self._slices if entry() is not None]
            self._slices = [*known, weakref.ref(on)]

    def own(self, slice_id: SliceId) -> Slice | None:
        """The slice of this number, if it is this client's own."""
        found = (on for on in [entry() for entry in self._slices] if on is not None)
        return next((on for on in found if on.id == slice_id and not on.taken), None)

    def bound(self, binding: SliceBinding) -> None:
        """A slice has these devices now, unless newer ones are known."""
        for on in [entry() for entry in self._slices]:
            if on is not None and on.id == binding.slice:
                on.binding = max(on.binding, binding, key=lambda known: known.generation)
