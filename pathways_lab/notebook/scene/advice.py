"""One sentence of advice: why devices of an island are idle or a client waits, and a remedy.

Problem: a picture shows that devices wait, or that a client waits for devices that compute for
another one, and its reader wants to know what would help.

Rule for maintainers: one sentence at most, of the largest cause in what is shown, and none
where all waiting is below :data:`WORTH` but for a host that is late: its client waits for it and
asks others for nothing.  The cause is named first, then who waits for it, with all of the time of
its devices.  A line is that which is to be changed.  Devices that nobody asked for anything need no
advice, unless their client waits for each call or comes late with the calls of a loop, and devices
that compute hear that waiting is no matter.

Paper: section 5.1 (dispatch overheads), section 5.2 (several clients), section 5.3 (pipelines).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import islice, pairwise
from operator import attrgetter, itemgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pathways_lab.notebook.kernel.line_index import source, split
from pathways_lab.notebook.scene.awaited import (
    CALLS,
    PAUSE,
    called,
    in_turn,
    later,
    maker,
    open_waits,
    works_at,
)
from pathways_lab.notebook.scene.duration import duration
from pathways_lab.notebook.scene.palette import family
from pathways_lab.notebook.scene.scene import MARKS, WAITS, Scene
from pathways_lab.notebook.scene.spent import Spent, percents, spent
from pathways_lab.timeline.bars import GANG, Bar
from pathways_lab.timeline.columns import Floats
from pathways_lab.timeline.compiling import Making
from pathways_lab.timeline.planned import RunSeen
from pathways_lab.timeline.waits import (
    COMPILE,
    DISPATCH,
    INPUT,
    MEMORY,
    NOTHING,
    ORDER,
    REPORT,
    TRANSFER,
    TURN,
)

WORTH = 0.2
"""Share of the time of an island's devices from which on waiting is worth a sentence."""

HALF = 0.5
"""Share of it that some island must compute to hear that waiting is no matter."""

DERIVED = 0.5
"""How much of its share a wait for an earlier computation counts beside waits for anything else:
that computation may have waited for the same thing."""

PARTS = 200
"""Moments at which devices that clients share are looked at."""

NEWEST = 100
"""Waits of an island of which it is asked what they were for: the newest ones."""

UNEVEN = 1.5
"""How many times as long an island must compute as any other one to be named."""

SETTLED = 2.0
"""Seconds, at least, whose largest cause is told: nobody reads a sentence that changes with every
run of a fast program."""

QUEUED = 1.2
"""Computations of another client, on average, that a client's runs wait for, from which on some are
queued ahead of them."""

SEEN = 0.05
"""Share of what is drawn that a cause must have to be told at all."""

LINE = 48
"""Characters of a line at most, within a sentence."""

LATE = 0.05
"""Share of what is shown by which a host must be late to be named."""

_CAUSES = {
    INPUT: (
        "{} is waited for",
        "more microbatches, or calls ahead, let devices compute while others make their inputs",
    ),
    TRANSFER: (
        "transfers to {} hold it up",
        "send less, or place both slices on one island",
    ),
    DISPATCH: (
        "starting computations takes the lab long",
        "a first run needs more of it than later ones, and longer computations hide it",
    ),
    REPORT: (
        "hosts tell late that they have ended computations",
        "their processes lack processors, or their links are slow: lab.stacks() shows their work",
    ),
    COMPILE: (
        "hosts compile",
        "only the first call with new shapes does that: make one before the loop, or before"
        " you measure; fewer shapes, and jax.lax.scan in place of a long Python loop, spare it, and"
        " JAX_COMPILATION_CACHE_DIR keeps it for the next lab",
    ),
    MEMORY: ("memory is full", "drop handles, donate inputs, or use more devices"),
    NOTHING: (
        "{} waits{} for each call of {} before it makes the next one",
        "make the next calls before you wait for a result, and they overlap",
    ),
    TURN: ("the lab's policy lets other clients go first", "lab.policy can prefer others"),
    ORDER: (
        "computations that share a part of its devices go first",
        "slices that share no devices spare it the wait",
    ),
}
"""By cause, the words for what holds devices up, and a remedy."""

_COMES_LATE = (
    "{} takes long from its last result{} to its next call of {}{}",
    "have inputs made while devices compute, as lab.feed(make) does, or make calls ahead",
)
"""The same where devices of all islands have nothing to do."""

_MOVING = "transfers hold up {} call of {}, {:.0f} % of the time while no device computes"
"""The words for a client that waits for each call where bytes are on their way for most of it."""

