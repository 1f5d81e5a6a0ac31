"""The devices of a host as JAX devices, of every kind.

Problem: devices must behave like devices: each a FIFO queue, disjoint ones in
parallel.  An accelerator's own client does that.  A JAX CPU client does not:
it runs one multi-device computation at a time, and cheap one-device ones in
the calling thread.  So on CPUs every *footprint*, the set of devices that a slice
covers, has a client of its own, made when it is first needed (2 ms), and a device
queue of its own; gangs of overlapping footprints are chained by the launcher.

Rule for maintainers: everything that knows the kind of device is behind
:class:`IslandRuntime`.  :meth:`IslandRuntime.open` may wait for other hosts
and is never called in a thread that others wait for.

Paper: section 4.5 (hosts own their devices), appendix A (pluggable runtimes).
"""

from __future__ import annotations

import abc
import contextlib
import itertools
import platform
import re
import threading
import zlib
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pathways_lab.core.program.layout import Layout
from pathways_lab.core.program.program import SliceId, slice_name
from pathways_lab.core.slices.topology import Owned, SliceBinding
from pathways_lab.runtime import jax_private
from pathways_lab.runtime.cluster import accelerators
from pathways_lab.transport.machine_share import available_memory, processors

_TOLD = "model name|flags|CPU implementer|CPU part|Features"
"""Facts of Linux about a processor that are equal for processors that compute alike."""
_KEPT = 4
"""Footprints without a slice that keep their client and compiled code."""


def footprint_of(binding: SliceBinding) -> tuple[Owned, ...]:
    """The devices of a slice, whatever their order in its mesh."""
    return tuple(sorted(binding.devices))


def lane_of(footprint: tuple[Owned, ...]) -> str:
    """The name of the queue in front of a set of CPU devices."""
    return "+".join(f"{host}:{number}" for host, number in footprint)


def spec_of(layout: Layout) -> PartitionSpec:
    """The cuts of a layout as users write them in JAX."""
    entries = [axes[0] if len(axes) == 1 else axes or None for axes in layout.spec]
    while entries and entries[-1] is None:
        entries.pop()
    return PartitionSpec(*entries)


def mesh_of(devices: Sequence[Any], axes: Sequence[tuple[str, int]]) -> Mesh:
    """Devices, row-major, as a mesh of these axes and sizes."""
    grid = np.empty(len(devices), dtype=object)
    grid[:] = devices
    return Mesh(grid.reshape([size for _, size in axes]), tuple([name for name, _ in axes]))


class Footprint:
    """The JAX devices behind one set of devices, and the code compiled for them.

    devices: by host and local number; of other hosts only where the runtime is
        one of several processes.
    lane: the name of the queue that launches on them.
    number: its own in this process.
    formation: of which hosts compute together on them, by its number; 0: this one alone.
    executables: compiled functions, filled by :mod:`pathways_lab.runtime.host.compiler`.
    """

    _numbers = itertools.count()

    def __init__(self, lane: str, devices: Mapping[Owned, Any], formation: int = 0) -> None:
        self.lane = lane
        self.formation = formation
        self.number = next(self._numbers)
        self.devices = dict(devices)
        self.executables: dict[Any, Any] = {}
        self.compiling = threading.Lock()


class Place:
    """A slice on this host: its devices in mesh order, and shardings over them.

    devices: JAX devices, row-major over the slice.
    numbers: positions in it of the devices that belong to this host.
    locals: the host's own numbers of those, in the same order.
    renewed: it had other JAX devices before, and arrays may still be on those.
    """

    def __init__(self, binding: SliceBinding, host: str, footprint: Footprint) -> None:
        self.binding = binding
        self.footprint = footprint
        self.devices = tuple(footprint.devices[owned] for owned in binding.devices)
        self.renewed = False
        ours = [(n, local) for n, (name, local) in enumerate(binding.devices) if name == host]
        self.numbers = tuple(number for number, _ in ours)
        self.locals = tuple(local for _, local in ours)
        self._shardings: dict[Layout, NamedSharding] = {}

    def renew(self, footprint: Footprint) -> None:
        """The same devices have been formed again, in a new client."""
        self.footprint = footprint
        self.devices = tuple(footprint.devices[owned] for owned in self.binding.devices)
        self.renewed = True
        self._shardings = {}

    def sharding(self, layout: Layout) -> NamedSharding:
        """The JAX sharding that a layout means here.  Its mesh may name other axes than ours."""
        known = self._shardings.get(layout)
        if known is None:
            mesh = mesh_of(self.devices, layout.mesh)
            known = self._shardings[layout] = NamedSharding(mesh, spec_of(layout))
        return known


