"""A door opens in a process that has used JAX before, and closes again."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import pathways_lab as pw
from pathways_lab.client.session import in_jax
from pathways_lab.door import in_process, plugin

pytestmark = pytest.mark.cluster
HERE = Path(__file__).parent


def printed(script: str, folder: Path) -> list[str]:
    """The lines that a script prints, which joins a lab of two devices."""
    with pw.start(1, 1, 2, progress=False) as lab:
        lab.invite(folder / "lab")
        done = subprocess.run(
            [sys.executable, str(HERE / script), str(folder / "lab")],
            env=os.environ | {"JAX_PLATFORMS": "cpu"},
            capture_output=True,
            text=True,
            timeout=180,
            check=False,
        )
    assert done.returncode == 0, done.stderr
    assert "rpc_helper" not in done.stderr
    return done.stdout.splitlines()


def test_jax_s_devices_are_the_lab_s_between_the_opening_and_the_closing_of_a_door(tmp_path):
    *refused, clients, again, gone, closed, left, end = printed("after_jax.py", tmp_path)
    assert refused == ["refused: True 0", "refused: True 1", "refused: True 1"]
    assert closed == "closed: True"
    assert "kernel" in clients
    assert again == "twice: True"
    assert gone == "gone: True"
    assert left == "left: None"
    assert end == "end"


def test_jax_computes_with_handles_and_on_slices_of_which_nobody_told_it(tmp_path):
    names = ("inside", "another", "later", "fork", "closed", "mesh", "array")
    assert printed("at_first_need.py", tmp_path) == [f"{name}: True" for name in names]


def test_a_door_that_does_not_open_says_so_once_and_opens_later(monkeypatch):
    with pw.start(1, 1, 1, progress=False) as lab:
        handle = pw.device_put(np.ones(3, np.float32), lab.slice(1))
        with monkeypatch.context() as patched:
            patched.setitem(sys.modules, "pathways_lab.door.protocol.server", None)
            with pytest.raises(pw.PathwaysError, match=r"no door opens: .* one more package"):
                jnp.sum(handle)
        assert in_jax.door is None
        assert jnp.sum(handle) == 3
        slack = Path(f"/proc/self/task/{threading.get_native_id()}/timerslack_ns")
        used = time.process_time()
        time.sleep(2)
        used = time.process_time() - used
        assert used < 0.1, "JAX's client takes a tenth of a core when it may wake when it wants"
        assert not slack.exists() or int(slack.read_text()) < plugin._SLACK
        door: Any = in_jax.door
    assert in_jax.door is None
    assert not door._connected.process.alive


def test_a_door_that_dies_takes_jax_s_arrays_with_it_and_nothing_else():
    with pw.start(1, 1, 1, progress=False) as lab:
        handle = pw.device_put(np.ones(3, np.float32), lab.slice(1))
        total = jnp.sum(handle)
        door: Any = in_jax.door
        os.kill(door._connected.process.pid, signal.SIGKILL)
        with pytest.raises(RuntimeError, match="UNAVAILABLE"):
            np.asarray(total + jnp.sum(handle))
        assert pw.jit(jnp.sum)(handle).result() == 3
        lab.open_door().close()
        assert jnp.sum(handle) == 3


def test_a_door_that_cannot_become_a_backend_is_closed_again(monkeypatch):
    closed = []
    connected = SimpleNamespace(client=None, close=lambda: closed.append(True))

    def enter(*_):
        raise RuntimeError("JAX has a backend of this name already")

    monkeypatch.setattr(in_process.plugin, "connect", lambda *_: connected)
    monkeypatch.setattr(in_process.jax_backends, "enter", enter)
    check = SimpleNamespace(connection=SimpleNamespace(check=lambda: None))
    door = nullcontext({in_process.LAB_FILE: "file"})
    lab = SimpleNamespace(name="lab", session=check, door=lambda: door)
    with pytest.raises(pw.PathwaysError, match="no door opens: JAX has a backend"):
        in_process.open_door(lab)
    assert closed == [True]
    assert in_jax.door is None
