"""Which device computes wrong: decisions from checksums, and nothing else.

Problem: a device that computes wrong says nothing, and collectives spread its bits over all that
compute with it.  Only checksums are seen, one for each set of devices and the same inputs.

How: *alone*, the result of most devices is right.  *Together*, a device is suspect if it explains
all differences by itself: all sets without that device made the same.  A device that was right
once is still suspect, for such faults come and go.  So, as long as one device is the cause, no
other is accused.

Rule for maintainers: sums are compared and never looked into.

Paper: none; group testing.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from pathways_lab.core.slices.topology import Owned


def minority(sums: Mapping[Owned, Hashable]) -> frozenset[Owned] | None:
    """The devices whose sum is not that of more than half; None: no sum is that of so many."""
    (most, count), *_ = Counter(sums.values()).most_common(1)
    if 2 * count <= len(sums):
        return None
    return frozenset(device for device, made in sums.items() if made != most)


@dataclass(frozen=True, slots=True)
class Replay:
    """The sum of these devices' common result, from the inputs that all sets were given."""

    devices: tuple[Owned, ...]
    made: Hashable


def agree(replays: Iterable[Replay]) -> bool:
    """Whether all made the same."""
    return len({replay.made for replay in replays}) == 1


def unchecked(replays: Sequence[Replay]) -> frozenset[Owned]:
    """Devices that had a part in all replays: that these agree says nothing of them."""
    return frozenset.intersection(*(frozenset(replay.devices) for replay in replays))


def suspects(replays: Sequence[Replay]) -> frozenset[Owned]:
    """Each device that alone explains why these replays do not agree."""
    devices = {device for replay in replays for device in replay.devices}
    return frozenset(device for device in devices if len(_without(device, replays)) <= 1)


def _without(device: Owned, replays: Iterable[Replay]) -> set[Hashable]:
    """The sums of sets without a device."""
    return {replay.made for replay in replays if device not in replay.devices}


def next_set(
    replays: Sequence[Replay], possible: Iterable[tuple[Owned, ...]]
) -> tuple[Owned, ...] | None:
    """Which of the possible sets says most; None: no other one says anything more."""
    tried = {frozenset(replay.devices) for replay in replays}
    open_ = [devices for devices in possible if frozenset(devices) not in tried]
    if agree(replays):
        wanted = unchecked(replays)
        best = min(open_, key=lambda s: len(wanted.intersection(s)), default=None)
        return best if best is not None and not wanted <= frozenset(best) else None
    left = suspects(replays)
    rights = {device: _without(device, replays) for device in left}
    best = min(open_, key=lambda s: _expected(left, rights, frozenset(s)), default=None)
    tells = best is not None and _expected(left, rights, frozenset(best)) < len(left) ** 2
    return best if tells else None


def _expected(
    left: frozenset[Owned], rights: Mapping[Owned, set[Hashable]], devices: frozenset[Owned]
) -> int:
    """How many suspects a replay on these would leave, added up over who it may be."""
    inside = left & devices
    outside = Counter(frozenset(rights[device]) for device in left - devices)
    # A bad device inside spoils it; one outside leaves the right ones, which say the same.
    return len(inside) ** 2 + sum(n * (n + len(inside)) for n in outside.values())


def sets_like(
    devices: Sequence[Owned], islands: Sequence[Sequence[tuple[str, int]]]
) -> list[tuple[Owned, ...]]:
    """Sets on one island each that lie on hosts as *devices* do: as many on each, in that order.

    islands: hosts with the number of their devices.  Not all that there are: neighbours on
    neighbouring hosts, the same ones of each, or each time one further.
    """
    hosts = list(dict.fromkeys(host for host, _ in devices))
    places = [(hosts.index(host), number) for host, number in devices]
    ranks: dict[int, list[int]] = {}
    for host, number in places:
        ranks.setdefault(host, []).append(number)
    needed = [len(ranks[host]) for host in range(len(hosts))]
    found: dict[tuple[Owned, ...], None] = {}
    for island in islands:
        for first in range(len(island) if len(island) >= len(hosts) else 0):
            taken = [island[(first + n) % len(island)] for n in range(len(hosts))]
            if any(count < n for (_, count), n in zip(taken, needed, strict=True)):
                continue
            starts = range(max(count for _, count in taken))
            for start, step in itertools.product(starts, (0, 1)):
                made = [
                    (taken[h][0], (start + step * h + ranks[h].index(number)) % taken[h][1])
                    for h, number in places
                ]
                found[tuple(made)] = None
    return list(found)
