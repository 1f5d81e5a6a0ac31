"""The process that draws a lab's pages: ``python -m pathways_lab.notebook.dashboard.process``.

Problem: somebody looks at the lab: pages have to move some times a second while
every kernel is busy, cost little, and end when nobody looks any more.

How: a page asks for what follows the number that it has, and that is when it is
drawn: what nobody looks at costs nothing, what several pages show is drawn once.
Records that came faster than a page asks are taken in between two questions.
On a busy machine both is seldom, for all pages in turn.  No request waits for
anything: browsers have few connections to a server, and JupyterLab needs them too.

Rule for maintainers: GETs only, nothing that changes the lab; all addresses
relative.  It runs at a low priority: whoever computes goes first.
"""

from __future__ import annotations

import asyncio
import json
import math
import socket
import time
from pathlib import Path
from typing import Any

from tornado import httpserver, web

from pathways_lab.notebook.dashboard import PANELS, path_of
from pathways_lab.notebook.dashboard.feed import WINDOW, Feed, begun
from pathways_lab.notebook.dashboard.page import BOKEHJS, html
from pathways_lab.notebook.dashboard.state import state
from pathways_lab.notebook.dashboard.watch import Watch
from pathways_lab.notebook.panels import DEFAULT
from pathways_lab.notebook.scene.live_fold import Present
from pathways_lab.notebook.view import PAGE
from pathways_lab.notebook.view.cpu_budget import Pace
from pathways_lab.notebook.view.machine_load import COUNT, give_way, spare
from pathways_lab.notebook.view.picture import FOLD
from pathways_lab.runtime.cluster.attach import ControlAddress
from pathways_lab.runtime.processes import child_process

PERIOD = 0.2
"""Seconds between two updates."""

FORGET = 10.0
"""Seconds after which panels that nobody asks for are forgotten."""

MOST = 32
"""Feeds at a time."""

_LARGEST = 1e15
"""Limit of the numbers in a request, either way."""

ACTS = ("choose", "fold", "save", "seek", "sum", "text", "window")
"""The wishes that a page may have of its feed."""

LINGER = 60.0
"""Seconds after the last request at which the process ends."""

_HERE = Path(__file__).parent
_VIEWS = _HERE.parent / "view"

FILES = {
    "live.js": tuple(_VIEWS / name for name in PAGE),
    "live.css": (_VIEWS / "live.css",),
    "dashboard.js": (_HERE / "dashboard.js",),
    "dashboard.css": (_HERE / "dashboard.css",),
    "bokeh.min.js": (BOKEHJS,),
}
"""The parts of pages: each is some files, one after the other."""


class Gallery:
    """The feeds of a watched lab, brought up to date when somebody asks."""

    def __init__(self, watch: Watch) -> None:
        self.watch = watch
        self.asked = time.monotonic()
        self._feeds: dict[tuple[tuple[str, ...], str], Drawn] = {}
        self._present: Present | None = None
        self._worked = 0.0
        self._pace = Pace(self.asked, COUNT)
        self._turn, self._due = 0, self.asked
        self._number = 0
        self._state: dict[str, Any] = {}

    def feed(self, panels: tuple[str, ...], view: str = "") -> Feed:
        """The feed of some panels, as of now.

        view: names a page that has one of its own, because somebody there looks
            elsewhere than at the present.
        """
        self.asked, begun = time.monotonic(), time.thread_time()
        try:
            return self._feed(panels, view, self.asked - self._worked)
        finally:
            self._worked += time.monotonic() - self.asked
            self._pace.spent(time.thread_time() - begun)

    def _feed(self, panels: tuple[str, ...], view: str, now: float) -> Feed:
        """now: seconds in which this process could have answered whoever asked: those in
        which it worked do not count, or feeds would be forgotten whose pages wait in line."""
        self.watch.look()
        for other in [key for key, drawn in self._feeds.items() if now - drawn.asked > FORGET]:
            del self._feeds[other]
        present = self._present
        if present and present.timeline.clock() - present.folded > WINDOW:
            self._feeds.clear()  # it comes faster than it can be drawn: go on with the newest
        if not self._feeds:
            self._present = None
        drawn = self._feeds.get((panels, view))
        if drawn is None:
            if len(self._feeds) >= MOST:
                del self._feeds[min(self._feeds, key=lambda key: self._feeds[key].asked)]
            if self._present is None:
                self.watch.recall()
                self._present = begun(self.watch.timeline)
            feed = Feed(self._present, panels, _stamp())
            drawn = self._feeds[panels, view] = Drawn(feed)
        drawn.asked = now
        drawn.refresh(self._turn_at(time.monotonic()))
        return drawn.feed

    def _turn_at(self, now: float) -> int:
        """In each turn every feed may be drawn once; the next begins when that is paid for."""
        if now >= self._due:
            rest = self._pace.rest(now, spare())
            self._due = now + (rest or PERIOD)
            self._turn += not rest
        return self._turn

    def go_on(self) -> float:
        """Take in what came faster than it was asked for, as far as the machine has time for it.

        The result: seconds until the next time.
        """
        present = self._present
        if present is None or not present.behind:
            return PERIOD
        late = present.timeline.clock() - present.folded
        rest = self._pace.rest(time.monotonic(), spare(), late=late)
        if not rest:
            begun = time.thread_time()
            present.collect(present.timeline.clock(), FOLD)
            self._pace.spent(time.thread_time() - begun)
            rest = self._pace.rest(time.monotonic(), spare(), late=late)
        return max(PERIOD / 4, 2 * rest)  # drawing has its turn as well

    def state(self, since: int) -> bytes:
        """The side panel's data with their number, as JSON; nothing when that is *since*."""
        scene = self.feed(("islands",)).picture.scene
        found = state(scene, self.watch.clients, self.watch.timeline.clock())
        if found != self._state:
            self._number, self._state = max(self._number + 1, _stamp()), found
        if self._number == since:
            return b""
        return json.dumps({"number": self._number, **found}).encode()


