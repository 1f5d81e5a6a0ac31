"""The head of a live view in a browser and without JupyterLab: what it says by its own clock.

Laws: it says at once that a cancellation is under way, counts on how long a function is compiled,
and says that its picture is old, though nothing comes from the kernel.  A page that is slow rests
between pictures, and for no more than half a second.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from datetime import datetime
from typing import Any

import pytest

from pathways_lab.notebook.scene.header import Header
from pathways_lab.notebook.view import PAGE
from tests.notebook.jupyter import ROOT, chromium

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(chromium() is None, reason="there is no chromium on this machine"),
]

VIEWS = ROOT / "pathways_lab" / "notebook" / "view"

BEGIN = """async () => {
  const { Head, View, between, rested } = await import("http://head.test/head.js");
  Object.assign(window, { View, between, rested });
  window.sent = [];
  window.head = new Head((name) => sent.push(name));
  document.body.append(head.root, head.legend, head.advice);
}"""


class Shown:
    """A head on a page of its own, with a clock of its own."""

    def __init__(self, browser: Any) -> None:
        self.page = browser.new_page()
        script = (
            "\n".join((VIEWS / name).read_text() for name in PAGE)
            + "\nexport { Head, View, between, rested };\n"
        )
        answers = {
            "http://head.test/": ("<!DOCTYPE html>", "text/html"),
            "http://head.test/head.js": (script, "text/javascript"),
        }

        def answer(route: Any) -> None:
            body, kind = answers[route.request.url]
            route.fulfill(body=body, content_type=kind)

        self.page.route("**/*", answer)
        self.page.clock.install()
        self.page.goto("http://head.test/")
        self.page.evaluate(BEGIN)
        self.page.clock.pause_at(datetime(2100, 1, 1))

    def show(self, age: float = 0.0, **header: Any) -> None:
        self.page.evaluate(
            "([header, age]) => head.show(header, age)", [asdict(Header(**header)), age]
        )

    def count(self, age: float, **header: Any) -> None:
        self.page.evaluate(
            "([header, age]) => head.count(header, age)", [asdict(Header(**header)), age]
        )

    def says(self, name: str) -> str:
        text: str = self.page.inner_text(f".pathways-lab-{name}")
        return text


@pytest.fixture
def head(browser: Any) -> Iterator[Shown]:
    made = Shown(browser)
    yield made
    made.page.close()


def test_a_cancellation_is_told_at_once_and_until_it_has_happened(head: Shown) -> None:
    head.show(state="running", actions=("cancel", "clear"))
    head.page.click("button:has-text('cancel')")
    assert head.says("state") == "cancelling"
    assert head.page.evaluate("sent") == ["cancel"]
    head.show(state="running", actions=("cancel", "clear"))
    assert head.says("state") == "cancelling", "nothing has come of it yet"
    head.show(state="cancelled")
    assert head.says("state") == "cancelled"


def test_how_long_a_function_is_compiled_goes_on_and_never_back(head: Shown) -> None:
    first: dict[str, Any] = {"state": "compiling", "compiling": ("forward", 2, 6, 1)}
    head.show(**first)
    assert head.says("compiling") == "compiling forward, 2 of 6, 1.0 s"
    head.page.clock.run_for(900)
    head.count(0.9, **first)
    assert head.says("compiling") == "compiling forward, 2 of 6, 1.9 s"
    head.show(**first)
    assert head.says("compiling") == "compiling forward, 2 of 6, 1.9 s", "the kernel counts seconds"
    head.page.clock.run_for(100)
    head.show(state="compiling", compiling=("forward", 2, 6, 2), at=3.0)
    head.page.clock.run_for(900)
    assert head.says("compiling") == "compiling forward, 2 of 6, 2 s", "a held picture stands"
    head.show(state="compiling", compiling=("backward", 3, 6, 0))
    assert head.says("compiling") == "compiling backward, 3 of 6, 0.0 s"
    head.show(state="running")
    assert head.says("compiling") == ""


def test_a_head_takes_the_lines_that_it_has_and_keeps_those_that_it_had(head: Shown) -> None:
    """A line for what is not said would be a hole, and one that goes would move what is below."""

    def height(part: str = "advice") -> float:
        found: float = head.page.evaluate(f"head.{part}.offsetHeight")
        return found

    head.show(state="running")
    assert height() == 0
    head.show(state="running", advice="island1 waits")
    one = height()
    head.show(state="running", advice="island1 waits " * 60)
    several = height()
    assert several > one > 0
    head.show(state="running", status="status " * 99, legend=(("p", (("f", "#000000"),) * 99),))
    assert height() == several
    parts = [height(part) for part in ("root", "legend")]
    head.show(state="running")
    assert [height(part) for part in ("root", "legend")] == parts
    head.page.evaluate("head.fit(400)")
    head.show(state="running")
    assert [height(part) < one for part, one in zip(("root", "legend"), parts, strict=True)] == [
        True,
        True,
    ]


@pytest.mark.parametrize(
    ("took", "rests"),
    [(-5, 0), (50, 100), (166, 332), (200, 300), (300, 200), (480, 120), (2000, 500)],
)
def test_a_page_rests_between_pictures_and_shows_two_in_a_second_if_it_can(
    head: Shown, took: int, rests: int
) -> None:
    assert head.page.evaluate("rested", took) == rests


def test_an_old_picture_of_what_runs_says_so_beside_its_advice(head: Shown) -> None:
    head.show(state="running", advice="island1 waits")
    assert head.says("behind") == ""
    assert head.says("advice") == "island1 waits"
    head.count(3.2, state="running")
    assert head.says("behind") == "picture 3 s behind"
    head.count(3.2, state="running", late=2.0)
    assert head.says("behind") == "picture 5 s behind", "the kernel's part, and the page's"
    head.count(60.0, state="idle")
    assert head.says("behind") == "", "what stands is not late"
    head.show(state="running")
    assert head.says("behind") == ""


def test_a_held_picture_says_so_and_the_way_back(head: Shown) -> None:
    """What runs goes on meanwhile, and its state with it."""
    head.show(state="running", status="3 of 5 gangs done", shares="busy 5 %")
    assert head.says("status") == "3 of 5 gangs done · busy 5 %"
    explained = head.page.get_attribute(".pathways-lab-status", "title")
    assert "one call of a compiled function" in (explained or "")
    head.show(state="running", at=9.391, status="3 of 5 gangs done", shares="busy 5 %")
    assert head.says("state") == "running"
    assert (head.says("behind"), head.says("status")) == ("held at 9.391 s; Esc goes on", "")
    head.count(3.2, state="running", at=9.391)
    assert head.says("behind").startswith("held at 9.391 s")
    head.show(state="running")
    assert head.says("behind") == ""


def test_a_view_without_a_picture_says_that_it_is_on_its_way_and_has_no_empty_buttons(
    head: Shown,
) -> None:
    head.page.add_style_tag(content=(VIEWS / "live.css").read_text())
    head.page.evaluate(
        "() => { const feed = { act() {}, light() {}, help: '', age: 0, header: null };"
        " window.view = new View(feed, document.body); }"
    )
    said = "() => getComputedStyle(view.root, '::before').content"
    assert "first picture" in head.page.evaluate(said)
    assert not head.page.is_visible(".pathways-lab button")
    head.page.evaluate("header => view.header(header)", asdict(Header()))
    assert head.page.evaluate(said) == "none"
    assert head.page.is_visible(".pathways-lab button")


@pytest.mark.parametrize("lane", [None, 2.0, 3.0])
def test_an_arrow_leads_to_a_bar_that_begins_when_its_own_has_ended(
    head: Shown, lane: float | None
) -> None:
    """A late host of the first computation, and one of the second that needs nothing of it."""
    made = [{"left": 0.0, "right": end, "y": y} for end, y in ((1.0, 0.0), (1.4, 1.0))]
    uses = [{"left": begin, "right": 2.0, "y": y} for begin, y in ((1.1, 2.0), (1.5, 3.0))]
    last, first = head.page.evaluate(
        "([made, uses, lane]) => between(made, uses, lane)", [made, uses, lane]
    )
    assert first == (uses[1] if lane == 3.0 else uses[0])
    assert last == (made[1] if lane == 3.0 else made[0])
