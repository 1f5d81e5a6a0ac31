"""One choice of panels, and the pages that follow it.

Problem: pages come and go and ask at their own pace; folding is paid once, drawing
once for all that show the same, and an answer must continue exactly where a page stands.

How: every change is a message with a number, the last few are kept.  A page says
which number it has and gets what follows, or everything if that is gone.

Rule for maintainers: no thread runs here; the server ticks.
"""

from __future__ import annotations

from collections import deque

from pathways_lab.notebook.scene.live_fold import LATE, Present, newest
from pathways_lab.notebook.view.answers import ANSWERED, answer
from pathways_lab.notebook.view.encode import framed
from pathways_lab.notebook.view.picture import Picture, Wanted
from pathways_lab.notebook.view.stream import Stream
from pathways_lab.timeline.log import Timeline

KEPT = 64
"""Messages for pages that are late."""

WINDOW = 20.0
"""Seconds that the pages look back."""

FIRST = 10_000
"""Records that the first picture is made of at most."""


def begun(timeline: Timeline) -> Present:
    """The present, for all feeds."""
    return newest(timeline, WINDOW, FIRST, LATE, stepwise=True)


class Feed:
    """Panels of a timeline as numbered messages, from *first* on.

    picture: what they show.
    """

    def __init__(self, present: Present, panels: tuple[str, ...], first: int) -> None:
        timeline = present.timeline
        self.picture = Picture(timeline, Wanted(panels, window=WINDOW, stepwise=True), present)
        self._stream = Stream(*self.picture.look(timeline.clock()))
        self._stream.seq = first
        self._messages: deque[tuple[int, bytes]] = deque(maxlen=KEPT)

    def tick(self) -> None:
        """Fold what is new; one message more, if anything is different."""
        message = self._stream.update(*self.picture.look(self.picture.timeline.clock()))
        if message is None:
            return
        if message["type"] == "snapshot":
            # Another shape: whoever follows begins anew.
            self._messages.clear()
        else:
            self._messages.append((self._stream.seq, framed(message)))

    def do(self, name: str, value: float | list[float] | None) -> bytes:
        """Do the wish of a page's person: one of :data:`.answers.ANSWERED`, or of
        :meth:`Picture.do`; the answer, if there is any."""
        if name in ANSWERED:
            return framed(answer(self.picture, name))
        self.picture.do(name, value)
        self.tick()
        return b""

    def since(self, seq: int) -> bytes:
        """The messages that bring a page with the number *seq* to the present; 0: an empty page."""
        if seq == self._stream.seq:
            return b""
        if self._messages and self._messages[0][0] <= seq + 1 <= self._stream.seq:
            return b"".join(frame for number, frame in self._messages if number > seq)
        from pathways_lab.notebook.draw.bokeh_figures import (
            documented,  # the first page waits for Bokeh
        )

        return framed(documented(self._stream.snapshot()))
