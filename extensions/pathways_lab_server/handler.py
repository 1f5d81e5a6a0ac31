"""The request handler behind the BokehJS route.

Built on the handler that serves Jupyter's own static files, because the one for
user files answers 404 for anything below a hidden folder, and ``.venv`` is one.
Unlike Jupyter's own static files, which the login page needs, these are only
for pages of people who are logged in; a stranger is refused with 403 (and not
redirected to the login page: a ``<script>`` would take that for success).
"""

from __future__ import annotations

from jupyter_server.base.handlers import FileFindHandler
from tornado import web


class BokehJSHandler(FileFindHandler):
    """GET and HEAD of one file.  With ``?v=<version>`` browsers keep it for good."""

    async def prepare(self) -> None:  # type: ignore[override]  # Jupyter's own handlers do the same
        """Refuse whoever is not logged in, before anything is looked up."""
        await super().prepare()
        if self.current_user is None:
            raise web.HTTPError(403, "BokehJS is served to logged-in users of this Jupyter server")


# The base class keeps paths it found by file name, for all static routes alike.
BokehJSHandler._static_paths = {}
