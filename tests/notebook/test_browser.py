"""The live view in a real JupyterLab and a real browser.

Laws: it moves while a cell computes; what the page shows is what the records
say; every page has the present state, however late it comes; at the end a
static picture is left that needs no kernel; nothing is ever requested from
outside this machine.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from pathways_lab.notebook.scene.scene import WAITS
from pathways_lab.notebook.view.saved import MIME
from pathways_lab.timeline.waits import INPUT
from tests.notebook.jupyter import (
    DEAF,
    LONG,
    SHOWN,
    Lab,
    Page,
    chromium,
    feed,
    grows,
    newest,
)
from tests.runtime.processes import until

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(chromium() is None, reason="there is no chromium on this machine"),
]

SERVED = """() => performance.getEntriesByType('resource')
  .some(({ name }) => name.includes('/pathways-lab/bokehjs/'))"""
COMPILES = """
from pathways_lab.timeline.records import Event
args = dict(function="f", slice=0, waiting=4)
log.extend([
    Event("compiling", log.clock(), "island0", "island0/host0", node="forward", args=args)
])
"""
STUCK = "view._painter._lock.acquire()"
"""A function begins to be compiled, and then nothing is drawn any more."""

BODY = ".pathways-lab-body"


def test_without_the_server_route_a_busy_kernel_brings_the_script(page: Page, lab: Lab) -> None:
    """First of the file: a page that has no script, and a kernel that hears nothing while busy."""
    without = "import os; os.environ.pop('PATHWAYS_LAB_BOKEHJS_ROUTE')\n"
    lab.write("bare.ipynb", [without + DEAF + feed(spin=LONG)])
    page.load("bare.ipynb")
    page.wait_for_kernel()
    page.start()
    page.wait_for_view()
    grows(page)
    assert page.busy(), "the cell must still be spinning"
    assert page.attribute("data-scripts") == "kernel"


def test_the_bars_in_the_page_are_the_records(page: Page) -> None:
    check = """
feed.join(); time.sleep(1.0)
spans = [r for r in log.records if isinstance(r, Span)]
origin = view.picture.scene.origin
print(sum(len(s.devices) for s in spans), f"{max(s.end for s in spans) - origin:.6f}")
"""
    goes_on = feed(3, hosts=2).replace("ended=over", 'ended=lambda: ""')
    page.show("bars.ipynb", goes_on, check)
    page.wait_for_idle()
    printed = page.output(1).split()
    until(lambda: sum(page.source("queues-bars", "count")) == int(printed[0]))
    assert max(page.source("queues-bars", "right")) == pytest.approx(float(printed[1]), abs=1e-5)
    assert page.source("queues-open", "left") == []
    assert len(page.source("order-done", "left")) == 3 * 9 * 2 * 2
    assert page.source("order-granted", "left") == []


def test_a_second_view_and_a_reload_in_mid_run_show_the_present(page: Page, lab: Lab) -> None:
    page.begin("late.ipynb", feed(), "view", "done.set()")
    page.run_cell(0)
    page.run_cell(1)
    page.wait_for_view()
    page.page.wait_for_function("() => document.querySelectorAll('.pathways-lab').length === 2")
    grows(page, view=0)
    grows(page, view=1)

    def same() -> bool:
        """Whether both show the same past: one may have merged old bars a moment before."""
        first, second = (page.source("queues-bars", "left", n) for n in (0, 1))
        shorter = min(len(first), len(second))
        return shorter > 50 and first[:shorter] == second[:shorter]

    def kept(last: bool) -> bool:
        """Whether the file has a picture of each view, the last one or one of a live view."""
        page.command("docmanager:save")
        outputs = [c["outputs"][-1] for c in lab.read("late.ipynb")["cells"][:2]]
        told = [(set(o["data"]), "view" in o["metadata"]["pathways_lab"]) for o in outputs]
        return told == [({"text/html", "text/plain", MIME}, not last)] * 2

    until(same)
    shown = sum(page.source("queues-bars", "count"))
    until(lambda: kept(last=False))
    page.load("late.ipynb")
    page.wait_for_view()
    grows(page)
    assert page.page.evaluate(SERVED), "the page has forgotten all"
    assert sum(page.source("queues-bars", "count")) >= shown, "the past must be there again"
    # The kernel's own update of the output does not reach a page that was opened late.
    page.run_cell(2)
    page.wait_for_saved()
    until(lambda: kept(last=True))


def test_a_held_picture_stands_and_then_shows_the_present(page: Page) -> None:
    noted = """
