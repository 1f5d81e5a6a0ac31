"""Is anybody there: hosts that say nothing are asked, and those that do not answer are named.

Problem: a host that is stopped, or whose machine is gone, keeps its connection
and says nothing, which is also what a host does that has nothing to say.  And
not everything that waits for it is a gang: code is compiled there, arrays are
read from there.

Rule for maintainers: no sockets and no clock here.  A host that talks is not
asked, so this costs a busy lab nothing.

Paper: section 4.1.
"""

from __future__ import annotations

from collections.abc import Callable

QUIET = 1.0
"""Seconds without a word after which a host is asked."""
ANSWER = 1.5
"""Seconds for an answer, which costs a host microseconds."""


class Pulse:
    """ask(host): send it a pulse, which it answers at once."""

    def __init__(self, ask: Callable[[str], object]) -> None:
        self._ask = ask
        self._heard: dict[str, float] = {}
        self._asked: dict[str, float] = {}

    def heard(self, host: str, now: float) -> None:
        """A host has joined, or has said something."""
        self._heard[host] = now
        if self._asked:
            self._asked.pop(host, None)

    def lost(self, host: str) -> None:
        self._heard.pop(host, None)
        self._asked.pop(host, None)

    def look(self, now: float) -> None:
        """Now and then."""
        for host, heard in self._heard.items():
            if host not in self._asked and now - heard > QUIET:
                self._asked[host] = now
                self._ask(host)

    def silent(self, now: float) -> dict[str, float]:
        """Hosts that do not answer, and for how many seconds they have said nothing."""
        return {
            host: now - self._heard[host]
            for host, asked in self._asked.items()
            if now - asked > ANSWER
        }
