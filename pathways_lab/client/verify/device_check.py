"""``lab.verify()``: find the device that computes wrong, by having others do the same.

Problem: a device that now and then returns wrong bits says nothing; a loss looks odd, weeks later.

How: every device runs the same computation, alone, and sums up the bits of what it made
(:mod:`pathways_lab.runtime.checksums`); only sums come here.

Rule for maintainers: a program like any other, which is found in the timeline, waits its turn and
changes nothing; slices are held for as long as it takes and no longer.  Only devices of one make
are compared: others may round otherwise, and nobody is accused of that.

Paper: none; deterministic replay as other large systems do it (Gemini, section 5).
"""

from __future__ import annotations

import contextlib
import functools
import html
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from pathways_lab.client.chaos.fault_report import Check, as_lines, as_table
from pathways_lab.client.functions.jit import CompiledFunction
from pathways_lab.client.lab import topology_view
from pathways_lab.client.lab.devices import Slice
from pathways_lab.client.lab.topology_view import Device, Host, Island
from pathways_lab.client.parts import Parts
from pathways_lab.client.session import failures
from pathways_lab.client.session.handles import Handle
from pathways_lab.core.diagnosis.suspects import minority
from pathways_lab.core.slices.topology import Owned
from pathways_lab.runtime import checksums

_SIZES = {"cpu": 128}
"""Sizes of the matrices of a scan, by kind of device: large enough to keep one busy."""
_SIZE = 2048


Sums = tuple[bytes, ...]
"""The checksums of one device in each round."""


@dataclass(frozen=True)
class Verification:
    """The findings of ``lab.verify``.

    story: in one sentence.  ok: nobody computes wrong, as far as was compared.
    suspects: the device that does; several, where nobody can tell which of them it is.
    checks: what was seen.
    """

    story: str
    ok: bool
    suspects: tuple[Device, ...]
    checks: tuple[Check, ...]

    def __repr__(self) -> str:
        return "\n".join([self.story, *as_lines(self.checks)])

    def _repr_html_(self) -> str:
        return f"<p><b>{html.escape(self.story)}</b></p>{as_table(self.checks)}"


def told(devices: Iterable[Owned]) -> str:
    """Devices in words."""
    numbers: dict[str, list[str]] = {}
    for host, number in devices:
        numbers.setdefault(host, []).append(str(number))
    return " and ".join(
        f"device{'s' * (len(each) > 1)} {', '.join(each)} of {host}"
        for host, each in numbers.items()
    )


# --- scan ---------------------------------------------------------------------------------------


def scan(lab: Parts, rounds: int, wait: bool | float) -> Verification:
    """Have every device compute the same, and compare."""
    islands = lab.islands
    makes: dict[tuple[str, str], list[Host]] = {}
    for host in (host for island in islands for host in island.hosts):
        makes.setdefault((host.kind, host.make), []).append(host)
    if all(sum(host.devices for host in hosts) == 1 for hosts in makes.values()):
        raise failures.refused(
            f"no two devices of this lab are of the same make, of {len(makes)}: there is nobody to"
            " compare with",
            "a lab with more devices, for example pw.start(devices_per_host=2)",
        )
    sums: dict[Owned, Sums] = {}
    for island in islands:
        sums |= _computed(lab, island, rounds, wait)
    checks: list[Check] = []
    bad: list[Owned] = []
    untold = 0
    for hosts in makes.values():
        names = [host.name for host in hosts]
        ours = {device: made for device, made in sums.items() if device[0] in names}
        found = minority(ours)
        bad += [device for device in ours if device in (found or ())]
        untold += len(ours) if found is None else 0
        checks += [_of_host(name, ours, found) for name in names]
    story = f"{len(sums)} devices have computed the same in {rounds} rounds, to the bit"
    if bad:
        story = f"wrong results on {told(bad)}: most of {len(sums)} devices make others"
    elif untold:
        story = f"{untold} devices do not compute the same, and no result is that of most of them"
    return Verification(story, not bad and not untold, devices_of(lab, bad), tuple(checks))


def _computed(lab: Parts, island: Island, rounds: int, wait: bool | float) -> dict[Owned, Sums]:
    """The results of each device of an island from the same numbers."""
    with contextlib.ExitStack() as held:
        made: list[tuple[Slice, list[Handle]]] = []
        for host in island.hosts:
            devices = [(host.name, number) for number in range(host.devices)]
            # A holder of slices does not wait for more: it may wait for itself.
            on = held.enter_context(lab.slice_at(devices, wait=False if made else wait))
            body = functools.partial(checksums.scan, mesh=on.mesh, size=_SIZES.get(on.kind, _SIZE))
            exercise = CompiledFunction(body, on=on, name="verify")
            made.append((on, [exercise(np.uint32(number)) for number in range(rounds)]))
        sums = {}
        for on, handles in made:
            results = [handle.result() for handle in handles]
            for place, device in enumerate(on.binding.devices):
                sums[device] = tuple(result[place].tobytes() for result in results)
        return sums


def _of_host(host: str, sums: Mapping[Owned, Sums], bad: frozenset[Owned] | None) -> Check:
    """The findings about one host.  sums: of all devices of its make.  bad: None: unknown."""
    ours = [device for device in sums if device[0] == host]
    if len(sums) == 1:
        return Check(host, True, "there is no other device of its make to compare with")
    if bad is None:
        return Check(host, False, f"{len({sums[device] for device in ours})} different results")
    right = next(made for device, made in sums.items() if device not in bad)
    seen = [
        f"device {device[1]}: {_wrong(sums[device], right)}" for device in ours if device in bad
    ]
    text = f"{len(ours)} device{'s' * (len(ours) != 1)} as most others"
    return Check(host, not seen, "; ".join(seen) or text)


def _wrong(made: Sums, right: Sums) -> str:
    """In which rounds, and in what."""
    pairs = list(zip(made, right, strict=True))
    rounds = sum(one != other for one, other in pairs)
    size = 4 * checksums.WORDS
    units = [
        unit
        for number, unit in enumerate(checksums.UNITS)
        if any(a[number * size :][:size] != b[number * size :][:size] for a, b in pairs)
    ]
    return f"otherwise in {rounds} of {len(pairs)} rounds, in {', '.join(units)}"


def devices_of(lab: Parts, owned: Iterable[Owned]) -> tuple[Device, ...]:
    """As users know them."""
    known = {
        (device.host, device.number): device for device in topology_view.devices_of(lab.islands)
    }
    return tuple(known[each] for each in owned if each in known)
