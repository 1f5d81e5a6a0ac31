"""Almost right requests for the lab's pages, by the million; no answer is a fault of ours.

``python -m tests.notebook.fuzz_pages --inputs 1000000`` asks the server that draws the pages,
directly and through the one that passes requests on: every address that they serve, with one
thing changed in its path, query, method or headers.  It must hold that

* every answer is below 500, and every connection is answered or closed;
* who asks rightly gets the pages, before and after.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import quote

from tornado import httpserver, netutil, web

from pathways_lab.notebook.dashboard import PANELS, path_of, process
from pathways_lab.notebook.draw import bokeh_figures
from pathways_lab.runtime.cluster.dashboard_proxy import routes
from pathways_lab.timeline.log import Timeline
from tests.notebook.synthetic import training
from tests.runtime.mutate import Mutator

GOOD = (
    f"/{path_of()}", *[f"/{path_of(panel)}" for panel in PANELS],
    "/pathways-lab/feed?panels=order,queues&since=7&view=me", "/pathways-lab/feed?since=0",
    "/pathways-lab/feed?view=me&do=choose&value=3", "/pathways-lab/feed?view=me&do=seek&value=0.5",
    "/pathways-lab/feed?view=me&do=text", "/pathways-lab/feed?view=me&do=fold",
    "/pathways-lab/feed?view=me&do=sum&value=0.1,0.5", "/pathways-lab/state?since=7",
    *[f"/pathways-lab/{name}?v=1" for name in process.FILES if name != "bokeh.min.js"],
)  # fmt: skip
"""All that is served."""
METHODS = ("GET",) * 30 + ("HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PATCH", "get", "X", "")
HEADERS = (
    "", "", "", "Host: evil.example", "Host:", "Content-Length: 5", "Content-Length: -1",
    "Transfer-Encoding: chunked", "If-None-Match: *", "Range: bytes=9-1", "Cookie: \xff",
    "Accept-Encoding: gzip", "Expect: 100-continue", "X: " + "y" * 2000, "no header at all",
)  # fmt: skip
PATIENCE = 20.0


def application() -> web.Application:
    """The pages of a lab in which something has happened."""
    timeline = Timeline(clock=lambda: 1.0)
    timeline.extend(training(2))
    nothing: Any = SimpleNamespace(
        timeline=timeline, clients=("ann",), ended="", look=lambda: None, recall=lambda: None
    )
    return process.application(process.Gallery(nothing))


@contextlib.asynccontextmanager
async def servers() -> AsyncIterator[tuple[Path, Path]]:
    """Sockets of the server that draws, and of the one before it."""
    with tempfile.TemporaryDirectory() as folder:
        behind, before = Path(folder, "behind"), Path(folder, "before")
        names = [path_of(), *map(path_of, PANELS)]
        forwarding = web.Application([*routes(names, lambda: behind, frozenset())])
        made = []
        for path, what in ((behind, application()), (before, forwarding)):
            server = httpserver.HTTPServer(what)
            server.add_socket(netutil.bind_unix_socket(str(path)))
            made.append(server)
        yield behind, before
        for server in made:
            server.stop()
            await server.close_all_connections()


class Browser:
    """Asks over one connection, and over another when that is closed."""

    def __init__(self, path: Path) -> None:
        self._path = str(path)
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def ask(self, request: bytes) -> int:
        """The status of the answer; 0: the connection was closed without one."""
        if self._streams is None:
            self._streams = await asyncio.open_unix_connection(self._path, limit=1 << 26)
        reader, writer = self._streams
        try:
            writer.write(request)
            return await asyncio.wait_for(self._answer(reader), PATIENCE)
        except (asyncio.IncompleteReadError, ConnectionError):
            self.close()
            return 0

    async def _answer(self, reader: asyncio.StreamReader) -> int:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin1")
        status = int(head.split(" ", 2)[1])
        lengths = [line[15:] for line in head.split("\r\n") if line.startswith("Content-Length:")]
        self._streams = self._streams if lengths else None
        await reader.readexactly(int(lengths[0]) if lengths else 0)
        return status

    def close(self) -> None:
        if self._streams is not None:
            self._streams[1].close()
        self._streams = None


class Fuzz:
    """inputs: requests so far.  answers: how many of each status."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.mutator = Mutator(self.rng)
        self.inputs = 0
        self.answers: Counter[int] = Counter()

    def request(self) -> tuple[bytes, bool]:
        """A request, and whether the connection may wait for more of it."""
        rng = self.rng
        path, _, query = rng.choice(GOOD).partition("?")
        fields = dict(part.split("=") for part in query.split("&")) if query else {}
        chance = rng.random()
        if chance < 0.5 and fields:
            fields = self.mutator.fields(fields)
        elif chance < 0.7:
            folder = rng.choice(("/", "/pathways-lab/", f"{path}/"))
            path = folder + rng.choice((str(self.mutator.value(path[1:])), "a\r\nb", "a?b#c"))
        try:
            query = "&".join(f"{quote(str(k))}={quote(str(v))}" for k, v in fields.items())
            target = quote(path, safe="/") + (f"?{query}" if query else "")
        except UnicodeEncodeError:
            target = "/"
        method, header = "GET", ""
        if chance > 0.85:
            method, header = rng.choice(METHODS), rng.choice(HEADERS)
        lines = [f"{method} {target} HTTP/1.1", "Host: localhost", *([header] if header else [])]
        data = ("\r\n".join(lines) + "\r\n\r\n").encode("latin1", "replace")
        damaged = rng.random() < 0.05
        if damaged:
            data = self.mutator.damaged(data) + b"\r\n\r\n"
        odd = damaged or header.startswith(("Content-Length: 5", "Transfer", "Expect"))
        return data, odd or method == "HEAD"

    async def once(self, browser: Browser, path: Path) -> None:
        """One input."""
        data, odd = self.request()
        if odd:
            # It may be half of something, or two things: over a connection of its own.
            browser = Browser(path)
            reader, writer = await asyncio.open_unix_connection(str(path), limit=1 << 26)
            writer.write(data)
            writer.write_eof()
            answer = await asyncio.wait_for(reader.read(), PATIENCE)
            writer.close()
            status = int(answer.split(b" ", 2)[1]) if answer.startswith(b"HTTP") else 0
        else:
            status = await browser.ask(data)
        self.inputs += 1
        self.answers[status] += 1
        assert status < 500, (status, data)

    async def run(self, inputs: int, through: float = 0.05) -> None:
        """So many requests; *through*: this share of them through the server before."""
        logging.getLogger("tornado").setLevel(logging.CRITICAL)
        begun = time.monotonic()
        async with servers() as (behind, before):
            browsers = {path: Browser(path) for path in (behind, before)}
            await self._look(browsers)
            while self.inputs < inputs:
                path = before if self.rng.random() < through else behind
                await self.once(browsers[path], path)
                if self.inputs % 10_000 == 0:
                    print(f"{self.inputs:,} requests, {time.monotonic() - begun:.0f} s", flush=True)
            await self._look(browsers)
            for browser in browsers.values():
                browser.close()

    async def _look(self, browsers: dict[Path, Browser]) -> None:
        """Whoever asks rightly is answered."""
        for browser in browsers.values():
            for path in GOOD:
                status = await browser.ask(
                    f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()
                )
                assert status == 200, (status, path)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--inputs", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args(arguments)
    bokeh_figures.documented = lambda message: {"type": "snapshot"}  # drawing takes 20 ms
    fuzz = Fuzz(chosen.seed)
    asyncio.run(fuzz.run(chosen.inputs))
    print(f"{fuzz.inputs:,} requests, no answer of 500 or more: {sorted(fuzz.answers.items())}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
