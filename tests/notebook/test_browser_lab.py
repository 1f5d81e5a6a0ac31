"""Real labs in a real browser: their pages, JupyterLab's side panel, and programs in a notebook.

All is below a prefix as of a hub.  Each is one test, in which the kernel is busy most of the time:
a JupyterLab, a browser and a lab take longer to start than all of it to be looked at.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pathways_lab.notebook.view.saved import MIME
from pathways_lab.runtime.processes import kept_labs
from tests.notebook.jupyter import FEED, Lab, Page, chromium, grows, newest

pytestmark = [
    pytest.mark.browser,
    pytest.mark.cluster,
    pytest.mark.skipif(chromium() is None, reason="there is no chromium on this machine"),
]

BASE = "/user/ada"

START = """
%load_ext pathways_lab
import time
import numpy as np
import pathways_lab as pw
lab = pw.start(islands=2, hosts_per_island=1, devices_per_host=2, name="ada")
left = lab.slice((2,), ("data",), island="island0")
right = lab.slice((1,), ("data",), island="island1")
first = pw.jit(lambda x: pw.emulated(60)(x + 1), on=left, name="first")
second = pw.jit(lambda x: pw.emulated(90)(x + 1), on=right, name="second")
"""

TRAIN = """
@pw.program
def train(x):
    for _ in range(200):
        x = second(first(x))
    return x
outs = [train(np.zeros(4, np.float32)) for _ in range(10)]  # longer than anybody looks
"""

BUSY = """
end = time.monotonic() + 240
while time.monotonic() < end and not os.path.exists("enough"):
    time.sleep(0.05)
"""

METERS = "() => [...document.querySelectorAll('.pathways-panel-meter')].map(e => e.style.width)"
LISTED = (
    "name => [...document.querySelectorAll('.pathways-panel-choice option')]"
    ".some(option => option.value === name)"
)
CHOSEN = (
    "name => { const [shown] = document.querySelector('.pathways-panel-choice').selectedOptions;"
    " return shown?.value === name && /^lab.ipynb, started .* .this notebook.$/.test(shown.text); }"
)
PICTURE = "document.querySelector('.pathways-lab')?.pathwaysDocument"


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    made = Lab(tmp_path_factory.mktemp("jupyter"), base=BASE)
    yield made
    made.close()


@pytest.fixture(scope="module")
def shared(browser: Any, lab: Lab) -> Iterator[Page]:
    made = Page(browser, lab, width=1500, height=1500)
    yield made
    made.close()


def changes(look: Callable[[], Any], times: int, seconds: float = 60.0) -> None:
    """Until *look* has seen something else as many *times*."""
    seen, last, until = 0, look(), time.monotonic() + seconds
    while seen < times:
        assert time.monotonic() < until, f"it stands still at {last!r} after {seen} changes"
        time.sleep(0.1)
        now = look()
        seen, last = seen + (now != last), now


def follows(frame: Any) -> None:
    """A page of the lab in *frame* (or browser page) draws, and its time goes on."""
    frame.wait_for_function(f"() => !!{PICTURE}?.get_model_by_name('time')", timeout=60_000)
    changes(lambda: frame.inner_text(".pathways-lab-moment"), 3)


def test_panel_and_pages_move_while_the_kernel_is_busy(
    browser: Any, page: Page, lab: Lab, tmp_path: Path
) -> None:
    """First of the file: of a page, the first lab opens the panel."""
    lab.write("lab.ipynb", ["import os" + START, TRAIN, "%pw_dashboard queues", BUSY])
    page.load("lab.ipynb")
    page.wait_for_kernel()
    assert not page.page.is_visible(".pathways-panel")
    page.start()
    page.page.wait_for_selector(".pathways-panel:visible", timeout=120_000)  # by itself
    page.page.wait_for_function(
        "() => document.querySelectorAll('.jp-CodeCell .jp-InputPrompt')[3].textContent"
        ".includes('*') && document.querySelector('.jp-OutputArea-output iframe')",
        timeout=120_000,
    )
    frame = page.page.query_selector(".jp-OutputArea-output iframe")
    assert frame is not None
    source = frame.get_attribute("src") or ""
    assert source.startswith(f"{BASE}/pathways-lab/labs/pwlab-")
    ours = source.split("/")[-2]
    # Other labs of the same user would be listed too; this notebook's own is shown.
    page.page.wait_for_function(CHOSEN, arg=ours)

    # The panel: who is there, and it moves.
    def texts(selector: str) -> list[str]:
        return [e.inner_text() for e in page.page.query_selector_all(f".pathways-panel-{selector}")]

    page.page.wait_for_selector(".pathways-panel-row:has-text('train')")
    assert texts("island .pathways-panel-row .pathways-panel-name") == ["island0", "island1"]
    assert "ada" in texts("row .pathways-panel-name")
    held = page.page.query_selector_all(".pathways-panel-device")
    states = [device.get_attribute("data-state") for device in held]
    assert states == ["held", "held", "held", "free"]
    changes(lambda: page.page.evaluate(METERS), 3)
    assert page.busy(3), "the cell must still be running"

    # The page below the cell: under the server's own prefix, and it moves.
    page.show_cell(2)
    follows(frame.content_frame())

    # A page in a tab, by the command that the panel's button and the palette run too.
    page.page.click(".pathways-panel-open")
    tab = page.page.wait_for_selector(".pathways-page iframe")
    assert tab is not None
    tab.content_frame().wait_for_selector("canvas")
    caption = page.page.evaluate("() => window.jupyterapp.shell.currentWidget.title.caption")
    assert caption.startswith("lab.ipynb, started ")
    page.command("apputils:change-theme", theme="JupyterLab Dark")
    dark = "() => document.documentElement.dataset.dark === 'true'"
    tab.content_frame().wait_for_function(dark)
    assert page.busy(3)
    page.screenshot(tmp_path / "panel.png")

    # The same on Dask's own web server, which the page may ask and nothing else.
    link = re.search(r"http://127\.0\.0\.1:\d+/", page.output(2))
    assert link is not None
    asked: list[str] = []
    alone = browser.new_page()
    alone.on("request", lambda request: asked.append(request.url))
    alone.goto(f"{link[0]}pathways")
    follows(alone)
    alone.close()
    assert page.busy(3), "all of that was seen while the kernel was busy"
    assert {url for url in asked if not url.startswith((link[0], "data:"))} == set()

    # The lab ends, and the panel says so.
    (lab.work / "enough").touch()
    page.page.evaluate("() => window.jupyterapp.serviceManager.sessions.shutdownAll()")
    page.page.wait_for_function(f"name => !({LISTED})(name)", arg=ours, timeout=60_000)
    assert [text for text in page.console if "Failed to load resource" not in text] == []


OPEN = """
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

