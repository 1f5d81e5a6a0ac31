"""How old live pictures are while calls never pause.

    python -m benchmarks.following

A kernel calls a small function again and again, for some seconds, and waits for nothing, beside
one view of the usual panels or of all.  Views may take a few percent of the machine
(:mod:`benchmarks.looking`), so what they do not manage to take in they are behind with; and what
is behind too far is lost, counted, and said.  This process is the front end, which draws nothing.
What is measured is how old the picture on a page is, ten times a second: the time since its last
update, and how late that was in the view's own words (half a second is not worth a word to it).
"""

from __future__ import annotations

import re
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

from benchmarks.harness.command import arguments, settings
from benchmarks.harness.report import Report, publish
from benchmarks.harness.rounds import Measured
from benchmarks.looking import EIGHT, IMPORTS, VIEWING, Kernel
from pathways_lab.notebook.view.picture import BEHIND

SECONDS = 15.0
"""For which a kernel calls."""

ONE = """
lab = pw.start(islands=1, hosts_per_island=1, devices_per_host=1, progress=False)
place = lab.slice(shape=(1,), axes=("x",))
functions = dict(fast=compiled(lambda x: x + 1, place))
zero = zeros(place)
"""
MACHINES = {"calls on 1 device": ONE, "calls on 4 devices": EIGHT}
PANELS = {"the usual panels": "()", "all panels": "PANELS"}
CALLING = """
def calling(seconds):
    f, x, calls, before = functions["fast"], zero, 0, used()
    begun = time.perf_counter()
    while time.perf_counter() - begun < seconds:
        for _ in range(512):
            x = f(x)
        calls += 512
    jax.block_until_ready(x)
    passed = time.perf_counter() - begun
    print(calls / passed, *(used() - before) / passed)
"""
_LATE = re.compile(r"picture is ([\d.]+) (ms|s) behind")
_LOST = re.compile(r"([\d,]+) records dropped")


class Follower(Kernel):
    """Remembers what each update says of itself.

    late: when each came, and how late it was, in seconds.  lost: records, in all.
    """

    def __init__(self, setup: str) -> None:
        self.late: list[tuple[float, float]] = []
        self.lost = 0
        super().__init__(setup)

    def picture(self, told: dict[str, Any]) -> None:
        super().picture(told)
        words = ", ".join((told.get("header") or {}).get("notes", ()))
        late, lost = _LATE.search(words), _LOST.search(words)
        unit = {"ms": 1e-3, "s": 1.0}
        lag = float(late[1]) * unit[late[2]] if late else BEHIND
        self.late.append((time.monotonic(), lag))
        if lost:
            self.lost = int(lost[1].replace(",", ""))


def ages(updates: Sequence[tuple[float, float]], begun: float, over: float) -> list[float]:
    """How old the picture was, ten times a second; when it *begun* it was of the present."""
    known = [(begun, 0.0), *updates]
    moments = [begun + n / 10 for n in range(1, 1 + int(10 * (over - begun)))]
    return [
        next(moment - came + lag for came, lag in reversed(known) if came <= moment)
        for moment in moments
    ]


def main() -> None:
    """Measure, print, publish."""
    how = settings(arguments(__doc__, rounds=2, budget=SECONDS).parse_args())
    measured = Measured()
    notes = []
    for case, lab in MACHINES.items():
        for name, panels in PANELS.items():
            for _ in range(how.rounds):
                kernel = Follower(IMPORTS + lab + VIEWING + CALLING)
                try:
                    kernel.run(f"calling(0.5); show(1, {panels})")
                    kernel.follow()
                    kernel.drawn(1)
                    kernel.late.clear()
                    kernel.lost = 0
                    begun = time.monotonic()
                    printed = kernel.run(f"calling({how.budget})")
                    over = time.monotonic()
                finally:
                    kernel.close()
                old = ages(kernel.late, begun, over)
                measured.times.setdefault(case, {}).setdefault(name, []).extend(old)
                rate, here, drawing = map(float, printed.split())
                text = (
                    f"{case}, {name}: {rate:,.0f} calls a second,"
                    f" {len(kernel.late) / (over - begun):.1f}"
                    f" updates a second, {statistics.median(old):.1f} s old (median) and"
                    f" {max(old):.1f} s at most, {kernel.lost:,} records lost;"
                    f" {100 * here:.1f}% of the kernel's time and"
                    f" {100 * drawing:.1f}% of another processor"
                )
                print(text, file=sys.stderr, flush=True)
                notes += [text, ""]
    title = "How old pictures are while calls never pause (emulated devices)"
    publish(Report("following", title, "moment", measured, "", notes=notes), how.folder)


if __name__ == "__main__":
    main()
