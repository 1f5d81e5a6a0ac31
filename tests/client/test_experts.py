"""``pw.experts``: equal to the dense sum, however the rows fall; nothing runs for nobody."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import pathways_lab as pw
from tests.client.kit import FakeLab

ROWS, WIDTH, COUNT, CUT = 12, 3, 4, 5


@pytest.fixture(scope="module")
def fake() -> Iterator[FakeLab]:
    with FakeLab() as made:
        yield made


@pytest.fixture(scope="module")
def moe(fake: FakeLab) -> Any:
    places = [fake.slice(1), fake.slice(2, island="island1"), fake.slice(1, island="island1")]
    return pw.experts(ffn, on=places, route=lambda x, choice, weights: (choice, weights))


def ffn(parameters: Any, rows: Any) -> Any:
    """Not zero at zero, and not finite backward there: padding has to stay out of it."""
    return jnp.sqrt(jnp.abs(rows) @ parameters["w"]) + parameters["b"]


def dense(parameters: Any, x: Any, choice: Any, weights: Any) -> Any:
    total = 0
    for n, own in enumerate(parameters):
        share = jnp.where(choice == n, weights, 0).sum(axis=1)
        total = total + share[:, None] * ffn(own, x)
    return total


def made(seed: int) -> tuple[Any, Any, Any]:
    rng = np.random.default_rng(seed)
    parameters = [
        {
            "w": rng.uniform(0.1, 1, (WIDTH, WIDTH + 1)).astype(np.float32),
            "b": rng.normal(size=WIDTH + 1).astype(np.float32),
        }
        for _ in range(COUNT)
    ]
    x = rng.uniform(0.5, 2, (ROWS, WIDTH)).astype(np.float32)
    return parameters, x, rng.uniform(0.1, 1, (ROWS, 2)).astype(np.float32)


def equal(found: Any, expected: Any) -> None:
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-5),
        jax.device_get(found),
        jax.device_get(expected),
    )


LOADS = {
    "one": [[1, 1]] * ROWS,
    "none for two": [[0, 3]] * ROWS,
    "skewed": [[0, 1]] + [[2, 0]] * (ROWS - 1),
    "even": [[n % 4, (n + 1) % 4] for n in range(ROWS)],
    "dropped": [[-1, n % 6 - 1] for n in range(ROWS)],  # experts are 0 to 3
}


@pytest.mark.parametrize("load", LOADS)
def test_equal_to_the_dense_sum_with_gradients(fake: FakeLab, moe: Any, load: str) -> None:
    parameters, x, weights = made(0)
    choice = np.array(LOADS[load], np.int32)

    def loss(mix: Any, parameters: Any, x: Any, weights: Any) -> Any:
        y = mix(parameters, x, choice, weights)
        return (y**2).sum(), y

    there = pw.program(jax.grad(lambda *args: loss(moe, *args), (0, 1, 2), has_aux=True))
    x_there = pw.device_put(x, moe.on[0])
    fake.skipped.clear()
    found = there(parameters, x_there, weights)
    here = jax.grad(lambda *args: loss(dense, *args), (0, 1, 2), has_aux=True)
    equal(found, here(parameters, x, weights))
    assert found[1].slice is moe.on[0]
    assert [own["w"].slice for own in found[0][0]] == [*moe.on, moe.on[0]]


def halves(value: Any) -> list[Any]:
    return [value[:CUT], value[CUT:]]


@pytest.mark.parametrize("load", ["none for two", "skewed"])
def test_rows_of_two_senders_are_one_batch_with_gradients(moe: Any, load: str) -> None:
    parameters, x, weights = made(2)
    choice = np.array(LOADS[load], np.int32)

    def of_two(parameters: Any, xs: Any, weights: Any) -> Any:
        ys = moe(parameters, xs, halves(choice), weights)
        first, second = [(y**2).sum() for y in ys]
        return first + pw.device_put(second, moe.on[0]), ys

    def of_one(parameters: Any, x: Any, weights: Any) -> Any:
        y = dense(parameters, x, choice, weights)
        return (y**2).sum(), y

    places = [moe.on[0], moe.on[1]]
    xs, shares = pw.device_put((halves(x), halves(weights)), (places, places))
    there = pw.program(jax.grad(of_two, (0, 1, 2), has_aux=True))
    (experts, of_x, of_weights), ys = there(parameters, xs, shares)
    assert [y.slice for y in ys] == [y.slice for y in of_x] == places
    found = jax.device_get((experts, of_x, of_weights, ys))
    (experts, *of_rows), y = jax.grad(of_one, (0, 1, 2), has_aux=True)(parameters, x, weights)
    equal(found, (experts, *map(halves, of_rows), halves(y)))


def test_nothing_runs_for_an_expert_that_no_row_reaches(fake: FakeLab) -> None:
    place = [fake.slice(1) for _ in range(3)]
    apart = pw.experts(ffn, on=place[1:], route=lambda x: (jnp.zeros((len(x), 1), int), x[:, :1]))
    parameters, x, _ = made(1)
    fake.skipped.clear()
    y = apart(parameters[:2], pw.device_put(x, place[0]))
    equal(y, x[:, :1] * ffn(parameters[0], x))
    sizes = 4  # 1, 2, 4, 8 ... up to the rows
    assert fake.skipped.count("ffn") == 2 * sizes - 1
    assert fake.skipped.count("send rows") == 2 * sizes - 1
    moved = [name for name in fake.skipped if " to " in name]
    assert moved, "transfers are skipped too"


WRONG = {
    "not two arrays of shape": lambda x: (jnp.zeros(len(x), int), x[:, 0]),
    "numbers of experts are integers": lambda x: (x[:, :1], x[:, :1]),
}


@pytest.mark.parametrize("text", WRONG)
def test_a_router_of_another_shape_is_refused(fake: FakeLab, text: str) -> None:
    parameters, x, _ = made(1)
    place = fake.slice(1)
    wrong = pw.experts(ffn, on=[place], route=WRONG[text])
    with pytest.raises(pw.PathwaysError, match=text):
        wrong(parameters, pw.device_put(x, place))


def test_sizes_that_do_not_hold_all_rows_are_refused(fake: FakeLab) -> None:
    parameters, x, _ = made(1)
    place = fake.slice(1)
    small = pw.experts(
        ffn, on=[place], sizes=[4, 8], route=lambda x: (jnp.zeros((len(x), 1), int), x[:, :1])
    )
    with pytest.raises(pw.PathwaysError, match="sizes end at 8, and one expert may get 12 rows"):
        small(parameters, pw.device_put(x, place))
    x = pw.device_put(x, place)
    for xs, more, text in (([], [], "an empty list"), ([x, x], [x], "list of 2 arrays, and an")):
        with pytest.raises(pw.PathwaysError, match=text):
            small(parameters, xs, *more)
    with pytest.raises(pw.PathwaysError, match="there is at least one row"):
        small(parameters, pw.device_put(np.zeros((0, WIDTH), np.float32), place))
    with pytest.raises(pw.PathwaysError, match="are of different types"):
        small(parameters, [x, pw.device_put(np.zeros((2, 9), np.float32), place)])
    with pytest.raises(pw.PathwaysError, match="is no list of slices"):
        pw.experts(ffn, on=[3], route=len)  # type: ignore[list-item,arg-type]


@given(
    choice=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=ROWS),
    two=st.booleans(),
)
@settings(max_examples=30)
def test_any_choice(moe: Any, choice: list[tuple[int, int]], two: bool) -> None:
    parameters, x, weights = made(len(choice))
    rows = np.resize(np.array(choice, np.int32), (ROWS, 2))
    if two:
        there = pw.device_put(halves(x), [moe.on[2], moe.on[1]])
        found = np.concatenate(
            jax.device_get(moe(parameters, there, halves(rows), halves(weights)))
        )
    else:
        found = moe(parameters, pw.device_put(x, moe.on[0]), rows, weights)
    equal(found, dense(parameters, x, rows, weights))