_OVERLAP = TRANSFER, DISPATCH, INPUT
"""The causes of waiting during which another call may compute."""


def advice(scene: Scene, now: float) -> str:
    """The sentence about what is shown at *now* (seconds); "" where none is worth it."""
    if not scene.busy and (making := scene.compiling.now()):
        return _compiling(making)
    start, end = scene.elapsed(now)
    if end <= start:
        return ""
    since = min(start, max(scene.first - scene.origin, end - SETTLED))
    times, runs = spent(scene, start, end), called(scene)
    client = runs[-1] if in_turn(runs) else None
    settled = spent(scene, since, end) if since < start else times
    del times[""]  # all of them
    behind = scene.late(now) or scene.late(now, lately=True)
    moving = _moving(scene, start, end) if client else 0.0
    # The share that it has, how busy its devices are, and an island that another computation holds
    # up, "" where the cause is another one.
    found: list[tuple[float, float, str, Callable[..., str]]] = [
        (share, 0.0, "", partial(_in_turn, scene, *pair, start, end))
        for pair, (share, _) in _shared(scene, since, end).items()
        if share > WORTH
    ]
    slow: tuple[str, float, str] | None = None
    if times and not client and (calls := _late_calls(runs)):
        island = min(times, key=lambda island: times[island].nothing)
        program = calls.program + line_of(scene, calls.program)
        first, remedy = _COMES_LATE
        own = lined(works_at(scene, calls.client))
        own = own and f", mostly in its own code{own}"
        first = first.format(calls.client, lined(calls.waited), program, own)
        if (idle := settled[island].nothing) > WORTH:
            found.append((idle, 0.0, "", partial(_told, first, remedy, island, times[island])))
    for island, time in times.items():
        lately = settled[island]
        late = _latest(scene, behind, end - start, island, now)
        slow = slow or late
        seen = [cause for cause in WAITS if time.share(cause) > SEEN] or WAITS
        cause = max(seen, key=lambda cause: lately.share(cause) * _weight(cause))
        share = lately.share(cause)
        if late and cause == INPUT:
            # The devices of a late host are those that the others wait for.
            hosts = len(scene.machine.hosts_of(island))
            part = hosts / max(hosts - 1, 1)
            drawn, share = min(time.share(cause) * part, 1.0), share * part
            rest = f"the rest of {island} waits {100 * drawn:.0f} % of the time for it"
            tell = partial(_late, *late, rest)
        elif client and cause in _OVERLAP:
            cause, share = NOTHING, lately.share(*_OVERLAP) + lately.nothing
            first, remedy = _CAUSES[cause]
            program, of = client.program, ""
            if moving > HALF * (1.0 - time.busy):
                node = _before(scene, start, "", TRANSFER)
                what = f"{node} in each" if node else "each"
                first = _MOVING.format(what, program, 100 * moving)
                remedy = f"{_CAUSES[TRANSFER][1]}; {remedy}"
            else:
                program += line_of(scene, program) * (not client.waited)
                first = first.format(client.client, lined(client.waited), program)
                if lately.share(INPUT) > HALF * lately.share(*MARKS):
                    remedy += "; more microbatches in each fill it, too"
                    node = _before(scene, start, island, INPUT)
                    of = f" (mostly before {node})" * bool(node)
            tell = partial(_told, first, remedy, island, time, of=of)
        else:
            tell = partial(_held_up, scene, start, island, cause, times)
        if max(share, lately.share(*WAITS)) > WORTH:
            other = island if cause == INPUT and not late else ""
            found.append((share * _weight(cause), time.busy, other, tell))
    if not found:
        return _late(*slow) if slow else _full(times)
    # Of what differs by less than is told, the island that is most idle in what is shown.
    most = max(share for share, *_ in found)
    alike = [each for each in found if each[0] > most - SEEN]
    _, _, other, said = min(alike, key=itemgetter(1))
    if slow is None or not other:
        return said()
    # That computation ends with its latest host, and others wait for all of it.
    kind, rows = WAITS.index(INPUT), _rows(scene, other)
    bars = [bar for bar in open_waits(scene, now) if bar.kind == kind and bar.row in rows]
    bars += _newest(scene, start + scene.origin, other, kind)
    longest = max((bar.end - bar.start for bar in bars), default=0.0)
    if slow[1] < WORTH * longest:
        return said(*slow[:2]) if slow[1] > SEEN * longest else said()
    return _late(*slow, f"{other} waits for its results, too")


