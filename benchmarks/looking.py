"""The overhead of looking: throughput while pictures move, against the same views stopped.

    python -m benchmarks.looking

A real Jupyter kernel drives a lab of two islands, of 64 devices for the calls that keep so many
busy and of 8 for the others; this process is its front end: it takes every message of every view
as the Jupyter server would, says that it follows, and draws nothing (a browser draws in processes
of its own).  Once views have been opened, the process that draws is stopped by a signal in every
other sample, and the kernel, which hands on only what that asks for, does nothing for it then:
samples of a pair are seconds apart and differ in nothing else.  The same with no view open
says how much differs by chance.

A round visits every kind of call with every number and kind of views, in an order shuffled
anew, and takes some pairs there.  Beside the cost stands the processor time that views took while
calls were timed, in the kernel, whose interpreter the calls need too, and in the process that
draws; and how often each view was updated.
"""

from __future__ import annotations

import functools
import os
import queue
import random
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import psutil

from benchmarks.harness.child import ROOT
from benchmarks.harness.command import arguments, settings
from benchmarks.harness.numbers import Ratio, ratio
from benchmarks.harness.report import Report, Verdict, publish, verdict_table
from benchmarks.harness.rounds import Measured, Missing, Timed, busy_cores, warm

FAST, STEADY, STEPS = "calls as fast as they go", "computations of 1 ms", "steps of a pipeline"
WIDE = "250 ms on each of 64 devices"
FUNCTIONS = {FAST: "fast", STEADY: "steady", STEPS: "step", WIDE: "wide"}
NONE, ONE, FOUR, ALL = "no view", "1 live view", "4 live views", "1 view of all panels"
VIEWS = {NONE: 0, ONE: 1, FOUR: 4, ALL: 1}
STOPPED, MOVING = "stopped", "moving"
LIMIT = 0.05
"""Of throughput: what live views may cost."""

PAIRS, ENOUGH = 5, 10
"""Of samples, in a round, of one kind of calls with one kind of views; and to say anything at all.
"""

IMPORTS = """
import threading, time, jax, numpy as np, psutil, pathways_lab as pw
from jax.sharding import NamedSharding, PartitionSpec as P
from pathways_lab.notebook.panels import PANELS
def compiled(f, on):
    return pw.jit(f, on=on, in_shardings=P("x"), out_shardings=P("x"))
def zeros(on):
    return pw.device_put(np.zeros(on.shape, np.float32), NamedSharding(on.mesh, P("x")))
"""
EIGHT = """
lab = pw.start(islands=2, hosts_per_island=1, devices_per_host=4, progress=False)
place, other = (lab.slice(shape=(4,), axes=("x",)) for _ in range(2))
hold = pw.emulated(1.0)
functions = dict(
    fast=compiled(lambda x: x + 1, place), steady=compiled(lambda x: hold(x) + 1, place)
)
there, back = compiled(lambda x: hold(x) * 2, other), compiled(lambda x: hold(x) / 2, place)
@pw.program
def step(x):
    parts = [back(there(x + n)) for n in range(8)]
    return sum(parts[1:], parts[0])
functions["step"] = step
zero = zeros(place)
"""
SIXTY_FOUR = """
lab = pw.start(islands=2, hosts_per_island=4, devices_per_host=8, progress=False)
places = [lab.slice(shape=(8,), axes=("x",)) for _ in range(8)]
hold = pw.emulated(250.0)
held = [compiled(lambda x: hold(x) + 1, on) for on in places]
functions = dict(wide=lambda xs: [f(x) for f, x in zip(held, xs)])
zero = [zeros(on) for on in places]
"""
VIEWING = """
views = []
def show(count, panels):
    for view in views:
        view.freeze()
    views[:] = [lab.view(*panels) for _ in range(count)]
    for view in views:
        view.show()
kernel = psutil.Process()
def drawing():
    name = "pathways_lab.notebook.view.render_process"
    return [c for c in kernel.children() if name in c.cmdline()]
def used():
    ours = {t.native_id for t in threading.enumerate() if t.name.startswith("pathways studio")}
    here = sum(t.user_time + t.system_time for t in kernel.threads() if t.id in ours)
    return np.array([here, sum(sum(c.cpu_times()[:2]) for c in drawing())])
def timed(name, count):
    f, x = functions[name], zero
    before, begun = used(), time.perf_counter()
    for _ in range(count):
        x = f(x)
    jax.block_until_ready(x)
    passed = time.perf_counter() - begun
    print(passed, *(used() - before))
"""
SETUPS = {
    IMPORTS + EIGHT + VIEWING: (FAST, STEADY, STEPS),
    IMPORTS + SIXTY_FOUR + VIEWING: (WIDE,),
}
"""The first cell of a kernel, and what can be called there."""


