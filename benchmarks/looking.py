"""The overhead of looking: throughput without a view, with one, with four, with all panels.

    python -m benchmarks.looking

A real Jupyter kernel drives a lab of two islands; this process is its front
end: it takes every message of every view as the Jupyter server would, says that
it follows, and draws nothing (a browser draws in processes of its own).  The
number and kind of views changes from sample to sample, in an order shuffled anew in
every round; a view's cost is the ratio to the samples without any of the same
rounds.  Beside it stands the processor time that views took while calls were timed: in the
kernel, whose interpreter the calls need too, and in the process that draws.
"""

from __future__ import annotations

import os
import queue
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from benchmarks.harness.child import ROOT
from benchmarks.harness.command import arguments, settings
from benchmarks.harness.numbers import Ratio, ratio
from benchmarks.harness.report import Report, publish
from benchmarks.harness.rounds import Measured, Missing, Timed, measure

FAST, STEADY, STEPS = "calls as fast as they go", "computations of 1 ms", "steps of a pipeline"
FUNCTIONS = {FAST: "fast", STEADY: "steady", STEPS: "step"}
NONE, ONE, FOUR, ALL = "no view", "1 live view", "4 live views", "1 view of all panels"
VIEWS = {NONE: 0, ONE: 1, FOUR: 4, ALL: 1}
LIMIT = 0.03
"""Of throughput: what live views may cost."""

SETUP = """
import threading, time, jax, numpy as np, psutil, pathways_lab as pw
from jax.sharding import NamedSharding, PartitionSpec as P
from pathways_lab.notebook.panels import PANELS
lab = pw.start(islands=2, hosts_per_island=1, devices_per_host=4, progress=False)
place, other = (lab.slice(shape=(4,), axes=("x",)) for _ in range(2))
hold = pw.emulated(1.0)
def compiled(f, on=place):
    return pw.jit(f, on=on, in_shardings=P("x"), out_shardings=P("x"))
functions = dict(fast=compiled(lambda x: x + 1), steady=compiled(lambda x: hold(x) + 1))
there, back = compiled(lambda x: hold(x) * 2, other), compiled(lambda x: hold(x) / 2)
@pw.program
def step(x):
    parts = [back(there(x + n)) for n in range(8)]
    return sum(parts[1:], parts[0])
functions["step"] = step
zero = pw.device_put(np.zeros(4, np.float32), NamedSharding(place.mesh, P("x")))
views = []
def show(count, panels):
    for view in views:
        view.freeze()
    views[:] = [lab.view(*panels) for _ in range(count)]
    for view in views:
        view.show()
kernel = psutil.Process()
def used():
    ours = {t.native_id for t in threading.enumerate() if t.name.startswith("pathways studio")}
    here = sum(t.user_time + t.system_time for t in kernel.threads() if t.id in ours)
    drawing = (c for c in kernel.children() if "pathways_lab.notebook.studio" in c.cmdline())
    return np.array([here, sum(sum(c.cpu_times()[:2]) for c in drawing)])
def timed(name, count):
    f, x = functions[name], zero
    before, begun = used(), time.perf_counter()
    for _ in range(count):
        x = f(x)
    jax.block_until_ready(x)
    passed = time.perf_counter() - begun
    print(passed, *(used() - before))
"""


