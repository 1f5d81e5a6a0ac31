"""``pw.search``: the best way to run a training step, predicted for many, measured for a few.

Problem: the best schedule, number of microbatches and place of each part depend on times that
nobody knows before they are measured, and there are more ways than one can try.

How: a few ways are run, so that each fragment is measured once wherever it may run; the simulator
gives the others from that (:mod:`pathways_lab.sim.replay`).  The default and the ways with the
least predicted time are then run in turn.

Rule for maintainers: nothing is applied that was not measured beside the default.

Paper: section 5.3.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from pathways_lab.client.functions import array_types
from pathways_lab.client.functions.array_types import type_of
from pathways_lab.client.lab import hooks, slice_request
from pathways_lab.client.lab.devices import Slice
from pathways_lab.client.lab.lab import Lab
from pathways_lab.client.program.program import CapturedProgram
from pathways_lab.client.session import failures
from pathways_lab.core.errors import PathwaysError
from pathways_lab.core.slices.topology import Owned
from pathways_lab.pipeline.candidates import OVER, Layout, Way, ways
from pathways_lab.pipeline.mpmd.step import Step
from pathways_lab.pipeline.schedules import Named, splits
from pathways_lab.pipeline.what_if import (
    Prediction,
    durations,
    program_of,
    run_meant,
    settled,
    tell,
)
from pathways_lab.runtime.arrays import element_of
from pathways_lab.sim import replay
from pathways_lab.sim.replay import UNCHANGED, Seen, Where
from pathways_lab.timeline.flow import flow_of
from pathways_lab.timeline.log import Recording
from pathways_lab.timeline.text_table import Tabled, TextTable

RUNS = 2
"""Measured runs of a way from which others are predicted, after the one that compiles it."""
ROUNDS = 4
"""Runs of each of the last ways, in turn."""
LAYOUTS = 3
"""Ways to place the parts that are looked at closer."""
EXPLORING = 0.6
"""The share of the time after which no way is looked at any more, and the best are run."""

Group = tuple[int | None, bool]
"""Ways with the same fragments: microbatches, and whether backward work is in two halves."""


Like = tuple[str, int]
"""The island of devices, and how many they are."""


@dataclass(slots=True, eq=False)
class Candidate:
    """A way to run the step.

    predicted, measured: seconds of a run; None where there was no time for it.
    memory: bytes of the fullest device, but for what functions need beside inputs and outputs.
    calibrated: it was run so that others could be predicted, and so was its own time.
    why: it was refused, or does not fit.
    """

    way: Way
    step: Step
    predicted: float | None = None
    memory: int = 0
    calibrated: bool = False
    why: str = ""
    compiled: bool = False
    times: list[float] = field(default_factory=list)
    prediction: Prediction | None = None

    @property
    def measured(self) -> float | None:
        """The least of its runs: what else a machine does makes them longer, and never shorter."""
        return min(self.times, default=None)

    @property
    def error(self) -> float | None:
        """Predicted against measured: 0.1 is 10% too long."""
        if self.predicted is None or not self.times:
            return None
        return self.predicted / min(self.times) - 1


@dataclass(frozen=True, slots=True, repr=False)
class Search(Tabled):
    """Ways to run a step, the measured ones first; prints as a table.

    default: the way of the step that was given.  unseen: ways for which there was no time.
    """

    default: Candidate
    candidates: tuple[Candidate, ...]
    unseen: int

    @property
    def winner(self) -> Candidate:
        """The least measured time; the default where no other was faster."""
        measured = [c for c in self.candidates if c.times]
        return min([self.default, *measured], key=lambda c: c.measured or float("inf"))

    @property
    def best(self) -> Step:
        """The step in the best way, to be called like the one that was given."""
        return self.winner.step

    def _table(self) -> TextTable:
        rows = []
        shown = [c for c in self.candidates if not c.why]
        for c in shown[:20]:
            off = "" if c.error is None else f"{c.error:+.1%}"
            marks = ["default"] * (c is self.default) + ["best"] * (c is self.winner)
            marks += ["calibrates"] * c.calibrated
            rows.append(
                (
                    str(c.way), _where(c.way.layout), _ms(c.predicted), _ms(c.measured), off,
                    f"{c.memory / 2**20:,.1f} MiB" if c.memory else "", ", ".join(marks),
                )
            )  # fmt: skip
        heads = ("way", "parts", "predicted", "measured", "off", "memory", "")
        return TextTable(rows, heads, "<<>>>><", self._caption(len(shown)))

    def _caption(self, shown: int) -> str:
        before, now = self.default.measured, self.winner.measured
        faster = (
            f"{before / now:.2f} times as fast as the default" if before and now else "none run"
        )
        out = sum(bool(c.why) for c in self.candidates)
        said = f"{shown} ways, and {out} refused, too large for the memory or like another"
        said += f", {self.unseen} without time" * bool(self.unseen)
        return f"best: {self.winner.way}, {faster}; {said}"


def _ms(seconds: float | None) -> str:
    return "" if seconds is None else f"{1e3 * seconds:,.1f} ms"


def _where(layout: Layout) -> str:
    """Parts by slice: ``a b | c``."""
    groups = itertools.groupby(layout, key=lambda part: part[1])
    return ", ".join(f"{on.name}: {' '.join(part for part, _ in of)}" for on, of in groups)


@failures.at_caller()
def search(
    step: Step,
    lab: Lab,
    *,
    over: Collection[str] = ("schedule", "microbatches"),
    seconds: float = 60.0,
    few: int = 3,
    progress: bool = True,
) -> Search:
    """Find the best way to run a training step: predicted for many, measured for a few.

    step: of ``pw.mpmd.jit``; called, placed or captured before, so that its types are known.
    over: of ``"schedule"``; ``"microbatches"``, where the step's function has a parameter of this
        name with a default; ``"cut"``, which neighbouring parts have a slice in common; and
        ``"placement"``, which slice has which of them.
    seconds: after which nothing more is looked at; the best predicted way is still run beside the
        default.  Ctrl-C ends it at once, with the best that was measured until then.
    few: how many of the best predicted ways are run beside the default.
    progress: one line that says what is done.

    >>> found = pw.search(step, lab, over=("schedule", "placement"))         # doctest: +SKIP
    >>> step = found.best                                                    # doctest: +SKIP

    Runs get zeros for arguments, of the same types; the step's own state is not touched, and both
    have to fit.  A time is that of one run that nothing follows, from its submission to the end of
    its last computation.

    Raises PathwaysError for a step whose types are not known, and for what cannot be searched.
    """
    if not isinstance(step, Step):
        raise failures.refused(
            f"{step!r:.80} is no step of pw.mpmd.jit", "step = pw.mpmd.jit(function, ...)"
        )
    if isinstance(over, str) or not over or not set(over) <= set(OVER):
        raise failures.refused(
            f"over={over!r} is not a tuple of {', '.join(map(repr, OVER))}",
            'over=("schedule", "placement")',
        )
    seconds, few = slice_request.seconds("seconds", seconds), slice_request.count("few", few)
    return _Search(step, lab, over, seconds, few, progress).found()


class _Search:
    def __init__(
        self, step: Step, lab: Lab, over: Collection[str], seconds: float, few: int, progress: bool
    ) -> None:
        self._lab, self._few = lab, few
        self._types = step.types
        self._begun = time.monotonic()
        self._seconds = seconds
        self._tell = hooks.line() if progress else lambda text: None
        every = ways(step, over)
        self.default = Candidate(every[0], step)
        self._turns = step.partition(*self._types[0], **self._types[1]).microbatches
        self._all = [self.default]
        self._left = every[1:]
        self._costs: dict[Group, dict[Where, list[float]]] = {}
        self._seen: dict[Group, tuple[float, Seen]] = {}
        self._orders = {self._order(self.default)}

    def found(self) -> Search:
        """All that there was time for."""
        try:
            self._measure(self.default, RUNS)
            self.default.calibrated = True
            self._learn_places()
            for group in dict.fromkeys(map(_group, [self.default.way, *self._left])):
                self._look_at(group)
            self._finals()
        except KeyboardInterrupt:
            self._tell("search: interrupted; the best so far is kept")
        else:
            self._tell(f"search: over after {time.monotonic() - self._begun:.0f} s")
        order = sorted(self._all, key=_rank)
        return Search(self.default, tuple(order), len(self._left))

    def _late(self, share: float = 1.0) -> bool:
        return time.monotonic() - self._begun > share * self._seconds

    # --- which ways ------------------------------------------------------------------------

    def _learn_places(self) -> None:
        """Run the default in other places until each part was everywhere; keep the best places."""
        own = self.default.way
        others = [w for w in self._left if (w.schedule, w.microbatches) == _kind(own)]
        todo = {need for way in others for need in _needs(way)} - set(_needs(own))
        while todo and others and not self._late(EXPLORING / 2):
            way = max(others, key=lambda way: len(todo & set(_needs(way))))
            others.remove(way)
            self._probe(way)
            todo -= set(_needs(way))
        layouts = {way.layout for way in self._left if way.layout != own.layout}
        best = sorted(layouts, key=lambda layout: self._load(layout))[:LAYOUTS]
        kept = {own.layout, *best}
        self._left = [way for way in self._left if way.layout in kept]

    def _load(self, layout: Layout) -> float:
        """Seconds of the busiest slice, by what is known of the default's fragments."""
        known = self._known(_group(self.default.way), [on for _, on in layout])
        load: dict[Slice, float] = {}
        for part, on in layout:
            for kind in ("forward", "backward", "weight"):
                took = known.get((f"{kind}_{part}", on.binding.devices), 0.0)
                load[on] = load.get(on, 0.0) + took
        return max(load.values())

    def _look_at(self, group: Group) -> None:
        """Predict all ways of a group, from one that is run if none was."""
        mine = [way for way in self._left if _group(way) == group]
        if group not in self._seen:
            while mine and group not in self._seen and not self._late(EXPLORING):
                self._probe(mine.pop(0))
        mine = [way for way in self._left if _group(way) == group]
        if group in self._seen:
            for c in [c for c in self._all if _group(c.way) == group and not c.why]:
                self._predict(c)
            for way in mine:
                if self._late(EXPLORING):
                    break
                self._predict(self._made(way))

    def _finals(self) -> None:
        """The default and the best predicted ways, in turn."""
        ready = [c for c in self._all if c.predicted is not None and not c.why]
        best = sorted(ready, key=lambda c: c.predicted or 0.0)[: self._few]
        last = list(dict.fromkeys([self.default, *best]))
        for place, c in enumerate(last):
            # The best predicted way is tried however late it is: it is what all was for.
            if place > 1 and self._late(0.9):
                break
            c.times.clear()
            self._try(c, 0)
        ran = [c for c in last if c.compiled and not c.why]
        for number in range(ROUNDS):
            for c in ran:
                if number and self._late():
                    return
                self._try(c, 1)

    # --- one way ----------------------------------------------------------------------------

    def _made(self, way: Way) -> Candidate:
        """A way as a step; those that are refused say why."""
        self._left.remove(way)
        step, made = self.default.step, Candidate(way, self.default.step)
        self._all.append(made)
        more = way.microbatches if way.microbatches != self.default.way.microbatches else None
        try:
            made.step = step.otherwise(
                on=dict(way.layout), schedule=way.schedule, microbatches=more
            )
            order = self._order(made)
        except Exception as error:  # user code, too, may refuse a number of microbatches
            made.why = str(error).partition("\n")[0]
            return made
        if order in self._orders:
            made.why = "is the same as another way"
        self._orders.add(order)
        return made

    def _order(self, c: Candidate) -> Any:
        """Equal for ways that do the same in the same order."""
        found = c.step.partition(*self._types[0], **self._types[1])
        order = found.schedule.order if found.schedule is not None else c.way.schedule
        return c.way.layout, c.way.microbatches, order

    def _probe(self, way: Way) -> None:
        made = self._made(way)
        if not made.why and self._fits(made):
            self._try(made, RUNS)
            made.calibrated = not made.why

    def _captured(self, c: Candidate) -> CapturedProgram:
        return c.step.capture(*self._types[0], **self._types[1])

    def _fits(self, c: Candidate) -> bool:
        used = self._captured(c).memory()
        c.memory = max(used.values(), default=0)
        hosts = next(iter(self._seen.values()))[1].hosts if self._seen else {}
        full = [d for d, nbytes in used.items() if d[0] in hosts and nbytes > hosts[d[0]][2]]
        if full:
            c.why = f"needs {used[full[0]]:,} bytes on {full[0][0]} device {full[0][1]}"
        return not full

    def _predict(self, c: Candidate) -> None:
        if c.why or not self._fits(c):
            return
        self._tell(f"search: predicts {c.way}")
        captured = self._captured(c)
        assert captured.prepared is not None
        plan, at = captured.prepared.plan, {b.slice: b.devices for b in captured.bindings}
        group = _group(c.way)
        _, run = self._seen[group]
        known = self._known(group, c.step.on.values())
        simulated = replay.another(run, plan, at, known)
        _, _, took = durations(simulated.records)[-1]
        c.predicted = took + replay.lead(run, simulated.machine.costs)
        c.prediction = tell(
            self._lab.timeline, f"search: {c.way}", program_of(flow_of(plan)), c.predicted
        )

    def _known(self, group: Group, places: Iterable[Slice]) -> dict[Where, float]:
        """Seconds of the fragments of a group, also where they did not run.

        Devices like those where they ran take as long; others as many times as long as they do for
        the forward work of the part by the fragments of the default, or of other parts.
        """
        known = self._costs.get(group, {})
        found = {where: statistics.median(took) for where, took in known.items()}
        usual = self._alike(_group(self.default.way))
        alike = self._alike(group)
        for on in places:
            devices = on.binding.devices
            here = _like(devices)
            for (name, there), took in alike.items():
                if here == there or (name, here) not in alike:
                    part = f"forward_{name.partition('_')[2]}"
                    factor = _factor(usual, part, there, here)
                    found.setdefault((name, devices), took * factor)
        return found

    def _alike(self, group: Group) -> dict[tuple[str, Like], float]:
        """Seconds of its fragments by kind of devices."""
        known = self._costs.get(group, {})
        return {
            (name, _like(devices)): statistics.median(took)
            for (name, devices), took in known.items()
        }

    def _try(self, c: Candidate, runs: int) -> None:
        """Measure a way that may fail; the default may not."""
        try:
            self._measure(c, runs)
        except PathwaysError as error:
            if c is self.default:
                raise
            c.why, c.times = str(error).partition("\n")[0], []

    def _measure(self, c: Candidate, runs: int) -> None:
        """Run it; the first run of all is the one for which it is compiled, and does not count."""
        args, kwargs = self._types
        for number in range(-(not c.compiled), runs):
            self._tell(f"search: {'runs' if number >= 0 else 'compiles'} {c.way}")
            placed = c.step.place(*jax.tree.map(_zeros, args), **jax.tree.map(_zeros, kwargs))
            jax.block_until_ready(placed)
            with self._lab.timeline.recording() as recording:
                jax.block_until_ready(c.step(*placed, **jax.tree.map(_zeros, kwargs)))
            c.compiled = True
            if number >= 0:
                self._note(c, recording)

    def _note(self, c: Candidate, recording: Recording) -> None:
        records = settled(recording).with_kept()
        run = replay.seen(records, run_meant(recording, records))
        took = max(s.end for spans in run.gangs.values() for s in spans) - run.submitted
        c.times.append(took)
        group = _group(c.way)
        if group not in self._seen or took < self._seen[group][0]:
            self._seen[group] = took, run
        known = self._costs.setdefault(group, {})
        for where, seconds in replay.means(run, UNCHANGED).items():
            known.setdefault(where, []).append(seconds)


