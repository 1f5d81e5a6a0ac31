"""The side panel's choice of a lab, in a browser and without JupyterLab: its script knows neither.

Law: the lab that is shown stays until it ends; the others are there to choose from.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.notebook.jupyter import ROOT, chromium

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(chromium() is None, reason="there is no chromium on this machine"),
]

BEGIN = """async (source) => {
  const { Panel } = await import("data:text/javascript," + encodeURIComponent(source));
  const ask = async (path) => {
    if (!path) return { labs: labs.map((name) => ({ name, started: 0 })) };
    const name = path.split("/")[1];
    if (!labs.includes(name) || mute.includes(name)) throw new Error("502");
    const client = { name: `client of ${name}`, slices: 0, devices: 0, using: 0 };
    const devices = [...name].map(() => ({ busy: 0, memory: 0 }));
    const hosts = [{ name: "island0/host0", kind: "cpu", lost: "", devices }];
    const islands = [{ name: "island0", busy: 0, hosts }];
    return { number: 1, islands, programs: [], clients: [client], notes: [] };
  };
  new Panel(document.body, ask, [], () => {}).begin();
}"""


class Panel:
    """The panel on a page of its own, with a clock of its own and labs that answer as a test
    wants; a lab's island has as many devices as its name has letters."""

    def __init__(self, browser: Any) -> None:
        self.page = browser.new_page()
        self.page.route(
            "**/*", lambda route: route.fulfill(body="<!DOCTYPE html>", content_type="text/html")
        )
        self.page.clock.install()
        self.page.goto("http://panel.test/")

    def begin(self, *labs: str) -> None:
        self.set(labs)
        folder = ROOT / "extensions" / "labextensions" / "pathways-lab" / "static"
        self.page.evaluate(BEGIN, (folder / "panel.js").read_text())

    def set(self, labs: tuple[str, ...], mute: tuple[str, ...] = ()) -> None:
        """labs: that are listed, newest first.  mute: those of them that do not answer."""
        self.page.evaluate(
            "([labs, mute]) => Object.assign(window, { labs, mute })", [list(labs), list(mute)]
        )

    def shows(self, seconds: float = 20.0) -> str:
        """Whose data it shows after so many seconds; "" when it shows that there is no lab."""
        self.page.clock.run_for(1000 * seconds)
        if self.page.is_visible(".pathways-panel-help"):
            return ""
        text: str = self.page.inner_text(
            ".pathways-panel-part:has-text('Clients') .pathways-panel-name"
        )
        name = text.removeprefix("client of ")
        assert self.page.locator(".pathways-panel-device").count() == len(name), "its own devices"
        return name

    def close(self) -> None:
        self.page.close()


def test_the_panel_stays_with_a_lab_until_that_ends(browser: Any) -> None:
    panel = Panel(browser)
    panel.begin("first")
    assert panel.shows() == "first"
    panel.set(("second", "first"))
    assert panel.shows() == "first", "a newer lab is offered and not shown"
    choice = panel.page.locator(".pathways-panel-choice")
    assert choice.locator("option").evaluate_all("all => all.map(o => o.value)") == [
        "second", "first",
    ]  # fmt: skip
    choice.select_option("second")
    assert panel.shows() == "second"
    panel.set(("third", "second", "first"))
    assert panel.shows() == "second"
    panel.set(("third", "second", "first"), mute=("second",))
    panel.shows(2.0)
    panel.set(("third", "second", "first"))
    assert panel.shows() == "second", "it was silent for a moment only"
    panel.page.reload()
    panel.begin("third", "second", "first")
    assert panel.shows() == "second", "a reload chooses nothing"
    panel.set(("third", "first"))
    assert panel.shows() == "third", "it has ended"
    panel.set(("third", "first"), mute=("third",))
    assert panel.shows() == "first", "who does not answer any more has ended, though it is listed"
    panel.set(())
    assert panel.shows() == ""
    panel.close()
