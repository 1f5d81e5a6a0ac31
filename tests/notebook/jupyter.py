"""A real JupyterLab on loopback and a real Chromium, for browser tests.

Everything is isolated: own configuration, runtime and data folders, no
extensions but what the installation has; the browser finds no other machine, and every
request for one is remembered.  Pages of one server share what they have loaded.
"""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
START = """
import sys
sys.modules["rfc3987_syntax"] = None  # as demo does
from jupyterlab.labapp import main
main()
"""

DEAF = """
from pathways_lab.notebook.view.live import LiveFigures
LiveFigures._received = lambda *_: None
"""
"""Kernels that have one thread for all hear nothing of a page while a cell runs."""

FEED = """
import os, threading, time
from pathways_lab.timeline.log import Timeline
from pathways_lab.timeline.records import Span
from pathways_lab.notebook.view.view import View
from tests.notebook.synthetic import Cluster, play, training
log = Timeline()
feed = play(log, training({steps}, hosts={hosts}, devices=2))
stop, done = threading.Event(), threading.Event()
over = lambda: "" if feed.is_alive() and not done.is_set() else "finished"
panels = "islands", "order", "queues", "utilisation"
view = View(log, panels, title="train", origin=log.clock(), ended=over, cancel=stop.set)
view.show()
"""

SPIN = """
end = time.monotonic() + {seconds}
while time.monotonic() < end and not stop.is_set():
    tick = time.monotonic() + 0.1
    if os.path.exists("seen"):
        time.sleep(0.1)  # the cell goes on, at no cost
    while time.monotonic() < tick:
        pass
print("cancelled" if stop.is_set() else "spun to the end")
"""

SHOWN = """() => {
  const d = document.querySelector('.pathways-lab').pathwaysDocument;
  const { start, end } = d.get_model_by_name('time');
  const { left } = d.get_model_by_name('queues-bars').data;
  return [start, end, left[0]];
}"""
"""What the axis of time of a page's first view covers, and where its first bar begins."""

LONG = 300
"""Training steps, and seconds, of which no test sees the end."""


def feed(steps: int = LONG, hosts: int = 1, spin: float = 0.0) -> str:
    """A cell that shows *steps* training steps of 0.65 s, and then spins."""
    text = FEED.format(steps=steps, hosts=hosts)
    return text + SPIN.format(seconds=spin) if spin else text


def chromium() -> str | None:
    """The browser of this machine, or None."""
    for name in ("chromium", "chromium-browser", "google-chrome", "chrome"):
        found = shutil.which(name)
        if found:
            return found
    return None


def notebook(cells: Sequence[str]) -> dict[str, Any]:
    """A notebook of code cells without outputs."""
    return {
        "cells": [
            {
                "cell_type": "code", "execution_count": None, "id": f"cell{n}", "metadata": {},
                "outputs": [], "source": source,
            }
            for n, source in enumerate(cells)
        ],
        "metadata": {
            "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}
        },
        "nbformat": 4,
        "nbformat_minor": 5,
    }  # fmt: skip