def _group(way: Way) -> Group:
    return way.microbatches, way.schedule is not None and splits(way.schedule)


def _like(devices: Sequence[Owned]) -> Like:
    """Equal for as many devices of one island."""
    return devices[0][0].rpartition("/")[0], len(devices)


def _factor(usual: Mapping[tuple[str, Like], float], part: str, there: Like, here: Like) -> float:
    """How many times as long the forward work of a part takes here, or that of other parts."""
    names = {name for name, _ in usual if name.startswith("forward_")}
    known = {
        name: usual[name, here] / usual[name, there]
        for name in names
        if (name, here) in usual and usual.get((name, there))
    }
    return known.get(part, statistics.fmean(known.values()) if known else 1.0)


def _kind(way: Way) -> tuple[Named | None, int | None]:
    return way.schedule, way.microbatches


def _needs(way: Way) -> list[tuple[str, Like]]:
    """Parts, and the kind of devices on which each is."""
    return [(part, _like(on.binding.devices)) for part, on in way.layout]


def _rank(c: Candidate) -> tuple[bool, bool, float]:
    known = c.measured if c.times else c.predicted
    return bool(c.why), not c.times, known or float("inf")


def _zeros(leaf: Any) -> Any:
    """An array for its type; all else as it is."""
    if not isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf
    kind = type_of(leaf)
    element = element_of(kind.dtype)
    data = np.zeros((*kind.shape, *element.trailing), element.dtype)
    return array_types.from_bytes(data, kind.dtype)
