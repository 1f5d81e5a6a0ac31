"""Live figures in a notebook output, over one widget comm.

Problem: a picture must move while the kernel computes, in a page that may be
opened late, twice, or again after a reload, in front ends with and without our
server extension, and no update may ever be applied twice or skipped.

How: the present plots are the whole state.  Under one lock they are replaced,
and what changed leaves as *one* message with a sequence number.  A snapshot (a
Bokeh document and what fills it) is made when somebody asks, under
the same lock, and names the number it contains.  Whoever has a snapshot applies
exactly the messages after it.  Until a page has said that it follows, snapshots
are also sent like key frames of a film: a page cannot ask a kernel that is busy.

BokehJS comes from the Jupyter server where that has our route.  The kernel
knows it from its environment; where it is not so, the kernel sends the script
with the first view, unasked, for the same reason.

Rule for maintainers: nothing goes from the page to the kernel except what a
person did (a button), questions that repair a loss, and ``ready``.  Nothing
here knows what is shown.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import anywidget
import bokeh
import traitlets

from pathways_lab.notebook.encode import encode
from pathways_lab.notebook.figures import template
from pathways_lab.notebook.plot import Change, Plot, changes, everything

_HERE = Path(__file__).parent
_SCRIPTS = Path(bokeh.__file__).parent / "server" / "static" / "js"

FILES = ("bokeh.min.js",)
"""What of BokehJS the figures need."""

ROUTE_VARIABLE = "PATHWAYS_LAB_BOKEHJS_ROUTE"
"""Set by our Jupyter server extension; kernels inherit it."""

KEY_FRAME = 2.0
"""Seconds between snapshots while no page has said that it follows."""

PATIENCE = 3.0
"""Seconds that a page may take to load BokehJS from the server's route."""


@dataclass(frozen=True, slots=True)
class Header:
    """What stands above the figures, as text of the page.

    state: ``"waiting"``, ``"running"``, ``"idle"``, ``"done"`` or ``"failed"``.
    notes: short remarks (emulated devices, dropped records).
    legend: ``(program, ((function, colour), ...))``.
    summary: one line for screen readers.
    actions: buttons; the name is what comes back when one is pressed.
    """

    title: str = ""
    state: str = "waiting"
    status: str = ""
    notes: tuple[str, ...] = ()
    legend: tuple[tuple[str, tuple[tuple[str, str], ...]], ...] = ()
    summary: str = ""
    actions: tuple[str, ...] = ()


@dataclass(slots=True)
class Sent:
    """Counters of what left: for tests and for the cost of a view."""

    updates: int = 0
    snapshots: int = 0
    scripts: int = 0
    bytes: int = 0


def _snapshot_json(_: Any, widget: LiveFigures) -> dict[str, Any]:
    return widget.snapshot()


