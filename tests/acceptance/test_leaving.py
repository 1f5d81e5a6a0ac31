"""Clients that are killed in the middle of their work leave nothing behind.

``python -m tests.acceptance.leaving --times 100`` is the long form.
"""

from __future__ import annotations

import pytest

import pathways_lab as pw
from tests.acceptance import leaving

pytestmark = pytest.mark.cluster


def test_two_clients_are_killed_and_the_third_notices_nothing(lab: pw.Lab) -> None:
    took, _ = leaving.run(lab, times=2, seed=1)
    assert len(took) == 2


def test_the_look_sees_what_stays(lab: pw.Lab) -> None:
    """The check would fail if something stayed."""
    on = lab.slice(4)
    kept = pw.jit(lambda x: x + 1, on=on)(leaving.np.ones(leaving.FEW, "float32"))
    leaving.until(lambda: bool(leaving.in_use(lab)), "the handle's bytes are seen")
    assert lab.name in leaving.slices(lab)
    del kept
    leaving.until(lambda: not leaving.in_use(lab), "they are gone with it")