class Kernel:
    """A Jupyter kernel and its front end, in this thread.

    setup: its first cell.  messages, bytes: of views.  updates: pictures among them.
    """

    def __init__(self, setup: str) -> None:
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
        self.messages = self.bytes = self.updates = 0
        try:
            self.run(setup)
        except BaseException:
            self.close()
            raise

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
            told = message["content"]["data"].get("content", {})
            if told.get("type") in ("update", "snapshot"):
                self.picture(told)

    def picture(self, told: dict[str, Any]) -> None:
        """A view has sent what is new in its picture."""
        self.updates += 1


class Looking:
    """Samples with views that move and that are stopped.

    used: what views that move took and did, by kind of calls and of views, see :func:`taken`.
    """

    def __init__(self, kernel: Kernel, measured: Measured, budget: float) -> None:
        self.measured = measured
        self.used: dict[tuple[str, str], list[tuple[float, float, float, float]]] = {}
        self._kernel = kernel
        self._budget = budget
        self._units: dict[str, int] = {}

    def measure(
        self, calls: Collection[str], views: Collection[str], rounds: int, pairs: int, seed: int
    ) -> None:
        """All rounds; no view is open in the end."""
        for kind in calls:
            self._units[kind] = warm(functools.partial(self._calls, kind), self._budget)
        self.measured.busy = busy_cores(1.0)
        chance = random.Random(seed)
        for number in range(rounds):
            visits = [(kind, look) for kind in calls for look in views]
            for kind, look in chance.sample(visits, len(visits)):
                self._open(look)
                for _ in range(pairs):
                    for state in chance.sample((STOPPED, MOVING), 2):
                        self._sample(kind, look, state)
            print(f"round {number + 1} of {rounds}", flush=True)
        self._open(NONE)

    def _open(self, look: str) -> None:
        panels = "PANELS" if look == ALL else "()"
        self._kernel.run(f"show({VIEWS[look]}, {panels})")
        self._kernel.follow()
        # First pictures, which have the whole past in them or are of a new shape, are paid once.
        self._kernel.drawn(VIEWS[look])

    def _sample(self, kind: str, look: str, state: str) -> None:
        units = self._units[kind]
        with self._stopped(state == STOPPED):
            # What was owed or saved up in the last sample is no part of this one.
            self._timed(kind, max(units // 2, 1))
            before = self._kernel.updates
            timed, took = self._timed(kind, units)
            updates = (self._kernel.updates - before) / max(1, VIEWS[look])
        times = self.measured.times.setdefault(f"{kind}, {look}", {STOPPED: [], MOVING: []})
        times[state].append(timed.seconds / timed.units)
        if state == MOVING:
            self.used.setdefault((kind, look), []).append((timed.seconds, *took, updates))

    @contextmanager
    def _stopped(self, stopped: bool) -> Iterator[None]:
        """With the process that draws held, or not."""
        found = self._kernel.run("print(*(c.pid for c in drawing()))") if stopped else ""
        with held([psutil.Process(int(pid)) for pid in found.split()]):
            yield

    def _calls(self, kind: str, units: int) -> Timed:
        return self._timed(kind, units)[0]

    def _timed(self, kind: str, units: int) -> tuple[Timed, tuple[float, float]]:
        printed = self._kernel.run(f"timed({FUNCTIONS[kind]!r}, {units})")
        passed, kernel, drawing = map(float, printed.split())
        return Timed(passed, units), (kernel, drawing)


@contextmanager
def held(processes: Sequence[psutil.Process]) -> Iterator[None]:
    """With these processes stopped."""
    for process in processes:
        process.suspend()
    still = (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE)
    while any(process.status() not in still for process in processes):
        time.sleep(0.001)  # it goes on for a moment
    try:
        yield
    finally:
        for process in processes:
            process.resume()


def cost(measured: Measured, calls: str, views: str) -> Ratio:
    """Share of throughput that views take, of 1; below 0 when they seem to give some."""
    case = f"{calls}, {views}"
    kept = ratio(measured.of(case, STOPPED), measured.of(case, MOVING))
    return Ratio(1 - kept.value, 1 - kept.high, 1 - kept.low)


def percent(found: Ratio) -> str:
    """A share and its interval."""
    return f"{100 * found.value:.1f}% [{100 * found.low:.1f}, {100 * found.high:.1f}]"


def verdict(what: str, found: Ratio, pairs: int) -> Verdict:
    """Whether a cost is below the limit, with all of its interval."""
    decided = pairs >= ENOUGH and not found.low <= LIMIT <= found.high
    met = found.high < LIMIT if decided else None
    return Verdict(what, f"below {100 * LIMIT:g}% of throughput", percent(found), met)


def taken(used: Sequence[tuple[float, float, float, float]]) -> str:
    """What views took, in words; used: seconds that passed, processor seconds in the kernel
    and in the process that draws, and updates of each view, of every sample.
    """
    passed, kernel, drawing, updates = map(sum, zip(*used, strict=True))
    return (
        f"{100 * kernel / passed:.1f}% of the kernel's time"
        f" and {100 * drawing / passed:.1f}% of another processor,"
        f" {updates / passed:.1f} updates a second"
    )


def main() -> None:
    """Measure, print, publish."""
    parser = arguments(__doc__, rounds=4, budget=2.0)
    names = list(FUNCTIONS.values())
    parser.add_argument("--calls", nargs="+", choices=names, default=names)
    parser.add_argument("--pairs", type=int, default=PAIRS, help="of samples, in each round")
    chosen = parser.parse_args()
    how = settings(chosen)
    measured = Measured()
    notes: list[str] = []
    verdicts: list[Verdict] = []
    messages = nbytes = 0
    for setup, kinds in SETUPS.items():
        calls = [kind for kind in kinds if FUNCTIONS[kind] in chosen.calls]
        if not calls:
            continue
        kernel = Kernel(setup)
        try:
            looking = Looking(kernel, measured, how.budget)
            looking.measure(calls, VIEWS, how.rounds, 1 if how.quick else chosen.pairs, how.seed)
        finally:
            kernel.close()
        messages, nbytes = messages + kernel.messages, nbytes + kernel.bytes
        for kind in calls:
            for views in VIEWS:
                what, found = f"{kind}: {views}", cost(measured, kind, views)
                if views == NONE:
                    notes += [f"{what}, by chance {percent(found)}", ""]
                    continue
                used = looking.used[kind, views]
                verdicts.append(verdict(what, found, len(used)))
                notes += [f"{what}: {taken(used)}", ""]
    title = "The overhead of looking (emulated devices)"
    notes.append(verdict_table(verdicts))
    report = Report("looking", title, "call", measured, STOPPED, notes=notes, verdicts=verdicts)
    report.facts["messages"] = {"count": messages, "bytes": nbytes}
    publish(report, how.folder)


if __name__ == "__main__":
    main()
