"""A host that runs a step function by itself, many times: the classic multi-controller way.

Problem: to compare one controller with many, the same hosts must also run the
same code as every other JAX cluster does: one Python loop per host that knows
of no controller, launching the next step as soon as it can.  The loop may cost
nothing beside JAX itself, or the comparison is unfair; and what happened must
look like everything else in the timeline.

How: the whole loop is one gang, alone on its devices.  Times are only collected
while it runs; ends are stamped by a second thread that waits for each step.

Rule for maintainers: between two steps of :func:`run` stands nothing but the
call, unless records are wanted; never a lock, a message or a look at a flag.

Paper: section 2 (multi-controller systems), section 5.1 (OpByOp, Chained, Fused).
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from pathways_lab.runtime.client_messages import Loop

LAPS = 4096
"""So many records of one loop at most; longer ones are recorded in groups of steps."""


@dataclass(frozen=True, slots=True)
class Lap:
    """Some steps of a loop, usually one.  first: its number; seconds as ``time.monotonic``.

    called, returned: of the launching calls.  start, end: on the devices.
    """

    first: int
    steps: int
    called: float
    returned: float
    start: float
    end: float


class Laps:
    """The receipt of a loop, which has ended when there is one."""

    def __init__(self, laps: Sequence[Lap]) -> None:
        self.laps = tuple(laps)

    def is_ready(self) -> bool:
        """It is."""
        return True

    def block_until_ready(self) -> None:
        """It is."""


Step = Callable[..., Any]
"""The compiled function; returns one array, or a list of several."""


def run(step: Step, loop: Loop, arguments: Sequence[jax.Array]) -> tuple[list[jax.Array], Laps]:
    """The loop, to the end of its last step.  Results of the last step, and when they all ran."""
    if loop.records:
        results, laps = _recorded(step, loop, arguments)
    else:
        results, laps = _bare(step, loop, arguments), []
    jax.block_until_ready(results)
    return results, Laps(laps)


def _bare(step: Step, loop: Loop, arguments: Sequence[jax.Array]) -> list[jax.Array]:
    block: Callable[[Any], Any] = jax.block_until_ready
    n, wait = loop.carried, loop.wait
    if n == len(arguments) == 1:
        x: Any = arguments[0]
        if wait:
            for _ in range(loop.steps):
                x = step(x)
                block(x)
        else:
            for _ in range(loop.steps):
                x = step(x)
        return x if isinstance(x, list) else [x]
    state, rest = list(arguments[:n]), arguments[n:]
    for _ in range(loop.steps):
        x = step(*state, *rest)
        if wait:
            block(x)
        state = (x if isinstance(x, list) else [x])[:n]
    return x if isinstance(x, list) else [x]


def _recorded(
    step: Step, loop: Loop, arguments: Sequence[jax.Array]
) -> tuple[list[jax.Array], list[Lap]]:
    n, group = loop.carried, -(-loop.steps // LAPS)
    state, rest = list(arguments[:n]), arguments[n:]
    x: Any = None
    clock = time.monotonic
    calls: list[tuple[int, int, float, float]] = []
    flying: queue.SimpleQueue[Any] = queue.SimpleQueue()
    ends: list[float | None] = []
    watcher = threading.Thread(target=_watch, args=(flying, ends), name="laps", daemon=True)
    watcher.start()
    try:
        for first in range(0, loop.steps, group):
            count = min(group, loop.steps - first)
            called = clock()
            for _ in range(count):
                x = step(*state, *rest)
                if loop.wait:
                    jax.block_until_ready(x)
                state = (x if isinstance(x, list) else [x])[:n]
            calls.append((first, count, called, clock()))
            flying.put(x)
    finally:
        flying.put(None)
    watcher.join()
    return x if isinstance(x, list) else [x], list(_laps(calls, ends))


def _laps(
    calls: Sequence[tuple[int, int, float, float]], ends: Sequence[float | None]
) -> Iterator[Lap]:
    """Laps from their calls and ends; one whose end nobody saw is one with the next."""
    open_: list[tuple[int, int, float, float]] = []
    before = 0.0
    for call, end in zip(calls, ends, strict=True):
        open_.append(call)
        if end is not None:
            first, _, called, _ = open_[0]
            steps = sum(count for _, count, _, _ in open_)
            yield Lap(first, steps, called, call[3], min(max(called, before), end), end)
            open_, before = [], end


def _watch(flying: queue.SimpleQueue[Any], ends: list[float | None]) -> None:
    """Stamp the end of each lap; None where it was not seen."""
    while (result := flying.get()) is not None:
        try:
            jax.block_until_ready(result)
        except Exception:
            # The next step was given its memory, or it failed, which the loop's end will tell.
            ends.append(None)
        else:
            ends.append(time.monotonic())
