"""The text above and below the figures of a page.

Rule for maintainers: plain data, sent as it is; ``live.js`` shows exactly this.
"""

from __future__ import annotations

from dataclasses import dataclass

from pathways_lab.notebook.scene.overview import Overview


@dataclass(frozen=True, slots=True)
class Header:
    """Texts and controls of a live view.

    state: ``"waiting"``, ``"compiling"``, ``"running"``, ``"idle"``, ``"done"`` or ``"failed"``.
    shares: how devices spent the time that is drawn: busy, and waiting for the lab itself.
    progress: share of what is expected that is done, 0 to 1; below 0: nothing is expected.
    notes: short remarks (emulated devices, dropped records).
    legend: ``(program, ((function, colour), ...))``.
    late: seconds by which the picture is behind what is known; the page adds those since it came.
    compiling: a function that hosts make now: its name, which of how many it is, and for how many
        whole seconds so far, which the page counts on; None: none is made.
    advice: a sentence on what would help, "" for none.
    summary: one line for screen readers.
    actions: buttons; the name is what comes back when one is pressed.
    chosen: what is known of the gang that somebody has clicked: ``(label, text)``.
    links, arrows: see :class:`.text.Card`.
    line: the user's line that made it, as its record has it; a view in a notebook says
        beside it, as ``place``, where its page finds the line.  node: its name.
    moments: what the scrubber covers, seconds on the axis; at: where it stands,
        None while the picture follows.
    window: what the axis of time may cover instead, "" where there is no choice.
    shown: what it covers, in seconds.
    overview: how busy devices were in all that the scrubber covers.
    """

    title: str = ""
    state: str = "waiting"
    status: str = ""
    shares: str = ""
    progress: float = -1.0
    notes: tuple[str, ...] = ()
    legend: tuple[tuple[str, tuple[tuple[str, str], ...]], ...] = ()
    late: float = 0.0
    compiling: tuple[str, int, int, int] | None = None
    advice: str = ""
    summary: str = ""
    actions: tuple[str, ...] = ()
    chosen: tuple[tuple[str, str], ...] = ()
    links: tuple[tuple[str, tuple[tuple[str, float], ...]], ...] = ()
    arrows: tuple[tuple[float, float], ...] = ()
    line: str = ""
    node: str = ""
    moments: tuple[float, float] = (0.0, 0.0)
    at: float | None = None
    window: str = ""
    shown: tuple[float, ...] = (0.0, 0.0)
    overview: Overview = (0.0, 1.0, "")
