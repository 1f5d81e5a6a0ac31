"""The lab as JAX's devices in this process, from any moment on.

Problem: a notebook decides for a lab when JAX was imported and used; no environment can say it
before.

How: the same door as for a program that is started with one, beside what JAX had; see
:mod:`pathways_lab.runtime.jax_backends`.

Rule for maintainers: one door for a process, since JAX has one default backend.
"""

from __future__ import annotations

import os
import threading
from contextlib import ExitStack
from typing import Any

import numpy as np
from jax.sharding import Mesh

from pathways_lab.client.lab.devices import Slice
from pathways_lab.client.lab.lab import Lab
from pathways_lab.client.session import failures
from pathways_lab.door import plugin
from pathways_lab.runtime import jax_backends
from pathways_lab.runtime.processes.program_environment import LAB_FILE, PLATFORM, SETTINGS

_lock = threading.Lock()
_open: OpenDoor | None = None


class OpenDoor:
    """JAX's devices in this process are a lab's: see :meth:`pathways_lab.Lab.open_door`.

    devices: all of the lab, as JAX has them.
    """

    def __init__(self, lab: Lab, name: str) -> None:
        self.lab = lab
        os.environ.update({n: value for n, value in SETTINGS.items() if n.startswith("IFRT_")})
        try:
            with ExitStack() as undone:
                with lab.door() as variables:
                    self._connected = plugin.connect(variables[LAB_FILE], name)
                undone.callback(self._connected.close)
                self._leave = jax_backends.enter(PLATFORM, self._connected.client)
                undone.pop_all()
        except RuntimeError as error:
            raise failures.failure("refused", f"no door opens: {error}", "see the reason") from None
        self.devices: tuple[Any, ...] = tuple(self._connected.client.devices())

    def mesh(self, place: Slice) -> Mesh:
        """A slice as a mesh of JAX's devices, with the slice's axes.

            with lab.open_door() as door:
                x = jax.device_put(x, NamedSharding(door.mesh(slice), P("x")))

        Raises PathwaysError when the slice has devices that came to the lab after the door.
        """
        known: dict[tuple[str, int], Any] = {}
        for device in self.devices:
            number = sum(host == device.host for host, _ in known)
            known[device.host, number] = device
        missing = [host for host, number in place.binding.devices if (host, number) not in known]
        if missing:
            raise failures.failure(
                "refused",
                f"slice {place.name} has devices of {', '.join(missing)}, and the door is older",
                "close the door and open another one",
            )
        grid = np.array([known[each] for each in place.binding.devices], dtype=object)
        return Mesh(grid.reshape(place.shape), place.axes)

    def close(self) -> None:
        """JAX has the devices from before again.  Arrays of the lab can be read no more."""
        global _open
        with _lock:
            if _open is not self:
                return
            _open = None
        self._leave()
        self.devices = ()
        self._connected.close()

    def __enter__(self) -> OpenDoor:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<door of {self.lab.name}: {len(self.devices)} devices>"


def open_door(lab: Lab, name: str) -> OpenDoor:
    """See :meth:`pathways_lab.Lab.open_door`."""
    global _open
    with _lock:
        if _open is not None:
            raise failures.failure(
                "refused",
                f"JAX's devices in this process are those of {_open.lab.name} already",
                "close that door first",
            )
        _open = OpenDoor(lab, name)
        return _open


def close_of(lab: Lab) -> None:
    """Close the door of a lab, if it has one here."""
    if _open is not None and _open.lab is lab:
        _open.close()
