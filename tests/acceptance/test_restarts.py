"""A killed kernel leaves its lab and its values; a lab that is stopped leaves nothing.

``python -m tests.acceptance.restarts --kills 500`` is the long form.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.cluster

ROOT = Path(__file__).parents[2]


def test_a_kept_training_survives_its_kernels_to_the_bit() -> None:
    """In a process of its own, which forks kernels: here, threads of other tests run."""
    command = [sys.executable, "-m", "tests.acceptance.restarts", "--kills", "3", "--seed", "3"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "'kills': 3" in done.stdout
