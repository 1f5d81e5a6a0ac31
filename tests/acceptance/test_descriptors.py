"""Descriptors of all processes stay few, however many arrays a model has."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from pathways_lab.transport import shared_memory

ROOT = Path(__file__).parents[2]

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(not shared_memory.SUPPORTED, reason="no sealed shared memory here"),
]


def test_a_model_of_many_arrays_takes_few_descriptors() -> None:
    """In a process of its own, whose limit cannot be raised again."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.acceptance.descriptors", "--arrays", "200", "--steps", "2"],
        cwd=ROOT, text=True, capture_output=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "200 arrays, 2 steps: at most" in done.stdout
