"""What a call is given to overwrite is gone: in a program, fused or not, and outside of one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import pathways_lab as pw
from pathways_lab.client.handles import Handle
from tests.client.kit import FakeLab

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
