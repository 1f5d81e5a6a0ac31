"""Draw the life cycles of the core into docs/order.md.

Problem: a diagram that is drawn by hand is right on the day it is drawn.  These
are made from the tables that the core itself obeys.

Usage: ``python tools/diagrams.py`` rewrites the part between the two marks.
"""

from __future__ import annotations

from pathlib import Path

from pathways_lab.core.scheduling import lifecycles
from pathways_lab.core.scheduling.lifecycles import LifeCycle

PAGE = Path(__file__).resolve().parent.parent / "docs" / "order.md"
BEGIN, END = "<!-- life cycles: begin -->\n", "<!-- life cycles: end -->\n"


def cycles() -> list[LifeCycle]:
    """All life cycles of the core, in the order in which they are written down."""
    return [value for value in vars(lifecycles).values() if isinstance(value, LifeCycle)]


def diagram(cycle: LifeCycle) -> str:
    """One life cycle as a Mermaid state diagram."""
    lines = [f"    [*] --> {cycle.start}"]
    lines += [f"    {old} --> {new}: {move}" for (old, move), new in cycle.moves.items()]
    lines += [f"    {state} --> [*]" for state in cycle.ends]
    body = "\n".join(["stateDiagram-v2", "    direction LR", *lines])
    return f"**{cycle.name}**\n\n```mermaid\n{body}\n```\n"


def drawn(page: str) -> str:
    """*page* with the part between the marks drawn anew."""
    before, rest = page.split(BEGIN)
    _, after = rest.split(END)
    return before + BEGIN + "\n" + "\n".join(map(diagram, cycles())) + "\n" + END + after


if __name__ == "__main__":
    PAGE.write_text(drawn(PAGE.read_text()))
