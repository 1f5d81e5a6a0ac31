"""Which parts a slice has, where a step is told the slices and not which part goes where.

Problem: who has marked the parts of a model wants them on the slices at hand, each with as much
work as its devices are many, before anything was measured.

How: the parts keep the order of the code, and a slice has neighbours.  The work of a part is that
of all its calls in the step, forward and backward, counted in JAX's own form of them.

Rule for maintainers: counted, never measured; ``pw.search(over=("cut",))`` measures.

Paper: section 5.3 ("stages balanced").
"""

from __future__ import annotations

from collections.abc import Sequence

from pathways_lab.client.lab.devices import Slice
from pathways_lab.client.session import failures
from pathways_lab.pipeline import balance
from pathways_lab.pipeline.mpmd.flat import Flat


def cut(step: Flat, slices: Sequence[Slice]) -> dict[str, Slice]:
    """The slice of each part.  Raises PathwaysError where there are fewer parts than slices."""
    work: dict[str, float] = {}
    for equation in step.equations:
        if equation.mark is not None:
            own = balance.of_equation(equation.origin)
            work[equation.mark] = work.get(equation.mark, 0.0) + own
    if len(work) < len(slices):
        raise failures.refused(
            f"on=[...] has {len(slices)} slices, and the step has {len(work)} parts that are"
            f" marked: {', '.join(map(repr, work)) or 'none'}",
            "mark more parts with pw.mpmd.named(name, function), or give fewer slices",
        )
    speeds = [float(len(place.devices)) for place in slices]
    parts, ranges = list(work), balance.partition(list(work.values()), len(slices), speeds)
    return {
        part: place
        for place, own in zip(slices, ranges, strict=True)
        for part in parts[own.start : own.stop]
    }
