"""A step that is told slices only: which part goes where, and what a schedule makes of it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pathways_lab as pw
from pathways_lab.core.errors import PathwaysError
from pathways_lab.pipeline import balance
from pathways_lab.pipeline.mpmd.order import spread
from pathways_lab.pipeline.schedules import SCHEDULES, for_stages
from tests.client.kit import a_slice
from tests.pipeline.mpmd_kit import OPTIMIZER, PARAMETERS, X, Y, composed, loss, turns

WIDTHS = {"a": 64, "b": 16, "c": 16, "d": 16, "e": 32}


def square(own: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.tanh(x @ own)


def chain(parameters: dict[str, jax.Array], x: jax.Array) -> dict[str, jax.Array]:
    """Parts one after the other, each with as many products as its width squared."""

    def of(parameters: dict[str, jax.Array]) -> jax.Array:
        total = jnp.float32(0)
        for part in parameters:
            rows = jnp.broadcast_to(x[:, :1], (len(x), parameters[part].shape[0])) + total
            total = pw.mpmd.named(part, square)(parameters[part], rows).mean()
        return total

    return jax.grad(of)(parameters)


def wide(widths: dict[str, int] = WIDTHS) -> dict[str, np.ndarray]:
    return {part: np.ones((width, width), np.float32) for part, width in widths.items()}


def test_each_slice_has_neighbours_with_work_as_its_devices_are_many() -> None:
    one, two = a_slice(1), a_slice(1, island="island1")
    step = pw.mpmd.jit(chain, on=[one, two])
    assert step.on == {}
    assert "parts on" in repr(step)
    step.partition(wide(), X)
    assert step.on == {"a": one, "b": two, "c": two, "d": two, "e": two}
    four = a_slice(4, island="island2")
    step = pw.mpmd.jit(chain, on=(one, four))
    step.partition(wide({**WIDTHS, "a": 32}), X)
    assert [place is four for place in step.on.values()] == [False, True, True, True, True]
    step = pw.mpmd.jit(chain, on=[four, one])
    step.partition(wide({**WIDTHS, "a": 32}), X)
    assert [place is four for place in step.on.values()] == [True, True, True, True, False]


def test_the_cut_stays_for_other_types_and_for_the_same_step_otherwise() -> None:
    one, two = a_slice(1), a_slice(1, island="island1")
    step = pw.mpmd.jit(chain, on=[one, two])
    later = step.otherwise(schedule="gpipe")
    step.partition(wide(), X)
    cut = dict(step.on)
    step.partition(wide(dict.fromkeys(WIDTHS, 8)), X)
    assert step.on == cut
    assert step.otherwise().on == cut
    assert later.on == {}


def test_the_results_are_those_of_one_device() -> None:
    args = PARAMETERS, OPTIMIZER.init(PARAMETERS), X, Y
    train = turns(loss, 4)
    step = pw.mpmd.jit(train, on=[a_slice(1), a_slice(1, island="island1")], schedule="1f1b")
    step.partition(*args)
    got, expected = composed(step)(*args), jax.jit(train)(*args)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), got, expected)
    table = step.partition(*args).schedule
    assert table is not None
    assert table.slices in ((0, 0, 1), (0, 1, 1)), "two stages, one of them of two parts"


def test_what_cannot_be_cut_is_refused() -> None:
    three = [a_slice(1, island=f"island{n}") for n in range(3)]
    step = pw.mpmd.jit(chain, on=three)
    with pytest.raises(PathwaysError, match=r"3 slices, and the step has 2 parts .*'a', 'b'"):
        step.partition(wide({"a": 8, "b": 8}), X)
    for wrong in ([], [three[0], "west"], three[0], "west"):
        with pytest.raises(PathwaysError, match="does not say for each part"):
            pw.mpmd.jit(chain, on=wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("speeds", [(1.0, 1.0), (3.0, 1.0), (1.0, 3.0)])
def test_no_cut_is_better(speeds: tuple[float, float]) -> None:
    costs = [5.0, 1.0, 2.0, 4.0, 3.0]

    def dearest(cut: int) -> float:
        return max(sum(costs[:cut]) / speeds[0], sum(costs[cut:]) / speeds[1])

    (first, _) = balance.partition(costs, 2, speeds)
    assert dearest(first.stop) == min(map(dearest, range(1, 5)))


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_of_stages_is_one_of_their_parts(name: str) -> None:
    chunked = name in ("circular", "interleaved", "dualpipev")
    made = for_stages(name, 6 if chunked else 3, 3, 6)
    sizes = [2, 1, 3, 1, 1, 2][: made.stages]
    parts = spread(made, sizes)
    assert parts.problem() is None
    assert parts.stages == sum(sizes)
    assert parts.slices == tuple(
        at for at, size in zip(made.slices, sizes, strict=True) for _ in range(size)
    )


def test_neighbours_on_one_slice_are_a_stage() -> None:
    one, two = a_slice(1), a_slice(1, island="island1")
    args = PARAMETERS, OPTIMIZER.init(PARAMETERS), X, Y
    step = pw.mpmd.jit(turns(loss, 4), on={"a": one, "b": one, "c": two}, schedule="1f1b")
    table = step.partition(*args).schedule
    assert table is not None
    assert table.slices == (0, 0, 1)
    other = pw.mpmd.jit(turns(loss, 4), on=step.on, schedule="dualpipev")
    with pytest.raises(PathwaysError, match="is for 4 stages"):
        other.partition(*args)
