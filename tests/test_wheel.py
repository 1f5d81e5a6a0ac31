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
def names(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """Every file of a freshly built wheel."""
    folder = tmp_path_factory.mktemp("wheel")
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)],
        cwd=ROOT,
        check=True,
        capture_output=True,
    )
    (wheel,) = folder.glob("*.whl")
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
