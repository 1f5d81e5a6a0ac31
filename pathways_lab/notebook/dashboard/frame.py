"""A page of the dashboard below a cell.

Problem: the page is on another server than the notebook.  A browser on this
machine reaches it by its address; one that is elsewhere, or behind a hub, only
through the Jupyter server, which our server extension makes pass it on.

Rule for maintainers: an address relative to the notebook's server where that is
known to pass pages on, and the dashboard's own otherwise.
"""

from __future__ import annotations

import html
import os
from pathlib import Path
from typing import TYPE_CHECKING

from pathways_lab.core.errors import PathwaysError
from pathways_lab.notebook.dashboard import PANELS, path_of

if TYPE_CHECKING:
    from pathways_lab.client.lab.lab import Lab

ROUTE_VARIABLE = "PATHWAYS_LAB_PAGES_ROUTE"
"""Set by our Jupyter server extension: where it passes on pages of labs of this machine."""


class Dashboard:
    """A page of a lab.

    folder: the lab's private one, when it is on this machine.
    page: a panel, or "".  height: of the frame in pixels.
    link: the page's address on Dask's dashboard, "" when that is not known.
    source: where a notebook's page finds it.
    """

    def __init__(self, lab: Lab, folder: Path | None, page: str, height: int) -> None:
        if page not in ("", *PANELS):
            raise ValueError(f"no page is called {page!r}; there are: {', '.join(PANELS)}")
        if type(height) is not int or height < 1:
            raise ValueError(
                f"height={height!r} is not a whole number of pixels from 1 on, like 640"
            )
        self.height = height
        route = os.environ.get(ROUTE_VARIABLE, "")
        passed = f"{route}/{folder.name}/{path_of(page)}" if route and folder else ""
        try:
            self.link = f"{lab.dashboard_link}/{path_of(page)}"
        except PathwaysError:
            # Invited people may not know the Dask cluster.
            if not passed:
                raise
            self.link = ""
        self.source = passed or self.link

    def __str__(self) -> str:
        return self.link or self.source

    __repr__ = __str__

    def _repr_html_(self) -> str:
        known = f" · on Dask's dashboard: {_link(self.link, self.link)}" if self.link else ""
        return (
            f'<iframe src="{html.escape(self.source)}" width="100%" height="{self.height}" '
            'title="Pathways Lab" style="border: 1px solid var(--jp-border-color2, #e0e0e0)">'
            f"</iframe><div>{_link(self.source, 'open in a tab of its own')}{known}</div>"
        )


def _link(address: str, text: str) -> str:
    return (
        f'<a href="{html.escape(address)}" target="_blank" rel="noopener">{html.escape(text)}</a>'
    )
