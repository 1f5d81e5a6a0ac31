"""Arrays that are the sum of what devices hold: stacks of summands on the lab's devices."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import export
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pathways_lab.core.program.layout import Layout
from pathways_lab.door import programs
from pathways_lab.runtime import jax_private
from pathways_lab.runtime.devices import spec_of
from tests.runtime.test_jax_modules import P, module

X = np.arange(32, dtype=np.float32).reshape(4, 8)


def loaded(f: Any, *arguments: Any, out: P | None = None) -> programs.Loaded:
    def never(number: int, ordered: bool) -> Any:
        raise AssertionError(number)

    sent = module(f, *arguments, out=out).mlir_module_serialized
    return programs.load(sent, (0, 1, 2, 3), "cpu", never)


def run(function: programs.Loaded, *given: Any) -> list[np.ndarray[Any, Any]]:
    """As a host does it: values that are cut as they are stored."""
    code = function.code
    client = jax_private.make_cpu_client(4)

    def sharding(layout: Layout) -> NamedSharding:
        devices = np.array(client.local_devices()).reshape([size for _, size in layout.mesh])
        return NamedSharding(Mesh(devices, [name for name, _ in layout.mesh]), spec_of(layout))

    call = jax.jit(
        export.deserialize(bytearray(code.blob)).call,
        in_shardings=tuple(map(sharding, code.in_layouts)),
        out_shardings=list(map(sharding, code.out_layouts)),
    )
    placed = [jax.device_put(x, sharding(n)) for x, n in zip(given, code.in_layouts, strict=True)]
    return [np.asarray(made) for made in call(*placed)]


def test_the_summands_of_a_result_are_stored_each_on_its_own_device():
    total = P("y", unreduced={"x"})
    columns = loaded(
        lambda x: jnp.einsum("ab->b", x, out_sharding=total), ((4, 8), P("x", "y")), out=total
    )
    (kind,), (placing,) = columns.out_kinds, columns.out_placings
    assert (kind.shape, placing.stacked) == ((8,), True)
    assert columns.code.out_types[0].shape == (2, 8)
    assert placing.boxes(kind) == tuple(
        ((x, x + 1), (4 * y, 4 * y + 4)) for x in range(2) for y in range(2)
    )
    (made,) = run(columns, X)
    assert np.array_equal(made, [X[:2].sum(0), X[2:].sum(0)])


def test_a_stack_of_summands_is_reduced_by_a_computation_that_takes_it():
    def reduced(x: Any, y: Any) -> Any:
        return jax.sharding.reshard(x + x, PartitionSpec("x")) + y, y

    function = loaded(reduced, ((8,), P(unreduced={"x", "y"})), ((8,), P("x")))
    assert [each.shape for each in function.in_kinds] == [(8,), (8,)]
    assert [each.stacked for each in function.in_placings] == [True, False]
    assert [each.shape for each in function.code.in_types] == [(4, 8), (8,)]
    first, second = run(function, X, X[0])
    assert np.array_equal(first, 2 * X.sum(0) + X[0])
    assert np.array_equal(second, X[0])
