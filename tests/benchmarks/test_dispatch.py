"""Law: the benchmark of dispatch runs, counts what was computed, and says who is missing."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks import dispatch
from benchmarks.gangs.work import ALLREDUCE, CHAIN, MODES, OP, Gang, case, parts
from benchmarks.harness.command import Settings


class Lazy(Gang):
    """Skips one computation in ten."""

    def start(self) -> None: ...

    def reset(self) -> None: ...

    def calls(self, work: str, mode: str, count: int) -> None:
        self.done = float(count * (128 if mode == CHAIN else 1))

    def value(self) -> float:
        return self.done if self.done < 10 else self.done - 1

    def stop(self) -> None: ...


def test_a_case_names_its_work_and_mode() -> None:
    assert [parts(case(ALLREDUCE, mode)) for mode in MODES] == [(ALLREDUCE, m) for m in MODES]


def test_units_become_whole_calls_and_skipped_computations_are_caught() -> None:
    gang = Lazy(1)
    assert gang.round(case(ALLREDUCE, OP), 5)[1] == 5
    with pytest.raises(RuntimeError, match="after 128 computations the value is 127"):
        gang.round(case(ALLREDUCE, CHAIN), 5)


@pytest.mark.cluster
def test_it_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    how = Settings(rounds=1, budget=0.01, seed=0, folder=tmp_path, quick=True)
    names = [dispatch.OURS, dispatch.JAX, dispatch.ACTORS]
    nowhere = sys.executable + "-without-peers"
    dispatch.run(1, [ALLREDUCE], names, nowhere, how)
    said = capsys.readouterr().out
    assert "Without Ray actors" in said
    kept = json.loads((tmp_path / "dispatch-1.json").read_text())
    for mode in MODES:
        assert kept["times"][case(ALLREDUCE, mode)][dispatch.OURS], said
    assert dispatch.JAX not in kept["times"][case(ALLREDUCE, CHAIN)]
    assert kept["times"][case(ALLREDUCE, OP)][dispatch.JAX]
