"""The request handler behind the BokehJS route.

Built on the handler that serves Jupyter's own static files, because the one for
user files answers 404 for anything below a hidden folder, and ``.venv`` is one.
Unlike Jupyter's own static files, which the login page needs, these are only
for pages of people who are logged in; a stranger is refused with 403 (and not
redirected to the login page: a ``<script>`` would swallow that as success).
"""

from __future__ import annotations

from collections.abc import Awaitable
from typing import ClassVar

from jupyter_server.base.handlers import FileFindHandler
from tornado import web


class BokehJSHandler(FileFindHandler):
    """GET and HEAD of one file.  With ``?v=<version>`` browsers keep it for good."""

    # The base class keeps found paths by file name, for all static routes alike.
    _static_paths: ClassVar[dict[str, str]] = {}

    @web.authenticated
    def get(self, path: str, include_body: bool = True) -> Awaitable[None]:
        """Send the file, or 304 when the browser's copy is as new."""
        return web.StaticFileHandler.get(self, path, include_body)

    @web.authenticated
    def head(self, path: str) -> Awaitable[None]:
        """Send the headers only."""
        return web.StaticFileHandler.head(self, path)

    def get_login_url(self) -> str:
        """Where `web.authenticated` would redirect to; here nowhere."""
        raise web.HTTPError(403, "BokehJS is served to logged-in users of this Jupyter server")
