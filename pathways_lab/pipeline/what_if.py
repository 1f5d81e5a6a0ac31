"""``pw.what_if``: a run that was recorded, once more in the simulator, with one thing changed.

Problem: before one buys a faster network, repairs a host or rewrites a schedule, one wants to know
what it would bring.

How: :mod:`pathways_lab.sim.replay` runs the record again on a machine that costs what the
record says, unchanged and changed.  Both are explained as the run itself is
(``lab.timeline.planned``).

Rule for maintainers: a prediction says how far the unchanged replay is from what was measured, and
how far earlier ones were; none is corrected by that.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

from pathways_lab.client.lab import opening
from pathways_lab.client.lab.lab import Lab
from pathways_lab.client.session import failures
from pathways_lab.core.slices.topology import Owned
from pathways_lab.pipeline import balance
from pathways_lab.pipeline.mpmd.step import Step
from pathways_lab.pipeline.schedule import Schedule
from pathways_lab.sim import replay
from pathways_lab.sim.replay import Change, Seen, Where
from pathways_lab.sim.result import Simulated
from pathways_lab.timeline import planned as explained
from pathways_lab.timeline import queries
from pathways_lab.timeline.flow import Flow, Flows, flow_of
from pathways_lab.timeline.log import Recording, Timeline
from pathways_lab.timeline.planned import Planned
from pathways_lab.timeline.records import ENDS, Event, Record, Span, own
from pathways_lab.timeline.text_table import Tabled, TextTable

Program = tuple[tuple[str, tuple[int, ...]], ...]
"""The steps of a program: names of functions, "" for transfers, and the steps that each follows."""


@dataclass(slots=True)
class Prediction:
    """One prediction of a lab.

    about: in words.  program: whose runs are predicted; (): those of a lab that is to be changed.
    seconds: of a run.  since: seconds on the records' clock.
    measured: seconds, once it is known.
    """

    about: str
    program: Program
    seconds: float
    since: float
    measured: float | None = None

    @property
    def error(self) -> float:
        """Predicted against measured: 0.1 is 10% too long."""
        return 0.0 if self.measured is None else self.seconds / self.measured - 1


_told: WeakKeyDictionary[Timeline, list[Prediction]] = WeakKeyDictionary()


def tell(timeline: Timeline, about: str, program: Program, seconds: float) -> Prediction:
    """Remember a prediction of a lab."""
    made = Prediction(about, program, seconds, timeline.clock())
    _told.setdefault(timeline, []).append(made)
    return made


def predictions(timeline: Timeline) -> list[Prediction]:
    """Those that were told of a lab, with what was measured since."""
    known = _told.get(timeline, [])
    open_ = [each for each in known if each.measured is None and each.program]
    took = durations(timeline.with_kept()) if open_ else []
    for each in open_:
        later = [s for what, began, s in took if what == each.program and began > each.since]
        if later:
            each.measured = min(later)
    return known


def durations(records: Iterable[Record]) -> list[tuple[Program, float, float]]:
    """The program of each run that has finished, when it began, and its seconds, from its
    submission to the end of its last computation."""
    flows = Flows()
    began: dict[int, float] = {}
    last: dict[int, float] = {}
    over: list[int] = []
    for r in records:
        flows.add(r)
        if isinstance(r, Span) and r.kind == "gang":
            last[r.run] = max(last.get(r.run, r.end), r.end)
        elif isinstance(r, Event) and r.kind == "submitted":
            began[r.run] = r.time
        elif isinstance(r, Event) and r.kind == "finished":
            over.append(r.run)
    return [
        (program_of(flows.run(run)), began[run], last[run] - began[run])
        for run in over
        if run in began and run in last
    ]


def program_of(flow: Flow) -> Program:
    """The same for each capture of a program; its key is not, for it has the lines of calls."""
    return tuple(("" if stage.transfer else stage.node, stage.after) for stage in flow)


@dataclass(frozen=True, slots=True, repr=False)
class WhatIf(Tabled):
    """A run with something changed; prints as a table of where its time goes, before and then.

    about: the change in words.  measured: the run as it was.
    replayed, changed: the same in the simulator, unchanged and changed, explained as
        ``lab.timeline.planned`` does.
    lead: seconds before its first computation that belong to no cost, and are in all three.
    earlier: predictions of the lab that can be compared by now.
    """

    about: str
    measured: Planned
    replayed: Planned
    changed: Planned
    lead: float
    prediction: Prediction
    earlier: tuple[Prediction, ...] = field(default=())

    @property
    def before(self) -> float:
        """Seconds of the run, replayed unchanged."""
        return self.replayed.actual + self.lead

    @property
    def after(self) -> float:
        """Seconds of the run, as predicted."""
        return self.changed.actual + self.lead

    @property
    def error(self) -> float:
        """The unchanged replay against the run as measured: 0.1 is 10% too long."""
        return self.before / self.measured.actual - 1

    def compare(self, work: Recording | Timeline | Lab, run: int | None = None) -> float:
        """Now it was measured: how far the prediction is off, which later ones say too.

        work, run: as for :func:`what_if`.
        """
        records = settled(work).with_kept()
        self.prediction.measured = explained.planned(records, run_meant(work, records, run)).actual
        return self.prediction.error

    def _table(self) -> TextTable:
        columns = [
            {part.cause: part for part in each.parts()}
            for each in (self.measured, self.replayed, self.changed)
        ]
        causes = list(dict.fromkeys(cause for column in columns for cause in column))

        def cell(column: Mapping[str, Any], cause: str) -> str:
            part = column.get(cause)
            return "" if part is None else f"{part.share:.1%}"

        rows = [
            ("seconds of the run", *(f"{1e3 * s:,.1f} ms" for s in (
                self.measured.actual, self.before, self.after)))
        ]  # fmt: skip
        rows += [(cause, *(cell(column, cause) for column in columns)) for cause in causes]
        heads = ("", "measured", "replayed", f"with {self.about}")
        return TextTable(rows, heads, "<>", self._caption())

    def _caption(self) -> str:
        seen = self.measured.seen
        faster = self.before / self.after if self.after else 1.0
        said = (
            f"run {own(seen.run)} of {seen.program or 'a program'} with {self.about}:"
            f" {1e3 * self.after:,.1f} ms predicted, {faster:.2f} times as fast;"
            f" replayed unchanged it is {self.error:+.1%} off"
        )
        known = [abs(each.error) for each in self.earlier]
        if known:
            said += (
                f"; {len(known)} earlier predictions of this lab were off by"
                f" {statistics.median(known):.1%} in the middle and {max(known):.1%} at worst"
            )
        return said


@failures.at_caller()
def what_if(
    work: int | Recording | Timeline | Lab,
    *,
    run: int | None = None,
    dcn: float = 1.0,
    speed: Mapping[str, float] | None = None,
    without: str | tuple[str, ...] = (),
    schedule: str | Schedule | None = None,
    step: Step | None = None,
) -> WhatIf:
    """Predict a run that was recorded, with something changed: its seconds, and where they go.

    work: a lab, its timeline, a recording of it, or a timeline from a file: the last finished run
        in it that computed.  Or the number of a run of the lab that is open.
    run: the number of another one.
    dcn: how many times as fast the network between islands is: 2 for half the latency and twice
        the bytes per second.
    speed: by name of a function or a host, how many times as fast it computes.
    without: a host, or several, that shall be no slower than the others at the same functions.
    schedule: of *step*, the ``pw.mpmd`` step whose run it is: another one.

    >>> pw.what_if(lab, dcn=4)                                               # doctest: +SKIP
    >>> pw.what_if(recording, speed={"backward_p1": 2})                      # doctest: +SKIP
    >>> pw.what_if(lab, step=step, schedule="zero-bubble")                   # doctest: +SKIP

    The simulator replays what was recorded: times of functions, transfers, dispatch.  The result
    says how far the unchanged replay is from what was measured; later ones say how good it was,
    once the changed program has run, or ``compare`` was called.

    Raises PathwaysError where nothing is recorded to replay, or nothing is changed; KeyError for
    a number that no run has.
    """
    if not (isinstance(dcn, int | float) and 0 < dcn < math.inf):
        raise failures.refused(f"dcn={dcn!r} makes no network faster or slower", "dcn=2")
    changes = {
        **({"dcn": f"dcn={dcn:g}"} if dcn != 1 else {}),
        **({"speed": f"speed={dict(speed)!r}"} if speed else {}),
        **({"without": f"without={without!r}"} if without else {}),
        **({"schedule": f"schedule={_named(schedule)!r}"} if schedule is not None else {}),
    }
    if not changes:
        raise failures.refused("what_if changes nothing", "for example pw.what_if(lab, dcn=2)")
    source = opening.current() if isinstance(work, int) else work
    timeline = settled(source)
    records = timeline.with_kept()
    chosen = run_meant(source, records, work if isinstance(work, int) else run)
    try:
        seen = replay.seen(records, chosen)
        change = Change(dcn, _of_run(seen, speed or {}), _hosts(seen, without))
        before, then = replay.replay(seen), replay.replay(seen, change)
    except (KeyError, ValueError) as error:
        raise failures.refused(str(error.args[0]), "lab.timeline.runs lists runs") from None
    program: Program = ()
    if schedule is not None:
        then, program = _otherwise(seen, step, schedule, change)
    costs = before.machine.costs
    measured, lead = explained.planned(records, chosen), replay.lead(seen, costs)
    changed = explain(then)
    about = ", ".join(changes.values())
    earlier = tuple(each for each in predictions(timeline) if each.measured is not None)
    told = tell(timeline, about, program if len(changes) == 1 else (), changed.actual + lead)
    return WhatIf(about, measured, explain(before), changed, lead, told, earlier)


def explain(found: Simulated) -> Planned:
    """Where the time of the last simulated run went."""
    run = max(r.run for r in found.records if isinstance(r, Span) and r.kind == "gang")
    return explained.planned(found.records, run)


def _named(schedule: str | Schedule) -> str:
    return schedule if isinstance(schedule, str) else schedule.name


def settled(work: Any) -> Timeline:
    """The timeline, once the last records of runs are there."""
    recording = work
    if isinstance(work, Timeline | Lab):
        timeline = work if isinstance(work, Timeline) else work.timeline
        recording = timeline.recording()
        recording.start = 0.0
    if not isinstance(recording, Recording):
        raise failures.refused(
            f"{work!r:.80} is no record of runs",
            "a lab, its timeline, a recording (with lab.timeline.recording() as r: ...), a number",
        )
    recording.settle(runs=1)
    return recording.timeline


def run_meant(work: Any, records: tuple[Record, ...], run: int | None = None) -> int:
    """The run that is meant: the last one that has computed and is over."""
    inside = work.records if isinstance(work, Recording) else records
    gangs = {r.run for r in inside if isinstance(r, Span) and r.kind == "gang"}
    over = [r.run for r in records if isinstance(r, Event) and r.kind in ENDS]
    done = [number for number in over if number in gangs]
    if run is None and not done:
        raise failures.refused(
            "no run is recorded that is over", "jax.block_until_ready(...) before"
        )
    return done[-1] if run is None else queries.run_meant(run, gangs, "gang")


def _of_run(seen: Seen, speed: Mapping[str, float]) -> dict[str, float]:
    known = {span.node for spans in seen.gangs.values() for span in spans} | set(seen.hosts)
    for name, factor in speed.items():
        if name not in known or not factor > 0:
            raise ValueError(
                f"speed={{{name!r}: {factor!r}}} is not a number above 0 for a function or a host"
                f" of the run: there are {', '.join(sorted(known))}"
            )
    return dict(speed)


def _hosts(seen: Seen, without: str | tuple[str, ...]) -> tuple[str, ...]:
    named = (without,) if isinstance(without, str) else tuple(without)
    found = [host for host in seen.hosts for name in named if name in (host, host.split("/")[-1])]
    if len(found) < len(named):
        raise ValueError(f"without={without!r} names no host; there are {', '.join(seen.hosts)}")
    return tuple(found)


# --- another schedule -------------------------------------------------------------------------


def _otherwise(
    seen: Seen, step: Step | None, schedule: str | Schedule, change: Change
) -> tuple[Simulated, Program]:
    """The run in another order, and its program."""
    if step is None:
        raise failures.refused(
            f"schedule={_named(schedule)!r} is of a step, and what_if does not know which",
            "pw.what_if(lab, step=step, schedule=...), with the step that made the run",
        )
    args, kwargs = step.types
    other = step.otherwise(schedule=schedule)
    captured = other.capture(*args, **kwargs)
    assert captured.prepared is not None
    at = {binding.slice: binding.devices for binding in captured.bindings}
    plan = captured.prepared.plan
    found = replay.another(seen, plan, at, seconds(seen, other, change), change)
    return found, program_of(flow_of(plan))


def seconds(seen: Seen, step: Step, change: Change) -> dict[Where, float]:
    """The seconds that the functions of a step compute, from a run of the same parts.

    Where only one of them has backward work in two halves, their seconds are added, or go to both
    by the operations of each.
    """
    known = replay.means(seen, change)
    found = dict(known)
    halves: dict[tuple[str, tuple[Owned, ...]], dict[str, float]] = {}
    for node in step.nodes:
        fragment = node.fragment
        if fragment.kind in ("backward", "weight"):
            types = [ref.type.struct for ref in node.inputs]
            of = halves.setdefault((fragment.part, fragment.slice.binding.devices), {})
            of[fragment.kind] = balance.operations(node.function.function, *types)[0]
    for (part, where), of in halves.items():
        keys = {kind: (f"{kind}_{part}", where) for kind in ("backward", "weight")}
        both = sum(known.get(key, 0.0) for key in keys.values())
        whole = sum(of.values())
        if both and whole and {kind for kind in keys if keys[kind] in known} != of.keys():
            found |= {keys[kind]: both * operations / whole for kind, operations in of.items()}
    return found
