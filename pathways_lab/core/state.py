"""The state that the parts of one control plane share.

Problem: a run passes through many machines, and a change in one lets a run in
another go on.  The machines do not know each other; the parts that move runs
(:mod:`~pathways_lab.core.scheduling.grants`, :mod:`~pathways_lab.core.scheduling.outcomes`,
:mod:`~pathways_lab.core.memory.uploads`) all work on this state.

Rule for maintainers: data and lookups; the parts decide about runs.  Consequences
go through the queues here and never through recursion, for chains of runs may be
thousands long.

Paper: section 4.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any

from pathways_lab.core.errors import Failure
from pathways_lab.core.memory.ledger import Ledger
from pathways_lab.core.memory.quotas import Quotas
from pathways_lab.core.memory.store import BufferRecord, Store
from pathways_lab.core.messages import Command, FreeBuffers, Refused, Resolved
from pathways_lab.core.messages.elastic import Answer
from pathways_lab.core.program.functions import Functions
from pathways_lab.core.program.program import SliceId
from pathways_lab.core.scheduling.admission import Admission
from pathways_lab.core.scheduling.order import Lanes, Order, Pace
from pathways_lab.core.scheduling.rules import Rules
from pathways_lab.core.scheduling.runs import RunRecord
from pathways_lab.core.scheduling.turns import Turns
from pathways_lab.core.slices.slices import ResourceManager


class State:
    """Machines, runs, and what the event at hand has led to so far.

    clients: the unfinished runs of every connected client, and those that go on without theirs.
    queued: runs that are not admitted, in order of submission.
    withheld: slices on which nothing more is admitted for now.
    active, users: by slice, how many admitted, and how many unfinished, runs use it.
    out, cause, time: of the event at hand: commands, id, seconds.
    settled: steps to be looked at because nothing of them is waited for.
    spoiled: ``(run, input position, why)`` of inputs that have failed.
    woken: runs to be looked at because something that they waited for changed.
    """

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self.resources = ResourceManager()
        self.functions = Functions(rules.assumed)
        self.store = Store(Ledger(by_gang=not rules.peak))
        self.accounts = self.store.ledger.accounts
        self.quotas = Quotas(self.accounts, enforced=rules.quotas)
        self.order = Order()
        self.pace = Pace(round(rules.ahead * 1e6), round(rules.close * 1e6), rules.least)
        self.lanes = Lanes()
        self.turns = Turns(rules.overtaking, self.functions)
        self.admission = Admission(rules.overtaking)
        self.clients: dict[str, set[int]] = {}
        self.runs: dict[int, RunRecord] = {}
        self.queued: dict[int, RunRecord] = {}
        self.withheld: set[SliceId] = set()
        self.active: dict[SliceId, int] = {}
        self.users: dict[SliceId, int] = {}
        self.submitted = 0
        self.out: list[Command] = []
        self.cause = ""
        self.time = 0.0
        self.settled: deque[tuple[RunRecord, int]] = deque()
        self.spoiled: deque[tuple[int, int, Failure]] = deque()
        self.woken: deque[int] = deque()
        self._resolved: dict[tuple[str, Failure | None], list[int]] = {}
        self._divided = 0

    def alive(self, hosts: Iterable[str]) -> tuple[str, ...]:
        """Those of *hosts* that exist."""
        return tuple(h for h in hosts if h in self.resources.hosts)

    def refuse(self, event: Any, subject: str, why: str | Failure) -> None:
        """Tell a client that its request is not met, by the number that it gave it.

        subject: what it is about, for requests without a number.
        """
        failure = Failure("refused", f"{subject}: {why}") if isinstance(why, str) else why
        request = getattr(event, "request", 0)
        if type(request) is int and request:
            self.out.append(Answer(event.cause, event.client, request, (), failure))
        else:
            self.out.append(Refused(event.cause, event.client, subject, failure))

    def wake(self, buffer: BufferRecord) -> None:
        """Something of a buffer changed: runs that waited for it are looked at again."""
        if buffer.watched:
            self.woken.extend(buffer.watched)
            buffer.watched = []

    def resolve(self, buffer: BufferRecord, failure: Failure | None) -> None:
        """Its clients will be told about a buffer, together with others."""
        self._resolved.setdefault((buffer.owner, failure), []).append(buffer.id)
        for number, client in buffer.references.items():
            self._resolved.setdefault((client, failure), []).append(number)

    def tell_resolved(self) -> None:
        """Tell clients about their buffers now."""
        if not self._resolved:
            return
        for (client, failure), buffers in self._resolved.items():
            if client in self.clients:
                self.out.append(Resolved(self.cause, client, tuple(buffers), failure))
        self._resolved.clear()

    def tell_freed(self) -> None:
        """Tell hosts which buffers nobody needs any more."""
        if not self.store.freed:
            return
        freed, self.store.freed = self.store.freed, {}
        for slice_id, ids in freed.items():
            hosts = self.alive(self.resources.slices[slice_id].hosts)
            if hosts:
                self.out.append(FreeBuffers(self.cause, hosts, tuple(ids)))

    def divide(self) -> None:
        """When slices have changed, count bytes and pace over the new cells."""
        resources, ledger = self.resources, self.store.ledger
        if self._divided == resources.version:
            return
        self._divided = resources.version
        owners = {s: record.binding.client for s, record in resources.slices.items()}
        ledger.divide(resources.cells, resources.cells_of, owners)
        self.pace.divide(resources.cells, resources.cells_of)
        for entries in self.admission.kinds.values():
            for entry in entries:
                entry.need = ledger.need(entry.lines, upload=entry.run is None)
        self.admission.settled = False

    def forget_slice(self, slice_id: SliceId) -> None:
        """Nothing uses the slice any more."""
        self.functions.forget(slice_id)
        self.pace.limits.pop(slice_id, None)
        self.pace.asked.pop(slice_id, None)
        self.users.pop(slice_id, None)
        self.withheld.discard(slice_id)
        self.store.by_slice.pop(slice_id, None)
