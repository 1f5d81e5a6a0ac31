"""What people get with `pip install`: the wheel, opened and looked into."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
DATA = "pathways_lab-0.1.0.data/data/"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A freshly built wheel."""
    folder = tmp_path_factory.mktemp("wheel")
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)],
        cwd=ROOT,
        check=True,
        capture_output=True,
    )
    (wheel,) = folder.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def names(wheel: Path) -> set[str]:
    """Every file in it."""
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def test_every_source_file_is_in_it(names):
    """Also what is not Python: scripts, styles, C++ for the emulated devices, type marks."""
    for folder, package in ((ROOT, "pathways_lab"), (ROOT / "extensions", "pathways_lab_server")):
        sources = {
            path.relative_to(folder).as_posix()
            for path in (folder / package).rglob("*")
            if path.is_file() and "__pycache__" not in path.parts
        }
        assert sources - names == set()
        assert f"{package}/py.typed" in names


def test_jupyter_finds_its_configuration(names):
    assert f"{DATA}etc/jupyter/jupyter_server_config.d/pathways_lab_server.json" in names


def test_jupyterlab_finds_its_extension(wheel: Path, tmp_path: Path) -> None:
    """As ``jupyter labextension list`` does, with all files that it loads."""
    config = pytest.importorskip("jupyterlab_server.config")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    folder = tmp_path / DATA / "share" / "jupyter" / "labextensions"
    found = config.get_federated_extensions([str(folder)])["pathways-lab"]
    assert found["install"]["packageName"] == "pathways-lab"
    loaded = folder / "pathways-lab" / found["jupyterlab"]["_build"]["load"]
    assert {"plugin.js", "panel.js", "line.js", "panel.css"} < {
        path.name for path in loaded.parent.iterdir()
    }
    assert found["version"] in wheel.name, "one version for all parts"


def test_notebooks_are_shipped(names):
    shipped = {n.removeprefix(f"{DATA}share/pathways-lab/notebooks/") for n in names}
    assert {path.name for path in (ROOT / "notebooks").glob("*.ipynb")} <= shipped


def test_nothing_else_is_in_it(names):
    """No tests, tools or documents become importable on users' machines."""
    tops = {name.split("/")[0] for name in names}
    assert tops == {
        "pathways_lab",
        "pathways_lab_server",
        "pathways_lab-0.1.0.data",
        "pathways_lab-0.1.0.dist-info",
    }
