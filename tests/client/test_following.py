"""Slices follow their devices, whichever threads have asked for them."""

from __future__ import annotations

import dataclasses
import gc
import threading
from typing import Any

from pathways_lab.client.session.slice_moves import Following
from tests.client.kit import a_slice


def test_slices_that_two_threads_ask_for_at_once_both_follow() -> None:
    following, one, other = Following(), a_slice(2), a_slice(2)
    second = threading.Thread(target=following.follow, args=(other,))

    def in_the_middle() -> None:
        """Called when the slices that are known are looked through, for the first one."""
        following._slices.clear()
        second.start()
        second.join(0.1)  # it ends now, or waits for the first one

    known: Any = [in_the_middle]
    following._slices = known
    following.follow(one)
    second.join()
    for on in (one, other):
        moved = dataclasses.replace(on.binding, island="island1", generation=1)
        following.bound(moved)
        assert on.binding is moved


def test_what_is_bound_after_the_slice_is_gone_is_nobodys() -> None:
    following, gone = Following(), a_slice(2)
    following.follow(gone)
    binding = gone.binding
    del gone
    gc.collect()
    following.bound(binding)
    assert [entry() for entry in following._slices] == [None]