class IslandRuntime(abc.ABC):
    """The facts that a device process needs of its devices.

    kind: ``"cpu"``, ``"gpu"``, ``"tpu"``.  count: devices of this host.
    memory: bytes per device that may be handed out.
    emulated: whether they only stand in for accelerators.
    make: those of one make compute the same, to the bit.
    """

    kind: str
    make: str
    count: int
    memory: int
    emulated: bool

    def __init__(self, host: str) -> None:
        self.host = host
        self._lock = threading.Lock()
        self._open: OrderedDict[tuple[Owned, ...], tuple[Footprint, set[SliceId]]] = OrderedDict()

    @abc.abstractmethod
    def lane(self, binding: SliceBinding) -> str:
        """The queue on which gangs of this slice are launched; never empty, never waits."""

    @abc.abstractmethod
    def _make(self, binding: SliceBinding) -> Footprint:
        """The JAX devices behind a set of devices that has none yet."""

    def _check_own(self, owned: tuple[Owned, ...], binding: SliceBinding, why: str) -> None:
        """Raises NotImplementedError for devices of other hosts."""
        strangers = sorted({host for host, _ in owned} - {self.host})
        if strangers:
            others = ", ".join(strangers)
            raise NotImplementedError(
                f"slice {slice_name(binding.slice)} spans {self.host} and {others}{why}"
            )

    @abc.abstractmethod
    def meet(self, binding: SliceBinding, name: str) -> None:
        """Wait for the slice's other hosts, if it has any, with nothing in flight on its lane.

        Before the first launch of each computation; *name* is met at once only.
        Raises PathwaysError when they do not come any more.
        """

    def open(self, binding: SliceBinding) -> Place:
        """The slice's JAX devices, made if need be.  May wait.  Raises what JAX raises."""
        key = footprint_of(binding)
        with self._lock:
            if key not in self._open:
                self._open[key] = (self._make(binding), set())
            footprint, slices = self._open[key]
            slices.add(binding.slice)
            self._open.move_to_end(key)
        return Place(binding, self.host, footprint)

    def reopen(self, binding: SliceBinding) -> Place:
        """The same for a slice that was open, and whose devices are made again."""
        return self.open(binding)

    def close(self, binding: SliceBinding) -> bool:
        """The slice is gone.  Compiled functions are kept for a few sets of devices.

        True: JAX's own caches would keep a client with its threads alive, and should be
        cleared, which takes a while.
        """
        with self._lock:
            entry = self._open.get(footprint_of(binding))
            if entry is not None:
                entry[1].discard(binding.slice)
            unused = [key for key, (_, slices) in self._open.items() if not slices]
            for key in unused[:-_KEPT]:
                del self._open[key]
        return len(unused) > _KEPT


def _processor() -> str:
    """The abilities of this machine's processors, for which XLA compiles."""
    about = platform.machine()
    with contextlib.suppress(OSError):
        first, *_ = Path("/proc/cpuinfo").read_text().split("\n\n")
        told = [line for line in first.splitlines() if re.match(_TOLD, line)]
        about += f"-{zlib.crc32(repr(told).encode()):08x}"
    return about


class CpuRuntime(IslandRuntime):
    """CPU devices of one process that stand in for accelerators.

    room: bytes that this process may take, where that may be less than what is free.
    """

    kind = "cpu"
    emulated = True

    def __init__(
        self,
        host: str,
        devices: int | None = None,
        memory: int | None = None,
        room: int | None = None,
    ) -> None:
        super().__init__(host)
        self.make = _processor()
        self.count = devices or processors()
        room = available_memory() if room is None else min(room, available_memory())
        self.memory = memory or room // (2 * self.count)

    def lane(self, binding: SliceBinding) -> str:
        return lane_of(footprint_of(binding))

    def meet(self, binding: SliceBinding, name: str) -> None:
        """A slice of one process has nobody to wait for."""

    def _make(self, binding: SliceBinding) -> Footprint:
        owned = footprint_of(binding)
        self._check_own(
            owned, binding, "; CPU devices of several hosts cannot compute together here"
        )
        made = jax_private.make_cpu_client(len(owned)).local_devices()
        return Footprint(self.lane(binding), dict(zip(owned, made, strict=True)))


def _claimed(device: Any) -> int:
    """Bytes of an accelerator that are this process's from now on.

    Another process may have claimed some before; JAX's limit does not know that, its pool does.
    """
    jax.block_until_ready(jax.device_put(np.zeros((), np.uint8), device))
    stats = device.memory_stats() or {}
    limit = int(stats.get("bytes_limit", 0)) or 16 << 30
    pool = int(stats.get("pool_bytes", 0)) if accelerators.claims() else 0
    return min(limit, pool or limit)


class PlatformRuntime(IslandRuntime):
    """The devices that JAX finds: its own client, whose devices are queues already."""

    emulated = False

    def __init__(self, host: str, memory: int | None = None) -> None:
        super().__init__(host)
        self._devices = jax.local_devices()
        self.kind = {"cuda": "gpu", "rocm": "gpu"}.get(
            self._devices[0].platform, self._devices[0].platform
        )
        self.make = self._devices[0].device_kind
        self.count = len(self._devices)
        self.memory = memory or min(map(_claimed, self._devices))

    def lane(self, binding: SliceBinding) -> str:
        return self.host

    def meet(self, binding: SliceBinding, name: str) -> None:
        """The platform's own runtime brings hosts together."""

    def _make(self, binding: SliceBinding) -> Footprint:
        owned = footprint_of(binding)
        kind = self.kind.upper()
        self._check_own(
            owned, binding, f", whose {kind}s were not started together: give hosts_per_island"
        )
        return Footprint(self.host, {o: self._devices[o[1]] for o in owned})
