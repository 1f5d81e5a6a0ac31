"""Law: benchmarks measure in turn, say what is missing, and same samples mean same words."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from benchmarks import targets
from benchmarks.harness import machine, rounds
from benchmarks.harness.child import Child
from benchmarks.harness.figure import Axis, curves, dots
from benchmarks.harness.numbers import brief, ratio, seconds, spread
from benchmarks.harness.report import Claim, Report, Verdict, grid, judged, matrix, publish
from benchmarks.harness.rounds import Measured, Missing, Timed, measure, more_units, warm
from tests.runtime.processes import until


@dataclass
class Fake:
    """A system whose rounds cost what is told; it remembers what it was asked."""

    name: str
    per_unit: float = 0.01
    cases: Sequence[str] = ("a", "b")
    missing: str = ""
    fails_at: int = -1
    starts: int = 1
    order: list[tuple[str, str]] = field(default_factory=list)
    stopped: int = 0
    awake: list[str] = field(default_factory=list)

    def start(self) -> None:
        assert self.awake == []
        if self.missing:
            raise Missing(self.missing)
        self.starts -= 1
        if self.starts > 0:
            raise RuntimeError("nobody came to meet it")
        self.awake.append(self.name)

    def round(self, case: str, units: int) -> Timed:
        assert self.awake == [self.name], "others may not disturb it"
        self.order.append((self.name, case))
        if len(self.order) == self.fails_at:
            raise RuntimeError("the network is gone")
        return Timed(self.per_unit * units, units)

    def rest(self) -> None:
        self.awake.remove(self.name)

    def wake(self) -> None:
        self.awake.append(self.name)

    def stop(self) -> None:
        self.stopped += 1
        self.awake[:] = [name for name in self.awake if name != self.name]


def run(systems: Sequence[Fake], seed: int = 0, rounds: int = 6) -> Measured:
    return measure(systems, ("a", "b"), rounds=rounds, budget=0.02, seed=seed, say=lambda _: None)


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.harness.rounds.busy_cores", lambda seconds: 0.25)


# --- rounds ----------------------------------------------------------------------------------


def test_every_round_visits_everybody_once_in_an_order_of_its_own() -> None:
    order: list[tuple[str, str]] = []
    awake: list[str] = []
    systems = [Fake("x", order=order, awake=awake), Fake("y", order=order, awake=awake)]
    result = run(systems)
    everyone = {(name, case) for name in "xy" for case in "ab"}
    counted = order[-6 * 4 :]
    turns = [tuple(counted[n : n + 4]) for n in range(0, len(counted), 4)]
    assert all(set(turn) == everyone for turn in turns)
    assert len(set(turns)) > 1, "the order is never shuffled"
    assert all(turn[0][1] == turn[1][1] for turn in turns), "what is compared is close in time"
    assert [len(result.of(case, name)) for name, case in sorted(everyone)] == [6] * 4
    assert result.busy == 0.25
    assert [system.stopped for system in systems] == [1, 1]


def test_whoever_rests_is_awake_now_and_then_while_another_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rounds, "BREATH", 0.001)
    monkeypatch.setattr(rounds, "AWAKE", 0.0)
    awake: list[str] = []
    breathed = threading.Event()

    class Slow(Fake):
        def start(self) -> None:
            assert breathed.wait(20), "the other was stopped all the time"
            self.awake.append(self.name)

    class Other(Fake):
        def wake(self) -> None:
            super().wake()
            breathed.set()

    result = run([Other("x", awake=awake), Slow("y", awake=awake)])
    assert not result.missing
    assert len(result.of("a", "x")) == 6


def test_the_order_of_rounds_is_a_function_of_the_seed() -> None:
    orders = []
    for seed in (1, 1, 2):
        order: list[tuple[str, str]] = []
        run([Fake("x", order=order), Fake("y", order=order)], seed)
        orders.append(order)
    assert orders[0] == orders[1] != orders[2]


def test_what_is_missing_is_said_and_the_others_are_measured() -> None:
    absent = Fake("x", missing="not installed")
    result = run([absent, Fake("y")])
    assert result.missing == {"x": "not installed"}
    assert result.of("a", "x") == []
    assert len(result.of("a", "y")) == 6
    assert absent.stopped == 1


def test_a_system_that_fails_half_way_keeps_its_rounds_and_its_reason() -> None:
    result = run([Fake("x", fails_at=10), Fake("y")])
    assert "the network is gone" in result.missing["x"]
    assert 0 < len(result.of("a", "x")) < 6
    assert len(result.of("a", "y")) == 6


def test_a_system_that_fails_to_start_has_a_second_try_and_no_third() -> None:
    late, never, absent = Fake("x", starts=2), Fake("y", starts=3), Fake("z", missing="not here")
    said: list[str] = []
    result = measure([late, never, absent], ("a",), rounds=1, budget=0.02, say=said.append)
    assert [len(result.of("a", name)) for name in "xyz"] == [1, 0, 0]
    assert result.missing == {"y": "RuntimeError: nobody came to meet it", "z": "not here"}
    again = [line for line in said if "once more" in line]
    assert again == [f"starting {name} once more: nobody came to meet it" for name in "xy"]
    assert [late.stopped, never.stopped, absent.stopped] == [2, 2, 1]


def test_a_case_that_a_system_cannot_do_is_left_out() -> None:
    result = run([Fake("x", cases=("a",)), Fake("y")])
    assert list(result.times["b"]) == ["y"]


def test_warming_up_finds_how_many_units_fill_the_budget() -> None:
    fake = Fake("x", per_unit=1e-5)
    run([fake])
    assert more_units(Timed(1e-3, 10), budget=4e-3) == 40
    assert more_units(Timed(1.0, 10), budget=0.2) == 2
    assert more_units(Timed(9.0, 1), budget=0.2) == 1
    assert more_units(Timed(1e-9, 10), budget=1.0) == 80, "one lucky reading must not explode"


# --- numbers ---------------------------------------------------------------------------------


def test_warming_up_goes_on_until_it_is_no_faster() -> None:
    """Judged while it still becomes faster, rounds would be as short as that."""
    costs = iter([1.0, 0.1, 0.08, 0.04, 0.02, 0.01, 0.0095, 0.5])
    asked: list[int] = []

    def go(units: int) -> Timed:
        asked.append(units)
        return Timed(next(costs) * units, units)

    assert warm(go, budget=1.0) == 105
    assert asked == [1, 1, 8, 12, 25, 50, 100]


def test_warming_up_ends_for_what_becomes_faster_for_ever() -> None:
    asked: list[int] = []

    def go(units: int) -> Timed:
        asked.append(units)
        return Timed(0.5 ** len(asked) * units, units)

    warm(go, budget=0.1)
    assert len(asked) < 20


def test_spread_is_median_and_quartiles() -> None:
    of = spread([1.0, 2.0, 3.0, 4.0, 100.0])
    assert (of.median, of.low, of.high, of.count) == (3.0, 2.0, 4.0, 5)
    assert spread([7.0]).low == 7.0


def test_a_ratio_knows_how_sure_it_is() -> None:
    steady = ratio([2.0] * 9, [1.0] * 9)
    assert (steady.value, steady.low, steady.high) == (2.0, 2.0, 2.0)
    noisy = ratio([1.0, 2.0, 3.0, 2.0, 2.5], [1.0, 1.0, 1.2, 0.8, 1.0])
    assert noisy.low < noisy.value < noisy.high
    assert noisy == ratio([1.0, 2.0, 3.0, 2.0, 2.5], [1.0, 1.0, 1.2, 0.8, 1.0])
    with pytest.raises(ValueError, match="at least one round"):
        ratio([], [1.0])


def test_rounds_are_resampled_in_pairs() -> None:
    # The machine's speed drifts by a factor of 16 and both drift alike: the ratio is sure.
    drift = [2.0**n for n in range(5)]
    paired = ratio([3 * d for d in drift], drift)
    assert (paired.low, paired.high) == (3.0, 3.0)


@pytest.mark.parametrize(
    ("number", "text"),
    [(0.01234, "0.0123"), (1.0, "1.00"), (123.4, "123"), (45678.0, "45 700"), (0.0, "0")],
)
def test_numbers_are_brief(number: float, text: str) -> None:
    assert brief(number) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (2.5, "2.50 s"),
        (0.0025, "2.50 ms"),
        (4.2e-5, "42.0 us"),
        (9.999e-4, "1.00 ms"),
        (3e-9, "3.00 ns"),
    ],
)
def test_durations_have_the_unit_that_suits_them(value: float, text: str) -> None:
    assert seconds(value) == text


# --- reports ---------------------------------------------------------------------------------


def example() -> Report:
    times = {"OpByOp": {"ours": [1e-4, 1.2e-4, 1.1e-4], "theirs": [1e-3, 1.2e-3, 1.1e-3]}}
    measured = Measured(times, {"others": "not installed"}, 0.5)
    return Report("example", "An example", "computation", measured, "ours", notes=["a note"])


def test_a_report_is_a_table_and_two_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    publish(example(), tmp_path)
    said = capsys.readouterr().out
    assert "| OpByOp | theirs | 1.10 ms" in said
    assert "10.0 [10.0, 10.0]" in said
    assert "Without others: not installed." in said
    assert "a note" in said
    kept = json.loads((tmp_path / "example.json").read_text())
    assert kept["times"]["OpByOp"]["ours"] == [1e-4, 1.2e-4, 1.1e-4]
    assert kept["missing"] == {"others": "not installed"}
    assert (tmp_path / "example.svg").read_text().startswith("<svg")


def test_claims_are_judged_and_those_without_samples_left_out() -> None:
    measured = example().measured
    slow, fast = ("OpByOp", "theirs"), ("OpByOp", "ours")
    easy, hard = judged(
        [
            Claim("easy", slow, fast, 5.0),
            Claim("hard", slow, fast, 20.0),
            Claim("unknown", ("OpByOp", "others"), fast, 1.0),
        ],
        measured,
    )
    assert (easy.what, easy.wanted, easy.word) == ("easy", "at least 5.00 x", "yes")
    assert hard.word == "**no**"


def test_verdicts_of_one_benchmark_stand_side_by_side(tmp_path: Path) -> None:
    for hosts, met in ((1, True), (2, None)):
        told = example()
        told.name, told.title = f"example-{hosts}", f"on {hosts}"
        told.verdicts = [Verdict("speed", "at least 2 x", f"{hosts} x", met)]
        told.verdicts += [Verdict("only there", "below 1 s", "2 s", False)] * (hosts - 1)
        publish(told, tmp_path)
    plain = example()
    publish(plain, tmp_path)  # has no verdicts
    (reports,) = targets.read(tmp_path).values()
    rows = [
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in targets.table(reports).splitlines()
    ]
    assert rows[0] == ["target", "wanted", "on 1", "on 2"]
    assert rows[2:] == [
        ["speed", "at least 2 x", "1 x yes", "2 x not decided"],
        ["only there", "below 1 s", "-", "2 s **no**"],
    ]


def test_a_grid_compares_every_system_with_the_reference() -> None:
    measured = Measured({"a": {"x": [1.0], "y": [3.0]}, "b": {"y": [2.0]}})
    rows = [
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in grid(measured, {"a": "A", "b": "B"}, "y").splitlines()
    ]
    assert rows[0] == ["", "y", "x"]
    assert rows[2] == ["A", "3.00 s", "1.00 s, 0.333 [0.333, 0.333]"]
    assert rows[3] == ["B", "2.00 s", "-"]


def test_a_matrix_has_a_dash_where_a_system_has_no_such_case() -> None:
    measured = Measured({"a": {"x": [1.0]}, "b": {"x": [2.0], "y": [3.0]}})
    rows = matrix(measured, {"a": "A", "b": "B"}).splitlines()
    cells = [word.strip() for word in rows[3].split("|")[1:-1]]
    assert cells == ["y", "-", "3.00 s (3.00 s .. 3.00 s)"]


def test_the_machine_is_described_without_its_name() -> None:
    import getpass
    import platform

    said = json.dumps(machine.machine())
    assert platform.node() not in said
    assert str(Path.home()) not in said
    assert "cores" in said
    shown = machine.command(["--peers-python", "/somewhere/bin/python", "--quick"])
    assert shown.endswith("--peers-python PATH --quick")
    assert getpass.getuser() not in shown


def test_figures_hold_every_system_and_survive_having_none() -> None:
    drawn = dots("A title", example().measured.times, "time")
    assert "theirs" in drawn
    assert "110 us" in drawn
    assert "nothing could be measured" in dots("A title", {"a": {}}, "time")
    lines = curves("T", {"1 host": [(0.1, 0.5), (1.0, 0.99)]}, "ms", "share", level=0.97)
    assert "1 host" in lines
    assert "nothing could be measured" in curves("T", {}, "ms", "share")


def test_an_axis_maps_decades_evenly() -> None:
    axis = Axis([1.0, 100.0], 0.0, 210.0)
    assert axis(10.0) == pytest.approx(105.0)
    assert axis.ticks() == [1.0, 10.0, 100.0]


# --- children --------------------------------------------------------------------------------

SERVED = "tests.benchmarks.served"


def test_a_child_is_a_system_in_a_process_of_its_own() -> None:
    child = Child("echo", SERVED, ("a",), factor=2.0)
    child.start()
    assert child.round("a", 3) == Timed(6.0, 3.0)
    with pytest.raises(RuntimeError, match="no case of the name b"):
        child.round("b", 1)
    assert child.round("a", 1) == Timed(2.0, 1.0), "a failed round does not end the child"
    child.rest()
    there = [p for p in psutil.Process().children() if p.status() != psutil.STATUS_ZOMBIE]
    (process,) = [p for p in there if SERVED in p.cmdline()]
    until(lambda: process.status() == psutil.STATUS_STOPPED)
    child.wake()
    assert child.round("a", 1) == Timed(2.0, 1.0)
    child.rest()
    child.stop()
    assert not process.is_running()
    child.stop()


def test_a_child_finds_what_its_parent_finds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a_package_for_children.py").write_text("")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    child = Child("finds", SERVED, ("a",), needs="a_package_for_children")
    child.start()
    child.stop()


def test_a_child_without_its_package_is_missing_and_one_that_dies_says_its_last_words() -> None:
    absent = Child("absent", SERVED, ("a",), needs="a_package_that_nobody_has")
    with pytest.raises(Missing, match="a_package_that_nobody_has"):
        absent.start()
    absent.stop()
    nowhere = Child("nowhere", SERVED, ("a",), python=sys.executable + "-not-there")
    with pytest.raises(Missing, match="No such file"):
        nowhere.start()
    nowhere.stop()
    failing = Child("failing", SERVED, ("a",), fails="it ended early; its last words:\nno room")
    with pytest.raises(RuntimeError, match="its last words:\nno room"):
        failing.start()
    failing.stop()
    dying = Child("dying", SERVED, ("a",), dies="out of luck")
    with pytest.raises(RuntimeError, match="its process ended; it said: out of luck"):
        dying.start()
    dying.stop()
