"""Serving beside training on one device: how long a token takes, by policy and by window.

    python -m benchmarks.serving [--gangs 5 30 100] [--rounds 3]

A trainer calls a program of four gangs, each step on the result of the one before, and is ten
steps ahead.  A server asks for one token after the other, each on the last, and waits for it; its
priority is the higher one.  Both hold the one device of the lab (emulated), the server for 2 ms.
A token that comes while a gang holds the device waits for its end, and for all that has its place
before it: that is up to the window (``lab.window``, ``window=`` of the trainer's program) and to
the policy.  In each round the server is alone before and beside the trainer after.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import pathways_lab as pw
from benchmarks.harness.command import arguments, settings
from benchmarks.harness.numbers import seconds
from benchmarks.harness.report import Report, markdown, publish
from benchmarks.harness.rounds import Measured

TOKEN = 2.0
"""Milliseconds for which a token holds the device."""
AHEAD = 10
"""Steps that the trainer has asked for and that are not over."""
GANGS = 4
"""Of a step."""
ALONE = "alone"
PAUSE = 1.2
"""Seconds between two trainers: a client without a run for one second is new afterwards."""


@dataclass(frozen=True)
class Setting:
    """How a lab is set.  window: seconds, of the lab, or of the trainer's program alone."""

    policy: Any
    window: float = 0.1
    only_trainer: bool = False

    @property
    def name(self) -> str:
        """In tables."""
        whose = "trainer's window" if self.only_trainer else "window"
        return f"{type(self.policy).__name__}, {whose} {seconds(self.window)}"


def settings_of(windows: list[float]) -> list[Setting]:
    """All policies with all windows, and the window of the trainer's program alone."""
    policies = (pw.FIFO(), pw.Priority(), pw.ProportionalShare(), pw.ShortestFirst())
    found = [Setting(policy, window) for policy in policies for window in windows]
    return [*found, *(Setting(policy, 0.0, only_trainer=True) for policy in policies)]


class Trainer:
    """A client whose loop is always ahead.  steps: how many are over."""

    def __init__(self, lab: pw.Lab, milliseconds: float, window: float | None) -> None:
        self.steps = 0
        self._over = threading.Event()
        on = lab.slice(1)
        layer = pw.jit(lambda x: pw.emulated(milliseconds)(x + 1), on=on, name="layer")

        @pw.program(window=window)
        def train(x: Any) -> Any:
            for _ in range(GANGS):
                x = layer(x)
            return x

        self._slice, self._train = on, train
        self._last = pw.device_put(np.zeros(1, np.float32), on)
        self._thread = threading.Thread(target=self._loop, name="trainer", daemon=True)

    def _loop(self) -> None:
        flying = []
        while not self._over.is_set():
            self._last = self._train(self._last)
            flying.append(self._last)
            if len(flying) > AHEAD:
                flying.pop(0).block_until_ready()
                self.steps += 1

    def __enter__(self) -> Trainer:
        self._last = self._train(self._last).block_until_ready()
        self._thread.start()
        while not self.steps:
            time.sleep(0.01)
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        self._last.cancel()
        self._slice.release()


class Server:
    """A client that waits for every token."""

    def __init__(self, lab: pw.Lab) -> None:
        on = lab.slice(1)
        token = pw.jit(lambda x: pw.emulated(TOKEN)(x + 1), on=on, name="token")
        self._last = pw.device_put(np.zeros(1, np.float32), on)
        self._serve = pw.program(token, name="serve", priority=1)
        self.tokens(0.1)

    def tokens(self, budget: float) -> list[float]:
        """Seconds of each token, for so many seconds."""
        found = []
        until = time.perf_counter() + budget
        while (begun := time.perf_counter()) < until:
            self._last = self._serve(self._last)
            self._last.block_until_ready()
            found.append(time.perf_counter() - begun)
        return found


def percentile(samples: list[float], part: float) -> float:
    """The least sample that so large a part of them does not exceed."""
    return sorted(samples)[min(len(samples) - 1, int(part * len(samples)))]


def one_round(
    lab: pw.Lab, other: pw.Lab, server: Server, gang: float, how: Setting, budget: float
) -> tuple[list[float], list[float], float]:
    """Tokens alone, tokens beside the trainer, and the share of the device that it held."""
    lab.policy = how.policy
    lab.window = 0.1 if how.only_trainer else how.window
    alone = server.tokens(max(budget / 4, PAUSE))
    with Trainer(other, gang, how.window if how.only_trainer else None) as trainer:
        begun, before = time.perf_counter(), trainer.steps
        beside = server.tokens(budget)
        held = (trainer.steps - before) * GANGS * gang / 1e3 / (time.perf_counter() - begun)
    return alone, beside, held


@contextmanager
def one_device() -> Iterator[tuple[pw.Lab, pw.Lab]]:
    """A lab with one device, and its two clients."""
    with (
        tempfile.TemporaryDirectory() as folder,
        pw.start(
            islands=1, hosts_per_island=1, devices_per_host=1, progress=False, name="server"
        ) as lab,
    ):
        file = Path(folder) / "lab.json"
        lab.invite(file)
        with pw.connect(file, name="trainer") as other:
            yield lab, other


def main() -> None:
    """Measure, print, publish."""
    parser = arguments(__doc__, rounds=3, budget=3.0)
    parser.add_argument("--gangs", type=float, nargs="+", default=[5, 30, 100], help="milliseconds")
    parser.add_argument("--windows", type=float, nargs="+", default=[0.1, 0.02, 0.0])
    chosen = parser.parse_args()
    how, measured = settings(chosen), Measured()
    wanted = settings_of(chosen.windows)
    shares: dict[tuple[str, str], list[float]] = {}
    with one_device() as (lab, other):
        server = Server(lab)
        for _ in range(how.rounds):
            for gang in chosen.gangs:
                case = f"gangs of {gang:g} ms"
                times = measured.times.setdefault(case, {ALONE: []})
                for setting in wanted:
                    alone, beside, held = one_round(
                        lab, other, server, gang, setting, max(how.budget, 0.1)
                    )
                    times[ALONE] += alone
                    times.setdefault(setting.name, []).extend(beside)
                    shares.setdefault((case, setting.name), []).append(held)
                    median = seconds(statistics.median(beside))
                    print(f"{case}, {setting.name}: {median}", file=sys.stderr, flush=True)
    rows = [("case", "setting", "p50", "p99", "tokens", "the trainer holds")]
    for case, times in measured.times.items():
        for name, samples in times.items():
            parts = shares.get((case, name), [])
            rows.append(
                (
                    case, name, seconds(percentile(samples, 0.5)),
                    seconds(percentile(samples, 0.99)), str(len(samples)),
                    f"{statistics.median(parts):.0%}" if parts else "",
                )
            )  # fmt: skip
    title = "Serving beside training on one device (emulated)"
    publish(Report("serving", title, "token", measured, ALONE, notes=["", markdown(rows)]),
            how.folder)  # fmt: skip


if __name__ == "__main__":
    main()