class Lab:
    """One JupyterLab server.

    base: what its addresses begin with, as under JupyterHub: ``"/user/ada"``.
    """

    def __init__(self, folder: Path, base: str = "") -> None:
        self.folder = folder
        self.work = folder / "work"
        self.work.mkdir(parents=True, exist_ok=True)
        quiet = folder / "settings" / "@jupyterlab" / "apputils-extension"
        quiet.mkdir(parents=True, exist_ok=True)
        (quiet / "notification.jupyterlab-settings").write_text(
            json.dumps({"fetchNews": "false", "checkForUpdates": False})
        )
        environment = {k: v for k, v in os.environ.items() if not k.startswith("JUPYTER")}
        for name in ("CONFIG_DIR", "RUNTIME_DIR", "DATA_DIR"):
            environment[f"JUPYTER_{name}"] = str(folder / name.lower())
        environment["IPYTHONDIR"] = str(folder / "ipython")
        paths = [str(ROOT), str(ROOT / "extensions"), environment.get("PYTHONPATH", "")]
        environment["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
        environment.pop("PATHWAYS_LAB_BOKEHJS_ROUTE", None)
        extensions = {"pathways_lab_server": True}
        command = [
            sys.executable, "-c", START, "--no-browser", "--allow-root",
            "--port=0", "--ip=127.0.0.1",
            "--IdentityProvider.token=", "--ServerApp.password=", "--LabApp.news_url=None",
            "--LabApp.extension_manager=readonly", "--LabApp.expose_app_in_browser=True",
            f"--ServerApp.root_dir={self.work}", f"--ServerApp.jpserver_extensions={extensions}",
            f"--ServerApp.base_url={base or '/'}",
            f"--LabApp.workspaces_dir={folder / 'workspaces'}",
            f"--LabApp.user_settings_dir={folder / 'settings'}",
            f"--LabApp.extra_labextensions_path={ROOT / 'extensions' / 'labextensions'}",
        ]  # fmt: skip
        self._pages: Any = None
        self.log = (folder / "server.log").open("wb")
        self.process = subprocess.Popen(
            command, cwd=self.work, env=environment, stdout=self.log, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
        self.url = self._wait(base)

    def _wait(self, base: str) -> str:
        """Its address, once it answers: it chooses the port itself, and tells in a file."""
        until = time.monotonic() + 120
        while time.monotonic() < until and self.process.poll() is None:
            for told in (self.folder / "runtime_dir").glob("jpserver-*.json"):
                try:
                    url = f"http://127.0.0.1:{json.loads(told.read_text())['port']}{base}"
                    urllib.request.urlopen(f"{url}/api", timeout=10)
                    return url
                except (OSError, ValueError):
                    pass
            time.sleep(0.1)
        text = (self.folder / "server.log").read_text()
        raise RuntimeError(f"JupyterLab did not start:\n{text[-2000:]}")

    def new_page(self, browser: Any) -> Any:
        """An empty page that finds in the browser's cache what pages before it have loaded."""
        if self._pages is None:
            self._pages = browser.new_context()
        return self._pages.new_page()

    def write(self, name: str, cells: Sequence[str]) -> None:
        (self.work / name).write_text(json.dumps(notebook(cells)))

    def read(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.work / name).read_text())
        return found

    def trust(self, name: str) -> None:
        """Sign a notebook, as somebody does who trusts it."""
        import nbformat  # here: it takes seconds, of every process that looks for tests
        from nbformat.sign import NotebookNotary

        read = nbformat.read(self.work / name, as_version=4)
        NotebookNotary(data_dir=str(self.folder / "data_dir")).sign(read)

    def close(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGTERM)
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)
        self.log.close()


def wait_for_picture(page: Any, timeout: float = 60.0) -> None:
    """Until a frozen picture is in a browser's page and has really been drawn."""
    page.wait_for_function(
        """() => {
          const found = [...document.querySelectorAll('img')]
            .find(i => i.src.startsWith('data:image/svg'));
          return found && found.naturalWidth > 100;
        }""",
        timeout=1000 * timeout,
    )


