"""Tools of JAX that ask its client and its devices: export, the compilation cache, statistics.

``python with_tools.py FOLDER``: of a compilation cache.  Prints what it computes, exactly.
"""

import sys
import warnings

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

warnings.simplefilter("error")
jax.config.update("jax_compilation_cache_dir", sys.argv[1])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]), ("data",))
cut = NamedSharding(mesh, P("data"))


def show(name, x):
    print(name, x.shape, np.asarray(x).tobytes().hex())


x = jax.device_put(jnp.arange(32.0).reshape(8, 4), cut)
f = jax.jit(lambda x: jnp.tanh(x) @ x.T, in_shardings=cut, out_shardings=cut)
show("compiled", f(x))

exported = jax.export.export(f)(jax.ShapeDtypeStruct(x.shape, x.dtype))
back = jax.export.deserialize(exported.serialize())
print("exported", back.nr_devices, back.platforms, back.in_avals)
show("called", jax.jit(back.call)(x))
(rows,) = jax.export.symbolic_shape("rows")
of_any = jax.export.export(jax.jit(lambda x: x.sum(0)))(jax.ShapeDtypeStruct((rows, 4), x.dtype))
show("of any shape", of_any.call(jnp.ones((3, 4))))
print("statistics", [device.memory_stats() for device in jax.devices()[:4]])
print("of the program's own", jax.devices("cpu")[0].memory_stats())
