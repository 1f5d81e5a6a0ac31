"""A notebook kernel that has used JAX before it opens a door: argument 1 is a lab file."""

import gc
import itertools
import sys
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import optax

before = jnp.arange(4.0)
committed = jax.device_put(before, jax.devices()[0])
key = jax.random.key(7)
twice = jax.jit(lambda x: 2 * x)
twice(before)
drawn = np.asarray(jax.random.normal(key, (4,)))

import pathways_lab as pw  # noqa: E402

lab = pw.connect(sys.argv[1])
place = lab.slice(2, "x")
total = jax.shard_map(
    lambda v: jax.lax.psum(v, "x"), mesh=place.mesh, in_specs=jax.P("x"), out_specs=jax.P()
)
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
    mesh = place.mesh
    assert mesh.shape == {"x": 2}
    cut = jax.device_put(before, place.sharding(jax.P("x")))
    assert cut.devices() == set(mesh.devices.flat)
    assert np.array_equal(jax.jit(jnp.cumsum)(cut) * before, [0, 1, 6, 18])
    # JAX and the lab take meshes of JAX's devices, and those from before the door.
    whole = jax.shard_map(
        lambda v: jax.lax.psum(v, "x"), mesh=mesh, in_specs=jax.P("x"), out_specs=jax.P()
    )
    for made in (jax.jit, lambda f: pw.jit(f, on=place)):
        for summed, wanted in (
            (whole, [2, 4]),
            (total, [2, 4]),
            (lambda v: whole(v) + total(v), [4, 8]),
        ):
            assert np.array_equal(made(summed)(before), wanted), (made, wanted)
            assert np.array_equal(made(summed)(cut), wanted), (made, wanted)
    with jax.set_mesh(mesh):
        assert np.array_equal(jax.jit(jnp.negative)(cut), -before)
        assert np.array_equal(pw.jit(jnp.negative, on=place)(before), -before)
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
    ones, cut = jnp.ones_like(numbers), jax.NamedSharding(mesh, jax.P("x"))
    rule = optax.sgd(1.0)
    closed_over = [pw.device_put(numbers, place) for _ in range(4)]
    squares = pw.jit(lambda v: (v**2).sum(), on=place)
    for made, wanted in (
        (jnp.stack([handle, handle])[1], numbers),
        (jax.jit(lambda v: 2 * v)({"v": handle}["v"]), 2 * numbers),
        (jax.jit(lambda v: v + closed_over[0])(ones), 1 + numbers),
        (jax.jit(lambda v: closed_over[1] * v)(ones), numbers),
        (jax.jit(lambda n: closed_over[2][n])(1), numbers[1]),
        (jax.jit(lambda n: n + jnp.asarray(closed_over[3]))(1), 1 + numbers),
        (sum(map(jnp.asarray, closed_over)), 4 * numbers),
        (jax.jit(lambda v: v[0, 0] + jnp.sum(jnp.square(handle)))(ones), 56),
        (jax.grad(lambda v: (v**2).sum())(handle), 2 * numbers),
        (jax.grad(squares)(handle), 2 * numbers),
        (jax.jit(lambda v: 1 + squares(v))(handle), 1 + (numbers**2).sum()),
        (jax.vmap(jnp.sum)(handle), numbers.sum(1)),
        (
            jax.lax.scan(lambda c, row: (c + row, c), handle[0], handle)[0],
            numbers[0] * 2 + numbers[1],
        ),
        (jax.lax.top_k(handle, 1)[0], numbers[:, 2:]),
        (ones + handle, 1 + numbers),
        (handle - ones, numbers - 1),
        (ones[handle > 2], np.ones(3)),
        (optax.apply_updates(handle, rule.update(handle, rule.init(handle))[0]), 0 * numbers),
        (jax.device_put(handle, jax.NamedSharding(mesh, jax.P())), numbers),
        (jax.tree.map(jnp.negative, [handle])[0], -numbers),
        (handle.addressable_shards[0].data, numbers[:1]),
    ):
        assert np.array_equal(made, wanted), (made, wanted)
        assert made.devices() <= set(door.devices)
    assert isinstance(handle, jax.Array)
    assert isinstance(handle, pw.Handle)
    assert isinstance(handle + 1, pw.Handle)
    there = pw.jit(lambda k: jax.random.normal(k, (4,)), on=place)(jax.random.key(jnp.int32(7)))
    assert np.array_equal(there, drawn)
    door._numbers = itertools.count(2000)
    assert pw.jit(lambda v, w: v + w, on=place)({"v": ones}["v"], 3 * ones)[1, 2] == 4
    assert next(door._numbers) == 2001, "arrays on the lab are arguments without their bytes"
    assert jnp.zeros_like(handle).sharding == handle.sharding == cut
    assert pw.device_put(numbers, handle.sharding).slice is place
    assert pw.jit(lambda v: v, in_shardings=cut)(numbers).layout == handle.layout
    chosen = pw.jit(jax.random.key, on=place)(7)
    assert np.array_equal(jax.random.normal(chosen, (4,)), drawn)
    assert (jnp.float16(1) * pw.jit(lambda: 2.0, on=place)()).dtype == jnp.float16
    with pw.patched():
        doubled = jax.jit(lambda v: 2 * v, in_shardings=cut)(pw.device_put(numbers, cut))
        assert not isinstance(doubled, pw.Handle)
        assert np.array_equal(jax.device_put(doubled, cut), 2 * numbers)
    many = pw.device_put([np.full(2, n) for n in range(40)], place)
    door._numbers = itertools.count(1000)
    assert jax.jit(sum)(many)[0] == jnp.sum(many[39]) * 10 == 780
    assert next(door._numbers) == 1001, "one exchange for all of them, and for later reads none"
    another = pw.connect(sys.argv[1])
    elsewhere = pw.device_put(numbers, another.slice(1))
    gone = pw.device_put(numbers, place)
    jnp.sum(gone)
    gone.delete()
    for refused, what in (
        (lambda: jnp.sum(gone), "was deleted"),
        (lambda: jnp.sum(elsewhere), "takes nothing of another lab"),
        (lambda: door.handle(before), "not the lab's"),
    ):
        try:
            refused()
        except pw.PathwaysError as error:
            print("refused:", what in str(error), str(error).count("after_jax.py"))
    another.close()
    print("clients:", sorted(lab.clients))
    try:
        lab.open_door()
    except pw.PathwaysError as error:
        print("twice:", "already" in str(error))
assert [d.platform for d in jax.devices()] == ["cpu"]
try:
    np.asarray(x)
except RuntimeError as error:
    print("gone:", "has been deleted" in str(error))
# The next need opens another door, which stays.
assert isinstance(handle, jax.Array)
far = jnp.negative(handle)
assert np.array_equal(twice(before), [0, 2, 4, 6])
assert twice(before).devices() == {jax.devices("cpu")[0]}
with lab.open_door() as door:
    assert jnp.ones(2).devices() == {door.devices[0]}
    assert np.array_equal(jnp.negative(handle), -numbers)
assert np.array_equal(far, -numbers)
assert [d.platform for d in jax.devices()] == ["cpu"]
with lab.open_door() as door:
    client = weakref.ref(door.devices[0].client)
    lab.close()
    assert [d.platform for d in jax.devices()] == ["cpu"]
assert twice(before).devices() == {jax.devices("cpu")[0]}
try:
    jnp.sum(handle)
except pw.PathwaysError as error:
    print("closed:", "the lab is gone" in str(error))
for name in {*globals()} - {"gc", "client"}:
    if not name.startswith("__"):
        del globals()[name]  # arrays keep the client
gc.collect()
print("left:", client())  # it would go on looking for work, at a tenth of a core
print("end")
