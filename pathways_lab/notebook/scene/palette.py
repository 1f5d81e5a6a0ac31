"""Colours: one program, one colour, in every panel, view and frozen picture.

Problem: a reader follows a program by its colour from panel to panel, also
with deficient colour vision, on paper white and on JupyterLab's dark theme.

Rule for maintainers: hues are Okabe and Ito's, less the two that fail on one of
the backgrounds (black, yellow).  A hue is a program; its shades are the
program's functions, and ``fwd0`` and ``fwd1`` are one function on two stages.
Colour is never the only cue: bars carry names, states carry shapes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from weakref import WeakKeyDictionary, ref

from pathways_lab.timeline.log import Timeline

HUES = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#d55e00", "#56b4e9")
"""By program, in the order in which the timeline first saw them."""

NEUTRAL = "#8c8c8c"
"""Transfers, bars that stand for several programs, whatever has no program."""

FAILED = "#c1272d"
"""Poisoned, failed, lost; always together with a hatch or a word."""

INK = "#757575"
"""Text and rules that must be read on white and on near-black alike."""

SHADES = 8

CAUSE_COLOURS = ("#b5446e", "#999933", "#aa4499", "#5f8f3f", "#6699cc", "#44aa99", "#b3764d")
"""What devices wait for; always together with a place in the row."""

WORK_COLOURS = ("#b99a5f", "#8a6f3f", "#7568a6", "#5f8f8a")
"""Kinds of host work: no program's colour and no cause's; always with a place in the row."""


def mixed(colour: str, other: str, share: float) -> str:
    """*colour* with a *share* (0 to 1) of *other*; both ``"#rrggbb"``."""
    parts = (
        round(int(colour[i : i + 2], 16) * (1 - share) + int(other[i : i + 2], 16) * share)
        for i in (1, 3, 5)
    )
    return "#" + "".join(f"{part:02x}" for part in parts)


def shades(hue: str) -> tuple[str, ...]:
    """The :data:`SHADES` shades of a hue: itself, lighter, darker, lightest; then between these."""
    return (
        hue,
        mixed(hue, "#ffffff", 0.42),
        mixed(hue, "#000000", 0.25),
        mixed(hue, "#ffffff", 0.7),
        mixed(hue, "#000000", 0.48),
        mixed(hue, "#ffffff", 0.2),
        mixed(mixed(hue, "#808080", 0.6), "#ffffff", 0.25),
        mixed(hue, "#ffffff", 0.56),
    )


PAINTS = (NEUTRAL, FAILED, *(s for hue in HUES for s in shades(hue)), *CAUSE_COLOURS, *WORK_COLOURS)
"""Every colour that a bar may have; columns hold indices into it."""


WORK_PAINTS = tuple(range(len(PAINTS) - len(WORK_COLOURS), len(PAINTS)))
"""Indices of :data:`WORK_COLOURS`."""

CAUSE_PAINTS = tuple(range(WORK_PAINTS[0] - len(CAUSE_COLOURS), WORK_PAINTS[0]))
"""Indices of :data:`CAUSE_COLOURS`."""


def luminance(colour: str) -> float:
    """Relative luminance (0 black, 1 white) as the contrast guidelines define it."""
    linear = []
    for i in (1, 3, 5):
        part = int(colour[i : i + 2], 16) / 255
        linear.append(part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4)
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(a: str, b: str) -> float:
    """Contrast ratio of two colours, 1 to 21."""
    light, dark = sorted((luminance(a), luminance(b)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def ink_on(colour: str) -> str:
    """Black or white, whichever reads better on *colour*."""
    return max(("#ffffff", "#111111"), key=lambda ink: contrast(ink, colour))


def family(node: str) -> str:
    """The function that a node's name speaks of: its name without numbers."""
    return re.sub(r"[\s_\-.]*\d+", "", node) or node


_NAMES = 4096
"""Nodes and programs whose colours are remembered."""


class Palette:
    """Gives programs and their functions their places in :data:`PAINTS`.

    programs: tells each program's number; asked again when a new one appears
        (pass ``lambda: timeline.programs``).
    """

    def __init__(self, programs: Callable[[], Mapping[str, int]] | None = None) -> None:
        self._ask = programs
        self._programs: dict[str, int] = {}
        self._families: dict[str, dict[str, int]] = {}
        self._codes: dict[tuple[str, str], int] = {}

    def number(self, program: str) -> int:
        """The program's number, by first appearance."""
        if program not in self._programs and self._ask is not None:
            self._programs.update(self._ask())
        return self._programs.setdefault(program, len(self._programs))

    def code(self, program: str, node: str = "") -> int:
        """Index into :data:`PAINTS` of a node, or of its program when *node* is ""."""
        if not program:
            return 0
        key = (program, node)
        code = self._codes.get(key)
        if code is None:
            if len(self._codes) >= _NAMES:
                self._programs.clear()
                self._families.clear()
                self._codes.clear()
            shade = 0
            if node:
                known = self._families.setdefault(program, {})
                shade = known.setdefault(family(node), len(known)) % SHADES
            code = self._codes[key] = 2 + (self.number(program) % len(HUES)) * SHADES + shade
        return code

    def colour(self, program: str, node: str = "") -> str:
        """``"#rrggbb"`` of a node or a program."""
        return PAINTS[self.code(program, node)]

    def legend(self) -> list[tuple[str, list[tuple[str, str]]]]:
        """``(program, [(functions, colour), ...])`` of everything that was coloured.

        A program with more functions than shades has several on one.
        """
        out = []
        for program, names in tuple(self._families.items()):
            by_colour: dict[str, list[str]] = {}
            for name in tuple(names):
                by_colour.setdefault(self.colour(program, name), []).append(name)
            out.append((program, [(_listed(names), c) for c, names in by_colour.items()]))
        return out


def _listed(names: list[str]) -> str:
    """Names that share a shade, shortened."""
    shown = [name if len(name) <= 16 else name[:15] + "…" for name in names[:3]]
    return ", ".join(shown) + (" …" if len(names) > 3 else "")


_palettes: WeakKeyDictionary[Timeline, Palette] = WeakKeyDictionary()


def palette_of(timeline: Timeline) -> Palette:
    """The colours of a timeline: the same in all of its views."""
    palette = _palettes.get(timeline)
    if palette is None:
        here = ref(timeline)  # a strong one would keep the timeline for ever

        def programs() -> dict[str, int]:
            alive = here()
            return alive.programs if alive is not None else {}

        palette = _palettes[timeline] = Palette(programs)
    return palette
