"""The calls of a trunk that wait, and which of them go into the next gang.

Problem: calls of many clients come one by one, and one gang for many of them costs the devices
little more than one for a single call.  So a call waits for others, but not long; and when more
wait than one gang takes, the policy decides whose go first.

How: calls of a client stay in their order.  The policy chooses among the first of each client;
the chosen one decides of which kind the gang is, and the policy chooses again among those of
its kind until the gang is full.  The cost of a gang grows with its calls and with the clients that
wait, and not with the calls that wait.

Rule for maintainers: pure; the time is an argument.

Paper: section 2 (fine-tunes that share the layers of a foundation model), section 4.4 (policies).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from types import MappingProxyType

from pathways_lab.core.errors import Failure
from pathways_lab.core.scheduling.policies import INITIAL, Candidate, Policy, PolicyView, ask
from pathways_lab.core.scheduling.turns import HALF_LIFE, TICK, Usage


@dataclass(frozen=True, slots=True)
class Call:
    """number: in the order in which calls came.  kind: calls of one kind can go together.

    time: when it came, in seconds.
    """

    number: int
    client: str
    kind: Hashable
    time: float


@dataclass
class Lineup:
    """name: of the trunk.  most: calls in one gang.  wait: seconds that a call waits for others.

    removed: why the policy is not asked any more, if it failed.
    """

    name: str
    most: int
    wait: float
    policy: Policy = INITIAL
    removed: Failure | None = None
    _lines: dict[str, deque[Call]] = field(default_factory=dict)
    _usage: Usage = field(default_factory=Usage)
    _discounted: float = 0.0

    def __len__(self) -> int:
        return sum(map(len, self._lines.values()))

    @property
    def clients(self) -> set[str]:
        """Those of whom calls wait."""
        return {*self._lines}

    def waits(self, client: str) -> int:
        """How many calls of a client wait."""
        return len(self._lines.get(client, ()))

    def came(self, call: Call) -> None:
        """A call waits from now on."""
        self._usage.came(call.client, call.time)
        self._lines.setdefault(call.client, deque()).append(call)

    def left(self, client: str, time: float) -> list[Call]:
        """A client has left: its calls wait no more."""
        gone = [*self._lines.pop(client, ())]
        for _ in gone:
            self._usage.went(client, time)
        return gone

    def due(self, time: float) -> float | None:
        """When the next gang shall leave at the latest, unless more come; None: nothing waits."""
        if not self._lines:
            return None
        if self.full(time):
            return time
        return min(line[0].time for line in self._lines.values()) + self.wait

    def full(self, time: float) -> bool:
        """Whether more calls wait than the next gang takes, or as many."""
        if not self._lines:
            return False
        return self._count(self._first(time, [*self._lines]).kind) >= self.most

    def take(self, time: float) -> list[Call]:
        """The calls of the next gang, one at least; they wait no more."""
        taken = [self._take(self._first(time, [*self._lines]), time)]
        kind = taken[0].kind
        while len(taken) < self.most:
            alike = [client for client, line in self._lines.items() if line[0].kind == kind]
            if not alike:
                break
            taken.append(self._take(self._first(time, alike), time))
        return taken

    def _take(self, call: Call, time: float) -> Call:
        line = self._lines[call.client]
        line.popleft()
        if not line:
            del self._lines[call.client]
        self._usage.add(call.client, 1.0)
        self._usage.went(call.client, time)
        return call

    def _count(self, kind: Hashable) -> int:
        """How many calls of a kind could leave together, as far as it matters."""
        return sum(1 for _, _ in zip(range(self.most), self._alike(kind), strict=False))

    def _alike(self, kind: Hashable) -> Iterator[Call]:
        for line in self._lines.values():
            for call in line:
                if call.kind != kind:
                    break
                yield call

    def _first(self, time: float, clients: list[str]) -> Call:
        """The policy's choice among the first calls of these clients."""
        heads = [self._lines[client][0] for client in clients]
        oldest = min(heads, key=lambda call: call.number)
        if len(heads) == 1 or self.removed is not None:
            return oldest
        if time - self._discounted > TICK:
            self._usage.discount(0.5 ** ((time - self._discounted) / HALF_LIFE), time)
            self._discounted = time
        candidates = tuple([self._candidate(call, time) for call in heads])
        chosen = ask(self.policy, PolicyView(time, candidates, MappingProxyType(self._usage.used)))
        if isinstance(chosen, Failure):
            self.removed = chosen
            return oldest
        return next(call for call in heads if call.number == chosen)

    def _candidate(self, call: Call, time: float) -> Candidate:
        return Candidate(
            *(call.number, call.client, self.name, 0, call.number, time - call.time),
            *(0.0, 0.0, 0, False, 0),
        )
