"""JAX's own tests, unchanged, with a lab as JAX's devices.

``python -m tests.acceptance.jax_tests FOLDER [FILES]`` takes JAX's folder ``tests`` of the
installed version (FILES: names such as ``array_test``; without any, those of :data:`FILES`),
starts a lab of one island with eight devices, and runs each file in a process of its own, whose
only difference is its environment (:meth:`pathways_lab.client.lab.lab.Lab.door`).  It prints a line
for each file, and below it each test that failed.  It ends with 0 when none did.

``--plain`` runs them on eight CPU devices of JAX's own, to compare with.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as xml
from collections.abc import Iterator, Sequence
from pathlib import Path

import pathways_lab as pw

FILES = (
    "array_test", "pmap_test", "pjit_test", "lax_control_flow_test", "api_test",
    "colocated_python_test",
)  # fmt: skip
SECONDS = 120
"""For one test."""


@contextlib.contextmanager
def devices(plain: bool, islands: int) -> Iterator[dict[str, str]]:
    """The environment of the tests."""
    if plain:
        yield {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
        return
    with (
        pw.start(
            islands=islands, hosts_per_island=1, devices_per_host=8 // islands, progress=False
        ) as lab,
        lab.door() as variables,
    ):
        yield variables


def run(file: Path, variables: dict[str, str], extra: Sequence[str]) -> tuple[int, list[str]]:
    """How many passed, and what failed."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        subprocess.run(
            [
                sys.executable, "-m", "pytest", str(file), "-q", "-n", "1",
                "--timeout", str(SECONDS),
                "--max-worker-restart", "50", f"--junitxml={report}", "-p", "no:cacheprovider",
                *extra,
            ],
            cwd=file.parent.parent,
            env={**os.environ, **variables},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            check=False,
        )  # fmt: skip
        if not report.exists():
            return 0, ["no report: the run itself ended"]
        passed, failed = 0, []
        for case in xml.parse(report).getroot().iter("testcase"):
            wrong = case.find("failure")
            wrong = case.find("error") if wrong is None else wrong
            if wrong is not None:
                why = (wrong.get("message") or "").strip().splitlines() or [""]
                failed.append(f"{case.get('name')}: {why[0][:160]}")
            elif case.find("skipped") is None:
                passed += 1
        return passed, failed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("files", nargs="*", default=list(FILES))
    parser.add_argument("--plain", action="store_true")
    parser.add_argument("--islands", type=int, default=1)
    parser.add_argument("--only", default="", help="as pytest's -k")
    options = parser.parse_args()
    wrong = 0
    with devices(options.plain, options.islands) as variables:
        for name in options.files:
            begun = time.monotonic()
            extra = ["-k", options.only] if options.only else []
            passed, failed = run(options.folder.resolve() / f"{name}.py", variables, extra)
            wrong += len(failed)
            print(
                f"{name}: {passed} of {passed + len(failed)} passed"
                f" in {time.monotonic() - begun:.0f} s",
                flush=True,
            )
            for text in failed:
                print(f"    {text}", flush=True)
    return min(wrong, 1)


if __name__ == "__main__":
    sys.exit(main())
