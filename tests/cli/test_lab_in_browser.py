"""`python -m pathways_lab lab`, as somebody meets it who runs it for the first time."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.browser

ASK_THE_KERNEL = """async (code) => {
  const kernel = window.jupyterapp.shell.currentWidget.sessionContext.session.kernel;
  const future = kernel.requestExecute({ code });
  let text = "";
  future.onIOPub = (message) => { text += message.content.text ?? ""; };
  await future.done;
  return text.trim();
}"""
STATUS = "window.jupyterapp?.shell.currentWidget?.sessionContext?.session?.kernel?.status"


@pytest.fixture
def address(tmp_path: Path) -> Iterator[str]:
    """What the command would open in the user's browser, token and all."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("JUPYTER")}
    for name in ("CONFIG_DIR", "RUNTIME_DIR", "DATA_DIR"):
        environment[f"JUPYTER_{name}"] = str(tmp_path / name)
    environment["IPYTHONDIR"] = str(tmp_path / "ipython")
    settings = [
        f"--LabApp.{name}_dir={tmp_path / name}" for name in ("workspaces", "user_settings")
    ]
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "pathways_lab", "lab", "--folder", "mine", "--no-browser"),
            *("--ServerApp.port=0", "--LabApp.expose_app_in_browser=True", *settings),
        ],
        cwd=tmp_path,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=(tmp_path / "log").open("wb"),
        start_new_session=True,
    )
    try:
        yield wait_for_address(process, tmp_path)
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(30)


def wait_for_address(process: subprocess.Popen[bytes], folder: Path) -> str:
    """The link in the page that Jupyter writes for the browser."""
    for _ in range(600):
        for page in (folder / "RUNTIME_DIR").glob("jpserver-*-open.html"):
            if found := re.search(r'href="(http[^"]+)"', page.read_text()):
                return found.group(1)
        if process.poll() is not None:
            break
        time.sleep(0.1)
    raise AssertionError((folder / "log").read_text()[-2000:])


def wait_for_kernel(page: Any, log: Path) -> None:
    """Until it is idle; without that, what the server said of it is needed to know why."""
    from playwright.sync_api import TimeoutError as NotInTime

    try:
        page.wait_for_function(f"() => {STATUS} === 'idle'", timeout=180_000)
    except NotInTime as error:
        said = log.read_text()[-3000:]
        raise AssertionError(f"the kernel is {page.evaluate(STATUS)!r}; {said}") from error


def test_the_quickstart_opens_with_a_kernel_and_without_the_internet(address, chromium, tmp_path):
    """Law: no request leaves the machine, and the kernel's channels are encrypted."""
    from playwright.sync_api import sync_playwright

    outside: list[str] = []

    def keep_inside(route: Any) -> None:
        if route.request.url.startswith("http://localhost:") or "127.0.0.1:" in route.request.url:
            route.continue_()
        else:
            outside.append(route.request.url)
            route.abort()

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page()
        page.route(re.compile(r"^https?:"), keep_inside)
        page.goto(address)
        page.wait_for_selector("#jupyterlab-splash", state="detached", timeout=180_000)
        page.wait_for_selector(".jp-Notebook .jp-CodeCell", timeout=180_000)
        wait_for_kernel(page, tmp_path / "log")
        opened = page.evaluate("() => window.jupyterapp.shell.currentWidget.context.path")
        code = "import sys, ipykernel.kernelapp as k, pathways_lab\n"
        code += "print(sys.prefix, k.IPKernelApp.instance().curve_secretkey is not None)"
        told = page.evaluate(ASK_THE_KERNEL, code)
        popups = page.locator(".jp-Dialog, .Toastify__toast").all_inner_texts()
        browser.close()
    assert opened == "00_quickstart.ipynb"
    assert told == f"{sys.prefix} True"
    assert popups == []
    assert outside == []
    assert (tmp_path / "mine" / "00_quickstart.ipynb").exists()
