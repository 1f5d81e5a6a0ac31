"""Record the moving picture at the top of the README from a real JupyterLab.

Problem: a picture that was drawn by hand shows what we wish; this one opens the
quickstart in a browser, runs it on the embedded lab, and keeps what was seen.

Usage: ``python tools/record.py docs/first-light.gif`` (needs the development
extra and Chromium; takes about a minute).
"""

from __future__ import annotations

import io
import shutil
import sys
import tempfile
import time
from pathlib import Path

from PIL import Image

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.notebook import jupyter  # noqa: E402

NAME = "00_quickstart.ipynb"
WIDTH = 900
FRAMES_PER_SECOND = 5
SECONDS = 12.0
VIEW_CELL = "view = lab.view()"


def record(target: Path) -> None:
    """Run the quickstart and write frames of its training view as an animation."""
    from playwright.sync_api import sync_playwright

    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        lab = jupyter.Lab(Path(folder))
        browser = playwright.chromium.launch(
            executable_path=jupyter.chromium(), args=["--no-sandbox", "--disable-gpu"]
        )
        try:
            shutil.copy(ROOT / "notebooks" / NAME, lab.work / NAME)
            page = jupyter.Page(browser, lab, width=1100, height=1200)
            page.open(NAME)
            page.wait_for_kernel()
            page.start("application:toggle-left-area")
            page.start()
            view = page.page.locator(".jp-CodeCell", has_text=VIEW_CELL)
            figure = view.locator(".pathways-lab:not([data-shown=saved])")
            figure.wait_for(state="attached", timeout=180_000)
            figure.scroll_into_view_if_needed()
            frames = []
            until = time.monotonic() + SECONDS
            while time.monotonic() < until:
                started = time.monotonic()
                box = figure.bounding_box(timeout=5_000) if figure.count() else None
                if box is None:  # the lab was closed: the view has become its frozen picture
                    break
                shot = Image.open(io.BytesIO(page.page.screenshot(clip=box)))
                height = round(shot.height * WIDTH / shot.width)
                frames.append(shot.convert("RGB").resize((WIDTH, height), Image.Resampling.LANCZOS))
                time.sleep(max(0.0, started + 1 / FRAMES_PER_SECOND - time.monotonic()))
        finally:
            browser.close()
            lab.close()
    height = max(frame.height for frame in frames)
    pages = []
    for frame in frames:
        page_ = Image.new("RGB", (WIDTH, height), "white")
        page_.paste(frame, (0, 0))
        pages.append(page_.quantize(64, dither=Image.Dither.NONE))
    pages[0].save(
        target, save_all=True, append_images=pages[1:], duration=1000 // FRAMES_PER_SECOND, loop=0
    )
    print(f"{target}: {len(pages)} frames, {target.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    record(Path(sys.argv[1]))
