"""What the tests of children start: a system that costs what it is told, or fails as it is told."""

from __future__ import annotations

import importlib
import os
import sys

from benchmarks.harness.child import serve


class Echo:
    """Takes *factor* seconds per unit, without waiting for them."""

    def __init__(
        self, factor: float = 1.0, needs: str = "", dies: str = "", fails: str = ""
    ) -> None:
        self.factor, self.needs, self.dies, self.fails = factor, needs, dies, fails

    def start(self) -> None:
        print("frameworks print, and nobody may take it for an answer")
        if self.needs:
            importlib.import_module(self.needs)
        if self.fails:
            raise RuntimeError(self.fails)
        if self.dies:
            print(self.dies, file=sys.stderr, flush=True)
            os._exit(1)

    def round(self, case: str, units: int) -> tuple[float, float]:
        if case != "a":
            raise ValueError(f"no case of the name {case}")
        return self.factor * units, units

    def stop(self) -> None:
        return None


if __name__ == "__main__":
    serve(Echo)
