"""A script whose functions call back into it."""

import atexit
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback
from jax.sharding import NamedSharding, PartitionSpec

from pathways_lab.door import plugin

state = []
# JAX ends its client after this; what it has compiled is forgotten before.
atexit.register(lambda: print("compiled at the end:", kept._cache_size()))


def doubled(x):
    state.append(x.shape)
    return np.asarray(x) * 2


def refused(x):
    raise ValueError("not this one")


mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]), ("data",))
x = jax.device_put(jnp.arange(8.0), NamedSharding(mesh, PartitionSpec("data")))
print(np.asarray(jax.jit(lambda x: jax.pure_callback(doubled, x, x) + 1)(x)).tolist(), state)
on_each = jax.shard_map(
    lambda x: jax.pure_callback(doubled, x, x),
    mesh=mesh,
    in_specs=PartitionSpec("data"),
    out_specs=PartitionSpec("data"),
)
print(np.asarray(jax.jit(on_each)(x)).tolist(), sorted(state))
kept = jax.jit(lambda x: x + 1)
kept(x)
print("compiled:", kept._cache_size())
noted = jax.jit(lambda n: io_callback(lambda n: print("noted", n), None, n, ordered=True))
for number in range(3):
    noted(number)
jax.effects_barrier()


def but_one(n):
    if n == 1:
        raise ValueError("not this one")
    print("turn", n)


turn = jax.jit(lambda n: io_callback(but_one, None, n, ordered=True))
for number in range(3):
    turn(number)
    try:
        jax.effects_barrier()
    except jax.errors.JaxRuntimeError:
        print("no turn", number)
jax.jit(lambda x: jax.debug.print("the sum is {}", x.sum()))(x)
jax.effects_barrier()
try:
    print(jax.jit(lambda x: jax.pure_callback(refused, x, x))(x))
except jax.errors.JaxRuntimeError as error:
    print("error:", "ValueError: not this one" in str(error))
# For whoever looks at what other accounts can see.
(door,) = plugin._doors
listener, secret = door.callables._listener, door.callables._secret
print(door.process.pid, door.process.log, listener.address, secret.hex(), flush=True)
sys.stdin.readline()
