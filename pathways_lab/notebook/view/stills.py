"""Still pictures of a live view, for the notebook to keep while the view moves.

Problem: a notebook may be saved at any moment, and its kernel may be gone at the next one.
So a static picture of what is shown is made from time to time, and at once when nothing moves any
more.  The time for it is bounded by itself: the moving picture does not rest for it.

Rule for maintainers: no clock of the day here, times are given.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

from pathways_lab.notebook.view.frozen import Bundle
from pathways_lab.notebook.view.picture import Picture

PERIOD = 10.0
"""Seconds between two still pictures of a view that moves."""

SHARE = 0.01
"""The share of one processor that the still pictures of a view may take."""


class Still(NamedTuple):
    """A still picture.  stands: nothing moves, so it shows all there is."""

    stands: bool
    bundle: Bundle


class Stills:
    """Those of one picture.  used: processor seconds of this thread so far."""

    def __init__(self, picture: Picture, used: Callable[[], float] = time.thread_time) -> None:
        self._picture, self._used = picture, used
        self._of: tuple[float, ...] = ()
        self._made, self._rest = float("-inf"), 0.0

    def take(self, now: float) -> Still | None:
        """The next one; None: it is not time (seconds), or it would be the last one again."""
        picture, stands = self._picture, self._picture.stands
        content = (*picture.content, stands)
        rest = self._rest if stands else max(self._rest, PERIOD)
        if content == self._of or now - self._made < rest:
            return None
        begun = self._used()
        bundle = picture.still()
        self._made, self._of = now, content
        self._rest = (self._used() - begun) / SHARE
        return None if bundle is None else Still(stands, bundle)
