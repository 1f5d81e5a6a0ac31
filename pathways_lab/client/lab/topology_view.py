"""Islands, hosts and devices as users see them: plain data from the control plane.

Rule for maintainers: no behaviour beyond lookups and looks.

Paper: section 4.1 (resource manager).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pathways_lab.timeline.text_table import Tabled, TextTable
from pathways_lab.transport import versions


@dataclass(frozen=True, slots=True)
class Device:
    """One physical device.  number: on its host.  memory: bytes that programs may use."""

    host: str
    number: int
    kind: str
    memory: int


@dataclass(frozen=True, slots=True)
class Host:
    """One device process.  pid: its own; worker_pid: of the Dask worker that started it.

    devices: how many.  memory: bytes per device.  emulated: they are CPU devices
    standing in for accelerators.  make: devices of one make compute the same, to the bit.
    data_address: where others reach it.  machine: the name that its machine gives itself.
    versions: of Python, JAX and this package, there.
    """

    name: str
    pid: int
    worker_pid: int
    devices: int
    kind: str
    memory: int
    data_address: str
    emulated: bool = False
    make: str = ""
    machine: str = ""
    versions: Mapping[str, str] = field(default_factory=dict, compare=False)

    @property
    def where(self) -> str:
        """Its machine, with the address at which other machines reach it."""
        scheme, _, place = self.data_address.partition("://")
        at = place.rpartition(":")[0] if scheme.endswith(("tcp", "tls")) else ""
        return f"{self.machine} ({at})" if at and at != self.machine else self.machine


@dataclass(frozen=True, slots=True)
class Island:
    """Hosts whose devices run collectives together."""

    name: str
    hosts: tuple[Host, ...]

    @property
    def devices(self) -> int:
        """Number of devices."""
        return sum(host.devices for host in self.hosts)


class IslandTable(Tabled, tuple[Island, ...]):
    """Islands that show themselves as a table: each host, where it is, and its versions."""

    __slots__ = ()

    def _table(self) -> TextTable:
        return table_of(self, exact=True)


def islands_of(topology: dict[str, Any]) -> IslandTable:
    """The islands in a topology message."""
    return IslandTable(
        Island(
            island["name"],
            tuple(
                Host(**{field: host[field] for field in Host.__slots__ if field in host})
                for host in island["hosts"]
            ),
        )
        for island in topology["islands"]
    )


def devices_of(islands: Sequence[Island]) -> tuple[Device, ...]:
    """All devices, island by island."""
    return tuple(
        Device(host.name, number, host.kind, host.memory)
        for island in islands
        for host in island.hosts
        for number in range(host.devices)
    )


def in_words(islands: Sequence[Island], topology: Mapping[str, Any]) -> str:
    """How much there is, and what is wrong or risky: hosts without a device process."""
    many, count = len(islands), sum(island.devices for island in islands)
    machine = f"{many} island{'s' * (many != 1)}, {count} device{'s' * (count != 1)}"
    plain = ["collectives in the clear"] * bool(topology.get("plain_collectives"))
    return ", ".join([machine, *plain, *(f"{each['name']} is down" for each in topology["down"])])


def _kind(host: Host) -> str:
    return f"{host.devices} x {host.kind.upper()}{' (emulated)' if host.emulated else ''}"


def table_of(
    islands: Sequence[Island], down: Sequence[dict[str, Any]] = (), exact: bool = False
) -> TextTable:
    """A table with one row per host.

    down: hosts without a device process, see topology.  exact: with the versions of each.
    """
    rows: list[Sequence[str]] = [
        (
            *(island.name, host.name, host.where, _kind(host)),
            *(f"{host.memory / 2**20:,.0f} MiB", str(host.pid)),
            *([versions.in_words(host.versions)] if exact else []),
        )
        for island in islands
        for host in island.hosts
    ]
    rows += [(each["island"], each["name"], "", f"down: {each['told']}") for each in down]
    heads = ("island", "host", "machine", "devices", "each", "process")
    return TextTable(rows, (*heads, "versions") if exact else heads, "<<<<>><")
