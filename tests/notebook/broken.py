"""Every feature of the live pictures, broken on purpose: does the test that guards it fail?

``python -m tests.notebook.broken [WORDS]`` copies the project into a folder of its own, breaks
one thing at a time there, runs the test that guards it, and says whether that failed.  With
words: only features whose name has one of them.  All take some twenty minutes.  It ends with 0
only when every test failed.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]

PATIENCE = 300.0
"""Seconds that a test may take; one that hangs has not failed."""

NOTEBOOK = "pathways_lab/notebook/"
PANEL = "extensions/labextensions/pathways-lab/static/panel.js"
BROWSER = "tests/notebook/test_browser.py::"
RELOAD = BROWSER + "test_a_second_view_and_a_reload_in_mid_run_show_the_present"
SAVED = "tests/notebook/test_browser_saved.py::"
KEPT = SAVED + "test_a_notebook_that_is_saved_while_its_view_moves_has_a_picture"
FROZEN = SAVED + "test_the_frozen_picture_needs_no_kernel"
FOUND = BROWSER + "test_it_moves_and_all_is_found_again_while_a_cell_spins"
PROGRAM = "tests/notebook/test_browser_lab.py::test_a_program_moves_prints_fails_and_freezes"
HEAD = "tests/notebook/test_browser_head.py::"
HOLD = BROWSER + "test_a_held_picture_stands_and_then_shows_the_present"
LIVELY = "extensions/labextensions/pathways-lab/static/saved.js"
PANEL_TESTS = "tests/notebook/test_browser_panel.py::"
PLUGIN = "extensions/labextensions/pathways-lab/static/plugin.js"
PAGES = "tests/notebook/test_browser_lab.py::test_panel_and_pages_move_while_the_kernel_is_busy"
FOLLOW = "extensions/labextensions/pathways-lab/static/follow.js"
SIGHT = BROWSER + "test_run_all_shows_the_view_that_has_begun_unless_somebody_scrolls"
STEPS = BROWSER + "test_two_steps_stand_still_and_all_of_them_are_saved"
HEAT = "tests/notebook/test_heat.py::"
CARD = BROWSER + ("test_a_card_tells_of_the_mark_under_the_pointer_and_a_click_unfolds_a_lane")
THEME = BROWSER + "test_it_follows_the_theme"
OUTSIDE = ' fetch("https://example.org/x").catch(() => 0);'


@dataclass(frozen=True)
class Broken:
    """In *file*, *old* (which is there once) becomes *new*; then *test* must fail."""

    name: str
    file: str
    old: str
    new: str
    test: str


ALL = (
    Broken(
        "draws: nothing is put into the page", NOTEBOOK + "view/page.js",
        "    this.body.replaceChildren(place);\n", "", FOUND,
    ),
    Broken(
        "draws: a bar is lost", NOTEBOOK + "view/live.js",
        "all.set(more.subarray(Math.max(0, skip - old.length)), rest.length);",
        "all.set(more.subarray(Math.max(0, skip - old.length), more.length - 1), rest.length);",
        BROWSER + "test_the_bars_in_the_page_are_the_records",
    ),
    Broken(
        "data grow while a cell spins: updates are not sent", NOTEBOOK + "view/live.py",
        "self.send(content, [block])",
        'if content["type"] != "update":\n                self.send(content, [block])', FOUND,
    ),
    Broken(
        "reload: a late page is not answered", NOTEBOOK + "view/live.py",
        'elif kind == "snapshot" and self._ask is not None:\n            self._ask()',
        'elif kind == "snapshot":\n            pass', RELOAD,
    ),
    Broken(
        "reload: a repaired picture is not drawn", NOTEBOOK + "view/live.js",
        "for (const view of this.views) view.paused || view.show();\n    if (!this.told)",
        "if (!this.told)", RELOAD,
    ),
    Broken(
        "second view: only the first is told", NOTEBOOK + "view/live.js",
        "for (const view of this.views) view.apply(changes);",
        "for (const view of [...this.views].slice(0, 1)) view.apply(changes);", RELOAD,
    ),
    Broken(
        "theme: not painted again", NOTEBOOK + "view/page.js",
        "if (!this.document || this.feed.frozen) return;\n    this.frame",
        "if (this.once || !this.document || this.feed.frozen) return;\n"
        "    this.once = true;\n    this.frame",
        BROWSER + "test_it_follows_the_theme",
    ),
    Broken(
        "cancel in a busy cell", NOTEBOOK + "view/live.py",
        "comm._reply_subshell_for = None", "pass", FOUND,
    ),
    Broken(
        "frozen: not put into the notebook", NOTEBOOK + "view/view.py",
        "handle.update(data, metadata=metadata, raw=True)", "pass",
        "tests/notebook/test_picture.py::"
        "test_the_frozen_picture_takes_the_live_ones_place_also_where_no_page_is_open",
    ),
    Broken(
        "frozen: a page that was opened late keeps the widget", NOTEBOOK + "view/live.js",
        "setTimeout(() => settle(this.model, { id: snapshot.id, ...snapshot.frozen }), 1500);",
        "", RELOAD,
    ),
    Broken(
        "kept: the document has the widget", NOTEBOOK + "view/kept.js",
        'cell.sharedModel.updateOutputs(i, i + 1, [stored(bundle)], "silent-change");', "", KEPT,
    ),
    Broken(
        "kept: the live view is drawn anew", NOTEBOOK + "view/kept.js",
        '[stored(bundle)], "silent-change");', "[stored(bundle)]);", KEPT,
    ),
    Broken(
        "kept: a page that is opened again does not find its view", NOTEBOOK + "view/live.js",
        "    revive(this.model, first?.id);\n", "", RELOAD,
    ),
    Broken(
        "pause does not hold", NOTEBOOK + "view/page.js",
        "if (this.paused || !this.document) return;", "if (!this.document) return;", HOLD,
    ),
    Broken(
        "pause: what explains the picture goes on", NOTEBOOK + "view/page.js",
        "...(this.paused && this.held)", "", HOLD,
    ),
    Broken(
        "clock: a page does not say that nothing comes", NOTEBOOK + "view/head.js",
        "(late >= LATE ? `picture ${Math.round(late)} s behind` : \"\")", '""',
        HEAD + "test_an_old_picture_of_what_runs_says_so_beside_its_advice",
    ),
    Broken(
        "held: nothing says so", NOTEBOOK + "view/head.js",
        "const held = header.at !== null &&", "const held = false &&",
        HEAD + "test_a_held_picture_says_so_and_the_way_back",
    ),
    Broken(
        "held: the clock goes on", NOTEBOOK + "view/page.js", "this.foot.show(told);",
        "this.foot.show(header);", HOLD,
    ),
    Broken(
        "held: the scrubber goes on", NOTEBOOK + "view/page.js",
        "    Object.assign(told, this.stood);\n", "", HOLD,
    ),
    Broken(
        "held: its mark says now", NOTEBOOK + "view/page.js", '[word && "held", ""]', '[word, ""]',
        HOLD,
    ),
    Broken(
        "held: at no moment that is drawn", NOTEBOOK + "view/picture.py",
        "round(scene.elapsed(self._drawn_at)[1], 3)",
        "round(scene.elapsed(self._drawn_at)[1], 1)", HOLD,
    ),
    Broken(
        "held: Esc does not follow", NOTEBOOK + "view/page.js",
        "    if (this.resting) this.follow();\n", "", HOLD,
    ),
    Broken(
        "clock: compiling goes back", NOTEBOOK + "view/head.js",
        "this.since = Math.min(this.since, now - seconds);", "this.since = now - seconds;",
        HEAD + "test_how_long_a_function_is_compiled_goes_on_and_never_back",
    ),
    Broken(
        "cancel is not answered at once", NOTEBOOK + "view/head.js",
        'this.state.textContent = this.state.dataset.state = "cancelling";', "",
        HEAD + "test_a_cancellation_is_told_at_once_and_until_it_has_happened",
    ),
    Broken(
        "cancel is forgotten", NOTEBOOK + "view/head.js",
        'this.cancelled && header.actions.includes("cancel")', "false",
        HEAD + "test_a_cancellation_is_told_at_once_and_until_it_has_happened",
    ),
    Broken(
        "side panel does not open by itself", PLUGIN,
        "if ((await wishes)?.composite.openAtStart !== false) app.shell.activateById(place.id);",
        "", PAGES,
    ),
    Broken(
        "small timeline stands still", PANEL,
        "this.timeline.take(news?.islands ?? null, performance.now() / 1000);",
        "if (news) this.timeline.take(news.islands, performance.now() / 1000);",
        PANEL_TESTS + "test_the_small_timeline_shows_what_devices_did_of_late",
    ),
    Broken(
        "selection: nothing is framed", NOTEBOOK + "view/page.js",
        "out[name].push(data[name][i]);", "out[name].length;", FOUND,
    ),
    Broken(
        "wait: a click in a gap finds nothing", NOTEBOOK + "view/page.js",
        "      if (this.waits(point).length) found = point;\n", "", CARD,
    ),
    Broken(
        "arrows: none is drawn", NOTEBOOK + "view/page.js",
        "for (const name in out) out[name].push(arrow[name]);", "", CARD,
    ),
    Broken(
        "arrows: from the latest bar, though it ended later", NOTEBOOK + "view/page.js",
        "latest(before.length ? before : from), first", "latest(from), first",
        HEAD + "test_an_arrow_leads_to_a_bar_that_begins_when_its_own_has_ended",
    ),
    Broken(
        "page: each sheet is written at each painting", NOTEBOOK + "view/live.js",
        "if (this.el.textContent !== css) update", "update",
        BROWSER
        + "test_a_picture_has_a_browser_work_out_styles_a_few_times_and_not_for_each_mark",
    ),
    Broken(
        "card: a name in it leads nowhere", NOTEBOOK + "view/foot.js",
        "link.onclick = () => choose(gang);", "", CARD,
    ),
    Broken(
        "scrubber: no moment is sought", NOTEBOOK + "view/foot.js",
        'this.feed.act("seek", this.wanted);', "", FOUND,
    ),
    Broken(
        "source line is not lit", NOTEBOOK + "view/live.js",
        "this.lit = told;\n", "this.lit = told;\n    return;\n", PROGRAM,
    ),
    Broken(
        "no route: the script is not pushed", NOTEBOOK + "view/live.py",
        'if not self._pushed and (late or not self._scripts["route"]):', "if False:",
        BROWSER + "test_without_the_server_route_a_busy_kernel_brings_the_script",
    ),
    Broken(
        "side panel stands still", PANEL,
        'this.meter.style.width = host.lost ? "0" : `${100 * device.busy}%`;',
        "this.meter.style.width ||= `${100 * device.busy}%`;", PAGES,
    ),
    Broken(
        "side panel leaves its lab", PANEL,
        "this.choose(names.includes(known) && !this.silent.has(known) ? known : newest);",
        "this.choose(newest);",
        PANEL_TESTS + "test_the_panel_stays_with_a_lab_until_that_ends",
    ),
    Broken(
        "dashboard page stands still", NOTEBOOK + "dashboard/dashboard.js",
        "for (const handler of this.handlers) handler(message, [block]);",
        'if (message.type === "snapshot" && !this.once)'
        " for (const handler of this.handlers) handler(message, [block]), (this.once = true);",
        PAGES,
    ),
    Broken(
        "dashboard page: the prefix of a hub is forgotten",
        "extensions/pathways_lab_server/__init__.py",
        "os.environ[PAGES_VARIABLE] = pages", 'os.environ[PAGES_VARIABLE] = "/" + LABS', PAGES,
    ),
    Broken(
        "overview: nothing is painted", NOTEBOOK + "view/foot.js",
        "      pen.fillRect(left, tall - 2 - high, right - left, high);\n", "", STEPS,
    ),
    Broken(
        "steps: no way to the whole window", NOTEBOOK + "view/page.js",
        '      w: () => this.feed.act("window"),\n', "", STEPS,
    ),
    Broken(
        "wheel: the page's", NOTEBOOK + "view/page.js", "    this.wheels = true;\n", "", STEPS,
    ),
    Broken(
        "words: not fitted to the zoom", NOTEBOOK + "view/page.js",
        'name === "time" ? (frame * this.covered) / (end - start) : frame', "frame", STEPS,
    ),
    Broken(
        "save: no file", NOTEBOOK + "view/foot.js", "    link.click();\n", "", STEPS,
    ),
    Broken(
        "save: Perfetto has nothing", NOTEBOOK + "view/foot.js",
        "    tab.postMessage({ perfetto", "    ({ perfetto", STEPS,
    ),
    Broken(
        "Run All: the page's end", FOLLOW,
        "if (live && notebook.isVisible", "if (false && notebook.isVisible", SIGHT,
    ),
    Broken(
        "Run All: whoever scrolls is brought back", FOLLOW,
        " && touched < run.since + GRACE", "", SIGHT,
    ),
    Broken(
        "saved picture: its ground is white in the dark", NOTEBOOK + "draw/svg.py",
        "@media(prefers-color-scheme:dark)", "@media(prefers-color-scheme:none)", FROZEN,
    ),
    Broken(
        "saved picture: nothing brings it to life", LIVELY,
        "registry.addFactory(factory, RANK);", "", FROZEN,
    ),
    Broken(
        "saved picture: one that cannot be read shows nothing", LIVELY,
        'this.node.innerHTML = data["text/html"] ?? "";', "",
        SAVED + "test_what_cannot_be_read_is_static",
    ),
    Broken(
        "saved picture: the data of strangers come to life", LIVELY, "safe: false", "safe: true",
        FROZEN,
    ),
    Broken(
        "saved picture: another version of Bokeh will not do", NOTEBOOK + "view/live.js",
        'found(scripts).catch(() => found({ ...scripts, version: "" }))', "found(scripts)",
        SAVED + "test_what_cannot_be_read_is_static",
    ),
    Broken(
        "saved picture: a click tells nothing", NOTEBOOK + "view/live.js",
        "chosen: view.about(value)", "chosen: []", FROZEN,
    ),
    Broken(
        "saved picture: the wheel is the page's", NOTEBOOK + "view/page.js",
        "    const view = this.wheels && this.timed();", "    const view = null;", FROZEN,
    ),
    Broken(
        "saved picture: a double click does nothing", NOTEBOOK + "view/page.js",
        '    this.body.addEventListener("dblclick", () => this.resting && this.follow());\n', "",
        FROZEN,
    ),
    Broken(
        "saved picture: the scrubber stands", NOTEBOOK + "view/page.js",
        "    if (this.feed.saved) this.foot.stand(shown);\n", "", FROZEN,
    ),
    Broken(
        "saved picture: arrows go nowhere", NOTEBOOK + "view/live.js",
        "view.go(value ?? this.header.moments[1]);", "value;", FROZEN,
    ),
    Broken(
        "saved picture: times are coarse", NOTEBOOK + "view/saved.py", "PARTS = 2.0**20",
        "PARTS = 2.0**6", "tests/notebook/test_saved.py::test_a_page_gets_of_it_what_it_got_live",
    ),
    Broken(
        "saved picture: too large", NOTEBOOK + "view/frozen.py", "if _size(bundle) <= WHOLE:",
        "if True:", "tests/notebook/test_saved.py::test_it_is_small_whatever_happened",
    ),
    Broken(
        "outside request of a view", NOTEBOOK + "view/live.js",
        "feed = new Feed(model);", "feed = new Feed(model);" + OUTSIDE, FOUND,
    ),
    Broken(
        "outside request of the side panel", PANEL,
        "this.running += 1;\n", "this.running += 1;" + OUTSIDE + "\n", PAGES,
    ),
    Broken(
        "narrow: buttons are apart from each other", NOTEBOOK + "view/page.js",
        "this.head.tools.append(this.reader, this.keep, this.other, this.pause);",
        "this.head.root.append(this.reader, this.keep, this.other, this.pause);", THEME,
    ),
    Broken(
        "narrow: moments on the axis lie on each other", NOTEBOOK + "draw/bokeh_figures.py",
        "shown.xaxis.major_label_policy = NoOverlap(min_distance=8)", "pass",
        "tests/notebook/test_live.py::test_moments_on_a_narrow_axis_do_not_lie_on_each_other",
    ),
    Broken(
        "heat: hosts that are late are not on top", NOTEBOOK + "panels/heat.py",
        "return not self.lost, -self.late,", "return not self.lost, 0.0,",
        HEAT + "test_the_latest_host_is_on_top_then_those_that_compute_least",
    ),
    Broken(
        "heat: the present is not in the strips", NOTEBOOK + "panels/heat.py",
        "scene.heat.seconds(edges + origin, running)", "scene.heat.seconds(edges + origin)",
        HEAT + "test_strips_are_what_devices_computed",
    ),
)  # fmt: skip


@contextmanager
def copy() -> Iterator[Path]:
    """A folder with what is in the project now."""
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    names = subprocess.run(listed, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    with tempfile.TemporaryDirectory(prefix="pathways-broken-") as folder:
        for name in filter(None, names.split("\0")):
            there = Path(folder, name)
            there.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, there, follow_symlinks=False)
        yield Path(folder)


def outcome(broken: Broken, root: Path) -> str:
    """What its test says in *root* while it is broken there."""
    file = root / broken.file
    whole = file.read_text()
    file.write_text(whole.replace(broken.old, broken.new))
    try:
        command = [sys.executable, "-m", "pytest", "-q", "-x", "--no-header", broken.test]
        ran = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=PATIENCE)
    except subprocess.TimeoutExpired:
        return "HANGS"
    finally:
        file.write_text(whole)
    if ran.returncode != 1:
        return f"SURVIVES ({ran.returncode})"
    why = [line[4:].strip() for line in ran.stdout.splitlines() if line.startswith("E  ")]
    return "fails: " + (why[0][:90] if why else "?")


def main() -> int:
    """See the module's docstring."""
    words = sys.argv[1:]
    chosen = [b for b in ALL if not words or any(word in b.name for word in words)]
    failed = 0
    with copy() as root:
        for broken in chosen:
            begun = time.monotonic()
            said = outcome(broken, root)
            failed += said.startswith("fails")
            print(f"{broken.name:<58}{time.monotonic() - begun:>4.0f} s  {said}", flush=True)
    print(f"{failed} of {len(chosen)} tests failed")
    return int(failed < len(chosen))


if __name__ == "__main__":
    sys.exit(main())
