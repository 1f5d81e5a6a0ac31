"""The faults of ``lab.chaos``, in simulated time: the same names, the same every time.

Problem: what a fault does on real processes depends on the moment; here the
moment is given, so a story that went wrong can be told again.

>>> chaos = Chaos(world)                                     # doctest: +SKIP
>>> chaos.kill("island0/host1", at=0.01, back=0.02)          # doctest: +SKIP
>>> chaos.partition("island0", "island1", seconds=0.1)       # doctest: +SKIP

Rule for maintainers: names and meanings are those of
:class:`pathways_lab.client.chaos.chaos.Chaos`.  Nothing here draws random numbers.

Paper: none.
"""

from __future__ import annotations

from dataclasses import dataclass

from pathways_lab.sim.world import World

CONTROL = "control"


@dataclass(frozen=True, slots=True)
class _Way:
    """Between two ends (islands, hosts), from one moment to another."""

    ends: tuple[str, str]
    start: float
    end: float

    def covers(self, a: str, b: str, now: float) -> bool:
        one, other = self.ends
        there = (_within(a, one) and _within(b, other)) or (_within(a, other) and _within(b, one))
        return there and self.start <= now < self.end


class Chaos:
    """Faults in a world.  at: seconds from now.  back: seconds until a host is there again."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._delays: list[tuple[_Way, float]] = []
        self._partitions: list[_Way] = []
        self._slow: list[tuple[str, float, float, float]] = []
        world.network.late = self._late
        world.pace = self._pace

    # --- processes ----------------------------------------------------------------------

    def kill(self, host: str, *, at: float = 0.0, back: float = 0.02) -> None:
        """A host's device process dies, and another takes its place."""
        self._world.agenda.after(at, self._world.lose, host)
        self._world.agenda.after(at + back, self._world.join, host, host.partition("/")[0])

    def lose(self, island: str, *, at: float = 0.0, back: float = 0.02) -> None:
        """All hosts of an island die at once."""
        for host in sorted(self._world.hosts):
            if _within(host, island):
                self.kill(host, at=at, back=back)

    def hang(self, host: str, seconds: float, *, at: float = 0.0) -> None:
        """A host stands still for a while."""
        self._world.agenda.after(at, self._world.stop, host, seconds)

    def slow(self, host: str, factor: float, seconds: float, *, at: float = 0.0) -> None:
        """What begins on a host meanwhile takes so many times as long."""
        start = self._world.agenda.now + at
        self._slow.append((host, factor, start, start + seconds))

    # --- messages -----------------------------------------------------------------------

    def delay(self, a: str, b: str, ms: float, seconds: float, *, at: float = 0.0) -> None:
        """What goes between two islands or hosts arrives so much later."""
        self._delays.append((self._way(a, b, seconds, at), ms / 1000))

    def partition(self, a: str, b: str, seconds: float, *, at: float = 0.0) -> None:
        """What goes between two islands or hosts waits until it is over."""
        self._partitions.append(self._way(a, b, seconds, at))

    def drop(self, a: str, b: str, *, at: float = 0.0, back: float = 0.02) -> None:
        """A message between a host and ``"control"`` is lost: the connection ends, see there."""
        (host,) = {a, b} - {CONTROL}
        self.kill(host, at=at, back=back)

    # --- clients ------------------------------------------------------------------------

    def lose_client(self, name: str, *, at: float = 0.0) -> None:
        """A client is killed."""
        self._world.agenda.after(at, self._world.disconnect, name, "it was killed")

    # --- what the world asks ------------------------------------------------------------

    def _way(self, a: str, b: str, seconds: float, at: float) -> _Way:
        start = self._world.agenda.now + at
        return _Way((a, b), start, start + seconds)

    def _late(self, source: str, target: str) -> float:
        now = self._world.agenda.now
        waits = [way.end - now for way in self._partitions if way.covers(source, target, now)]
        more = sum(late for way, late in self._delays if way.covers(source, target, now))
        return max(waits, default=0.0) + more

    def _pace(self, hosts: tuple[str, ...]) -> float:
        now = self._world.agenda.now
        factors = [f for host, f, start, end in self._slow if host in hosts and start <= now < end]
        return max(factors, default=1.0)


def _within(host: str, end: str) -> bool:
    """Whether a host is one end, or a part of it."""
    return end in (host, host.partition("/")[0])
