"""Colours: one function, one colour, in every picture and every notebook.

Problem: a reader who learned that forward is blue reads the next picture with that.  So a
colour follows from the function's name: from its role in training where the name says it
(:mod:`pathways_lab.timeline.roles`), else from a hash.

Rule for maintainers: a mark has a contrast of 3:1 on paper white and on JupyterLab's dark
theme.  Functions are vivid, and causes are pale.
Two names whose hashes meet get different colours while any are left.  ``fwd0`` and
``fwd1`` are one function on two stages.  Colour is never the only cue: bars carry names,
states carry shapes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from weakref import WeakKeyDictionary, ref
from zlib import crc32

from pathways_lab.timeline.log import Timeline
from pathways_lab.timeline.roles import COLOURS, role_of

OTHERS = (
    "#b76636", "#a57b0d", "#7f53b4", "#849727", "#4982f8", "#928bd2", "#c0416c", "#177f17",
)  # fmt: skip
"""Functions without a role, and programs."""

HUES = (*COLOURS.values(), *OTHERS)

BETWEEN = "#808080"
"""Operations between calls, which the user wrote without naming them."""

NEUTRAL = "#8c8c8c"
"""Bars that stand for several programs, causes that are not known yet, whatever has no program."""

FAILED = "#c1272d"
"""Poisoned, failed, lost; always together with a hatch or a word."""

HEAT = "#0f8f8f"
"""Devices that compute, whatever they compute: no function's colour, with an intensity."""

EMPTY = "transparent"
"""Ground that nothing is drawn on."""

INK = "#757575"
"""Text and rules that must be read on white and on near-black alike."""

LIGHT, DARK = ("#ffffff", "#424242"), ("#111111", "#d0d0d0")
"""Ground and ink of saved pictures, which bring their own: no one ink is read well on both grounds,
and a saved picture knows nothing of the page but whether it is dark."""

ARRIVES = "#7e9c60"
"""Bytes that arrive, and waiting for them."""

CAUSE_COLOURS = (
    "#b8828c",
    "#6d663c",
    "#7e5d7c",
    "#516d5c",
    "#537889",
    ARRIVES,
    "#a3836d",
    "#735d5c",
)
"""Causes for which devices wait: pale beside functions, and always with a place in the row."""

WORK_COLOURS = ("#a29048", "#8a6f3f", "#6f6a86", "#5f8f8a")
"""Kinds of host work: no program's colour and no cause's; always with a place in the row."""

PAINTS = (NEUTRAL, FAILED, BETWEEN, *HUES, *CAUSE_COLOURS, *WORK_COLOURS)
"""Every colour that a bar may have; columns hold indices into it."""

_FIRST = PAINTS.index(HUES[0])


WORK_PAINTS = tuple(range(len(PAINTS) - len(WORK_COLOURS), len(PAINTS)))
"""Indices of :data:`WORK_COLOURS`."""

CAUSE_PAINTS = (*range(WORK_PAINTS[0] - len(CAUSE_COLOURS), WORK_PAINTS[0]), 0)
"""Indices of :data:`CAUSE_COLOURS`, and that of a cause that is not known yet."""


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
    return max(("#ffffff", "#000000"), key=lambda ink: contrast(ink, colour))


def is_between(node: str) -> bool:
    """Whether a node stands for operations between calls; its name is in parentheses."""
    return node.startswith("(")


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
        self._families: dict[str, dict[str, None]] = {}
        self._codes: dict[tuple[str, str], int] = {}
        self._taken: dict[str, int] = {}

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
                for known in (self._programs, self._families, self._codes, self._taken):
                    known.clear()
            name = family(node or program)
            if node:
                self._families.setdefault(program, {})[name] = None
            code = self._codes[key] = PAINTS.index(BETWEEN) if is_between(name) else self._hue(name)
        return code

    def _hue(self, name: str) -> int:
        if (role := role_of(name)) is not None:
            return _FIRST + tuple(COLOURS).index(role)
        slot = self._taken.get(name)
        if slot is None:
            wanted, taken = crc32(name.encode()), set(self._taken.values())
            slots = [(wanted + n) % len(OTHERS) for n in range(len(OTHERS))]
            slot = self._taken[name] = next((n for n in slots if n not in taken), slots[0])
        return _FIRST + len(COLOURS) + slot

    def colour(self, program: str, node: str = "") -> str:
        """``"#rrggbb"`` of a node or a program."""
        return PAINTS[self.code(program, node)]

    def legend(self, shown: Collection[tuple[str, str]]) -> list[tuple[str, list[tuple[str, str]]]]:
        """``(program, [(functions, colour), ...])`` of nodes that are *shown*, each with its
        program.

        Functions of one colour share an entry; operations between calls come last.  Calls that
        went as one run have no second entry beside those that went apart.
        """
        wanted = {(program, family(node)) for program, node in shown}
        out = []
        for program, names in tuple(self._families.items()):
            by_colour: dict[str, list[str]] = {}
            for name in tuple(names):
                if (program, name) in wanted:
                    by_colour.setdefault(self.colour(program, name), []).append(name)
            between = by_colour.pop(BETWEEN, None)
            entries = [(_listed(names), c) for c, names in by_colour.items()]
            entries += [("between calls", BETWEEN)] * (between is not None)
            if entries:
                out.append((program, entries))
        apart = {entry for program, entries in out if ", " not in program for entry in entries}
        kept = (
            (program, [e for e in entries if ", " not in program or e not in apart])
            for program, entries in out
        )
        return [(program, entries) for program, entries in kept if entries]


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
