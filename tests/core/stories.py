"""Small stories that several tests of the core begin with."""

from __future__ import annotations

from typing import TypeVar

from pathways_lab.core.errors import Failure
from pathways_lab.core.messages import Command
from pathways_lab.core.program.program import Plan
from pathways_lab.core.scheduling.rules import Rules
from pathways_lab.testing import Script, Sketch

Kind = TypeVar("Kind", bound=Command)

BROKEN = Failure("execute", "division by zero")
KNOWN = Rules(assumed=0.005)
"""As if every function had been measured, and took 5 ms."""


def told(script: Script, kind: type[Kind]) -> list[Kind]:
    """Every command of a kind so far."""
    return [c for _, commands in script.log for c in commands if isinstance(c, kind)]


def two_islands(**more: int) -> tuple[Script, int, int, Plan]:
    """A program a -> (transfer) -> b over two islands; returns it with both slices."""
    script = Script(islands=2, rules=KNOWN, **more)
    first, second = script.slice(2, island="island0"), script.slice(2, island="island1")
    sketch = Sketch("pair")
    (x,) = sketch.call("a", first, [sketch.input(first, 4)], [4])
    (y,) = sketch.call("b", second, [x], [4])
    return script, first, second, script.register(sketch.output(x, y))


def heavy(script: Script, where: int, size: int, name: str = "p") -> Plan:
    return script.register(Sketch(name).chain(where, f"{name}.f", nbytes=size))