PROGRAM = """
%%pw_program train
outs = []
for _ in range(300):
    outs.append(second(first(x)))
"""

WATCHED = """
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


def test_a_program_moves_prints_fails_and_freezes(page: Page, lab: Lab, tmp_path: Path) -> None:
    """What a newcomer sees."""
    page.show("real.ipynb", OPEN, STAGES, PROGRAM, WATCHED, PRINTS, WAITS, CHECK, FAILS, timeout=90)
    page.show_cell(2)
    grows(page)
    assert page.busy(3), "the cell after it must still be running"
    page.click_mark("queues", "queues-bars")
    page.page.wait_for_function(f"() => ({LIT})().length")
    assert page.page.evaluate(LIT) == [[2, "    outs.append(second(first(x)))"]]
    page.page.mouse.move(0, 0)  # under the pointer is a mark, which the card tells of first
    told = page.page.inner_text("button.pathways-lab-fact")
    assert "4 of cell [4]: outs.append(" in told, "the process that draws knows cells"
    page.page.click("button.pathways-lab-fact")
    page.screenshot(tmp_path / "line.png")
    edit = "s => window.jupyterapp.shell.currentWidget.content.widgets[2].model.sharedModel"
    page.page.evaluate(f"{edit}.setSource(s)", PROGRAM.replace("append", "extend"))
    assert page.page.evaluate(LIT) == [], "what ran is not what stands there now"
    page.page.evaluate(f"{edit}.setSource(s)", PROGRAM)
    assert len(page.page.evaluate(LIT)) == 1
    page.page.focus(".pathways-lab")
    page.page.keyboard.press("Escape")
    page.page.wait_for_function(f"() => !({LIT})().length")
    assert page.busy(3), "all of it while the kernel was busy"
    (lab.work / "seen").touch()
    page.screenshot(tmp_path / "moving.png")
    page.wait_for_idle(timeout=90)
    page.wait_for_saved()
    page.screenshot(tmp_path / "frozen.png")
    page.show_cell(7)
    page.screenshot(tmp_path / "error.png")
    page.command("docmanager:save")
    cells = lab.read("real.ipynb")["cells"]
    started = "".join(cells[0]["outputs"][0]["data"]["text/plain"])
    assert started.startswith("the lab is ready, after "), "one line is left of the progress"
    printed = "".join(cells[6]["outputs"][0]["text"]).split()
    picture = cells[2]["outputs"][0]
    assert set(picture["data"]) == {"text/html", "text/plain", MIME}
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


DETACHED = """
%%pw_program train --detach
y = x
for _ in range(1000):  # two minutes: longer than anybody looks
    y = second(first(y))
