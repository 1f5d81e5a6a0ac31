"""Jupyter server extension: BokehJS from the installed Bokeh, under the server's own address.

Problem: a live view needs BokehJS in the page.  A content delivery network is
no answer (lab machines have no outside line), a copy inside every notebook is
8 MB, and asking the kernel for it waits until the running cell ends, which is
exactly when a live view is wanted.  Jupyter's server is never busy, so it
serves the files::

    <base_url>/pathways-lab/bokehjs/bokeh.min.js

Kernels that this server starts inherit the environment variable
PATHWAYS_LAB_BOKEHJS_ROUTE; where it is missing they send the script themselves.

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


def _jupyter_server_extension_points() -> list[dict[str, str]]:
    """What Jupyter asks a package for, to find its server extensions."""
    return [{"module": "pathways_lab_server"}]


def bokehjs_folder() -> Path | None:
    """The folder of the installed Bokeh's scripts, found without importing Bokeh."""
    spec = importlib.util.find_spec("bokeh")
    for root in (spec.submodule_search_locations or ()) if spec else ():
        folder = Path(root).resolve() / "server" / "static" / "js"
        if (folder / "bokeh.min.js").is_file():
            return folder
    return None


def _load_jupyter_server_extension(server: Any) -> None:
    """Add the route to *server* (a ``jupyter_server.serverapp.ServerApp``)."""
    folder = bokehjs_folder()
    if folder is None:
        server.log.warning(
            "pathways_lab_server: no Bokeh beside the Jupyter server, so live views ask the kernel "
            "for BokehJS, which waits while a cell runs. Remedy: pip install bokeh here."
        )
        return
    from jupyter_server.utils import url_path_join

    from pathways_lab_server.handler import BokehJSHandler

    pattern = url_path_join(server.web_app.settings["base_url"], ROUTE, r"(bokeh[a-z-]*\.min\.js)")
    server.web_app.add_handlers(".*$", [(pattern, BokehJSHandler, {"path": [str(folder)]})])
    os.environ[VARIABLE] = ROUTE.rstrip("/")
    server.log.info(f"pathways_lab_server: BokehJS from {folder}")
