"""Colocated Python: functions of a client program that run beside the devices of the lab.

Problem: ``jax.experimental.colocated_python`` sends pickled functions, and unpickling runs their
code.  So neither the door nor a host may unpickle them.

How: they run in a process of their own, a child of the door (:mod:`.colocated_process`).  On the
lab a call is a gang like every other: a compiled function whose one operation calls back there, as
callbacks of JAX call back into the program (:mod:`.callbacks`).  So calls have their place in the
order of gangs, results are handles, and errors, faults and views are those of callbacks.  Calls on
the same devices hand a value on, which keeps the order of the program.  A function keeps its
devices while it runs.

Rule for maintainers: a function travels as a file in the folder of the process, whose name is its
number; nothing here reads it.
"""

from __future__ import annotations

import itertools
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import jax
import jax.numpy as jnp
from jax.experimental import io_callback

from pathways_lab.client.code import layouts
from pathways_lab.client.code.tiles import whole
from pathways_lab.client.functions.array_types import ArrayType
from pathways_lab.client.functions.jit import CompiledFunction
from pathways_lab.client.lab.devices import Slice
from pathways_lab.core.program.layout import Layout
from pathways_lab.door import strings
from pathways_lab.door.callbacks import Dropped, Remote, raise_said
from pathways_lab.door.colocated_process import DROP, MESSAGE
from pathways_lab.door.shardings import Placing
from pathways_lab.runtime.processes import child_process

TYPE = "xla::ifrt::CustomCallProgram"
"""The protocol's name of such programs."""
KIND = "jax_colocated_python_v0.0.1"
"""JAX's name of what they carry."""
TURN = jax.ShapeDtypeStruct((), jnp.bool_)
"""The type of what calls hand on: the next one has its turn when the last one is over."""
_PATIENCE = 60.0
"""Seconds that the process may take to start."""


class Beside:
    """The process beside the devices, which starts with the first function.

    folder: private; it gets the functions there.  devices: of the lab.
    """

    def __init__(self, folder: Path, secret: bytes, devices: int) -> None:
        self._folder = folder
        self._secret = secret
        self._devices = devices
        self._address = f"{folder}/colocated"
        self._numbers = itertools.count(1)
        self._child: child_process.Child | None = None

    def keep(self, text: bytes) -> tuple[int, Remote]:
        """Let hosts call a function: its number, and what calls it."""
        number = next(self._numbers)
        (self._folder / f"function-{number}").write_bytes(text)
        if self._child is None or not (self._child.alive and self._listens()):
            Path(self._address).unlink(missing_ok=True)  # of one that a function has ended
            self._child = child_process.spawn(
                "pathways_lab.door.colocated_process",
                {
                    "secret": self._secret.hex(),
                    "folder": str(self._folder),
                    "address": self._address,
                    "devices": self._devices,
                },
                name="colocated Python",
                folder=self._folder,
                environment={"JAX_PLATFORMS": "cpu"},
            )
            self._child.hear(_PATIENCE)
        return number, Remote(self._address, self._secret, number, ordered=False)

    def _listens(self) -> bool:
        """Whether the process is there: one that ends is no zombie yet when its callers hear of it.

        Its listener closes before its connections, which have larger numbers.
        """
        with socket.socket(socket.AF_UNIX) as probe:
            try:
                probe.connect(self._address)
            except OSError:
                return False
        return True

    def dropping(self, place: Slice) -> CompiledFunction:
        """``turn -> turn`` that also takes the number of a function that nobody calls any more."""
        dropped = Dropped(Remote(self._address, self._secret, DROP, ordered=False))

        def body(turn: Any, number: Any) -> Any:
            return io_callback(dropped, TURN, turn, number, ordered=False)

        out = layouts.sharding_of(whole(len(place.binding.devices), 0), place)
        return CompiledFunction(body, on=place, out_shardings=out, name="drop")


@final
@dataclass(frozen=True, eq=False)
class Colocated:
    """A function as the door has it: see :class:`pathways_lab.door.programs.Loaded`.

    number: its own, beside the devices.
    """

    name: str
    devices: tuple[int, ...]
    number: int
    remote: Remote
    in_kinds: tuple[ArrayType, ...]
    in_placings: tuple[Placing, ...]
    out_kinds: tuple[ArrayType, ...]
    out_placings: tuple[Placing, ...]
    donated: tuple[int, ...] = ()
    tokens: frozenset[int] = frozenset()

    @property
    def key(self) -> str:
        return f"colocated {self.number}"

    def here(self, placing: Placing, kind: ArrayType) -> Placing:
        """The placing that an array has in a call: its own on these devices, else it is whole."""
        ndim = len(kind.shape)
        layout = placing.layout
        if placing.on == self.devices and len(layout.spec) == ndim and len(layout.mesh) == 1:
            return placing  # JAX takes one mesh in a computation
        return Placing(self.devices, whole(len(self.devices), ndim))

    @property
    def results(self) -> int:
        """How many of its results are the client's."""
        return len(self.out_kinds)

    def calling(self, place: Slice) -> CompiledFunction:
        """The call on the lab: ``turn, *arguments -> turn, error, *results``."""
        said = jax.ShapeDtypeStruct((MESSAGE,), jnp.uint8)
        structs = [TURN, said, *(kind.struct for kind in self._types)]

        def body(*given: Any) -> Any:
            # Not as a pure one, which JAX may call on each device.
            return io_callback(self.remote, structs, *given, ordered=False)

        cuts = [self._whole(0), self._whole(1), *self._cuts]
        return self._compiled(body, place, self.name, cuts)

    def checking(self, place: Slice) -> CompiledFunction:
        """``error, *results -> over, *results``, which fails if the call has.

        So a call that failed holds up none of those that have their turns after it.
        """

        def body(error: Any, *results: Any) -> Any:
            return [jax.pure_callback(raise_said, TURN, error), *results]

        name = f"{self.name} (results)"
        return self._compiled(body, place, name, [self._whole(0), *self._cuts])

    @property
    def _types(self) -> list[ArrayType]:
        """The types of results on the lab."""
        text = ArrayType((strings.MOST,), "uint8")
        return [text if kind.dtype == strings.NAME else kind for kind in self.out_kinds]

    @property
    def _cuts(self) -> list[Layout]:
        placings = zip(self.out_placings, self._types, strict=True)
        return [self.here(*each).layout for each in placings]

    def _whole(self, ndim: int) -> Layout:
        return whole(len(self.devices), ndim)

    def _compiled(
        self, body: Callable[..., Any], place: Slice, name: str, cuts: Sequence[Layout]
    ) -> CompiledFunction:
        shardings = [layouts.sharding_of(cut, place) for cut in cuts]
        return CompiledFunction(body, on=place, out_shardings=shardings, name=name)
