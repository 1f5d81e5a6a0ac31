"""What a call is given to overwrite is gone: in a program, fused or not, and outside of one."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest

import pathways_lab as pw
from pathways_lab.client.lab import sharing
from pathways_lab.client.session.handles import Handle
from tests.client.kit import FakeLab, a_slice

X = np.arange(8, dtype=np.float32)


@pytest.fixture
def h(fake: FakeLab) -> Handle:
    made: Handle = pw.device_put(X, fake.slice(2))
    return made


@pytest.fixture
def inc(h: Handle) -> Any:
    return pw.jit(lambda w: w + 1, on=h.slice, donate_argnums=0, name="inc")


# --- in a program ---------------------------------------------------------------------


def returned(inc: Any, w: Any) -> Any:
    return inc(w), w


def returned_later(inc: Any, w: Any) -> Any:
    m = w * 2
    return inc(m), m


def used_later(inc: Any, w: Any) -> Any:
    double = pw.jit(lambda w: w * 2, on=inc.slice, name="double")
    m = double(w)
    return inc(m), double(m)


def used_twice(inc: Any, w: Any) -> Any:
    return inc(w), inc(w)


@pytest.mark.parametrize("fuse", [False, True], ids=["plain", "fused"])
@pytest.mark.parametrize(
    ("work", "text"),
    [
        (returned, "consumes value 0 (w), which the program returns"),
        (returned_later, "which the program returns"),
        (used_later, "which was donated to 'inc'"),
        (used_twice, "which was donated to 'inc'"),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_nothing_lives_on_after_donation(
    h: Handle, inc: Any, work: Callable[..., Any], text: str, fuse: bool
) -> None:
    program = pw.program(lambda w: work(inc, w), fuse=fuse, name="work")
    with pytest.raises(pw.PathwaysError) as caught:
        program(h)
    failure = caught.value.failure
    assert text in failure.message
    assert failure.remedy.endswith("do not donate the argument")
    assert (failure.program, failure.line.text[:6]) == ("work", "return")
    assert not h.is_deleted()


def test_what_moves_to_where_it_is_stays_the_input(h: Handle, inc: Any) -> None:
    made = pw.program(lambda w: inc(pw.device_put(w, h.slice)))(h)
    np.testing.assert_array_equal(made.result(), X + 1)
    assert h.is_deleted()


def test_what_others_keep_is_refused_at_the_call_and_stays_as_it_was(
    fake: FakeLab, h: Handle, inc: Any
) -> None:
    other = pw.device_put(X, h.slice)
    sharing.publish(fake.session, "w", h)
    add = pw.jit(lambda a, b: a + b, on=h.slice, donate_argnums=(0, 1), name="add")
    works: list[Callable[[], Any]] = [lambda: inc(h), lambda: add(other, h), lambda: program(h)]
    program = pw.program(lambda w: inc(w))
    for work in works:
        with pytest.raises(pw.PathwaysError, match="is kept") as caught:
            work()
        failure = caught.value.failure
        assert (failure.kind, failure.remedy) == ("refused", "wait")
        assert failure.node in ("inc", "add")
        assert failure.line.file == __file__
    assert (h.state, other.state, fake.count("submit")) == ("ready", "ready", 0)
    np.testing.assert_array_equal(h.result(), X)
    fake.kept.clear()
    np.testing.assert_array_equal(add(other, h).result(), 2 * X)
    assert h.is_deleted()


def test_nobody_is_asked_about_what_was_never_shared(fake: FakeLab, h: Handle, inc: Any) -> None:
    inc(h).result()
    assert not fake.count("donation")


# --- which arguments --------------------------------------------------------------------


def test_what_is_named_by_its_number_is_donated_by_its_name_too(h: Handle) -> None:
    add = pw.jit(lambda a, b: a + b, on=h.slice, donate_argnums=1)
    np.testing.assert_array_equal(add(X, b=h).result(), 2 * X)
    assert h.is_deleted()


def step(state: Any, by: Any = 1, /, *, rate: Any = 1) -> Any:
    return state + by * rate


def loose(state: Any, *rest: Any, **named: Any) -> Any:
    return state


@pytest.mark.parametrize(
    ("function", "options", "text"),
    [
        (step, {"donate_argnums": 5}, "'step' has no positional argument 5; there is 0 (state)"),
        (step, {"donate_argnums": (0, -3)}, "no positional argument -3"),
        (step, {"static_argnums": 2}, "static_argnums=2: 'step' has no"),
        (step, {"donate_argnames": "sate"}, "takes no argument 'sate' by name; there is rate"),
        (step, {"donate_argnames": "state"}, "takes no argument 'state' by name"),
        (step, {"static_argnames": ("rate", "zz")}, "takes no argument 'zz' by name"),
        (loose, {"static_argnames": "rest", "donate_argnames": "rest"}, "both static and donated"),
        (loose, {"static_argnums": 0, "donate_argnames": "state"}, "both static and donated"),
    ],
)
def test_arguments_that_do_not_exist_are_refused_as_in_jax(
    function: Any, options: Any, text: str
) -> None:
    with pytest.raises(ValueError) as caught:
        pw.jit(function, on=a_slice(2), **options)
    assert text in str(caught.value)
    with pytest.raises(ValueError):
        jax.jit(function, **options)
    if text.startswith("static"):
        with pytest.raises(ValueError):
            pw.program(function, **options)


@pytest.mark.parametrize("role", ["static", "donate"])
@pytest.mark.parametrize(
    ("kind", "given"),
    [("argnums", "x"), ("argnums", 3.5), ("argnums", (0, "b")), ("argnames", 3)],
)
def test_what_names_no_argument_is_refused_as_in_jax(role: str, kind: str, given: Any) -> None:
    options: Any = {f"{role}_{kind}": given}
    with pytest.raises(TypeError, match=re.escape(f"{role}_{kind}={given!r} is not a ")):
        pw.jit(loose, on=a_slice(2), **options)
    with pytest.raises(TypeError):
        jax.jit(loose, **options)


@pytest.mark.parametrize(
    "options",
    [
        {"donate_argnums": 7},
        {"static_argnames": "other"},
        {"donate_argnums": -1, "static_argnames": ("a", "b")},
    ],
)
def test_a_function_that_takes_any_arguments_has_all_of_them(options: Any) -> None:
    pw.jit(loose, on=a_slice(2), **options)
    jax.jit(loose, **options)


@pytest.mark.parametrize("compiled", [pw.jit, pw.program, pw.pmap])
def test_an_argument_may_be_called_self(h: Handle, compiled: Any) -> None:
    """Methods that are compiled by their class have one."""
    options = {"devices": h.slice} if compiled is pw.pmap else {"on": h.slice}
    add = compiled(lambda self, x: self + x, **options)
    x = X.reshape(2, 4)
    np.testing.assert_array_equal(add(self=x, x=x).result(), 2 * x)
