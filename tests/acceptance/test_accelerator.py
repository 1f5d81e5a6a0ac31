"""The checks of ``tests.acceptance.accelerator``, some of them, on an emulated device."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

import pathways_lab as pw
from tests.acceptance import accelerator
from tests.acceptance.accelerator import Stage

pytestmark = pytest.mark.cluster


@pytest.fixture(scope="module")
def stage() -> Iterator[Stage]:
    made = Stage("cpu", islands=1)
    yield made
    made.lab.close()


@pytest.mark.parametrize("name", ["what there is", "random numbers", "too much memory"])
def test_a_check_holds(stage: Stage, name: str) -> None:
    assert accelerator.CHECKS[name](stage)


def test_a_wrong_value_is_found(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    right = pw.Handle.__array__
    monkeypatch.setattr(pw.Handle, "__array__", lambda *a, **k: np.asarray(right(*a, **k)) + 1)
    with pytest.raises(AssertionError):
        accelerator.CHECKS["random numbers"](stage)
