"""Equinox and optax as their pages show them: a network trained over a mesh, saved and read."""

import io

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec

mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]), ("batch",))
model = eqx.nn.MLP(8, 1, width_size=16, depth=2, key=jax.random.key(0))
optimiser = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))
state = optimiser.init(eqx.filter(model, eqx.is_inexact_array))


@eqx.filter_value_and_grad
def loss_of(model, x, y):
    return jnp.mean((jax.vmap(model)(x) - y) ** 2)


@eqx.filter_jit(donate="all-except-first")
def step(batch, model, state):
    loss, gradients = loss_of(model, *batch)
    updates, state = optimiser.update(gradients, state, eqx.filter(model, eqx.is_inexact_array))
    return eqx.apply_updates(model, updates), state, loss


replicated, cut = (NamedSharding(mesh, PartitionSpec(*spec)) for spec in ((), ("batch",)))
model, state = eqx.filter_shard((model, state), replicated)
keys = jax.random.split(jax.random.key(1), 20)
for key in keys:
    x = jax.random.normal(key, (32, 8))
    batch = eqx.filter_shard((x, x.sum(1, keepdims=True)), cut)
    model, state, loss = step(batch, model, state)
print("loss", np.asarray(loss).tobytes().hex(), float(loss) < 3)

file = io.BytesIO()
eqx.tree_serialise_leaves(file, model)
file.seek(0)
back = eqx.tree_deserialise_leaves(file, model)
assert eqx.tree_equal(model, back)
print("bytes", len(file.getvalue()))
weights = jax.tree.leaves(eqx.filter(model, eqx.is_array))
print("sum", np.asarray(sum(w.sum() for w in weights)).tobytes().hex())
print("devices", len(weights[0].devices()), repr(model.layers[0].bias[:2]))
