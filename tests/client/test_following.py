"""Slices follow their devices, and each is one object."""

from __future__ import annotations

import dataclasses
import gc
from concurrent.futures import ThreadPoolExecutor

from pathways_lab.client.lab.devices import OnSlices, Slice
from pathways_lab.client.session.slice_moves import Following
from tests.client.kit import a_slice


def test_a_slice_that_two_threads_come_upon_at_once_is_one_object() -> None:
    following, first = Following(), a_slice(2)
    made = [Slice(first.binding) for _ in range(8)]
    with ThreadPoolExecutor(8) as pool:
        known = [*pool.map(following.follow, made)]
    (only,) = {id(on) for on in known}
    moved = dataclasses.replace(first.binding, island="island1", generation=1)
    following.bound(moved)
    assert known[0].binding is moved
    following.bound(first.binding)
    assert known[0].binding is moved, "older news change nothing"
    assert id(following.known(first.id)) == only


def test_what_is_bound_after_the_slice_is_gone_is_nobodys() -> None:
    following, gone = Following(), a_slice(2)
    following.follow(gone)
    binding = gone.binding
    del gone
    gc.collect()
    following.bound(binding)
    assert following.known(binding.slice) is None


class Entry:
    """looks: how often it was asked."""

    def __init__(self) -> None:
        self.released, self.looks = False, 0

    def __getattribute__(self, name: str) -> object:
        if name == "released":
            self.looks += 1
        return object.__getattribute__(self, name)


def test_an_addition_looks_at_the_others_when_a_slice_was_released_and_else_at_none() -> None:
    known = OnSlices[int, Entry]()
    entries = [Entry() for _ in range(1000)]
    for number, entry in enumerate(entries):
        known.add(number, entry)
    assert sum(entry.looks for entry in entries) <= 1, "one slice may have ended elsewhere"
    entries[7].released = True
    a_slice(1).end()
    known.add(1000, Entry())
    assert [*known] == [n for n in range(1001) if n != 7]
