"""The figure of a standstill: hosts and gangs as boxes, "waits for" as arrows.

Problem: a cycle of waits is one glance as a picture and a riddle as a
sentence.  The same picture goes with the error, with the answer of
``lab.stuck()``, and with what the checker of programs finds.

How: gangs and the hosts that they wait for stand around a circle in the order
of the waits, so that a deadlock is a closed ring and a chain is an open one.

Rule for maintainers: a pure function from story to SVG; colours that are
legible on white and on near-black, and never the only cue.

Paper: section 2 (deadlock of communicating computations).
"""

from __future__ import annotations

import html
import math

from pathways_lab.core.diagnosis.stall_story import Stuck
from pathways_lab.notebook.draw.svg import FONT, GROUND, HERE, opened
from pathways_lab.notebook.scene.palette import FAILED, HUES, NEUTRAL, ink_on
from pathways_lab.notebook.view.frozen import image

WIDTH, HEIGHT = 560, 320
_BOX = 150, 40

_TITLES = {
    "deadlock": "Deadlock: each waits for the next, for ever",
    "possible": "Possible without order: each would wait for the next",
    "late": "Late: what is waited for, and what that waits for",
    "silent": "Silent: these hosts do not answer",
    "down": "Down: these hosts have no device process",
}


def picture(story: Stuck) -> str:
    """The waits of a story as one SVG file."""
    nodes, links = _graph(story)
    where = _ring(len(nodes), closed=story.kind not in ("late", "silent", "down"))
    tone = FAILED if story.kind == "deadlock" else HERE
    parts = [
        f'{opened(WIDTH, HEIGHT)} font-family="{FONT}" font-size="12">{GROUND}',
        '<defs><marker id="tip" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="8"'
        f' markerHeight="8" orient="auto-start-reverse"><path d="M0 0 10 5 0 10z" fill="{tone}"/>'
        "</marker></defs>",
        f'<text x="{WIDTH / 2}" y="18" text-anchor="middle" font-weight="600" fill="{HERE}">'
        f"{_TITLES[story.kind]}</text>",
    ]
    parts += [_arrow(where[a], where[b], tone, label) for a, b, label in links]
    parts += [_box(where[n], *node) for n, node in enumerate(nodes)]
    return "".join([*parts, "</svg>"])


def as_html(story: Stuck) -> str:
    """The picture as HTML, with the sentence for those who cannot see it."""
    if not story:
        return html.escape(str(story))
    return image(picture(story), str(story))


def _graph(story: Stuck) -> tuple[list[tuple[str, str, str, bool]], list[tuple[int, int, str]]]:
    """Boxes ``(text, below it, colour, is a host)`` and arrows between them, with their words."""
    keys: dict[tuple[str, str], int] = {}
    nodes: list[tuple[str, str, str, bool]] = []
    links: list[tuple[int, int, str]] = []
    programs = list(dict.fromkeys(gang.program for gang in story.gangs))

    def gang_box(number: int) -> int:
        gang = story.gangs[number]
        hue = HUES[programs.index(gang.program) % len(HUES)]
        key = ("gang", str(number))
        if key not in keys:
            keys[key] = len(nodes)
            nodes.append((gang.node or "a gang", f"program {gang.program}", hue, False))
        return keys[key]

    def host_box(name: str) -> int:
        if ("host", name) not in keys:
            keys["host", name] = len(nodes)
            nodes.append((name, "host", NEUTRAL, True))
        return keys["host", name]

    for arrow in story.arrows:
        gang = gang_box(arrow.gang)
        if arrow.host:
            host = host_box(arrow.host)
            links.append((gang, host, "waits for"))
            links.append((host, gang_box(arrow.behind), "is in"))
        else:
            links.append((gang, gang_box(arrow.behind), "waits for the result of"))
    if not nodes:
        for number in range(len(story.gangs)):
            gang_box(number)
    for silent in story.silent:
        host_box(silent)
    return nodes, links


def _ring(count: int, *, closed: bool) -> list[tuple[float, float]]:
    """Where boxes stand: around an ellipse, or on an arc of it that does not close."""
    turn = 2 * math.pi / max(count, 1) if closed else 1.3 * math.pi / max(count - 1, 1)
    start = -math.pi / 2 if closed else -1.15 * math.pi
    return [
        (
            WIDTH / 2 + (WIDTH / 2 - _BOX[0] / 2 - 12) * math.cos(start + turn * n),
            HEIGHT / 2 + 14 + (HEIGHT / 2 - 46) * math.sin(start + turn * n),
        )
        for n in range(count)
    ]


def _box(at: tuple[float, float], text: str, below: str, colour: str, host: bool) -> str:
    (x, y), (width, height) = at, _BOX
    ink = ink_on(colour)
    dashes = ' stroke-dasharray="4 3"' if host else ""
    return (
        f'<rect x="{x - width / 2:.1f}" y="{y - height / 2:.1f}" width="{width}" height="{height}"'
        f' rx="{2 if host else 9}" fill="{colour}" stroke="{HERE}"{dashes}/>'
        f'<text x="{x:.1f}" y="{y - 2:.1f}" text-anchor="middle" font-weight="600" fill="{ink}">'
        f"{_short(text)}</text>"
        f'<text x="{x:.1f}" y="{y + 13:.1f}" text-anchor="middle" font-size="10.5" fill="{ink}">'
        f"{_short(below)}</text>"
    )


def _arrow(a: tuple[float, float], b: tuple[float, float], tone: str, label: str) -> str:
    (x0, y0), (x1, y1) = _edge(a, b), _edge(b, a)
    # Beside the line and outside of the ring, ending or beginning at the line.
    right = (x0 + x1) / 2 > WIDTH / 2
    beside, anchor = (7, "start") if right else (-7, "end")
    if abs(y1 - y0) < 12:
        beside, anchor = 0, "middle"
    up = -4 if (y0 + y1) / 2 < HEIGHT / 2 else 12
    return (
        f'<line x1="{x0:.1f}" y1="{y0:.1f}" x2="{x1:.1f}" y2="{y1:.1f}" stroke="{tone}"'
        ' stroke-width="2" marker-end="url(#tip)"/>'
        f'<text x="{(x0 + x1) / 2 + beside:.1f}" y="{(y0 + y1) / 2 + up:.1f}"'
        f' text-anchor="{anchor}"'
        f' font-size="11" fill="{HERE}">{label}</text>'
    )


def _edge(a: tuple[float, float], b: tuple[float, float]) -> tuple[float, float]:
    """Where the line from the middle of box *a* to that of *b* leaves *a*."""
    dx, dy = b[0] - a[0], b[1] - a[1]
    reach = max(abs(dx) / (_BOX[0] / 2 + 4), abs(dy) / (_BOX[1] / 2 + 4), 1e-9)
    return a[0] + dx / max(reach, 1.0), a[1] + dy / max(reach, 1.0)


def _short(text: str, most: int = 22) -> str:
    return html.escape(text if len(text) <= most else text[: most - 1] + "\u2026")
