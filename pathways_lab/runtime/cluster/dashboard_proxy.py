"""Requests for the lab's pages, passed on by the web server of the Dask scheduler.

Problem: browsers reach the scheduler's port, through whatever proxy; what draws
the pages answers on a Unix socket.

How: pages fetch what is new by plain GETs, which every proxy between here and a
browser understands.

A Dask scheduler's web server often listens on every interface, and neither it nor the pages ask
anybody who he is.  So the pages answer to this machine only, and to requests that name it: a
page of another site that has its name lead here is refused.

Rule for maintainers: this runs in the scheduler's loop: pass on, look at no content.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any
from urllib.parse import quote

from tornado import web
from tornado.httpclient import HTTPError
from tornado.netutil import Resolver
from tornado.simple_httpclient import SimpleAsyncHTTPClient

_PATIENCE = 30.0
"""Seconds that a request may take: the first one starts the process that answers it."""

_ELSEWHERE = "From the machine of the Dask scheduler only: ssh -L 8787:127.0.0.1:8787 leads there"
_PASSED = ("Content-Type", "Cache-Control")


class _Here(Resolver):
    """Every name is the same Unix socket."""

    def initialize(self, path: Path) -> None:
        """path: of the socket."""
        self._path = str(path)

    async def resolve(
        self, host: str, port: int, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[tuple[int, Any]]:
        return [(socket.AF_UNIX, self._path)]


class PageHandler(web.RequestHandler):
    """GET of anything that the process behind the door serves."""

    def initialize(self, where: Callable[[], Path], hosts: frozenset[str]) -> None:
        """where: its socket is now.  hosts: that a request may name; none: any."""
        self._where = where
        self._hosts = hosts

    def prepare(self) -> None:
        """Nobody else is let in."""
        place = ipaddress.ip_address(self.request.remote_ip or "")
        if not (place.is_loopback or place.is_unspecified):  # the latter is a Unix socket
            raise web.HTTPError(403, reason=_ELSEWHERE)
        if self._hosts and self.request.host_name.lower() not in self._hosts:
            raise web.HTTPError(403, reason="Another machine is named in Host")

    async def get(self, page: str) -> None:
        """Pass it on, and the answer back."""
        client = SimpleAsyncHTTPClient(
            force_instance=True, resolver=_Here(self._where()), max_body_size=64 << 20
        )
        query = f"?{self.request.query}" if self.request.query else ""
        try:
            answer = await client.fetch(
                f"http://dashboard/{quote(page)}{query}",
                request_timeout=_PATIENCE,
                decompress_response=False,
            )
        except HTTPError as error:
            raise web.HTTPError(error.code if error.code < 500 else 502) from None
        except OSError:
            raise web.HTTPError(502, "the lab is gone") from None
        finally:
            client.close()
        for name in _PASSED:
            if name in answer.headers:
                self.set_header(name, answer.headers[name])
        self.finish(answer.body)


def routes(
    names: Iterable[str], where: Callable[[], Path], hosts: frozenset[str]
) -> list[tuple[str, type[PageHandler], dict[str, Any]]]:
    """For a tornado application: the pages, and what they fetch, below whatever prefix.

    names: of the pages.  where: the socket of what draws them is; a later lab has another.
    hosts: see :class:`PageHandler`.
    """
    paths = "|".join((*names, "pathways-lab/.+"))
    return [(rf"(?:/.*)?/({paths})", PageHandler, {"where": where, "hosts": hosts})]
