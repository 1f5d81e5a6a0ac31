"""The legend of a picture: the meaning of the colours that it shows, and of no others.

Problem: a legend of everything that a lab ever ran is longer than the picture
and explains colours that are not in it.  So functions are those of the time that is shown.  Causes
are few, and a card of a gang that is not in the window any more names them: they are those of all
that is drawn, which a drag or a zoom shows.

Rule for maintainers: asked by every picture, live, frozen or several below each other.
"""

from __future__ import annotations

import numpy as np

from pathways_lab.notebook.panels.graph import newest
from pathways_lab.notebook.panels.order import around_frontier
from pathways_lab.notebook.scene.awaited import waits_so_far
from pathways_lab.notebook.scene.palette import ARRIVES, CAUSE_PAINTS, EMPTY, PAINTS, WORK_PAINTS
from pathways_lab.notebook.scene.scene import MARKS, WORK, Scene
from pathways_lab.notebook.scene.spent import spent
from pathways_lab.timeline.waits import NOTHING

ONE_RUN = {"graph": False, "planned": True}
"""Panels that show one run, and so the colours of one program; whether it has ended, if one has."""

SEEN = 0.005
"""Share of the time with nothing to do from which on it is explained."""

PLAIN = {"memory", "messages"}
"""Panels without the colours of programs."""

Legend = tuple[tuple[str, tuple[tuple[str, str], ...]], ...]
"""``(heading, ((name, colour), ...))``."""


def legend(panels: tuple[str, ...], *seen: tuple[Scene, float]) -> Legend:
    """The legend of the panels that are drawn of some scenes, which have one palette, each at a
    moment (seconds on the records' clock)."""
    shown = set().union(*(_functions(*each, set(panels) - PLAIN) for each in seen))
    palette = seen[0][0].palette
    out = [(program, tuple(functions)) for program, functions in palette.legend(shown)]
    merged = set().union(*(_merged(*each) for each in seen))
    if merged := {name for name in merged if name}:
        names = sorted(merged, key=palette.number)
        out.insert(0, ("several functions of", tuple((n, palette.colour(n)) for n in names)))
    causes = sorted(set().union(*(_causes(*each, panels) for each in seen)))
    if causes:
        out.append(("waits for", tuple((MARKS[n], PAINTS[CAUSE_PAINTS[n]]) for n in causes)))
    paint = PAINTS.index(ARRIVES)
    if "queues" in panels and any(
        paint in s.computed.within(*s.range(at), "paint") for s, at in seen
    ):
        out.append(("thin bar", (("transfer", ARRIVES),)))
    if "queues" in panels and any(spent(s, *s.lately(at))[""].nothing > SEEN for s, at in seen):
        out.append(("empty lane", ((NOTHING, EMPTY),)))
    if "hosts" in panels and any(len(scene.worked.table) for scene, _ in seen):
        paints = zip(WORK, WORK_PAINTS, strict=True)
        out.append(("host work", tuple((name, PAINTS[paint]) for name, paint in paints)))
    return tuple(out)


def _functions(scene: Scene, now: float, panels: set[str]) -> set[tuple[str, str]]:
    """The nodes that are drawn, each with its program."""
    runs = [
        run for panel in panels & ONE_RUN.keys() if (run := newest(scene, whole=ONE_RUN[panel]))
    ]
    out = {(run.program, stage.node) for run in runs for stage in scene.flows.run(run.run)}
    out |= {(run.program, gang.node) for run in runs for gang in run.gangs}
    if panels <= ONE_RUN.keys():
        return out
    known = list(scene.catalogue)
    seen = [known[row] for row in scene.computed.within(*scene.range(now), "what")]
    seen += [what for _, _, _, what in scene.running()]
    out |= {(what.program, what.node) for what in seen}
    if "order" in panels and not scene.final:
        orders = map(scene.gangs.order, scene.machine.islands)
        gangs = (gang for order in orders for gang in around_frontier(order))
        out |= {(gang.program, gang.node) for gang in gangs}
    return out


def _merged(scene: Scene, now: float) -> set[str]:
    """Programs of bars that stand for several functions."""
    known = list(scene.catalogue)
    seen = [known[row] for row in scene.computed.within(*scene.range(now), "what")]
    return {what.program for what in seen if not what.node}


def _causes(scene: Scene, now: float, panels: tuple[str, ...]) -> set[int]:
    if not {"planned", "queues"} & set(panels):
        return set()
    kinds = scene.waited.table.columns()["kind"], waits_so_far(scene, now)["kind"]
    return {int(kind) for each in kinds for kind in np.unique(each)}
