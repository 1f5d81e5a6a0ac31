"""Whether the price of arrays grows where it must not: in the control plane, and in memory.

    python -m benchmarks.footprint [--arrays 1 16 64 256 1024] [--devices 4]

Calls ``t = f(t)`` with a list of n arrays of eight numbers, one every 30 ms: calls that come fast
travel together, and what the control plane does by the clock would count the more, the longer a
call takes.  Per call, the control plane's processor time and the bytes that the kernel sends it;
then the memory that each array holds in each process, and what is left of it after one and after
two million arrays that were made and dropped.  Memory is each process's own part (PSS), with
what its heaps keep for themselves.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from typing import Any

import psutil

from benchmarks.gangs.one_host import lab_and_slice
from benchmarks.harness.command import arguments, settings
from benchmarks.harness.machine import processor_seconds
from benchmarks.harness.report import markdown

CALLS, EVERY = 60, 0.03
"""Calls of a sample, and the seconds from one to the next."""
HELD = 100_000
"""Arrays that are held at once."""
WIDE = 1000
"""Arrays that one call of these makes."""
TURNS = 10
"""So often are they made and dropped for a row of the table."""


def main(argv: Sequence[str] | None = None) -> None:
    """Two tables."""
    parser = arguments(__doc__, rounds=5, budget=0.0)
    parser.add_argument("--arrays", type=int, nargs="+", default=[1, 16, 64, 256, 1024])
    parser.add_argument("--devices", type=int, default=4)
    chosen = parser.parse_args(argv)
    how = settings(chosen)
    lab, on = lab_and_slice(chosen.devices)
    try:
        print(_calls(lab, on, [1, 16] if how.quick else chosen.arrays, how.rounds))
        print(_memory(lab, on, HELD // (20 if how.quick else 1)))
    finally:
        lab.close()


def _calls(lab: Any, on: Any, counts: Sequence[int], rounds: int) -> str:
    """What a call costs the control plane, by the number of its arrays."""
    import jax
    import numpy as np

    import pathways_lab as pw

    control = _processes("control_plane.process")[0]
    sent: list[int] = []
    link = lab.session.connection.link
    forward = link.forward

    def counted(letter: Any) -> int:
        sent.append(forward(letter))
        return sent[-1]

    link.forward = counted
    trees, step = {}, pw.jit(lambda tree: [x + 1 for x in tree], on=on, donate_argnums=0)
    found: dict[int, list[tuple[float, float]]] = {count: [] for count in counts}
    for count in counts:
        trees[count] = [pw.device_put(np.zeros(8, np.float32), on) for _ in range(count)]
    for turn in range(rounds + 1):
        for count in counts:
            jax.block_until_ready(trees[count])
            sent.clear()
            seconds = processor_seconds([control.pid])
            for _ in range(CALLS):
                next_one = time.monotonic() + EVERY
                trees[count] = jax.block_until_ready(step(trees[count]))
                time.sleep(max(0.0, next_one - time.monotonic()))
            seconds = processor_seconds([control.pid]) - seconds
            if turn:  # the first compiles
                found[count].append((seconds / CALLS * 1e6, sum(sent) / CALLS))
    del link.forward
    rows = [["arrays", "control plane, us of processor a call", "bytes to it a call"]]
    for count, samples in found.items():
        times, sizes = (sorted(each) for each in zip(*samples, strict=True))
        spread = f"{times[len(times) // 2]:.0f} [{times[0]:.0f}, {times[-1]:.0f}]"
        rows.append([str(count), spread, f"{sizes[len(sizes) // 2]:.0f}"])
    return markdown(rows)


def _memory(lab: Any, on: Any, held: int) -> str:
    """Bytes that an array holds, and what is left of many that were dropped."""
    import jax
    import numpy as np

    import pathways_lab as pw

    make = pw.jit(lambda x: [x + n for n in range(WIDE)], on=on)
    zero = pw.device_put(np.zeros(8, np.float32), on)
    who = {
        "kernel": psutil.Process(),
        "host": _processes("workers_main")[-1],
        "control plane": _processes("control_plane.process")[0],
    }
    jax.block_until_ready(make(zero))
    seen = [_settled(who)]
    kept = [make(zero) for _ in range(held // WIDE)]
    jax.block_until_ready(kept)
    seen.append(_settled(who))
    for _ in range(2):
        for _ in range(TURNS):
            kept.clear()
            kept += [make(zero) for _ in range(held // WIDE)]
            jax.block_until_ready(kept)
        kept.clear()
        seen.append(_settled(who))
    made = TURNS * held
    rows = [["process", "bytes an array, held", *(f"MB after {n * made:,}" for n in (0, 1, 2))]]
    for name in who:
        before, full, *after = (each[name] for each in seen)
        cells = [f"{each / 1e6:.0f}" for each in (before, *after)]
        rows.append([name, f"{(full - before) / held:.0f}", *cells])
    return markdown(rows)


def _settled(who: dict[str, psutil.Process]) -> dict[str, int]:
    gc.collect()
    time.sleep(2.0)  # until drops have been told and done
    return {name: process.memory_full_info().pss for name, process in who.items()}


def _processes(module: str) -> list[psutil.Process]:
    """Processes of the lab by their module, in the order of their start."""
    children = psutil.Process().children(recursive=True)
    return sorted(
        (each for each in children if any(module in word for word in each.cmdline())),
        key=lambda each: (each.create_time(), each.pid),
    )


if __name__ == "__main__":
    main()
