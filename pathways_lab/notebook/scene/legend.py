"""The legend of a picture: the meaning of the colours that it shows, and of no others.

Problem: a legend of everything that a lab ever ran is longer than the picture
and explains colours that are not in it.

Rule for maintainers: asked by every picture, live, frozen or several below each other.
"""

from __future__ import annotations

from pathways_lab.notebook.panels.graph import newest
from pathways_lab.notebook.scene.palette import CAUSE_PAINTS, PAINTS, WORK_PAINTS
from pathways_lab.notebook.scene.scene import WAITS, WORK, Scene

ONE_RUN = {"graph": False, "planned": True}
"""Panels that show one run, and so the colours of one program; whether it has ended, if one has."""

PLAIN = {"memory", "messages"}
"""Panels without the colours of programs."""

Legend = tuple[tuple[str, tuple[tuple[str, str], ...]], ...]
"""``(heading, ((name, colour), ...))``."""


def legend(panels: tuple[str, ...], *scenes: Scene) -> Legend:
    """The legend of the panels that are drawn of some scenes, which have one palette."""
    shown = set().union(*(_programs(scene, set(panels) - PLAIN) for scene in scenes))
    palette = scenes[0].palette
    out = [(name, tuple(nodes)) for name, nodes in palette.legend() if name in shown]
    # Bars that stand for several functions have their program's colour, where it is another.
    whole = [(name, palette.colour(name)) for name, _ in out]
    whole = [own for own, (_, nodes) in zip(whole, out, strict=True) if own not in nodes]
    if {"islands", "queues", "utilisation"} & set(panels) and whole:
        out.insert(0, ("programs", tuple(whole)))
    causes = sorted(set().union(*(scene.seen_causes for scene in scenes)))
    if {"queues", "planned"} & set(panels) and causes:
        out.append(("waits for", tuple((WAITS[n], PAINTS[CAUSE_PAINTS[n]]) for n in causes)))
    if "hosts" in panels and any(len(scene.worked.table) for scene in scenes):
        paints = zip(WORK, WORK_PAINTS, strict=True)
        out.append(("host work", tuple((name, PAINTS[paint]) for name, paint in paints)))
    return tuple(out)


def _programs(scene: Scene, panels: set[str]) -> set[str]:
    if panels and panels <= ONE_RUN.keys():
        runs = [newest(scene, whole=ONE_RUN[panel]) for panel in panels]
        return {run.program for run in runs if run is not None}
    running = {what.program for _, _, _, what in scene.running()}
    return {what.program for what in scene.catalogue} | running if panels else set()
