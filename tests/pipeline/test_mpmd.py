"""A training step written for one device computes the same in fragments on many slices."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pathways_lab as pw
from pathways_lab.client.lab import stats
from pathways_lab.core.errors import PathwaysError
from pathways_lab.pipeline.schedules import SCHEDULES
from tests.pipeline.mpmd_kit import (
    LOOPS,
    OPTIMIZER,
    PARAMETERS,
    X,
    Y,
    check_steps,
    compiled,
    composed,
    dense,
    first,
    layer,
    loss,
    named,
    parts_of,
    scan,
    second,
    third,
    turns,
    weights,
)


@pytest.mark.parametrize("loop", LOOPS)
def test_every_loop_and_schedule_equals_one_device(loop: str) -> None:
    on = parts_of("a", "b", "c")
    schedules = (None, "gpipe", "1f1b") if loop == "scan" else ("1f1b",)
    steps = check_steps(LOOPS[loop](loss, 4), PARAMETERS, (X, Y), on, schedules)
    for step in steps:
        # What does not depend on the microbatch JAX takes out of a scan.
        own = [f for f in step.fragments if f.microbatch is not None]
        found = [(f.part, f.kind, f.microbatch) for f in own]
        assert len(found) == len(set(found)) == 3 * 4 * 2
    # The order of one slice is the schedule's.
    middle = [(kind[0], m) for part, kind, m in found if part == "b"]
    order = [("f", 0), ("f", 1), ("b", 0), ("f", 2), ("b", 1), ("f", 3), ("b", 2), ("b", 3)]
    assert middle == order


@pytest.mark.parametrize("loop", LOOPS)
def test_gradients_are_summed_where_and_when_they_are_made(loop: str) -> None:
    """Also where JAX counts microbatches down; the last sum is done with the optimizer."""
    step = pw.mpmd.jit(LOOPS[loop](loss, 4), on=parts_of("a", "b", "c"), schedule="1f1b")
    found = step.partition(PARAMETERS, OPTIMIZER.init(PARAMETERS), X, Y)
    own = [n for n in found.nodes if (n.fragment.kind, n.fragment.part) == ("backward", "b")]
    assert [n.fragment.microbatch for n in own] == [0, 1, 2, 3]
    assert own[0].fragment.bytes_in == own[3].fragment.bytes_in
    assert own[1].function is own[2].function
    total = sum(leaf.nbytes for leaf in jax.tree.leaves(PARAMETERS["b"]))
    assert own[1].fragment.bytes_in == own[0].fragment.bytes_in + total


def test_equations_without_a_mark_run_where_least_is_moved_for_them() -> None:
    def language(parameters: Any, tokens: Any, labels: Any) -> Any:
        h = parameters["table"][tokens]  # no mark, here and in the last line
        h = first(parameters["a"], h)
        scores = jax.nn.log_softmax(second(parameters["b"], h) @ parameters["table"].T)
        return -jnp.mean(jnp.take_along_axis(scores, labels[..., None], -1))

    parameters = {"table": weights(99, 8), "a": layer(8, 8), "b": layer(8, 8)}
    tokens = np.zeros((8, 16), np.int32)
    on = parts_of("a", "b")
    step = pw.mpmd.jit(turns(language, 4), on=on, schedule="1f1b")
    found = step.partition(parameters, OPTIMIZER.init(parameters), tokens, tokens)
    # The table is larger than the rows of a microbatch, and goes to the last part once for all.
    assert {n.fragment.kind for n in found.nodes} == {"inputs", "forward", "backward", "update"}
    ends = [n.fragment for n in found.nodes if n.fragment.name == "forward_b"]
    assert all(f.bytes_in > parameters["table"].nbytes for f in ends)

    def both(parameters: Any, x: Any, y: Any) -> Any:
        one = jax.grad(lambda p: jnp.sum(first(p, x)))(parameters)
        other = jax.grad(lambda p: jnp.sum(second(p, y)))(parameters)
        return jax.tree.map(lambda p, a, b: p - (a + b), parameters, one, other)

    found = pw.mpmd.jit(both, on=on).partition(layer(6, 4), X, Y)
    assert {ref.slice for ref in found.results} == {on["a"]}
    assert not found.moves


def test_a_state_that_is_made_elsewhere_goes_home() -> None:
    def step(state: Any, x: Any) -> Any:
        h = first({"w": state[0], "b": state[1]}, x)
        mask, other = named("b", lambda h: (h > 0, h * 2))(h)
        return [jnp.where(mask, state[0], other), state[1]]

    on, square = parts_of("a", "b"), layer(6, 6)
    found = pw.mpmd.jit(step, on=on).partition([square["w"], square["b"]], weights(6, 6))
    assert found.results[0].slice is on["b"]
    assert found.moves == {0: on["a"]}


def test_zero_bubble_leaves_the_gradients_of_parameters_for_later() -> None:
    on = parts_of("a", "b", "c")
    args = PARAMETERS, OPTIMIZER.init(PARAMETERS), X, Y
    (step,) = check_steps(scan(loss, 4), PARAMETERS, (X, Y), on, ("zero-bubble",))
    found = step.partition(*args).nodes
    work = [(f.fragment.kind, f.fragment.part, f.fragment.microbatch) for f in found]
    for part in "bc":
        order = [(kind[0], m) for kind, own, m in work if own == part and kind != "forward"]
        assert order.index(("b", 1)) < order.index(("w", 0)) < order.index(("w", 3))
    # Nobody waits for a gradient of the first part: all of it is in its second half.
    assert not any(work[:2] == ("backward", "a") for work in work)
    (own,) = {f.function for f in found if f.fragment.name == "backward_c"}
    assert {ref.type.shape for f in found if f.function is own for ref in f.outputs} == {
        (2, 8), (2, 6)
    }  # fmt: skip


@pytest.mark.parametrize("name", ["interleaved", "dualpipev"])
def test_parts_that_share_a_slice_take_turns_as_their_schedule_says(name: str) -> None:
    one, other = parts_of("one", "other").values()

    def chain(parameters: Any, x: Any, y: Any) -> Any:
        for number, own in enumerate(parameters):
            x = named(f"part{number}", dense)(own, x)
        return jnp.mean((x - y) ** 2)

    parameters = [layer(6, 6, seed) for seed in range(4)]
    table = SCHEDULES[name](2, 4)
    on = {f"part{stage}": (one, other)[row] for stage, row in enumerate(table.slices)}
    (step,) = check_steps(scan(chain, 4), parameters, (X, Y), on, (name,))
    # All of the first part's backward work is in its weights: nobody waits for its input's slope.
    wanted = [
        (f"part{task.stage}", task.kind, task.microbatch)
        for task in table.order[0]
        if not (table.split and task.stage == 0 and task.kind == "backward")
    ]
    marked = [f for f in step.fragments if f.slice is one and f.microbatch is not None]
    assert [(f.part, f.kind, f.microbatch) for f in marked] == wanted


def test_microbatches_are_told_from_what_calls_need_of_each_other() -> None:
    def twin(parameters: Any, x: Any, y: Any) -> Any:
        one, other = first(parameters["a"], x), first(parameters["a"], y)
        return jnp.mean(third(parameters["c"], second(parameters["b"], one) - other) ** 2)

    def running(parameters: Any, memory: Any, mean: Any, x: Any, y: Any) -> Any:
        """A mean over the microbatches so far, as of a batch norm."""
        slopes = jax.tree.map(jnp.zeros_like, parameters)
        for rows in x.reshape(4, 2, 6):
            mean = named("mean", lambda old, x: 0.9 * old + 0.1 * x.mean(0))(mean, rows)
            more = jax.grad(loss)(parameters, rows - mean, y[:2])
            slopes = jax.tree.map(jnp.add, slopes, more)
        return slopes, memory, mean

    memory, on = OPTIMIZER.init(PARAMETERS), parts_of("a", "b", "c")
    two = pw.mpmd.jit(turns(twin, 2), on=on, schedule="gpipe").partition(PARAMETERS, memory, X, Y)
    assert two.microbatches == 2
    first_part = [n.fragment for n in two.nodes if n.fragment.part == "a"]
    assert [f.microbatch for f in first_part if f.kind == "forward"] == [0, 0, 1, 1]

    args = PARAMETERS, memory, np.zeros(6, np.float32), X, Y
    step = pw.mpmd.jit(running, on={"mean": on["a"], **on}, schedule="1f1b")
    found = step.partition(*args)
    assert found.microbatches == 4
    means = [n.fragment.microbatch for n in found.nodes if n.fragment.part == "mean"]
    assert means == [0, 1, 2, 3]
    got, expected = composed(step)(*args), compiled(running)(*args)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), got, expected)
    # What it waits for is the step's own: the mean has no backward work.
    assert step.planned().bubble > pw.pipeline.one_forward_one_backward(3, 4).timed().bubble
    with pytest.raises(PathwaysError, match="has no schedule yet"):
        pw.mpmd.jit(running, on=on).planned()


def test_more_microbatches_are_no_more_functions_to_compile() -> None:
    def functions(microbatches: int) -> int:
        batch = X.repeat(2, 0), Y.repeat(2, 0)
        step = pw.mpmd.jit(turns(loss, microbatches), on=on, schedule="1f1b")
        found = step.partition(PARAMETERS, OPTIMIZER.init(PARAMETERS), *batch)
        return len({node.function for node in found.nodes})

    on = parts_of("a", "b", "c")
    assert functions(8) == functions(4)


def test_equal_parts_on_slices_of_one_shape_are_exported_once() -> None:
    def exported(count: int) -> int:
        def chain(parameters: Any, x: Any, y: Any) -> Any:
            for part, own in zip(on, parameters, strict=True):
                x = named(part, dense)(own, x)
            return jnp.mean((x - y) ** 2)

        on = parts_of(*(f"part{number}" for number in range(count)))
        parameters = [layer(6, 6, seed) for seed in range(count)]
        before = stats.work.exported
        step = pw.mpmd.jit(jax.grad(chain), on=on)
        step.capture(parameters, X, Y)
        assert {f.name for f in step.fragments if f.kind == "forward"} == {
            f"forward_{part}" for part in on
        }
        return stats.work.exported - before

    assert exported(5) == exported(4)


def test_a_tied_weight_lives_where_it_is_read_first_and_is_summed_there() -> None:
    def tied(parameters: Any, tokens: Any, labels: Any) -> Any:
        def embed(table: Any, tokens: Any) -> Any:
            return table[tokens]

        def block(own: Any, h: Any) -> Any:
            scores = jax.nn.softmax(h @ h.swapaxes(-1, -2) / 3)
            return h + jnp.tanh(scores @ h @ own["w"] + own["b"])

        def head(table: Any, h: Any, labels: Any) -> Any:
            scores = jax.nn.log_softmax(h @ table.T)
            return -jnp.mean(jnp.take_along_axis(scores, labels[..., None], -1))

        h = named("embed", embed)(parameters["table"], tokens)
        h = named("blocks", jax.checkpoint(block))(parameters["one"], h)
        h = jax.checkpoint(named("blocks", block))(parameters["two"], h)
        return named("head", head)(parameters["table"], h, labels)

    parameters = {"table": weights(11, 8), "one": layer(8, 8, 1), "two": layer(8, 8, 2)}
    tokens = np.arange(8 * 5, dtype=np.int32).reshape(8, 5) % 11
    batch = tokens, np.roll(tokens, 1, 1)
    on = parts_of("embed", "blocks", "head")
    for step in check_steps(turns(tied, 2), parameters, batch, on, (None, "1f1b")):
        found = step.partition(parameters, OPTIMIZER.init(parameters), *batch)
        table = parameters["table"].shape
        places = {ref.slice for ref in found.inputs if ref.type.shape == table}
        places |= {x.slice for x in found.results if x.type.shape == table}
        assert places == {on["embed"]}
        assert found.microbatches == 2
        assert not found.moves


def test_two_towers_with_keys_auxiliary_losses_and_mixed_precision() -> None:
    def towers(parameters: Any, left: Any, right: Any, key: Any) -> Any:
        half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), parameters["left"])
        keep = jax.random.bernoulli(jax.random.fold_in(key[0], 1), 0.8, left.shape)
        one = named("left", dense)(half, (left * keep).astype(jnp.bfloat16))
        other, balance = named("right", lambda p, x: (dense(p, x), jnp.mean(p["w"] ** 2)))(
            parameters["right"], right
        )
        scores = named("joint", lambda t, a, b: (a @ b.T) * jnp.exp(t))(
            parameters["t"], one.astype(jnp.float32), other
        )
        return -jnp.mean(jnp.diag(jax.nn.log_softmax(scores))) + 0.1 * balance

    parameters = {"left": layer(6, 4), "right": layer(6, 4, 1), "t": np.float32(0)}
    batch = X, Y, jax.random.split(jax.random.key(3), 2)
    on = parts_of("left", "right", "joint")
    for step in check_steps(turns(towers, 2), parameters, batch, on, (None, "gpipe")):
        # The towers do not wait for each other.
        halves = [f.part for f in step.fragments if f.kind == "forward" and f.microbatch == 0]
        assert set(halves[:2]) == {"left", "right"}


def towers_of_two(parameters: Any, left: Any, right: Any) -> Any:
    for part in ("left0", "left1"):
        left = named(part, dense)(parameters[part], left)
    for part in ("right0", "right1"):
        right = named(part, dense)(parameters[part], right)
    return named("joint", lambda t, a, b: jnp.mean((a - b) ** 2) * jnp.exp(t))(
        parameters["t"], left, right
    )


TOWERS = {
    **{name: layer(6, 6, seed) for seed, name in enumerate(("left0", "left1", "right0", "right1"))},
    "t": np.float32(0),
}


def test_each_tower_has_a_schedule_of_its_own() -> None:
    on = parts_of("left0", "left1", "right0", "right1", "joint")
    left, right = ("left0", "left1"), ("right0", "right1")
    deep = pw.pipeline.Comparison(lambda task, other: task.microbatch < other.microbatch)
    mixed = {left: "1f1b", right: "gpipe", "joint": "1f1b"}
    both = {left: deep, right: "gpipe", ("joint",): "1f1b"}
    steps = check_steps(turns(towers_of_two, 4), TOWERS, (X, Y), on, (mixed, deep, both))
    args = TOWERS, OPTIMIZER.init(TOWERS), X, Y
    table, by_comparison = (step.partition(*args).schedule for step in steps[:2])
    assert table.name == "left0: 1f1b, right0: gpipe, joint: 1f1b"
    rows = [" ".join(str(task) for task in row) for row in table.order]
    assert rows[1] == "F0/1 B0/1 F1/1 B1/1 F2/1 B2/1 F3/1 B3/1"
    assert rows[3] == "F0/3 F1/3 F2/3 F3/3 B0/3 B1/3 B2/3 B3/3"
    # By comparison: the towers are side by side, since neither needs the other.
    slots = by_comparison.timed().slots
    assert {slot.task.stage for slot in slots if slot.start == 0} == {0, 2}
    apart = {left: "zero-bubble", right: "zero-bubble", "joint": "zero-bubble"}
    check_steps(turns(towers_of_two, 4), TOWERS, (X, Y), on, (apart,))


@pytest.mark.parametrize(
    ("schedule", "why"),
    [
        ({("left0", "left1"): "1f1b"}, "no tower has 'right0', 'right1', 'joint'"),
        ({("left0", "what"): "1f1b"}, "name 'what', which `on` does not list"),
        ({("left0", "left1"): "1f1b", "left0": "1f1b"}, "'left0' for a second time"),
        ({(): "1f1b"}, "name no part"),
        ({"left0": "zero-bubble", "left1": "1f1b"}, "in all towers or in none"),
        ({("left0", "left1"): "what"}, "no schedule called 'what'"),
        (
            {("left0", "left1"): "1f1b", ("right0", "right1"): "gpipe", "joint": "gpipe"},
            "it would hang: B0/1 needs the result of B0/4",
        ),
    ],
)
def test_towers_that_do_not_fit_are_refused(schedule: Any, why: str) -> None:
    on = parts_of("left0", "left1", "right0", "right1", "joint")
    step = pw.mpmd.jit(turns(towers_of_two, 4), on=on, schedule=schedule)
    with pytest.raises(pw.PathwaysError, match=why):
        step.partition(TOWERS, OPTIMIZER.init(TOWERS), X, Y)


def test_towers_on_one_slice_are_refused() -> None:
    on = parts_of("left0", "left1", "right0", "joint")
    on["right1"] = on["left1"]
    towers = {("left0", "left1"): "1f1b", ("right0", "right1"): "1f1b", "joint": "1f1b"}
    step = pw.mpmd.jit(jax.value_and_grad(towers_of_two), on=on, schedule=towers)
    with pytest.raises(pw.PathwaysError, match="'left0' and 'right1' share slice"):
        step.partition(TOWERS, X, Y)


def test_equinox_modules_and_arrays_from_outside() -> None:
    eqx = pytest.importorskip("equinox")
    positions = weights(300, 4)  # too large to be part of the code

    class Net(eqx.Module):  # type: ignore[misc, name-defined]
        one: Any
        two: Any

        def __call__(self, x: Any) -> Any:
            h = named("one", jax.vmap(self.one))(x)
            return named("two", lambda net, h: jax.vmap(net)(h))(self.two, jnp.tanh(h))

    keys = jax.random.split(jax.random.key(0))
    net = Net(eqx.nn.Linear(6, 4, key=keys[0]), eqx.nn.MLP(4, 6, 8, 1, key=keys[1]))
    parameters, rest = eqx.partition(net, eqx.is_array)

    def error(parameters: Any, x: Any, y: Any) -> Any:
        made = eqx.combine(parameters, rest)(x)
        return (
            jnp.mean((made - y) ** 2)
            + jnp.sum(made[:, :4] * jnp.mean(jnp.asarray(positions)[:2], 0)) * 1e-2
        )

    on = parts_of("one", "two")
    (step,) = check_steps(scan(error, 2), parameters, (X, Y), on, ("1f1b",))
    found = step.partition(parameters, OPTIMIZER.init(parameters), X, Y)
    assert [ref.type.shape for ref in found.constants] == [(300, 4)]


def test_what_does_not_fit_is_refused() -> None:
    on = parts_of("a", "b", "c")

    def step(train_step: Any = None, **options: Any) -> Any:
        train_step = train_step or turns(loss, 4)
        made = pw.mpmd.jit(train_step, **{"on": on, **options})
        return made.partition(PARAMETERS, OPTIMIZER.init(PARAMETERS), X, Y)

    with pytest.raises(PathwaysError, match="part 'c' is marked in the step, and `on` has no"):
        step(on={part: on[part] for part in "ab"})
    with pytest.raises(PathwaysError, match=r"nothing that the step needs is marked as 'd'"):
        step(on={**on, "d": on["a"]})
    with pytest.raises(PathwaysError, match="does not say for each part"):
        step(on={"a": 3})
    with pytest.raises(PathwaysError, match="no schedule called '2f2b'"):
        step(schedule="2f2b")
    with pytest.raises(PathwaysError, match="3 stages and 2 microbatches, and the step has 3"):
        step(schedule=pw.pipeline.gpipe(3, 2))
    with pytest.raises(PathwaysError, match="places of arguments follow from marks"):
        step(in_shardings=on["a"].sharding())
    hangs = pw.pipeline.Schedule.read(
        "mine",
        """
        F0 F1 F2 F3 B0 B1 B2 B3
        F0 F1 F2 B0 F3 B1 B2 B3
        F3 B3 F0 F1 F2 B0 B1 B2
        """,
    )
    with pytest.raises(PathwaysError, match="it would hang"):
        step(schedule=hangs)
    swapped = {"a": on["a"], "b": on["b"], "c": on["a"]}
    with pytest.raises(PathwaysError, match="has parts 'a' and 'b' on one slice"):
        step(on=swapped, schedule=pw.pipeline.Schedule("s", 4, (0, 0, 1), ()))

    def hidden(parameters: Any, memory: Any, x: Any, y: Any) -> Any:
        return jax.lax.while_loop(
            lambda h: h[0, 0] < 0,
            lambda h: first(parameters["a"], h[:, :6]),
            first(parameters["a"], x),
        )

    with pytest.raises(PathwaysError, match="part 'a' is marked inside of while"):
        step(hidden)


def test_marks_change_nothing_without_slices_and_keep_what_is_no_array() -> None:
    def scaled(x: Any, how: str, times: int) -> Any:
        return {"x": x * times if how == "times" else x, "how": how}

    got = named("a", scaled)(X, "times", times=2)
    assert got["how"] == "times"
    np.testing.assert_array_equal(got["x"], X * 2)
    assert named("a", scaled)(X, "not", times=2)["x"].shape == X.shape
    with pytest.raises(PathwaysError, match="a part has a name and a function"):
        named("", scaled)
