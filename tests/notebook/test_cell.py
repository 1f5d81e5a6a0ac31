"""What a cell reads and means, from its text alone."""

from __future__ import annotations

import textwrap
from typing import Any

import pytest

from pathways_lab.notebook.kernel.cell_text import VALUE, CellRefused, at_home, parse


def reads(source: str) -> set[str]:
    return set(parse(textwrap.dedent(source), "cell").reads)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("y = f(x)", {"f", "x"}),
        ("x = 1\ny = x", set()),
        ("y = x\nx = 1", {"x"}),
        ("x += y", {"x", "y"}),
        ("a.b = c", {"a", "c"}),
        ("d['k'] = v", {"d", "v"}),
        ("for i in r:\n    s = s + i", {"r", "s"}),
        ("if c:\n    x = 1\ny = x", {"c", "x"}),
        ("z = [w * q for w in ws]", {"q", "ws"}),
        ("z = [w * q for w in ws]\ny = w", {"q", "w", "ws"}),
        ("z = {k: v for a in rows for k, v in a.items()}", {"rows"}),
        ("def f(x: T = d) -> R:\n    return x", {"T", "d", "R"}),
        ("g = lambda x: x + k", {"k"}),
        ("def f(x):\n    return x + k\ny = f(2)", {"k"}),
        ("import numpy as np\ny = np.ones(3)", set()),
        ("a, (b, *c) = t\nprint(a, b, c)", {"t", "print"}),
        ("with open(p) as h:\n    d = h.read()", {"open", "p"}),
        ("def f():\n    return later\nlater = 1\nf()", {"later"}),
        ("del x", {"x"}),
        ("(n := m)", {"m"}),
        ("if c:\n    x = 1\nelse:\n    x = 2\ny = x", {"c"}),
        ("while c:\n    x = 1\ny = x", {"c", "x"}),
        ("for i in r:\n    pass\ny = i", {"r"}),
        ("with m:\n    x = 1\ny = x", {"m"}),
        ("try:\n    x = 1\nexcept E:\n    pass\ny = x", {"E", "x"}),
        ("def f(x):\n    return x\ny = f(1)", set()),
        ("x: int = 3\ny = x", {"int"}),
    ],
)
def test_what_is_read(source: str, expected: set[str]) -> None:
    assert reads(source) == expected


def test_the_last_expression_is_the_value() -> None:
    cell = parse("x = 2\nx + 1", "cell")
    names: dict[str, Any] = {}
    cell.run(names)
    assert names[VALUE] == 3
    for source in ("x = 2", ""):
        names = {}
        parse(source, "cell").run(names)
        assert VALUE not in names


def test_lines_are_those_of_the_text() -> None:
    cell = parse("a = 1\n\nb = 1 / 0\n", "the cell")
    with pytest.raises(ZeroDivisionError) as caught:
        cell.run({})
    frame = caught.traceback[-1]
    assert (str(frame.path), frame.lineno + 1) == ("the cell", 3)


@pytest.mark.parametrize("source", ["x = 1\nawait y", "x = 1\nasync for a in b:\n    pass"])
def test_await_is_refused_with_the_remedy_and_the_line(source: str) -> None:
    with pytest.raises(CellRefused, match="cannot wait") as caught:
        parse(source, "cell")
    assert caught.value.line == 2
    assert "another cell" in caught.value.remedy


def test_await_inside_a_function_is_its_own_business() -> None:
    assert reads("async def f():\n    return await g()") == {"g"}


def test_a_function_of_the_cell_belongs_to_the_notebook_afterwards() -> None:
    away: dict[str, Any] = {"k": "stand-in"}
    parse("def f(x=1, *, y=2):\n    return k", "cell").run(away)
    home = {"k": "value"}
    moved = at_home(away["f"], home, away)
    assert (away["f"](), moved()) == ("stand-in", "value")
    assert moved.__kwdefaults__ == {"y": 2}
    assert at_home(print, home, away) is print
