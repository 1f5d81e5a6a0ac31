"""Objects are made in the order in which they depend on each other, of few others.

Law: no constructor takes more than five collaborators; no function that a constructor
makes reads an attribute that the constructor assigns later.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest

from pathways_lab.core import messages

ROOT = Path(__file__).resolve().parent.parent / "pathways_lab"
MOST = 5
MORE_BY_REVIEW = {"Carrier": 8, "Rim": 7, "Commands": 6}
"""Classes with more, and how many: it only becomes less."""


def words(annotation: ast.expr) -> set[str]:
    """The names in a type."""
    found = set()
    for node in ast.walk(annotation):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            found |= words(ast.parse(node.value, mode="eval").body)
        found |= {getattr(node, "id", ""), getattr(node, "attr", "")}
    return found


def is_data(cls: ast.ClassDef) -> bool:
    """Whether its objects only say something: nothing collaborates with them."""
    signs = (*cls.decorator_list, *cls.bases)
    return any(word in ast.unparse(sign) for sign in signs for word in ("frozen", "Tuple", "Enum"))


def constructor(cls: ast.ClassDef) -> ast.FunctionDef | None:
    made = (n for n in cls.body if isinstance(n, ast.FunctionDef) and n.name == "__init__")
    return next(made, None)


def parameters(cls: ast.ClassDef) -> list[ast.expr]:
    """The types of what is given to a constructor, also to that of a dataclass."""
    made = constructor(cls)
    if made is not None:
        given = (*made.args.posonlyargs, *made.args.args, *made.args.kwonlyargs)
        return [each.annotation for each in given if each.annotation is not None]
    if is_data(cls) or not any("dataclass" in ast.unparse(d) for d in cls.decorator_list):
        return []
    return [n.annotation for n in cls.body if isinstance(n, ast.AnnAssign) and n.value is None]


def classes(root: Path) -> list[ast.ClassDef]:
    trees = [ast.parse(path.read_text()) for path in sorted(root.rglob("*.py"))]
    return [n for tree in trees for n in ast.walk(tree) if isinstance(n, ast.ClassDef)]


def crowds(known: list[ast.ClassDef]) -> dict[str, int]:
    """By class: how many objects and functions its constructor takes, where they are too many."""
    others = {"Callable"} | {cls.name for cls in known if not is_data(cls)}
    counts = ((cls.name, sum(bool(words(p) & others) for p in parameters(cls))) for cls in known)
    return {name: count for name, count in counts if count > MOST}


def own(node: ast.AST, context: type[ast.expr_context]) -> Iterator[tuple[str, int]]:
    """Attributes of ``self`` that are read or assigned in it, with their lines."""
    for each in ast.walk(node):
        if not (isinstance(each, ast.Attribute) and isinstance(each.ctx, context)):
            continue
        if isinstance(each.value, ast.Name) and each.value.id == "self":
            yield each.attr, each.lineno


def crossed(known: list[ast.ClassDef]) -> list[str]:
    """Functions in constructors that read what is assigned below them."""
    found = []
    for cls in known:
        made = constructor(cls)
        for inner in ast.walk(made) if made is not None else ():
            if inner is not made and isinstance(inner, ast.Lambda | ast.FunctionDef):
                before = {n for n, at in own(made, ast.Store) if at < inner.lineno}
                inside = {name for name, _ in own(inner, ast.Store)}
                later = {name for name, _ in own(made, ast.Store)} - before - inside
                read = {name for name, _ in own(inner, ast.Load)}
                found += [f"{cls.name}.{name}" for name in sorted(read & later)]
    return found


MESSAGES = 63
"""Events and commands of the core: it only becomes less, as what asks shares one answer."""


@pytest.fixture(scope="module")
def ours() -> list[ast.ClassDef]:
    return classes(ROOT)


def test_constructors_take_few_collaborators(ours):
    assert crowds(ours) == MORE_BY_REVIEW


def test_no_function_waits_for_an_attribute(ours):
    assert crossed(ours) == []


def test_the_core_has_few_messages():
    assert len(get_args(messages.Event)) + len(get_args(messages.Command)) == MESSAGES


def planted(tmp_path: Path, source: str) -> list[ast.ClassDef]:
    (tmp_path / "a.py").write_text(source)
    return classes(tmp_path)


@pytest.mark.parametrize("count", [MOST, MOST + 1])
def test_a_planted_crowd_is_found(tmp_path, count):
    given = "".join(f", a{n}: Other | None" for n in range(count - 1))
    source = (
        "class Other: ...\n@dataclass(frozen=True)\nclass Said:\n    a: Other\n"
        f"class One:\n    def __init__(self, said: Said{given}, f: 'Callable[[], int]'): ..."
    )
    assert crowds(planted(tmp_path, source)) == ({"One": count} if count > MOST else {})


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("self.a = Other(lambda: self.b.go())", ["One.b"]),
        ("self.a = Other(self.go)", []),
        ("self.c = 1\n        self.a = Other(lambda: self.c)", []),
    ],
)
def test_a_planted_crossing_is_found(tmp_path, line, found):
    source = f"class One:\n    def __init__(self):\n        {line}\n        self.b = 1"
    assert crossed(planted(tmp_path, source)) == found
