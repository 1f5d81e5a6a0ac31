"""What things are called, and which names there cannot be."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pathways_lab as pw
from pathways_lab.client.lab import slice_request
from pathways_lab.runtime import jax_private
from tests.client.kit import FakeLab

X = np.arange(4, dtype=np.float32)


def test_what_was_put_has_a_name(fake: FakeLab) -> None:
    left, right = fake.slice(2), fake.slice(2)
    tree = pw.device_put({"w": X, "b": [X]}, left)
    assert (tree["w"].name, tree["b"][0].name) == ("device_put['w']", "device_put['b'][0]")
    assert pw.device_put(X, left).name == "device_put"
    made = pw.jit(lambda x: x + 1, on=left, name="inc")(X)
    assert pw.device_put((made,), right)[0].name == "inc", "what has a name keeps it"


def test_half_a_character_is_refused_with_words() -> None:
    with pytest.raises(pw.PathwaysError, match="surrogates not allowed") as caught:
        slice_request.name("name", "a\ud800")
    failure = caught.value.failure
    assert failure.kind == "refused"
    assert "/tests/client/" in failure.line.file
    assert "repr(name)" in failure.remedy


def test_what_the_lab_answers_names_the_users_line(fake: FakeLab) -> None:
    with pytest.raises(pw.PathwaysError, match="9 devices were asked for") as caught:
        fake.slice(9)
    assert caught.value.failure.line.file.endswith("kit.py")


def test_a_gradient_of_integers_is_refused_by_that_name(fake: FakeLab) -> None:
    on = fake.slice(2)
    nothing = np.zeros(4, jax.dtypes.float0)
    slope = pw.jit(jax.grad(lambda n: jnp.float32(n.sum()), allow_int=True), on=on, name="slope")
    whole = np.arange(4)
    for work in (
        lambda: pw.device_put(nothing, on),
        lambda: pw.jit(lambda a, b: b, on=on)(nothing, X),
        lambda: pw.program(lambda a: a, on=on)(nothing),
        lambda: slope(whole),
        lambda: pw.program(slope)(whole),
    ):
        with pytest.raises(pw.PathwaysError, match="of float0, JAX's gradient of an integer"):
            work()


def test_a_program_says_any_name_in_mlir(fake: FakeLab) -> None:
    name = 'a "quoted"\\ näme\n'
    on = fake.slice(2, axes=('"x',))
    on.name = "s7 of bob"
    double = pw.jit(lambda a: a * 2, on=on, name=name)
    again = pw.jit(lambda a: a * 3, on=on, name=name)
    text = pw.program(lambda a: again(double(a)), name='my "program"').mlir(
        pw.device_put(np.zeros(4), on.sharding(jax.P('"x')))
    )
    assert text.count("mpmd.fragment_call") == 2
    assert "quoted" in text.partition("origin=")[2].partition("]")[0]
    assert jax_private.verified_mlir(text) == text, "it is read again as it was printed"
