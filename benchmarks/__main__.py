"""All benchmarks in their short form: ``make bench``, some minutes.

Short samples and few of them: good enough to see that everything runs and where
things stand, not to be recorded.  The last tables have what was wanted and what was
found.  ``--peers-python PATH`` names an environment that has the peers.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time

from benchmarks.harness.child import ROOT

SHORT = {
    "arrays": ["--arrays", "1", "64", "--devices", "1", "--rounds", "3", "--budget", "0.1"],
    "step": ["--models", "GPT, 2 layers", "--devices", "1", "--rounds", "3", "--budget", "0.1"],
    "dispatch": ["--hosts", "2", "--rounds", "3", "--budget", "0.1"],
    "pipeline": ["--rounds", "3", "--budget", "0.05"],
    "loops": ["--quick"],
    "crossover": ["--hosts", "2", "--rounds", "3", "--budget", "0.1", "--most", "16"],
    "clients": ["--clients", "1", "4", "--rounds", "3", "--budget", "0.3"],
    "fanout": ["--hosts", "1", "4", "16", "--rounds", "3", "--budget", "0.2"],
    "latency": ["--rounds", "3", "--budget", "0.05"],
    "starts": ["--rounds", "2", "--budget", "0.1"],
    "drawing": ["--seconds", "20", "--every", "10"],
    "gaps": ["--seconds", "10", "--pairs", "1"],
    "looking": ["--rounds", "1", "--pairs", "2", "--budget", "0.3"],
    "serving": ["--rounds", "1", "--budget", "0.5", "--gangs", "30", "--windows", "0.1", "0"],
    "following": ["--rounds", "1", "--budget", "3"],
    "training": ["--rounds", "1", "--milliseconds", "1"],
    "stamps": ["--gangs", "30"],
    "collectives": ["--rounds", "2", "--budget", "0.05", "--largest", "64 KiB"],
    "uploads": ["--quick"],
    "transfer": ["--rounds", "3", "--budget", "0.02", "--largest", "4 MiB"],
}
"""Benchmark -> its arguments; each also has a command of its own."""

PEERS = ("dispatch", "pipeline")
"""Those that know peers."""


def main() -> int:
    """Run one after the other; how many failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--peers-python", default=sys.executable)
    parser.add_argument("names", nargs="*", help=f"of {', '.join(SHORT)}; default: all")
    chosen = parser.parse_args()
    failed = 0
    for name in chosen.names or SHORT:
        command = [sys.executable, "-m", f"benchmarks.{name}", *SHORT[name]]
        if name in PEERS:
            command += ["--peers-python", chosen.peers_python]
        begun = time.monotonic()
        ended = subprocess.run(command, cwd=ROOT, check=False).returncode
        failed += ended != 0
        print(f"{name}: {'failed' if ended else 'done'} in {time.monotonic() - begun:.0f} s\n")
    subprocess.run([sys.executable, "-m", "benchmarks.targets"], cwd=ROOT, check=False)
    return failed


if __name__ == "__main__":
    sys.exit(main())