class Page:
    """One browser page on a lab's notebook.  blocked: requests that wanted to leave."""

    def __init__(self, browser: Any, lab: Lab, width: int = 1280, height: int = 1100) -> None:
        self.lab = lab
        self.size = {"width": width, "height": height}
        self.blocked: list[str] = []
        self.console: list[str] = []
        self.page = lab.new_page(browser)
        self.page.set_default_timeout(60_000)
        self.page.set_viewport_size(self.size)
        # To listen is cheap: a route would ask Python about each file, and switch the cache off.
        self.page.on("request", lambda request: self._requested(request.url))
        self.page.on(
            "console",
            lambda message: self.console.append(message.text) if message.type == "error" else None,
        )
        self.page.on("pageerror", lambda error: self.console.append(str(error)))

    def _requested(self, url: str) -> None:
        if not url.startswith((f"{self.lab.url}/", "data:", "blob:")):
            self.blocked.append(url)

    def load(self, name: str) -> None:
        """A notebook in a page that knows nothing yet, or has forgotten all: seconds of work."""
        self.page.goto(f"{self.lab.url}/lab/tree/{name}?reset")
        self.page.wait_for_selector("#jupyterlab-splash", state="detached", timeout=60_000)
        self._wait_for_cells()

    def open(self, name: str) -> None:
        """A notebook in the page that is there, in the place of what it showed."""
        if self.page.url == "about:blank":
            self.load(name)
            return
        self.put_away()
        self.command("docmanager:open", path=name)
        self._wait_for_cells()

    def _wait_for_cells(self) -> None:
        self.page.wait_for_selector(".jp-Notebook .jp-CodeCell", timeout=60_000)

    def put_away(self) -> None:
        """End the kernels of the notebooks that are open, and close these."""
        self.page.evaluate(
            """async () => {
              for (const each of [...(window.jupyterapp?.shell.widgets('main') ?? [])]) {
                await each.sessionContext?.shutdown();
                each.dispose();
              }
            }"""
        )
        self.page.set_viewport_size(self.size)
        self.console.clear()

    def wait_for_kernel(self) -> None:
        self.page.wait_for_function(
            "() => window.jupyterapp?.shell.currentWidget?.sessionContext?.session?.kernel"
            "?.status === 'idle'",
            timeout=60_000,
        )

    def begin(self, name: str, *cells: str) -> None:
        """A new notebook of these cells, open, with its kernel ready."""
        self.lab.write(name, cells)
        self.open(name)
        self.wait_for_kernel()

    def show(
        self,
        name: str,
        *cells: str,
        command: str = "notebook:run-all-cells",
        timeout: float = 60.0,
    ) -> None:
        """The same, running, with its first live view there."""
        self.begin(name, *cells)
        self.start(command)
        self.wait_for_view(timeout)

    def start(self, command: str = "notebook:run-all-cells", **arguments: Any) -> None:
        """Run a command of the page without waiting for its end."""
        self.page.evaluate(
            "([name, args]) => { window.jupyterapp.commands.execute(name, args); }",
            [command, arguments],
        )

    def command(self, name: str, **arguments: Any) -> None:
        """Run a command of the page to its end."""
        self.page.evaluate(
            "async ([name, args]) => { await window.jupyterapp.commands.execute(name, args); }",
            [name, arguments],
        )

    def run_cell(self, cell: int) -> None:
        """Run one cell to its end."""
        self.page.evaluate(
            "n => { window.jupyterapp.shell.currentWidget.content.activeCellIndex = n; }", cell
        )
        self.command("notebook:run-cell")

    def busy(self, cell: int = 0) -> bool:
        """Whether a cell is running (the kernel's own state also counts its other threads)."""
        prompts = self.page.query_selector_all(".jp-CodeCell .jp-InputPrompt")
        return "*" in (prompts[cell].text_content() or "")

    def wait_for_view(self, timeout: float = 60.0) -> None:
        """Until a live view is there, and no saved picture of one any more."""
        self.page.wait_for_function(
            "() => !!document.querySelector('.pathways-lab')?.pathwaysDocument"
            " && !document.querySelector('.pathways-lab[data-shown=saved]')",
            timeout=1000 * timeout,
        )

    def source(self, name: str, column: str, view: int = 0) -> list[Any]:
        """A column of a live figure, as the page has it."""
        values: list[Any] = self.page.evaluate(
            "([n, name, column]) => { const d = document.querySelectorAll('.pathways-lab')[n]"
            ".pathwaysDocument; return Array.from(d.get_model_by_name(name).data[column] ?? []); }",
            [view, name, column],
        )
        return values

    def wait_for_source(self, name: str, least: int, timeout: float = 60.0) -> None:
        """Until a layer of a live figure has so many marks."""
        self.page.wait_for_function(
            "([name, least]) => document.querySelector('.pathways-lab').pathwaysDocument"
            ".get_model_by_name(name).data.left.length >= least",
            arg=[name, least],
            timeout=1000 * timeout,
        )

    def painted(self) -> int:
        """Pixels of the live figures' canvases that are not empty."""
        found: int = self.page.evaluate(
            """() => {
              const canvases = (root) => [...root.querySelectorAll('*')].flatMap((element) => [
                ...(element.tagName === 'CANVAS' ? [element] : []),
                ...(element.shadowRoot ? canvases(element.shadowRoot) : []),
              ]);
              return canvases(document.querySelector('.pathways-lab')).reduce((sum, canvas) => {
                const { width, height } = canvas;
                if (!width || !height || !canvas.checkVisibility()) return sum;
                const { data } = canvas.getContext('2d').getImageData(0, 0, width, height);
                for (let i = 3; i < data.length; i += 4) sum += data[i] > 0;
                return sum;
              }, 0);
            }"""
        )
        return found

    def click_mark(self, panel: str, layer: str, kind: int | None = None) -> float:
        """Hold the picture, click the middle of a layer's newest mark; the mark's gang."""
        self.page.click(".pathways-lab-button:has-text('pause')")
        x, y, gang = self.newest_mark(panel, layer, kind)
        self.page.mouse.click(x, y)
        return gang

    def newest_mark(
        self, panel: str, layer: str, kind: int | None = None
    ) -> tuple[float, float, float]:
        """The middle of a layer's newest mark, in sight, and its gang.  kind: of its kinds."""
        self.page.evaluate("() => document.querySelector('.pathways-lab').scrollIntoView()")
        self.page.wait_for_timeout(300)
        x, y, gang = self.page.evaluate(
            """([panel, layer, kind]) => {
              const d = document.querySelector('.pathways-lab').pathwaysDocument;
              const figure = [...d._all_models.values()]
                .find(m => m.type === 'Figure' && m.name === panel);
              const view = Bokeh.index.find_one(figure);
              const { x, y } = view.el.getBoundingClientRect();
              const s = d.get_model_by_name(layer).data;
              const i = kind === null ? s.left.length - 1 : s.kind.lastIndexOf(kind);
              return [
                x + view.frame.x_scale.compute((s.left[i] + s.right[i]) / 2),
                y + view.frame.y_scale.compute((s.top[i] + s.bottom[i]) / 2),
                s.gang[i],
              ];
            }""",
            [panel, layer, kind],
        )
        return float(x), float(y), float(gang)

    def scrubber(self) -> list[str]:
        """The last moment that the scrubber covers, and where it stands."""
        found: list[str] = self.page.evaluate(
            "() => { const { max, value } = document.querySelector('.pathways-lab-scrubber');"
            " return [max, value]; }"
        )
        return found

    def seek(self, moment: float) -> None:
        """Move the scrubber to a moment (seconds) once it is there, and wait until it is shown."""
        self.page.wait_for_function(
            "m => +document.querySelector('.pathways-lab-scrubber').max > m", arg=moment
        )
        self.page.evaluate(
            """moment => {
              const slider = document.querySelector('.pathways-lab-scrubber');
              slider.step = 'any';
              slider.value = moment;
              slider.dispatchEvent(new Event('input'));
            }""",
            moment,
        )
        self.page.wait_for_function(
            "m => document.querySelector('.pathways-lab-behind').textContent.includes(`at ${m} s`)",
            arg=f"{moment:.3f}",
        )

    def attribute(self, name: str, view: int = 0) -> str | None:
        """An attribute of a view's element."""
        value: str | None = self.page.evaluate(
            "([n, name]) => document.querySelectorAll('.pathways-lab')[n].getAttribute(name)",
            [view, name],
        )
        return value

    def legible(self) -> tuple[float, bool]:
        """The contrast of a saved picture's title, as the page paints it, and whether its ground
        is dark."""
        from playwright.sync_api import Error

        picture = self.page.locator('.jp-OutputArea-output img[src^="data:image/svg"]').first
        # It may be drawn anew, as another element, between two looks at it.
        for tries in range(3):
            try:
                picture.scroll_into_view_if_needed()
                shot = base64.b64encode(picture.screenshot()).decode()
                break
            except Error:
                if tries == 2:
                    raise
        contrast, ground = self.page.evaluate(
            """async (shot) => {
              const image = new Image();
              image.src = `data:image/png;base64,${shot}`;
              await image.decode();
              const canvas = new OffscreenCanvas(image.width, image.height);
              const pen = canvas.getContext("2d");
              pen.drawImage(image, 0, 0);
              const linear = (c) =>
                (c /= 255) <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
              const light = (x, y, w, h) => {
                const { data } = pen.getImageData(x, y, w, h), out = [];
                for (let at = 0; at < data.length; at += 4)
                  out.push(0.2126 * linear(data[at]) + 0.7152 * linear(data[at + 1]) +
                           0.0722 * linear(data[at + 2]));
                return out;
              };
              const [ground] = light(2, 2, 1, 1);
              const seen = light(4, 4, 60, 24).map(
                (one) => (Math.max(one, ground) + 0.05) / (Math.min(one, ground) + 0.05));
              return [Math.max(...seen), ground];
            }""",
            shot,
        )
        return float(contrast), float(ground) < 0.2

    def ink(self) -> tuple[int, int, int]:
        """The colour (red, green, blue) that a live figure writes with on the page's ground."""
        text = self.page.evaluate(
            """() => {
              const models = document.querySelector('.pathways-lab').pathwaysDocument._all_models;
              const inks = [...models.values()].filter(m => m.tags?.includes('theme-ink'))
                .map(m => m.text_color?.value).filter(Boolean);
              const probe = document.body.appendChild(document.createElement('i'));
              probe.style.color = inks[0];
              const colour = getComputedStyle(probe).color;
              probe.remove();
              return colour;
            }"""
        )
        red, green, blue = re.findall(r"\d+", str(text))[:3]
        return int(red), int(green), int(blue)

    def output(self, cell: int) -> str:
        """The text of a cell's outputs."""
        found = self.page.query_selector_all(".jp-CodeCell")[cell].query_selector_all(
            ".jp-OutputArea-output"
        )
        return "\n".join(each.inner_text() for each in found)

    def show_cell(self, cell: int) -> None:
        """Scroll so that a cell is at the top."""
        self.page.evaluate(
            "n => document.querySelectorAll('.jp-CodeCell')[n].scrollIntoView()", cell
        )
        self.page.wait_for_timeout(500)

    def wait_for_idle(self, timeout: float = 60.0) -> None:
        """Until no cell is running or waiting."""
        self.page.wait_for_function(
            "() => ![...document.querySelectorAll('.jp-CodeCell .jp-InputPrompt')]"
            ".some(prompt => prompt.textContent.includes('*'))",
            timeout=1000 * timeout,
        )

    def wait_for_picture(self, timeout: float = 60.0) -> None:
        """Until a frozen picture is there and has really been drawn."""
        wait_for_picture(self.page, timeout)

    def wait_for_saved(self, count: int = 1, timeout: float = 60.0) -> None:
        """Until so many pictures that the notebook keeps have come to life."""
        self.page.wait_for_function(
            "n => [...document.querySelectorAll('.pathways-lab[data-shown=saved]')]"
            ".filter(view => view.pathwaysDocument).length >= n",
            arg=count,
            timeout=1000 * timeout,
        )

    def shutdown(self) -> None:
        """End the kernel of the open notebook."""
        self.page.evaluate(
            "async () => { await window.jupyterapp?.shell.currentWidget?.sessionContext"
            "?.shutdown(); }"
        )

    def close(self) -> None:
        """End the kernel, and the page itself, which would go on asking the server."""
        self.put_away()
        self.page.close()

    def restart(self) -> None:
        """Restart the kernel of the open notebook."""
        self.page.evaluate(
            "async () => { await window.jupyterapp?.shell.currentWidget?.sessionContext"
            "?.session?.kernel?.restart(); }"
        )

    def screenshot(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.page.screenshot(path=str(path))


def newest(page: Page, view: int = 0) -> float:
    """End of the newest bar, as the page has it."""
    return max(page.source("queues-bars", "right", view), default=0.0)


def grows(page: Page, seconds: float = 60.0, view: int = 0) -> None:
    """Wait until newer bars come.  Old ones are merged: their number stays."""
    page.page.wait_for_function(
        "n => !!document.querySelectorAll('.pathways-lab')[n].pathwaysDocument"
        ".get_model_by_name('queues-bars')",
        arg=view,
        timeout=1000 * seconds,
    )
    bar = newest(page, view)
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        time.sleep(0.2)
        if newest(page, view) > bar + 0.3:
            return
    raise AssertionError(f"the view stands still with bars until {bar:.2f} s")
