"""A benchmark's result: a table to read, JSON to keep, a figure to show.

Rule for maintainers: the table is Markdown, so that it can be recorded as it is
printed.  What is missing is part of the result.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.harness import machine
from benchmarks.harness.numbers import brief, ratio, seconds, spread
from benchmarks.harness.rounds import Measured


@dataclass
class Report:
    """What one benchmark measured.

    name: of the files.  title: of the table and the figure.  unit: what the
    times are seconds of, for example ``"computation"``.  reference: the system
    to whose speed all are compared.  facts: numbers that belong to it, also for
    readers by machine.  notes: lines below the table.  verdicts: on what was wanted.
    """

    name: str
    title: str
    unit: str
    measured: Measured
    reference: str
    facts: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    verdicts: list[Verdict] = field(default_factory=list)

    def table(self, rate: Callable[[float], str] | None = None) -> str:
        """The table in Markdown.

        rate: seconds per unit -> the text of the column of speeds (default:
        units per second).  A ratio above 1 says that the system of this row is
        slower than the reference.
        """
        speed = rate or (lambda per: f"{brief(1 / per)}/s")
        head = ("case", "system", f"time per {self.unit}", "quartiles", "speed", "n")
        rows = [(*head, f"time / {self.reference}")]
        for case, times in self.measured.times.items():
            base = times.get(self.reference, [])
            for system, samples in times.items():
                of = spread(samples)
                between = f"{seconds(of.low)} .. {seconds(of.high)}"
                against = str(ratio(samples, base)) if base and system != self.reference else ""
                rows.append(
                    (
                        case, system, seconds(of.median), between,
                        speed(of.median), str(of.count), against,
                    )
                )  # fmt: skip
        lines = [markdown(rows)]
        lines += [f"Without {name}: {why}." for name, why in self.measured.missing.items()]
        return "\n".join([*lines, *self.notes])

    def as_json(self) -> dict[str, Any]:
        """Everything, samples included."""
        return {
            "benchmark": self.name,
            "title": self.title,
            "command": machine.command(),
            "began": self.measured.began,
            "machine": machine.machine(),
            "load": {"before": self.measured.load, "after": machine.load()},
            "busy_cores_between_rounds": self.measured.busy,
            "unit": f"seconds per {self.unit}",
            "times": self.measured.times,
            "missing": self.measured.missing,
            "facts": self.facts,
            "notes": self.notes,
            "verdicts": [asdict(verdict) for verdict in self.verdicts],
        }


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether what was wanted is so.

    what: the target.  wanted, measured: in words, with units.  met: None when not decided.
    """

    what: str
    wanted: str
    measured: str
    met: bool | None

    @property
    def word(self) -> str:
        """To be seen from afar where it is missed."""
        return {True: "yes", False: "**no**", None: "not decided"}[self.met]


@dataclass(frozen=True, slots=True)
class Claim:
    """That one measurement is so many times as fast as another, or faster.

    slow, fast: (case, system).  factor: how many times.  text: how to say it.
    """

    text: str
    slow: tuple[str, str]
    fast: tuple[str, str]
    factor: float


def judged(claims: Sequence[Claim], measured: Measured) -> list[Verdict]:
    """What was measured of every claim; claims without samples are left out."""
    verdicts = []
    for claim in claims:
        slow, fast = measured.of(*claim.slow), measured.of(*claim.fast)
        if slow and fast:
            of, wanted = ratio(slow, fast), f"at least {brief(claim.factor)} x"
            verdicts.append(Verdict(claim.text, wanted, f"{of} x", of.value >= claim.factor))
    return verdicts


def verdict_table(verdicts: Sequence[Verdict]) -> str:
    """Every target, what is wanted and what was measured; nothing where nothing is wanted."""
    if not verdicts:
        return ""
    rows = [("target", "wanted", "measured", "met")]
    rows += [(each.what, each.wanted, each.measured, each.word) for each in verdicts]
    return markdown(rows)


def matrix(measured: Measured, heads: Mapping[str, str]) -> str:
    """Systems down, cases across: median and quartiles of the time per unit.

    heads: case -> head of its column.
    """
    names = sorted({name for case in heads for name in measured.times[case]})
    rows = [("system", *heads.values())]
    for name in names:
        cells = []
        for case in heads:
            samples = measured.of(case, name)
            of = spread(samples) if samples else None
            cells.append(
                f"{seconds(of.median)} ({seconds(of.low)} .. {seconds(of.high)})" if of else "-"
            )
        rows.append((name, *cells))
    return markdown(rows)


def grid(measured: Measured, cases: Mapping[str, str], reference: str) -> str:
    """Cases down, systems across: median, and how many times that of the *reference*.

    cases: case -> head of its row.
    """
    names = sorted({name for case in cases for name in measured.times[case]})
    names.sort(key=lambda name: name != reference)
    rows = [("", *names)]
    for case, head in cases.items():
        base, cells = measured.of(case, reference), []
        for name in names:
            samples = measured.of(case, name)
            cell = seconds(spread(samples).median) if samples else "-"
            if samples and base and name != reference:
                cell += f", {ratio(samples, base)}"
            cells.append(cell)
        rows.append((head, *cells))
    return markdown(rows)


def publish(report: Report, folder: Path, text: str | None = None, svg: str | None = None) -> None:
    """Print a report and leave its JSON and figure in *folder*.

    text: instead of the table.  svg: instead of the figure of all samples.
    """
    from benchmarks.harness.figure import dots

    folder.mkdir(parents=True, exist_ok=True)
    facts = report.as_json()
    (folder / f"{report.name}.json").write_text(json.dumps(facts, indent=1) + "\n")
    drawn = svg or dots(report.title, report.measured.times, f"time per {report.unit}")
    (folder / f"{report.name}.svg").write_text(drawn)
    print(f"\n## {report.title}\n")
    print(text or report.table())
    print(f"\n{conditions(facts)}")
    print(f"JSON and figure: {folder.name}/{report.name}.json, .svg", flush=True)


def conditions(facts: Mapping[str, Any]) -> str:
    """One line: on what, at what load, by which command."""
    of = facts["machine"]
    load = " -> ".join("/".join(map(str, facts["load"][when])) for when in ("before", "after"))
    return (
        f"{of['processor']}, {of['cores']} cores, {of['memory_gib']} GiB, {of['system']}, "
        f"Python {of['python']}, jax {of['jax']}, distributed {of['distributed']}, "
        f"commit {of['commit']}; load {load or 'unknown'}; "
        f"{facts['busy_cores_between_rounds']:.2f} cores busy between rounds; "
        f"{facts['began']}; `{facts['command']}`"
    )


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; the first row is its head."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |"
        for row in rows
    ]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(lines)
