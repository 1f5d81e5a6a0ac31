"""The request handlers of scripts: those of Bokeh, and those of live views.

The first is built on the handler that serves Jupyter's own static files, because the one for
user files answers 404 for anything below a hidden folder, and ``.venv`` is one.
Unlike Jupyter's own static files, which the login page needs, these are only
for pages of people who are logged in; a stranger is refused with 403 (and not
redirected to the login page: a ``<script>`` would take that for success).
"""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

from jupyter_server.base.handlers import FileFindHandler, JupyterHandler
from tornado import web

KINDS = {"js": "text/javascript", "css": "text/css"}


class ViewHandler(JupyterHandler):
    """GET of the script of live views, or of their style: all files of a kind in *folder*, one
    after the other."""

    def initialize(self, folder: Path) -> None:
        self._folder = folder

    def get(self, kind: str) -> None:
        if self.current_user is None:
            raise web.HTTPError(403, "scripts are served to logged-in users of this Jupyter server")
        self.set_header("Content-Type", f"{KINDS[kind]}; charset=utf-8")
        self.set_header("Cache-Control", "no-cache")
        files = sorted(self._folder.glob(f"*.{kind}"))
        self.finish("\n".join(file.read_text(encoding="utf-8") for file in files))


class BokehJSHandler(FileFindHandler):
    """GET and HEAD of one file.  With ``?v=<version>`` browsers keep it for good, so that no other
    version is given for it."""

    async def prepare(self) -> None:  # type: ignore[override]  # Jupyter's own handlers do the same
        """Refuse whoever is not logged in, before anything is looked up."""
        await super().prepare()
        if self.current_user is None:
            raise web.HTTPError(403, "BokehJS is served to logged-in users of this Jupyter server")
        if self.get_query_argument("v", None) not in (None, metadata.version("bokeh")):
            raise web.HTTPError(404, "another version of Bokeh is installed beside this server")


# The base class keeps paths it found by file name, for all static routes alike.
BokehJSHandler._static_paths = {}
