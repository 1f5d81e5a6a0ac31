"""Live figures in a notebook output, over one widget comm.

Problem: a picture must move while the kernel computes, in a page that may be
opened late, twice, or again after a reload, in front ends with and without our
server extension, and no update may ever be applied twice or skipped.

How: messages are made elsewhere (:mod:`.stream`, :mod:`.renderers`) and sent here, each
once.  A page that has no snapshot, or has lost a message, asks for one.  Until a
page has said that it follows, snapshots
are also sent like key frames of a film: a page cannot ask a kernel that is busy.

BokehJS comes from the Jupyter server where that has our route.  The kernel
knows it from its environment; where it is not so, the kernel sends the script
with the first view, unasked, for the same reason.

Rule for maintainers: nothing goes from the page to the kernel except what a
person did (a button), questions that repair a loss, and ``ready``.  Nothing
here knows what is shown.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import anywidget
import bokeh
import traitlets

from pathways_lab.notebook.view import PAGE
from pathways_lab.notebook.view.stream import Message

_HERE = Path(__file__).parent
_SCRIPTS = Path(bokeh.__file__).parent / "server" / "static" / "js"

FILES = ("bokeh.min.js",)
"""The parts of BokehJS that the figures need."""

ROUTE_VARIABLE = "PATHWAYS_LAB_BOKEHJS_ROUTE"
"""Set by our Jupyter server extension; kernels inherit it."""

KEY_FRAME, FIRST = 2.0, 0.3
"""Seconds between snapshots while no page has said that it follows; at the beginning, when
a page may not be listening yet, they come sooner."""

PATIENCE = 3.0
"""Seconds that a page may take to load BokehJS from the server's route."""


def _snapshot_json(_: Any, widget: LiveFigures) -> dict[str, Any]:
    return widget.snapshot()


class LiveFigures(anywidget.AnyWidget):
    """Messages about a picture, on their way to the pages that show it.

    ask: called when a snapshot is wanted; the answer is a message like any other.
    on_action: called with the name of a pressed button and its value, in a thread of
        the kernel's choice; it must be quick and must not print.
    keeper: whether a page puts into the notebook's document what :meth:`keep` is given; None:
        no page has said anything yet.
    """

    _esm = "\n".join((_HERE / name).read_text() for name in PAGE)
    _css = _HERE / "live.css"
    _scripts = traitlets.Dict().tag(sync=True)
    _snapshot = traitlets.Any(0).tag(sync=True, to_json=_snapshot_json)

    def __init__(
        self,
        ask: Callable[[], None] | None = None,
        on_action: Callable[[str, Any], None] | None = None,
    ) -> None:
        self._lock = threading.RLock()
        self._followed = self._pushed = False
        self._key_frame_at = self._shown_at = 0.0
        self._frozen: dict[str, Any] | None = None
        self._kept: dict[str, Any] | None = None
        self.keeper: bool | None = None
        self._ask, self._on_action = ask, on_action
        route = os.environ.get(ROUTE_VARIABLE, "")
        super().__init__(
            _scripts={"version": bokeh.__version__, "files": list(FILES), "route": route}
        )
        self.on_msg(self._received)
        answer_while_busy(self.comm)

    def snapshot(self) -> dict[str, Any]:
        """The state for a page that comes now: the frozen picture, or that it must wait.

        id: by which the page finds its place in the notebook's document, when that is known.
        """
        with self._lock:
            if self._frozen is not None:
                return {"seq": 0, "frozen": self._frozen, "id": self._number}
        if self._ask is not None and self._shown_at:
            self._ask()
        return {"seq": -1, "id": self._number}

    @property
    def _number(self) -> str:
        """The widget's number; "" while it has none."""
        return self.model_id if self.comm is not None else ""

    def keep(self, data: Mapping[str, str], metadata: Mapping[str, Any]) -> None:
        """Pages save *data* (a MIME bundle) with the notebook and go on as they are."""
        with self._lock:
            self._kept = {
                "type": "kept", "id": self.model_id, "data": dict(data), "metadata": dict(metadata)
            }  # fmt: skip
            self._send_kept()

    def _send_kept(self) -> None:
        if self._kept is not None and self._frozen is None and self.comm is not None:
            self.send(self._kept)

    def silent(self) -> bool:
        """Whether no page has said anything for so long that there seems to be none."""
        shown = self._shown_at
        return self.keeper is None and bool(shown) and time.monotonic() - shown > PATIENCE

    def post(self, message: Message) -> None:
        """Send a renderer's message to all pages.  Any thread."""
        with self._lock:
            if self._frozen is not None or self.comm is None:
                return
            content = dict(message)
            block = content.pop("block", b"")
            if content["type"] == "snapshot":
                self._key_frame_at = time.monotonic()
            self.send(content, [block])
            if not self._followed:
                self._help_page()

    def _help_page(self) -> None:
        """A page that cannot ask gets what it may lack."""
        now = time.monotonic()
        self._shown_at = self._shown_at or now
        late = now - self._shown_at > PATIENCE
        if not self._pushed and (late or not self._scripts["route"]):
            self._push_scripts()
        pause = min(KEY_FRAME, max(FIRST, now - self._shown_at))
        if now - self._key_frame_at > pause and self._ask is not None:
            self._key_frame_at = now
            self._ask()

    def _push_scripts(self) -> None:
        self._pushed = True
        self.send({"type": "scripts"}, [(_SCRIPTS / name).read_bytes() for name in FILES])

    def freeze(self, data: Mapping[str, str], metadata: Mapping[str, Any]) -> None:
        """End the live picture: pages show *data* (a MIME bundle) from now on.

        The widget stays known to the kernel, so that a page which comes back
        later is told.
        """
        with self._lock:
            if self._frozen is not None:
                return
            self._frozen = {"data": dict(data), "metadata": dict(metadata)}
            if self.comm is not None:
                self.send({"type": "snapshot", **self.snapshot()}, [b""])

    def _received(self, _: Any, content: Any, buffers: Any) -> None:
        """Something came from a page.  Any thread of the kernel."""
        kind = content.get("type") if isinstance(content, dict) else None
        if kind == "ready":
            self._followed = True
            self.keeper = bool(self.keeper or content.get("keeps"))
            with self._lock:
                self._send_kept()
        elif kind == "scripts":
            with self._lock:
                if self.comm is not None:
                    self._push_scripts()
        elif kind == "snapshot" and self._frozen is not None:
            self.send({"type": "snapshot", **self.snapshot()}, [b""])
        elif kind == "snapshot" and self._ask is not None:
            self._ask()
        elif kind == "action" and self._on_action is not None:
            self._on_action(str(content.get("name", "")), content.get("value"))


def answer_while_busy(comm: Any) -> None:
    """Let messages from the page be handled while a cell runs.

    JupyterLab sends them to a thread of their own for that.  ipykernel 7.4
    routes those of a comm back to the loop that sent on it last, which is the
    busy one.  Without the attribute it follows the front end again; kernels
    that do not have it need nothing.
    """
    if hasattr(comm, "_reply_subshell_for"):
        comm._reply_subshell_for = None
