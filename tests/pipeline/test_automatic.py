"""A pipelined model computes what the model computes, whatever its schedule."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pathways_lab as pw
from pathways_lab.client.lab.devices import Slice
from pathways_lab.core.errors import PathwaysError
from pathways_lab.core.program.program import Call
from tests.client.kit import FakeLab

RNG = np.random.default_rng(0)
RATE = 0.1


class Descent:
    """Gradient descent with momentum, in optax's form."""

    def init(self, parameters: Any) -> Any:
        return jax.tree.map(jnp.zeros_like, parameters)

    def update(self, gradient: Any, memory: Any, parameters: Any) -> tuple[Any, Any]:
        memory = jax.tree.map(lambda m, g: 0.9 * m + g, memory, gradient)
        return jax.tree.map(lambda m: -RATE * m, memory), memory


def dense(parameters: Any, x: Any) -> Any:
    return jnp.tanh(x @ parameters["w"] + parameters["b"])


def layer(inputs: int, outputs: int) -> tuple[Callable[[Any, Any], Any], Any]:
    weights = RNG.normal(0, 0.4, (inputs, outputs)).astype(np.float32)
    return dense, {"w": weights, "b": np.zeros(outputs, np.float32)}


LAYERS = [layer(6, 8), layer(8, 8), layer(8, 8), layer(8, 4)]
X = RNG.normal(size=(8, 6)).astype(np.float32)
LABELS = RNG.normal(size=(8, 4)).astype(np.float32)


def loss(y: Any, labels: Any) -> Any:
    return jnp.mean((y - labels) ** 2)


def plain(steps: int) -> tuple[list[Any], list[float]]:
    """The same training in plain JAX: parameters and losses."""
    optimizer = Descent()

    def whole(parameters: list[Any]) -> Any:
        x = X
        for (function, _), own in zip(LAYERS, parameters, strict=True):
            x = function(own, x)
        return loss(x, LABELS)

    parameters: list[Any] = [own for _, own in LAYERS]
    memory, losses = optimizer.init(parameters), []
    for _ in range(steps):
        value, gradient = jax.value_and_grad(whole)(parameters)
        changes, memory = optimizer.update(gradient, memory, parameters)
        parameters = jax.tree.map(jnp.add, parameters, changes)
        losses.append(float(value))
    return parameters, losses


def make(slices: list[Slice], schedule: Any = "1f1b", **options: Any) -> Any:
    given = {"loss": loss, "optimizer": Descent(), "example": X[:2], "microbatches": 4} | options
    return pw.pipeline(LAYERS, slices, schedule=schedule, **given)


def test_schedules_of_each_kind_equal_plain_jax(fake: FakeLab) -> None:
    slices = [fake.slice(1, axes=("data",), island=f"island{n}") for n in range(2)]
    expected, curve = plain(steps=2)
    for schedule in ("gpipe", "circular", "eager-1f1b", "zb-h2", "dualpipev"):
        pipe = make(slices, schedule)
        state, losses = pipe.init(), []
        for _ in curve:
            state, value = pipe.step(state, X, LABELS)
            losses.append(float(value))
        np.testing.assert_allclose(losses, curve, rtol=1e-5)
        got = jax.device_get(pipe.parameters(state))
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6),
                     got, expected)  # fmt: skip
    # Another order of the same stages is the same code, and that is there already.
    before = fake.count("function")
    again = make(slices, "1f1b")
    again.step(again.init(), X, LABELS)
    assert fake.count("function") == before


def test_parameters_are_kept_once_and_not_for_every_microbatch(fake: FakeLab) -> None:
    slices = [fake.slice(1, axes=("data",), island=f"island{n}") for n in range(2)]
    pipe = make(slices, "gpipe")
    program = pipe.program.capture(pipe.init(), X, LABELS)
    prepared = program.prepared
    assert prepared is not None
    forward = [
        s.node
        for s in prepared.plan.steps
        if isinstance(s.node, Call) and s.node.name.startswith("forward")
    ]
    weights = {(6, 8), (8, 8), (8, 4)}
    for node in forward:
        made = {prepared.plan.values[v].shape for v in node.outputs}
        assert not made & weights


def test_more_microbatches_are_no_more_functions_to_compile(fake: FakeLab) -> None:
    slices = [fake.slice(1, axes=("data",), island=f"island{n}") for n in range(2)]

    def functions(microbatches: int) -> list[str]:
        batch = X.repeat(microbatches, 0), LABELS.repeat(microbatches, 0)
        pipe = make(slices, "gpipe", microbatches=microbatches)
        prepared = pipe.program.capture(pipe.init(), *batch).prepared
        assert prepared is not None
        return sorted(code.name for code, _ in prepared.functions)

    assert functions(4) == functions(8)


def test_the_program_follows_the_schedule(fake: FakeLab) -> None:
    slices = [fake.slice(1, axes=("data",), island=f"island{n}") for n in range(2)]
    drawn = pw.pipeline.Schedule.read(
        "mine",
        """
        F0 F1 .  .  B1 B0
        .  F0 F1 B1 B0
        """,
    )
    pipe = make(slices, drawn)
    prepared = pipe.program.capture(pipe.init(), X, LABELS).prepared
    assert prepared is not None
    names = [s.node.name for s in prepared.plan.steps]
    for stage in range(2):
        own = [n for n in names if n in (f"forward_stage{stage}", f"backward_stage{stage}")]
        assert own == [f"forward_stage{stage}"] * 2 + [f"backward_stage{stage}"] * 2


