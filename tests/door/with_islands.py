"""Meshes over the devices of several islands.  Prints what it computes, exactly."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

devices = jax.devices()
grids = {"rows": np.array(devices).reshape(2, 4), "mixed": np.array(devices[::-1]).reshape(4, 2).T}
if hasattr(devices[0], "slice_index"):
    grids["last"] = mesh_utils.create_hybrid_device_mesh((1, 4), (2, 1), devices)
    assert [{d.island for d in row} for row in grids["last"]] == [{"island0"}, {"island1"}]
else:
    grids["last"] = jax.make_mesh((2, 4), ("i", "x")).devices
given = np.random.default_rng(0).integers(-8, 8, (8, 8)).astype(np.float32)
for name, grid in grids.items():
    mesh = Mesh(grid, ("i", "x"))
    x = jax.device_put(given, NamedSharding(mesh, P("i", "x")))

    @jax.jit
    @jax.shard_map(mesh=mesh, in_specs=P("i", "x"), out_specs=P("i", "x"))
    def summed(block):
        inner = jax.lax.psum(block, "x")
        return block + jax.lax.ppermute(inner, "i", [(0, 1), (1, 0)]) * jax.lax.pmax(block, "i")

    loss, grad = jax.jit(jax.value_and_grad(lambda v: jnp.sum((v @ v.T) ** 2)))(summed(x))
    one = jax.device_put(x, devices[5])  # and back
    again = jax.device_put(one, NamedSharding(mesh, P(("i", "x"))))
    assert again.sharding.device_set == set(devices)
    numbers = np.asarray(summed(x)), float(loss), np.asarray(grad), np.asarray(again + 1)
    print(name, [np.asarray(each).tolist() for each in numbers])
print(jax.pmap(lambda v: jax.lax.psum(v, "p"), axis_name="p")(np.arange(8.0)).tolist())
