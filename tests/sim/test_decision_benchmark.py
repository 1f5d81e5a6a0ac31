"""Law: the benchmark of decisions runs, and decisions do not grow with devices but with hosts."""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path

import pytest

from benchmarks import decision


def test_table_figure_and_numbers_are_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(decision, "crowd", lambda: {"turn": [1e-4]})
    monkeypatch.setattr(decision, "elsewhere", lambda questions: {"there and back": [1e-4]})
    monkeypatch.setattr(decision.gc, "freeze", lambda: None)
    monkeypatch.setattr(
        sys, "argv", ["decision", "--quick", "--most", "8", "--folder", str(tmp_path)]
    )
    decision.main()
    assert "8 devices, runs of 32" in capsys.readouterr().out
    times = json.loads((tmp_path / "decision.json").read_text())["times"]
    assert len(times) == 4
    assert "all, per gang, runs of 1" in (tmp_path / "decision.svg").read_text()


def test_a_gang_costs_less_than_a_millisecond_on_many_hosts() -> None:
    bench = decision.Bench(512, 32)
    bench.measure(10)
    assert statistics.median(bench.times["decide"]) / 32 < 1000
