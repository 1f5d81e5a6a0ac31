"""Captured programs in Shardy's mpmd dialect: what it says, and that the dialect checks it."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import pathways_lab as pw
from pathways_lab.client.program import mlir
from pathways_lab.core.errors import PathwaysError
from pathways_lab.runtime import jax_private
from tests.client.kit import FakeLab

W, X = np.ones((4, 4), np.float32), np.ones((8, 4), np.float32)

GOLDEN = """
sdy.mesh @mesh_s1 = <["data"=2]>
sdy.mesh @mesh_s2 = <["x"=2, "y"=2]>
func.func public @two(%arg0: HERE(tensor<4x4xf32>), %arg1: HERE(tensor<8x4xf32>, {"data"}, {})) \
-> (THERE(tensor<8xf32>, {"x"}), HERE(tensor<8x4xf32>, {"data"}, {})) attributes {topology = \
#mpmd.topology<<"s1" : <["data"=2]>>, <"s2" : <["x"=2, "y"=2]>>>} {
%0 = mpmd.fragment_call<mesh="s1", origin=["dense"]> @dense_s1(%arg0, %arg1) : \
(HERE(tensor<4x4xf32>), HERE(tensor<8x4xf32>, {"data"}, {})) -> HERE(tensor<8x4xf32>, {"data"}, {})
%1 = mpmd.transfer %0 : \
(HERE(tensor<8x4xf32>, {"data"}, {})) -> THERE(tensor<8x4xf32>, {"x"}, {"y"})
%2 = mpmd.fragment_call<mesh="s2", origin=["total"]> @total_s2(%1) : \
(THERE(tensor<8x4xf32>, {"x"}, {"y"})) -> THERE(tensor<8xf32>, {"x"})
%3 = mpmd.fragment_call<mesh="s1", origin=["dense"]> @dense_s1(%arg0, %0) : \
(HERE(tensor<4x4xf32>), HERE(tensor<8x4xf32>, {"data"}, {})) -> HERE(tensor<8x4xf32>, {"data"}, {})
return %2, %3 : THERE(tensor<8xf32>, {"x"}), HERE(tensor<8x4xf32>, {"data"}, {})
}
"""


def dense(w: jax.Array, x: jax.Array) -> jax.Array:
    return jax.nn.relu(x @ w)


def total(x: jax.Array) -> jax.Array:
    return jax.nn.relu(x).sum(1)


def short(line: str) -> str:
    """A printed line with the types of both slices abbreviated."""
    for name, mesh in (("HERE", "s1"), ("THERE", "s2")):
        line = line.replace(f'!mpmd.mesh_tensor<"{mesh}", ', f"{name}<")
        line = line.replace(f", sharding=<@mesh_{mesh}, [", ", [")
    for dimensions in ('{"data"}, {}', '{"x"}, {"y"}', '{"x"}'):
        line = line.replace(f"[{dimensions}]>>", f"{dimensions})")
    line = re.sub(r"(f32|i32)>>", r"\1>)", line)
    return line.replace("HERE<tensor", "HERE(tensor").strip()


def program(fake: FakeLab) -> pw.program:
    here = fake.slice(2, axes=("data",))
    there = fake.slice(2, 2, axes=("x", "y"), island="island1")
    rows = P("data")
    f = pw.jit(dense, on=here, in_shardings=(P(), rows), out_shardings=rows)
    g = pw.jit(total, on=there, in_shardings=P("x", "y"))

    @pw.program
    def two(w, x):
        h = f(w, x)
        return g(h), f(w, h)

    return two


def test_the_body_in_full(fake: FakeLab) -> None:
    text = program(fake).mlir(W, X)
    lines = [short(line) for line in text.splitlines()[1:]]
    body = lines[: lines.index("}") + 1]
    assert "\n".join(body) == GOLDEN.replace("\\\n", "").strip()


def test_fragments_are_there_once_with_their_stablehlo(fake: FakeLab) -> None:
    text = program(fake).mlir(W, X)
    assert text.count("func.func private @dense_s1(") == 1
    assert "call @dense_s1.relu" in text
    assert "call @total_s2.relu" in text
    assert "stablehlo.dot_general" in text
    assert 'mesh_shape = #sdy.mesh<["x"=2, "y"=2]>' in text


def test_the_dialect_itself_checks_what_is_printed(fake: FakeLab) -> None:
    text = program(fake).mlir(W, X)
    assert jax_private.verified_mlir(text)
    for good, bad in (('mesh="s1"', 'mesh="s3"'), ("@dense_s1(%arg0, ", "@missing(%arg0, ")):
        with pytest.raises(ValueError, match=r"s3|missing"):
            jax_private.verified_mlir(text.replace(good, bad))


def test_keys_and_complex_numbers(fake: FakeLab) -> None:
    on = fake.slice(2, axes=("data",))
    f = pw.jit(
        lambda key, x: x + jax.random.normal(key, (2,)), on=on, in_shardings=(P(), P("data"))
    )
    run = pw.program(lambda key, x: f(key, x), name="run")
    assert "ui32" in run.mlir(jax.random.key(0), np.ones(2, np.complex64))


def test_callbacks_are_refused_with_the_function_named(fake: FakeLab) -> None:
    on = fake.slice(1)
    f = pw.jit(
        lambda x: jax.pure_callback(np.sin, jax.ShapeDtypeStruct((2,), jnp.float32), x),
        on=on,
        name="through_python",
    )
    run = pw.program(lambda x: f(x))
    with pytest.raises(PathwaysError, match="'through_python' calls back into Python"):
        run.mlir(np.ones(2, np.float32))


def test_a_program_in_which_nothing_runs(fake: FakeLab) -> None:
    assert pw.program(lambda x: x).mlir(X) == "module {}"


DECIDES = """
func.func private @choose_decision1_case0(%arg0: HERE(tensor<f32>)) -> HERE(tensor<f32>)
%0 = mpmd.fragment_call<mesh="s1", origin=["double"]> @double_s1(%arg0) : (HERE(tensor<f32>)) -> \
HERE(tensor<f32>)
return %0 : HERE(tensor<f32>)
}
func.func private @choose_decision1_case1(%arg0: THERE(tensor<f32>)) -> HERE(tensor<f32>)
%0 = mpmd.fragment_call<mesh="s2", origin=["far"]> @far_s2(%arg0) : (THERE(tensor<f32>)) -> \
THERE(tensor<f32>)
%1 = mpmd.transfer %0 : (THERE(tensor<f32>)) -> HERE(tensor<f32>)
%2 = mpmd.transfer %1 : (HERE(tensor<f32>)) -> HERE(tensor<f32>)
return %2 : HERE(tensor<f32>)
}
func.func public @choose(%arg0: HERE(tensor<i32>), %arg1: HERE(tensor<f32>), %arg2: \
THERE(tensor<f32>)) -> HERE(tensor<f32>)
%0 = mpmd.fragment_call<mesh="s1", origin=["(ne+convert_element_type+clip)"]> \
@_ne_convert_element_type_clip__s1(%arg0) : (HERE(tensor<i32>)) -> HERE(tensor<i32>)
%1 = mpmd.unassign %0 : (HERE(tensor<i32>)) -> tensor<i32>
%extracted = tensor.extract %1[] : tensor<i32>
%2 = arith.index_cast %extracted : i32 to index
%3 = scf.index_switch %2 -> HERE(tensor<f32>)
case 0 {
%4 = func.call @choose_decision1_case0(%arg1) : (HERE(tensor<f32>)) -> HERE(tensor<f32>)
scf.yield %4 : HERE(tensor<f32>)
}
default {
%4 = func.call @choose_decision1_case1(%arg2) : (THERE(tensor<f32>)) -> HERE(tensor<f32>)
scf.yield %4 : HERE(tensor<f32>)
}
return %3 : HERE(tensor<f32>)
}
"""


def test_a_decision_is_a_switch_over_functions_on_a_value_read_off_its_mesh(fake: FakeLab) -> None:
    here, there = fake.slice(2, axes=("data",)), fake.slice(2, 2, axes=("x", "y"), island="island1")
    double = pw.jit(lambda x: 2 * x, on=here, name="double")
    far = pw.jit(lambda x: x + 1, on=there, name="far")

    @pw.program
    def choose(n, x):
        return pw.cond(n, lambda x: pw.device_put(far(x), here.sharding()), double, x)

    text = choose.mlir(np.int32(1), np.float32(3))
    lines = [short(line).partition(" attributes")[0] for line in text.splitlines()]
    first = next(n for n, line in enumerate(lines) if "case0(" in line)
    assert "\n".join(lines[first:]).startswith(DECIDES.replace("\\\n", "").strip())


def test_loops_are_chains_of_decisions_up_to_a_length(fake: FakeLab) -> None:
    on = fake.slice(1)
    less = pw.jit(lambda x: x - 1, on=on, name="less")
    for most in (mlir.DEEPEST, mlir.DEEPEST + 1):

        @pw.program
        def loop(x, most=most):
            return pw.until(lambda x: x < 0, less, x, at_most=most)

        if most == mlir.DEEPEST:
            assert loop.mlir(np.float32(3)).count("scf.index_switch") == most
        else:
            with pytest.raises(PathwaysError, match="takes up to 101 decisions in a row") as error:
                loop.mlir(np.float32(3))
            assert "at_most=" in error.value.failure.remedy