"""

ATTACH = """
%load_ext pathways_lab
import pathways_lab as pw
lab = pw.connect({name!r})
%pw_attach train
"""

WAIT = """
try:
    y.result()
except pw.PathwaysError as error:
    print(error.failure.kind)
"""


def test_a_run_goes_on_while_its_kernel_restarts_and_so_does_its_picture(
    page: Page, lab: Lab, tmp_path: Path
) -> None:
    name = f"restarted-{os.getpid()}"
    opened = OPEN.replace("devices_per_host=2", f"devices_per_host=2, keep={name!r}")
    attach = ATTACH.format(name=name)
    try:
        page.begin("detached.ipynb", opened, STAGES, DETACHED, attach, WAIT)
        for cell in range(3):
            page.run_cell(cell)
        page.wait_for_view()
        grows(page)
        page.screenshot(tmp_path / "before.png")
        page.restart()
        page.page.locator(".pathways-lab-state:has-text('kernel gone')").wait_for()
        gone = newest(page)
        page.screenshot(tmp_path / "gone.png")
        page.wait_for_kernel()
        page.command("notebook:clear-all-cell-outputs")
        page.run_cell(3)
        page.wait_for_view()
        grows(page)
        page.screenshot(tmp_path / "after.png")
        assert newest(page) > gone, "on the same axis, from the moment at which the cell ran"
        page.page.click(".pathways-lab-button:has-text('cancel')")
        page.run_cell(4)
        page.wait_for_saved()
        page.screenshot(tmp_path / "frozen.png")
        page.command("docmanager:save")
        assert lab.read("detached.ipynb")["cells"][4]["outputs"][0]["text"] == ["cancelled\n"]
    finally:
        kept_labs.stop(name)


WIDER = """
from pathways_lab.timeline.records import Event
def run(number, width):
    steps = [[False, f"n{n}", 0, 4, [], ""] for n in range(width)]
    of = dict(run=number, program=f"p{number}", client="kernel-1")
    now = log.clock()
    gang = Span("gang", now, now + 0.01, "island0", "island0/host0", (0,), number, 0, f"p{number}")
    log.extend([
        Event("plan", now, program=f"p{number}", args={"plan": f"k{number}", "steps": steps}),
        Event("submitted", now, **of, args={"plan": f"k{number}"}), gang,
    ])
log = Timeline()
run(1, 1)
shown = View(log, ("graph",), origin=log.clock() - 1)
shown.show()
"""


def test_a_panel_grows_with_its_run_and_is_not_built_anew(page: Page) -> None:
    """A document of nine panels takes half a second, and what was zoomed is lost with it."""
    setup = "\n".join(line for line in FEED.splitlines() if line.startswith(("import", "from")))
    page.begin("wider.ipynb", setup + WIDER, "run(2, 6)")
    page.run_cell(0)
    page.wait_for_view()
    high = """() => {
      const view = document.querySelector('.pathways-lab');
      const graph = view.pathwaysDocument.get_model_by_name('graph');
      return [graph.height, view.clientHeight, view.pathwaysDocument.marked ?? false];
    }"""
    page.page.wait_for_function(f"() => ({high})()[0] > 30")
    before, room, _ = page.page.evaluate(high)
    page.page.evaluate(
        "() => { document.querySelector('.pathways-lab').pathwaysDocument.marked = true; }"
    )
    page.run_cell(1)
    page.page.wait_for_function(f"() => ({high})()[0] > {before}", timeout=30_000)
    page.page.wait_for_timeout(300)
    after, more, marked = page.page.evaluate(high)
    assert marked, "the same document"
    assert more - room == pytest.approx(after - before, abs=2)
    assert page.console == []
