"""Pictures that notebooks keep of live views, in a real JupyterLab and in other places.

Laws: at the end, and while the view moves, the notebook has a picture that needs no kernel.
JupyterLab lets a reader look into it as into a live one.  All other places show it static, and so
does JupyterLab where the notebook is not trusted or the data cannot be read.
"""

from __future__ import annotations

import base64
import json
import math
import re
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import pytest

from pathways_lab.notebook.scene.palette import Palette
from pathways_lab.notebook.view.encode import framed
from pathways_lab.notebook.view.frozen import Bundle, freeze
from pathways_lab.notebook.view.saved import MIME
from tests.notebook.jupyter import (
    SHOWN,
    Lab,
    Page,
    chromium,
    feed,
    grows,
    notebook,
    wait_for_picture,
)
from tests.notebook.synthetic import training
from tests.notebook.test_saved import unpacked
from tests.runtime.processes import until

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(chromium() is None, reason="there is no chromium on this machine"),
]


def look_into(page: Page) -> None:
    """A saved picture: the pointer and the keys do what they do in a live one."""

    def shown() -> tuple[float, float]:
        start, end, _ = page.page.evaluate(SHOWN)
        return start, end - start

    until(lambda: page.page.is_disabled(".pathways-lab-scrubber"))  # everything is shown
    start, length = shown()
    x, y, gang = page.newest_mark("queues", "queues-bars")
    page.page.mouse.click(x, y)
    page.page.mouse.wheel(0, -600)
    until(lambda: shown()[1] == pytest.approx(length / math.e, rel=0.01))
    zoomed = shown()
    assert zoomed[0] > start, "at the pointer"
    page.page.mouse.down()
    page.page.mouse.move(x + 100, y, steps=5)
    page.page.mouse.up()
    assert shown()[0] < zoomed[0] - 0.02
    assert shown()[1] == pytest.approx(zoomed[1])
    page.page.mouse.move(2, 2)
    told = page.page.inner_text(".pathways-lab-chosen")
    assert re.search(r"^update[01] of train\n.*\nline\s*params = update", told, re.DOTALL)
    assert page.attribute("data-gang") == str(int(gang))
    page.page.mouse.dblclick(x, y)
    until(lambda: shown() == pytest.approx((start, length)))
    page.page.focus(".pathways-lab")
    page.page.keyboard.type("+p")
    assert shown()[1] == pytest.approx(length / 2)
    assert page.attribute("data-gang") not in (None, "", str(int(gang)))
    (_, stood), (at, _) = page.scrubber(), shown()
    page.page.keyboard.press("ArrowLeft")
    until(lambda: shown()[0] < at)
    assert float(page.scrubber()[1]) < float(stood)
    page.page.keyboard.press("t")
    assert "Keys: plus and minus" in page.page.inner_text(".pathways-lab-text")
    assert "island1" in page.page.inner_text(".pathways-lab-text")
    page.page.keyboard.press("Escape")
    until(lambda: shown() == pytest.approx((start, length)))
    assert page.attribute("data-gang") == ""
    assert page.page.locator(".pathways-lab-button:visible").all_inner_texts() == ["text"]
    assert page.console == []


