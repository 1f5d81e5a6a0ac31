"""A lab on the accelerators of this machine, compared with plain JAX on the same ones.

``python -m tests.acceptance.accelerator`` takes one GPU or TPU.  Each check says how long it took,
or what was wrong; the kernel's own JAX computes on the same device, beside the lab.  With
``--twice`` two islands have the same GPU, each a part of its memory, and values travel between
them.  ``--platform cpu`` tries the checks themselves.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import pathways_lab as pw
from pathways_lab.timeline.records import Span
from pathways_lab.workloads import language
from tests.acceptance.reading import gangs

Check = Callable[["Stage"], str]
CHECKS: dict[str, Check] = {}
BETWEEN: dict[str, Check] = {}


class Stage:
    """A lab, a slice on each of its islands, and how large things may be."""

    def __init__(self, platform: str, islands: int) -> None:
        self.large = 1 << (28 if platform != "cpu" else 22)
        """Bytes of a large array."""
        self.lab = pw.start(islands, 1, 1, platform=platform, progress=False)
        self.slices = [self.lab.slice(1, island=f"island{n}") for n in range(islands)]
        self.s = self.slices[0]


def check(function: Check) -> Check:
    """A check of one island."""
    CHECKS[function.__name__.replace("_", " ")] = function
    return function


def between(function: Check) -> Check:
    """A check of two islands."""
    BETWEEN[function.__name__.replace("_", " ")] = function
    return function


def same(found: Any, expected: Any, rtol: float = 0.0) -> None:
    """Raises AssertionError with how far they are apart."""
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        a, b = np.asarray(a), np.asarray(b)
        assert a.dtype == b.dtype, f"{a.dtype} is not {b.dtype}"
        if rtol:
            np.testing.assert_allclose(a.astype("f8"), b.astype("f8"), rtol=rtol, atol=rtol)
        else:
            np.testing.assert_array_equal(a, b)


def rate(nbytes: int, begun: float) -> str:
    return f"{nbytes / (time.perf_counter() - begun) / 1e9:.2f} GB/s"


@check
def what_there_is(on: Stage) -> str:
    device = on.lab.devices()[0]
    return f"{on.lab.islands}; {device}; {on.lab.memory().devices[0]}; kernel: {jax.devices()}"


@check
def values_are_those_of_plain_jax(on: Stage) -> str:
    def mixed(x: Any) -> Any:
        y = jnp.tanh(x @ x) + jax.nn.softmax(x)
        return y, y.sum(0), (y > 0), jnp.argsort(y[0]), jnp.fft.fft(y[:4]), y.astype(jnp.bfloat16)

    exact = True
    for size in (7, 128, 1000):
        x = np.random.default_rng(size).normal(size=(size, size)).astype(np.float32)
        ours, plain = pw.jit(mixed, on=on.s)(x), jax.jit(mixed)(x)
        # Each process measures which products are fastest, and may choose others.
        same(ours[:2], plain[:2], rtol=2e-3)
        exact &= all(np.array_equal(a, b) for a, b in zip(ours, plain, strict=True))
    for kind in ("bfloat16", "float16", "int8", "uint32", "bool", "complex64", "float8_e4m3fn"):
        x = jnp.arange(64).astype(kind)
        same(pw.jit(lambda v: v[::-1], on=on.s)(x), x[::-1])
    return "to the bit" if exact else "but for products that XLA computed in another way"


@check
def random_numbers(on: Stage) -> str:
    def draw(key: Any) -> Any:
        return jax.random.normal(key, (1000,))

    same(pw.jit(draw, on=on.s)(jax.random.key(3)), jax.jit(draw)(jax.random.key(3)))
    return "the same"


Step = Callable[[Any, Any], Any]


def trained(jitted: Callable[[Step], Step], put: Callable[[Any], Any]) -> list[float]:
    """The losses of 30 steps.  jitted: the step, compiled.  put: a tree on its devices."""
    adam = optax.adam(1e-3)

    def step(state: Any, x: Any) -> Any:
        own, moments = state

        def loss(own: Any) -> Any:
            y = x
            for w in own:
                y = jnp.tanh(y @ w)
            return ((y - x) ** 2).mean()

        value, gradients = jax.value_and_grad(loss)(own)
        changes, moments = adam.update(gradients, moments, own)
        return (optax.apply_updates(own, changes), moments), value

    rng = np.random.default_rng(0)
    own = [rng.normal(size=(256, 256)).astype("f4") / 16 for _ in range(8)]
    x = rng.normal(size=(64, 256)).astype("f4")
    state, compiled, losses = put((own, jax.tree.map(np.asarray, adam.init(own)))), jitted(step), []
    for _ in range(30):
        state, loss = compiled(state, x)
        losses.append(loss)
    return [float(np.asarray(loss)) for loss in losses]


def compared(found: list[float], expected: list[float]) -> str:
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    equal = found == expected
    return f"30 losses, {'to the bit' if equal else 'within 1e-5'}, last {expected[-1]:.5f}"


def donating(step: Step) -> Step:
    return jax.jit(step, donate_argnums=0)


@check
def training(on: Stage) -> str:
    ours = trained(lambda f: pw.jit(f, on=on.s, donate_argnums=0), lambda v: pw.device_put(v, on.s))
    return compared(ours, trained(donating, jax.device_put))


@check
def programs(on: Stage) -> str:
    grow, shrink = pw.jit(lambda v: v * 2, on=on.s), pw.jit(lambda v: v - 1, on=on.s)

    @pw.program
    def steps(v: Any) -> Any:
        v = pw.cond(v.sum() > 9, grow, shrink, grow(v))
        return pw.until(lambda v: v.max() > 1000, lambda v: shrink(grow(v)), v, at_most=50)

    value = 32.0
    while not value > 1000:
        value = 2 * value - 1
    same(steps(np.full(4, 8.0, np.float32)), np.full(4, value, np.float32))
    return "a condition and a loop"


@check
def experts(on: Stage) -> str:
    def route(x: Any, router: Any) -> Any:
        return jax.lax.top_k(jax.nn.softmax(x @ router), 2)[::-1]

    places = [*on.slices, *(on.lab.slice(1) for _ in range(2))]
    eyes = [np.eye(64, dtype=np.float32) * n for n in range(1, len(places) + 1)]
    rng = np.random.default_rng(1)
    x, router = (
        rng.normal(size=(32, 64)).astype("f4"),
        rng.normal(size=(64, len(places))).astype("f4"),
    )
    moe = pw.experts(lambda w, rows: rows * w[0, 0], on=places, route=route)
    found = moe(eyes, pw.device_put(x, on.s), router)
    weight, chosen = jax.lax.top_k(jax.nn.softmax(x @ router), 2)
    same(found, (x * (weight * (chosen + 1)).sum(1, keepdims=True)).astype("f4"), rtol=1e-2)
    return f"{len(places)} of them"


@check
def callbacks(on: Stage) -> str:
    def body(v: Any) -> Any:
        return jax.pure_callback(lambda a: np.sort(np.asarray(a)), v, v) + 1

    same(pw.jit(body, on=on.s)(np.array([3.0, 1.0, 2.0], "f4")), np.array([2.0, 3.0, 4.0], "f4"))
    return "pure_callback"


@check
def a_value_that_is_not_a_number(on: Stage) -> str:
    with on.lab.check_nans(infs=True):
        logs = pw.jit(jnp.log, on=on.s, name="log")(np.zeros(4, np.float32))
    try:
        logs.result()
    except pw.PathwaysError as raised:
        return raised.failure.message
    raise AssertionError("not found")


@check
def up_and_down(on: Stage) -> str:
    value = np.random.default_rng(2).integers(0, 255, on.large, dtype=np.uint8)
    told = []
    for name, put in (("lab", lambda v: pw.device_put(v, on.s)), ("JAX", jax.device_put)):
        up, down = [], []
        for _ in range(4):
            begun = time.perf_counter()
            there = jax.block_until_ready(put(value))
            up.append(rate(value.nbytes, begun))
            begun = time.perf_counter()
            back = np.asarray(there)
            down.append(rate(value.nbytes, begun))
            same(back, value)
        told.append(f"{name} up {', '.join(up)}; down {', '.join(down)}")
    return f"{value.nbytes >> 20} MiB: {'; '.join(told)}"


@check
def memory_is_given_back(on: Stage) -> str:
    size = on.lab.memory().devices[0].limit // 5
    make = pw.jit(lambda seed: jnp.full((size // 4,), seed, jnp.float32), on=on.s)
    grow = pw.jit(lambda v: v + 1, on=on.s, donate_argnums=0)
    for n in range(12):
        large = grow(grow(make(np.float32(n))))
    assert float(np.asarray(large[:1])[0]) == 13.0
    return f"12 arrays of {size >> 20} MiB, one after the other, in {5 * size >> 20} MiB"


@check
def too_much_memory(on: Stage) -> str:
    size = on.lab.memory().devices[0].limit * 2
    large = pw.jit(lambda v: jnp.full((size,), 1, jnp.uint8) + v, on=on.s, name="large")
    try:
        large(np.uint8(1)).block_until_ready()
    except pw.PathwaysError as raised:
        same(pw.jit(lambda v: v + 1, on=on.s)(np.ones(2, "f4")), np.full(2, 2, "f4"))
        return f"{raised}; and the lab goes on"
    raise AssertionError("it fitted")


@check
def saved_and_restored(on: Stage) -> str:
    tree = {"a": np.arange(8, dtype="f4"), "b": jnp.ones((4, 4), jnp.bfloat16)}
    with tempfile.TemporaryDirectory() as folder:
        pw.save(f"{folder}/1", pw.device_put(tree, on.s)).wait()
        same(pw.restore(f"{folder}/1", pw.device_put(tree, on.s)), tree)
    return "a tree"


@check
def cancelled(on: Stage) -> str:
    slow = pw.jit(lambda v: jax.lax.fori_loop(0, 20, lambda _, a: jnp.tanh(a @ a), v), on=on.s)
    n = 4096 if on.large > 1 << 24 else 256
    v = pw.device_put(np.eye(n, dtype=np.float32), on.s)
    jax.block_until_ready(slow(v))
    begun, outs = time.perf_counter(), [slow(v) for _ in range(200)]
    done = on.lab.cancel(outs)
    waiting = slow(v).block_until_ready()
    del waiting
    return f"{done}; the next one was there after {time.perf_counter() - begun:.2f} s"


@check
def operations(on: Stage) -> str:
    v = np.ones((512, 512), np.float32)
    found = on.lab.operations(pw.jit(lambda a: jnp.sin(a @ a) + a.sum(), on=on.s), v)
    assert found, "none were seen"
    return f"\n{found}"


@check
def devices_are_busy_when_they_compute(on: Stage) -> str:
    n = 4096 if on.large > 1 << 24 else 256
    f = pw.jit(lambda v: jnp.tanh(v @ v), on=on.s, name="product")
    v = pw.device_put(np.eye(n, dtype=np.float32), on.s)
    jax.block_until_ready(f(v))
    time.sleep(0.5)
    begun = time.perf_counter()
    for _ in range(200):
        v = f(v)
    jax.block_until_ready(v)
    wall = time.perf_counter() - begun
    time.sleep(0.5)
    found = [g for g in gangs(on.lab) if g.program == "product"][-200:]
    busy = sum(g.end - g.start for g in found)
    span = found[-1].end - found[0].start
    plain = jax.jit(lambda v: jnp.tanh(v @ v))
    w = plain(jnp.eye(n))
    jax.block_until_ready(w)
    begun = time.perf_counter()
    for _ in range(200):
        w = plain(w)
    jax.block_until_ready(w)
    alone = time.perf_counter() - begun
    same(v, w)
    return (
        f"{len(found)} products of {n}: {1e3 * wall:.1f} ms, plain JAX {1e3 * alone:.1f} ms; busy "
        f"{1e3 * busy:.1f} ms of {1e3 * span:.1f}; {on.lab.timeline.waits()}"
    )


def products(n: int) -> float:
    """Seconds of a hundred chained products by JAX, where it computes now."""
    product = jax.jit(lambda v: jnp.tanh(v @ v))
    v = jax.block_until_ready(product(jnp.eye(n, dtype=jnp.float32)))
    begun = time.perf_counter()
    for _ in range(100):
        v = product(v)
    jax.block_until_ready(v)
    return time.perf_counter() - begun


@check
def jax_itself_through_the_door(on: Stage) -> str:
    n = 4096 if on.large > 1 << 24 else 256
    expected, alone = trained(donating, jax.device_put), products(n)
    drawn = np.asarray(jax.random.normal(jax.random.key(5), (1000,)))
    handle = pw.jit(lambda v: v * 2, on=on.s)(np.arange(8, dtype="f4"))
    with on.lab.open_door() as door:
        (device,) = door.devices[:1]
        told = f"{device.platform} {device.device_kind}; "
        told += compared(trained(donating, jax.device_put), expected)
        same(jax.random.normal(jax.random.key(5), (1000,)), drawn)
        same(jnp.mean(handle), np.float32(7))
        same(jax.grad(lambda v: (v**3).sum())(jnp.arange(4.0)), 3 * np.arange(4.0, dtype="f4") ** 2)
        x = np.array([3.0, 1.0], "f4")
        same(jax.jit(lambda v: jax.pure_callback(np.sort, v, v) + 1)(x), np.sort(x) + 1)
        through = products(n)
    return f"{told}; 100 products of {n}: {1e3 * through:.1f} ms, plain JAX {1e3 * alone:.1f} ms"


@check
def two_clients_share(on: Stage) -> str:
    """Each calls ahead what it has measured, for two seconds; their weights are 3 and 1."""
    n = 4096 if on.large > 1 << 24 else 256

    def turn(v: Any) -> Any:
        return jax.lax.fori_loop(0, 20, lambda _, a: jnp.tanh(a @ a), v)

    with tempfile.TemporaryDirectory() as folder:
        on.lab.invite(f"{folder}/lab.json")
        other = pw.connect(f"{folder}/lab.json", name="other")
        on.lab.policy = pw.ProportionalShare({on.lab.name: 3, "other": 1})
        places = [on.s, other.slice_at([("island0/host0", 0)])]
        loops = [pw.jit(turn, on=s, name=f"turn{k}") for k, s in enumerate(places)]
        values = [pw.device_put(np.eye(n, dtype=np.float32), s) for s in places]
        jax.block_until_ready([f(v) for f, v in zip(loops, values, strict=True)])
        end = time.perf_counter() + 2.0

        def work(k: int) -> None:
            v = values[k]
            while time.perf_counter() < end:
                for _ in range(32):
                    v = loops[k](v)
                jax.block_until_ready(v)

        threads = [threading.Thread(target=work, args=(k,)) for k in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        used = {
            client: account.device_seconds for client, account in on.lab.accounts().clients.items()
        }
        time.sleep(0.5)
        spans = [r for r in on.lab.timeline.records if isinstance(r, Span) and r.kind == "gang"]
        busy = [sum(g.end - g.start for g in spans if g.program == f"turn{k}") for k in (0, 1)]
        other.close()
    on.lab.policy = pw.ProportionalShare()
    return f"busy {busy[0]:.2f} s and {busy[1]:.2f} s; accounts {used}"


@check
def a_host_that_dies(on: Stage) -> str:
    f = pw.jit(lambda v: v * 3, on=on.s)
    same(f(np.ones(2, "f4")), np.full(2, 3, "f4"))
    begun = time.perf_counter()
    with on.lab.chaos.kill("island0/host0") as fault:
        lost = f(np.ones(2, "f4"))
        try:
            lost.result(timeout=60)
        except pw.PathwaysError as raised:
            told = raised.failure.message
        else:
            told = "its value was there before"
    marks = [f"killed and well again {time.perf_counter() - begun:.1f} s"]
    while True:
        try:
            on.s.rebind()
            marks.append(f"bound {time.perf_counter() - begun:.1f} s")
            same(pw.jit(lambda v: v * 3, on=on.s)(np.ones(2, "f4")), np.full(2, 3, "f4"))
            break
        except pw.PathwaysError as raised:
            marks.append(f"{raised.failure.message[:80]} {time.perf_counter() - begun:.1f} s")
            assert time.perf_counter() - begun < 90
            time.sleep(0.2)
    marks.append(f"computes {time.perf_counter() - begun:.1f} s")
    return f"{told}; {'; '.join(marks)}; {fault}"


@between
def values_travel(on: Stage) -> str:
    there, back = on.slices[1], on.slices[0]
    value = np.random.default_rng(3).integers(0, 255, on.large // 4, dtype=np.uint8)
    x, told = pw.device_put(value, back), []
    for _ in range(4):
        begun = time.perf_counter()
        y = jax.block_until_ready(pw.device_put(x, there))
        told.append(rate(value.nbytes, begun))
        same(y, value)
    f, g = (pw.jit(lambda v: v + 1, on=s) for s in on.slices)

    @pw.program
    def to_and_fro(v: Any) -> Any:
        for _ in range(20):
            v = f(pw.device_put(g(pw.device_put(v, there)), back))
        return v

    small = pw.device_put(np.zeros(8, np.float32), back)
    to_and_fro(small).block_until_ready()
    begun = time.perf_counter()
    for _ in range(5):
        to_and_fro(small).block_until_ready()
    hop = (time.perf_counter() - begun) / 200
    same(to_and_fro(small), np.full(8, 40, "f4"))
    return f"{value.nbytes >> 20} MiB: {', '.join(told)}; a hop of a small array {1e3 * hop:.2f} ms"


@between
def a_pipeline(on: Stage) -> str:
    size = language.Size(4, width=64, hidden=256, heads=4, context=32)
    own, batch = language.parameters(size), next(language.batches(size, 8))
    layers = list(zip(language.functions(size), own, strict=True))
    pipe = pw.pipeline(
        layers, on.slices, loss=language.loss, optimizer=optax.sgd(0.1), example=batch[0][:2],
        schedule="1f1b", microbatches=4,
    )  # fmt: skip
    state, found = pipe.init(), []
    for _ in range(3):
        state, loss = pipe.step(state, *batch)
        found.append(float(np.asarray(loss)))
    expected = float(language.plain_loss(size, own, *batch))
    assert abs(found[0] / expected - 1) < 1e-3, f"{found[0]} is not {expected}"
    assert found[0] > found[1] > found[2], found
    return f"losses {found}, plain JAX {expected}"


def main() -> int:
    """How many checks failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--platform", default="gpu", choices=("gpu", "tpu", "cpu"))
    parser.add_argument("--twice", action="store_true", help="two islands on the same GPU")
    parser.add_argument("--only", nargs="+", default=[], help="checks, by the words in their names")
    chosen = parser.parse_args()
    islands = 2 if chosen.twice else 1
    if chosen.twice and chosen.platform == "gpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = "0,0"
        os.environ["XLA_PYTHON_CLIENT_MEM_FRACTION"] = "0.25"
    begun = time.perf_counter()
    on = Stage(chosen.platform, islands)
    if chosen.twice and chosen.platform == "gpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = "0"
    print(f"ok    a lab has started, {time.perf_counter() - begun:.1f} s: {on.lab}", flush=True)
    failed = 0
    for name, function in {**(BETWEEN if chosen.twice else {}), **CHECKS}.items():
        if chosen.only and not any(word in name for word in chosen.only):
            continue
        begun = time.perf_counter()
        signal.alarm(120)
        try:
            told, good = function(on), True
        except Exception:
            told, good = traceback.format_exc(), False
            failed += 1
        signal.alarm(0)
        seconds = time.perf_counter() - begun
        print(f"{'ok   ' if good else 'WRONG'} {name}, {seconds:.2f} s: {told}", flush=True)
    on.lab.close()
    print(f"{failed} checks failed", flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main())
