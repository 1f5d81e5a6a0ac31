"""The same picture as text: for terminals, screen readers and saved notebooks.

Problem: a canvas says nothing to a screen reader, and plain IPython has no
canvas.

Rule for maintainers: pure functions from a scene; a screenful at most.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from pathways_lab.core.memory.holdings import size
from pathways_lab.notebook.kernel.line_index import source
from pathways_lab.notebook.scene.advice import advice, lined
from pathways_lab.notebook.scene.awaited import SAME, Made, ahead, maker, sources, users, wait_at
from pathways_lab.notebook.scene.duration import duration
from pathways_lab.notebook.scene.gang_number import NOBODY, number, parts
from pathways_lab.notebook.scene.row_layout import short
from pathways_lab.notebook.scene.scene import MARKS, UNKNOWN, WAITS, Scene
from pathways_lab.notebook.scene.spent import by_device, percents, spent
from pathways_lab.timeline.bars import GANG, Bar
from pathways_lab.timeline.compiling import Making
from pathways_lab.timeline.gangs import Gang, GangKey
from pathways_lab.timeline.machine import Lane
from pathways_lab.timeline.records import Span, own
from pathways_lab.timeline.text_table import TextTable
from pathways_lab.timeline.waits import (
    COMPILE,
    DISPATCH,
    INPUT,
    MEMORY,
    ORDER,
    REPORT,
    TRANSFER,
    TURN,
)

MOST_LINES = 40
"""Devices listed one by one at most; beyond it hosts are listed."""

MOST = 0.5
"""Share of a wait from which on it is told what that was itself for."""

APART = 1e-3
"""Seconds by which hosts may start a gang one after the other without a word."""

NAMED, ARROWS = 5, 32
"""Computations before and after one that its card names, and to which arrows go, at most."""


def merged_note(resolution: float) -> str:
    """Said where bars stand for more than one gang.  resolution: seconds."""
    return f"bars closer than {duration(resolution)} are drawn as one"


def lead_note(seconds: float) -> str:
    """Said where the time before the first computation is left out."""
    return f"{duration(seconds)} before the first computation are not shown"


def nothing(scene: Scene) -> str:
    """Why there is no gang to be shown; "" when there is one."""
    if scene.started:
        return ""
    if making := scene.compiling.now():
        return f"hosts compile {making.name} before the first gang"
    if scene.earlier is None:
        return "waiting for the first gang"
    return f"no gang yet: the last one ended {duration(scene.earlier)} before this picture begins"


def shares(scene: Scene, now: float) -> str:
    """The share of what is drawn in which devices computed, and that of dispatch."""
    time = spent(scene, *scene.elapsed(now))[""]
    busy, dispatch = 100 * time.busy, 100 * time.share(DISPATCH)
    few = int(dispatch < 10)
    return f"busy {busy:.0f} %, dispatch {dispatch:.{few}f} %" if time.whole else ""


def summary(scene: Scene, now: float, title: str) -> str:
    """One line: what a person who cannot see the picture needs first."""
    machine = scene.machine
    if not machine.islands:
        return f"{title}: waiting for the first host"
    devices = len(machine.lanes)
    words = [
        f"{title}: {len(machine.islands)} island{'s' * (len(machine.islands) != 1)}, "
        f"{devices} device{'s' * (devices != 1)}"
    ]
    if not scene.started:
        words.append(nothing(scene))
        return ", ".join(words)
    for island in machine.islands:
        order = scene.gangs.order(island)
        gone = scene.gangs.gone.get(island, 0)
        done, known = gone + sum(gang.counted for gang in order), scene.gangs.known(island)
        words.append(f"{island} {done} of {known} gangs done")
    lost = [host.name for host in machine.hosts.values() if host.lost]
    if lost:
        words.append(f"lost: {', '.join(lost)}")
    return ", ".join(words)


def table(scene: Scene, now: float, title: str) -> str:
    """A table of devices: what they computed, how much of the time, and what last."""
    lines = [summary(scene, now, title)]
    lanes = scene.machine.lanes
    if not lanes:
        return lines[0]
    start, end = scene.elapsed(now)
    shares = by_device(scene, start, end)
    rows: list[tuple[str, ...]] = []
    grouped: dict[tuple[str, ...], list[Lane]] = {}
    for lane in lanes:
        device = str(lane.device) if len(lanes) <= MOST_LINES else "all"
        grouped.setdefault((lane.island, short(lane.host), device), []).append(lane)
    for names, group in grouped.items():
        share = sum(sum(shares[lane].values()) for lane in group if lane in shares)
        what = next((scene.recent[lane] for lane in group if lane in scene.recent), None)
        last = f"{what.node or 'several'} of {what.program or 'several programs'}" if what else "-"
        rows.append((*names, f"{100 * share / len(group):.0f} %", last))
    heads = ("island", "host", "device", "busy", "last computation")
    lines += ["  " + line for line in TextTable(rows[:MOST_LINES], heads, "<<<><").lines()]
    if len(rows) > MOST_LINES:
        lines.append(f"  ... and {len(rows) - MOST_LINES} more hosts")
    lines.append(f"  (busy: share of {end - start:.2f} s; transfers do not count)")
    if said := advice(scene, now):
        lines.append(f"  {said}")
    return "\n".join(lines)


def about_stretch(scene: Scene, start: float, end: float) -> tuple[tuple[str, str], ...]:
    """Sums of what is drawn between two moments (seconds on the axis): ``(label, text)``."""
    bars, held = scene.computed.seconds(start, end)
    arrivals = (held > 0) & (bars["bottom"] - bars["top"] < 0.5)
    arrived = int(bars["count"][arrivals].sum())
    time = spent(scene, start, end)[""]
    busy, waited, nothing = percents(time.busy, time.share(*MARKS), time.nothing)
    return (
        ("", f"{start:.3f} s to {end:.3f} s"),
        ("computed", f"{busy} %" + _parts(time.computed, time.whole)),
        ("waited", f"{waited} %" + _parts(time.waited, time.whole)),
        ("nothing to do", f"{nothing} %"),
        ("transfers", f"{arrived:,} to a device" if arrived else ""),
        ("shares", f"of the time of {round(time.whole / (end - start)):,} devices"),
    )


def _parts(seconds: dict[str, float], whole: float) -> str:
    """``": fwd 20 %, bwd 10 %"`` of so many seconds, the largest first."""
    largest = sorted(seconds, key=lambda name: -seconds[name])
    shares = [f"{name} {100 * seconds[name] / whole:.0f} %" for name in largest if seconds[name]]
    return ": " * bool(shares) + ", ".join(shares)


Links = tuple[tuple[str, tuple[tuple[str, float], ...]], ...]
"""By label of a fact, the gangs that its text begins with, separated by commas: names, numbers."""


class Card(NamedTuple):
    """The known facts about a mark, ``(label, text)``, and its line and its function as records
    have them.

    arrows: pairs of gangs by their numbers: the results of the first are inputs of the second, or
    the second waited for the first.
    """

    facts: tuple[tuple[str, str], ...]
    line: str = ""
    node: str = ""
    links: Links = ()
    arrows: tuple[tuple[float, float], ...] = ()


def card(scene: Scene, gang: float) -> Card:
    """The facts about the gang or the transfer with a number, while they are remembered."""
    run, step = parts(gang)
    known = scene.gangs.by_key.items()
    if found := next((g for (r, s), g in known if s == step and own(r) == run), None):
        return _about_gang(scene, found)
    runs = [seen.transfers for key, seen in scene.runs.items() if own(key) == run]
    if arrived := [span for transfers in runs for span in transfers if span.step == step]:
        return _about_transfer(scene, arrived)
    for bar in reversed(scene.computed.bars.items):  # all that is left of a run that has gone
        if bar.step == step and own(bar.run) == run:
            start, end = bar.start - scene.origin, bar.end - scene.origin
            return Card((*_heading(bar), ("from", f"{start:.4f} s to {end:.4f} s")), bar.line)
    return Card((("computation", "the record does not have it any more, or not yet"),))


def compile_card(making: Making) -> Card:
    """The facts about a function that hosts make; the head has the time."""
    facts = ("", f"hosts compile {making.name}"), ("line", source(making.line) or "unknown")
    return Card(facts, making.line, making.name)


def _heading(found: Gang | Span | Bar) -> list[tuple[str, str]]:
    return [
        ("", f"{found.node} of {found.program}"),
        ("line", source(found.line) or "unknown"),
        ("run", f"{own(found.run)} of {found.client}, no. {found.step} of its program"),
    ]


def wait_card(scene: Scene, lane: Lane, moment: float, now: float) -> Card:
    """The facts about what a device waited for at a moment, as known *now* (seconds on the
    records' clock)."""
    bar = wait_at(scene, lane, moment, now)
    if bar is None:
        return Card((("wait", "the record does not have it any more, or not yet"),))
    cause, start, end = MARKS[bar.kind], bar.start - scene.origin, bar.end - scene.origin
    behind = _behind(scene, lane, bar)
    has, before = "has " * (bar.end >= now), number(bar.run, bar.step)
    what, line, gang = behind or ("", bar.line, NOBODY)
    name = what.partition(" ")[0]
    facts = (
        ("", f"{has}waited {duration(bar.end - bar.start)} for {cause}"),
        ("behind", what),
        ("line", source(line) or "unknown"),
        ("from", f"{start:.4f} s to {end:.4f} s"),
        ("on", _place(scene, lane, bar)),
        ("before", f"{bar.node or 'several'} of {bar.program or 'several programs'}"),
        ("that is", _MEANINGS[cause]),
    )
    links = (("behind", ((name, gang),)), ("before", ((bar.node, before),)))
    known = tuple(link for link in links if link[1][0][1] >= 0)
    arrows = ((gang, before),) if min(gang, before) >= 0 else ()
    return Card(facts, line, name if behind else bar.node, known, arrows)


_MEANINGS = {
    DISPATCH: "the lab's own work until the computation is launched",
    ORDER: "another computation has the earlier place on devices that both use",
    MEMORY: "all else was ready, and the bytes that its run needs were not free",
    TURN: "all else was ready, and the lab's policy let another client go first",
    INPUT: "a computation that makes its inputs, or is before it on its slices, had not ended",
    TRANSFER: "its inputs were made, and on their way to these devices",
    COMPILE: "hosts still made a function of its run",
    REPORT: "what had to end before had ended, and its host had not told of it",
    UNKNOWN: "the cause is told when the computation has begun",
}


def _place(scene: Scene, lane: Lane, bar: Bar) -> str:
    row = scene.rows.of[lane]
    words = [lane.island, scene.rows.labels[row] or f"device {lane.device} of {short(lane.host)}"]
    if (alike := round(scene.lanes.drawn.get(row, (0.0, 1.0))[1]) - 1) > 0:
        words[1] += f" and {alike} more alike"
    gang = scene.gangs.by_key.get((bar.run, bar.step))
    if gang is not None and gang.slice >= 0:
        words.append(f"slice s{own(gang.slice)}")
    return ", ".join(words)


def _behind(scene: Scene, lane: Lane, wait: Bar) -> tuple[str, str, float] | None:
    """The thing that a wait was for, in words that begin with its name, its line, and the number of
    the gang or the transfer."""
    cause, of = MARKS[wait.kind], (wait.run, *scene.flows.before(wait.run))
    if wait.step < 0:
        return None
    for run in filter(None, map(scene.runs.get, of)) if cause == TRANSFER else ():
        for span in reversed(run.transfers):
            if span.host == lane.host and abs(span.end - wait.end) <= SAME:
                moved = f"transfer of {size(float(span.args.get('nbytes', 0)))}"
                made_by = _listed(scene, sources(scene, wait.run, span.step))
                told = f"{moved} from {span.args.get('source', '')}, results of {made_by[0]}"
                return told, span.line, number(span.run, span.step)
    if cause == COMPILE and (node := scene.waits.compiled(wait.run, wait.end)):
        return f"{node}, which was compiled", wait.line, NOBODY
    if cause == MEMORY and lane.island in scene.used:
        held = scene.used[lane.island].levels(wait.end)[1]
        return f"{size(held[-1] if held else 0.0)} in use on {lane.island}", wait.line, NOBODY
    return _computation(scene, wait)


def _computation(scene: Scene, wait: Bar) -> tuple[str, str, float] | None:
    """The same, where that is a computation."""
    cause, gang = MARKS[wait.kind], scene.gangs.by_key.get((wait.run, wait.step))
    if cause in (INPUT, REPORT):
        until = wait.start if cause == REPORT else wait.end
        made = maker(scene, wait.run, wait.step, until) if wait.step >= 0 else None
        return (made.told + _itself(scene, made, wait), made.line, made.gang) if made else None
    first = None
    if cause == ORDER and gang is not None:
        first = ahead(scene, gang, wait.end)
    elif cause == TURN:
        first = _instead(scene, wait)
    if first is None:
        return None
    return f"{first.node} of {first.client}", first.line, number(first.run, first.step)


def _itself(scene: Scene, made: Made, wait: Bar) -> str:
    """The cause for which the computation behind a wait itself waited for most of that time."""
    sums: dict[int, float] = {}
    for bar in reversed(scene.waited.bars.items):
        if number(bar.run, bar.step) == made.gang:
            both = min(bar.end, wait.end) - max(bar.start, wait.start)
            sums[bar.kind] = max(both, sums.get(bar.kind, 0.0))
    kind = max(sums, key=lambda kind: sums[kind], default=-1)
    if kind < 0 or sums[kind] < MOST * (wait.end - wait.start):
        return ""
    return f", which itself waited {duration(sums[kind])} of that for {MARKS[kind]}"


def _instead(scene: Scene, wait: Bar) -> Bar | None:
    """The computation of another client that had most of the time of a wait."""
    others = (bar for bar in scene.computed.bars.items
              if bar.kind == GANG and bar.client not in ("", wait.client)
              and bar.start < wait.end and bar.end > wait.start)  # fmt: skip
    return max(others, key=lambda b: min(b.end, wait.end) - max(b.start, wait.start), default=None)


def _about_transfer(scene: Scene, arrived: list[Span]) -> Card:
    """arrived: on each of its hosts."""
    first = arrived[0]
    start, end = min(span.start for span in arrived), max(span.end for span in arrived)
    nbytes = sum(float(span.args.get("nbytes", 0)) for span in arrived)
    sources = ", ".join(str(span.args.get("source", "")) for span in arrived).split(", ")
    seconds = max(end - start, 1e-9)
    made, read, links, arrows = _near(scene, first, "moves results of", "for")
    facts = (
        *_heading(first),
        made,
        read,
        ("from", _few(sources)),
        ("to", _few(span.host for span in arrived)),
        ("moved", f"{size(nbytes)} in {duration(seconds)}, {size(nbytes / seconds)}/s"),
        ("arrived", f"{end - scene.origin:.4f} s"),
    )
    return Card(facts, first.line, "", links, arrows)


def _few(names: Iterable[str]) -> str:
    """The first three of some names, each once."""
    once = [*dict.fromkeys(filter(None, names))]
    return ", ".join(once[:3]) + " …" * (len(once) > 3)


def _about_gang(scene: Scene, found: Gang) -> Card:
    made, read, links, arrows = _near(scene, found, "inputs from", "results to")
    facts = (
        *_heading(found),
        ("island" + "s" * (len(found.islands) > 1), ", ".join(found.islands)),
        ("state", _times(scene, found)),
        ("waited", _waited(scene, found)),
        made,
        read,
    )
    return Card(facts, found.line, found.node, links, arrows)


def _near(
    scene: Scene, of: Gang | Span, before: str, after: str
) -> tuple[tuple[str, str], tuple[str, str], Links, tuple[tuple[float, float], ...]]:
    """The facts about computations before and after one, or a transfer, with links and arrows."""
    here = number(of.run, of.step)
    made, read = sources(scene, of.run, of.step), users(scene, of.run, of.step)
    facts, links = [], []
    for label, gangs in ((before, made), (after, read)):
        told, named = _listed(scene, gangs)
        facts.append((label, told))
        links.append((label, named))
    arrows = [(number(*gang), here) for gang in made[-ARROWS:]]
    arrows += [(here, number(*gang)) for gang in read[:ARROWS]]
    return facts[0], facts[1], tuple(links), tuple(arrows)


def _listed(scene: Scene, gangs: Sequence[GangKey]) -> tuple[str, tuple[tuple[str, float], ...]]:
    """Some gangs in words, and the names in them with their numbers."""
    nodes = [scene.flows.run(run)[step].node for run, step in gangs]
    times, apart = Counter(nodes), len({run for run, _ in gangs}) > 1
    named = [
        (
            node + (f" (run {own(run)})" if apart else f" (no. {step})") * (times[node] > 1),
            number(run, step),
        )
        for node, (run, step) in zip(nodes[:NAMED], gangs, strict=False)
    ]
    more = len(gangs) - len(named)
    return ", ".join(name for name, _ in named) + f" and {more} more" * (more > 0), tuple(named)


def _waited(scene: Scene, gang: Gang) -> str:
    """``"13 ms earlier computation, 2 ms dispatch"``: what the device waited for before it that
    waited longest."""
    rows: dict[float, list[Bar]] = {}
    for bar in scene.waited.bars.items:
        if (bar.run, bar.step) == (gang.run, gang.step):
            rows.setdefault(bar.row, []).append(bar)
    causes: dict[str, float] = {}
    for bar in max(rows.values(), key=lambda bars: sum(b.end - b.start for b in bars), default=[]):
        behind = _computation(scene, bar)
        about = f" (behind {behind[0]}{lined(behind[1])})" if behind else ""
        cause = WAITS[bar.kind] + about
        causes[cause] = causes.get(cause, 0.0) + bar.end - bar.start
    begun = min(gang.started.values(), default=math.inf)
    before = ahead(scene, gang, begun) if begun < math.inf else None
    if before and gang.granted is not None and before.end > gang.granted + SAME:
        causes[f"behind {before.node or 'others'} in its own lane"] = before.end - gang.granted
    longest = sorted(causes, key=lambda cause: -causes[cause])
    return ", ".join(f"{duration(causes[cause])} {cause}" for cause in longest)


def _times(scene: Scene, gang: Gang) -> str:
    def at(time: float) -> str:
        return f"{time - scene.origin:.4f} s"

    words = [gang.state]
    if gang.granted is not None:
        words.append(f"granted {at(gang.granted)}")
    if gang.launched:
        words.append(f"launched {at(min(gang.launched.values()))}")
    if gang.started:
        begun, latest = min(gang.started.values()), max(gang.started.values())
        words.append(f"started {at(begun)}" + f" to {at(latest)}" * (latest - begun > APART))
    if gang.ended:
        last = max(gang.ended, key=lambda host: gang.ended[host])
        words.append(f"ended {at(gang.ended[last])} (last on {short(last)})")
        if left := [short(host) for host in gang.where if host not in gang.ended]:
            words.append(f"not yet on {_few(left)}")
    return ", ".join(words)
