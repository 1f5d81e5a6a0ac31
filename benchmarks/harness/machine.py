"""What a number was measured on, without saying whose machine it is."""

from __future__ import annotations

import contextlib
import os
import platform
import subprocess
import sys
from collections.abc import Iterable
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

PACKAGES = ("jax", "jaxlib", "distributed", "numpy")


def machine() -> dict[str, Any]:
    """Processor, memory, system and versions; no name, no address, no path."""
    import psutil

    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        **{name: _version(name) for name in PACKAGES},
        "commit": _commit(),
    }


def load() -> list[float]:
    """The load averages over 1, 5 and 15 minutes; empty where there are none."""
    try:
        return [round(value, 2) for value in os.getloadavg()]
    except OSError:
        return []


def now() -> str:
    """The time in UTC, to the minute."""
    return datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")


def processor_seconds(processes: Iterable[int]) -> float:
    """The processor time that these processes, by their ids, have used so far.

    Where the system tells it only in hundredths of a second, measure over many of them.
    """
    import psutil

    total = 0.0
    for pid in processes:
        try:
            tasks = list(Path(f"/proc/{pid}/task").iterdir())
            total += sum(int((t / "schedstat").read_text().split()[0]) for t in tasks) / 1e9
        except (OSError, IndexError):
            with contextlib.suppress(psutil.Error):
                times = psutil.Process(pid).cpu_times()
                total += times.user + times.system
    return total


def command(arguments: list[str] | None = None) -> str:
    """The command as somebody else would type it: paths are left out."""
    given = sys.argv[1:] if arguments is None else arguments
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    name = f"-m {spec.name}" if spec is not None else Path(sys.argv[0]).name
    shown = ["PATH" if os.sep in word else word for word in given]
    return " ".join(["python", name, *shown])


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"


def _commit() -> str:
    """The commit that is checked out, with a + when files were changed."""
    try:
        said = subprocess.run(
            ["git", "describe", "--always", "--dirty=+"],
            cwd=Path(__file__).parent, capture_output=True, text=True, check=True,
        )  # fmt: skip
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return said.stdout.strip()
