"""The loop that launches a row: order, pieces, and what goes wrong in the middle."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

from pathways_lab.core.errors import Failure
from pathways_lab.core.program import Plan
from pathways_lab.runtime.actions import LaunchRow
from pathways_lab.runtime.lanes import Times
from pathways_lab.runtime.launch import Launcher
from pathways_lab.runtime.rows import UNSEEN, Course, End, Piece
from tests.runtime.launch_kit import HOST, PlanBuilder, binding, grant


class Receipt:
    """ready: whether it is there at once.  error: what its gang ended with."""

    def __init__(self, ready: bool, error: Exception | None) -> None:
        self.ready, self.error = ready, error

    def is_ready(self) -> bool:
        return self.ready

    def block_until_ready(self) -> Receipt:
        self.ready = True
        if self.error is not None:
            raise self.error
        return self


class Devices:
    """Compiled functions by name: ``raises`` at the call, ``breaks`` later, others compute."""

    def __init__(self, quick: bool = True) -> None:
        self.quick = quick
        self.called: list[str] = []

    def get(self, name: str) -> Any:
        def execute(arguments: list[Any]) -> tuple[list[Any], Receipt]:
            self.called.append(name)
            if name == "raises":
                raise ValueError("cannot be called")
            error = RuntimeError("broke") if name == "breaks" else None
            return [f"{name}({', '.join(arguments)})"], Receipt(self.quick, error)

        return None if name == "unknown" else execute


def launched(plan: Plan, devices: Devices) -> tuple[LaunchRow, list[list[End]]]:
    """A row, launched to its end: its pieces."""
    launcher = Launcher(HOST, "island0", rows=True)
    launcher.bind(binding(1, 0), "lane 1")
    launcher.program(plan)
    outputs = tuple(range(len(plan.outputs)))
    (row,) = launcher.grant(grant(1, plan, inputs=(None,), outputs=outputs), {0: "a"})
    assert isinstance(row, LaunchRow)
    place: Any = SimpleNamespace(locals=(0,), renewed=False)
    pieces: list[list[End]] = []

    def over(piece: Piece, times: Times) -> None:
        pieces.append(list(piece.ends(times)))

    functions: Any = devices
    piece: Piece | None = Piece(Course(row, place, functions, HOST, over, 0.0), 0)
    while piece is not None:
        receipt = piece.start()
        piece.wait(receipt)
        piece.over(Times(0.0, 0.0, 0.0, 0.0), None)
        piece = piece.rest()
    return row, pieces


def messages(pieces: list[list[End]]) -> list[str]:
    return [end.failure.message if end.failure else "" for piece in pieces for end in piece]


def three(name: str) -> Plan:
    """A chain of three with *name* in its middle, and one gang that has no part in it."""
    made = PlanBuilder().call(1, "f", ["a"], ["b"]).call(1, name, ["b"], ["c"])
    made.call(1, "g", ["c"], ["d"]).call(1, "h", ["a"], ["e"])
    return made.plan(["a"], ["d", "e"])


def test_a_row_computes_what_its_gangs_would() -> None:
    row, pieces = launched(three("m"), Devices())
    assert [slot.payload for slot in row.outputs.values()] == ["g(m(f(a)))", "h(a)"]
    assert messages(pieces) == [""] * 4


def test_what_raises_loses_its_results_and_nothing_else() -> None:
    for name, message in (
        ("raises", "raises failed: cannot be called"),
        ("unknown", f"unknown was launched on {HOST} but never compiled there"),
    ):
        devices = Devices()
        row, pieces = launched(three(name), devices)
        assert messages(pieces) == ["", message, "", ""]
        assert "g" not in devices.called, "it was launched without its input"
        assert [slot.payload for slot in row.outputs.values()] == [None, "h(a)"]


def test_what_breaks_on_the_devices_is_noticed() -> None:
    for quick in (True, False):
        _, pieces = launched(three("breaks"), Devices(quick))
        assert messages(pieces) == ["", "breaks failed: broke", "", ""]


def test_slow_gangs_end_pieces_early() -> None:
    made = PlanBuilder()
    for number in range(7):
        made.call(1, "f", [f"v{number}"], [f"v{number + 1}"])
    plan = made.plan(["v0"], ["v7"])
    _, pieces = launched(plan, Devices(quick=False))
    assert [len(piece) for piece in pieces] == [UNSEEN, UNSEEN, 1]
    ends = [end for piece in pieces for end in piece]
    assert [end.at for end in ends] == list(range(7))
    assert all(end.called <= end.start <= end.end for end in ends)


def test_no_two_gangs_of_a_piece_overlap() -> None:
    _, pieces = launched(three("m"), Devices())
    for piece in pieces:
        assert all(a.end <= b.start for a, b in itertools.pairwise(piece))


def test_an_argument_that_cannot_be_read_fails_its_readers() -> None:
    launcher, plan = Launcher(HOST, "island0", rows=True), three("m")
    launcher.bind(binding(1, 0), "lane 1")
    launcher.program(plan)
    broken = Failure("execute", "no such bytes")
    actions = launcher.grant(grant(1, plan, inputs=(None,), outputs=(1, 2)), {0: broken})
    row = next(action for action in actions if isinstance(action, LaunchRow))
    devices: Any = Devices()
    place: Any = SimpleNamespace(locals=(0,), renewed=False)
    Piece(Course(row, place, devices, HOST, lambda *_: None, 0.0), 0).start()
    assert devices.called == []
    reports = launcher.row_done((1, 0), [(0.0, None)] * 4)
    told = [getattr(report, "failure", None) for report in reports[:4]]
    assert told == [broken] * 4
