"""The panels: functions from a scene and the time to a plot, nothing else.

Problem: every picture (live, frozen, on a dashboard) is made of the same
panels and must show the same numbers.

Rule for maintainers: a panel has one function ``plot(scene, now) -> Plot``; it
asks the scene and keeps nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from pathways_lab.notebook.panels import (
    experts,
    graph,
    heat,
    hosts,
    islands,
    memory,
    messages,
    order,
    planned,
    queues,
    utilisation,
)
from pathways_lab.notebook.scene.plot import Plot
from pathways_lab.notebook.scene.scene import Scene

Panel = Callable[[Scene, float], Plot]

PANELS: dict[str, Panel] = {
    "islands": islands.plot,
    "order": order.plot,
    "hosts": hosts.plot,
    "heat": heat.plot,
    "queues": queues.plot,
    "utilisation": utilisation.plot,
    "experts": experts.plot,
    "memory": memory.plot,
    "graph": graph.plot,
    "messages": messages.plot,
    "planned": planned.plot,
}
"""By the names that ``lab.view(...)`` and ``--show`` know, in the order of a full view."""

DEFAULT = ("islands", "queues", "utilisation")
"""The panels of a view that names none."""


def chosen(names: tuple[str, ...]) -> tuple[str, ...]:
    """Checked panel names; none means :data:`DEFAULT`."""
    unknown = [name for name in names if name not in PANELS]
    if unknown:
        raise ValueError(f"no panel is called {unknown[0]!r}; there are: {', '.join(PANELS)}")
    return names or DEFAULT


def completed(names: tuple[str, ...], scene: Scene) -> tuple[str, ...]:
    """The same, and above the device queues the work of workers for feeds, where there are any, the
    heat of hosts that are too many for rows, and the rows that experts got."""
    more = {"hosts": scene.machine.feeders, "heat": scene.many, "experts": scene.balance}
    shown: list[str] = []
    for name in chosen(names):
        if name == "queues":
            shown += [other for other, there in more.items() if there and other not in names]
        shown.append(name)
    return tuple(shown)


def plots(names: tuple[str, ...], scene: Scene, now: float, edge: str = "now") -> tuple[Plot, ...]:
    """The plots of some panels, :func:`completed`, at *now* (seconds on the records' clock).

    edge: a word for that moment, in the first panel with the time axis, where time is to come.
    """
    out, (_, end), (_, at) = [], scene.range(now), scene.elapsed(now)
    for name in completed(names, scene):
        plot = PANELS[name](scene, now)
        if plot.time and at < end:
            plot, edge = replace(plot, ahead=(at, edge)), ""
        out.append(plot)
    return tuple(out)