class Kernel:
    """A Jupyter kernel and its front end, in this thread.

    messages, bytes: of views.  used: what these took by case and name, see :func:`taken`.
    """

    def __init__(self) -> None:
        try:
            from jupyter_client.manager import KernelManager
        except ImportError as error:
            raise Missing(f"not installed ({error})") from error
        self._manager: Any = KernelManager(kernel_name="python3")
        self._manager.start_kernel(env={**os.environ, "PYTHONPATH": str(ROOT)}, cwd=str(ROOT))
        self._client = self._manager.client()
        self._client.start_channels()
        self._client.wait_for_ready(timeout=60)
        self._new: list[str] = []
        self._drawn: set[str] = set()
        self.messages = self.bytes = 0
        self.used: dict[tuple[str, str], list[tuple[float, float, float]]] = {}

    def run(self, code: str, timeout: float = 120.0) -> str:
        """Run a cell, taking every message meanwhile; what it printed.

        Raises RuntimeError with the cell's error, TimeoutError.
        """
        asked = self._client.execute(code)
        text, deadline = "", time.monotonic() + timeout
        while time.monotonic() < deadline:
            try:
                message = self._client.get_iopub_msg(timeout=1.0)
            except queue.Empty:
                continue
            self._take(message)
            if message["parent_header"].get("msg_id") != asked:
                continue
            kind, content = message["msg_type"], message["content"]
            if kind == "stream" and content["name"] == "stdout":
                text += content["text"]
            elif kind == "error":
                raise RuntimeError(f"{content['ename']}: {content['evalue']}")
            elif kind == "status" and content["execution_state"] == "idle":
                return text
        raise TimeoutError(f"a cell did not end within {timeout:.0f} s: {code.strip()[:60]}")

    def follow(self) -> None:
        """Say for every view that was opened that its page follows."""
        for comm in self._new:
            data = {"method": "custom", "content": {"type": "ready"}}
            say = self._client.session.msg("comm_msg", {"comm_id": comm, "data": data})
            self._client.shell_channel.send(say)
        self._new.clear()
        self._drawn.clear()

    def drawn(self, views: int, timeout: float = 60.0) -> None:
        """Wait until so many views have sent a picture since :meth:`follow`."""
        deadline = time.monotonic() + timeout
        while len(self._drawn) < views:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{len(self._drawn)} of {views} views were drawn")
            with suppress(queue.Empty):
                self._take(self._client.get_iopub_msg(timeout=1.0))

    def close(self) -> None:
        """End the kernel, and with it the lab."""
        self._client.stop_channels()
        self._manager.shutdown_kernel(now=False)

    def _take(self, message: dict[str, Any]) -> None:
        if message["msg_type"] == "comm_open":
            self._new.append(message["content"]["comm_id"])
        elif message["msg_type"] == "comm_msg":
            self.messages += 1
            self._drawn.add(message["content"]["comm_id"])
            self.bytes += sum(len(part) for part in message["buffers"])


class Looking:
    """Throughput while some views are live."""

    cases: Sequence[str] = tuple(FUNCTIONS)

    def __init__(self, kernel: Kernel, name: str) -> None:
        self.name = name
        self._kernel = kernel

    def start(self) -> None:
        """The kernel runs already."""

    def round(self, case: str, units: int) -> Timed:
        """Open the views, let them begin to follow, then time calls."""
        panels = "PANELS" if self.name == ALL else "()"
        self._kernel.run(f"show({VIEWS[self.name]}, {panels})")
        self._kernel.follow()
        name = FUNCTIONS[case]
        # First pictures, which have the whole past in them or are of a new shape, are paid once.
        self._kernel.drawn(VIEWS[self.name])
        self._kernel.run(f"timed({name!r}, {max(units // 2, 20)})")
        printed = self._kernel.run(f"timed({name!r}, {units})")
        passed, kernel, drawing = map(float, printed.split())
        self._kernel.used.setdefault((case, self.name), []).append((passed, kernel, drawing))
        return Timed(passed, units)

    def stop(self) -> None:
        """The kernel ends later."""


def cost(measured: Measured, case: str, views: str) -> Ratio:
    """Share of throughput that views take, of 1; below 0 when they seem to give some."""
    quiet, seen = measured.of(case, NONE), measured.of(case, views)
    kept = ratio(quiet, seen)
    return Ratio(1 - kept.value, 1 - kept.high, 1 - kept.low)


def taken(used: Sequence[tuple[float, float, float]]) -> str:
    """What views took, in words; used: seconds that passed, and processor seconds in the kernel
    and in the process that draws, of every sample.
    """
    passed, kernel, drawing = map(sum, zip(*used, strict=True))
    return (
        f"{100 * kernel / passed:.1f}% of the kernel's time"
        f" and {100 * drawing / passed:.1f}% of another processor"
    )


def main() -> None:
    """Measure, print, publish."""
    chosen = arguments(__doc__, rounds=15, budget=1.0).parse_args()
    how = settings(chosen)
    kernel = Kernel()
    try:
        kernel.run(SETUP)
        measured = measure(
            [Looking(kernel, views) for views in VIEWS], list(FUNCTIONS),
            rounds=how.rounds, budget=how.budget, seed=how.seed,
        )  # fmt: skip
    finally:
        kernel.close()
    title = "The overhead of looking (emulated devices)"
    report = Report("looking", title, "call", measured, NONE)
    report.facts["messages"] = {"count": kernel.messages, "bytes": kernel.bytes}
    for case in measured.times:
        for views in VIEWS:
            if views != NONE and measured.of(case, views) and measured.of(case, NONE):
                found = cost(measured, case, views)
                report.notes.append(
                    f"{case}: {views} cost{'s' * (views != FOUR)} {100 * found.value:.1f}%"
                    f" of throughput [{100 * found.low:.1f}, {100 * found.high:.1f}],"
                    f" wanted below {100 * LIMIT:g}%: {'yes' if found.value < LIMIT else '**no**'};"
                    f" {taken(kernel.used[case, views])}"
                )
                report.notes.append("")
    publish(report, how.folder)


if __name__ == "__main__":
    main()
