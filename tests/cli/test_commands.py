"""The other commands: what they refuse, what they copy, what they start."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from pathways_lab import cli
from pathways_lab.cli import demo, jupyter, kernels, platforms, shipped
from tests.notebook.jupyter import notebook as of_cells

ROOT = Path(__file__).resolve().parents[2]


def test_help_names_every_command(capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main(["--help"])
    assert stopped.value.code == 0
    text = capsys.readouterr().out
    assert all(command in text for command in ("lab", "demo", "doctor"))


@pytest.mark.parametrize("arguments", [[], ["fly"], ["doctor", "--fast"], ["demo", "x"]])
def test_wrong_usage_is_status_two(arguments, capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main(arguments)
    assert stopped.value.code == 2
    assert "usage:" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["lab", "demo"])
def test_an_unsupported_machine_is_refused_by_name(command, monkeypatch, capsys):
    machine = platforms.Machine("Windows", "11", "AMD64", (3, 12), libc="")
    monkeypatch.setattr(platforms, "this_machine", lambda: machine)
    assert cli.main([command]) == 1
    assert "Windows without WSL2" in capsys.readouterr().out


def test_a_checkout_ships_its_own_notebooks():
    assert shipped.notebooks() == ROOT / "notebooks"


def test_installed_notebooks_are_found_through_the_package_records(monkeypatch, tmp_path):
    class Entry:
        name = shipped.QUICKSTART

        def locate(self) -> Path:
            return tmp_path / "share" / "pathways-lab" / "notebooks" / self.name

    monkeypatch.setattr(shipped, "__file__", str(tmp_path / "a" / "b" / "c" / "shipped.py"))
    monkeypatch.setattr(shipped.metadata, "files", lambda _: [Entry()])
    assert shipped.notebooks() == tmp_path.resolve() / "share" / "pathways-lab" / "notebooks"
    monkeypatch.setattr(shipped.metadata, "files", lambda _: [])
    with pytest.raises(FileNotFoundError, match="Remedy"):
        shipped.notebooks()


@pytest.fixture
def source(tmp_path) -> Path:
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "00_quickstart.ipynb").write_text("shipped")
    (folder / "README.md").write_text("the map")
    (folder / "data.bin").write_text("not for readers")
    return folder


def test_copies_are_made_once_and_kept(source, tmp_path):
    mine = tmp_path / "mine"
    assert shipped.copy(source, mine) == []
    assert sorted(path.name for path in mine.iterdir()) == ["00_quickstart.ipynb", "README.md"]
    (mine / "00_quickstart.ipynb").write_text("my work")
    shipped.copy(source, mine)
    assert (mine / "00_quickstart.ipynb").read_text() == "my work"


def test_fresh_copies_keep_what_was_there(source, tmp_path):
    mine = tmp_path / "mine"
    shipped.copy(source, mine)
    assert shipped.copy(source, mine, fresh=True) == []
    for work in ("first", "second"):
        (mine / "00_quickstart.ipynb").write_text(work)
        (remark,) = shipped.copy(source, mine, fresh=True)
        assert "kept" in remark
    assert (mine / "00_quickstart.ipynb").read_text() == "shipped"
    assert (mine / "00_quickstart.old1.ipynb").read_text() == "first"
    assert (mine / "00_quickstart.old2.ipynb").read_text() == "second"


def test_jupyterlab_takes_over_with_the_quickstart_open(monkeypatch, tmp_path):
    started: list[list[str]] = []
    monkeypatch.setattr(jupyter.os, "execve", lambda _, line, __: started.append(line))
    cli.main(["lab", "--folder", str(tmp_path / "mine"), "--no-browser", "--port=9000"])
    (line,) = started
    assert line[:3] == [sys.executable, "-m", "jupyterlab"]
    assert f"--ServerApp.root_dir={tmp_path.resolve() / 'mine'}" in line
    assert "--LabApp.default_url=/lab/tree/00_quickstart.ipynb" in line
    assert line[-2:] == ["--no-browser", "--port=9000"]
    assert "--LabApp.news_url=None" in line


def test_in_place_opens_the_shipped_notebook(monkeypatch, tmp_path):
    started: list[list[str]] = []
    monkeypatch.setattr(jupyter.os, "execve", lambda _, line, __: started.append(line))
    monkeypatch.chdir(tmp_path)
    cli.main(["lab", "--in-place"])
    assert f"--ServerApp.root_dir={ROOT / 'notebooks'}" in started[0]
    assert list(tmp_path.iterdir()) == []


def test_our_defaults_come_before_others_and_hide_nothing():
    mine = str(jupyter.CONFIGURATION)
    assert jupyter.environment({"A": "1"}) == {"A": "1", "JUPYTER_CONFIG_PATH": mine}
    both = jupyter.environment({"JUPYTER_CONFIG_PATH": "/theirs"})["JUPYTER_CONFIG_PATH"]
    assert both == f"{mine}{jupyter.os.pathsep}/theirs"


def test_only_the_superuser_is_announced():
    assert "--allow-root" not in jupyter.command(Path("x"), [], root=False, encrypt=False)
    assert "--allow-root" in jupyter.command(Path("x"), [], root=True, encrypt=False)


def test_channels_are_encrypted_where_jupyter_can():
    assert kernels.can_encrypt()
    plain = jupyter.command(Path("x"), [], root=False, encrypt=False)
    secret = jupyter.command(Path("x"), [], root=False, encrypt=True)
    assert set(secret) - set(plain) == {"--KernelManager.transport_encryption=auto"}


def test_without_jupyterlab_the_remedy_is_named(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(jupyter.importlib.util, "find_spec", lambda _: None)
    assert cli.main(["lab", "--folder", str(tmp_path / "mine")]) == 1
    assert "pathways-lab[notebook]" in capsys.readouterr().out
    assert not (tmp_path / "mine").exists()


def notebook(folder: Path, *cells: str) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "n.ipynb").write_text(json.dumps(of_cells(cells)))


@pytest.mark.cluster
def test_demo_leaves_the_executed_notebook(monkeypatch, tmp_path, capsys):
    asked = "import ipykernel.kernelapp as k\nk.IPKernelApp.instance().curve_secretkey is None"
    notebook(tmp_path / "source", "x = 6", "print(x * 7)", asked)
    monkeypatch.setattr(shipped, "notebooks", lambda: tmp_path / "source")
    assert demo.run("n.ipynb", tmp_path / "out") == 0
    cells = json.loads((tmp_path / "out" / "n.ipynb").read_text())["cells"]
    assert cells[1]["outputs"][0]["text"] == ["42\n"]
    assert cells[2]["outputs"][0]["data"]["text/plain"] == ["False"]  # it is encrypted
    assert "[ 3/3]" in capsys.readouterr().out


@pytest.mark.cluster
def test_demo_shows_the_error_and_leaves_the_notebook_up_to_it(monkeypatch, tmp_path, capsys):
    notebook(tmp_path / "source", "1 + 1", "1 / 0", "print('never')")
    monkeypatch.setattr(shipped, "notebooks", lambda: tmp_path / "source")
    assert demo.run("n.ipynb", tmp_path / "out") == 1
    out = capsys.readouterr().out
    assert "ZeroDivisionError" in out
    assert "\x1b[" not in out
    cells = json.loads((tmp_path / "out" / "n.ipynb").read_text())["cells"]
    assert cells[1]["outputs"][0]["ename"] == "ZeroDivisionError"
    assert cells[2]["outputs"] == []


def test_demo_of_an_unknown_notebook_names_the_known_ones(monkeypatch, tmp_path, capsys):
    notebook(tmp_path / "source", "1")
    monkeypatch.setattr(shipped, "notebooks", lambda: tmp_path / "source")
    assert demo.run("m.ipynb", tmp_path / "out") == 1
    assert "n.ipynb" in capsys.readouterr().out


@pytest.mark.cluster
def test_the_module_can_be_run():
    done = subprocess.run(
        [sys.executable, "-m", "pathways_lab", "--help"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0
    assert "doctor" in done.stdout
