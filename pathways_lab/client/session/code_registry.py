"""The programs and the code that this kernel has registered, as long as a reference to them lives.

Problem: hosts keep compiled functions, some 200 KiB each, and would keep them until
the slice is released; but functions are made all day, in cells that are run again and again.
The user does not say that a function is needed no more: the last reference to it goes, at any
moment, also inside a garbage collection, where nothing may be sent.

How: programs are watched by weak references, whose callbacks only note that one has gone; the
connection's tick sees to them.  The last few stay registered, so that the same function in a
cell that is run again costs nothing.

Rule for maintainers: messages about one program leave under one lock, in the order of the
notes here; a note never promises more than was sent.

Paper: section 4.2 (registering computations).
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from pathways_lab.client.code.export import Executable
from pathways_lab.core.program.folding import fold, folded
from pathways_lab.core.program.program import Plan, SliceId
from pathways_lab.transport.codec import pack

_KEPT = 32
"""Programs that stay registered although nobody has them: they may come again."""

Functions = Iterable[tuple[Executable, SliceId]]


class Ready(Protocol):
    """A program that can be run (:class:`pathways_lab.client.program.graph.Prepared`)."""

    @property
    def plan(self) -> Plan: ...
    @property
    def functions(self) -> Functions: ...


class Send(Protocol):
    """See :meth:`pathways_lab.client.session.connection.Connection._send`."""

    def __call__(self, op: str, fields: dict[str, Any], buffers: Sequence[bytes] = ()) -> None: ...


class Registered:
    """Plans, by key, and functions that the control plane has from this kernel."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._lock = threading.Lock()
        self._plans: dict[str, tuple[tuple[SliceId, ...], frozenset[tuple[str, SliceId]]]] = {}
        """By key: the slices, and the functions that came with it."""
        self._functions: set[tuple[str, SliceId]] = set()
        self._series: dict[str, tuple[str, ...]] = {}
        """Plans made of others, by key: those others."""
        self._users: dict[weakref.ref[Ready], str] = {}
        self._gone: deque[weakref.ref[Ready]] = deque()
        self._idle: dict[str, None] = {}
        """Keys that were without a user when last looked at, the oldest first."""

    def has(self, program: Ready) -> bool:
        """Whether this very program is registered, and stays so as long as somebody has it."""
        return weakref.ref(program) in self._users

    def knows(self, key: str) -> bool:
        """Whether a plan is registered."""
        return key in self._plans

    def add(self, program: Ready) -> None:
        """Send the plan and its code, unless they were sent before."""
        if not self.has(program):
            with self._lock:
                self._register(program.plan, program.functions)
                self._users[weakref.ref(program, self._gone.append)] = program.plan.key

    def add_series(self, plan: Plan, parts: Sequence[str]) -> None:
        """A plan made of others, by key, that are registered and stay so for now."""
        if plan.key not in self._plans:
            with self._lock:
                self._register(plan, ())
                self._series[plan.key] = tuple(parts)

    def _register(self, plan: Plan, functions: Functions) -> None:
        if plan.key in self._plans:
            return
        keys = set()
        for code, place in functions:
            key = code.key, place
            if key not in self._functions:
                self._send("function", code.announced(place), [code.blob])
                self._functions.add(key)
            keys.add(key)
        self._send("program", {"plan": pack(folded(fold(plan)))})
        self._plans[plan.key] = plan.slices, frozenset(keys)

    def release(self, slice_id: SliceId) -> None:
        """The slice is given back, with everything that was registered for it."""
        with self._lock:
            self._functions = {known for known in self._functions if known[1] != slice_id}
            self._remove([k for k, (slices, _) in self._plans.items() if slice_id in slices])

    def tidy(self) -> list[str]:
        """Have programs forgotten that nobody has any more; keys of these plans."""
        if not self._gone:
            return []
        with self._lock:
            while self._gone:
                key = self._users.pop(self._gone.popleft())
                self._idle.pop(key, None)
                self._idle[key] = None
            used = set(self._users.values())
            self._idle = {k: None for k in self._idle if k in self._plans and k not in used}
            plans = list(self._idle)[: max(0, len(self._idle) - _KEPT)]
            if plans:
                gone = set(plans)
                plans += [k for k, parts in self._series.items() if gone.intersection(parts)]
                functions = self._remove(plans)
                self._functions -= functions
                self._send("forget", {"plans": plans, "functions": sorted(functions)})
            return plans

    def _remove(self, plans: Iterable[str]) -> set[tuple[str, SliceId]]:
        """These are registered no more; functions that only they have called."""
        called: set[tuple[str, SliceId]] = set()
        for key in plans:
            called |= self._plans.pop(key)[1]
            self._series.pop(key, None)
            self._idle.pop(key, None)
        return called.difference(*(functions for _, functions in self._plans.values()))
