"""A script that reads what it may not, and goes on when a host, and then its lab, has gone."""

import sys

import jax
import jax.numpy as jnp

x = jnp.arange(4.0)
try:
    jax.jit(lambda x: x + 1, donate_argnums=0)(x)
    print(x)
except RuntimeError as error:
    print("donated:", type(error).__name__)
big = jnp.zeros(14 << 20, jnp.uint8)
add = jax.jit(lambda x: x + 1, donate_argnums=0)
for _ in range(3):
    big = add(big)
print("overwritten:", int(big[0]))
print("spans:", jax.pmap(lambda x: x + 1)(jnp.zeros(len(jax.devices()))).tolist())
try:
    jnp.zeros((1 << 33,), jnp.uint8).block_until_ready()
except jax.errors.JaxRuntimeError as error:
    print("too large:", str(error).splitlines()[0])
y = jnp.sin(jnp.arange(3.0))
print("value:", y.tolist(), flush=True)
sys.stdin.readline()
try:
    print(jnp.cos(y) + 1)
except jax.errors.JaxRuntimeError as error:
    print("host:", error)
z = jnp.cos(jnp.arange(1.0)) + 1
print("again:", z.tolist(), flush=True)
sys.stdin.readline()
try:
    print(jnp.cos(z) + 1)
except jax.errors.JaxRuntimeError as error:
    print("lost:", error)
print("alive")