from dataclasses import replace
from pathways_lab.notebook.panels import PANELS
order = PANELS["order"]
PANELS["order"] = lambda scene, now: replace(order(scene, now), note=f"noted at {now:.1f}")
"""
    page.show("hold.ipynb", noted + feed(), COMPILES, STUCK, command="notebook:run-cell")
    grows(page)
    until(lambda: max(page.source("queues-ahead", "room"), default=0) > 0.3)  # much is to come
    page.page.click(".pathways-lab-button:has-text('pause')")
    held, moment = newest(page), page.page.inner_text(".pathways-lab-moment")
    (at,), words = (page.source("queues-ahead", of) for of in ("x0", "text"))
    assert (words, moment) == (["held"], f"{at:.3f} s")
    assert f"held at {moment}; Esc" in page.page.inner_text(".pathways-lab-behind")
    note = page.page.locator(".pathways-lab >> text=/noted at [0-9]/").first
    told = page.page.get_attribute(BODY, "aria-label")  # it says what is shown
    text, stood = note.inner_text(), page.scrubber()
    page.page.wait_for_timeout(1000)
    assert page.page.get_attribute(BODY, "aria-label") == told
    assert (newest(page), note.inner_text(), page.scrubber()) == (held, text, stood)
    assert page.page.inner_text(".pathways-lab-moment") == moment
    page.page.keyboard.press("Escape")
    until(lambda: newest(page) > held + 0.9)
    text = note.inner_text()
    until(lambda: note.inner_text() != text)  # what is said above a figure moves with it
    page.run_cell(1)
    page.page.locator(".pathways-lab-compiling:has-text('compiling forward, 1 of 5, ')").wait_for()
    # From now on nothing comes: the page says so by its own clock.
    page.run_cell(2)
    page.page.locator(".pathways-lab-behind:text-matches('^picture [2-9] s behind$')").wait_for()
    assert page.page.inner_text(".pathways-lab-compiling").startswith("compiling forward, 1 of 5, ")


def test_it_moves_and_all_is_found_again_while_a_cell_spins(
    page: Page, lab: Lab, tmp_path: Path
) -> None:
    """A gang, a moment; and its button ends the run."""
    count = """
gangs = [r for r in log.records if isinstance(r, Span) and r.kind == "gang"]
print(sum(len(r.devices) for r in gangs if r.end <= view.picture.scene.origin + 1.5))
"""
    page.show(
        "find.ipynb",
        feed(hosts=2, spin=LONG).replace('"islands", "order"', '"order", "graph"'),
        count,
        command="notebook:run-cell",
    )
    for _ in range(3):
        grows(page)
        assert page.busy(), "the cell must still be spinning"
    (lab.work / "seen").touch()
    assert page.painted() > 10_000
    page.screenshot(tmp_path / "moving.png")
    page.wait_for_source("order-done", 12)
    gang = page.click_mark("order", "order-done")
    assert page.attribute("data-gang") == str(int(gang))
    marks = {
        name: page.source(name, "gang").count(gang) for name in ("queues-bars", "queues-waits")
    }
    assert marks["queues-bars"] == 1, "one bar for all devices of the lane"
    assert len(page.source("queues-chosen", "left")) == sum(marks.values())
    assert len(page.source("order-chosen", "left")) == 2, "one box per host"
    page.page.click(".pathways-lab-button:has-text('follow')")
    page.page.wait_for_function(
        "() => document.querySelector('.pathways-lab-chosen').textContent.includes('of train')"
    )
    assert "line" in page.page.inner_text(".pathways-lab-chosen")
    page.page.focus(".pathways-lab")
    page.page.keyboard.press("Escape")
    assert page.source("order-chosen", "left") == []
    page.page.keyboard.press("n")
    assert page.source("order-chosen", "left") != [], "the newest gang"

    page.seek(1.5)
    then = list(zip(page.source("queues-bars", "alpha"), page.source("queues-bars", "count"),
                    page.source("queues-bars", "right"), strict=True))  # fmt: skip
    assert max(right for _, _, right in then) <= 1.5
    page.page.keyboard.press("t")
    page.page.wait_for_function(
        "() => document.querySelector('.pathways-lab-text').textContent.includes('island1')"
    )
    assert "Keys: space holds" in page.page.inner_text(".pathways-lab-text")
    page.page.click(".pathways-lab-button:has-text('follow')")
    grows(page)
    before = len(page.source("queues-bars", "left"))
    page.page.click(".pathways-lab-button:has-text('clear')")
    page.page.wait_for_function(
        "n => document.querySelector('.pathways-lab').pathwaysDocument"
        ".get_model_by_name('queues-bars').data.left.length < n / 2",
        arg=before,
    )
    assert page.busy(), "all of it while the cell was running"
    page.page.click(".pathways-lab-button:has-text('cancel')")
    assert page.page.inner_text(".pathways-lab-state") == "cancelling", "at once"
    page.wait_for_idle()
    assert "cancelled" in page.output(0), "and not spun to the end"
    page.run_cell(1)
    assert sum(count for alpha, count, _ in then if alpha == 1) == int(page.output(1))
    assert page.console == []


def test_run_all_shows_the_view_that_has_begun_unless_somebody_scrolls(page: Page) -> None:
    filler = "\n".join(f"# line {n}" for n in range(70))
    wait = """
