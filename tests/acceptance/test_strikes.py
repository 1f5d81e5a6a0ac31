"""An interrupt that Python loses keeps nothing alive."""

from __future__ import annotations

import gc
import weakref

from tests.acceptance.strikes import struck


class Held:
    """Like a handle: it must go with the frame that had it."""


class Struck:
    def __del__(self) -> None:
        raise KeyboardInterrupt


def test_an_interrupt_that_a_callback_loses_keeps_no_frame() -> None:
    kept: list[weakref.ref[Held]] = []

    def do() -> int:
        held = Held()
        kept.append(weakref.ref(held))
        last = Struck()
        del last
        return len(kept)

    while not kept:  # an interrupt may come before it has begun
        struck(5.0, do)
    gc.collect()
    assert kept[0]() is None
