"""Shares of device time are those of the weights: four clients, two of them other processes."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pathways_lab as pw
from pathways_lab.timeline.records import Span
from tests.runtime.processes import until

pytestmark = pytest.mark.cluster

ROOT = Path(__file__).parents[2]
NAMES = ("ann", "bob", "cat", "dan")
MS = 5.0
RUNS = 4000
SETTLE, LEAST, MOST = 1.0, 4.0, 24.0
"""Seconds after a change of policy that do not count (granted work goes on), and that do:
a hiccup of the machine in a run of somebody with a small share takes a while to make good."""


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[pw.Lab]:
    """A lab on which all four have more work waiting than they will get done."""
    file = tmp_path_factory.mktemp("shares") / "lab.json"
    with ExitStack() as stack:
        lab = stack.enter_context(
            pw.start(islands=1, hosts_per_island=1, devices_per_host=4, name="ann")
        )
        assert lab.embedded is not None
        lab.invite(file)
        others = []
        for name in NAMES[2:]:
            command = [sys.executable, "-m", "tests.acceptance.share_client"]
            command += [str(file), name, str(MS), str(RUNS)]
            pipe = subprocess.PIPE
            process = subprocess.Popen(command, stdin=pipe, stdout=pipe, cwd=ROOT)
            others.append(stack.enter_context(process))
            stack.callback(process.kill)
        here = [lab, stack.enter_context(pw.Lab(lab.embedded.control, name="bob"))]
        x = np.zeros((4,), np.float32)
        held = []
        for client in here:
            on = client.slice((4,), ("x",))
            held.append(holding(on))
            held[-1](x).result(timeout=120)
        for process in others:
            said(process, b"ready\n")
        for process in others:
            write(process, b"go\n")
        kept = [[call(x) for _ in range(RUNS)] for call in held]
        for process in others:
            said(process, b"waiting\n")
        yield lab
        del kept


def holding(on: pw.Slice) -> Callable[[np.ndarray], Any]:
    """A program that holds a slice; each call is a run of its own, which small calls are not."""
    held = pw.jit(lambda v: pw.emulated(MS)(v), on=on)
    return pw.program(lambda v: held(v), name="hold")


def said(process: subprocess.Popen[bytes], line: bytes) -> None:
    assert process.stdout is not None
    assert process.stdout.readline() == line


def write(process: subprocess.Popen[bytes], line: bytes) -> None:
    assert process.stdin is not None
    process.stdin.write(line)
    process.stdin.flush()


def device_seconds(lab: pw.Lab, start: float, end: float) -> dict[str, float]:
    """By client, what devices computed between two times."""
    until(lambda: {r.client for r in gangs(lab) if r.end > end} >= {NAMES[-1]})
    spent = dict.fromkeys(NAMES, 0.0)
    for r in gangs(lab):
        spent[r.client] += max(0.0, min(r.end, end) - max(r.start, start)) * len(r.devices)
    return spent


def gangs(lab: pw.Lab) -> list[Span]:
    return [r for r in lab.timeline.records if isinstance(r, Span) and r.kind == "gang"]


@pytest.mark.parametrize("weights", [(1, 2, 4, 8), (1, 1, 1, 1)])
def test_device_time_is_shared_by_the_weights(lab: pw.Lab, weights: tuple[int, ...]) -> None:
    shares = {name: w / sum(weights) for name, w in zip(NAMES, weights, strict=True)}
    lab.policy = pw.ProportionalShare(dict(zip(NAMES, weights, strict=True)))
    start = lab.timeline.clock() + SETTLE
    time.sleep(SETTLE)
    seconds, got = 0.0, dict[str, float]()
    while got != pytest.approx(shares, rel=0.05):
        assert seconds < MOST, (got, shares)
        seconds += LEAST
        time.sleep(LEAST)
        spent = device_seconds(lab, start, start + seconds)
        total = sum(spent.values())
        assert total > 0.5 * 4 * seconds, "the devices were not kept busy"
        got = {name: spent[name] / total for name in NAMES}
