"""A door opens in a process that has used JAX before, and closes again."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import pathways_lab as pw

pytestmark = pytest.mark.cluster
SCRIPT = Path(__file__).parent / "after_jax.py"


def test_jax_computes_on_the_lab_between_the_opening_and_the_closing_of_a_door(tmp_path):
    with pw.start(1, 1, 2, progress=False) as lab:
        lab.invite(tmp_path / "lab")
        done = subprocess.run(
            [sys.executable, str(SCRIPT), str(tmp_path / "lab")],
            env=os.environ | {"JAX_PLATFORMS": "cpu"},
            capture_output=True,
            text=True,
            timeout=180,
            check=False,
        )
    assert done.returncode == 0, done.stderr
    clients, again, gone, end = done.stdout.splitlines()
    assert "kernel" in clients
    assert again == "twice: True"
    assert gone == "gone: UNAVAILABLE"
    assert end == "end"
