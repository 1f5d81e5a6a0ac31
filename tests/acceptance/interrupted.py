"""Ctrl-C at random moments of start, close, upload and download: nothing stays.

``python -m tests.acceptance.interrupted --moments 1000`` interrupts each of the four so many
times, a quarter each, and compares what there is with what there was: bytes on devices, folders,
processes (also those that nobody has asked for their exit code), descriptors and threads.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import psutil

import pathways_lab as pw
from pathways_lab.client.lab import hooks
from tests.acceptance.strikes import HANG, Wrong, alarm, struck

ROUND = 20
"""Moments of uploads and downloads between two looks at what is left."""


def start() -> pw.Lab:
    return pw.start(
        islands=1, hosts_per_island=1, devices_per_host=2, memory="256 MB", progress=False
    )


class Left:
    """What there is beside the things of a lab.

    folders: those that this process has made, and everything in its temporary folder, in which
        its children make theirs.
    """

    def __init__(self, temporary: Path) -> None:
        self._temporary = temporary
        self._made: list[str] = []
        make = tempfile.mkdtemp

        def noted(*args: Any, **options: Any) -> str:
            self._made.append(make(*args, **options))
            return self._made[-1]

        tempfile.mkdtemp = noted

    def now(self) -> dict[str, list[str]]:
        gc.collect()
        children = psutil.Process().children(recursive=True)
        return {
            "folders": sorted(
                [name for name in self._made if os.path.exists(name)]
                + [str(path) for path in self._temporary.rglob("*")]
            ),
            "processes": sorted(f"{child.pid} {_command(child)}" for child in children),
            "descriptors": sorted(os.listdir("/proc/self/fd"), key=int),
            "threads": sorted(thread.name for thread in threading.enumerate()),
        }

    def beyond(self, before: dict[str, list[str]], seconds: float = 15.0) -> list[str]:
        """What there is more than *before*, when it has had so long to go."""
        until = time.monotonic() + seconds
        while True:
            now = self.now()
            more = {
                kind: now[kind]
                for kind in now
                if len(now[kind]) > len(before[kind])
            }  # fmt: skip
            if not more or time.monotonic() > until:
                return [f"{kind}: {found} after {before[kind]}" for kind, found in more.items()]
            time.sleep(0.05)


def _command(process: psutil.Process) -> str:
    """Its last arguments; "" of one that has ended and was not asked for its exit code."""
    with contextlib.suppress(psutil.Error):
        return " ".join(process.cmdline()[-2:])[-80:]
    return ""


class Interrupts:
    """Counts what was interrupted, and what stayed.  chance: of the moments."""

    def __init__(self, left: Left, chance: random.Random) -> None:
        self.left = left
        self.chance = chance
        self.struck: Counter[str] = Counter()
        self.done: Counter[str] = Counter()
        self.stayed: list[str] = []
        self.within: dict[str, float] = {}
        """Milliseconds a call of a kind takes: a machine may be faster than it was at first."""

    def strike(self, kind: str, longest: float, do: Callable[[], Any]) -> Any:
        """do(), interrupted within *longest* ms, or less: as long as its kind takes by now."""
        within = self.within.get(kind, longest)
        delay = self.chance.uniform(0, within)
        taken = 1.25 * within

        def timed() -> Any:
            nonlocal taken
            began = time.monotonic()
            found = do()
            taken = 1200 * (time.monotonic() - began)
            return found

        with alarm(f"{kind}, interrupted after {delay:.1f} ms,"):
            found = struck(delay, timed)
        self.within[kind] = min(longest, taken)
        self.struck[kind] += found is None
        self.done[kind] += 1
        return found

    def note(self, kind: str, what: list[str]) -> bool:
        """Tell what stayed, and how far it is.  Whether anything stayed."""
        for one in what:
            self.stayed.append(f"{kind} {self.done[kind]}: {one}")
            print(self.stayed[-1], flush=True)
        if self.done[kind] and self.done[kind] % ROUND == 0:
            print(self, flush=True)
        return bool(what)

    def __str__(self) -> str:
        told = ", ".join(
            f"{self.struck[kind]} of {done} {kind}s" for kind, done in self.done.items()
        )
        return f"interrupted: {told or 'nothing'}; what stayed: {len(self.stayed)}"

    def starts(self, moments: int, longest: float) -> None:
        before = self.left.now()
        for _ in range(moments):
            lab = self.strike("start", longest, start)
            if lab is not None:
                lab.close()
            if self.note("start", self.left.beyond(before)):
                before = self.left.now()  # each is told once

    def closes(self, moments: int, longest: float) -> None:
        before = self.left.now()
        for _ in range(moments):
            lab = start()

            def close(lab: pw.Lab = lab) -> bool:
                lab.close()
                return True

            self.strike("close", longest, close)
            if not lab.closed:
                lab.close()  # the interrupt came before its first line
            if self.note("close", self.left.beyond(before)):
                before = self.left.now()  # each is told once

    def transfers(self, lab: pw.Lab, uploads: int, downloads: int) -> None:
        """All on one lab, which stays as it is."""
        on = lab.slice(2)
        to = on.sharding(jax.P(None, "x"))
        data = np.arange(1 << 22, dtype=np.int32).reshape(1 << 11, 1 << 11)
        longest = (
            self._ms(lambda: pw.device_put(data, to)),
            self._ms(lambda: self._check(pw.device_put(data, to), data)),
        )
        held = pw.device_put(data, to)
        self._check(held, data)
        before, bytes_ = self.left.now(), self._bytes(lab)
        for number in range(max(uploads, downloads)):
            if number < uploads:
                self.strike("upload", longest[0], lambda: pw.device_put(data, to))
            if number < downloads:
                self.strike("download", longest[1], held.result)
                held._value = None  # or it would be there already
            if number % ROUND == ROUND - 1 or number == max(uploads, downloads) - 1:
                self._check(held, data)
                self.note("upload or download", self.left.beyond(before))
                until = time.monotonic() + 15
                while self._bytes(lab) > bytes_ and time.monotonic() < until:
                    time.sleep(0.05)
                if self._bytes(lab) > bytes_:
                    self.note("upload", [f"{self._bytes(lab):,} bytes after {bytes_:,}"])

    @staticmethod
    def _ms(do: Callable[[], Any], times: int = 5) -> float:
        """How long do() takes, in ms: the median, and a fifth more."""
        taken = []
        for _ in range(times):
            began = time.monotonic()
            do()
            taken.append(time.monotonic() - began)
        return 1200 * sorted(taken)[times // 2]

    @staticmethod
    def _check(held: pw.Handle, data: np.ndarray[Any, Any]) -> None:
        if not np.array_equal(held.result(timeout=HANG), data):
            raise Wrong("the value of a handle has changed")
        held._value = None

    @staticmethod
    def _bytes(lab: pw.Lab) -> int:
        return lab.accounts().clients[lab.name].nbytes


def interrupts(moments: dict[str, int], seed: int = 0) -> Interrupts:
    """So many of each."""
    before = os.environ.get("TMPDIR"), tempfile.tempdir, tempfile.mkdtemp
    assert pw.start  # which sets the hooks
    # A JupyterLab of this account shows all its labs: whoever looks starts a process that draws.
    pages, hooks.pages = hooks.pages, None
    with tempfile.TemporaryDirectory(prefix="pwtmp-") as folder:
        os.environ["TMPDIR"] = tempfile.tempdir = folder
        try:
            made = Interrupts(Left(Path(folder)), random.Random(seed))
            empty = made.left.now()["folders"]
            start().close()  # also what is made once, and kept
            folders = made.left.now()["folders"]
            made.note("a lab without an interrupt", [f for f in folders if f not in empty])
            began = time.monotonic()
            with start() as lab:
                started = time.monotonic()
                made.transfers(lab, moments.get("upload", 0), moments.get("download", 0))
                ending = time.monotonic()
            ended = time.monotonic()
            made.starts(moments.get("start", 0), 1200 * (started - began))
            made.closes(moments.get("close", 0), 1200 * (ended - ending))
        finally:
            os.environ.pop("TMPDIR")
            if before[0] is not None:
                os.environ["TMPDIR"] = before[0]
            tempfile.tempdir, tempfile.mkdtemp = before[1:]
            hooks.pages = pages
    return made


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--moments", type=int, default=1000)
    parser.add_argument("--of", nargs="*", default=["start", "close", "upload", "download"])
    parser.add_argument("--seed", type=int, default=0)
    wanted = parser.parse_args()
    made = interrupts({kind: wanted.moments // len(wanted.of) for kind in wanted.of}, wanted.seed)
    print(made)
    return int(bool(made.stayed))


if __name__ == "__main__":
    sys.exit(main())
