"""Forms the devices of a device queue again: slices opened, code compiled, in the queue's turn.

Problem: when gangs of several hosts wait for each other for ever, their common
client is cut and formed again; slices, code and arrays on it must outlive it,
and the next gang must find the new devices, on every host in the same
turn.

How: this is a job of the device queue like any gang, so that earlier jobs go before,
and all later ones find the new devices.
Arrays stay where they are and are brought over when a gang needs them
(:func:`pathways_lab.runtime.arrays.here`), which shares their memory.

Rule for maintainers: places and executables are renewed in place, because gangs
that are queued already hold them.

Paper: section 4.5.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from pathways_lab.core.program.program import SliceId
from pathways_lab.core.slices.topology import SliceBinding
from pathways_lab.runtime.devices import IslandRuntime, Place
from pathways_lab.runtime.host.compiler import Code, Executable, compile_code
from pathways_lab.runtime.host.user_output import Output


@dataclass(frozen=True, slots=True)
class Renewal:
    """A slice whose devices are formed again, with what was compiled for it."""

    binding: SliceBinding
    place: Place
    compiled: tuple[tuple[Code, Executable], ...]


@dataclass(eq=False, repr=False)
class Reforming:
    """Opens slices again and compiles their code (a :class:`.host.device_queues.Job`).

    failed(slice, error): in the lane's thread, for one that could not be.
    """

    _renewals: Sequence[Renewal]
    _runtime: IslandRuntime
    _output: Output
    _failed: Callable[[SliceId, BaseException], None]
    devices: tuple[int, ...] = field(default=(), init=False)

    def start(self) -> None:
        for renewal in self._renewals:
            try:
                self._renew(renewal)
            except Exception as error:  # of this slice only: it may have been released meanwhile
                self._failed(renewal.binding.slice, error)

    def _renew(self, renewal: Renewal) -> None:
        place = self._runtime.reopen(renewal.binding)
        made = [
            (known, compile_code(code, place, self._output)) for code, known in renewal.compiled
        ]
        renewal.place.renew(place.footprint)
        for known, new in made:
            known.renew(new)

    def rest(self) -> None:
        return None

    def ready(self) -> bool:
        return True

    def wait(self) -> None:
        """It is done when it has started."""

    def over(self, start: float) -> None:
        """Nobody waits for that."""
