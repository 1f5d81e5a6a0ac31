"""What is published holds nothing of the machine that it was made on, and nothing stale.

Law: no path of somebody's machine, no package index by name, no stored output.
Checked is what git would publish: the index where there is one (running a
notebook does not make the tests fail, committing its outputs does), else files.
"""

from __future__ import annotations

import io
import json
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
BINARY = {".png", ".gif", ".jpg", ".ico", ".woff2"}

MACHINE_PATHS = re.compile(
    r"(?<![\w.$~])/(?:root|work|home/(?!<)\w+|Users/(?!<)\w+|private/tmp|opt/(?:pypi|wheels))(?:/|\b)"
)
HOSTS = ("pypi org", "pythonhosted org", "npmjs org", "yarnpkg com", "anaconda org", "golang org")
"""Written apart, so that this file names none of them."""
INDEX_HOSTS = re.compile(
    "|".join(re.escape(host.replace(" ", ".")) for host in HOSTS)
    + r"|artifactory|--(?:extra-)?index-url|--trusted-host",
    re.IGNORECASE,
)


def git(*arguments: str, asked: bytes = b"") -> bytes | None:
    """Output of a git command in the repository; None without git or repository.

    asked: its input.
    """
    try:
        done = subprocess.run(
            ["git", "-C", str(ROOT), *arguments], input=asked, capture_output=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout


def published() -> dict[str, str]:
    """Text of every file that is, or is about to be, published, by path."""
    listed = git("ls-files", "-z", "--cached")
    if listed is None:
        names = [
            path.relative_to(ROOT).as_posix()
            for path in ROOT.rglob("*")
            if path.is_file() and not any(part.startswith(".") for part in path.parts)
        ]
        return {n: (ROOT / n).read_text() for n in names if Path(n).suffix not in BINARY}
    names = [n for n in listed.decode().split("\0") if n and Path(n).suffix not in BINARY]
    stored = git("cat-file", "--batch", asked="".join(f":{name}\n" for name in names).encode())
    assert stored is not None
    rest, texts = io.BytesIO(stored), {}
    for name in names:
        *_, size = rest.readline().split()
        texts[name] = rest.read(int(size)).decode()
        assert rest.read(1) == b"\n", name
    return texts


def matches(texts: dict[str, str], pattern: re.Pattern[str]) -> list[str]:
    """``path:line: text`` of every line that *pattern* finds."""
    return [
        f"{name}:{number}: {line.strip()[:100]}"
        for name, text in texts.items()
        for number, line in enumerate(text.splitlines(), 1)
        if pattern.search(line)
    ]


def stored_results(notebook: str) -> list[str]:
    """What a notebook's text holds besides what its author wrote."""
    content = json.loads(notebook)
    problems = []
    for number, cell in enumerate(content["cells"]):
        if cell["cell_type"] == "code":
            if cell.get("outputs"):
                problems.append(f"cell {number} has outputs")
            if cell.get("execution_count") is not None:
                problems.append(f"cell {number} has an execution count")
        if "execution" in cell.get("metadata", {}):
            problems.append(f"cell {number} has execution times")
    if "widgets" in content["metadata"]:
        problems.append("the notebook has widget states")
    if content["metadata"].get("kernelspec", {}).get("name") != "python3":
        problems.append("the kernel is not python3")
    return problems


@pytest.fixture(scope="module")
def texts() -> dict[str, str]:
    return {n: t for n, t in published().items() if n != "tests/test_no_leaks.py"}


def test_no_path_of_a_machine(texts):
    assert matches(texts, MACHINE_PATHS) == []


def test_no_package_index(texts):
    assert matches(texts, INDEX_HOSTS) == []


def test_notebooks_hold_no_results(texts):
    notebooks = {name: text for name, text in texts.items() if name.endswith(".ipynb")}
    assert {n: p for n, text in notebooks.items() if (p := stored_results(text))} == {}


def test_no_merge_marks_or_leftovers(texts):
    leftovers = re.compile(r"^(<<<<<<<|>>>>>>>) |\b(TODO|FIXME|XXX)\b")
    assert matches(texts, leftovers) == []


@pytest.mark.parametrize(
    ("pattern", "line"),
    [
        (MACHINE_PATHS, 'DATA = "/home/ada/data"'),
        (MACHINE_PATHS, "see {}/notes".format("/" + "root")),
        (MACHINE_PATHS, "#!/Users/ada/venv/bin/python"),
        (MACHINE_PATHS, "/" + "work/main/x.py"),
        (INDEX_HOSTS, "--extra-index-url https://x"),
        (INDEX_HOSTS, "https://files." + HOSTS[1].replace(" ", ".")),
    ],
)
def test_a_planted_leak_is_found(pattern, line):
    assert matches({"a.txt": f"first\n{line}"}, pattern) == [f"a.txt:2: {line}"]


@pytest.mark.parametrize(
    "line",
    [
        "cd ~/" + "work/x",
        "https://example.com/home/ada",
        "/usr/bin/env",
        "docs/" + "work/x",
        "/home/<you>",
    ],
)
def test_ordinary_text_is_left_alone(line):
    assert matches({"a.txt": line}, MACHINE_PATHS) == []


def test_planted_results_are_found():
    cell = {
        "cell_type": "code",
        "execution_count": 3,
        "metadata": {"execution": {}},
        "outputs": [1],
    }
    notebook = {"cells": [cell], "metadata": {"widgets": {}, "kernelspec": {"name": "mine"}}}
    assert len(stored_results(json.dumps(notebook))) == 5
