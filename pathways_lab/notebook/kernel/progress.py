"""The start of a lab, shown in a notebook: one live line that ends as one line.

Rule for maintainers: called by the thread that waits; it updates its own
output and prints nothing.
"""

from __future__ import annotations

import html
from collections.abc import Callable
from typing import Any

from pathways_lab.runtime.processes.start_progress import Progress, Show, Tell

BAR = (
    '<div style="display:inline-block;vertical-align:middle;width:180px;height:8px;'
    'border-radius:4px;background:rgba(128,128,128,.25);margin-right:10px">'
    '<div style="width:{percent}%;height:100%;border-radius:4px;background:#0072b2"></div></div>'
)


def as_html(progress: Progress) -> str:
    """A bar and what is happening; at the end only what was done."""
    text = html.escape(progress.text)
    if progress.done >= progress.total:
        return f"<span>{text}, after {progress.seconds:.1f} s</span>"
    percent = round(100 * progress.done / max(1, progress.total))
    return f"{BAR.format(percent=percent)}<span>{text} … {progress.seconds:.1f} s</span>"


def as_text(progress: Progress) -> str:
    """The same for front ends without HTML."""
    if progress.done >= progress.total:
        return f"{progress.text}, after {progress.seconds:.1f} s"
    return str(progress)


def notebook_line() -> Show:
    """A function that shows progress below the running cell.

    The last line is marked: JupyterLab's extension opens its panel at the first one.
    """
    put = _place()

    def show(progress: Progress) -> None:
        ready = {"pathways_lab": {"lab": "ready"}} if progress.done >= progress.total else {}
        put(as_html(progress), as_text(progress), ready)

    return show


def line_below_cell() -> Tell:
    """A function that shows a line of text below the running cell, each in place of the last."""
    put = _place()
    return lambda text: put(f"<span>{html.escape(text)}</span>", text)


def _place() -> Callable[..., None]:
    """One output of the running cell: HTML and plain text, to be replaced; with metadata."""
    handles: list[Any] = []

    def show(rich: str, plain: str, metadata: dict[str, Any] | None = None) -> None:
        from IPython import display as ipython

        data = {"text/html": rich, "text/plain": plain}
        if handles:
            handles[0].update(data, metadata=metadata, raw=True)
        else:
            display: Any = ipython.display
            handles.append(display(data, metadata=metadata, raw=True, display_id=True))

    return show
