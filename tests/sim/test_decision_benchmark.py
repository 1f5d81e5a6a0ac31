"""Law: the benchmark of decisions runs, and decisions do not grow with devices but with hosts."""

from __future__ import annotations

import importlib.util
import statistics
import sys
from pathlib import Path
from types import ModuleType

import pytest

SOURCE = Path(__file__).parents[2] / "benchmarks" / "decision.py"


@pytest.fixture(scope="module")
def decision() -> ModuleType:
    spec = importlib.util.spec_from_file_location("decision", SOURCE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["decision"] = module
    spec.loader.exec_module(module)
    return module


def test_the_table_is_printed(decision: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    decision.growth(8)
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith("devices")
    assert [line.split()[:2] for line in said[1:]] == [["8", "1"], ["8", "32"]]


def test_a_gang_costs_less_than_a_millisecond_on_many_hosts(decision: ModuleType) -> None:
    bench = decision.Bench(512, 32)
    bench.measure(10)
    assert statistics.median(bench.times["decide"]) / 32 < 1000
