"""How well the timeline's stamps agree with the profiler's times of the device.

    python -m benchmarks.stamps [--gangs 100]

The profiler is switched on inside a host's device process by a function that calls
back into Python; the same computations are then in the timeline and in the profile.
Both are of one machine's clock.  Devices are CPU devices: what the profiler calls the
execution of the computation's thunks is what counts as the device's time.  Then devices
are kept busy for a known share of the time, and the timeline is asked for it.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import pathways_lab as pw
from benchmarks.harness.machine import load, machine
from benchmarks.harness.numbers import seconds
from benchmarks.harness.report import markdown
from pathways_lab.timeline.records import Span

THREADS, BEGIN, END, MARK = "XLAPjRtCpuClient", "::StartRegion", "::StopRegion", "tanh"
"""The profiler's names of the threads that execute, of an execution's two ends, and of
a part that only the measured computation has."""

CASES = ("one by one, each waited for", "queued, one behind the other")
PERIOD, SHARE = 0.1, 0.3
"""Seconds from one computation to the next, and for how much of that devices are kept busy."""
SETTLE = 1.5
"""Seconds in which the last records arrive."""


def executions(folder: Path) -> list[tuple[float, float]]:
    """Start and end of every execution of ours in a profile, in seconds of wall-clock time."""
    from jax.profiler import ProfileData

    profile: Any = ProfileData.from_file(str(next(folder.rglob("*.xplane.pb"))))
    begun, found = 0.0, []
    for plane in profile.planes:
        begun = dict(plane.stats).get("profile_start_time", begun)
        for line in plane.lines:
            start, ours = 0.0, False
            for event in line.events if THREADS in line.name else ():
                if event.name.endswith(BEGIN):
                    start, ours = event.start_ns, False
                elif event.name.endswith(END) and ours:
                    found.append((start, event.start_ns))
                ours = ours or MARK in event.name
    return [((begun + start) / 1e9, (begun + end) / 1e9) for start, end in sorted(found)]


def run(gangs: int) -> dict[str, list[tuple[Span, tuple[float, float]]]]:
    """Pairs of span and execution, by case."""
    with (
        tempfile.TemporaryDirectory() as name,
        pw.start(islands=1, hosts_per_island=1, devices_per_host=1, progress=False) as lab,
    ):
        place = lab.slice(shape=(1,), axes=("x",))

        def begin(x: Any) -> Any:
            options = jax.profiler.ProfileOptions()
            options.python_tracer_level = 0
            jax.profiler.start_trace(name, profiler_options=options)
            return np.asarray(x)

        def end(x: Any) -> Any:
            jax.profiler.stop_trace()
            return np.asarray(x)

        def calling(function: Any) -> Any:
            def call(x: Any) -> Any:
                shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
                return jax.pure_callback(function, shape, x)

            return pw.jit(call, on=place)

        def work(x: Any) -> Any:
            for _ in range(2):
                x = jnp.tanh(x @ x)
            return x

        computed = pw.jit(work, on=place)
        x, one = np.ones((400, 400), np.float32), np.ones(1, np.float32)
        start, stop = calling(begin), calling(end)
        jax.block_until_ready(computed(x))
        jax.block_until_ready(start(one))
        shift = time.time() - time.monotonic()
        since = lab.timeline.clock()
        for _ in range(gangs):
            y = computed(x)
            jax.block_until_ready(y)
        y = x
        for _ in range(gangs):
            y = computed(y)
        jax.block_until_ready(y)
        jax.block_until_ready(stop(one))
        time.sleep(SETTLE)
        spans = sorted(
            (
                r for r in lab.timeline.records
                if isinstance(r, Span) and r.kind == "gang" and r.node == "work"
                and r.start >= since
            ),
            key=lambda span: span.start,
        )  # fmt: skip
        found = [(a - shift, b - shift) for a, b in executions(Path(name))]
    if not len(spans) == len(found) == 2 * gangs:
        raise RuntimeError(f"{len(spans)} gangs are in the timeline, {len(found)} in the profile")
    pairs = list(zip(spans, found, strict=True))
    return {CASES[0]: pairs[:gangs], CASES[1]: pairs[gangs:]}


def busy(periods: int) -> dict[str, float]:
    """By device: the utilisation that the timeline tells of a known one."""
    with pw.start(islands=1, hosts_per_island=1, devices_per_host=2, progress=False) as lab:
        both = lab.slice(shape=(2,), axes=("x",))
        hold = pw.jit(pw.emulated(1e3 * SHARE * PERIOD), on=both)
        x = np.ones(2, np.float32)
        jax.block_until_ready(hold(x))
        time.sleep(PERIOD)
        begun, since = time.monotonic(), lab.timeline.clock()
        for period in range(periods):
            time.sleep(max(0.0, begun + period * PERIOD - time.monotonic()))
            jax.block_until_ready(hold(x))
        time.sleep(SETTLE)
        shares = lab.timeline.utilisation(since, since + periods * PERIOD)
    return {f"device {lane.device}": share for lane, share in shares.items()}


def table(found: dict[str, list[tuple[Span, tuple[float, float]]]]) -> str:
    """Median and 90th percentile of the errors."""
    rows = [("case", "computation takes", "error of", "median", "90 % are below")]
    for case, pairs in found.items():
        long = seconds(float(np.median([b - a for _, (a, b) in pairs])))
        errors = {
            "start": [abs(span.start - a) for span, (a, _) in pairs],
            "end": [abs(span.end - b) for span, (_, b) in pairs],
            "length": [abs((span.end - span.start) - (b - a)) for span, (a, b) in pairs],
        }
        for what, values in errors.items():
            p90 = float(np.quantile(values, 0.9))
            rows.append((case, long, what, seconds(float(np.median(values))), seconds(p90)))
    return markdown(rows)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--gangs", type=int, default=100, help="of each case")
    chosen = parser.parse_args()
    before = load()
    print(table(run(chosen.gangs)))
    told = ", ".join(f"{name} {share:.2%}" for name, share in busy(chosen.gangs).items())
    print(f"\nUtilisation told of devices that are busy {SHARE:.0%} of the time: {told}.")
    of = machine()
    print(f"\n{of['processor']}, {of['cores']} cores, jax {of['jax']}; load {before} -> {load()}")


if __name__ == "__main__":
    main()
