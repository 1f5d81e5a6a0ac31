"""A training script that knows JAX and optax only; it prints its parameters, exactly."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec

mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]), ("data",))
keys = jax.random.split(jax.random.key(int(sys.argv[1])), 4)
params = {
    "w1": jax.random.normal(keys[0], (8, 16)) / 4,
    "w2": jax.random.normal(keys[1], (16, 1)) / 4,
}
batch = jax.device_put(
    (jax.random.normal(keys[2], (32, 8)), jax.random.normal(keys[3], (32, 1))),
    NamedSharding(mesh, PartitionSpec("data")),
)
params = jax.device_put(params, NamedSharding(mesh, PartitionSpec()))
optimiser = optax.adam(1e-2)
state = jax.jit(optimiser.init)(params)


def loss(params, batch):
    x, y = batch
    return jnp.mean((jnp.tanh(x @ params["w1"]) @ params["w2"] - y) ** 2)


@jax.jit
def step(params, state, batch):
    value, gradient = jax.value_and_grad(loss)(params, batch)
    updates, state = optimiser.update(gradient, state)
    return optax.apply_updates(params, updates), state, value


for _ in range(10):
    params, state, value = step(params, state, batch)
print(float(value).hex(), {k: np.asarray(v).tobytes().hex() for k, v in params.items()})
