"""The notebook with a real lab in a real browser: what a newcomer sees."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.notebook.jupyter import Lab, Page, chromium, grows

pytestmark = [
    pytest.mark.browser,
    pytest.mark.cluster,
    pytest.mark.skipif(chromium() is None, reason="there is no chromium on this machine"),
]

START = """
%load_ext pathways_lab
import time
import jax, jax.numpy as jnp, numpy as np
import pathways_lab as pw
lab = pw.start(islands=2, hosts_per_island=1, devices_per_host=2)
"""

STAGES = """
left = lab.slice((2,), ("data",), island="island0")
right = lab.slice((2,), ("data",), island="island1")
def stage(x):
    return pw.emulated(60)(x + 1)
first = pw.jit(stage, on=left)
second = pw.jit(stage, on=right)
def loud(x):
    jax.debug.print("total {}", x.sum())
    return x
speak = pw.jit(loud, on=left)
x = np.zeros(4, np.float32)
float(second(first(x))[0])
"""

TRAIN = """
%%pw_program train
outs = []
for _ in range(300):
    outs.append(second(first(x)))
"""

BUSY = """
import os
end = time.monotonic() + 300
while time.monotonic() < end and not os.path.exists("seen"):
    time.sleep(0.05)
"""

PRINTS = """%%pw_program talk --no-view
spoken = speak(x)
"""

WAITS = """
for _ in range(20):  # what hosts print is printed by whoever waits, also somewhat later
    spoken.block_until_ready()
    time.sleep(0.1)
float(outs[-1][0])
"""

FAILS = """%%pw_program wrong
y = first(x)
if y.sum() > 1:
    z = 1
"""

CHECK = """
from pathways_lab.timeline.records import Span
run, gangs = outs[0].buffer.run, []
while len(gangs) < 600:  # the last records are on their way
    time.sleep(0.1)
    spans = [r for r in lab.timeline.records if isinstance(r, Span) and r.run == run]
    gangs = [r for r in spans if r.kind == "gang"]
print("gangs", len(gangs), sum(len(r.devices) for r in gangs))
from pathways_lab.notebook.kernel import line_index
file = (lambda: None).__code__.co_filename
print(line_index.place_of(f"{file}:2: text")["cell"])
"""


LIT = """() => [...document.querySelectorAll('.jp-Notebook .jp-Cell')].flatMap((cell, n) =>
  [...cell.querySelectorAll('.cm-pathways-line')].map(line => [n, line.textContent]))"""


def test_a_program_moves_prints_fails_and_freezes(browser: Any, lab: Lab, tmp_path: Path) -> None:
    page = Page(browser, lab, height=1500)
    page.show("real.ipynb", START, STAGES, TRAIN, BUSY, PRINTS, WAITS, CHECK, FAILS, timeout=90)
    page.show_cell(2)
    grows(page)
    assert page.busy(3), "the cell after it must still be running"
    page.click_mark("order", "order-done")
    page.page.wait_for_function(f"() => ({LIT})().length")
    assert page.page.evaluate(LIT) == [[2, "    outs.append(second(first(x)))"]]
    page.page.mouse.move(0, 0)  # under the pointer is a mark, which the card tells of first
    page.page.click("button.pathways-lab-fact")
    page.screenshot(tmp_path / "line.png")
    edit = "s => window.jupyterapp.shell.currentWidget.content.widgets[2].model.sharedModel"
    page.page.evaluate(f"{edit}.setSource(s)", TRAIN.replace("append", "extend"))
    assert page.page.evaluate(LIT) == [], "what ran is not what stands there now"
    page.page.evaluate(f"{edit}.setSource(s)", TRAIN)
    assert len(page.page.evaluate(LIT)) == 1
    page.page.focus(".pathways-lab")
    page.page.keyboard.press("Escape")
    page.page.wait_for_function(f"() => !({LIT})().length")
    page.page.click(".pathways-lab-button:has-text('follow')")
    assert page.busy(3), "all of it while the kernel was busy"
    (lab.work / "seen").touch()
    page.screenshot(tmp_path / "moving.png")
    page.wait_for_idle(timeout=90)
    page.wait_for_picture()
    page.screenshot(tmp_path / "frozen.png")
    page.show_cell(7)
    page.screenshot(tmp_path / "error.png")
    assert page.blocked == []
    page.command("docmanager:save")
    cells = lab.read("real.ipynb")["cells"]
    started = "".join(cells[0]["outputs"][0]["data"]["text/plain"])
    assert started.startswith("the lab is ready, after "), "one line is left of the progress"
    printed = "".join(cells[6]["outputs"][0]["text"]).split()
    picture = cells[2]["outputs"][0]
    assert set(picture["data"]) == {"text/html", "text/plain"}
    facts = picture["metadata"]["pathways_lab"]
    assert printed[:2] == ["gangs", "600"]
    assert printed[3] == "cell6"
    assert facts["programs"]["train"] == int(printed[2]) == 600 * 2
    assert facts["held"] >= 600 * 2 * 0.06
    spoken = "".join("".join(o["data"]["text/plain"]) for o in cells[4]["outputs"])
    assert "[island0/host0 device 0] total" in spoken
    error = cells[7]["outputs"][-1]
    text = "\n".join(error["traceback"])
    assert error["ename"] == "PathwaysError"
    assert "if y.sum() > 1" in text
    assert "site-packages" not in text
    page.close()
