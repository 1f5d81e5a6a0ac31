"""Loops that hosts run by themselves: what is refused before anything is sent."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import pathways_lab as pw
from pathways_lab.client import multi_controller
from pathways_lab.runtime.loops import Loop
from tests.client.kit import a_slice


@pytest.mark.parametrize("steps", [0, -1, 1.5, np.float32(3), "3"])
def test_steps_are_counted(steps: Any) -> None:
    on = a_slice(2)
    call = pw.jit(lambda x: x + 1, on=on, name="step").bind((np.ones(2),), {})
    with pytest.raises(pw.PathwaysError, match=r"steps=.* of 'step': a loop has a whole number"):
        multi_controller.start(call, on, Loop(steps, 1))
