"""The commands for a group's machines, as far as one process shows them."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import ssl
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pathways_lab import cli
from pathways_lab.cli import certificates, cluster, worker
from pathways_lab.runtime.cluster import scheduler_probe


def test_certificates_are_of_one_authority_and_keys_are_their_owners(tmp_path: Path) -> None:
    folder = tmp_path / "certs"
    assert len(certificates.make(folder, add="bob")) == 5
    for key in [*folder.glob("*-key.pem"), folder / "bob" / "client-key.pem"]:
        assert stat.S_IMODE(key.stat().st_mode) == 0o600
    assert not (folder / "bob" / "ca-key.pem").exists()
    before = (folder / "worker.pem").read_bytes()
    assert "everything is there" in certificates.make(folder)[0]
    assert (folder / "worker.pem").read_bytes() == before
    certificates.make(folder, renew=True)
    assert (folder / "worker.pem").read_bytes() != before
    assert shake_hands(folder, folder / "bob") == "TLSv1.3"
    certificates.make(tmp_path / "others")
    with pytest.raises(ssl.SSLError):
        shake_hands(folder, tmp_path / "others")


def shake_hands(server: Path, client: Path) -> str:
    """A worker meets a client; the protocol that they agree on."""
    from pathways_lab.transport.tls import client_context, server_context

    def pems(folder: Path, role: str) -> dict[str, str]:
        names = {"ca": "ca", "cert": role, "key": f"{role}-key"}
        return {part: (folder / f"{name}.pem").read_text() for part, name in names.items()}

    here, there = client_context(pems(client, "client")), server_context(pems(server, "worker"))
    assert here
    assert there
    near, far = socket.socketpair()

    def answer() -> None:
        with far, contextlib.suppress(OSError), there.wrap_socket(far, server_side=True) as sock:
            sock.sendall(sock.recv(1))

    thread = threading.Thread(target=answer)
    thread.start()
    try:
        with near, here.wrap_socket(near) as sock:
            sock.sendall(b".")
            assert sock.recv(1) == b"."
            return str(sock.version())
    finally:
        thread.join()


def test_a_folder_that_lies_elsewhere_names_its_files_anew(tmp_path: Path) -> None:
    certificates.make(tmp_path / "certs", add="bob")
    moved = (tmp_path / "certs" / "bob").rename(tmp_path / "bobs")
    assert str(moved) not in (moved / "dask.yaml").read_text()
    assert "no authority's key" in certificates.make(moved)[0]
    text = (moved / "dask.yaml").read_text()
    assert f"{moved}/client-key.pem" in text
    assert "worker" not in text


@pytest.mark.parametrize("name", ["a/b", "..", ".hidden", "/etc"])
def test_a_name_that_is_no_folders_is_refused(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["cluster", "certs", str(tmp_path / "certs"), "--add", name]) == 1
    assert f"--add {name!r}: give a name" in capsys.readouterr().out


def test_certificates_that_are_not_there_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    for command in (["cluster", "status", "sched"], ["doctor", "sched"]):
        assert cli.main([*command, "--certs", "nowhere"]) == 1
        assert "pathways_lab cluster certs nowhere" in capsys.readouterr().out


def test_addresses() -> None:
    assert cluster.whole("sched") == "tls://sched:8786"
    assert cluster.whole("sched:1") == "tls://sched:1"
    assert cluster.whole("tcp://127.0.0.1:1") == "tcp://127.0.0.1:1"


def test_ports_that_cannot_be_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["cluster", "worker", "sched", "--ports", "a-b"]) == 1
    assert "ports is 'a-b': ports are a first and a last one" in capsys.readouterr().out
    behind = ["cluster", "worker", "sched", "--contact", "gate"]
    for ports in ([], ["--ports", "9000"], ["--ports", "9000-9000"]):
        assert cli.main([*behind, *ports]) == 1
        assert "--contact gate needs two ports or more" in capsys.readouterr().out


def test_processes_of_dask_idle_cheaply(monkeypatch: pytest.MonkeyPatch) -> None:
    """They sample no stacks, unless the group's own environment says so."""
    monkeypatch.setattr(
        os, "environ", {**os.environ, "DASK_DISTRIBUTED__ADMIN__TICK__INTERVAL": "3s"}
    )
    monkeypatch.setattr(os, "execv", lambda *_: (_ for _ in ()).throw(SystemExit))
    with pytest.raises(SystemExit):
        cli.main(["cluster", "scheduler"])
    names = "worker.profile.enabled", "admin.system-monitor.interval", "admin.tick.interval"
    ask = "import dask, distributed; print([dask.config.get('distributed.' + n) for n in %r])"
    told = subprocess.check_output(
        [sys.executable, "-c", ask % (names,)], text=True, env=os.environ
    )
    assert told.strip() == "[False, '5s', '3s']"


@pytest.fixture
def handlers() -> Iterator[None]:
    """Puts the handlers of signals back."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("handlers")
def test_who_is_told_to_end_while_a_worker_starts_tells_that_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    popen, started = subprocess.Popen, []

    def start(_: Any, **how: Any) -> Any:
        started.append(popen([sys.executable, "-c", "import signal; signal.pause()"], **how))
        signal.raise_signal(signal.SIGTERM)
        return started[-1]

    monkeypatch.setattr(subprocess, "Popen", start)
    assert cluster.work("tls://sched:8786", "west", 4, machine="m") == 0
    assert [process.returncode for process in started] == [-signal.SIGTERM]


@pytest.mark.usefixtures("handlers")
def test_a_worker_is_started_again_until_it_is_told_to_end(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first one finds its name taken, the second one fails, the third is told to end."""
    scripts = [
        "import sys; sys.exit('ValueError: name taken, west/m')",
        "import sys; sys.stderr.write('it broke\\n'); sys.exit(3)",
        "import os, signal; os.kill(os.getppid(), signal.SIGTERM); signal.pause()",
    ]
    commands: list[Any] = []

    def dask(*options: str) -> list[str]:
        commands.append(options)
        return ["unused"]

    started = iter(scripts)
    popen = subprocess.Popen
    monkeypatch.setattr(cluster, "_python", dask)
    monkeypatch.setattr(
        subprocess, "Popen", lambda _, **how: popen([sys.executable, "-c", next(started)], **how)
    )
    monkeypatch.setattr(cluster, "PAUSE", 0)
    assert cluster.work("tls://sched:8786", "west", 4, machine="m") == 0
    said = capsys.readouterr().err.splitlines()
    assert said == [
        "west/m: another worker is called west/m, or this one's past is not over yet; it is"
        " started again",
        "it broke",
        "west/m: the worker has ended, with status 3; it is started again",
    ]
    assert commands[0][:4] == (worker.__name__, "tls://sched:8786", "--name", "west/m")
    assert commands[0][-2:] == ("--resources", "devices=4")


def test_doors_of_the_doctor_open_to_who_knows_the_word() -> None:
    word, other = b"w" * scheduler_probe.WORD, b"o" * scheduler_probe.WORD
    port = scheduler_probe.open_door("127.0.0.1", word)
    try:
        doors = {"here": ("127.0.0.1", port)}
        assert scheduler_probe.knock_at(doors, word)["here"].rate > 0
        assert scheduler_probe.knock_at(doors, other)["here"].failure
    finally:
        scheduler_probe.close_doors()
    assert "refused" in scheduler_probe.knock_at(doors, word)["here"].failure
