"""What was taken from another client is a value like any other, and a tree stays a tree."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import pathways_lab as pw
from pathways_lab.client.lab import sharing
from pathways_lab.client.session.descriptions import describe, read
from pathways_lab.client.session.handles import Handle
from tests.client.kit import FakeLab

X = np.arange(4, dtype=np.float32)


@pytest.fixture
def own(fake: FakeLab) -> Handle:
    made: Handle = pw.device_put(X, fake.slice(2)).block_until_ready()
    return made


@pytest.fixture
def taken(fake: FakeLab, own: Handle) -> Handle:
    """Of another client: nothing is computed where it is."""
    sharing.publish(fake.session, "w", pw.device_put(10 * X, own.slice).block_until_ready())
    made: Handle = sharing.take(fake.session, "w")
    return made


# --- where it is computed with --------------------------------------------------------------


def first(f: Any, t: Any, h: Any) -> Any:
    return f(t) + f(h)


def alone(f: Any, t: Any, h: Any) -> Any:
    return f(t) - t


def added(f: Any, t: Any, h: Any) -> Any:
    return t + h, h + t


def apart(f: Any, t: Any, h: Any) -> Any:
    return -t * 2, f(h)


@pytest.mark.parametrize("work", [first, alone, added, apart])
@pytest.mark.parametrize("closed", [False, True], ids=["argument", "closed over"])
def test_a_taken_value_goes_where_it_is_needed(
    taken: Handle, own: Handle, work: Callable[..., Any], closed: bool
) -> None:
    f = pw.jit(lambda a: 2 * a, on=own.slice)
    if closed:
        made = pw.program(lambda: work(f, taken, own))()
    else:
        made = pw.program(lambda t, h: work(f, t, h))(taken, own)
    wanted = work(lambda a: 2 * a, 10 * X, X)
    for leaf, value in zip(jax.tree.leaves(made), jax.tree.leaves(wanted), strict=True):
        assert leaf.slice is own.slice
        np.testing.assert_allclose(leaf.result(), value, rtol=1e-6)


def test_outside_of_programs_the_other_values_say_where(taken: Handle, own: Handle) -> None:
    add = pw.jit(jnp.add)
    for made in (add(taken, own), add(own, taken), taken + own, own + taken):
        assert made.slice is own.slice
        np.testing.assert_array_equal(made.result(), 11 * X)


def test_where_nothing_says_it_the_way_out_is_said(taken: Handle, own: Handle) -> None:
    with pytest.raises(pw.PathwaysError, match="another client's slice") as caught:
        taken + 1
    assert "pw.device_put(h, slice)" in caught.value.failure.remedy
    with pytest.raises(pw.PathwaysError, match="a result has no place"):
        pw.program(lambda t: t + 1)(taken)
    made = pw.program(lambda t: t + 1, on=own.slice)(taken)
    np.testing.assert_array_equal(made.result(), 10 * X + 1)
    assert pw.program(lambda t: t)(taken) is taken


# --- trees ------------------------------------------------------------------------------------


def test_a_tree_comes_as_it_went(fake: FakeLab, own: Handle, taken: Handle) -> None:
    tree = {"w": own, "list": [own + 1, (taken, None)], "none": {}}
    sharing.publish(fake.session, "tree", jax.tree.map(Handle.block_until_ready, tree))
    got = sharing.take(fake.session, "tree")
    assert jax.tree.structure(got) == jax.tree.structure(tree)
    assert [h.name for h in jax.tree.leaves(got)] == [
        "tree['list'][0]", "tree['list'][1][0]", "tree['w']",
    ]  # fmt: skip
    np.testing.assert_array_equal(got["list"][0].result(), X + 1)
    assert got["w"].slice is got["list"][0].slice, "one slice for all that lie on it"


def test_the_state_of_a_training_comes_as_it_went(fake: FakeLab, own: Handle) -> None:
    memory = optax.adamw(1e-3).init({"w": X})
    state = {"w": own}, jax.tree.map(lambda leaf: pw.device_put(leaf, own.slice), memory), 3, "warm"
    sharing.publish(fake.session, "state", state)
    got = sharing.take(fake.session, "state")
    assert jax.tree.structure(got) == jax.tree.structure(state)
    assert type(got[1][0]) is optax.ScaleByAdamState
    assert got[2:] == (3, "warm")
    np.testing.assert_array_equal(got[1][0].mu["w"], 0 * X)


def test_a_class_that_is_not_imported_here_is_named_and_none_is_run(
    fake: FakeLab, own: Handle
) -> None:
    sharing.publish(fake.session, "w", own)
    stored, about = fake.published["w"]
    for name, match in (
        ("gone.from_here:State", "State of gone.from_here, which is not imported.*import gone"),
        ("optax:Nothing", "Nothing of optax"),
        ("builtins:list", "described wrongly.*no named tuple of 1"),
        ("optax._src.base:EmptyState", "described wrongly.*no named tuple of 1"),
        ("os:system", "described wrongly.*no named tuple"),
    ):
        told = json.loads(about) | {"shape": [name, [0]]}
        fake.published["w"] = stored, json.dumps(told).encode()
        with pytest.raises(pw.PathwaysError, match=rf"(?s){match}"):
            sharing.take(fake.session, "w")


def test_what_cannot_be_described_is_refused_with_the_way_out(fake: FakeLab, own: Handle) -> None:
    for tree in (X, {"a": own, 1: own}, {"a": X}, {(1, 2): own}, Odd(own)):
        with pytest.raises(TypeError, match=r"jax.tree.leaves\(tree\)"):
            sharing.publish(fake.session, "tree", tree)


class Odd(list[Any]):
    def __init__(self, handle: Handle) -> None:
        super().__init__([handle])


@pytest.mark.parametrize(
    "change",
    [
        {"shape": 1}, {"shape": -1}, {"shape": True}, {"shape": "x"}, {"shape": ["set", [0]]},
        {"shape": ["value", []]}, {"shape": ["dict", [[[1], 0]]]},
        {"shape": ["dict", [["a", 0], [1, 0]]]},
        {"leaves": []}, {"leaves": [1]}, {"leaves": [0.0]}, {"leaves": 3},
        {"kinds": [[["x"], "float32", False, None]]}, {"kinds": [[[4]]]}, {"kinds": 0},
    ],
)  # fmt: skip
def test_a_wrong_description_is_said_and_leaves_nothing(
    fake: FakeLab, own: Handle, change: dict[str, Any]
) -> None:
    sharing.publish(fake.session, "w", own)
    stored, about = fake.published["w"]
    fake.published["w"] = stored, json.dumps(json.loads(about) | change).encode()
    with pytest.raises(pw.PathwaysError, match="described wrongly"):
        sharing.take(fake.session, "w")


def test_a_description_cannot_be_too_deep(own: Handle) -> None:
    _, about = describe(own)
    deep = about.replace(
        b'"shape": 0', b'"shape": ' + 99_999 * b'["list", [' + b"0" + 99_999 * b"]]"
    )
    assert deep != about
    with pytest.raises(RecursionError):
        read(deep, 1)


# --- waiting for a publication ------------------------------------------------------------------


def test_a_taker_waits_for_the_name(fake: FakeLab, own: Handle) -> None:
    """Whoever waits hears it from the lab, not by asking again."""
    got: list[Any] = []
    waiting = threading.Thread(target=lambda: got.append(sharing.take(fake.session, "w", None)))
    waiting.start()
    fake.settle()
    assert not got
    assert not fake.count("named")
    sharing.publish(fake.session, "w", own)
    waiting.join(30)
    np.testing.assert_array_equal(got[0].result(), X)


def test_who_waits_in_vain_is_told_as_who_does_not_wait(fake: FakeLab) -> None:
    for patience in (0.0, 0.01):
        with pytest.raises(pw.PathwaysError, match="nothing is published under this name"):
            sharing.take(fake.session, "w", patience)
