"""Many client processes on one lab, each with the quickstart's program.

``python -m tests.acceptance.many --clients 32`` starts a lab and so many processes
that were invited; when all are there they begin at the same moment.  All must
finish, and every loss must be that of a client that was alone.  It prints
latencies, and the memory of the lab and of the clients.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

import pathways_lab as pw
from tests.acceptance.digits_client import train

ROOT = Path(__file__).parents[2]
MIB = 1 << 20


def held(pids: Sequence[int]) -> int:
    """Bytes of memory that these processes have to themselves."""
    total = 0
    for pid in pids:
        try:
            total += psutil.Process(pid).memory_full_info().uss
        except psutil.Error:
            continue
    return total


def processes(lab: pw.Lab) -> dict[str, list[int]]:
    """The lab's processes by what they do."""
    assert lab.embedded is not None
    return lab.embedded.pids


def memory_of(lab: pw.Lab) -> str:
    """Of each kind of process."""
    kinds = processes(lab).items()
    return ", ".join(f"{kind} {held(pids) / MIB:.0f} MiB" for kind, pids in kinds)


def run(lab: pw.Lab, clients: int, epochs: int, patience: float) -> list[dict[str, Any]]:
    """Start them, let them begin together; what each says."""
    found: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "lab.json"
        lab.invite(file)
        command = [sys.executable, "-m", "tests.acceptance.digits_client", str(file)]
        children = [
            subprocess.Popen(
                [*command, f"student-{n}", str(epochs)], cwd=ROOT, text=True,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            )
            for n in range(clients)
        ]  # fmt: skip
        timer = threading.Timer(patience, lambda: [child.kill() for child in children])
        timer.start()
        try:
            for child in children:
                assert child.stdout is not None
                assert child.stdout.readline() == "there\n", "a client could not connect"
            print(f"{clients} clients are there; the lab: {memory_of(lab)}", flush=True)
            for child in children:
                assert child.stdin is not None
                child.stdin.write("go\n")
                child.stdin.flush()
            for child in children:
                assert child.stdout is not None
                line = child.stdout.readline()
                assert line, f"a client ended without a result within {patience:g} s"
                found.append(json.loads(line))
        finally:
            timer.cancel()
            for child in children:
                child.kill()
                child.wait()
    return found


def spread(name: str, values: Sequence[float], unit: str, factor: float = 1.0) -> str:
    """Smallest, median, largest."""
    scaled = sorted(value * factor for value in values)
    return f"{name:22} {scaled[0]:9.1f} {statistics.median(scaled):9.1f} {scaled[-1]:9.1f} {unit}"


def main() -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--patience", type=float, default=1800.0, help="seconds for all")
    options = parser.parse_args()
    with pw.start(islands=2, hosts_per_island=1, devices_per_host=4) as lab:
        alone = train(lab, options.epochs)
        print(f"alone: {statistics.median(alone['steps']) * 1e3:.1f} ms a step", flush=True)
        print(f"the lab: {memory_of(lab)}", flush=True)
        begun = time.monotonic()
        found = run(lab, options.clients, options.epochs, options.patience)
        took = time.monotonic() - begun
        wrong = [n for n, one in enumerate(found) if one["losses"] != alone["losses"]]
        gone = time.monotonic() + 30
        while len(lab.clients) > 1 and time.monotonic() < gone:
            time.sleep(0.1)
        print(f"all gone: {lab.clients}; the lab: {memory_of(lab)}")
        print(f"{'':22} {'least':>9} {'median':>9} {'most':>9}")
        print(spread("connecting", [one["connected"] for one in found], "s"))
        print(spread("first step", [one["first"] for one in found], "s"))
        print(spread("a step, median", [one["steps"][0] for one in found], "ms", 1e3))
        print(spread("a step, worst", [one["steps"][1] for one in found], "ms", 1e3))
        print(spread("memory of a client", [one["uss"] for one in found], "MiB", 1 / MIB))
        accounts = lab.accounts()
        steps = sum(len(one["losses"]) for one in found)
        print(
            f"{len(found)} of {options.clients} finished in {took:.0f} s, {steps} steps,"
            f" {accounts.total.gangs:,} gangs; {len(wrong)} with other losses than alone"
        )
        sys.exit(bool(wrong) or len(found) != options.clients)


if __name__ == "__main__":
    main()
