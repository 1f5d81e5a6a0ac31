"""The lab's pages and JupyterLab's side panel in a real browser, below a prefix as of a hub.

Everything here is looked at while the kernel is busy, and most of it is one test: a
JupyterLab, a browser and a lab take longer to start than all of it to be looked at.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.notebook.jupyter import Lab, Page, chromium

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
    changes(lambda: frame.evaluate(f"() => {PICTURE}.get_model_by_name('time').end"), 3)


def test_panel_and_pages_move_while_the_kernel_is_busy(
    browser: Any, lab: Lab, tmp_path: Path
) -> None:
    page = Page(browser, lab, width=1500)
    lab.write("lab.ipynb", ["import os" + START, TRAIN, "%pw_dashboard queues", BUSY])
    page.open("lab.ipynb")
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
    page.page.click(".pathways-panel-open:has-text('Islands')")
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
    assert page.blocked == []
    assert [text for text in page.console if "Failed to load resource" not in text] == []
