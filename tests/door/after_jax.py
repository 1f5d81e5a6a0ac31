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
    numbers = np.arange(6, dtype=np.float32).reshape(2, 3)
    handle = pw.device_put(numbers, place.sharding(jax.P("x")))
    for factor in range(3):
        scaled = pw.jit(lambda v, factor=factor: v * factor, on=place)(handle)
        tree = door.array({"whole": handle, "scaled": [scaled], "name": "n"})
        array = tree["whole"]
        assert array.sharding == jax.NamedSharding(mesh, jax.P("x"))
        assert np.array_equal(tree["scaled"][0] + array, numbers * (factor + 1))
        assert tree["name"] == "n"
        given = door.handle([jax.jit(lambda v: v - 1)(array), jnp.float32(factor)])
        left = pw.jit(lambda v, n: v + n, on=place)(*given)
        assert np.array_equal(left.result(), numbers - 1 + factor)
    for refused, what in (
        (lambda: door.array(pw.jit(jax.random.key, on=place)(1)), "key_data"),
        (lambda: door.handle(before), "not the lab's"),
    ):
        try:
            refused()
        except pw.PathwaysError as error:
            print("refused:", what in str(error), "after_jax.py" in str(error))
    left_over = pw.device_put(numbers + 1, handle.sharding)
    for number in (0, 6):
        lab.publish(f"between a kernel and its door, {number}", [left_over], to=door.client)
        assert np.array_equal(door.array(handle), numbers), "another value is not the handle's"
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