def _full(times: dict[str, Spent]) -> str:
    """The sentence where no island that computes waits for long."""
    used = [time for time in times.values() if time.busy]
    if max((time.busy for time in used), default=0.0) < HALF:
        return ""
    rest = (
        "more calls at once would use the rest"
        if max(time.nothing for time in used) > WORTH
        else "faster functions or more devices help, less waiting hardly would"
    )
    least = 100 * min(time.busy for time in used)
    return f"nothing waits for long: devices compute at least {least:.0f} % of the time; {rest}"


def _weight(cause: str) -> float:
    return DERIVED if cause == INPUT else 1.0


def _told(
    first: str, remedy: str, island: str, time: Spent, cause: str = "", of: str = "",
) -> str:  # fmt: skip
    """The words for what holds an island up, for all of its devices' time, and what would help.

    cause: of waiting, which has its share, "" for all together.  of: more about it.
    """
    waits = time.share(*MARKS)
    share = time.share(cause) if cause else waits
    busy, share, other, nothing = percents(time.busy, share, waits - share, time.nothing)
    parts = [
        f"computes {busy} % of the time",
        f"waits {share} %{f' for {cause}' * bool(cause)}{of}",
        f"{other} % for other things" if other else "",
        f"has nothing to do {nothing} %" if nothing else "",
    ]
    return f"{first}: {island} {', '.join(filter(None, parts))}; {remedy}"


def _late(host: str, by: float, *more: str) -> str:
    """The sentence about a host that ends computations later than others, by so many seconds."""
    told = ", and ".join(filter(None, more))
    return (
        f"{host} is up to {duration(by, 2)} late beside the others of its gang"
        f"{told and f': {told}'}; a slice without this host helps at once, and"
        f" lab.stacks({host!r}) shows what slows it"
    )


def _before(scene: Scene, start: float, island: str, cause: str) -> str:
    """The computation before which an island ("": any) waits longest for a cause, and its line;
    with the next one, if it waits for that at least half as long."""
    bars = _newest(scene, start + scene.origin, island, WAITS.index(cause))
    sums = _sums((bar.node, bar.busy) for bar in bars)
    nodes = sorted(sums, key=lambda node: -sums[node])[:2]
    nodes = [node for node in nodes if sums[node] >= HALF * sums[nodes[0]]]
    lines = [line_of(scene, node) for node in nodes]
    if len({*lines}) == 1:  # told once
        lines[:-1] = [""] * (len(lines) - 1)
    return " and ".join(map(str.__add__, nodes, lines))


def _held_up(
    scene: Scene, start: float, island: str, cause: str, times: dict[str, Spent],
    host: str = "", by: float = 0.0,
) -> str:  # fmt: skip
    """The sentence about a cause for which devices of an island wait.

    host: what they wait for ends there later than elsewhere, by so many seconds; "": nowhere.
    """
    kind = WAITS.index(cause)
    bars = _newest(scene, start + scene.origin, island, kind)
    first, remedy = _CAUSES[cause]
    node = _most((bar.node, bar.busy) for bar in bars)
    line = "" if cause == INPUT else line_of(scene, node)  # that of what is waited for is told
    about = f" (mostly before {node}{line})" if node else ""
    if cause != INPUT:
        return _told(first.format(island), remedy, island, times[island], cause, about)
    name = _made(scene, bars) or "an earlier computation"
    first = first.format(name + line_of(scene, name.partition(" on ")[0]))
    for bar in sorted(_newest(scene, start + scene.origin, "", kind), key=attrgetter("busy")):
        if ready := later(scene, bar.run, bar.step, bar.start):  # there, others wait for it
            remedy = (
                f"call {ready.node}{lined(ready.line) or line_of(scene, ready.node)} before"
                f" {bar.node} in the program: it has its inputs earlier, and computes meanwhile"
            )
    uneven = _uneven(scene, times)
    if host:
        first = f"{uneven or first}, and {host} ends up to {duration(by, 2)} late"
        remedy = f"a slice without {host} helps at once, and {remedy}"
    elif uneven:
        first, remedy = uneven, f"stages of equal length wait less, and {remedy}"
    return _told(first, remedy, island, times[island], cause, about)


def _newest(scene: Scene, since: float, island: str, kind: int) -> list[Bar]:
    """The newest waits of an island ("": of all) for a cause, as far as they ended after some
    moment (seconds on the records' clock)."""
    rows = _rows(scene, island)
    of_kind = (bar for bar in reversed(scene.waited.bars.items) if bar.kind == kind)
    ours = (bar for bar in of_kind if bar.end > since and bar.row in rows)
    return list(islice(ours, NEWEST))


