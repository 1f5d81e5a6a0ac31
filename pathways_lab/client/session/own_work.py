"""The lines of a client between its calls: where it waits, and where it works itself.

Problem: devices that have nothing to do wait for the client's next call, and the picture can name
the line that keeps it only if the kernel says which one that is.

How: a wait notes its line.  Now and then it is looked where the thread of the last wait is; the
line that was seen most in the last looks travels with the next run.

Rule for maintainers: nothing is guessed.  A thread inside of JAX or of this package may wait there,
so that is no work of the user's; and a look costs microseconds, however deep the thread is.

Paper: none (the paper's clients are not looked into).
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from typing import Any

from pathways_lab.client.code import source_lines
from pathways_lab.core.program.program import NO_LINE
from pathways_lab.transport.codec import pack

LOOKS = 10
"""Newest looks that tell where a client works."""


class OwnWork:
    """See the module's docstring.

    waited: the line that waited for a value since the last run.
    """

    def __init__(self) -> None:
        self.waited = NO_LINE
        self._thread = threading.get_ident()
        self._seen: deque[source_lines.Place | None] = deque(maxlen=LOOKS)
        self._news = False

    def waits(self) -> None:
        """The user's code waits for a value, here and now."""
        self.waited, self._thread = source_lines.of_caller(), threading.get_ident()

    def look(self) -> None:
        """Look where the client is now; in any thread."""
        self._seen.append(source_lines.place_of_thread(self._thread))
        self._news = True

    def take(self) -> dict[str, Any]:
        """The fields of a run that tell of the time before it; each is told once."""
        told: dict[str, Any] = {}
        if self.waited.number:
            told["waited"], self.waited = pack(self.waited), NO_LINE
        if self._news:
            self._news = False
            if places := [place for place in tuple(self._seen) if place is not None]:
                ((place, _),) = Counter(places).most_common(1)
                told["worked"] = pack(source_lines.line_at(place))
        return told
