"""Ctrl-C at every line of a call, a program's run and an upload: nothing hangs, nothing is lost."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import jax
import jax.export
import numpy as np
import pytest

import pathways_lab as pw
from pathways_lab.client.session import (
    call_batching,
    code_registry,
    connection,
    handles,
    session,
    transfers,
)
from pathways_lab.transport.deferred_signals import HeldBack
from tests.client.kit import FakeLab, fast
from tests.runtime.processes import until

_FILES = frozenset(
    module.__file__
    for module in (call_batching, connection, transfers, handles, code_registry, session)
)


@contextlib.contextmanager
def struck(place: int) -> Iterator[Callable[[], int]]:
    """Ctrl-C at the place-th line of these modules; how many lines there were."""
    seen = 0

    def local(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal seen
        if event == "line":
            seen += 1
            if seen == place:
                signal.raise_signal(signal.SIGINT)
        return local

    def enter(frame: FrameType, event: str, arg: Any) -> Any:
        return local if frame.f_code.co_filename in _FILES else None

    before, handler = sys.gettrace(), signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.settrace(enter)
    try:
        yield lambda: seen
    finally:
        sys.settrace(before)
        signal.signal(signal.SIGINT, handler)


class Work:
    """A lab with a handle, and things to do with it."""

    def __init__(self, fake: FakeLab) -> None:
        self.fake = fake
        on = fake.slice(2)
        self.step = pw.jit(lambda x: x + 1, on=on)
        self.add = pw.jit(lambda x, y: x + y, on=on)
        self.program = pw.program(lambda x: self.step(self.step(x)), name="twice")
        self.sharding = jax.sharding.NamedSharding(on.mesh, jax.sharding.PartitionSpec())
        self.x = self.step(np.zeros(4, np.float32)).block_until_ready()
        self.numbers = np.ones(4, np.float32)
        self.many = np.ones((64, 1024), np.float32)
        wide = fake.slice(4)
        self.columns = jax.sharding.NamedSharding(wide.mesh, jax.sharding.PartitionSpec(None, "x"))
        self.sum = pw.jit(lambda x: x.sum(), on=wide, in_shardings=self.columns)

    def call(self) -> None:
        self.step(self.step(self.x))

    def call_with_numbers(self) -> None:
        self.add(self.x, self.numbers)

    def call_while_others_wait(self) -> None:
        y = self.step(self.x)
        for _ in range(3):
            y = self.step(y)
        self.step(y).block_until_ready()

    def run(self) -> None:
        self.program(self.x)

    def upload(self) -> None:
        jax.device_put(self.numbers, self.sharding)

    def upload_to_several_hosts(self) -> None:
        jax.device_put(self.many, self.columns)

    def call_with_an_upload(self) -> None:
        self.sum(self.many)

    def whole(self) -> bool:
        """Whether a call is answered, and nothing is known but what there is a handle to."""
        try:
            assert float(self.step(self.x).result(timeout=1.0)[0]) == 2.0
            until(self._forgotten, 1.0)
        except (TimeoutError, AssertionError):
            return False
        return True

    def _forgotten(self) -> bool:
        link = self.fake.connection
        link.flush(drops=True)
        known = {*link._buffers, *self.fake.arrays, *self.fake.declared}
        return known == {self.x.buffer_id} and not link.runs and link.steps == 0


def bad_moment(fake: FakeLab, doing: str) -> tuple[int, int]:
    """The first line at which an interrupt hurts, 0 if there is none; and how many there are."""
    with pw.patched():
        work = Work(fake)
        do, place = getattr(work, doing), 1
        do()
        do()
        while True:
            interrupted: KeyboardInterrupt | None = None
            try:
                with struck(place) as lines:
                    do()
            except KeyboardInterrupt as error:
                # A kernel keeps the last traceback: what was to be uploaded goes all the same.
                interrupted = error if doing.startswith("upload") else None
            if not work.whole():
                return place, lines()
            del interrupted
            if lines() < place:
                return 0, lines()
            place += 1


DOINGS = (
    "call", "call_with_numbers", "call_while_others_wait", "call_with_an_upload", "run", "upload",
    "upload_to_several_hosts",
)  # fmt: skip


@pytest.mark.parametrize("doing", DOINGS)
def test_no_line_is_a_bad_moment(
    fake: FakeLab, doing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if doing == "call_while_others_wait":
        fast(monkeypatch)
    bad, lines = bad_moment(fake, doing)
    assert bad or lines > 20
    assert bad == 0


@pytest.mark.parametrize("doing", DOINGS)
def test_the_search_finds_what_is_not_held_back(
    fake: FakeLab, doing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Not(HeldBack):
        def __enter__(self) -> HeldBack:
            return self

    for module in (call_batching, session):
        monkeypatch.setattr(module, "HeldBack", Not)
    if doing == "call_while_others_wait":
        fast(monkeypatch)
    assert bad_moment(fake, doing)[0] > 0


def test_an_interrupt_while_jax_lowers_counts_when_it_is_done(
    fake: FakeLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    """JAX's C++ code asks virtual devices, and an exception in their code would end the process."""
    lowered: list[bool] = []
    exported = jax.export.export

    def struck_export(*args: Any, **options: Any) -> Any:
        def lower(*structs: Any) -> Any:
            signal.raise_signal(signal.SIGINT)
            made = exported(*args, **options)(*structs)
            lowered.append(True)
            return made

        return lower

    monkeypatch.setattr(jax.export, "export", struck_export)
    step = pw.jit(lambda x: x + 1, on=fake.slice(2))
    with pytest.raises(KeyboardInterrupt):
        step(np.zeros(4, np.float32))
    assert lowered == [True]
    monkeypatch.undo()
    assert step(np.zeros(4, np.float32)).result().tolist() == [1.0] * 4