class Drawn:
    """A feed.  asked: when somebody did last, as :meth:`Gallery.feed` counts seconds."""

    def __init__(self, feed: Feed) -> None:
        self.feed = feed
        self.asked = 0.0
        self._turn = -1

    def refresh(self, turn: int) -> None:
        """Draw it again, once in each turn."""
        if turn != self._turn:
            self._turn = turn
            self.feed.tick()


def _stamp() -> int:
    """A number above all that processes before this one have given."""
    return time.time_ns() // 1_000_000


class Base(web.RequestHandler):
    """gallery: what answers."""

    def initialize(self, gallery: Gallery) -> None:
        self.gallery = gallery


class PageHandler(web.RequestHandler):
    """The page of a panel, or of the usual ones."""

    def get(self, panel: str = "") -> None:
        self.set_header("Cache-Control", "no-cache")
        self.finish(html(panel))


class FeedHandler(Base):
    """``feed?panels=order,queues&since=7``: messages as :func:`.encode.framed` makes them.

    ``view`` names a page that has a feed of its own; ``do`` and ``value`` say first
    what somebody wants there.
    """

    def get(self) -> None:
        ask = self.get_query_argument
        names = tuple(dict.fromkeys(filter(None, ask("panels", "").split(","))))
        if not set(names) <= set(PANELS):
            raise web.HTTPError(404)
        since, do, value = _count(ask("since", "0")), ask("do", ""), ask("value", "")
        feed = self.gallery.feed(names or DEFAULT, ask("view", "")[:40])
        answer = feed.do(do, _wish(value)) if do in ACTS else b""
        self.set_header("Content-Type", "application/octet-stream")
        self.set_header("Cache-Control", "no-store")
        self.finish(answer + feed.since(since))


class StateHandler(Base):
    """``state?since=7``: what the side panel shows, as JSON."""

    def get(self) -> None:
        since = _count(self.get_query_argument("since", "0"))
        self.set_header("Content-Type", "application/json")
        self.set_header("Cache-Control", "no-store")
        self.finish(self.gallery.state(since))


class FileHandler(web.RequestHandler):
    """One of :data:`FILES`.  With ``?v=`` browsers may keep it."""

    def get(self, name: str) -> None:
        kind = "text/css" if name.endswith(".css") else "text/javascript"
        self.set_header("Content-Type", f"{kind}; charset=utf-8")
        kept = "max-age=31536000, immutable" if self.get_query_argument("v", "") else "no-cache"
        self.set_header("Cache-Control", kept)
        self.finish(b"\n".join(path.read_bytes() for path in FILES[name]))


def _number(text: str) -> float:
    """A gang, or seconds on the axis.  Raises HTTPError 400, as all that parses a request."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not abs(number) <= _LARGEST:
        raise web.HTTPError(400, "value is not a number, or too large")
    return number


def _wish(text: str) -> float | list[float] | None:
    """A number, two for a stretch of time, or none."""
    numbers = [_number(part) for part in text.split(",")] if text else []
    if len(numbers) > 2:
        raise web.HTTPError(400, "value is more than two numbers")
    return numbers if len(numbers) == 2 else numbers[0] if numbers else None


def _count(text: str) -> int:
    """The number of a message."""
    number = _number(text)
    if number < 0:
        raise web.HTTPError(400, "since is a count of messages")
    return int(number)


def application(gallery: Gallery) -> web.Application:
    """Everything that is served."""
    about = {"gallery": gallery}
    panels = "|".join(PANELS)
    files = "|".join(name.replace(".", r"\.") for name in FILES)
    return web.Application(
        [
            (f"/{path_of()}", PageHandler),
            (f"/{path_of(f'({panels})')}", PageHandler),
            (r"/pathways-lab/feed", FeedHandler, about),
            (r"/pathways-lab/state", StateHandler, about),
            (rf"/pathways-lab/({files})", FileHandler),
        ],
        compress_response=False,
    )


async def serve(listener: socket.socket, control: ControlAddress) -> None:
    """Answer on *listener* until nobody asks any more."""
    watch = await asyncio.to_thread(Watch, control)
    gallery = Gallery(watch)
    server = httpserver.HTTPServer(application(gallery))
    listener.setblocking(False)
    server.add_sockets([listener])
    while not watch.ended and time.monotonic() - gallery.asked < LINGER:
        await asyncio.sleep(gallery.go_on())
    # Requests from now on wait for the next process.
    server.stop()
    await server.close_all_connections()
    watch.close()


def main() -> None:
    """The process: configuration in, then serve."""
    child_process.begin()
    give_way()
    config = child_process.configuration()
    listener = socket.socket(fileno=config["listen"])
    control = ControlAddress(config["address"], bytes.fromhex(config["key"]), config["tls"])
    asyncio.run(serve(listener, control))
    child_process.leave()


if __name__ == "__main__":
    main()
