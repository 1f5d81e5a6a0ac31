"""How the project writes: the subject of a sentence is a noun of the glossary, the verb active.

A sentence that begins with "What", "Who", "Whoever", "Whose" or "Of" hides its subject in a
clause, and a reader needs it twice.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.test_documents import DOCUMENTS

ROOT = Path(__file__).resolve().parent.parent
HIDDEN = re.compile(r"(?<![\w.`/])(?:What|Who|Whoever|Whose|Of)\b")
"""Capital letters are for beginnings, so each such word begins a sentence."""

PAGES = [name for name in DOCUMENTS if not name.startswith(("docs/api", "benchmarks/"))]


def hidden_subjects(text: str) -> list[str]:
    """The sentences of *text* that begin with one of the words, each up to its line's end."""
    return [text[match.start() :].partition("\n")[0] for match in HIDDEN.finditer(text)]


def docstrings(source: str) -> list[str]:
    """Those of a module and of everything in it."""
    alone = (node.value for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Expr))
    constants = (node.value for node in alone if isinstance(node, ast.Constant))
    return [value for value in constants if isinstance(value, str)]


def test_docstrings_hide_no_subject():
    """A sentence names its subject first."""
    found = [
        f"{path.relative_to(ROOT).as_posix()}: {sentence}"
        for path in sorted((ROOT / "pathways_lab").rglob("*.py"))
        for docstring in docstrings(path.read_text())
        for sentence in hidden_subjects(docstring)
    ]
    assert not found, "\n".join(found)


def test_docstrings_of_everything_are_found():
    source = '"""Of A."""\nB = 1\n"""What B."""\ndef c():\n    "Who C."\n    return "Of D."\n'
    assert sorted(docstrings(source)) == ["Of A.", "What B.", "Who C."]


@pytest.mark.parametrize("name", PAGES)
def test_pages_hide_no_subject(name):
    """Headings and blocks of code are no sentences."""
    text = (ROOT / name).read_text()
    prose = re.sub(r"^```.*?^```|^#.*?$", "", text, flags=re.MULTILINE | re.DOTALL)
    assert hidden_subjects(prose) == []


def test_a_hidden_subject_is_found():
    text = "Ends.  What is lost\nis zero. Problem: Whoever waits; of those who wait, `Who`, Offset."
    assert hidden_subjects(text) == [
        "What is lost",
        "Whoever waits; of those who wait, `Who`, Offset.",
    ]
