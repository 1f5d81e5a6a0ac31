"""The side panel's choice of a lab, in a browser and without JupyterLab: its script knows neither.

Laws: the lab that is shown stays until it ends, or until another notebook's comes to the
front; the others are there to choose from.
"""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.notebook.jupyter import ROOT, chromium

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(chromium() is None, reason="there is no chromium on this machine"),
]

SCRIPTS = ROOT / "extensions" / "labextensions" / "pathways-lab" / "static"

BEGIN = """async () => {
  const { Panel } = await import("http://panel.test/panel.js");
  const ask = async (path) => {
    if (!path)
      return { labs: labs.map((name) => ({ name, started: 0, kernels: kernels[name] ?? {} })) };
    const name = path.split("/")[1];
    if (!labs.includes(name) || mute.includes(name)) throw new Error("502");
    const number = window.news ?? 1;
    if (path.endsWith(`since=${number}`)) return null;
    const client = { name: `client of ${name}`, slices: 0, devices: 0, using: 0 };
    const devices = [...name].map(() => ({ busy: window.busy ?? 0, colour: "#00ff00", memory: 0 }));
    const hosts = [{ name: "island0/host0", kind: "cpu", lost: "", devices }];
    const islands = [{ name: "island0", busy: 0, hosts }];
    return { number, islands, programs: [], clients: [client], notes: [] };
  };
  const known = { current: () => front, notebook: (number) => `${number}.ipynb` };
  new Panel(document.body, ask, () => {}, known).begin();
}"""


class Panel:
    """The panel on a page of its own, with a clock of its own and labs that answer as a test
    wants; a lab's island has as many devices as its name has letters."""

    def __init__(self, browser: Any) -> None:
        self.page = browser.new_page()
        page = {"body": "<!DOCTYPE html>", "content_type": "text/html"}
        self.page.route("**/*", lambda route: route.fulfill(**page))
        self.page.route(
            "**/*.js", lambda route: route.fulfill(path=SCRIPTS / route.request.url.split("/")[-1])
        )
        self.page.clock.install()
        self.page.goto("http://panel.test/")

    def begin(self, *labs: str) -> None:
        self.set(labs)
        self.page.evaluate(BEGIN)

    def set(self, labs: tuple[str, ...], mute: tuple[str, ...] = ()) -> None:
        """labs: that are listed, newest first.  mute: those of them that do not answer."""
        self.page.evaluate(
            "([labs, mute]) => { window.kernels ??= {}; window.front ??= null;"
            " Object.assign(window, { labs, mute }); }",
            [list(labs), list(mute)],
        )

    def front(self, kernel: str | None, **kernels: dict[str, float]) -> None:
        """kernel: of the notebook in front.  kernels: when they opened which lab."""
        self.page.evaluate(
            "([front, kernels]) => Object.assign(window, { front, kernels })", [kernel, kernels]
        )

    def names(self) -> list[str]:
        """What the labs to choose from are called, without their starts."""
        texts = self.page.locator(".pathways-panel-choice option").all_inner_texts()
        return [re.sub(r", started [^(]*", " ", text).strip() for text in texts]

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
    notes = panel.page.locator(".pathways-panel-notes")
    assert notes.inner_text() == "the lab does not answer"
    panel.set(("third", "second", "first"))
    assert panel.shows() == "second", "it was silent for a moment only"
    assert notes.text_content() == ""
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


def test_the_lab_of_the_notebook_in_front_is_shown(browser: Any) -> None:
    panel = Panel(browser)
    panel.begin("newest", "older", "oldest")
    panel.front("ann", older={"ann": 1.0}, oldest={"bob": 1.0, "eve": 2.0})
    assert panel.shows() == "older", "its own, and not the newest"
    assert panel.names() == ["lab", "ann.ipynb (this notebook)", "bob.ipynb, eve.ipynb"]
    panel.page.locator(".pathways-panel-choice").select_option("newest")
    assert panel.shows() == "newest", "what somebody has chosen stays"
    kernels = {"older": {"ann": 1.0}, "oldest": {"bob": 1.0}}
    panel.front(None, **kernels)
    assert panel.shows() == "newest", "what is in front now has no lab"
    panel.front("bob", **kernels)
    assert panel.shows() == "oldest"
    panel.front("bob", newest={"bob": 3.0}, **kernels)
    assert panel.shows() == "newest", "the one that it has opened last"
    panel.page.reload()
    panel.front("bob", newest={"bob": 3.0}, **kernels)
    panel.begin("newest", "older", "oldest")
    panel.page.locator(".pathways-panel-choice").select_option("older")
    panel.page.reload()
    panel.front("bob", newest={"bob": 3.0}, **kernels)
    panel.begin("newest", "older", "oldest")
    assert panel.shows() == "older", "a reload chooses nothing"
    panel.set(("older",))
    panel.shows()
    text = panel.page.inner_text(".pathways-panel-which")
    assert text.startswith("ann.ipynb, started "), "the only one is named, too"
    panel.close()


def test_a_lab_that_is_closed_leaves_without_a_word(browser: Any) -> None:
    panel = Panel(browser)
    panel.begin("closed", "other")
    assert panel.shows() == "closed"
    panel.page.evaluate(
        """() => {
          window.said = [];
          const notes = document.querySelector(".pathways-panel-notes");
          new MutationObserver(() => said.push(notes.textContent)).observe(notes, {
            childList: true, characterData: true, subtree: true,
          });
        }"""
    )
    panel.set(("closed", "other"), mute=("closed",))  # its processes end before its folder
    panel.page.clock.run_for(450)
    panel.set(("other",))
    assert panel.shows(2.0) == "other"
    panel.set(())
    assert panel.shows(2.0) == ""
    assert panel.page.evaluate("said") == []
    panel.close()


def test_no_lab_is_denied_while_it_does_not_answer_yet(browser: Any) -> None:
    panel = Panel(browser)
    panel.begin()
    panel.page.clock.run_for(500)
    assert panel.page.is_visible(".pathways-panel-help")
    panel.set(("slow",), mute=("slow",))
    panel.page.clock.run_for(2500)
    assert panel.page.is_visible(".pathways-panel-which")
    assert not panel.page.is_visible(".pathways-panel-help")
    panel.close()


GREEN = """() => {
  const canvas = document.querySelector(".pathways-panel-timeline");
  const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
  let green = 0;
  for (let i = 0; i < data.length; i += 4) green += data[i + 1] > 128 && data[i + 3] > 128;
  return [green / (canvas.width * canvas.height), canvas.clientHeight];
}"""


def test_the_small_timeline_shows_what_devices_did_of_late(browser: Any) -> None:
    panel = Panel(browser)
    panel.begin("two")
    panel.page.clock.run_for(20_000)
    share, height = panel.page.evaluate(GREEN)
    assert (share, height) == (0, 3 * 8), "a row for each device, and nothing has run"
    panel.page.evaluate("() => { window.busy = 1; window.news = 2; }")
    panel.page.clock.run_for(10_000)
    share, _ = panel.page.evaluate(GREEN)
    assert 0.2 < share < 0.4, "ten of thirty seconds"
    panel.page.clock.run_for(60_000)
    share, _ = panel.page.evaluate(GREEN)
    assert share > 0.8, "what was before has left"
    panel.close()
