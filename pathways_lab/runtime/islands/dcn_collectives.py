"""Collectives between islands take as long as the emulated DCN says.

Problem: ``lab.dcn`` holds back what comes over the lab's own links.  The hosts of a slice that
spans islands compute together over connections of XLA's, which nobody can hold back.

How: a compiled function tells which of its collectives have members on several islands, and how
many bytes these bring to each host.  After such a gang its devices are held for as long as that
would have taken: each collective one latency, and its bytes at the bandwidth.  A collective in a
loop counts once.

Rule for maintainers: the text of a compiled function is XLA's and may change; groups that cannot
be read are taken to have all devices.

Paper: section 5.3 (islands connected over the DCN).
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from pathways_lab.runtime.devices import Place

_COLLECTIVE = re.compile(
    r"= (?P<result>\(.*?\)|\S+) (?P<kind>all-reduce|all-gather|reduce-scatter|all-to-all"
    r"|ragged-all-to-all|collective-permute|collective-broadcast)(?:-start)?\("
)
_ARRAY = re.compile(r"([a-z]+)(\d*)[a-z0-9]*\[([\d,]*)\]")
_LISTED = re.compile(r"(?:replica_groups|source_target_pairs)=\{(\{[\d,{}]*\})\}")
_COUNTED = re.compile(r"replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_MESH = re.compile(r"replica_groups=mesh\[([^\]]*)\] \{([^}]*)\},")

Lateness = Callable[[Collection[str], int, int], float]
"""Seconds that so many messages, of so many bytes in all, take now from the farthest of hosts."""


class Crossing(NamedTuple):
    """Traffic of one gang between islands.  rounds: collectives.  nbytes: brought to one host."""

    rounds: int = 0
    nbytes: int = 0


def _none(hosts: Collection[str], rounds: int, nbytes: int) -> float:
    return 0.0


_lateness: Lateness = _none


def slowed_by(lateness: Lateness) -> None:
    """This process asks *lateness* from now on."""
    global _lateness
    _lateness = lateness


def held(call: Callable[..., Any], found: Crossing, home: Mapping[str, str]) -> Callable[..., Any]:
    """The call, after which a host's devices are held while the DCN would carry its bytes.

    home: of the slice, the island of each host.
    """

    def launched(*arguments: Any) -> Any:
        results = call(*arguments)
        # The rules of a host name hosts of other islands only.
        if seconds := _lateness(home, *found):
            jax.block_until_ready(results)
            time.sleep(seconds)
        return results

    return launched if found.rounds else call


def of_place(text: str, place: Place) -> Crossing:
    """The traffic of a function that was compiled for the devices of a slice on this host."""
    home = place.binding.home
    return crossing(text, [home[host] for host, _ in place.binding.devices], place.numbers)


def crossing(text: str, islands: Sequence[str], ours: Collection[int]) -> Crossing:
    """The traffic of a compiled function between islands.

    text: XLA's.  islands: of each device of the slice.  ours: the devices of one host.
    """
    rounds = nbytes = 0
    for line in text.splitlines():
        found = _COLLECTIVE.search(line)
        if found is None:
            continue
        groups = [g for g in _groups(line, len(islands)) if len({islands[n] for n in g}) > 1]
        rounds += bool(groups)
        size = _bytes(found["result"])
        for group in groups:
            if found["kind"] == "collective-permute":
                nbytes += size * (group[-1] in ours)
            elif any(n in ours for n in group):
                whole = len(group) if found["kind"] == "reduce-scatter" else 1
                nbytes += size * whole
    return Crossing(rounds, nbytes)


def _groups(line: str, devices: int) -> Iterator[Sequence[int]]:
    """The devices of each group of a collective; pairs of source and target of a permutation."""
    if listed := _LISTED.search(line):
        for group in re.findall(r"\{([\d,]*)\}", listed[1]):
            yield [int(n) for n in group.split(",")]
    elif counted := _COUNTED.search(line):
        sizes = [int(n) for n in counted[3].split(",")]
        order = counted[4] and [int(n) for n in counted[4].split(",")]
        grid = np.arange(math.prod(sizes)).reshape(sizes).transpose(order or None)
        yield from grid.reshape(int(counted[1]), int(counted[2])).tolist()
    elif mesh := _MESH.search(line):
        named = dict(re.findall(r"'([^']*)'=(\d+)", mesh[1]))
        inner = [n for n, axis in enumerate(named) if f"'{axis}'" in mesh[2]]
        outer = [n for n in range(len(named)) if n not in inner]
        grid = np.arange(devices).reshape([int(size) for size in named.values()])
        size = math.prod(grid.shape[n] for n in inner)
        yield from grid.transpose(*outer, *inner).reshape(-1, size).tolist()
    else:
        yield range(devices)


def _bytes(result: str) -> int:
    """The size of a result on one device, of all its parts if it has several."""
    total = 0
    for kind, bits, shape in _ARRAY.findall(result):
        width = int(bits or 8) if kind != "c" else int(bits)
        total += max(1, width // 8) * math.prod(int(n) for n in shape.split(",") if n)
    return total
