"""The number of a gang, by which pages find the same gang in every panel.

Problem: the same gang is a bar, a box and a node; a click on any of them must
light up all the others, at once, also while the kernel is busy.

How: layers carry the column ``gang``, one number for run and step, and the page
compares it.

Rule for maintainers: the number must be exact as float64.
"""

from __future__ import annotations

from pathways_lab.timeline.records import own

STEPS = 1 << 20
NOBODY = -1.0
"""The number of what is no single gang."""


def number(run: int, step: int) -> float:
    """One number for a gang."""
    return float(own(run) * STEPS + step) if step >= 0 else NOBODY


def parts(gang: float) -> tuple[int, int]:
    """``(run, step)`` of a number; the run as its client counts it."""
    return divmod(int(gang), STEPS)
