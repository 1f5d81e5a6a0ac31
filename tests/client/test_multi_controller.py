"""Loops that hosts run by themselves: what is refused before anything is sent."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import pathways_lab as pw
from pathways_lab.client.training import per_host_loop
from pathways_lab.core.program.folding import Folded, laid_out
from pathways_lab.runtime.client_messages import Loop
from pathways_lab.transport.codec import unpack
from tests.client.kit import FakeLab, a_slice


@pytest.mark.parametrize("steps", [0, -1, 1.5, np.float32(3), "3"])
def test_steps_are_counted(steps: Any) -> None:
    on = a_slice(2)
    call = pw.jit(lambda x: x + 1, on=on, name="step").bind((np.ones(2),), {})
    with pytest.raises(pw.PathwaysError, match=r"steps=.* of 'step': a loop has a whole number"):
        per_host_loop.start(call, on, Loop(steps, 1))


@pytest.mark.parametrize(("donated", "names"), [((1,), "'batch'"), ((0, 2), "'rate'")])
def test_what_is_donated_is_replaced_in_the_next_step(donated: Any, names: str) -> None:
    def step(w: Any, batch: Any, rate: Any) -> Any:
        return w + rate * batch

    on = a_slice(2)
    call = pw.jit(step, on=on, donate_argnums=donated).bind((np.ones(2),) * 3, {})
    with pytest.raises(pw.PathwaysError, match=f"'step' cannot be repeated: it donates {names}"):
        per_host_loop.start(call, on, Loop(2, 1))
    with pytest.raises(pw.PathwaysError, match="belongs to no running lab"):
        per_host_loop.start(call, on, Loop(1, 1))  # nothing comes after


def test_a_loop_is_prepared_for_where_its_arguments_are(fake: FakeLab) -> None:
    fake.held = True
    on, other = fake.slice(2), fake.slice(2)
    step = pw.jit(lambda x: x + 1, on=on)
    for place in (on, other):
        call = step.bind((pw.device_put(np.ones(2, np.float32), place),), {})
        per_host_loop.start(call, on, Loop(1, 1))
    fake.settle()
    plans = [laid_out(unpack(Folded, sent["plan"])) for sent in fake.of("program")]
    assert [len(plan.steps) for plan in plans] == [1, 2], "the second one is moved first"
