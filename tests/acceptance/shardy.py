"""Every program that upstream's tests of Shardy's MPMD partitioner lower, run on a lab.

``python -m tests.acceptance.shardy FOLDER`` takes a checkout of Shardy's Python front (the folder
that has ``shardy/integrations``), of a version for the installed JAX, and its own tests of
``mpmd.jit``, unchanged.  Each program that they lower is loaded with ``pw.mpmd.load`` on slices as
its topology says, and called with random arguments; the results are compared with those of the
same function in plain JAX, on one device.  It prints a line for each program, and ends with 0 when
all were right.

Upstream's tests ask for packages that are not this project's: absl, chex, immutabledict, jaxtyping.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import unittest
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

import jax
import jaxlib
import jaxlib.mlir.ir
import jaxlib.mlir.passmanager
import numpy as np

import pathways_lab as pw

FRONT = "shardy.integrations.python.jax.mpmd"
RIGHT, UNKNOWN = "right", "no function to compare with"


@dataclass(frozen=True)
class Lowered:
    """A program that a test has lowered."""

    test: str
    program: Any
    function: Callable[..., Any]
    args: tuple[Any, ...]


def front(folder: Path, name: str) -> Any:
    """A module of upstream's front, which asks for parts of jaxlib by other names."""
    sys.path.insert(0, str(folder))
    for known in [name for name in sys.modules if name.startswith("jaxlib")]:
        sys.modules[f"jax.{known}"] = sys.modules[known]
        if known.startswith("jaxlib.mlir"):
            sys.modules[known.removeprefix("jaxlib.")] = sys.modules[known]
    vars(jax)["jaxlib"] = jaxlib
    return importlib.import_module(f"{FRONT}.{name}")


def lowered_by_tests(folder: Path, file: str) -> list[Lowered]:
    """All that the tests of a file lower.  They have to pass."""
    tests = front(folder, file)
    wrapped = front(folder, "jit").MpmdWrapped
    found: list[Lowered] = []
    now = [""]
    lower = wrapped.lower

    def watched(self: Any, *args: Any) -> Any:
        found.append(Lowered(now[0], lower(self, *args), self.func, args))
        return found[-1].program

    class Watch(unittest.TextTestResult):
        def startTest(self, test: unittest.TestCase) -> None:
            now[0] = test._testMethodName
            super().startTest(test)

    wrapped.lower = watched
    suite = unittest.TestLoader().loadTestsFromModule(tests)
    if hasattr(tests, "setUpModule"):
        tests.setUpModule()
        del tests.setUpModule
    outcome = unittest.TextTestRunner(verbosity=0, resultclass=Watch).run(suite)
    wrapped.lower = lower
    print(f"{file}: {outcome.testsRun} tests, {len(outcome.failures) + len(outcome.errors)} failed")
    return found


def argument(rng: np.random.Generator, leaf: Any) -> Any:
    """An array of the type of an argument."""
    shape, dtype = np.shape(leaf), np.dtype(getattr(leaf, "dtype", np.int32))
    if dtype.kind in "iu":
        return rng.integers(0, 7, shape).astype(dtype)
    return rng.normal(size=shape).astype(dtype)


def outcome(lab: pw.Lab, each: Lowered, rng: np.random.Generator) -> str:
    """Whether the lab computes what plain JAX does."""
    args = jax.tree.map(lambda leaf: argument(rng, leaf), each.args)
    mesh = next(iter(each.program.topology.values()))
    try:
        with mesh:  # some functions name its axes
            wanted = each.function(*args)
    except Exception as error:
        return f"{UNKNOWN}: {type(error).__name__}: {error!s:.80}"
    slices = {name: lab.slice(mesh.size) for name, mesh in each.program.topology.items()}
    try:
        made = pw.mpmd.load(each.program, on=slices)(*args)
        for one, other in zip(jax.tree.leaves(made), jax.tree.leaves(wanted), strict=True):
            np.testing.assert_allclose(one, other, rtol=2e-4, atol=2e-4)
    except Exception as error:
        return f"{type(error).__name__}: {str(error).strip()[:300]}"
    finally:
        for on in slices.values():
            on.release()
    return RIGHT


def main() -> int:
    """Run the tests, then the programs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--files", nargs="+", default=["jit_test"])
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    found = [each for file in chosen.files for each in lowered_by_tests(chosen.folder, file)]
    told: Counter[str] = Counter()
    rng = np.random.default_rng(chosen.seed)
    with pw.start(islands=2, hosts_per_island=1, devices_per_host=8, progress=False) as lab:
        for each in found:
            said = outcome(lab, each, rng)
            told[said.partition(":")[0]] += 1
            print(f"{each.test}: {said}", flush=True)
    print(f"{len(found)} programs: " + ", ".join(f"{n} {word}" for word, n in told.most_common()))
    return 0 if set(told) == {RIGHT} else 1


if __name__ == "__main__":
    sys.exit(main())
