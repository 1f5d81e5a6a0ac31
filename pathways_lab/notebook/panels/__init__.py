"""The panels: functions from a scene and the time to a plot, nothing else.

Problem: every picture (live, frozen, on a dashboard) is made of the same four
panels and must show the same numbers.

Rule for maintainers: a panel has one function ``plot(scene, now) -> Plot``; it
asks the scene and keeps nothing.
"""

from __future__ import annotations

from collections.abc import Callable

from pathways_lab.notebook.panels import islands, order, queues, utilisation
from pathways_lab.notebook.plot import Plot
from pathways_lab.notebook.scene import Scene

Panel = Callable[[Scene, float], Plot]

PANELS: dict[str, Panel] = {
    "islands": islands.plot,
    "order": order.plot,
    "queues": queues.plot,
    "utilisation": utilisation.plot,
}
"""By the names that ``lab.view(...)`` and ``--show`` know, in the order of a full view."""


def chosen(names: tuple[str, ...]) -> tuple[str, ...]:
    """Checked panel names; none means all of them."""
    unknown = [name for name in names if name not in PANELS]
    if unknown:
        raise ValueError(f"no panel is called {unknown[0]!r}; there are: {', '.join(PANELS)}")
    return names or tuple(PANELS)


def plots(names: tuple[str, ...], scene: Scene, now: float) -> tuple[Plot, ...]:
    """The plots of some panels at *now* (seconds on the records' clock)."""
    return tuple(PANELS[name](scene, now) for name in chosen(names))
