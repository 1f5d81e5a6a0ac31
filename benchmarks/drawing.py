"""What a live view costs a browser and a kernel: frames, processor time, memory.

    python -m benchmarks.drawing [--seconds 600]

A real JupyterLab and a headless Chromium, which draws in software: a browser with a
graphics processor is cheaper.  The view has 64 devices and some thousands of bars
that come in real time from a synthetic record, and is updated ten times a second;
the kernel's timeline is full from the beginning, so what grows is the view's.  The
kernel draws it in a thread, which is the dear way (views of a lab are drawn by
a process of their own).  Numbers per processor second are of one core.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from benchmarks.harness.machine import load, machine
from tests.notebook.jupyter import Lab, Page, chromium

CELL = """
from pathways_lab.timeline.log import Timeline
from pathways_lab.notebook.view.view import View
from pathways_lab.timeline.records import Span
from tests.notebook.synthetic import Cluster, play, shifted
cluster, at = Cluster(islands=2, hosts=4, devices=8, emulated=True), 0.0
while at < {seconds} + 120:
    at = cluster.pipeline(at=at, micro=8, forward=0.08) + 0.005
log = Timeline()
spans = [record for record in cluster.in_order() if isinstance(record, Span)]
while len(log) < log.capacity:
    log.extend(shifted(span, -1e4) for span in spans)
view = View(log, {panels}, title="train", origin=log.clock())
view.show()
feed = play(log, cluster.in_order(), tick=0.1)
"""

FRAMES = """() => { window.frames_ = 0;
  const count = () => { window.frames_ += 1; requestAnimationFrame(count); };
  requestAnimationFrame(count); }"""


def kernel_of(lab: Lab) -> psutil.Process:
    """The process of the only kernel of a server."""
    for process in psutil.Process(lab.process.pid).children(recursive=True):
        if "ipykernel_launcher" in " ".join(process.cmdline()):
            return process
    raise RuntimeError("the server has no kernel")


def used(process: psutil.Process) -> float:
    """Processor seconds so far."""
    times = process.cpu_times()
    return float(times.user + times.system)


def measured(page: Page, lab: Lab, seconds: float, every: float) -> Iterator[tuple[float, ...]]:
    """Per *every* seconds: time, frames/s, shares of a core (page, script, kernel), MiB, bars."""
    tools = page.page.context.new_cdp_session(page.page)
    tools.send("Performance.enable")

    def page_seconds() -> dict[str, float]:
        found: dict[str, Any] = tools.send("Performance.getMetrics")
        return {each["name"]: each["value"] for each in found["metrics"]}

    kernel = kernel_of(lab)
    page.page.evaluate(FRAMES)
    begun = time.monotonic()
    while time.monotonic() - begun < seconds:
        before, frames = time.monotonic(), page.page.evaluate("() => window.frames_")
        spent, tasks = used(kernel), page_seconds()
        page.page.wait_for_timeout(1000 * every)
        passed = time.monotonic() - before
        after = page_seconds()
        yield (
            time.monotonic() - begun,
            (page.page.evaluate("() => window.frames_") - frames) / passed,
            (after["TaskDuration"] - tasks["TaskDuration"]) / passed,
            (after["ScriptDuration"] - tasks["ScriptDuration"]) / passed,
            (used(kernel) - spent) / passed,
            after["JSHeapUsedSize"] / 2**20,
            kernel.memory_info().rss / 2**20,
            float(len(page.source("queues-bars", "left"))),
        )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--every", type=float, default=20.0)
    parser.add_argument("--panels", default="", help="names of panels, by commas")
    chosen = parser.parse_args()
    from playwright.sync_api import sync_playwright

    panels = tuple(filter(None, chosen.panels.split(",")))
    heads = ("seconds", "frames/s", "page", "script", "kernel", "heap MiB", "kernel MiB", "bars")
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        lab = Lab(Path(folder))
        browser = playwright.chromium.launch(executable_path=chromium(), args=["--no-sandbox"])
        try:
            lab.write("view.ipynb", [CELL.format(seconds=chosen.seconds, panels=panels)])
            page = Page(browser, lab, height=1000)
            page.open("view.ipynb")
            page.wait_for_kernel()
            page.command("notebook:run-all-cells")
            page.wait_for_view()
            print("".join(f"{head:>11}" for head in heads))
            for row in measured(page, lab, chosen.seconds, chosen.every):
                texts = [f"{row[0]:.0f}", f"{row[1]:.1f}", *(f"{100 * s:.1f}%" for s in row[2:5])]
                texts += [f"{value:.0f}" for value in row[5:]]
                print("".join(f"{text:>11}" for text in texts), flush=True)
            page.shutdown()
        finally:
            browser.close()
            lab.close()
    print(machine(), load())


if __name__ == "__main__":
    main()
