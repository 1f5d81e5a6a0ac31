"""pathwaysutils as on a Cloud: arrays to other meshes, split and joined along an axis of one."""

import jax
import jax.numpy as jnp
import numpy as np
import pathwaysutils
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from pathwaysutils.experimental import concatenate_by_mesh_axis, split_by_mesh_axis
from pathwaysutils.jax import ifrt_reshard_available
from pathwaysutils.reshard import reshard

pathwaysutils.initialize()
if not ifrt_reshard_available():  # as on plain CPU devices
    reshard = jax.device_put
devices = np.array(jax.devices()[:4])
mesh, pair = Mesh(devices.reshape(2, 2), ("data", "model")), Mesh(devices[2:], ("all",))


def show(name, tree):
    for leaf in jax.tree.leaves(tree):
        print(name, leaf.shape, leaf.sharding.spec, np.asarray(leaf).tobytes().hex())


x = jax.device_put(jnp.arange(32.0).reshape(8, 4), NamedSharding(mesh, P("data", "model")))
tree = {"x": x, "b": jax.device_put(jnp.ones(4, jnp.bfloat16), NamedSharding(mesh, P("model")))}
show("reshard", reshard(tree, NamedSharding(pair, P("all"))))
show("donated", reshard({"x": x + 1}, NamedSharding(mesh, P("model")), donate=True))
parts = split_by_mesh_axis.split_by_mesh_axis(tree, "data")
show("split", parts)
show("doubled", jax.jit(lambda tree: jax.tree.map(lambda leaf: 2 * leaf, tree))(parts[1]))
joined = concatenate_by_mesh_axis.concatenate_by_mesh_axis([part["x"] for part in parts], "data")
show("joined", joined)
