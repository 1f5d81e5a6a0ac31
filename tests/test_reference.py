"""The reference says what is there, and its examples run."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import pathways_lab as pw
from pathways_lab.timeline.log import Timeline
from tools import examples, reference

TASKS = reference.PAGE.parent / "all_that_a_lab_can_do.md"
EXAMPLES = examples.all_examples()


def test_every_public_name_has_an_example() -> None:
    """Remedy: add the name to an example in tools/examples.py."""
    lacking = sorted(set(reference.public()) - set(examples.by_name()))
    assert not lacking, f"no example shows {', '.join(lacking)}"


def test_every_example_is_of_a_name_that_there_is() -> None:
    """Remedy: take names that are gone out of tools/examples.py."""
    entries = reference.entries()
    known = {entry.name for entry in entries}
    known |= {f"{e.value.__name__}.{name}" for e in entries for name, _ in e.members}
    assert set(examples.by_name()) <= known


def test_names_that_are_not_for_users_are_there() -> None:
    """Remedy: take what is gone out of reference.OURS."""
    classes = [entry.value for entry in reference.entries() if inspect.isclass(entry.value)]
    there = {
        f"{cls.__name__}.{attribute}"
        for cls in classes
        for attribute in (*dir(cls), *getattr(cls, "__dataclass_fields__", ()))
    }
    assert there >= reference.OURS


def test_the_page_is_what_the_docstrings_say() -> None:
    """Remedy: python -m tools.reference"""
    assert reference.PAGE.read_text() == reference.page()


def test_links_to_the_reference_lead_somewhere() -> None:
    headings = re.findall(r"^#{2,4} (.+)$", reference.PAGE.read_text(), re.MULTILINE)
    linked = set(re.findall(r"\(api\.md#([^)]+)\)", TASKS.read_text()))
    assert linked - set(map(reference.anchor, headings)) == set()


def test_the_page_of_tasks_has_all_that_there_is() -> None:
    """Remedy: say in docs/all_that_a_lab_can_do.md what the name is good for."""
    text = TASKS.read_text()
    names = [f"pw.{name}" for name in pw.__all__]
    names += [n.replace("Lab.", "lab.") for n in reference.public() if n.startswith("Lab.")]
    lacking = [name for name in names if not re.search(rf"\b{re.escape(name)}\b", text)]
    assert not lacking, f"nothing says what {', '.join(lacking)} can do"


def test_the_page_of_tasks_names_nothing_that_there_is_not() -> None:
    text = TASKS.read_text()
    assert set(re.findall(r"\bpw\.(\w+)", text)) <= set(pw.__all__)
    assert set(re.findall(r"\blab\.(\w+)", text)) <= {*dir(pw.Lab), "timeline", "json"}
    assert set(re.findall(r"\blab\.timeline\.(\w+)", text)) <= set(dir(Timeline))


@pytest.fixture(scope="module")
def there(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """The arguments of examples: the preface has run, on a lab that they share."""
    names: dict[str, Any] = {}
    exec(examples.PREFACE.replace("pw.start(", "pw.start(progress=False, "), names)
    names["folder"] = tmp_path_factory.mktemp("examples")
    yield names
    names["lab"].close()


@pytest.mark.cluster
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.__name__)
def test_the_example_runs(there: dict[str, Any], example: Callable[..., None]) -> None:
    example(**{name: there[name] for name in inspect.signature(example).parameters})
