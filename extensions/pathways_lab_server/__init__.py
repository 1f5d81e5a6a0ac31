"""Jupyter server extension: BokehJS, and the labs of this user, under the server's own address.

Problem: a live view needs BokehJS in the page, a saved one its script too, and JupyterLab's side
panel needs to know what runs.  A kernel answers when the running cell has ended, which is
exactly too late, and a browser may be on another machine, behind a hub, with no
outside line.  Jupyter's server is never busy and always reachable::

    <base_url>/pathways-lab/bokehjs/bokeh.min.js     scripts of the installed Bokeh
    <base_url>/pathways-lab/view/live.js             the script of live views, for saved ones
    <base_url>/pathways-lab/labs                     names of this user's labs, as JSON
    <base_url>/pathways-lab/labs/<name>/pathways     pages of one of them

Kernels that this server starts inherit the environment variables
PATHWAYS_LAB_BOKEHJS_ROUTE and PATHWAYS_LAB_PAGES_ROUTE; where the first is missing
they send the script themselves, where the second is missing they show the pages at
their own address.

Rule for maintainers: this package is imported by Jupyter's server process and
by nobody else.  It imports neither JAX, Dask, Bokeh nor ``pathways_lab``; a
failure here is a line in the server's log, never a server that does not start.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

ROUTE = "pathways-lab/bokehjs/"
"""Below the server's base URL, with the file name behind it."""

VARIABLE = "PATHWAYS_LAB_BOKEHJS_ROUTE"
"""Tells kernels the route, without a slash at its end."""


VIEW = "pathways-lab/view/"
"""The same for the script of live views and their style."""

LABS = "pathways-lab/labs"
"""Below the server's base URL: the list; with a lab's name and a path behind it, its pages."""

PAGES_VARIABLE = "PATHWAYS_LAB_PAGES_ROUTE"
"""Tells kernels the same, with the base URL."""


def _jupyter_server_extension_points() -> list[dict[str, str]]:
    """What Jupyter asks a package for, to find its server extensions."""
    return [{"module": "pathways_lab_server"}]


def bokehjs_folder() -> Path | None:
    """The folder of the installed Bokeh's scripts."""
    return _folder_with("bokeh", "server/static/js", "bokeh.min.js")


def _folder_with(package: str, below: str, file: str) -> Path | None:
    """The folder of an installed package that has *file*, found without importing anything."""
    spec = importlib.util.find_spec(package)
    for root in (spec.submodule_search_locations or ()) if spec else ():
        folder = Path(root).resolve() / below
        if (folder / file).is_file():
            return folder
    return None


def _load_jupyter_server_extension(server: Any) -> None:
    """Add the routes to *server* (a ``jupyter_server.serverapp.ServerApp``)."""
    from jupyter_server.utils import url_path_join

    from pathways_lab_server.labs import LabsHandler, PageHandler

    base = server.web_app.settings["base_url"]
    pages = url_path_join(base, LABS)
    page = url_path_join(pages, r"(pwlab-\w+)/(.+)")
    server.web_app.add_handlers(".*$", [(pages, LabsHandler), (page, PageHandler)])
    os.environ[PAGES_VARIABLE] = pages
    _serve_view(server, base)
    _serve_bokehjs(server, base)


def _serve_view(server: Any, base: str) -> None:
    folder = _folder_with("pathways_lab", "notebook/view", "live.js")
    if folder is None:
        return  # the lab is in another environment, and saved pictures are static
    from jupyter_server.utils import url_path_join

    from pathways_lab_server.handler import ViewHandler

    pattern = url_path_join(base, VIEW, r"live\.(js|css)")
    server.web_app.add_handlers(".*$", [(pattern, ViewHandler, {"folder": folder})])


def _serve_bokehjs(server: Any, base: str) -> None:
    folder = bokehjs_folder()
    if folder is None:
        server.log.warning(
            "pathways_lab_server: no Bokeh beside the Jupyter server, so live views ask the kernel "
            "for BokehJS, which waits while a cell runs. Remedy: pip install bokeh here."
        )
        return
    from jupyter_server.utils import url_path_join

    from pathways_lab_server.handler import BokehJSHandler

    pattern = url_path_join(base, ROUTE, r"(bokeh[a-z-]*\.min\.js)")
    server.web_app.add_handlers(".*$", [(pattern, BokehJSHandler, {"path": [str(folder)]})])
    os.environ[VARIABLE] = ROUTE.rstrip("/")
    server.log.info(f"pathways_lab_server: BokehJS from {folder}")