def test_what_cannot_be_is_refused_before_anything_runs(fake: FakeLab) -> None:
    one = fake.slice(1, axes=("data",))
    with pytest.raises(PathwaysError, match="no schedule called 'pipedream'"):
        make([one], "pipedream")
    with pytest.raises(PathwaysError, match="cannot be cut into 5 stages"):
        make([one] * 5, "gpipe")
    with pytest.raises(PathwaysError, match=r"2\.5 microbatches: both are whole numbers"):
        make([one], "gpipe", microbatches=2.5)
    hangs = pw.pipeline.Schedule.read("bad", "F0 B0 F1 B1\nF1 F0 B1 B0")
    with pytest.raises(PathwaysError, match="would hang"):
        make([one, one], hangs)
    with pytest.raises(PathwaysError, match="for 1 slices, not for 2"):
        make([one, one], pw.pipeline.Schedule.read("one", "F0 B0"))
    with pytest.raises(PathwaysError, match="3 costs for 4 layers"):
        make([one], "gpipe", costs=[1, 2, 3])
    pipe = make([one], "gpipe")
    with pytest.raises(PathwaysError, match=r"shape \(7, 6\) cannot be cut into 4"):
        pipe.step(pipe.init(), X[:7], LABELS[:7])
    with pytest.raises(PathwaysError, match="different numbers of examples"):
        pipe.step(pipe.init(), X[:8], LABELS[:4])  # one label for each microbatch broadcasts
    assert fake.connection.traffic.sent["submit"] == 2  # the optimizer's memory


def test_what_is_refused_names_the_users_line_and_so_do_nodes(fake: FakeLab) -> None:
    one = fake.slice(1, axes=("data",))
    pipe = make([one], "gpipe")
    state = pipe.init()
    tries: list[Callable[[], Any]] = [
        lambda: make([one] * 5, "gpipe"),
        lambda: make([one], "pipedream"),
        lambda: make([one, one], pw.pipeline.Schedule.read("bad", "F0 B0 F1 B1\nF1 F0 B1 B0")),
        lambda: pw.pipeline(5, [one], loss=loss, optimizer=Descent(), example=X),  # type: ignore[arg-type]
        lambda: pw.data_parallel(LAYERS, [], loss=loss, optimizer=Descent(), example=X),
        lambda: pipe.step(state, X[:7], LABELS[:7]),
    ]
    for refused in tries:
        with pytest.raises(PathwaysError) as caught:
            refused()
        assert caught.value.failure.line.file == __file__
    prepared = pipe.program.capture(state, X, LABELS).prepared
    assert prepared is not None
    assert {s.node.line.file for s in prepared.plan.steps} == {__file__}


@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble", "interleaved"])
def test_integers_may_go_from_layer_to_layer(fake: FakeLab, schedule: str) -> None:
    """Positions, masks, tokens that a later layer looks at: they have no gradient."""
    slices = [fake.slice(1) for _ in range(2)]

    def embed(own: Any, tokens: Any) -> Any:
        return own[tokens], tokens

    def mix(own: Any, x: Any) -> Any:
        h, tokens = x
        return jnp.tanh(h @ own) * (tokens > 0)[:, None], tokens

    def head(own: Any, x: Any) -> Any:
        return x[0] @ own

    table = RNG.normal(size=(5, 4)).astype(np.float32)
    square = RNG.normal(size=(4, 4)).astype(np.float32)
    layers = [(embed, table), (mix, square), (mix, square.T.copy()), (head, square[:, :2].copy())]
    tokens, labels = np.arange(8, dtype=np.int32) % 5, LABELS[:, :2]

    def whole(parameters: Any) -> Any:
        x: Any = tokens
        for (layer, _), own in zip(layers, parameters, strict=True):
            x = layer(own, x)
        return loss(x, labels)

    first = [own for _, own in layers]
    value, gradient = jax.value_and_grad(whole)(first)
    pipe = pw.pipeline(
        layers, slices, loss=loss, optimizer=Descent(), example=tokens[:2], schedule=schedule,
        microbatches=4,
    )  # fmt: skip
    state, got = pipe.step(pipe.init(), tokens, labels)
    np.testing.assert_allclose(got.result(), value, rtol=1e-5)
    for own, before, slope in zip(pipe.parameters(state), first, gradient, strict=True):
        np.testing.assert_allclose(own.result(), before - RATE * slope, rtol=1e-5, atol=1e-6)


def test_it_shows_its_stages_and_its_bubble(fake: FakeLab) -> None:
    pipe = make([fake.slice(1), fake.slice(1)], costs=[1, 1, 1, 1])
    text = repr(pipe)
    assert "stage 1 on s2 (island0): layers 2 to 3" in text
    assert "1f1b: bubble 20.0%" in text
