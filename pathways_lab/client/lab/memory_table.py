"""The table of the values on the devices of a lab, with the reasons why each is kept.

Problem: the control plane knows every byte and no variable; the kernel knows the
variables.  The table joins them.

Rule for maintainers: looks only, and plain data.  The control plane decides which rows a
client may read (:mod:`pathways_lab.core.memory.holdings`).

Paper: section 4.2 (handles), section 4.6 (object store).
"""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from textwrap import shorten

from pathways_lab.core.memory.holdings import (
    SUSPENDED,
    DeviceUse,
    Holding,
    Holdings,
    Reserved,
    size,
)
from pathways_lab.core.program.program import Line, slice_name
from pathways_lab.core.slices.topology import Owned
from pathways_lab.timeline.text_table import TextTable

_ROWS = 40
"""So many values are shown; all of them are in ``.values``."""
_STATES = {"promised": "coming", "resident": "on devices"}


@dataclass(frozen=True, slots=True)
class HeldValue:
    """One array that takes memory of devices.

    name: the variable that holds it, where this kernel has one; else the program and
        its output, or the label of the upload.
    owner: the client that made it.  slice: where it lies.  line: the user's line that made it.
    nbytes: on all its devices together.  devices: bytes by device, ``(host, number)``;
        empty while its slice is suspended.
    state: ``"on devices"``, ``"coming"`` (memory is set aside for it), or ``"suspended"``
        (it is in the memory of its hosts).
    why: what keeps it, one text each.
    """

    name: str
    owner: str
    slice: str
    line: Line
    nbytes: int
    devices: Mapping[Owned, int]
    state: str
    why: tuple[str, ...]


@dataclass(frozen=True, slots=True, repr=False)
class Memory:
    """The contents of the devices of a lab (``lab.memory()``); prints as a table.

    values: each :class:`HeldValue` that this client may read, the largest first: an
        owner of the lab all of them, others their own, and those that they have taken.  At most
        as many as were asked for.
    others, others_bytes: how many more there are, and their bytes on all devices together.
    runs: what runs under way have reserved for their intermediate values: ``run``,
        ``owner``, ``program``, ``nbytes``.
    devices: bytes on every device: ``device`` (host and number), ``values``,
        ``reserved``, ``limit``; of all clients.
    owners: bytes on all devices together, by client, reserved ones included.
    """

    values: tuple[HeldValue, ...]
    runs: tuple[Reserved, ...]
    devices: tuple[DeviceUse, ...]
    owners: Mapping[str, int]
    others: int = 0
    others_bytes: int = 0

    @classmethod
    def of(cls, found: Holdings, variables: Mapping[int, str]) -> Memory:
        """From the control plane's answer.  variables: names of handles, by buffer."""
        where = {binding.slice: binding.devices for binding in found.slices}
        values = [_value(each, where[each.slice], variables) for each in found.values]
        values.sort(key=lambda value: -value.nbytes)
        runs = sorted(found.runs, key=lambda run: -run.nbytes)
        return cls(
            tuple(values), tuple(runs), found.devices, found.clients, found.others,
            found.others_bytes,
        )  # fmt: skip

    @property
    def total(self) -> int:
        """Bytes on all devices together, of all clients."""
        return sum([use.values + use.reserved for use in self.devices])

    # --- showing ------------------------------------------------------------------------

    def _tables(self) -> list[TextTable]:
        shown: list[Sequence[str]] = [_row(value) for value in self.values[:_ROWS]]
        rest = self.values[_ROWS:]
        if more := len(rest) + self.others:
            nbytes = size(sum([value.nbytes for value in rest]) + self.others_bytes)
            shown.append((f"{more:,} more", "", nbytes, "", "", "", ""))
        heads: tuple[str, ...] = ("name", "owner", "bytes", "on", "state", "kept because", "line")
        tables = [TextTable(shown, heads, "<<><", "values")]
        if self.runs:
            runs = [
                (f"run {run.run & 0xFFFFFFFF} of {run.program!r}", run.owner, size(run.nbytes))
                for run in self.runs[:_ROWS]
            ]
            tables.append(TextTable(runs, ("run", "owner", "bytes"), "<<>", "reserved by runs"))
        devices = [
            (
                f"{use.device[0]} device {use.device[1]}",
                *map(size, (use.values, use.reserved, use.limit)),
                f"{(use.values + use.reserved) / max(use.limit, 1):.1%}",
            )
            for use in self.devices
            if use.values or use.reserved
        ]
        heads = ("device", "values", "reserved", "of", "full")
        tables.append(TextTable(devices, heads, "<>", "by device"))
        ranked = sorted(self.owners.items(), key=lambda owner: -owner[1])
        owners = [(owner, size(nbytes)) for owner, nbytes in ranked]
        tables.append(TextTable(owners, ("owner", "bytes"), "<>", "by owner"))
        return [table for table in tables if table.rows]

    def _title(self) -> str:
        full = max((u.values + u.reserved) / max(u.limit, 1) for u in self.devices or (_NONE,))
        return f"{size(self.total)} on {len(self.devices)} devices; the fullest is {full:.1%} full"

    def __repr__(self) -> str:
        return "\n\n".join([self._title(), *map(repr, self._tables())])

    def _repr_html_(self) -> str:
        tables = "".join(table._repr_html_() for table in self._tables())
        return f"<p><b>{html.escape(self._title())}</b></p>{tables}"


_NONE = DeviceUse(("", 0), 0, 0, 1)


def _value(held: Holding, devices: Sequence[Owned], variables: Mapping[int, str]) -> HeldValue:
    made = f"{held.program}: {held.name}" if held.program and held.name else held.name
    on = {} if held.state == SUSPENDED else dict.fromkeys(devices, held.nbytes)
    return HeldValue(
        variables.get(held.buffer) or made or held.program,
        held.owner,
        slice_name(held.slice),
        held.line,
        held.nbytes * len(devices),
        on,
        _STATES.get(held.state, held.state),
        held.why,
    )


def _row(value: HeldValue) -> tuple[str, ...]:
    hosts = dict.fromkeys(host for host, _ in value.devices)
    where = f"{value.slice}: {len(value.devices)} of {', '.join(hosts)}" if hosts else value.slice
    line = shorten(value.line.told, 80, placeholder=" ...") if value.line.number else ""
    why = "; ".join(value.why) or "its last run is ending"
    return value.name, value.owner, size(value.nbytes), where, value.state, why, line
