"""Modules that another process lowered are read and changed as we expect of JAX.

A failure here means that JAX moved something: the message says what, and
``pathways_lab/runtime/jax_modules.py`` is the only file to change.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
from jax import export
from jax._src.interpreters import mlir
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxlib import _jax
from jaxlib.mlir import ir

from pathways_lab.runtime import jax_modules, jax_private

AXES = (AxisType.Explicit,) * 2
ABSTRACT = AbstractMesh((2, 2), ("x", "y"), AXES)


def module(f: Any, *arguments: tuple[tuple[int, ...], P], out: P | None = None) -> export.Exported:
    structs = [
        jax.ShapeDtypeStruct(shape, np.float32, sharding=NamedSharding(ABSTRACT, spec))
        for shape, spec in arguments
    ]
    result = None if out is None else NamedSharding(ABSTRACT, out)
    with jax_private.exporting_without_backend(), jax.sharding.use_abstract_mesh(ABSTRACT):
        jitted = jax.jit(f, keep_unused=True, out_shardings=result)
        return export.export(jitted, platforms=["cpu"])(*structs)


def test_the_signature_of_a_module():
    made = module(lambda x, y: x @ y, ((4, 8), P("x")), ((8, 2), P()))
    said = jax_modules.read_signature(made.mlir_module_serialized)
    assert (said.inputs, said.outputs) == ((((4, 8), "f32"), ((8, 2), "f32")), (((4, 2), "f32"),))
    assert (said.partitions, said.replicas, said.tokens) == (4, 1, 0)
    with pytest.raises(ValueError, match="no StableHLO"):
        jax_modules.read_signature(b"anything")


def test_unreduced_arrays_are_known_by_the_signature_and_gone_when_stacked():
    plain = module(lambda x: x * 2, ((4, 8), P("x"))).mlir_module_serialized
    assert not jax_modules.read_signature(plain).unreduced
    made = module(lambda x: x + x, ((8,), P(unreduced={"x"}))).mlir_module_serialized
    assert jax_modules.read_signature(made).unreduced
    stacked = jax_modules.stacked(made)
    assert (stacked.inputs, stacked.outputs) == ((True,), (False,))
    assert not jax_modules.read_signature(stacked.module).unreduced


def artefact(text: str) -> bytes:
    with mlir.make_ir_context():
        module = ir.Module.parse(text)
        return bytes(_jax.mlir.serialize_portable_artifact(module, "1.0.0", True))


TOKENS = """module @with_tokens {
  func.func public @main(%arg0: !stablehlo.token {jax.token = true}, %arg1: tensor<2xf32>)
      -> (!stablehlo.token {jax.token = true}, tensor<2xf32>, !stablehlo.token) {
    %0 = stablehlo.after_all %arg0 : !stablehlo.token
    return %arg0, %arg1, %0 : !stablehlo.token, tensor<2xf32>, !stablehlo.token
  }
}"""


def test_tokens_of_a_module_become_empty_arrays():
    sent = artefact(TOKENS)
    said = jax_modules.read_signature(sent)
    assert (said.tokens, said.token_outputs) == (1, {0, 2})
    plain = jax_modules.read_signature(jax_modules.without_tokens(sent))
    assert (plain.tokens, plain.token_outputs) == (0, frozenset())
    assert (plain.inputs, plain.outputs) == (said.inputs, said.outputs)
