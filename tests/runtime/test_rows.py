"""The loop that launches a row: order, pieces, and what goes wrong in the middle."""

from __future__ import annotations

import itertools
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from pathways_lab.core.errors import Failure
from pathways_lab.core.program.program import Plan
from pathways_lab.executor.actions import Report
from pathways_lab.executor.launcher import Launcher
from pathways_lab.executor.steps import Segment
from pathways_lab.runtime import arrays
from pathways_lab.runtime.host.segment_job import UNSEEN, Ends, Piece, SegmentJob
from tests.runtime.launch_kit import HOST, PlanBuilder, binding, grant

ALONE: Any = SimpleNamespace(explained=lambda _, failure: failure, meet=print)
"""Slices without other hosts."""


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

        execute.alone = execute.calls_python = False  # type: ignore[attr-defined]
        return None if name == "unknown" else execute


def launched(
    plan: Plan, devices: Devices, awaited: tuple[str, ...] = ()
) -> tuple[Segment, list[Ends]]:
    """A row, launched to its end: its pieces.  awaited: values that somebody waits for."""
    launcher = Launcher(HOST, "island0")
    launcher.bind(binding(1, 0), "lane 1")
    launcher.program(plan)
    outputs = tuple(range(len(plan.outputs)))
    (row,) = launcher.grant(grant(1, plan, inputs=(None,), outputs=outputs), {0: "a"})
    assert isinstance(row, Segment)
    for name in awaited:
        slot = next(s for s in row.outputs.values() if s.value.name == name)
        assert slot.when_settled(lambda: None)
    place: Any = SimpleNamespace(locals=(0,), renewed=False)
    pieces: list[Ends] = []

    def over(piece: Piece) -> None:
        pieces.append(piece.ends())

    functions: Any = devices
    job = SegmentJob(row, place, functions, HOST, over, ALONE, 0.0)
    piece: Piece | None = Piece(job, 0)
    while piece is not None:
        piece.start()
        piece.wait()
        piece.over(0.0)
        piece = piece.rest()
    return row, pieces


def messages(pieces: list[Ends]) -> list[str]:
    found = {at: failure.message for each in pieces for at, failure in each.failures.items()}
    return [found.get(at, "") for at in range(sum(len(each.ends) for each in pieces))]


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
    assert [(each.first, len(each.ends)) for each in pieces] == [(0, 3), (3, 3), (6, 1)]
    assert UNSEEN == 3
    for each in pieces:
        stamps = zip(each.called, each.starts, each.ends, strict=True)
        assert all(called <= start <= end for called, start, end in stamps)


@pytest.mark.parametrize(
    ("awaited", "pieces"), [((), [7]), (("v2",), [2, 5]), (("v7",), [7]), (("v2", "v7"), [2, 5])]
)
def test_a_piece_ends_soon_after_what_somebody_waits_for(
    awaited: tuple[str, ...], pieces: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gangs that are over at once, each 0.6 ms after the one before."""
    now = itertools.count(0.0, 0.0006)
    clock = SimpleNamespace(monotonic=lambda: next(now))
    monkeypatch.setattr("pathways_lab.runtime.host.segment_job.time", clock)
    made = PlanBuilder()
    for number in range(7):
        made.call(1, "f", [f"v{number}"], [f"v{number + 1}"])
    _, found = launched(made.plan(["v0"], ["v2", "v7"]), Devices(), awaited)
    assert [len(each.ends) for each in found] == pieces


def test_no_two_gangs_of_a_piece_overlap() -> None:
    _, pieces = launched(three("m"), Devices())
    for piece in pieces:
        assert all(end <= start for end, start in zip(piece.ends, piece.starts[1:], strict=False))


def test_an_argument_that_cannot_be_read_fails_its_readers() -> None:
    launcher, plan = Launcher(HOST, "island0"), three("m")
    launcher.bind(binding(1, 0), "lane 1")
    launcher.program(plan)
    broken = Failure("execute", "no such bytes")
    actions = launcher.grant(grant(1, plan, inputs=(None,), outputs=(1, 2)), {0: broken})
    row = next(action for action in actions if isinstance(action, Segment))
    devices: Any = Devices()
    place: Any = SimpleNamespace(locals=(0,), renewed=False)
    piece = Piece(SegmentJob(row, place, devices, HOST, lambda *_: None, ALONE, 0.0), 0)
    piece.start()
    assert devices.called == []
    report = launcher.done((1, 0), [0.0] * 4, {})[0]
    assert report == Report(1, 0, [0.0] * 4, dict.fromkeys(range(4), broken))


def together(
    devices: Any, given: Any, monkeypatch: pytest.MonkeyPatch
) -> tuple[SegmentJob, Launcher]:
    """The same three gangs and one, on a slice over two hosts."""
    monkeypatch.setattr(arrays, "zeros", lambda value, place: f"zeros of {value.name}")
    launcher, plan = Launcher(HOST, "island0"), three("m")
    launcher.bind(replace(binding(1, 0), devices=((HOST, 0), ("island0/host1", 0))), "lane 1")
    launcher.program(plan)
    actions = launcher.grant(grant(1, plan, inputs=(None,), outputs=(1, 2)), {0: given})
    row = next(action for action in actions if isinstance(action, Segment))
    assert row.together
    place: Any = SimpleNamespace(locals=(0,), renewed=False)
    return SegmentJob(row, place, devices, HOST, lambda *_: None, ALONE, 0.0), launcher


def test_on_several_hosts_all_are_launched_with_zeros_for_what_is_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    devices, broken = Devices(), Failure("execute", "no such bytes")
    job, launcher = together(devices, broken, monkeypatch)
    Piece(job, 0).start()
    assert devices.called == ["f", "m", "g", "h"], "another host would wait for ever"
    assert [slot.payload for slot in job.segment.outputs.values()] == [None, None]
    report = launcher.done((1, 0), [0.0] * 4, {})[0]
    assert report == Report(1, 0, [0.0] * 4, dict.fromkeys(range(4), broken))


def test_after_one_that_could_not_be_launched_the_others_still_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Seen(Devices):
        def get(self, name: str) -> Any:
            inner = super().get("raises" if name == "m" else name)

            def execute(arguments: list[Any]) -> Any:
                seen.append((name, *arguments))
                return inner(arguments)

            execute.alone = execute.calls_python = False  # type: ignore[attr-defined]
            return execute

    seen: list[tuple[Any, ...]] = []
    job, _ = together(Seen(), "a", monkeypatch)
    piece = Piece(job, 0)
    piece.start()
    piece.wait()
    assert seen == [("f", "a"), ("m", "f(a)"), ("g", "zeros of c"), ("h", "a")]
    assert [slot.payload for slot in job.segment.outputs.values()] == [None, "h(a)"]


def test_what_is_doomed_is_launched_no_more_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    devices = Devices(quick=False)
    job, _ = together(devices, "a", monkeypatch)
    first = Piece(job, 0)
    first.start()
    job.doomed = Failure("deadlock", "formed again")
    monkeypatch.setattr("pathways_lab.runtime.host.segment_job._LEFT_BEHIND", 0.0)
    first.wait()
    rest = first.rest()
    assert rest is not None
    rest.start()
    rest.wait()
    found = []
    for piece in (first, rest):
        piece.over(0.0)
        found += list(piece.ends().failures.values())
    assert len(devices.called) == UNSEEN
    assert [(f.kind, f.message, f.host) for f in found] == [("deadlock", "formed again", HOST)] * 4
