"""A script that never opens a door: argument 1 is a lab file."""

import os
import sys
import threading
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
from IPython.lib.pretty import pretty
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

twice = jax.jit(lambda x: 2 * x)
before = twice(jnp.arange(8.0))
numbers = np.arange(8, dtype=np.float32)

import pathways_lab as pw  # noqa: E402
from pathways_lab.client.session import in_jax  # noqa: E402

lab = pw.connect(sys.argv[1], name="kernel")
place = lab.slice(2, "x")
mesh, cut = place.mesh, place.sharding(P("x"))
handles = [pw.device_put(numbers * n, cut) for n in range(4)]
handle, squares = handles[1], pw.jit(lambda v: (v**2).sum(), on=place)

# --- what needs no door opens none ------------------------------------------------------
assert isinstance(handle, jax.Array)
assert isinstance(handle, pw.Handle)
assert isinstance(handle + before, pw.Handle)
assert isinstance(2.0 * handle.mean(), pw.Handle)
assert handle.sharding == cut
assert np.array_equal(jax.device_get(jax.block_until_ready(handle[2:])), numbers[2:])
there = pw.device_put(keys := jax.random.split(jax.random.key(7)), place)
fetched = jax.device_get({"rng": there})["rng"]
assert np.array_equal(jax.random.key_data(fetched), jax.random.key_data(keys))
assert pretty([there]) == f"[{there}]", pretty([there])
assert np.array_equal(pw.program(lambda v: jnp.sum(handle) + v)(1.0), 29)
assert np.array_equal(pw.program(lambda v: jax.jit(jnp.add)(handle, v))(1.0), numbers + 1)
try:
    pw.jit(lambda v: jnp.sum(handle) + v, on=place)(1.0)
except pw.PathwaysError as error:
    print("inside:", "reads a handle from outside" in str(error))
jnp.ones(3)
twice(before)
compiled = twice._cache_size()
assert in_jax.door is None
assert len(lab.clients) == 2, lab.clients

# --- a value may outlive its slice ------------------------------------------------------
with lab.slice(1) as short:
    left = pw.device_put(numbers, short)
assert np.array_equal(jax.jit(jnp.negative)(left), -numbers)
assert in_jax.door is not None
lab.open_door().close()
assert in_jax.door is None

# --- JAX meets handles, in several threads at once --------------------------------------
sums: list[float] = []
threads = [threading.Thread(target=lambda h=h: sums.append(float(jnp.sum(h)))) for h in handles]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert sorted(sums) == [0, 28, 56, 84]
assert len(lab.clients) == 3, lab.clients
lab_s = set(in_jax.door.devices)

# --- whatever names no devices stays where it was ---------------------------------------
[cpu] = jax.devices()
assert cpu.platform == "cpu"
assert cpu not in lab_s
assert jnp.ones(3).devices() == {cpu}
assert jax.jit(jnp.sin)(numbers).devices() == {cpu}
assert twice(before).devices() == {cpu}
assert twice._cache_size() == compiled, "nothing is compiled anew when a door opens"

# --- JAX and libraries compute with handles, and on slices: also on meshes of before ----
rule = optax.adam(1e-3)
total = jax.shard_map(lambda v: jax.lax.psum(v, "x"), mesh=mesh, in_specs=P("x"), out_specs=P())
put = jax.device_put(numbers, cut)
state = rule.init({"w": handle})
moved, _ = rule.update({"w": handle}, state)
for made, wanted in (
    (jnp.mean(handle), 3.5),
    (jax.grad(lambda v: (v**2).sum())(handle), 2 * numbers),
    (jax.jit(lambda v: v + jnp.sum(handle))(handle), numbers + 28),
    (jax.jit(lambda v: v[handle.astype(int)])(put), numbers),
    (jax.grad(squares)(handle), 2 * numbers),
    (jax.grad(squares)(numbers), 2 * numbers),
    (jax.jit(lambda v: squares(v) + v)(numbers), 140 + numbers),
    (jax.vmap(lambda v: v + 1)(handle), numbers + 1),
    (jax.jit(total)(numbers), numbers[:4] + numbers[4:]),
    (jax.jit(total)(handle), numbers[:4] + numbers[4:]),
    (jax.jit(total)(put), numbers[:4] + numbers[4:]),
    (jax.jit(lambda v: v - before, in_shardings=cut)(put), numbers - 2 * numbers),
    (jax.jit(jnp.negative, out_shardings=cut)(numbers), -numbers),
    (jax.jit(jnp.multiply, in_shardings=(cut, None))(numbers, 3.0), 3 * numbers),
    (jax.jit(lambda v: jax.lax.with_sharding_constraint(v, cut))(numbers), numbers),
    (jnp.zeros(8, device=cut), 0 * numbers),
    (jnp.zeros_like(handle), 0 * numbers),
    (jax.make_array_from_callback((8,), cut, lambda index: numbers[index]), numbers),
    (jax.device_put(before, cut), 2 * numbers),
    (jax.pmap(lambda v: v + 1, devices=place.tpus)(numbers.reshape(2, 4)).ravel(), numbers + 1),
    (state[0].mu["w"], 0 * numbers),
    (moved["w"][1:], np.full(7, -1e-3)),
):
    assert isinstance(made, jax.Array), made
    assert not isinstance(made, pw.Handle), made
    assert np.allclose(made, wanted), (made, wanted)
    assert made.devices() <= lab_s, (made, made.devices())
for each in (mesh, place.mesh):
    with jax.set_mesh(each):
        assert np.array_equal(jax.jit(jnp.negative)(numbers), -numbers)
        assert jax.jit(jnp.negative)(numbers).devices() == lab_s
        assert jax.device_put(numbers, P("x")).sharding == NamedSharding(place.mesh, P("x"))
assert put.sharding == place.sharding(P("x")) == handle.sharding
assert pw.device_put(numbers, put.sharding).slice is place
assert np.array_equal(pw.jit(lambda v, w: v + w, on=place)(put, handle), 2 * numbers)

# --- one lab's, and one process's -------------------------------------------------------
another = pw.connect(sys.argv[1])
elsewhere = pw.device_put(numbers, another.slice(1))
assert not isinstance(elsewhere, jax.Array)
for name, refused in (
    ("another", lambda: jnp.sum(elsewhere)),
    ("later", lambda: lab.open_door("ann")),
):
    try:
        refused()
    except pw.PathwaysError as error:
        print(f"{name}:", "JAX has the devices of kernel" in str(error))
another.close()
sys.stdout.flush()
warnings.simplefilter("ignore")  # JAX and Python warn of forks
if (child := os.fork()) == 0:
    try:
        jnp.sum(handle)
    except pw.PathwaysError as error:
        print("fork:", "is a fork of it" in str(error), flush=True)
    os._exit(0)
os.waitpid(child, 0)
process = in_jax.door._connected.process
lab.close()
assert in_jax.door is None
assert not process.alive, "the door ends with its lab"
for name, refused in (
    ("closed", lambda: jnp.sum(handle)),
    ("mesh", lambda: jax.jit(total)(numbers)),
):
    try:
        refused()
    except pw.PathwaysError as error:
        print(f"{name}:", "the lab is gone" in str(error))
try:
    np.asarray(put)
except RuntimeError as error:
    print("array:", "has been deleted" in str(error))
