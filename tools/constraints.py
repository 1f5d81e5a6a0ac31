"""Write constraints.txt from real installs of both ends of the supported Python range.

Problem: an environment made today and one made next year must be the same, on
every Python that we support, and newer packages drop older Pythons.  So the
file is not solved by hand: each interpreter installs the development extra
without constraints, and what it got is merged, with a marker where the ends
differ.

Usage: ``python tools/constraints.py PYTHON311 PYTHON313 > constraints.txt``
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
HEADER = """\
# Names and versions that were installed and tested together, for `pip install -c`.
# Written by tools/constraints.py from real installs on Python 3.11 and 3.13; do not edit.
"""
OLD, NEW = 'python_version < "3.12"', 'python_version >= "3.12"'


def canonical(name: str) -> str:
    """A distribution's name as package indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def merge(old: dict[str, str], new: dict[str, str]) -> list[str]:
    """Constraint lines for two sets of ``{name: version}``, sorted by name."""
    lines = []
    for name in sorted(old.keys() | new.keys()):
        if old.get(name) == new.get(name):
            lines.append(f"{name}=={old[name]}")
            continue
        if name in old:
            lines.append(f"{name}=={old[name]} ; {OLD}")
        if name in new:
            lines.append(f"{name}=={new[name]} ; {NEW}")
    return lines


def installed(python: str) -> dict[str, str]:
    """What a fresh environment of *python* holds after installing the development extra."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([python, "-m", "venv", folder], check=True)
        pip = [str(Path(folder) / "bin" / "python"), "-m", "pip", "--disable-pip-version-check"]
        subprocess.run(
            [*pip, "install", "--quiet", "--no-compile", "--editable", f"{ROOT}[dev]"],
            check=True,
            stdout=sys.stderr,
        )
        frozen = subprocess.run(
            [*pip, "list", "--format=freeze", "--exclude-editable"],
            check=True,
            capture_output=True,
            text=True,
        ).stdout
    pairs = (line.split("==") for line in frozen.splitlines() if "==" in line)
    found = {canonical(name): version for name, version in pairs}
    return {n: v for n, v in found.items() if n not in ("pip", "setuptools", "wheel")}


def main() -> None:
    old, new = sys.argv[1:]
    print(HEADER + "\n".join(merge(installed(old), installed(new))))


if __name__ == "__main__":
    main()
