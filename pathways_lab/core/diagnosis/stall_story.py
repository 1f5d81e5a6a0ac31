"""A story of waits, as data: gangs, and arrows from each to what it waits for.

Problem: the same story is told in an error, in the timeline, in a figure and by
the checker of programs; it is found in one process and told in another.

Rule for maintainers: plain data with its words; who finds stories is
:mod:`pathways_lab.core.diagnosis.stall` and :mod:`pathways_lab.core.diagnosis.wait_cycles`.

Paper: section 2 (deadlock of communicating computations).
"""

from __future__ import annotations

from dataclasses import dataclass

from pathways_lab.core.program.program import Line


@dataclass(frozen=True, slots=True)
class Member:
    """A gang in a story, or a transfer.

    inside: hosts whose devices are in it.  missing: hosts on which it has not ended.
    seconds: since it was granted.
    """

    run: int
    step: int
    client: str
    program: str
    node: str
    line: Line
    inside: tuple[str, ...]
    seconds: float
    missing: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.node or 'a gang'!r}"


@dataclass(frozen=True, slots=True)
class Arrow:
    """*gang* waits for *host*, which is in *behind*; without a host, for the result of *behind*.

    gang, behind: positions in the story's gangs.
    """

    gang: int
    behind: int
    host: str = ""


_TITLES = {
    "deadlock": "deadlock: ",
    "late": "late, and nothing is wrong with the order: ",
    "possible": "without order this can deadlock: ",
    "silent": "stuck, not dead: ",
    "none": "nobody is stuck: nothing is late, and all hosts answer",
    "down": "nothing is late, but hosts are missing: ",
}


@dataclass(frozen=True, slots=True, repr=False)
class Stuck:
    """A story of gangs that wait for each other; false where nobody waits.

    kind: ``"none"``, ``"deadlock"`` (a cycle: it will never end), ``"late"`` (a chain to gangs
        that run; the last one is what everything waits for), ``"possible"`` (a cycle
        that launching without order could lead to; hosts are as they would be),
        ``"silent"`` (hosts do not answer; no gang is known that waits for them),
        ``"down"`` (hosts have no device process; nothing else is wrong).
    gangs: those that take part.  arrows: in the order in which they are told.
    silent: hosts that were asked and did not answer.
    down: by host without a device process, a sentence that says why.
    """

    kind: str = "none"
    gangs: tuple[Member, ...] = ()
    arrows: tuple[Arrow, ...] = ()
    silent: tuple[str, ...] = ()
    down: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """A story comes in failures from other processes: one that cannot be told is none."""
        named = [n for arrow in self.arrows for n in (arrow.gang, arrow.behind)]
        known = all(0 <= n < len(self.gangs) for n in named)
        if self.kind not in _TITLES or not known or (self.kind == "late" and not self.gangs):
            raise ValueError(f"no story of {len(self.gangs)} gangs: {self.kind[:40]!r}, {named}")

    def __bool__(self) -> bool:
        return self.kind != "none"

    def __repr__(self) -> str:
        return str(self)

    @property
    def seconds(self) -> float:
        """How long the gang that has waited longest has waited."""
        return max((gang.seconds for gang in self.gangs), default=0.0)

    @property
    def culprit(self) -> Member | None:
        """The gang that everything waits for, where the story is ``"late"``."""
        if self.kind != "late":
            return None
        return self.gangs[self.arrows[-1].behind if self.arrows else 0]

    @property
    def headline(self) -> str:
        """The waits, in one sentence."""
        told = [self._told(arrow) for arrow in self.arrows]
        last = self.culprit
        if last is not None:
            hosts = last.inside or last.missing
            where = f" on {', '.join(hosts)}" if hosts else ""
            told.append(f"{last} has not ended{where}, {last.seconds:.1f} s after it was granted")
        told += [f"{host} does not answer" for host in self.silent]
        told += self.down
        return "; ".join(told)

    def __str__(self) -> str:
        return "\n".join([_TITLES[self.kind] + self.headline, *self.members()])

    def members(self) -> list[str]:
        """One line for each gang: its program, and the user's own line."""
        lines = []
        for gang in self.gangs:
            whose = f" of {gang.client}" if gang.client else ""
            at = f", at {gang.line.told}" if gang.line.number else ""
            lines.append(f"  {gang}: program {gang.program!r}{whose}{at}")
        return lines

    def _told(self, arrow: Arrow) -> str:
        gang, behind = self.gangs[arrow.gang], self.gangs[arrow.behind]
        if not arrow.host:
            return f"{gang} waits for the result of {behind}"
        would = "would be" if self.kind == "possible" else "is"
        return f"{gang} waits for {arrow.host}, which {would} in {behind}"