class LiveFigures(anywidget.AnyWidget):
    """Plots that are shown live.

    on_action: called with the name of a pressed button, in a thread of the
        kernel's choice; it must be quick and must not print.
    """

    _esm = _HERE / "live.js"
    _css = _HERE / "live.css"
    _scripts = traitlets.Dict().tag(sync=True)
    _snapshot = traitlets.Any(0).tag(sync=True, to_json=_snapshot_json)

    def __init__(
        self,
        plots: Sequence[Plot],
        header: Header | None = None,
        on_action: Callable[[str], None] | None = None,
    ) -> None:
        self._lock = threading.RLock()
        self._plots = tuple(plots)
        self._header = header or Header()
        self._seq = 0
        self._followed = self._pushed = False
        self._key_frame_at = self._shown_at = 0.0
        self._frozen: dict[str, Any] | None = None
        self._on_action = on_action
        self.sent = Sent()
        route = os.environ.get(ROUTE_VARIABLE, "")
        super().__init__(
            _scripts={"version": bokeh.__version__, "files": list(FILES), "route": route}
        )
        self.on_msg(self._received)
        answer_while_busy(self.comm)

    def snapshot(self) -> dict[str, Any]:
        """The present state, and the number of the last update that it contains."""
        with self._lock:
            if self._frozen is not None:
                return {"seq": self._seq, "frozen": self._frozen, "id": self.model_id or ""}
            described, block = encode(c for plot in self._plots for c in everything(plot))
            return {
                "seq": self._seq,
                "document": template(self._plots),
                "changes": json.dumps(described),
                "block": block,
                "header": asdict(self._header),
            }

    def update(self, plots: Sequence[Plot], header: Header) -> None:
        """Show other plots, and send what is different as one message.  Any thread.

        Plots of another shape make every page lay itself out anew.
        """
        plots = tuple(plots)
        with self._lock:
            if self._frozen is not None or self.comm is None:
                return
            before, self._plots = self._plots, plots
            headline = header if header != self._header else None
            self._header = header
            if [plot.shape for plot in before] != [plot.shape for plot in plots]:
                self._seq += 1
                self._send_snapshot()
            else:
                pairs = zip(before, plots, strict=True)
                self._send_update([c for old, new in pairs for c in changes(old, new)], headline)
            if not self._followed:
                self._help_page()

    def _send_update(self, changed: list[Change], header: Header | None) -> None:
        if not changed and header is None:
            return
        self._seq += 1
        described, block = encode(changed)
        message: dict[str, Any] = {"type": "update", "seq": self._seq}
        message["changes"] = json.dumps(described)
        if header is not None:
            message["header"] = asdict(header)
        self.send(message, [block])
        self.sent.updates += 1
        self.sent.bytes += len(message["changes"]) + len(block)

    def _help_page(self) -> None:
        """A page that cannot ask gets what it may lack."""
        now = time.monotonic()
        self._shown_at = self._shown_at or now
        late = now - self._shown_at > PATIENCE
        if not self._pushed and (late or not self._scripts["route"]):
            self._push_scripts()
        if now - self._key_frame_at > KEY_FRAME:
            self._send_snapshot()

    def _send_snapshot(self) -> None:
        self._key_frame_at = time.monotonic()
        message = {"type": "snapshot", **self.snapshot()}
        block = message.pop("block", b"")
        self.send(message, [block])
        self.sent.snapshots += 1
        self.sent.bytes += len(message.get("document", "")) + len(block)

    def _push_scripts(self) -> None:
        self._pushed = True
        self.send({"type": "scripts"}, [(_SCRIPTS / name).read_bytes() for name in FILES])
        self.sent.scripts += 1

    def freeze(self, data: Mapping[str, str], metadata: Mapping[str, Any]) -> None:
        """End the live picture: pages show *data* (a MIME bundle) from now on.

        The widget stays known to the kernel, so that a page which comes back
        later is told.
        """
        with self._lock:
            if self._frozen is not None:
                return
            self._frozen = {"data": dict(data), "metadata": dict(metadata)}
            self._plots = ()
            self._seq += 1
            if self.comm is not None:
                self._send_snapshot()

    def _received(self, _: Any, content: Any, buffers: Any) -> None:
        """Something came from a page.  Any thread of the kernel."""
        kind = content.get("type") if isinstance(content, dict) else None
        if kind == "ready":
            self._followed = True
        elif kind in ("scripts", "snapshot"):
            with self._lock:
                if self.comm is not None:
                    self._push_scripts() if kind == "scripts" else self._send_snapshot()
        elif kind == "action" and self._on_action is not None:
            self._on_action(str(content.get("name", "")))


def answer_while_busy(comm: Any) -> None:
    """Let messages from the page be handled while a cell runs.

    JupyterLab sends them to a thread of their own for that.  ipykernel 7.4
    routes those of a comm back to the loop that sent on it last, which is the
    busy one.  Without the attribute it follows the front end again; kernels
    that do not have it need nothing.
    """
    if hasattr(comm, "_reply_subshell_for"):
        comm._reply_subshell_for = None
