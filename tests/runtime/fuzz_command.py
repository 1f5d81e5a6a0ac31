"""The command line of the fuzzers, and the lines that it prints while they work."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Protocol

TOLD = 100_000
"""Inputs between two lines that say how far it is."""


class Counts(Protocol):
    """A fuzzer.  inputs: how many it has tried."""

    inputs: int


def parser(description: str | None) -> argparse.ArgumentParser:
    """The options that all fuzzers have."""
    made = argparse.ArgumentParser(description=description)
    made.add_argument("--inputs", type=int, default=1_000_000)
    made.add_argument("--seed", type=int, default=0)
    return made


def drive(fuzz: Counts, inputs: int, once: Callable[[], object], name: str = "") -> str:
    """Call once() until so many inputs were tried.  How many, in which time, for people."""
    begun = time.monotonic()

    def so_far() -> str:
        return f"{name}{fuzz.inputs:,} inputs in {time.monotonic() - begun:.0f} s"

    while fuzz.inputs < inputs:
        once()
        if fuzz.inputs % TOLD == 0:
            print(so_far(), flush=True)
    return so_far()
