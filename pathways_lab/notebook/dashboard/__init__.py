"""The lab's pages on the dashboard of its Dask cluster, and what the side panel shows.

Problem: a picture of the lab that belongs to no notebook: it shows all clients,
moves while every kernel is busy, and outlives reloads.

How: a process of its own (:mod:`.process`), started by the Dask scheduler when
somebody looks (:mod:`pathways_lab.runtime.cluster.dashboard_socket`), follows the control
plane's records and serves pages.  They are the views of the notebook: the same
plots, the same messages, the same script in the page.

Rule for maintainers: every address in a page is relative, so that pages work
below any prefix, behind any proxy; nothing but GETs.
"""

from __future__ import annotations

from pathways_lab.runtime.cluster.dashboard_socket import Pages

PANELS = (
    "islands", "order", "hosts", "heat", "queues", "utilisation", "memory", "graph", "messages",
    "planned", "experts",
)  # fmt: skip
"""Panels with a page of their own."""

OVERVIEW = "pathways"
"""Path of the page with the usual panels."""

HEIGHT = 640
"""Pixels of a frame in a notebook."""


def path_of(panel: str = "") -> str:
    """Path of a panel's page, and "" of the overview; Dask lists what begins so."""
    return f"individual-pathways-{panel}" if panel else OVERVIEW


PAGES = Pages(
    f"{__name__}.process",
    {OVERVIEW: "Pathways", **{path_of(panel): f"Pathways {panel.title()}" for panel in PANELS}},
)
"""The pages that are added to Dask's dashboard."""
