"""What is wanted, and what was measured: the verdicts of all benchmarks that have run.

    python -m benchmarks.targets

Reads the files that benchmarks leave (``--folder``) and measures nothing.  What one
benchmark says of several machines, hosts 1, 2 and 4 for instance, stands side by side.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness.command import RESULTS
from benchmarks.harness.report import Verdict, conditions, markdown


def table(reports: Sequence[dict[str, Any]]) -> str:
    """Targets down, reports of one benchmark across; each as its file has it."""
    found = {
        report["title"]: {each["what"]: Verdict(**each) for each in report["verdicts"]}
        for report in reports
    }
    wanted = {each.what: each.wanted for verdicts in found.values() for each in verdicts.values()}
    rows = [("target", "wanted", *found)]
    for what, least in wanted.items():
        cells = (verdicts.get(what) for verdicts in found.values())
        rows.append((what, least, *(f"{c.measured} {c.word}" if c else "-" for c in cells)))
    return markdown(rows)


def read(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Benchmark -> its reports that have verdicts; ``name-2`` is one of ``name``."""
    found: dict[str, list[dict[str, Any]]] = {}
    for file in sorted(folder.glob("*.json")):
        report = json.loads(file.read_text())
        if report.get("verdicts"):
            found.setdefault(file.stem.partition("-")[0], []).append(report)
    return found


def main() -> int:
    """Print them; 1 when there are none."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, default=RESULTS, help="of JSON files")
    folder = parser.parse_args().folder
    found = read(folder)
    for reports in found.values():
        print(f"{table(reports)}\n")
        print("\n\n".join(dict.fromkeys(map(conditions, reports))), end="\n\n")
    if not found:
        print(f"no verdicts in {folder.name}/: run a benchmark first, or `make bench`")
    return 0 if found else 1


if __name__ == "__main__":
    sys.exit(main())
