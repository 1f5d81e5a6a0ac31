"""A gang's own computation finds NaNs and infinities, with element and shard."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pathways_lab.core.program.layout import Layout
from pathways_lab.core.program.program import Call, Value
from pathways_lab.core.slices.topology import SliceBinding
from pathways_lab.runtime.nan_checks import Check, NotANumber, complain

NANS, INFS, BOTH = Check(nans=True), Check(infs=True), Check(nans=True, infs=True)
CUT = Layout((("x", 2), ("y", 2)), (("x",), ("y",)))
BINDING = SliceBinding(
    1, "ann", "i", (2, 2), ("x", "y"), tuple((f"i/h{n // 2}", n % 2) for n in range(4)), "cpu"
)
nan, inf = np.nan, np.inf


def value(array: Any, name: str = "") -> Value:
    whole = Layout(CUT.mesh, ((),) * array.ndim)
    return Value(array.shape, str(array.dtype), 1, CUT if array.ndim == 2 else whole, 0, name)


def said(check: Check, inputs: list[Any], outputs: list[Any], names: tuple[str, ...] = ()) -> str:
    """The complaint, or ""."""
    leaves = [jnp.asarray(leaf) for leaf in (*inputs, *outputs)]
    verdict = jax.jit(lambda *leaves: check.verdict(leaves))(*leaves)
    values = [
        value(leaf, name) for leaf, name in zip(leaves, names or ("",) * len(leaves), strict=True)
    ]
    call = Call("key", 1, (), (), name="step")
    try:
        complain(verdict, call, values[: len(inputs)], values[len(inputs) :], BINDING)
    except NotANumber as error:
        failure = error.failure
        return f"{failure.message} | {failure.host} {failure.device} | {failure.remedy}"
    return ""


def test_the_first_element_its_shard_and_device_are_named() -> None:
    bad = np.zeros((4, 4), np.float32)
    bad[3, 1] = bad[2, 3] = nan
    assert said(NANS, [np.ones(3)], [np.ones((2, 2)), bad], ("x", "", "w")).startswith(
        "step has made a NaN: element [2, 3] of its result 1 'w' (float32[4,4]), in the shard of"
        " device 3 of its slice | i/h1 1 | "
    )


def test_what_came_in_is_told_from_what_was_made() -> None:
    text = said(NANS, [np.float32(nan)], [np.float32(nan)], ("loss", ""))
    assert text.startswith("step was given a NaN: element [] of its argument 0 'loss' (float32[])")
    assert "uploaded" in text


@pytest.mark.parametrize(
    ("check", "array", "found"),
    [
        (NANS, [1.0, inf], ""),
        (INFS, [nan, -inf], "an infinity: element [1]"),
        (BOTH, [1.0, -inf, nan], "an infinity: element [1]"),
        (BOTH, [nan, inf], "a NaN: element [0]"),
        (NANS, [], ""),
    ],
)
def test_each_is_found_when_it_is_looked_for(check: Check, array: list[float], found: str) -> None:
    text = said(check, [], [np.array(array, np.float32)])
    assert found in text
    assert bool(text) == bool(found)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float8_e5m2, jnp.complex64])
def test_every_inexact_type_is_tested(dtype: Any) -> None:
    assert "element [2]" in said(NANS, [], [jnp.array([0, 1, nan], dtype)])


def test_whole_numbers_truths_and_keys_are_none_of_its_business() -> None:
    plain = [np.arange(3), np.ones(2, np.bool_), jax.random.key_data(jax.random.key(0))]
    text = said(NANS, plain, [np.array([[1.0, nan]] * 2, np.float32)])
    assert "element [0, 1] of its result 0" in text


def test_settings_say_what_is_looked_for() -> None:
    assert Check.of({"enable_x64": True}) is None
    assert Check.of({"debug_nans": True, "enable_x64": True}) == NANS
    assert Check.of({"debug_nans": True, "debug_infs": True}) == BOTH
