"""Bytes that a client sent and nobody counts go with it, whenever they come."""

from __future__ import annotations

import gc
import math
from collections import deque
from types import FunctionType, ModuleType

from pathways_lab.core.messages import (
    BufferDeclared,
    ClientJoined,
    ClientLeft,
    FreeBuffers,
    HostReport,
    PatienceEnded,
    SliceRequested,
)
from pathways_lab.core.slices.topology import SliceRequest
from pathways_lab.testing import Script
from tests.core.stories import told

HOST = "island0/host0"
SLICE = UNKNOWN = 5 << 32 | 1
DECLARED = 5 << 32 | 2


def test_uploads_of_a_client_that_left_are_freed_also_late_and_undeclared_ones() -> None:
    script = Script()
    base = (0.0, "test", "bob")
    script.send(ClientJoined(*base, number=5))
    script.send(SliceRequested(*base, SLICE, SliceRequest((2,), ("x",))))
    script.send(HostReport(0.0, "test", HOST, resident=(UNKNOWN,)))
    script.send(BufferDeclared(*base, DECLARED, SLICE, 8))
    assert not told(script, FreeBuffers)
    script.send(ClientLeft(*base, "killed"))
    assert {n for c in told(script, FreeBuffers) for n in c.buffers} == {UNKNOWN, DECLARED}
    uploads = script.control.uploads
    assert not uploads.orphans  # their numbers say whose they are, and they may never come
    told_before = len(told(script, FreeBuffers))
    late = (DECLARED, 5 << 32 | 3)
    script.send(HostReport(0.0, "test", HOST, resident=late))
    again = told(script, FreeBuffers)[told_before:]
    assert {c.buffers for c in again} == {(n,) for n in late}
    assert (uploads.early, uploads.orphans) == ({}, {})
    assert not any(script.used())


def test_bytes_that_nobody_declares_are_not_kept() -> None:
    script = Script()
    where = script.slice(2)
    for number in (UNKNOWN, DECLARED):
        script.send(HostReport(0.0, "test", HOST, resident=(number,)))
    script.send(BufferDeclared(1.0, "test", "kernel-1", DECLARED, where, 8))
    assert script.resolved[DECLARED] is None
    script.send(HostReport(9.0, "test", HOST, resident=(UNKNOWN + 7,)))
    assert not told(script, FreeBuffers)
    script.send(HostReport(11.0, "test", HOST))
    assert [c.buffers for c in told(script, FreeBuffers)] == [(UNKNOWN,)]
    # Who declares so late is told, and waits for nothing.
    script.send(BufferDeclared(12.0, "test", "kernel-1", UNKNOWN, where, 8))
    failure = script.resolved[UNKNOWN]
    assert failure is not None
    assert "before it was declared" in failure.message
    assert script.resolved[DECLARED] is None
    assert not script.control.uploads.abandoned


def test_the_core_says_when_it_gives_up_bytes_although_nothing_else_happens() -> None:
    script = Script()
    assert script.control.due == math.inf
    for time, number in ((1.0, UNKNOWN), (2.0, DECLARED)):
        script.send(HostReport(time, "test", HOST, resident=(number,)))
    for due, number in ((11.0, UNKNOWN), (12.0, DECLARED)):
        assert script.control.due == due
        script.send(PatienceEnded(due, "clock"))
        assert told(script, FreeBuffers)[-1].buffers == (number,)
    assert script.control.due == math.inf
    assert not script.control.uploads.early


def test_a_client_that_left_has_given_up_nothing() -> None:
    script = Script()
    script.send(ClientJoined(0.0, "test", "bob", number=5))
    for time, number in ((0.0, UNKNOWN), (11.0, DECLARED)):
        script.send(HostReport(time, "test", HOST, resident=(number,)))
    assert script.control.uploads.abandoned == {UNKNOWN}
    script.send(ClientLeft(12.0, "test", "bob", "killed"))
    assert not script.control.uploads.abandoned


def kept(root: object) -> int:
    """Entries of all containers that can be reached."""
    seen: dict[int, object] = {}
    todo, entries = [root], 0
    while todo:
        one = todo.pop()
        if id(one) in seen or isinstance(one, type | ModuleType | FunctionType):
            continue
        seen[id(one)] = one
        entries += len(one) if isinstance(one, dict | list | set | deque) else 0
        todo += gc.get_referents(one)
    return entries


def test_nothing_is_kept_of_clients_that_left() -> None:
    script = Script()
    first = script.slice(2)
    sizes = []
    for number in range(5, 25):
        now, high = 100.0 * number, number << 32
        base = (now, "test", "bob")
        script.send(ClientJoined(*base, number=number))
        script.send(SliceRequested(*base, high | 1, SliceRequest((2,), ("x",))))
        script.send(HostReport(now, "test", HOST, resident=(high | 1,)))
        script.send(BufferDeclared(*base, high | 2, high | 1, 8))
        script.send(HostReport(now, "test", HOST, resident=(high | 2,)))
        script.send(ClientLeft(*base, "killed"))
        script.send(HostReport(now, "test", HOST, resident=(high | 3,)))
        sizes.append(kept(script.control))
    assert first in script.control.slices
    assert len(set(sizes[5:])) == 1, sizes
