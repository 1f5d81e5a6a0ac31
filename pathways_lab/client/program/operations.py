"""``lab.operations(f, ...)``: the operations of XLA inside of one gang, and their times.

Problem: a gang is one bar, and whoever has to make it faster asks which of its operations take
long, and on which device.

How: one program of three nodes on the function's slice: hosts begin to look, the function, hosts
report (:mod:`pathways_lab.runtime.operations`).  So other runs go on, and nothing but that one
gang is slower for it.  Operations of other functions that ran on these hosts meanwhile are left
out by their module's name.

Rule for maintainers: nothing of the user's is consumed: what donates is refused.

Paper: none; the profiler is JAX's own.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, overload

import jax
import numpy as np

from pathways_lab.client.functions.jit import jit
from pathways_lab.client.program import examined
from pathways_lab.client.program.program import ProgramFunction, device_put
from pathways_lab.client.session import failures
from pathways_lab.client.session.session import Session
from pathways_lab.core.slices.topology import Owned
from pathways_lab.runtime import operations as on_hosts
from pathways_lab.timeline.text_table import Tabled, TextTable

SHOWN, BRIEF = 20, 4
"""Operations in the table as text, and in one line: those that take longest."""

_begin = jit(on_hosts.begin, static_argnames=("mesh",), name="(profile)")
_end = jit(on_hosts.end, static_argnames=("mesh",), name="(profiled)")
_marks = itertools.count(1)


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation of XLA: see :class:`Operations`.  slowest: host and number, and seconds."""

    name: str
    times: int
    seconds: float
    share: float
    slowest: tuple[Owned, float]


class Operations(Sequence[Operation], Tabled):
    """The operations of one gang, those that take longest first: ``name``, ``times`` (how often a
    device ran it), ``seconds`` (of all times together, a mean over devices), ``share`` of the time
    of all operations, and ``slowest``: the device that took longest, with its seconds.

    function: its name.  slice: where it ran.  devices: how many.
    """

    def __init__(self, function: str, place: str, devices: int, found: Iterable[Operation]) -> None:
        self.function, self.slice, self.devices = function, place, devices
        self._found = sorted(found, key=lambda each: -each.seconds)

    @overload
    def __getitem__(self, at: int) -> Operation: ...

    @overload
    def __getitem__(self, at: slice) -> Sequence[Operation]: ...

    def __getitem__(self, at: int | slice) -> Operation | Sequence[Operation]:
        return self._found[at]

    def __len__(self) -> int:
        return len(self._found)

    def _table(self) -> TextTable:
        rows = [
            (each.name, str(each.times), f"{1e3 * each.seconds:.3f}", f"{100 * each.share:.0f} %",
             f"{host} · {device}, {1e3 * seconds:.3f} ms")
            for each in self._found[:SHOWN]
            for (host, device), seconds in (each.slowest,)
        ]  # fmt: skip
        more = f", the {SHOWN} longest" if len(self._found) > SHOWN else ""
        caption = (
            f"{self.function} on {self.slice}: {len(self._found)} operations{more}; means over"
            f" {self.devices} device{'s' * (self.devices != 1)}"
        )
        heads = ("operation", "times", "ms", "share", "slowest device")
        return TextTable(rows, heads, "<>>><", caption)


def brief(found: Operations) -> str:
    """One line for a card: ``"dot.3 71 %, tanh.1 20 %; dot.3 longest on host0 · 1"``."""
    shown = ", ".join(f"{each.name} {100 * each.share:.0f} %" for each in found[:BRIEF])
    (host, device), _ = found[0].slowest
    more = f", {len(found) - BRIEF} more" if len(found) > BRIEF else ""
    return f"{shown}{more}; {found[0].name} longest on {host} · {device}"


_ASKED = examined.Asked(
    "lab.operations",
    "function",
    "operations are those of one gang",
    "which would be gone after it was looked at",
    "look at it",
)


def profiled(
    session: Session, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Operations:
    """Run a call once, and look at its operations."""
    call, place = examined.bound(session, _ASKED, function, args, kwargs)
    function = call.function

    def look(mark: Any, args: Any, kwargs: Any) -> Any:
        begun = _begin(mark, mesh=place.mesh)
        result = function(*args, **kwargs)
        return begun, result, _end(mark, mesh=place.mesh)

    program = ProgramFunction(look, on=place, name=f"operations of {function.name}")
    mark = device_put(np.int32(next(_marks)), place)
    begun, result, found = program(mark, args, kwargs)
    jax.block_until_ready((begun, result))
    reports = on_hosts.reports(np.asarray(found))
    return told(function.name, place.name, place.binding.devices, reports)


def told(
    function: str,
    place: str,
    devices: Sequence[Owned],
    reports: Mapping[int, tuple[Sequence[on_hosts.Row], str]],
) -> Operations:
    """The answer from the reports of hosts, by the device of *devices* that reported.

    Raises PathwaysError where a host could not look, or nothing of the function was seen.
    """
    hosts = {devices[at][0]: report for at, report in reports.items()}
    for host, (_, wrong) in hosts.items():
        if wrong:
            what = f"the operations of {function!r} could not be seen on {host}: {wrong}"
            raise failures.refused(what, "ask again when nobody else profiles that host")
    owned, module = set(devices), _letters(f"jit {function}")
    found: dict[str, dict[Owned, on_hosts.Row]] = {}
    for host, (rows, _) in hosts.items():
        for row in rows:
            if _letters(row.module) == module and (host, row.device) in owned:
                found.setdefault(row.operation, {})[host, row.device] = row
    if not found:
        raise failures.refused(
            f"XLA told of no operation of {function!r}",
            "profiles show operations that take long enough; on TPUs this was never tried",
        )
    means = {name: sum(r.seconds for r in on.values()) / len(on) for name, on in found.items()}
    whole = max(sum(means.values()), 1e-12)
    made = []
    for name, on in found.items():
        slowest = max(on, key=lambda device: on[device].seconds)
        times, share = max(row.times for row in on.values()), means[name] / whole
        made.append(Operation(name, times, means[name], share, (slowest, on[slowest].seconds)))
    return Operations(function, place, len(devices), made)


def _letters(name: str) -> str:
    """The letters and digits of a name: XLA leaves some of the other signs out."""
    return re.sub(r"[\W_]", "", name)
