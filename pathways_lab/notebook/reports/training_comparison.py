"""``pw.compare``: the same training in several ways, as one table and one picture.

Problem: whether one controller is slower than many, and what a pipeline gains or
loses, are questions of numbers and of where the gaps are; both must be seen
together, on the same devices.

Rule for maintainers: what runs is in :mod:`pathways_lab.pipeline.ways`, what is
measured in :mod:`pathways_lab.pipeline.measured`; here it is only put together and
shown.

Paper: section 2 and figure 1, section 5.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from pathways_lab.client.lab import opening as labs
from pathways_lab.client.lab import slice_request
from pathways_lab.client.lab.lab import Lab
from pathways_lab.client.session import failures
from pathways_lab.core.memory.holdings import size
from pathways_lab.notebook.reports.timelines import Comparison
from pathways_lab.notebook.scene.duration import duration
from pathways_lab.notebook.view.frozen import Bundle
from pathways_lab.pipeline import ways as known
from pathways_lab.pipeline.measured import (
    BETWEEN,
    CLIENT,
    CONTROL,
    INSIDE,
    ControllersTime,
    Measured,
    measure,
)
from pathways_lab.pipeline.modules import as_layers
from pathways_lab.pipeline.schedule import Schedule
from pathways_lab.timeline.log import Recording
from pathways_lab.timeline.text_table import TextTable

PATIENCE = 10.0
"""Seconds to wait for records of work that is done."""


class SideBySide:
    """The results of several ways of the same training; the value of the cell that compares them.

    measured: by way, its numbers.  recordings: by way, what happened.
    difference (in each): the largest difference of a parameter from the first way's,
    relative to the largest value of its array; none is above *tolerance*.
    """

    def __init__(
        self,
        measured: Mapping[str, Measured],
        recordings: Mapping[str, Recording],
        tolerance: float,
        emulated: bool,
    ) -> None:
        self.measured = dict(measured)
        self.recordings = dict(recordings)
        self.tolerance = tolerance
        self.emulated = emulated

    def __getitem__(self, way: str) -> Measured:
        return self.measured[way]

    @property
    def picture(self) -> Comparison:
        """The lanes of all ways below each other, on one scale of time."""
        return Comparison(self.recordings, ("queues",))

    def rows(self) -> list[tuple[str, ...]]:
        """By way, how fast it was and what came of it; heads first."""
        found: list[tuple[str, ...]] = [_HEADS]
        for way, m in self.measured.items():
            found.append(
                (
                    way,
                    f"{m.throughput:,.0f}",
                    f"{m.busy:.0%}",
                    f"{1 - m.busy:.1%}",
                    "" if m.bubble is None else f"{m.bubble:.1%}",
                    duration(m.cpu / m.steps),
                    size(m.memory),
                    f"{m.loss:.4f}",
                    f"{m.difference:.0e}",
                )
            )
        return found

    def wire(self) -> list[tuple[str, ...]]:
        """By way, what each step sent; heads first."""
        found: list[tuple[str, ...]] = [("way", "messages", "control", "in islands", "DCN")]
        for way, m in self.measured.items():
            parts = (m.bytes[CLIENT] + m.bytes[CONTROL], m.bytes[INSIDE], m.bytes[BETWEEN])
            messages = f"{sum(m.messages.values()) / m.steps:,.1f}"
            found.append((way, messages, *(size(part / m.steps) for part in parts)))
        return found

    def gaps(self) -> list[tuple[str, ...]]:
        """By way, what the devices waited for, as shares of their time; heads first.

        Empty where they waited for nothing.
        """
        causes = sorted({cause for m in self.measured.values() for cause in m.idle})
        if not causes:
            return []
        found: list[tuple[str, ...]] = [("way", *causes)]
        for way, m in self.measured.items():
            found.append((way, *(f"{m.idle.get(cause, 0.0):.1%}" for cause in causes)))
        return found

    def _tables(self) -> list[TextTable]:
        """Several that are narrow: a page with a side panel shows them whole."""
        parts = (
            (self.rows(), self.title, [m.note for m in self.measured.values()]),
            (self.wire(), "What each step sent", ()),
            (self.gaps(), "Where the rest of the devices' time went", ()),
        )
        return [TextTable(p[0][1:], p[0][0], "<>", *p[1:]) for p in parts if p[0]]

    @property
    def title(self) -> str:
        """The comparison in words, and how sure one can be of it."""
        first = next(iter(self.measured.values()))
        devices = "on JAX CPU devices" if self.emulated else "measured"
        return (
            f"The same {first.steps} steps of {first.examples} examples, {devices}; parameters"
            f" equal up to {self.tolerance:g} of each array's largest value"
        )

    def __repr__(self) -> str:
        notes = [f"{way}: {m.note}" for way, m in self.measured.items()]
        return "\n\n".join([*map(repr, self._tables()), "\n".join(notes)])

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> Bundle:
        data, metadata = self.picture.bundle()
        shown = [*(table._repr_html_() for table in self._tables()), data["text/html"]]
        return {"text/html": "\n".join(shown), "text/plain": repr(self)}, metadata


@failures.at_caller()
def compare(
    layers: Sequence[Any],
    ways: Sequence[str | Schedule],
    *,
    loss: Callable[[Any, Any], Any],
    optimizer: Any,
    batch: tuple[Any, Any],
    lab: Lab | None = None,
    steps: int = 4,
    microbatches: int | None = None,
    stages: int | None = None,
    costs: Sequence[float] | None = None,
    island: str | None = None,
    tolerance: float = 1e-3,
) -> SideBySide:
    """Train a layered model in several ways on the same devices, and show them side by side.

    layers, loss, optimizer, microbatches, costs: as for ``pw.pipeline``.
    ways: any of
        ``"multi-controller"``: SPMD, a Python loop of its own on every host;
        ``"spmd"``: SPMD, one controller that runs ahead of the devices;
        ``"single-controller-barrier"``: SPMD, one controller that waits for every step;
        ``"pipeline-gpipe"``, ``"pipeline-1f1b"``, ``"pipeline-interleaved"``,
        ``"pipeline-zero-bubble"``: MPMD, and a ``Schedule`` of your own;
        with ``"-islands"`` behind it its stages are on all islands, on as many devices;
        with ``"-barrier"`` behind it every node waits for the one before it, and the
        controller for every step.
    batch: ``(inputs, labels)``, arrays of [examples, ...]; the same in every step.
    steps: how many, after a few that only warm up.
    stages: of pipelines; default: as many as devices and layers allow.
    island: whose devices; default: the first.
    tolerance: how far results may differ (:class:`SideBySide`).

    Raises PathwaysError for ways that there are not, and when results differ more.

    >>> pw.compare(layers, ["multi-controller", "spmd", "pipeline-1f1b"],
    ...            loss=loss, optimizer=optax.sgd(0.1), batch=(x, y))        # doctest: +SKIP
    """
    lab = lab or labs.current_or_new()
    known.check(ways)
    if not ways:
        raise failures.refused("no ways to compare", "for example ['spmd']")
    steps = slice_request.count("steps", steps)
    if not (isinstance(batch, tuple | list) and len(batch) == 2):
        raise failures.refused(f"batch={batch!r:.60} is not a pair", "give (inputs, labels)")
    work = known.Work(as_layers(layers), loss, optimizer, batch, steps, microbatches, stages, costs)
    found: dict[str, Measured] = {}
    recordings: dict[str, Recording] = {}
    first: list[Any] | None = None
    for way in ways:
        name = known.name_of(way)
        with known.ready(lab, way, work, island or lab.islands[0].name) as prepared:
            jax.block_until_ready(prepared.go(prepared.warm))
            cpu, before = ControllersTime(lab), lab.submitted
            with lab.timeline.recording() as recording:
                parameters, value = prepared.go(steps)
                jax.block_until_ready((parameters, value))
            spent = cpu.passed()
            got, last = jax.device_get(parameters), float(value)
            del parameters, value
            recording.settle(lab.submitted - before, PATIENCE)
            slices = prepared.slices
            first = got if first is None else first
            found[name] = measure(
                recording, slices, steps=steps, examples=work.examples, bubble=prepared.bubble,
                cpu=spent, loss=last, difference=_difference(first, got), note=prepared.note,
            )  # fmt: skip
            recordings[name] = recording
            del prepared
    wrong = {name: m.difference for name, m in found.items() if not m.difference <= tolerance}
    if wrong:
        raise failures.refused(
            f"the parameters of {', '.join(wrong)} differ from those of {known.name_of(ways[0])} by"
            f" {max(wrong.values()):.1e} of their largest value, and tolerance={tolerance:g}",
            "fewer steps, a smaller learning rate, or a larger tolerance; a difference that stays"
            " is an error of this package",
        )
    return SideBySide(found, recordings, tolerance, lab.session.connection.emulated)


def _difference(expected: Any, got: Any) -> float:
    """The largest difference of two trees, by leaf relative to its largest value."""
    found = 0.0
    for a, b in zip(jax.tree.leaves(expected), jax.tree.leaves(got), strict=True):
        largest = float(np.max(np.abs(a), initial=0.0)) or 1.0
        off = float(np.max(np.abs(np.asarray(a, np.float64) - b), initial=0.0)) / largest
        found = off if math.isnan(off) else max(found, off)
    return found


_HEADS = (
    "way", "examples/s", "busy", "idle", "bubble by plan", "controllers' CPU/step", "peak memory",
    "loss", "difference",
)  # fmt: skip
