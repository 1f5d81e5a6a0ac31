"""A gang as its lane sees it: how long is one waited for that never ends?"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from pathways_lab.core.errors import Failure
from pathways_lab.core.program.program import Line
from pathways_lab.executor.stretches import Part
from pathways_lab.runtime.host import segment_job
from pathways_lab.runtime.host.segment_job import Ends, Piece, SegmentJob, Work


class Receipt:
    """Ready after so many looks, or never."""

    def __init__(self, looks: int | None) -> None:
        self.looks = looks
        self.blocked = False

    def is_ready(self) -> bool:
        if self.looks is None:
            return False
        self.looks -= 1
        return self.looks < 0

    def block_until_ready(self) -> None:
        self.blocked = True


@pytest.fixture(autouse=True)
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segment_job, "_LOOK", 1e-6)
    monkeypatch.setattr(segment_job, "_LEFT_BEHIND", 1e-4)


DOOM = Failure("deadlock", "these wait for each other for ever")


def waited(receipt: Receipt, *, free: bool, doomed: Failure | None = None) -> list[str]:
    """What goes wrong with a gang alone that is launched, doomed perhaps, and waited for."""
    call: Any = SimpleNamespace(function="f", name="f", donated=(), line=Line())
    parts = (Part(0, call, (), (), (), (), (), (), (), 0),)
    stretch = SimpleNamespace(parts=parts, sizes=(), gives=(), first=call, bundled=False)
    launch: Any = SimpleNamespace(
        stamp=Work(0.0, 0.0, free=free), stretch=stretch, first=False, inputs=(), outputs={},
        lost={}, copies=frozenset(), plan=SimpleNamespace(name="p"),
    )  # fmt: skip

    def execute(arguments: list[Any]) -> Any:
        return [], receipt

    execute.alone = False  # type: ignore[attr-defined]
    found: list[Ends] = []
    place: Any = SimpleNamespace(locals=(0,))
    functions: Any = {"f": execute}
    tenants: Any = SimpleNamespace(explained=lambda _, failure: failure, meet=print)
    job = SegmentJob(
        launch, place, functions, "host", lambda piece: found.append(piece.ends()),
        tenants, 0.0,
    )  # fmt: skip
    piece = Piece(job, 0)
    piece.start()
    job.doomed = doomed
    piece.wait()
    piece.over(0.0)
    return [failure.message for failure in found[0].failures.values()]


def test_in_order_a_gang_is_waited_for_without_looking() -> None:
    receipt = Receipt(None)
    assert waited(receipt, free=False) == []
    assert receipt.blocked


def test_a_doomed_gang_that_never_ends_is_left_behind_with_its_reason() -> None:
    receipt = Receipt(None)
    assert waited(receipt, free=True, doomed=DOOM) == [DOOM.message]
    assert not receipt.blocked


def test_a_doomed_gang_that_ends_after_all_says_itself_what_happened() -> None:
    receipt = Receipt(5)
    assert waited(receipt, free=True, doomed=DOOM) == []
    assert receipt.blocked


def test_without_order_a_gang_that_nobody_ended_may_take_as_long_as_it_likes() -> None:
    receipt = Receipt(1000)
    assert waited(receipt, free=True) == []
    assert receipt.blocked
