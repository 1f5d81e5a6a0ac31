"""The doctor: one finding per line, its remedy below, and an exit status to rely on."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pathways_lab.cli import checks_machine, checks_packages, doctor
from pathways_lab.cli.finding import Finding
from pathways_lab.runtime.cluster import attach
from pathways_lab.runtime.control_plane import observer
from pathways_lab.runtime.processes import kept_labs
from pathways_lab.transport import machine_share


def said(*findings: Finding) -> tuple[int, str]:
    out = io.StringIO()
    status = doctor.run(out, [lambda: findings])
    return status, out.getvalue()


def test_everything_good():
    status, text = said(Finding("ok", "Python 3.12"))
    assert status == 0
    assert text.startswith("ok    Python 3.12\n")


def test_optional_and_doubtful_things_do_not_fail():
    status, text = said(Finding("note", "a"), Finding("warn", "b", "do this"))
    assert status == 0
    assert "warn  b\n      -> do this\n" in text
    assert "1 to look at" in text


def test_what_is_indispensable_fails():
    status, text = said(Finding("ok", "a"), Finding("FAIL", "b"), Finding("FAIL", "c"))
    assert status == 1
    assert "2 to mend" in text


def test_a_check_that_raises_is_a_finding_and_the_others_go_on():
    def broken():
        yield Finding("ok", "first")
        raise RuntimeError("no such thing")

    found = list(doctor.findings([broken, lambda: [Finding("ok", "last")]]))
    assert [f.state for f in found] == ["ok", "warn", "ok"]
    assert "no such thing" in found[1].what


def test_colours_only_on_a_terminal(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.delenv("NO_COLOR", raising=False)
    terminal, pipe = Terminal(), io.StringIO()
    for out in (terminal, pipe):
        doctor.run(out, [lambda: [Finding("ok", "a")]])
    assert "\x1b[" in terminal.getvalue()
    assert "\x1b[" not in pipe.getvalue()
    monkeypatch.setenv("NO_COLOR", "1")
    doctor.run(plain := Terminal(), [lambda: [Finding("ok", "a")]])
    assert "\x1b[" not in plain.getvalue()


def test_a_wheel_that_kills_the_process_is_named():
    found = checks_packages.killed("jax", -4)
    assert found.state == "FAIL"
    assert "illegal instruction" in found.what
    assert "status -11" in checks_packages.killed("jax", -11).what


def test_requirement_names():
    names = map(checks_packages.distribution_name, ["jax>=0.10", "ipython", "a-b.c[x]<2"])
    assert list(names) == ["jax", "ipython", "a-b.c"]


def test_versions_are_judged():
    assert checks_packages.allowed("jax>=0.10", "0.10.2")
    assert not checks_packages.allowed("jax>=0.10", "0.9.1")


def test_small_shared_memory_is_a_warning(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "platform", "linux")
    usage = type("Usage", (), {"free": 10e6})
    monkeypatch.setattr(checks_machine.shutil, "disk_usage", lambda _: usage)
    (found,) = checks_machine.shared_memory(tmp_path)
    assert found.state == "warn"
    assert "shm-size" in found.remedy
    (found,) = checks_machine.shared_memory(Path("/nonexistent"))
    assert found.state == "warn"


def test_little_memory_is_a_warning(monkeypatch):
    monkeypatch.setattr(machine_share, "available_memory", lambda: 1_000_000_000)
    (found,) = checks_machine.memory()
    assert found.state == "warn"
    assert "devices" in found.remedy
    monkeypatch.setattr(machine_share, "available_memory", lambda: 8_000_000_000)
    (found,) = checks_machine.memory()
    assert found.state == "ok"
    assert "8.0 GB free" in found.what


def test_kept_labs_are_listed_with_what_they_keep_and_what_goes_on(monkeypatch, tmp_path):
    record = tmp_path / "mine.json"
    attach.write_lab_file(record, attach.ControlAddress("unix:/nowhere", b"k" * 32))
    monkeypatch.setattr(kept_labs, "names", lambda: ["mine"])
    monkeypatch.setattr(kept_labs, "record", lambda _: record)
    monkeypatch.setattr(kept_labs, "is_there", lambda _: True)
    (found,) = checks_machine.kept_labs()
    assert found.what == "kept lab: mine, for 0 min", "it does not answer"
    there = {"kept": ["state", "train"], "going": {"ann": 2}}
    monkeypatch.setattr(observer, "look", lambda _: there)
    (found,) = checks_machine.kept_labs()
    assert found.what.endswith(
        "; it keeps state, train; runs that go on without a kernel: 2 of ann"
    )


def test_no_loopback_fails(monkeypatch):
    def refuse(*_, **__):
        raise OSError("not permitted")

    monkeypatch.setattr(checks_machine.socket, "create_server", refuse)
    (found,) = checks_machine.loopback()
    assert found.state == "FAIL"


def test_a_folder_too_long_for_sockets_fails(monkeypatch, tmp_path):
    deep = tmp_path / ("x" * 120)
    deep.mkdir()
    monkeypatch.setattr(checks_machine.addresses, "private_folder", lambda: deep)
    (found,) = checks_machine.unix_sockets()
    assert found.state == "FAIL"
    assert "TMPDIR" in found.remedy
    assert not deep.exists()


@pytest.mark.parametrize("check", [c for c in doctor.CHECKS if "machine" in c.__module__])
def test_checks_of_the_machine_work_here(check):
    """None of them fails on a machine that runs these tests."""
    assert all(found.state != "FAIL" for found in check())


@pytest.mark.cluster
def test_the_whole_doctor_in_a_process_of_its_own():
    done = subprocess.run(
        [sys.executable, "-m", "pathways_lab", "doctor"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "server extension: enabled" in done.stdout
    assert "\x1b[" not in done.stdout


@pytest.mark.cluster
def test_the_doctor_runs_where_everything_else_is_missing():
    """Without JAX, Bokeh and Jupyter it still speaks, and fails."""
    code = (
        "import sys\n"
        "class Gone:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.split('.')[0] in {'jax', 'bokeh', 'jupyter_server', 'numpy'}:\n"
        "            raise ModuleNotFoundError(name)\n"
        "sys.meta_path.insert(0, Gone())\n"
        "from pathways_lab.cli import main\n"
        "sys.exit(main(['doctor']))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "Python 3" in done.stdout
    assert "Traceback" not in done.stderr


def test_a_configuration_of_dask_outlives_a_look_at_a_cluster(tmp_path):
    """Also where Dask's own defaults come only with that look."""
    (tmp_path / "own.yaml").write_text("distributed: {comm: {tls: {}}}\n")
    script = """
import dask
from pathways_lab.cli import machines
from pathways_lab.core.errors import PathwaysError
try:
    machines._client("tcp://127.0.0.1:1")
except PathwaysError:
    print(dask.config.get("distributed.comm.timeouts.connect"))
"""
    environment = {**os.environ, "DASK_CONFIG": str(tmp_path)}
    command = [sys.executable, "-c", script]
    said = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert said.stdout == "30s\n", said.stderr
