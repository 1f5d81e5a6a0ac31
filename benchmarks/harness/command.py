"""The arguments that all benchmarks take."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

RESULTS = Path(__file__).parents[1] / "results"


@dataclass(frozen=True, slots=True)
class Settings:
    """rounds: samples of each case.  budget: seconds per sample.  quick: only show that it runs."""

    rounds: int
    budget: float
    seed: int
    folder: Path
    quick: bool


def arguments(
    description: str | None, rounds: int = 9, budget: float = 0.4
) -> argparse.ArgumentParser:
    """A parser with the common arguments; a benchmark adds its own."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=rounds, help="samples of each case")
    parser.add_argument("--budget", type=float, default=budget, help="seconds that a sample takes")
    parser.add_argument("--seed", type=int, default=0, help="of the order of rounds")
    parser.add_argument("--folder", type=Path, default=RESULTS, help="for JSON and figure")
    parser.add_argument("--quick", action="store_true", help="a few seconds: does it run?")
    return parser


def settings(chosen: argparse.Namespace) -> Settings:
    """What the common arguments say."""
    rounds, budget = (1, 0.01) if chosen.quick else (chosen.rounds, chosen.budget)
    return Settings(rounds, budget, chosen.seed, chosen.folder, chosen.quick)