import os
end = time.monotonic() + 120
while time.monotonic() < end and not os.path.exists("{}"):
    time.sleep(0.05)
"""
    cells = [feed(), filler + wait.format("scrolled"), "view", filler + wait.format("looked")]
    page.show("all.ipynb", *cells)
    sight = """() => {
      const { top, height } = document.querySelector('.pathways-lab').getBoundingClientRect();
      return height > 200 && top >= 0 && top < innerHeight / 2;
    }"""
    page.page.wait_for_function(sight)
    box = page.page.locator(".jp-WindowedPanel-outer").bounding_box()
    assert box is not None
    page.page.mouse.move(box["x"] + 200, box["y"] + 200)
    page.page.mouse.wheel(0, 700)
    page.page.wait_for_function(f"() => !({sight})()")
    where = "() => document.querySelector('.jp-WindowedPanel-outer').scrollTop"
    page.page.wait_for_timeout(500)
    left = page.page.evaluate(where)
    (page.lab.work / "scrolled").touch()
    until(lambda: page.busy(3))
    page.page.wait_for_timeout(2000)
    assert page.page.evaluate(where) == left, "who looks elsewhere is left there"
    (page.lab.work / "looked").touch()


@pytest.fixture(scope="module")
def moving(shared: Page) -> Iterator[Page]:
    """A view that moves, for the tests that follow each other and only look or click."""
    shared.show("moving.ipynb", feed(2 * LONG))
    yield shared
    assert shared.blocked == [], "requests wanted to leave this machine"


def test_the_tab_key_stops_at_what_has_a_name_and_nowhere_else(moving: Page) -> None:
    page = moving
    page.page.wait_for_selector(".pathways-lab-button:has-text('last 20 s')")  # it repeats
    page.page.focus(".pathways-lab")
    stops = []
    for _ in range(7):
        page.page.keyboard.press("Tab")
        stops.append(
            page.page.evaluate(
                "() => { const here = document.activeElement;"
                " return here.getAttribute('aria-label') ?? here.textContent; }"
            )
        )
    assert stops == ["cancel", "clear", "text", "save", "last 20 s", "pause",
                     "moment of the record, in seconds"]  # fmt: skip


def test_it_follows_the_theme(moving: Page, tmp_path: Path) -> None:
    page = moving
    page.command("apputils:change-theme", theme="JupyterLab Dark")
    until(lambda: sum(page.ink()) > 600)  # light text on the dark theme
    page.screenshot(tmp_path / "dark.png")
    page.command("apputils:change-theme", theme="JupyterLab Light")
    until(lambda: sum(page.ink()) < 200)  # dark text on the light theme
    page.screenshot(tmp_path / "light.png")
    page.page.set_viewport_size({"width": 1400, "height": 900})
    until(lambda: "device" in "".join(page.source("islands-heads", "text")))
    page.page.set_viewport_size({"width": 760, "height": 900})
    until(lambda: page.source("islands-heads", "text") == ["island0", "island1"])
    page.screenshot(tmp_path / "narrow.png")
    lines = page.page.evaluate(
        "() => [...document.querySelectorAll('.pathways-lab-head .pathways-lab-button')]"
        ".map(b => b.getBoundingClientRect().top)"
    )
    assert len(lines) > 4
    assert len(set(lines)) == 1, "there is room for all buttons in a line of their own"


def test_a_picture_has_a_browser_work_out_styles_a_few_times_and_not_for_each_mark(
    moving: Page,
) -> None:
    """BokehJS writes a style sheet for each renderer that it paints, and then reads one."""
    session = moving.page.context.new_cdp_session(moving.page)
    session.send("Performance.enable")

    def styles() -> float:
        metrics = session.send("Performance.getMetrics")["metrics"]
        return next(float(m["value"]) for m in metrics if m["name"] == "RecalcStyleCount")

    def pictures() -> int:
        return int(moving.page.evaluate("() => window.pictures_"))

    moving.page.evaluate(
        """() => {
          window.pictures_ = 0;
          const shown = document.querySelector(".pathways-lab").pathwaysDocument;
          const range = shown.get_model_by_name("queues-open");
          range.properties.data.change.connect(() => window.pictures_++);
        }"""
    )
    until(pictures)
    before, drawn = styles(), pictures()
    until(lambda: pictures() >= drawn + 6)
    each = (styles() - before) / (pictures() - drawn)
    session.detach()
    assert each < 22, "11, and 36 with BokehJS as it is"


CONTRAST = """() => {
  const linear = (c) => (c /= 255) <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
  const light = (colour, on) => {
    const [r, g, b, a = 1] = colour.match(/[0-9.]+/g).map(Number);
    const [x, y, z] = [r, g, b].map((c, i) => linear(a * c + (1 - a) * (on?.[i] ?? 255)));
    return 0.2126 * x + 0.7152 * y + 0.0722 * z;
  };
  const label = getComputedStyle(document.querySelector('.pathways-lab-pointed b')).color;
  const [a, b] = [light('255, 255, 255'), light(label)].sort((p, q) => q - p);
  return (a + 0.05) / (b + 0.05);
}"""


def test_a_card_tells_of_the_mark_under_the_pointer_and_a_click_unfolds_a_lane(
    moving: Page,
) -> None:
    page = moving
    page.page.set_viewport_size({"width": 1280, "height": 1100})
    page.wait_for_source("order-done", 12)
    card = page.page.locator(".pathways-lab-pointed")
    size = "() => document.querySelector('.pathways-lab').clientHeight"
    page.page.locator(".pathways-lab-advice:not(:empty)").wait_for()  # it has its room from then on
    page.page.wait_for_timeout(500)
    before = page.page.evaluate(size)
    page.click_mark("order", "order-done")
    card.wait_for()
    labels = ["place in the order", "computation", "client", "line", "granted", "launched", "ran"]
    assert card.locator("b").all_inner_texts() == labels
    assert " of train" in card.inner_text()
    assert page.page.evaluate(size) == before, "nothing moves"
    assert page.page.evaluate(CONTRAST) >= 4.5
    figures = page.page.locator(".pathways-lab-body").bounding_box()
    told = card.bounding_box()
    assert figures is not None
    assert told is not None
    assert told["y"] >= figures["y"] + figures["height"], "never over lanes"
    page.page.mouse.move(2, 2)
    card.wait_for(state="hidden")
    page.page.locator(".pathways-lab-chosen:has-text('of train')").wait_for()
    assert page.page.locator(".bk-Tooltip").count() == 0
    page.page.click(".pathways-lab-button:has-text('follow')")
    page.click_mark("queues", "queues-waits", WAITS.index(INPUT))
    page.page.mouse.move(2, 2)
    wait = page.page.locator(".pathways-lab-chosen:has-text('waited')")
    wait.wait_for()
    link = wait.locator(".pathways-lab-fact:has-text('behind') .pathways-lab-link")
    assert len(page.source("queues-chosen", "left")) == 1, "the wait, and no bar"
    node = link.inner_text()
    link.click()
    page.page.locator(f".pathways-lab-chosen:has-text('{node} of train')").wait_for()
    until(lambda: len(page.source("queues-arrows", "x0")) > 0)
    ends = {*page.source("queues-chosen", "right")}
    assert ends & {*page.source("queues-arrows", "x0")}, "to those that use it"
    page.page.click(".pathways-lab-button:has-text('follow')")
    x, y = page.page.evaluate(
        """() => {
          const document_ = document.querySelector('.pathways-lab').pathwaysDocument;
          const view = Bokeh.index.find_one([...document_._all_models.values()]
            .find(m => m.type === 'Figure' && m.name === 'queues'));
          const { x, y } = view.el.getBoundingClientRect();
          return [x + view.frame.bbox.left - 30, y + view.frame.y_scale.compute(0)];
        }"""
    )
    rows = (
        "n => document.querySelector('.pathways-lab').pathwaysDocument"
        ".get_model_by_name('queues-rows').ticker.ticks.length === n"
    )
    page.page.wait_for_function(rows, arg=3)  # that of the client, too
    page.page.mouse.click(x, y)
    page.page.wait_for_function(rows, arg=4)
    page.page.keyboard.down("Shift")
    page.page.mouse.move(x + 80, y)
    page.page.mouse.down()
    page.page.mouse.move(x + 300, y, steps=4)
    page.page.mouse.up()
    page.page.keyboard.up("Shift")
    page.page.locator(".pathways-lab-chosen:has-text('computed')").wait_for()
    bounds = page.page.locator(".pathways-lab-stretch").bounding_box()
    assert bounds is not None
    assert bounds["width"] == pytest.approx(220, abs=1)
    page.page.focus(".pathways-lab")
    page.page.keyboard.press("Escape")
    assert page.page.locator(".pathways-lab-stretch").count() == 0
    page.page.keyboard.press("u")
    page.page.wait_for_function(rows, arg=3)
    assert page.console == []


NAMED = """() => document.querySelector('.pathways-lab').pathwaysDocument
  .get_model_by_name('queues-words').data.text.filter(Boolean).length"""
TAB = """() => {
  window.told = [];
  const tab = { closed: false, postMessage: (what, where) => {
    window.told.push(where);
    const event = new MessageEvent('message', { data: 'PONG' });
    Object.defineProperty(event, 'source', { value: tab });
    if (what === 'PING') dispatchEvent(event);
    else window.sent = [what.perfetto.title, what.perfetto.buffer.byteLength];
  } };
  window.open = (address) => { window.told.push(address); return tab; };
}"""
"""In place of a tab of Perfetto: one that answers as its pages say that they do."""


def test_two_steps_stand_still_and_all_of_them_are_saved(moving: Page, tmp_path: Path) -> None:
    page = moving
    page.page.set_viewport_size({"width": 1280, "height": 1100})
    grows(page)
    start, end, first = page.page.evaluate(SHOWN)
    assert 1.0 < end - start < 1.6, "two steps of 0.65 s"
    begun = page.page.evaluate(
        f"""async () => {{
          const seen = new Set();
          while (seen.size < 4) {{
            seen.add(({SHOWN})()[0]);
            await new Promise(requestAnimationFrame);
          }}
          return [...seen];
        }}"""
    )
    assert min(b - a for a, b in pairwise(begun)) > 0.6, "it moves by steps, and stands between"
    assert first < start, "older bars are there, beside the window"
    page.page.focus(".pathways-lab")
    page.page.keyboard.type("---+")
    few = page.page.evaluate(NAMED)
    page.page.click(".pathways-lab-body")
    page.page.mouse.wheel(0, -1500)  # it zooms where somebody has clicked
    page.page.wait_for_function(f"n => ({NAMED})() > n", arg=few)  # words are those that fit
    page.page.keyboard.press("w")
    page.page.click(".pathways-lab-button:has-text('follow')")
    page.page.wait_for_function(f"() => {{ const [a, b] = ({SHOWN})(); return b - a > 3; }}")
    page.page.click(".pathways-lab-button:has-text('last runs')")
    page.page.wait_for_function(f"() => {{ const [a, b] = ({SHOWN})(); return b - a < 2; }}")
    painted = page.page.evaluate(
        """() => {
          const canvas = document.querySelector('.pathways-lab-overview');
          const { data } = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height);
          return data.filter((_, at) => at % 4 === 3 && data[at]).length;
        }"""
    )
    assert painted > 1000
    with page.page.expect_download() as download:
        page.page.click(".pathways-lab-button:has-text('save')")
    download.value.save_as(tmp_path / "train.json.gz")
    assert download.value.suggested_filename == "train.json.gz"
    trace = json.loads(gzip.decompress((tmp_path / "train.json.gz").read_bytes()))
    names = [event["name"] for event in trace["traceEvents"] if event.get("cat") == "gang"]
    assert names.count("bwd0") >= 4 * 4, "all that was, and not what is shown"
    page.page.evaluate(TAB)
    page.page.click(".pathways-lab-button:has-text('open in Perfetto')")
    page.page.wait_for_function("() => window.sent")
    assert set(page.page.evaluate("() => window.told")) == {"https://ui.perfetto.dev"}
    size = (tmp_path / "train.json.gz").stat().st_size
    assert page.page.evaluate("() => window.sent") == ["train.json.gz", size]
    assert page.console == []


def test_a_view_whose_kernel_is_restarted_says_so(moving: Page) -> None:
    page = moving
    grows(page)
    assert page.page.inner_text(".pathways-lab-state") == "running"
    page.restart()
    page.page.locator(".pathways-lab-state:has-text('kernel gone')").wait_for()
    assert page.page.locator(".pathways-lab-button:has-text('clear')").count() == 0
    assert (held := page.source("queues-bars", "left")), "what was known stays"
    page.page.click(".pathways-lab-button:has-text('pause')")
    assert page.source("queues-bars", "left") == held
    assert page.console == []
