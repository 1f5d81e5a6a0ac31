"""A script whose functions and objects run beside the devices."""

import os

import jax
import numpy as np
from jax.experimental import colocated_python
from jax.sharding import NamedSharding, PartitionSpec

mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]), ("x",))
x = jax.device_put(np.arange(8.0, dtype=np.float32), NamedSharding(mesh, PartitionSpec("x")))


@colocated_python.colocated_python
def double(x):
    shards = [jax.device_put(2 * np.asarray(s.data), s.device) for s in x.addressable_shards]
    return jax.make_array_from_single_device_arrays(x.shape, x.sharding, shards)


@colocated_python.colocated_python
def where(x):
    return jax.device_put(np.full(x.shape, os.getpid(), np.int32), x.sharding)


@colocated_python.colocated_python_class
class Counter:
    def __init__(self, start):
        self.count = start

    def add(self, x):
        self.count += 1
        return jax.device_put(np.full(x.shape, self.count, np.int32), x.sharding)


print(np.asarray(double(x)).tolist(), np.asarray(jax.jit(lambda y: y + 1)(double(x))).tolist())
beside = int(np.asarray(where(x))[0])
print(beside not in (os.getpid(), os.getppid()))
counter = Counter(10)
print([int(np.asarray(counter.add(x))[0]) for _ in range(3)])

# Calls whose results nobody waits for run in the order of the program, and one that fails holds
# up none after it.
note = colocated_python.colocated_python(lambda x: colocated_python.__dict__.setdefault("n", x) * 0)
note = note.specialize(out_specs_fn=lambda x: x)


def grown(x):
    colocated_python.n = colocated_python.n + 1
    return colocated_python.n


def broken(x):
    raise KeyError("not this one")


grow, fail = (
    colocated_python.colocated_python(f).specialize(out_specs_fn=lambda x: x)
    for f in (grown, broken)
)
note(x)
failed = fail(x)
last = [grow(x) for _ in range(5)][-1]
print(np.asarray(last).tolist())
ends = colocated_python.colocated_python(lambda x: os._exit(1))
try:
    ends(x)
except jax.errors.JaxRuntimeError as error:
    print("cannot be reached" in str(error))
print(np.asarray(colocated_python.colocated_python(lambda x: x)(x)).tolist())
try:
    failed.block_until_ready()
except jax.errors.JaxRuntimeError as error:
    print("KeyError: 'not this one'" in str(error))
