"""Numbers that may be used once each, remembered in little memory.

Problem: a message that comes a second time must not do what it did again, also long after
what it began is over; and a client makes millions of numbers, most of them in order.

How: a bit for each number, in pages of the numbers that lie together.  When there are too
many pages the one that was begun first goes, and every number up to its end counts as used.

Rule for maintainers: whoever makes numbers as clients do (counting up, some left out, a few
out of order) is never refused; who does not is refused at most its own.
"""

from __future__ import annotations

_BITS = 10
"""A page has two to the power of this many numbers."""
_PAGES = 4096


class Once:
    """Numbers that were used."""

    def __init__(self) -> None:
        self._pages: dict[int, int] = {}
        self._first = 0

    def use(self, number: int) -> bool:
        """Whether *number* had not been used before; from now on it has."""
        page, bit = number >> _BITS, 1 << (number & ((1 << _BITS) - 1))
        used = self._pages.get(page, 0)
        if page < self._first or used & bit:
            return False
        self._pages[page] = used | bit
        if len(self._pages) > _PAGES:
            oldest = next(iter(self._pages))
            del self._pages[oldest]
            self._first = max(self._first, oldest + 1)
        return True
