"""What the documents say is there is there: files, commands, names, diagrams."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.test_layers import RANK
from tools import diagrams

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = ("README.md", "ARCHITECTURE.md", "CHANGELOG.md", "extensions/README.md")
REFERENCE = ("docs/api.md", "docs/all_that_a_lab_can_do.md")
PACKAGE = ROOT / "pathways_lab"


def text(name: str) -> str:
    return (ROOT / name).read_text()


def mentioned_files(document: str) -> set[str]:
    """Paths in backticks and links that end like a file of ours or like a folder."""
    ticked = set(re.findall(r"`([\w./-]+\.(?:py|ipynb|md|js)|[\w/-]+/)`", document))
    linked = {link for link in re.findall(r"\]\(([^)#]+)\)", document) if "://" not in link}
    return ticked | linked


def missing(document: str, folder: Path) -> list[str]:
    """Mentioned files that are neither below the repository, its package, nor *folder*."""
    made_later = {"build/demo/"}
    return sorted(
        name
        for name in mentioned_files(document) - made_later
        if not any((base / name).exists() for base in (ROOT, PACKAGE, folder))
    )


@pytest.mark.parametrize("name", [*DOCUMENTS, *REFERENCE])
def test_mentioned_files_exist(name):
    assert missing(text(name), (ROOT / name).parent) == []


def test_a_mentioned_file_that_is_gone_is_found():
    document = (
        "see `core/nothing.py`, [that](docs/no.md), `core/slices/slices.py`, [x](https://a/b.md)"
    )
    assert missing(document, ROOT) == ["core/nothing.py", "docs/no.md"]


@pytest.mark.parametrize("name", DOCUMENTS)
def test_mentioned_make_targets_exist(name):
    targets = set(re.findall(r"^([a-z]+):", text("Makefile"), re.MULTILINE))
    mentioned = set(re.findall(r"(?:`|^)make ([a-z]+)", text(name), re.MULTILINE))
    assert mentioned <= targets


def test_life_cycles_are_drawn_from_the_tables():
    """Remedy: python tools/diagrams.py"""
    page = text("ARCHITECTURE.md")
    assert diagrams.drawn(page) == page
    assert len(diagrams.cycles()) >= 4


def test_the_map_of_the_page_is_the_map_of_the_layer_test():
    page = text("ARCHITECTURE.md")
    drawn_map = page.split("## The map")[1].split("```")[1]
    assert all(re.search(rf"\b{layer}\b", drawn_map) for layer in RANK)
