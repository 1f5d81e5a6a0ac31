"""Bytes that a client sent and nobody counts go with it, whenever they come."""

from __future__ import annotations

from pathways_lab.core.messages import (
    BufferDeclared,
    ClientJoined,
    ClientLeft,
    FreeBuffers,
    HostReport,
    SliceRequested,
)
from pathways_lab.core.topology import SliceRequest
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
    told_before = len(told(script, FreeBuffers))
    late = (DECLARED, 5 << 32 | 3)
    script.send(HostReport(0.0, "test", HOST, resident=late))
    again = told(script, FreeBuffers)[told_before:]
    assert {c.buffers for c in again} == {(n,) for n in late}
    uploads = script.control.uploads
    assert (uploads.early, uploads.orphans) == ({}, {})
    assert not any(script.used())
