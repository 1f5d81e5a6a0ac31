"""A notebook kernel that has used JAX before it opens a door: argument 1 is a lab file."""

import gc
import sys
import weakref

import jax
import jax.numpy as jnp
import numpy as np

before = jnp.arange(4.0)
committed = jax.device_put(before, jax.devices()[0])
key = jax.random.key(7)
twice = jax.jit(lambda x: 2 * x)
twice(before)
drawn = np.asarray(jax.random.normal(key, (4,)))

import pathways_lab as pw  # noqa: E402

lab = pw.connect(sys.argv[1])
place = lab.slice(2, "x")
with lab.open_door("kernel") as door:
    assert jax.devices() == list(door.devices)
    assert [d.platform for d in jax.devices("cpu")] == ["cpu"]
    assert jax.devices("cpu")[0] not in door.devices
    assert jax.process_count() == 1
    x = jnp.ones(4)
    assert x.devices() == {door.devices[0]}
    assert np.array_equal(twice(before), [0, 2, 4, 6])
    assert twice(x).devices() == {door.devices[0]}
    assert np.array_equal(before + x, [1, 2, 3, 4])
    assert np.array_equal(jax.jit(lambda a, b: a + b)(before, x), [1, 2, 3, 4])
    assert np.array_equal(jax.random.normal(key, (4,)), drawn)
    assert np.array_equal(jax.grad(lambda v: (v * before).sum())(x), before)
    mesh = door.mesh(place)
    assert mesh.shape == {"x": 2}
    cut = jax.device_put(before, jax.NamedSharding(mesh, jax.P("x")))
    assert cut.devices() == set(mesh.devices.flat)
    assert np.array_equal(jax.jit(jnp.cumsum)(cut) * before, [0, 1, 6, 18])
    home = jax.device_put(cut, jax.devices("cpu")[0])
    assert np.array_equal(home + committed, [0, 2, 4, 6])
    with jax.default_device(jax.devices("cpu")[0]):
        assert jnp.zeros(2).devices() == {jax.devices("cpu")[0]}
    print("clients:", sorted(lab.clients))
    try:
        lab.open_door()
    except pw.PathwaysError as error:
        print("twice:", "already" in str(error))
assert [d.platform for d in jax.devices()] == ["cpu"]
assert np.array_equal(twice(before), [0, 2, 4, 6])
assert twice(before).devices() == {jax.devices("cpu")[0]}
try:
    np.asarray(x)
except jax.errors.JaxRuntimeError as error:
    print("gone:", str(error)[:11])
with lab.open_door() as door:
    assert jnp.ones(2).devices() == {door.devices[0]}
    client = weakref.ref(door.devices[0].client)
    lab.close()
    assert [d.platform for d in jax.devices()] == ["cpu"]
gc.collect()
print("left:", client())  # it would go on looking for work, at a tenth of a core
print("end")
