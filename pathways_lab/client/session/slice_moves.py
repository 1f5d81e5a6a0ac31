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
    """The slices of one connection that somebody still has, its own and those of others."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._slices: weakref.WeakValueDictionary[SliceId, Slice] = weakref.WeakValueDictionary()

    def follow(self, on: Slice) -> Slice:
        """Have a slice's binding changed when it gets other devices; the one that is known."""
        with self._lock:
            return self._slices.setdefault(on.id, on)

    def known(self, slice_id: SliceId) -> Slice | None:
        """The slice of this number: one object, as long as somebody has it."""
        return self._slices.get(slice_id)

    def bound(self, binding: SliceBinding) -> None:
        """A slice has these devices now, unless newer ones are known."""
        on = self.known(binding.slice)
        if on is not None:
            on.binding = max(on.binding, binding, key=lambda known: known.generation)
