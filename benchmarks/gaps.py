"""How long a live picture stands still on a machine that is full, and what it costs there.

    python -m benchmarks.gaps [--seconds 60] [--pairs 12]

A real JupyterLab and a headless Chromium, which draws in software on the same processors: the
worst case, for a person's browser has processors of its own.  A cell spins, so messages to the page
wait for its kernel's interpreter, while a thread calls a program of two islands of two hosts, whose
matrices keep all processors busy.  A gap is the time from one change of the view's first line to
the next, in the page.

The cost is that of drawing and of the browser together: steps per second while the process that
draws is stopped by a signal, against samples beside them in which it is not.
"""

from __future__ import annotations

import random
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from benchmarks.drawing import kernel_of, used
from benchmarks.harness.command import arguments, settings
from benchmarks.harness.report import Report, Verdict, publish, verdict_table
from benchmarks.harness.rounds import Measured, busy_cores
from benchmarks.looking import MOVING, STOPPED, cost, held, percent
from tests.notebook.jupyter import Lab, Page, chromium

LONGEST = 1.0
"""Seconds between two updates that are wanted at most, but for one gap in a hundred."""

SECONDS, PAIRS = 60.0, 12
"""For which gaps are counted; pairs of samples of throughput."""

SETTLE, SAMPLE = 2.0, 3.0
"""Seconds: until what was not drawn meanwhile is caught up with, and of a sample."""

STEPS, BESIDE = "steps on four busy hosts", "beside a cell that spins"

LAB = """
import threading, time, jax, jax.numpy as jnp, numpy as np, pathways_lab as pw
lab = pw.start(2, 2, 1, platform="cpu", progress=False)
lab.view().show()
"""
BUSY = """
left, right = (lab.slice((2,), ("x",), island=f"island{n}") for n in range(2))
def work(v):
    for _ in range(6): v = jnp.tanh(v @ v)
    return v
f, g = (pw.jit(work, on=on, name=name) for on, name in ((left, "left"), (right, "right")))
@pw.program
def step(v): return g(f(v))
v, done, over = np.eye(300, dtype=np.float32), [], time.monotonic() + SECONDS
step(v)
def call():
    x = v
    while time.monotonic() < over:
        for _ in range(4): x = step(x)
        jax.block_until_ready(x)
        done.append(time.monotonic())
thread = threading.Thread(target=call)
thread.start()
while time.monotonic() < over: pass
thread.join()
np.save("done.npy", done)
"""
WATCH = """() => {
  const [line, late] = document.querySelectorAll(".pathways-lab-status, .pathways-lab-behind");
  window.updates_ = [];
  const note = () => window.updates_.push([performance.now() / 1000, late.textContent]);
  new MutationObserver(note).observe(line, { childList: true, characterData: true, subtree: true });
}"""


def drawing(lab: Lab) -> list[psutil.Process]:
    """The process that draws the views of the only kernel."""
    name = "pathways_lab.notebook.view.render_process"
    return [child for child in kernel_of(lab).children() if name in child.cmdline()]


def browsing() -> list[psutil.Process]:
    """The browser's processes."""
    children = psutil.Process().children(recursive=True)
    return [child for child in children if "chrom" in child.name()]


def gaps(page: Page, seconds: float) -> tuple[list[float], int]:
    """Seconds between updates, and how many of them said that they were behind."""
    page.page.evaluate(WATCH)
    page.page.wait_for_timeout(1000 * seconds)
    updates = page.page.evaluate("() => window.updates_")
    times = [moment for moment, _ in updates]
    return np.diff(times).tolist(), sum(bool(behind) for _, behind in updates)


def sampled(processes: Sequence[psutil.Process], pairs: int, seed: int) -> list[tuple[str, float]]:
    """The state of samples, and when each began (seconds)."""
    chance, out = random.Random(seed), []
    for _ in range(pairs):
        for state in chance.sample((STOPPED, MOVING), 2):
            with held(processes if state == STOPPED else ()):
                time.sleep(SETTLE)
                out.append((state, time.monotonic()))
                time.sleep(SAMPLE)
    return out


def main() -> None:
    """Measure, print, publish."""
    parser = arguments(__doc__, rounds=1)
    parser.add_argument("--seconds", type=float, default=SECONDS, help="for which gaps are counted")
    parser.add_argument("--pairs", type=int, default=PAIRS, help="of samples of throughput")
    chosen = parser.parse_args()
    how = settings(chosen)
    seconds, pairs = (5.0, 1) if how.quick else (chosen.seconds, chosen.pairs)
    from playwright.sync_api import sync_playwright

    measured = Measured()
    measured.busy = busy_cores(1.0)
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        lab = Lab(Path(folder))
        browser = playwright.chromium.launch(executable_path=chromium(), args=["--no-sandbox"])
        try:
            page = Page(browser, lab, width=1300, height=1200)
            whole = 15 + seconds + 2 * pairs * (SETTLE + SAMPLE)
            page.begin("gaps.ipynb", LAB, BUSY.replace("SECONDS", str(whole)))
            page.run_cell(0)
            page.wait_for_view()
            page.page.evaluate(
                "() => { window.jupyterapp.shell.currentWidget.content.activeCellIndex = 1; }"
            )
            page.start("notebook:run-cell")
            page.page.wait_for_function(
                "() => /\\d/.test(document.querySelector('.pathways-lab-status').textContent)"
            )
            page.page.wait_for_timeout(5000)
            watched = {"the process that draws": drawing(lab), "the browser": browsing()}
            before = {name: sum(map(used, each)) for name, each in watched.items()}
            found, behind = gaps(page, seconds)
            shares = {
                name: (sum(map(used, each)) - before[name]) / seconds
                for name, each in watched.items()
            }
            samples = sampled(drawing(lab), pairs, how.seed)
            page.wait_for_idle(60 + whole)
            done: Any = np.load(lab.work / "done.npy")
            page.shutdown()
        finally:
            browser.close()
            lab.close()
    times: dict[str, list[float]] = {STOPPED: [], MOVING: []}
    for state, begun in samples:
        first, last = np.interp((begun, begun + SAMPLE), done, 4.0 * np.arange(len(done)))
        times[state].append(SAMPLE / float(last - first))
    measured.times[f"{STEPS}, {BESIDE}"] = times
    p50, p90, p99, longest = np.quantile(found, (0.5, 0.9, 0.99, 1.0)).tolist()
    text = (
        f"gaps in {seconds:.0f} s: p50 {p50:.2f}, p90 {p90:.2f}, p99 {p99:.2f}, max {longest:.2f} s"
        f" ({len(found) + 1} updates, {behind} of them a second behind or more);"
        f" the view costs {percent(cost(measured, STEPS, BESIDE))} of throughput in {pairs} pairs,"
        + " and".join(f" {100 * share:.1f}% of a processor in {n}" for n, share in shares.items())
    )
    print(text, file=sys.stderr, flush=True)
    wanted = f"{LONGEST:g} s at most at p99"
    verdicts = [Verdict(f"gaps {BESIDE}", wanted, f"{p99:.2f} s", p99 <= LONGEST)]
    notes = [text, "", verdict_table(verdicts)]
    title = "How long a live picture stands still on a full machine"
    report = Report("gaps", title, "step", measured, STOPPED, notes=notes, verdicts=verdicts)
    publish(report, how.folder)


if __name__ == "__main__":
    main()
