"""Flax as its pages show it, NNX and linen, over a mesh; Orbax keeps it, cut in another way."""

import sys

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import nnx
from flax.training.train_state import TrainState
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("data", "model"))
keys = jax.random.split(jax.random.key(1), 10)
batches = jax.device_put(
    [(x := jax.random.normal(key, (32, 8)), jnp.tanh(x[:, ::-1])) for key in keys],
    NamedSharding(mesh, P("data")),
)


def show(name, tree):
    leaves = [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]
    print(name, len(leaves), b"".join(leaves).hex())


class Net(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(
            8,
            16,
            rngs=rngs,
            kernel_init=nnx.with_partitioning(nnx.initializers.normal(), (None, "model")),
        )
        self.norm = nnx.BatchNorm(16, rngs=rngs)
        self.drop = nnx.Dropout(0.1, rngs=rngs)
        self.down = nnx.Linear(16, 8, rngs=rngs)

    def __call__(self, x):
        return self.down(self.drop(nnx.relu(self.norm(self.up(x)))))


@nnx.jit
def made():
    model = Net(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adamw(1e-2), wrt=nnx.Param)
    state = nnx.state((model, optimizer))
    nnx.update(
        (model, optimizer), jax.lax.with_sharding_constraint(state, nnx.get_partition_spec(state))
    )
    return model, optimizer


@nnx.jit
def nnx_step(model, optimizer, x, y):
    loss, slopes = nnx.value_and_grad(lambda m: jnp.mean((m(x) - y) ** 2))(model)
    optimizer.update(model, slopes)
    return loss


with jax.set_mesh(mesh):
    model, optimizer = made()
    losses = [nnx_step(model, optimizer, *batch) for batch in batches]
show("nnx losses", losses)
_, state = nnx.split(model)
pure = nnx.to_pure_dict(nnx.state(model, nnx.Param))
show("nnx", pure)
print(pure["up"]["kernel"].sharding.spec)


class Linen(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(8)(nn.LayerNorm()(nn.gelu(nn.Dense(16)(x))))


linen = Linen()
train = TrainState.create(
    apply_fn=linen.apply,
    params=linen.init(keys[0], batches[0][0]),
    tx=optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2)),
)
train = jax.device_put(train, NamedSharding(mesh, P()))


@jax.jit
def linen_step(train, x, y):
    def loss(params):
        return optax.l2_loss(train.apply_fn(params, x), y).mean()

    value, slopes = jax.value_and_grad(loss)(train.params)
    return train.apply_gradients(grads=slopes), value


losses = []
for batch in batches:
    train, value = linen_step(train, *batch)
    losses.append(value)
show("linen losses", losses)
show("linen", train)

other = NamedSharding(Mesh(np.array(jax.devices()[:4])[::-1], ("all",)), P("all"))
kept = {"params": pure, "train": train}
like = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(
        x.shape, x.dtype, sharding=other if x.ndim == 2 and x.shape[0] % 4 == 0 else x.sharding
    ),
    kept,
)
with ocp.StandardCheckpointer() as checkpointer:
    checkpointer.save(sys.argv[1], kept)
    checkpointer.wait_until_finished()
    back = checkpointer.restore(sys.argv[1], like)
assert jax.tree.structure(back) == jax.tree.structure(kept)
show("orbax", back)
moved = back["params"]["down"]["kernel"]
assert moved.sharding == other, moved.sharding
train, value = linen_step(jax.device_put(back["train"], NamedSharding(mesh, P())), *batches[0])
show("after", value)
