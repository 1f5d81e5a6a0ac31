"""Kill clients in the middle of their work, and look what stays: nothing of theirs.

``python -m tests.acceptance.leaving --times 100`` starts a lab on which one
client works all the time while others are killed; it prints how long it took
until everything of theirs was gone, and how fast the first one went on.
"""

from __future__ import annotations

import argparse
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

import pathways_lab as pw
from pathways_lab.core.slices.topology import SliceBinding
from pathways_lab.timeline.records import Sample
from pathways_lab.transport.codec import unpack

ROOT = Path(__file__).parents[2]
BOUND = 10.0
"""Seconds within which everything of a client that was killed is gone."""


FEW = 4096
"""The survivor's arrays take a few times 256 bytes, a victim's 64 KiB or more on each device."""


class Survivor(threading.Thread):
    """The client that stays: it computes and checks every result.

    results: how many were right.  wrong: what was not.
    """

    def __init__(self, lab: pw.Lab) -> None:
        super().__init__(name="survivor", daemon=True)
        self.call = pw.jit(lambda x: pw.emulated(1)(3 * x), on=lab.slice(4, island="island0"))
        self.call(np.ones(64, np.float32)).result(timeout=60)
        self.results = 0
        self.wrong: list[str] = []
        self.ended = threading.Event()

    def run(self) -> None:
        while not self.ended.is_set():
            x = np.full(64, self.results % 1000, np.float32)
            try:
                if not np.array_equal(self.call(x).result(timeout=60), 3 * x):
                    self.wrong.append(f"result {self.results} is wrong")
            except Exception as error:
                self.wrong.append(f"result {self.results}: {error!r}")
            self.results += 1


def in_use(lab: pw.Lab) -> dict[tuple[str, int], float]:
    """Bytes that hosts hold, by device, as they last said; the survivor's few do not count."""
    found: dict[tuple[str, int], float] = {}
    for record in lab.timeline.records:
        if isinstance(record, Sample) and record.name == "memory":
            found[record.host, int(record.args["device"])] = record.value
    return {place: used for place, used in found.items() if used > FEW}


def slices(lab: pw.Lab) -> set[str]:
    """Who has slices."""
    packed = lab.session.connection.topology["slices"]
    return {unpack(SliceBinding, binding).client for binding in packed}


def until(condition: Callable[[], bool], what: str) -> float:
    """Seconds until it holds; raises after BOUND."""
    start = time.monotonic()
    while not condition():
        if time.monotonic() - start > BOUND:
            raise AssertionError(f"not within {BOUND:g} s: {what}")
        time.sleep(0.01)
    return time.monotonic() - start


def kill_once(lab: pw.Lab, file: Path, number: int, chance: random.Random) -> float:
    """Start a client, kill it at some moment of its work; seconds until nothing of it is left."""
    name = f"victim{number}"
    command = [sys.executable, "-m", "tests.acceptance.leaving_client", str(file), name]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT) as victim:
        try:
            assert victim.stdout is not None
            assert victim.stdout.readline() == b"busy\n"
            until(lambda: name in slices(lab), "it has slices")
            until(lambda: f"{name}'s" in lab.published, "it has published something")
            until(lambda: bool(in_use(lab)), "it holds bytes")
            time.sleep(chance.uniform(0, 0.3))
        finally:
            victim.kill()
        start = time.monotonic()
    until(lambda: name not in lab.clients, "the client is gone")
    until(lambda: name not in slices(lab), "its slices are gone")
    until(lambda: not lab.published, "its names are gone")
    until(lambda: not in_use(lab), f"its bytes are gone; there are {in_use(lab)}")
    return time.monotonic() - start


def run(lab: pw.Lab, times: int, seed: int) -> tuple[list[float], list[float]]:
    """Kill so many; seconds of each until it was gone, and the survivor's results a second."""
    chance = random.Random(seed)
    survivor = Survivor(lab)
    survivor.start()
    took: list[float] = []
    pace: list[float] = []
    try:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "lab.json"
            lab.invite(file)
            for number in range(times):
                begin, done = time.monotonic(), survivor.results
                took.append(kill_once(lab, file, number, chance))
                pace.append((survivor.results - done) / (time.monotonic() - begin))
                assert not survivor.wrong, survivor.wrong[:3]
    finally:
        survivor.ended.set()
        survivor.join(60)
    assert survivor.results > times
    return took, pace


def main() -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with pw.start(islands=2, hosts_per_island=1, devices_per_host=4) as lab:
        took, pace = run(lab, options.times, options.seed)
    print(
        f"{len(took)} clients killed; all of theirs gone after {statistics.median(took):.2f} s"
        f" (median), {max(took):.2f} s (worst); the other's results per second"
        f" {min(pace):.0f} to {max(pace):.0f}, all right"
    )


if __name__ == "__main__":
    main()
