"""The simulated machine: what exists, what everything costs, and how one knows.

Problem: a picture drawn from invented figures misleads.  So each default names
its source: *measured* (on two shared cores with JAX CPU devices, see
``benchmarks/calibrate.py``), *published* (Pathways, MLSys 2022), or *assumed*.

Rule for maintainers: every figure is a field made with :func:`figure`, its
source beside it; what depends on a function is in :class:`FunctionCost`.

Paper: section 5 (configurations A, B and C).
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from numbers import Real
from pathlib import Path
from typing import Any, NamedTuple, Self

from pathways_lab.timeline.text_table import TextTable


def figure(default: Any, unit: str, source: str) -> Any:
    """A field with its unit, and with where its default comes from."""
    return field(default=default, metadata={"unit": unit, "source": source})


KINDS = ("simulated", "cpu", "gpu", "tpu")
"""Kinds of devices that programs can be captured for."""

DIFFERENCES = ("hosts_per_island", "devices_per_host", "block", "memory", "kind", "speed")
"""In which islands of one machine may differ."""


def _check(costs: FunctionCost | Costs) -> None:
    """Raises ValueError for a figure with which no time could be worked out."""
    for f in fields(costs):
        value, rate = getattr(costs, f.name), f.metadata["unit"] == "bytes/s"
        number = float(value) if isinstance(value, Real) else math.nan
        if not (number > 0 if rate else 0 <= number < math.inf):
            rule = "a number above 0" if rate else "a finite number from 0 on"
            raise ValueError(f"{f.name} of {type(costs).__name__} is {value!r}: {rule}")


@dataclass(frozen=True, slots=True)
class FunctionCost:
    """The cost of a compiled function.

    seconds: of each device.  collective: whether its devices wait for each other.
    temporary: bytes per device beside inputs and outputs.  compile: seconds.
    cores: that it keeps busy per device, where a machine's devices share cores.
    """

    seconds: float = figure(0.001, "s", "assumed; give measured ones with times=")
    collective: bool = figure(True, "", "assumed: sharded code communicates")
    temporary: int = figure(0, "bytes", "assumed; hosts report the real one when they compile")
    compile: float = figure(0.0, "s", "assumed: compiled before, as in a second run")
    cores: float = figure(1.0, "", "assumed: one thread per device")

    def __post_init__(self) -> None:
        _check(self)


@dataclass(frozen=True, slots=True)
class Costs:
    """Costs of everything but compiled functions: seconds, and bytes per second.

    submit: the client, per run that it submits.
    control_latency: one way between control plane and host or client.
    decision: the control plane, per run and other requests.
    hearing: the control plane, per report of a host.
    wake: a host whose launch thread is idle, until it launches what has come.
    launch: a host, per gang; its gangs are launched one after the other.
    report: a busy host gathers reports for so long; an idle one tells at once.
    prompt: the same of ends that the next grants wait for.
    notice: partners of a dead host, until their computation fails.
    local: into a device from its own host.  island: into a host from its island.
    dcn: into a host from another island, or from a client.
    local_latency, island_latency, dcn_latency: of the first byte.
    run_work, step_work: processor time of all processes of the lab, per run, and per
        step and host; only where devices compute with the same cores does it matter.
    jitter: relative spread of every delay and duration.
    """

    submit: float = figure(100e-6, "s", "measured: 70 to 150 us in the calling thread")
    control_latency: float = figure(
        50e-6, "s", "assumed for a network (measured on one machine: 19 us round trip)"
    )
    decision: float = figure(30e-6, "s", "measured: benchmarks/decision.py")
    hearing: float = figure(3e-6, "s", "measured: benchmarks/decision.py, 2 to 10 us")
    wake: float = figure(100e-6, "s", "assumed: a message and two threads")
    launch: float = figure(150e-6, "s", "measured: 0.1 to 0.3 ms for several CPU devices")
    report: float = figure(0.020, "s", "measured: it is the hosts' own period")
    prompt: float = figure(0.001, "s", "measured: the same where grants wait for ends")
    notice: float = figure(0.001, "s", "assumed: a broken connection inside XLA")
    local: float = figure(3e9, "bytes/s", "measured: one copy in a host's memory")
    island: float = figure(50e9, "bytes/s", "assumed: fast links inside an island")
    dcn: float = figure(12.5e9, "bytes/s", "assumed: 100 Gbit/s per host")
    local_latency: float = figure(0.0, "s", "assumed: the same memory")
    island_latency: float = figure(10e-6, "s", "assumed")
    dcn_latency: float = figure(200e-6, "s", "assumed: a data-centre network with TCP")
    run_work: float = figure(0.0, "s", "assumed: accelerators compute beside it")
    step_work: float = figure(0.0, "s", "assumed: accelerators compute beside it")
    jitter: float = figure(0.05, "", "assumed")

    def __post_init__(self) -> None:
        _check(self)


class Figure(NamedTuple):
    """One figure of a machine, and how it is known."""

    name: str
    value: Any
    unit: str
    source: str


@dataclass(frozen=True)
class Machine:
    """Islands of hosts of devices: what :func:`simulate` simulates.

    block: how a host's devices are wired (() for a row).
    memory: bytes per device.  streams: computations that a device runs at once.
    depth: launches in flight per device.
    cores: that all devices compute with, as those of CPUs do, in units of one that is
        alone; two hardware threads of one core are less than two.
    kind: one of :data:`KINDS`; programs for "simulated" devices are captured as for CPUs.
    speed: of its devices: a computation takes its seconds divided by this.
    unlike: by island name, in which of :data:`DIFFERENCES` an island differs from the others:
        ``{"island1": {"devices_per_host": 8, "speed": 0.5, "kind": "gpu"}}``.
    functions: costs by function key; others cost *default*.
    origin: where figures come from that are not defaults.
    """

    islands: int = figure(2, "", "assumed: as pw.start() makes them")
    hosts_per_island: int = figure(2, "", "assumed")
    devices_per_host: int = figure(4, "", "published: hosts of configuration A have 4 TPUs")
    block: tuple[int, ...] = figure((), "", "assumed: a row")
    memory: int = figure(16 * 2**30, "bytes", "published: TPUv3 has 16 GiB per core")
    kind: str = figure("simulated", "", "assumed: what slices and programs are asked for")
    streams: int = figure(1, "", "published: TPUs run one computation at a time")
    depth: int = figure(8, "", "measured: it is the hosts' own bound")
    cores: float = figure(float("inf"), "", "published: accelerators compute by themselves")
    speed: float = figure(1.0, "", "assumed: functions' seconds are those of these devices")
    unlike: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    costs: Costs = field(default_factory=Costs)
    functions: Mapping[str, FunctionCost] = field(default_factory=dict)
    default: FunctionCost = field(default_factory=FunctionCost)
    origin: str = "given"

    def __post_init__(self) -> None:
        for name in (
            "islands",
            "hosts_per_island",
            "devices_per_host",
            "memory",
            "streams",
            "depth",
        ):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} of a machine is {value!r}: a whole number from 1 on")
        for name in ("cores", "speed"):
            value = getattr(self, name)
            if not isinstance(value, int | float) or not value > 0:
                raise ValueError(f"{name} of a machine is {value!r}: a number above 0")
        if math.isinf(self.speed):
            raise ValueError(f"speed of a machine is {self.speed!r}: a finite number above 0")
        if self.kind not in KINDS:
            raise ValueError(
                f"kind of a machine is {self.kind!r}: one of {', '.join(map(repr, KINDS))};"
                " what its devices are called else goes into origin="
            )
        wired = isinstance(self.block, tuple) and all(isinstance(n, int) for n in self.block)
        if self.block and not (wired and math.prod(self.block) == self.devices_per_host):
            raise ValueError(
                f"block of a machine is {self.block!r}: sizes, as a tuple, with the product"
                f" {self.devices_per_host}, as many devices as a host has; or () for a row"
            )
        names = [f"island{i}" for i in range(self.islands)]
        if not isinstance(self.unlike, Mapping):
            raise ValueError(
                f"unlike of a machine is {self.unlike!r}: differences by island, like"
                " {'island1': {'speed': 0.5}}"
            )
        for island, differences in self.unlike.items():
            if island not in names:
                raise ValueError(
                    f"unlike of a machine names {island!r}: its islands are {names[0]} to"
                    f" {names[-1]}"
                )
            if not isinstance(differences, Mapping) or not set(differences) <= set(DIFFERENCES):
                raise ValueError(
                    f"unlike of {island} is {differences!r}: a mapping, with the names"
                    f" {', '.join(DIFFERENCES)}"
                )
        assert self._others is not None  # each checks itself

    def of(self, island: str) -> Machine:
        """The machine as it is on an island: one whose islands are all like that one."""
        return self._others.get(island, self)

    @functools.cached_property
    def _others(self) -> dict[str, Machine]:
        return {name: replace(self, unlike={}, **given) for name, given in self.unlike.items()}

    def cost(self, function: str) -> FunctionCost:
        """The cost of a function, by its key."""
        return self.functions.get(function, self.default)

    @property
    def devices(self) -> int:
        """How many devices it has."""
        return sum(self.of(island).devices_per_host for _, island in self.hosts())

    def hosts(self) -> list[tuple[str, str]]:
        """``(host, island)`` of every host."""
        return [
            (f"island{i}/host{h}", f"island{i}")
            for i in range(self.islands)
            for h in range(self.of(f"island{i}").hosts_per_island)
        ]

    @property
    def size(self) -> str:
        """Islands, hosts of each and devices of each of these, in words."""
        like = f"{self.hosts_per_island} x {self.devices_per_host}"
        if not self.unlike:
            return f"{self.islands} x {like}"
        others = [self.of(island) for island in self.unlike]
        parts = [f"{m.hosts_per_island} x {m.devices_per_host}" for m in others]
        rest = self.islands - len(others)
        return " + ".join([*([f"{rest} x {like}"] if rest else []), *parts])

    def calibrated(self, measured: str | Path | Mapping[str, Any]) -> Self:
        """The same machine with measured costs.

        measured: what ``benchmarks/calibrate.py`` has saved (a path), or figures of
            :class:`Costs` by name.
        Raises ValueError for a figure that is none.
        """
        if isinstance(measured, str | Path):
            origin = f"measured: {Path(measured).name}"
            costs: Mapping[str, Any] = json.loads(Path(measured).read_text("utf-8"))["costs"]
        else:
            origin, costs = "measured", measured
        known = {f.name for f in fields(Costs)}
        if unknown := sorted(set(costs) - known):
            raise ValueError(f"{', '.join(unknown)}: no such cost; there are {sorted(known)}")
        return replace(self, costs=replace(self.costs, **costs), origin=origin)

    def figures(self) -> tuple[Figure, ...]:
        """Every figure with its source: a default's own, else :attr:`origin`."""
        found = []
        parts = (("", self), ("costs.", self.costs), ("default.", self.default))
        for prefix, part in parts:
            for f in fields(part):
                if "source" in f.metadata:
                    value = getattr(part, f.name)
                    kept = f.default is not MISSING and value == f.default
                    source = f.metadata["source"] if kept else self.origin
                    found.append(Figure(prefix + f.name, value, f.metadata["unit"], source))
        return tuple(found)

    def _repr_html_(self) -> str:
        rows = [(f.name, f"{f.value} {f.unit}", f.source) for f in self.figures()]
        table = TextTable(rows, ("figure", "value", "source"))._repr_html_()
        islands = f"{self.islands} island{'s' * (self.islands != 1)}"
        devices = f"{self.devices:,} device{'s' * (self.devices != 1)}"
        return (
            f"<details><summary>simulated machine: {islands}, {devices}</summary>{table}</details>"
        )