def _rows(scene: Scene, island: str) -> set[float]:
    """The rows of bars of an island ("": of all)."""
    return {row for lane, row in scene.rows.of.items() if island in ("", lane.island)}


def _made(scene: Scene, bars: Sequence[Bar]) -> str:
    """The computation that most of some waits are for, and where it is made."""
    made = ((maker(scene, bar.run, bar.step, bar.end), bar.busy) for bar in bars)
    return _most((first.told, busy) for first, busy in made if first)


def _most(seconds: Iterable[tuple[str, float]]) -> str:
    """The name that has most of the time, "" where none has a name."""
    sums = _sums(seconds)
    return max(sums, key=lambda name: sums[name], default="")


def _sums(seconds: Iterable[tuple[str, float]]) -> dict[str, float]:
    """The time of each name."""
    sums: dict[str, float] = {}
    for name, each in seconds:
        if name:
            sums[name] = sums.get(name, 0.0) + each
    return sums


def line_of(scene: Scene, node: str) -> str:
    """The line of a node or a program that somebody should look at, in brackets."""
    names = ((what, (what.node, family(what.node), what.program)) for what in scene.catalogue)
    lines = [what.line for what, known in names if node in known and split(what.line)]
    return lined(lines[-1]) if lines else ""


def lined(line: str) -> str:
    """A record's line in brackets, as much of it as a sentence has room for."""
    shown = source(line) if split(line) else ""
    return f" (line {shown[:LINE]}{'…' * (len(shown) > LINE)})" if shown else ""


def _late_calls(runs: Sequence[RunSeen]) -> RunSeen | None:
    """The run of a loop before which its client makes no calls for longest; None where none runs.

    A loop runs the same program :data:`CALLS` times with short pauses.
    """
    newest = runs[-4 * CALLS :]
    pauses = [
        (after.submitted - before.end, n) for n, (before, after) in enumerate(pairwise(newest))
    ]
    if not pauses:
        return None
    late = newest[max(pauses)[1] + 1]
    loop = [run for run in newest if (run.client, run.program) == (late.client, late.program)]
    short = all(after.submitted < before.end + PAUSE for before, after in pairwise(loop[-CALLS:]))
    return late if short and len(loop) >= CALLS else None


def _compiling(making: Making) -> str:
    line = lined(making.line)
    return f"no device computes: hosts compile {making.name}{line}; {_CAUSES[COMPILE][1]}"


def _in_turn(scene: Scene, client: str, other: str, start: float, end: float) -> str:
    """The sentence about a client that waits while devices compute for another one."""
    share, function = _shared(scene, start, end).get((client, other), (0.0, ""))
    what = f"{function}{line_of(scene, function)} " if function else ""
    remedy = (
        f"in {other}, pw.jit(window=0.0) or pw.program(window=0.0) queue no work ahead and let"
        f" {client} in after one {function or 'computation'}"
        if _ahead(scene, client, other, min(start, end - SETTLED) + scene.origin) > QUEUED
        else f"nothing interrupts a computation, so shorter ones of {other} let {client} in sooner"
    )
    used = {
        bar.row for bar in scene.computed.bars.items
        if bar.end > start + scene.origin and bar.client in (client, other)
    }  # fmt: skip
    free = [lane.island for lane, row in scene.rows.of.items() if row not in used]
    where = f", for example on {free[0]}," if free else ""
    return (
        f"devices compute {what}for {other} while {client} waits for its turn,"
        f" {100 * share:.0f} % of the time: {remedy}; {'a slice on ' * bool(free)}"
        f"{'other' if free else 'more'} devices{where} spare{'s' * bool(free)} it the wait"
    )


def _ahead(scene: Scene, client: str, other: str, since: float) -> float:
    """The computations of another client that end while a run of a client waits, on average;
    since: seconds on the records' clock."""
    ended = {
        (bar.run, bar.step): bar.end for bar in scene.computed.bars.items
        if bar.kind == GANG and bar.client == other
    }  # fmt: skip
    runs = [run for run in scene.runs.values() if run.client == client and run.begun < math.inf]
    waits = [(run.submitted, run.begun) for run in runs if run.begun > since]
    counts = np.searchsorted(np.sort([*ended.values()]), np.array(waits or [(0.0, 0.0)]), "right")
    return float(np.mean(np.diff(counts)))


