"""A door opens in a process that has used JAX before, and closes again."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest

import pathways_lab as pw
from pathways_lab.door import in_process

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
    *refused, clients, again, closed, gone, left, end = done.stdout.splitlines()
    assert refused == ["refused: True 0", "refused: True 1", "refused: True 1"]
    assert closed == "closed: True"
    assert "kernel" in clients
    assert again == "twice: True"
    assert gone == "gone: UNAVAILABLE"
    assert left == "left: None"
    assert end == "end"


def test_a_door_that_cannot_become_a_backend_is_closed_again(monkeypatch):
    closed = []
    connected = SimpleNamespace(client=None, close=lambda: closed.append(True))

    def enter(*_):
        raise RuntimeError("JAX has a backend of this name already")

    monkeypatch.setattr(in_process.plugin, "connect", lambda *_: connected)
    monkeypatch.setattr(in_process.jax_backends, "enter", enter)
    lab = SimpleNamespace(name="lab", door=lambda: nullcontext({in_process.LAB_FILE: "file"}))
    with pytest.raises(pw.PathwaysError, match="no door opens: JAX has a backend"):
        in_process.open_door(lab, "", slice_index=False)
    assert closed == [True]
    assert in_process._open is None
