"""A number is used once, and little is remembered of it."""

from __future__ import annotations

import random

from pathways_lab.runtime.control_plane import used_numbers
from pathways_lab.runtime.control_plane.used_numbers import Once


def test_a_number_is_used_once() -> None:
    used = Once()
    assert used.use(7)
    assert not used.use(7)
    assert used.use(6)
    assert used.use(1 << 33)
    assert not used.use(1 << 33)


def test_numbers_that_count_up_are_never_refused() -> None:
    """Some are left out, and some come a little late."""
    used, rng = Once(), random.Random(0)
    numbers = [n for n in range(1 << 32, (1 << 32) + 100_000) if n % 7]
    for start in range(0, len(numbers), 50):
        part = numbers[start : start + 50]
        rng.shuffle(part)
        numbers[start : start + 50] = part
    assert all(map(used.use, numbers))
    assert not any(map(used.use, numbers))
    assert len(used._pages) < 110


def test_what_is_remembered_is_bounded_and_nothing_is_used_twice() -> None:
    used, rng = Once(), random.Random(0)
    taken = {n for n in (rng.randrange(1 << 40) for _ in range(20_000)) if used.use(n)}
    assert len(used._pages) <= used_numbers._PAGES
    assert not any(map(used.use, taken))
