"""Colours: stable by name, readable on both grounds, told apart by most eyes."""

from __future__ import annotations

import itertools
import re

import numpy as np
import pytest

from pathways_lab.notebook.panels import planned
from pathways_lab.notebook.scene.palette import (
    BETWEEN,
    CAUSE_COLOURS,
    DARK,
    HEAT,
    HUES,
    INK,
    LIGHT,
    NEUTRAL,
    OTHERS,
    PAINTS,
    WORK_COLOURS,
    Palette,
    contrast,
    family,
    ink_on,
)
from pathways_lab.timeline.roles import COLOURS, role_of
from tests.notebook.jupyter import ROOT
from tests.notebook.test_frozen import mixed


def test_a_function_has_one_colour_in_all_pictures_and_stages_share_it() -> None:
    one, two = Palette(), Palette()
    for other in ("serve", "eval"):
        two.colour(other, "step")
    assert one.colour("p", "fwd0") == two.colour("q", "forward_1") == COLOURS["forward"]
    assert one.colour("p", "attention") == two.colour("q", "attention3")
    assert one.colour("p", "(slice)") == one.colour("p", "(add+mul)") == BETWEEN
    assert one.colour("attention") == one.colour("p", "attention"), "a call is its own program"
    drawn = [("p", node) for node in ("fwd0", "attention", "(slice)")]
    assert one.legend(drawn) == [
        ("p", [("fwd", COLOURS["forward"]), ("attention", one.colour("p", "attention")),
               ("between calls", BETWEEN)]),
    ]  # fmt: skip
    assert one.legend([("p", "fwd1")]) == [("p", [("fwd", COLOURS["forward"])])], "no others"
    assert [family(n) for n in ("stage_3", "stage-12.loss", "7", "f")] == [
        "stage", "stage.loss", "7", "f",
    ]  # fmt: skip


def test_names_whose_hashes_meet_have_different_colours_while_any_are_left() -> None:
    palette = Palette()
    names = [f"f{letter}" for letter in "abcdefghijkl"]
    colours = [palette.colour("p", name) for name in names]
    assert len(set(colours)) == len(OTHERS)
    assert len(set(colours[: len(OTHERS)])) == len(OTHERS)


def test_so_many_colours_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pathways_lab.notebook.scene.palette._NAMES", 8)
    palette = Palette(lambda: {"p": 1})
    for number in range(50):
        assert palette.number("p") == 1
        palette.colour(f"program {number}", f"f{number}")
    known = palette._codes, palette._families, palette._programs, palette._taken
    assert all(len(names) <= 9 for names in known)


@pytest.mark.parametrize(
    ("name", "role"),
    [
        ("forward", "forward"), ("layer0_fwd", "forward"), ("backward_2", "backward"),
        ("valueAndGrad", "backward"), ("weight", "weight"), ("head", "loss"),
        ("adamw_update", "optimizer"), ("f", None), ("attention", None), ("headings", None),
    ],
)  # fmt: skip
def test_a_name_tells_the_role(name: str, role: str | None) -> None:
    assert role_of(name) == role


def test_text_can_be_read_on_every_paint_and_ink_on_both_grounds() -> None:
    """The guidelines' 4.5 for text and 3 for marks, where pages and saved pictures have them."""
    marks = {*PAINTS, HEAT, INK, *planned.COLOURS.values()}
    assert min(contrast(ink_on(paint), paint) for paint in marks) >= 4.5
    for ground, ink in (LIGHT, DARK):
        assert contrast(ink, ground) >= 7.0
        assert min(contrast(mark, ground) for mark in marks) >= 3.0


def test_no_function_looks_like_a_cause() -> None:
    for hue, cause in itertools.product(HUES, CAUSE_COLOURS):
        assert distance(hue, cause, NORMAL) > 25, (hue, cause)
        assert distance(hue, cause, DEUTERANOPIA) > 8, (hue, cause)
    for hue, work in itertools.product(HUES, WORK_COLOURS):
        assert distance(hue, work, NORMAL) > 20, (hue, work)
    for one, two in itertools.combinations((*CAUSE_COLOURS, NEUTRAL), 2):
        assert distance(one, two, NORMAL) > 18, (one, two)
    for one, two in itertools.combinations((*HUES, HEAT), 2):
        assert distance(one, two, NORMAL) > 25, (one, two)


def test_roles_are_told_apart_with_deficient_colour_vision() -> None:
    """Distances in CIE Lab, with the matrix of Machado and others (2009) for deuteranopia."""
    for one, two in itertools.combinations((*COLOURS.values(), BETWEEN), 2):
        assert distance(one, two, NORMAL) > 40, (one, two)
        assert distance(one, two, DEUTERANOPIA) > 15, (one, two)


NORMAL = np.eye(3)
DEUTERANOPIA = np.array(
    [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413],
     [-0.011820, 0.042940, 0.968881]]
)  # fmt: skip
TO_XYZ = np.array(
    [[0.4124564, 0.3575761, 0.1804375], [0.2126729, 0.7151522, 0.0721750],
     [0.0193339, 0.1191920, 0.9503041]]
)  # fmt: skip


def distance(one: str, two: str, seen: np.ndarray) -> float:
    def lab(colour: str) -> np.ndarray:
        parts = np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
        linear = np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)
        xyz = TO_XYZ @ np.clip(seen @ linear, 0, 1) / (0.95047, 1.0, 1.08883)
        x, y, z = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
        return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])

    return float(np.linalg.norm(lab(one) - lab(two)))


def test_the_states_and_rules_of_pages_are_seen_on_both_grounds() -> None:
    """JupyterLab's inks on its grounds; a state is mixed with the ink."""
    sheets = [(ROOT / part).rglob("*.css") for part in ("pathways_lab/notebook", "extensions")]
    style = "".join(sheet.read_text() for sheet in itertools.chain(*sheets))
    states = re.findall(r"color-mix\(in srgb, (#\w{6}) 75%, var\(--pathways-lab-ink\)\)", style)
    rules = re.findall(r"(?:border-left|border-color|box-shadow):[^;#]*(#\w{6})", style)
    assert (len(states), len(rules) > 5) == (2, True)
    for ground, ink in (("#ffffff", "#212121"), ("#111111", "#ffffff")):
        mixes = [mixed(state, ink, 0.25) for state in states]
        assert min(contrast(mix, ground) for mix in mixes) >= 4.5
        assert min(contrast(rule, ground) for rule in rules) >= 3.0
