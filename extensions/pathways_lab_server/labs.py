"""The labs of this user on this machine, and their pages.

Problem: whoever is logged in here, from wherever, wants to see the labs that
kernels of this server and others of the same user have started.

How: a lab listens on a Unix socket in its private folder; a folder that belongs
to this user and is closed to all others is one of ours.  Requests are passed on as
they come; the lab answers GETs only, and nothing that it answers changes anything.

Rule for maintainers: ask a lab only when somebody asks for that lab: the first
question starts the process that answers.  (The lab's own web server passes
requests on in the same way, with code of its own: this package imports none of it.)
"""

from __future__ import annotations

import os
import socket
import stat
import tempfile
from pathlib import Path
from typing import Any
from urllib.parse import quote

from jupyter_server.auth.decorator import authorized
from jupyter_server.base.handlers import JupyterHandler
from tornado import web
from tornado.httpclient import HTTPError
from tornado.netutil import Resolver
from tornado.simple_httpclient import SimpleAsyncHTTPClient

SOCKET = "dashboard"
KERNELS = "kernels"
"""Where kernels leave a file with their number."""

_PATIENCE = 30.0
_LARGEST = 64 << 20
_PASSED = ("Content-Type", "Cache-Control")


def folders() -> tuple[Path, ...]:
    """Where private folders of labs are made."""
    return tuple(dict.fromkeys((Path("/tmp"), Path(tempfile.gettempdir()))))


def labs() -> list[dict[str, Any]]:
    """This user's labs, newest first: ``name``, ``started`` (seconds since 1970), and
    ``kernels``: when those that have it opened it, by their numbers."""
    found: dict[str, float] = {}
    kernels: dict[str, dict[str, float]] = {}
    listening = _listening()
    for folder in folders():
        for path in folder.glob(f"pwlab-*/{SOCKET}"):
            made = _made(path)
            if made is not None and (listening is None or str(path) in listening):
                found[path.parent.name] = made
                kernels[path.parent.name] = _kernels(path.parent)
    newest = sorted(found, key=lambda name: -found[name])
    return [{"name": n, "started": found[n], "kernels": kernels[n]} for n in newest]


def _listening() -> set[str] | None:
    """Sockets on which a program listens; None where the system does not say (macOS).

    A lab that was killed, or a machine that was switched off, leaves its socket behind.
    """
    try:
        lines = Path("/proc/net/unix").read_text().splitlines()[1:]
    except OSError:
        return None
    return {fields[7] for line in lines if len(fields := line.split(maxsplit=7)) == 8}


def _kernels(folder: Path) -> dict[str, float]:
    try:
        with os.scandir(folder / KERNELS) as entries:
            return {e.name: e.stat(follow_symlinks=False).st_mtime for e in entries}
    except OSError:
        return {}


def _made(path: Path) -> float | None:
    """When a lab's socket was made; None: it is none, or somebody else's."""
    try:
        folder, entry = path.parent.lstat(), path.lstat()
    except OSError:
        return None
    ours = folder.st_uid == os.getuid() and stat.S_ISDIR(folder.st_mode)
    closed = not folder.st_mode & (stat.S_IRWXG | stat.S_IRWXO)
    return entry.st_mtime if ours and closed and stat.S_ISSOCK(entry.st_mode) else None


def socket_of(name: str) -> Path | None:
    """The socket of a lab; None: there is no such lab of this user."""
    for folder in folders():
        path = folder / name / SOCKET
        if _made(path) is not None:
            return path
    return None


STATE = "pathways-lab/state"
"""The page of a lab that side panels ask for all the time."""


class _Here(Resolver):
    """Every name is the same Unix socket."""

    def initialize(self, path: Path) -> None:
        self._path = str(path)

    async def resolve(
        self, host: str, port: int, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[tuple[int, Any]]:
        return [(socket.AF_UNIX, self._path)]


class _Handler(JupyterHandler):
    """For people who are logged in; others are refused, and not sent to the login page."""

    auth_resource = "pathways-lab"

    async def prepare(self) -> None:  # type: ignore[override]  # Jupyter's own handlers do the same
        await super().prepare()
        if self.current_user is None:
            raise web.HTTPError(403, "labs are shown to logged-in users of this Jupyter server")


class LabsHandler(_Handler):
    """GET: ``{"labs": [{"name", "started", "kernels"}, ...]}``, newest first."""

    @authorized
    def get(self) -> None:
        self.set_header("Cache-Control", "no-store")
        self.finish({"labs": labs()})


class PageHandler(_Handler):
    """GET of anything that a lab serves."""

    @authorized
    async def get(self, name: str, page: str) -> None:
        path = socket_of(name)
        if path is None and page == STATE:
            self.finish({"gone": True})  # browsers log other answers, and labs do end
            return
        if path is None:
            raise web.HTTPError(404, f"there is no lab called {name}")
        client = SimpleAsyncHTTPClient(
            force_instance=True, resolver=_Here(path), max_body_size=_LARGEST
        )
        query = f"?{self.request.query}" if self.request.query else ""
        try:
            answer = await client.fetch(
                f"http://lab/{quote(page)}{query}",
                request_timeout=_PATIENCE,
                decompress_response=False,
            )
        except HTTPError as error:
            raise web.HTTPError(error.code if error.code < 500 else 502) from None
        except OSError:
            raise web.HTTPError(502, f"the lab {name} does not answer") from None
        finally:
            client.close()
        for header in _PASSED:
            if header in answer.headers:
                self.set_header(header, answer.headers[header])
        self.finish(answer.body)
