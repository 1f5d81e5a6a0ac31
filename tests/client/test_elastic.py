"""After a loss a training loop goes on from where nothing that is wanted would be left out."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pathways_lab.client.lab.island_admin import Elasticity
from pathways_lab.client.training import elastic_loop
from pathways_lab.core.errors import Failure, PathwaysError
from tests.client.kit import FakeLab


@pytest.mark.parametrize(("given", "on_from"), [(11, 9), (12, 12), (14, 12)])
def test_no_step_is_left_out_because_a_later_copy_is_there(given: int, on_from: int) -> None:
    """Step 11 may be lost although the state after it lies on an island that lives."""
    loop: Any = SimpleNamespace(
        members=["island0", "island1"],
        replicas=2,
        _given=given,
        _copies=[elastic_loop._Copy(step, {"island1": {}}) for step in (9, 12)],
        _lost=lambda error: ["island0"],
        _again=lambda copy, name, gone: (copy.step, {}),
    )
    lost = PathwaysError(Failure("lost", "island0 was lost"))
    assert elastic_loop.Elastic._recover(loop, lost) == (on_from, {})
    assert loop._copies[-1].step == on_from


@pytest.mark.parametrize(("given", "kept"), [(8, [6, 9, 12]), (9, [9, 12]), (12, [12])])
def test_copies_are_kept_until_the_steps_before_them_were_yielded(
    given: int, kept: list[int]
) -> None:
    loop: Any = SimpleNamespace(
        members=[], replicas=1, _given=given,
        _copies=[elastic_loop._Copy(step, {"island0": {}}) for step in (6, 9)],
    )  # fmt: skip
    elastic_loop.Elastic._copy(loop, 12, {"island0": {}})
    assert [copy.step for copy in loop._copies] == kept


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"islands": ["nope"]}, r"islands=\['nope'\]: the lab has no such island"),
        ({"parts": 0}, "parts=0 is not a whole number from 1"),
        ({"parts": "x"}, "parts='x' is not a whole number"),
        ({"every": 0}, "every=0 is not a whole number from 1"),
        ({"replicas": None}, "replicas=None is not a whole number"),
        ({"ahead": -1}, "ahead=-1 is not a whole number from 0"),
        ({"devices": 1.5}, r"devices=1\.5 is not a whole number"),
    ],
)
def test_what_no_loop_could_use_is_refused_at_the_call(given: dict[str, Any], said: str) -> None:
    lab: Any = SimpleNamespace(
        islands=[SimpleNamespace(name=f"island{n}", devices=4) for n in range(2)]
    )
    with pytest.raises(PathwaysError, match=said):
        Elasticity.elastic(lab, max, 0, [], update=max, **given)
    assert Elasticity.elastic(lab, max, 0, [], update=max).parts == 2
    assert Elasticity.elastic(lab, max, 0, [], update=max, islands=["island1", "new"]).parts == 1


def test_a_loop_goes_on_where_another_one_ended(fake: FakeLab) -> None:
    lab: Any = SimpleNamespace(
        islands=[SimpleNamespace(name="island0", devices=2)],
        slice=lambda shape, axes, island, wait: fake.slice(shape, axes=(axes,), island=island),
        session=fake.session,
        release_slice=fake.release_slice,
    )

    def step(state: Any, batch: Any) -> Any:
        return state + batch.sum(), batch.mean()

    def loop(batches: list[Any], **options: Any) -> list[tuple[int, float]]:
        made = Elasticity.elastic(lab, step, np.float32(0), batches, every=2, **options)
        return [(number, float(out)) for number, _, out in made]

    batches = [np.full(4, n, np.float32) for n in range(5)]
    assert loop(batches) == [(n, float(n)) for n in range(5)]
    assert loop(batches[3:], start=3) == [(3, 3.0), (4, 4.0)]
    with pytest.raises(PathwaysError, match="start=-1 is not a whole number from 0"):
        loop([], start=-1)