def test_the_frozen_picture_needs_no_kernel(
    browser: Any, page: Page, lab: Lab, tmp_path: Path
) -> None:
    page.begin("frozen.ipynb", feed(2, spin=0.5))
    page.command("notebook:run-all-cells")
    page.wait_for_saved()

    def frozen() -> bool:
        page.command("docmanager:save")
        outputs = lab.read("frozen.ipynb")["cells"][0]["outputs"]
        return bool(outputs) and "text/html" in outputs[0]["data"]

    until(frozen)  # some time after the last picture
    page.put_away()
    saved = lab.read("frozen.ipynb")
    output = saved["cells"][0]["outputs"][0]
    assert set(output["data"]) == {"text/html", "text/plain", MIME}
    assert len(json.dumps(output)) <= 150_000
    facts = output["metadata"]["pathways_lab"]
    assert (facts["computations"], facts["transfers"]) == (2 * 2 * 9 * 2, 2 * 8 * 2)
    page.open("frozen.ipynb")
    page.wait_for_saved()
    page.screenshot(tmp_path / "frozen.png")
    look_into(page)
    # A copy is a notebook that nobody has signed: untrusted.
    (lab.work / "copy.ipynb").write_text(json.dumps(saved).replace("finished", "finished "))
    page.open("copy.ipynb")
    page.wait_for_picture()
    for theme in ("Dark", "Light"):  # a static picture brings its own ground, as dark as the page
        page.command("apputils:change-theme", theme=f"JupyterLab {theme}")
        until(lambda: page.legible()[1] == (theme == "Dark"))  # noqa: B023
        assert page.legible()[0] >= 7.0
    page.screenshot(tmp_path / "copy.png")
    assert page.page.locator(".pathways-lab").count() == 0
    command = [sys.executable, "-m", "nbconvert", "--to", "html", "--log-level=ERROR"]
    subprocess.run([*command, "frozen.ipynb"], cwd=lab.work, check=True, timeout=120)
    # nbconvert's own template wants formulas from a network; the picture must not need it.
    plain = browser.new_page()
    plain.route(re.compile("^http"), lambda route: route.abort())
    plain.goto((lab.work / "frozen.html").as_uri())
    wait_for_picture(plain)
    plain.close()


def drawn_by(version: str, bundle: Bundle) -> str:
    """The data of a picture as another version of Bokeh would have made them."""
    message, block = unpacked(bundle)
    document = json.dumps({**json.loads(message["document"]), "version": version})
    frame = framed({**message, "document": document, "block": block})
    return base64.b64encode(zlib.compress(frame)).decode()


def test_what_cannot_be_read_is_static(page: Page, lab: Lab, tmp_path: Path) -> None:
    """Data that are damaged, of which this JupyterLab knows nothing, or that another kind of Bokeh
    made.  Another version of the same kind will do."""
    data, metadata = bundle = freeze(training(1), 0.0, 1.0, ("queues",), "train", Palette())
    static = {"text/html": data["text/html"]}
    made = (
        {MIME: data[MIME][:400]},
        {MIME + "0": data[MIME]},
        {MIME: drawn_by("2.4.3", bundle)},
        {MIME: drawn_by("3.0.0", bundle)},
    )
    written = notebook(["view"])
    written["cells"][0]["outputs"] = [
        {"output_type": "display_data", "data": static | each, "metadata": metadata}
        for each in made
    ]
    (lab.work / "odd.ipynb").write_text(json.dumps(written))
    lab.trust("odd.ipynb")
    page.open("odd.ipynb")
    page.wait_for_kernel()  # JupyterLab complains of one that ends before it has begun
    page.wait_for_saved()
    page.page.wait_for_function("() => !document.querySelector('.pathways-saved-coming')")
    page.screenshot(tmp_path / "odd.png")
    assert page.page.locator("img[src^=data]").count() == 3
    assert page.page.locator(".pathways-lab").count() == 1
    assert len(page.source("queues-bars", "left")) == bundle[1]["pathways_lab"]["bars"]


def test_a_notebook_that_is_saved_while_its_view_moves_has_a_picture(
    browser: Any, page: Page, lab: Lab, tmp_path: Path
) -> None:
    page.show("open.ipynb", feed(), "view")
    grows(page)

    def kept() -> list[dict[str, Any]]:
        page.command("docmanager:save")
        cells = lab.read("open.ipynb")["cells"][:2]
        return [each for cell in cells for each in cell["outputs"] if "text/html" in each["data"]]

    until(lambda: len(kept()) == 2)
    grows(page)  # the view goes on: what was saved is not what is shown
    assert page.page.locator(".pathways-lab").count() == 2
    assert page.console == []
    page.command("notebook:move-cell-up")
    page.page.wait_for_function("() => document.querySelectorAll('.pathways-lab').length === 2")
    assert len(kept()) == 2
    page.open("open.ipynb")  # without the kernel that it had
    page.wait_for_saved()
    page.screenshot(tmp_path / "kept.png")
    text = page.page.inner_text(".jp-Notebook")
    assert "model not found" not in text
    assert "Loading widget" not in text
    for output in kept():
        assert set(output["data"]) == {"text/html", "text/plain", MIME}
        assert len(json.dumps(output)) <= 150_000
        facts = output["metadata"]["pathways_lab"]
        assert facts["computations"] > 0
