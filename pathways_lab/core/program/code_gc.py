"""Garbage collection of code: programs and functions go when no run needs them.

Problem: compiled code takes memory on every host of its slice, so a client that goes on
making functions would fill hosts that it never leaves.  The client names the programs that it has
let go; but its runs may be queued, or under way, and need their program to their end.

How: a plan goes when no run of it is left, a function when no plan calls it; hosts hear of it
after everything that they were granted.  Until then it is only unknown to its client, and
registering it again keeps it.  A function that hosts still compile goes when they have reported
it: the report would else be taken for that of the next function of its name.  A lost slice may
still have gangs to come on hosts that live: they fail in their place, as gangs do that have
lost their partners.

Rule for maintainers: nothing here ends or delays a run.

Paper: section 4.2 (registering computations).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from pathways_lab.core.checks import ClientRecord
from pathways_lab.core.messages import ProgramsDropped, ProgramsForgotten
from pathways_lab.core.program.functions import FunctionKey
from pathways_lab.core.program.program import SliceId
from pathways_lab.core.state import State


@dataclass(slots=True)
class Forgetting:
    """plans: by client and key, runs that may not have ended.

    functions: what goes with the last plan that calls it, and the client that said so.
    """

    state: State
    clients: Mapping[str, ClientRecord]
    plans: dict[tuple[str, str], list[int]] = field(default_factory=dict)
    functions: dict[FunctionKey, str] = field(default_factory=dict)
    _news: bool = False

    @property
    def busy(self) -> bool:
        """Whether something may be forgotten soon."""
        return self._news or bool(self.plans)

    def drop(self, event: ProgramsDropped) -> None:
        """A client has let these go."""
        client, state = event.client, self.state
        own = self.clients[client].slices
        runs: dict[str, list[int]] = {key: [] for key in event.plans}
        for number in state.clients[client]:
            runs.get(state.runs[number].index.plan.key, []).append(number)
        self.plans.update({(client, key): found for key, found in runs.items()})
        self.functions.update({f: client for f in event.functions if f[1] in own})
        self._news = True

    def keep(self, client: str, plan: str) -> None:
        """It was registered again."""
        self.plans.pop((client, plan), None)

    def announced(self, function: FunctionKey) -> None:
        """It was announced again."""
        self.functions.pop(function, None)

    def leave(self, client: str) -> None:
        """The code of a client goes with its slices."""
        self.plans = {key: runs for key, runs in self.plans.items() if key[0] != client}
        self.functions = {f: c for f, c in self.functions.items() if c != client}

    def work(self) -> bool:
        """Forget what no run needs any more; whether there was anything."""
        if not self.busy:
            return False
        state = self.state
        hosts: dict[str, None] = {}
        plans = [key for key, runs in self.plans.items() if self._over(runs)]
        if not plans and not self._news:
            return False
        self._news = False
        for client, key in plans:
            del self.plans[client, key]
            index = self.clients[client].plans.pop(key, None)
            if index is not None:
                hosts.update(dict.fromkeys(index.hosts))
        unused = [f for f, client in self.functions.items() if not self._called(f, client)]
        functions = [f for f in unused if not state.functions.compiling(f)]
        self._news = len(functions) < len(unused)
        for function in functions:
            del self.functions[function]
            state.functions.records.pop(function, None)
            hosts.update(dict.fromkeys(self._hosts(function[1])))
        if plans or functions:
            keys = tuple([key for _, key in plans])
            there = state.alive(hosts)
            state.out.append(ProgramsForgotten(state.cause, there, keys, tuple(functions)))
        return bool(plans or functions)

    def _over(self, runs: list[int]) -> bool:
        while runs and runs[-1] not in self.state.runs:
            runs.pop()
        return not runs

    def _called(self, function: FunctionKey, client: str) -> bool:
        return any(function in index.functions for index in self.clients[client].plans.values())

    def _hosts(self, slice_id: SliceId) -> tuple[str, ...]:
        record = self.state.resources.slices.get(slice_id)
        return record.binding.hosts if record is not None else ()
