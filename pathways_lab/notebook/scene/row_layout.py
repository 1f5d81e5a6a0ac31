"""Which device is drawn in which row: the one arrangement that all panels share.

Problem: eight devices get a row each, two thousand do not fit; islands must
be told apart at a glance, and the rows of one panel must be found again in the
next.

Rule for maintainers: everything is derived from the machine, nothing is kept.
Rows are numbers that grow downwards; between islands there is a gap.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field

from pathways_lab.timeline.bars import Places
from pathways_lab.timeline.machine import Lane, Machine

MOST = 64
"""Rows that a panel shows at most; beyond it, hosts and then islands share one."""

LEVELS = ("device", "host", "island")
"""The things that a row may stand for, finest first."""

GAP = 0.55
"""Free rows between two islands."""


@dataclass(frozen=True, slots=True)
class Rows:
    """level: ``"device"``, ``"host"`` or ``"island"``: what a row stands for.

    of: row coordinate of every device (several devices may share one).
    labels, groups: text per row and per island, by coordinate.
    bands: coordinate range of every island.
    end: coordinate just below the last row.
    places: *of*, for whoever asks about the same devices again and again.
    """

    level: str
    of: dict[Lane, float]
    labels: dict[float, str]
    groups: dict[float, str]
    bands: tuple[tuple[float, float], ...]
    end: float
    places: Places = field(compare=False)

    @property
    def hosts(self) -> dict[float, str]:
        """The host of each row that is of one host only."""
        if self.level == "island":
            return {}
        return {row: lane.host for lane, row in self.of.items()}

    @property
    def devices(self) -> dict[float, int]:
        """How many devices share each row."""
        out: dict[float, int] = {}
        for row in self.of.values():
            out[row] = out.get(row, 0) + 1
        return out


def rows(
    machine: Machine, level: str = "", feeders: bool = False,
    kind: Callable[[Lane], Hashable] | None = None, first: Collection[str] = (),
) -> Rows:  # fmt: skip
    """The rows of a machine, at *level*; "" picks the finest that is not too many.

    feeders: below them those of the workers that make elements of feeds.  kind: devices of an
    island share a row only with those of their kind, unless that would be too many.  first: hosts
    whose rows are on top of their islands.
    """
    lanes: Sequence[Lane] = (*machine.lanes, *machine.feeders) if feeders else machine.lanes
    if not level:
        level = next(
            (one for one in LEVELS if len({_subject(lane, one) for lane in lanes}) <= MOST),
            LEVELS[-1],
        )
    alone = _alone(machine)
    subjects: dict[Lane, Hashable] = {lane: _subject(lane, level) for lane in lanes}
    if kind is not None and level == LEVELS[-1]:
        islands = {name: place for place, name in enumerate(machine.islands)}
        lanes = sorted(lanes, key=lambda lane: (islands[lane.island], lane.host not in first))
        finer: dict[Lane, Hashable] = {lane: (lane.island, kind(lane)) for lane in lanes}
        subjects = finer if len(set(finer.values())) <= MOST else subjects
    return arranged(level, subjects, lambda lane: _label(lane, level, alone))


def _alone(machine: Machine) -> bool:
    """Whether no island has more than one host, so that a device's number says enough."""
    return all(len(machine.hosts_of(island)) <= 1 for island in machine.islands)


def _subject(lane: Lane, level: str) -> tuple[object, ...]:
    if level == "device":
        return tuple(lane)
    return (lane.island, lane.host) if level == "host" else (lane.island,)


def arranged(level: str, subjects: Mapping[Lane, Hashable], label: Callable[[Lane], str]) -> Rows:
    """Rows for *subjects*, from the top: devices of one subject, all of one island, share a row.

    label: the text for a row, asked for the first of its devices.
    """
    at: dict[Hashable, float] = {}
    labels: dict[float, str] = {}
    bands: list[tuple[float, float]] = []
    islands: list[str] = []
    row = -1.0
    for lane, subject in subjects.items():
        if subject in at:
            continue
        if lane.island not in islands[-1:]:
            row = round(row + 1 + (GAP if islands else 0), 3)
            islands.append(lane.island)
            bands.append((row - 0.5, row + 0.5))
        else:
            row = round(row + 1, 3)
        at[subject] = row
        bands[-1] = (bands[-1][0], row + 0.5)
        labels[row] = label(lane)
    of = {lane: at[subject] for lane, subject in subjects.items()}
    groups = {(a + b) / 2: name for (a, b), name in zip(bands, islands, strict=True)}
    return Rows(level, of, labels, groups, tuple(bands), row + 0.5, Places(of))


def short(host: str) -> str:
    """``"host0"`` of ``"island0/host0"``."""
    return host.rsplit("/", 1)[-1]


def _label(lane: Lane, level: str, alone: bool) -> str:
    if level == "device":
        return f"device {lane.device}" if alone else f"{short(lane.host)} · {lane.device}"
    return short(lane.host) if level == "host" else ""