def _shared(scene: Scene, start: float, end: float) -> dict[tuple[str, str], tuple[float, str]]:
    """By client, and another one: the share of the time in which it waits while devices that it
    uses compute for the other one, and the function that these compute most."""
    clients = [what.client for what in scene.catalogue]
    if len({*clients} - {""}) < 2:
        return {}
    names = [what.node for what in scene.catalogue]
    moments = np.linspace(start, end, PARTS)
    bars: dict[str, Any] = scene.bars.columns()
    gangs = bars["bottom"] - bars["top"] > 0.5
    left, right, tops, whats = (bars[name][gangs] for name in ("left", "right", "top", "what"))
    of = np.array(clients)[whats]  # also before what is shown: it may wait for all of that
    waits = _waiting(scene, moments + scene.origin)
    now = [
        (what.client, scene.drawn_at(lane), since - scene.origin)
        for lane, _, since, what in scene.running()
    ]
    took = np.maximum(np.minimum(right, end) - np.maximum(left, start), 0.0)
    found: dict[tuple[str, str], tuple[float, str]] = {}
    for client, waiting in waits.items():
        for other in {*of.tolist()} - {client, ""}:
            shared = np.intersect1d(tops[of == client], tops[of == other])
            here = (of == other) & np.isin(tops, shared)
            ours = (since for who, row, since in now if who == other
                    and row is not None and np.any(np.abs(shared - row) < 0.5))  # fmt: skip
            begun = min(ours, default=math.inf)
            busy = _within(moments, left[here], right[here]) | (moments >= begun)
            each = zip(names, np.bincount(whats[here], took[here]).tolist(), strict=False)
            found[client, other] = float(np.mean(waiting & busy)), _most(each)
    return found


def _moving(scene: Scene, start: float, end: float) -> float:
    """The share of the time between two moments (seconds on the axis) in which transfers are under
    way and no device computes."""
    bars: dict[str, Any] = scene.bars.columns()
    moments = np.linspace(start, end, PARTS)
    gangs = bars["bottom"] - bars["top"] > 0.5
    begun = min([since for _, _, since, _ in scene.running()], default=math.inf) - scene.origin
    computing = _within(moments, bars["left"][gangs], bars["right"][gangs]) | (moments >= begun)
    moved = _within(moments, bars["left"][~gangs], bars["right"][~gangs])
    return float(np.mean(moved & ~computing))


def _within(moments: Floats, left: Floats, right: Floats) -> NDArray[np.bool_]:
    """Whether each moment lies within any of some bars."""
    begun = np.searchsorted(np.sort(left), moments, "right")
    return begun > np.searchsorted(np.sort(right), moments, "right")


def _waiting(scene: Scene, moments: Floats) -> dict[str, NDArray[np.bool_]]:
    """By client, whether any of its runs was submitted and had not begun at each moment."""
    begun = {gang[0]: since for _, gang, since, _ in scene.running()}
    out: dict[str, NDArray[np.bool_]] = {}
    for number, run in scene.runs.items():
        over = math.inf if run.ended is None else run.ended
        until = min(run.begun, begun.get(number, math.inf), over)
        if run.client and run.submitted < moments[-1] and until > moments[0]:
            waited = (moments >= run.submitted) & (moments < until)
            out[run.client] = out.get(run.client, False) | waited
    return out


def _latest(
    scene: Scene, behind: dict[str, float], shown: float, island: str, now: float
) -> tuple[str, float, str] | None:
    """The host of an island that ends computations later than others, by how much (seconds), and
    the function that takes it longer in words.

    behind: by host, seconds by which it does.  shown: seconds.  None where that is worth no word.
    """
    here = {host.name for host in scene.machine.hosts_of(island)}
    late = {host: by for host, by in behind.items() if host in here}
    host = max(late, key=lambda host: late[host], default="")
    if not host or late[host] < LATE * shown:
        return None
    node, longer = scene.slowest(host, now)
    words = f"{node}{line_of(scene, node)} takes it up to {duration(longer, 2)} longer"
    return host, late[host], words if longer > 0 else ""


def _uneven(scene: Scene, times: dict[str, Spent]) -> str:
    """The island that computes much more than any other one, if there is one."""
    *_, less, (most, island) = sorted([(0.0, ""), *((t.busy, i) for i, t in times.items())])
    if most < UNEVEN * less[0] or not less[0]:
        return ""
    function = _most(times[island].computed.items())
    return (
        f"the others wait for {island}, which computes {most / less[0]:.1f} times as long as they"
        f" do, mostly {function}{line_of(scene, function)}"
    )
