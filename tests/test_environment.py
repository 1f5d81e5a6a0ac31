"""One truth about what is installed: pyproject.toml; the other files are in step with it."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
CONDA_NAMES = {
    "flatbuffers": "python-flatbuffers",
    "dask": "dask-core",
    "msgpack": "msgpack-python",
}
ENDS = ("3.11", "3.13")


@pytest.fixture(scope="module")
def project() -> dict[str, object]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def constraint_lines() -> list[str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def differences(project: dict[str, object], environment: dict[str, object]) -> list[str]:
    """What environment.yml says otherwise than pyproject's base and notebook extra."""
    wanted = {}
    for text in [*project["dependencies"], *project["optional-dependencies"]["notebook"]]:
        requirement = Requirement(text)
        name = canonicalize_name(requirement.name)
        wanted[CONDA_NAMES.get(name, name)] = requirement.specifier
    found = {}
    for entry in environment["dependencies"]:
        if isinstance(entry, str):
            name, specifier = re.fullmatch(r"([a-z0-9-]+)(.*)", entry).groups()
            found[name] = SpecifierSet(specifier)
    found.pop("pip")
    python = found.pop("python")
    problems = [f"{n}: missing in environment.yml" for n in wanted.keys() - found.keys()]
    problems += [f"{n}: not in pyproject.toml" for n in found.keys() - wanted.keys()]
    problems += [
        f"{n}: {found[n]} in environment.yml, {wanted[n]} in pyproject.toml"
        for n in wanted.keys() & found.keys()
        if wanted[n] != found[n]
    ]
    for minor in range(9, 17):
        version = f"3.{minor}"
        declared = f"Programming Language :: Python :: {version}" in project["classifiers"]
        if python.contains(version) != declared:
            problems.append(f"python {version}: environment.yml and the classifiers disagree")
    return problems


def test_conda_environment_is_in_step(project):
    """environment.yml = base + notebook extra, same lower bounds, same Pythons."""
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())
    assert differences(project, environment) == []


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("- jax>=0.10", "- jax>=0.9"),
        ("  - optax>=0.2.4\n", ""),
        ("<3.14", "<3.13"),
        ("- pip\n", "- pip\n  - ray\n"),
    ],
)
def test_the_comparison_sees_a_difference(project, old, new):
    """Each kind of drift is found, so an empty list means something."""
    text = (ROOT / "environment.yml").read_text()
    assert old in text
    assert len(differences(project, yaml.safe_load(text.replace(old, new, 1)))) == 1


def test_constraints_are_names_and_versions_only():
    """No host, no path, no option: the file works with any package index."""
    line = re.compile(r'[a-z0-9-]+==[0-9a-z.+]+( ; python_version (<|>=) "3\.12")?')
    assert [bad for bad in constraint_lines() if not line.fullmatch(bad)] == []


@pytest.mark.parametrize("python", ENDS)
def test_constraints_meet_every_requirement(project, python):
    """Each direct dependency has exactly one pinned version per Python, and it is allowed."""
    pins: dict[str, str] = {}
    for line in constraint_lines():
        requirement = Requirement(line)
        if requirement.marker is None or requirement.marker.evaluate({"python_version": python}):
            assert requirement.name not in pins
            pins[requirement.name] = next(iter(requirement.specifier)).version
    texts = list(project["dependencies"])
    for extra in project["optional-dependencies"].values():
        texts += extra
    for requirement in map(Requirement, texts):
        name = canonicalize_name(requirement.name)
        if name != "pathways-lab":
            assert requirement.specifier.contains(pins[name]), (requirement, pins[name])


def test_pythons_agree(project):
    """requires-python starts where the classifiers, ruff and mypy start."""
    tools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]
    assert project["requires-python"] == f">={ENDS[0]}"
    assert tools["ruff"]["target-version"] == "py" + ENDS[0].replace(".", "")
    assert tools["mypy"]["python_version"] == ENDS[0]


def test_extras_reach_the_development_extra(project):
    """`make test` needs one extra, not four."""
    assert "pathways-lab[notebook,bench,door,sql]" in project["optional-dependencies"]["dev"]
