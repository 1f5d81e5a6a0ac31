"""Programs that decide, beside the same without decisions, and beside plain JAX.

    python -m benchmarks.deciding [--turns 1000] [--rows 1024] [--width 128]

*A loop over two islands*: two calls a turn, one on each island; it ends by a value on a device.
``pw.until`` is beside the same number of turns without a decision, and beside Python's own loop,
which asks for the value each turn.
*A mixture of experts*: a slice each for the experts, half of them on another island, a row goes to
two of them.  ``pw.experts`` is beside a program in which every expert computes every row, and
beside plain JAX, which does the same in one process; one call forward, and one training step's
gradients.  Results are compared.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import pathways_lab as pw
from benchmarks.harness.command import arguments, settings
from benchmarks.harness.report import Report, publish
from benchmarks.harness.rounds import Measured

EXPERTS = 6
UNROLLED, UNTIL, PYTHON = "without a decision", "pw.until", "Python's own loop"
ALL, SPARSE, PLAIN = "every expert, every row", "pw.experts", "plain JAX, every expert, every row"
Systems = dict[str, Callable[[], Any]]


def loop(lab: pw.Lab, turns: int) -> Systems:
    """One run of so many turns; each gives the number that it has counted to."""
    west, east = lab.slice(1, island="island0"), lab.slice(1, island="island1")
    there, back = (pw.jit(lambda x: x + 1, on=on, name=on.island) for on in (west, east))
    over = pw.jit(lambda x: x >= 2 * turns, on=west, name="over")

    def turn(x: Any) -> Any:
        return pw.device_put(back(there(x)), west)

    @pw.program
    def unrolled(x: Any) -> Any:
        for _ in range(turns):
            x = turn(x)
        return x

    @pw.program
    def until(x: Any) -> Any:
        return pw.until(over, turn, x, at_most=turns)

    one = pw.program(turn)
    start = pw.device_put(np.float32(0), west)

    def python() -> Any:
        x = start
        while not bool(over(x)):
            x = one(x)
        return x.result()

    return {
        UNROLLED: lambda: unrolled(start).result(),
        UNTIL: lambda: until(start).result(),
        PYTHON: python,
    }


class Mixture:
    """Experts, a router and rows, in the lab and in plain JAX."""

    def __init__(self, lab: pw.Lab, rows: int, width: int, experts: int = EXPERTS) -> None:
        rng = np.random.default_rng(0)

        def normal(*shape: int) -> Any:
            return rng.normal(0, shape[0] ** -0.5, shape).astype(np.float32)

        home = lab.slice(1, island="island0")
        on = [lab.slice(1, island=f"island{n % 2}") for n in range(experts)]
        self.experts = [(normal(width, 4 * width), normal(4 * width, width)) for _ in on]
        self.router, self.x = normal(width, experts), normal(rows, width)
        route = pw.jit(self.route, name="router")
        self._moe = pw.experts(self.expert, on=on, route=route)
        calls = [pw.jit(self.share, on=place, static_argnums=0, name="expert") for place in on]
        total = pw.jit(lambda *ys: sum(ys), on=home, name="sum")

        def every(experts: Any, x: Any, router: Any) -> Any:
            chosen = route(x, router)
            return total(
                *[f(n, p, x, *chosen) for n, (f, p) in enumerate(zip(calls, experts, strict=True))]
            )

        self._every = every
        self.there = (
            [pw.device_put(own, place) for own, place in zip(self.experts, on, strict=True)],
            pw.device_put(self.x, home),
            pw.device_put(self.router, home),
        )

    @staticmethod
    def expert(own: Any, rows: Any) -> Any:
        """One expert."""
        return jax.nn.gelu(rows @ own[0]) @ own[1]

    @staticmethod
    def route(x: Any, router: Any) -> Any:
        """The two best experts of each row, and their weights."""
        weights, choice = jax.lax.top_k(jax.nn.softmax(x @ router), 2)
        return choice, weights

    @classmethod
    def share(cls, n: int, own: Any, x: Any, choice: Any, weights: Any) -> Any:
        """Expert *n* for all rows, with their weights."""
        return jnp.where(choice == n, weights, 0).sum(axis=1)[:, None] * cls.expert(own, x)

    def plain(self, experts: Any, x: Any, router: Any) -> Any:
        """The sum in plain JAX."""
        chosen = self.route(x, router)
        return sum(self.share(n, own, x, *chosen) for n, own in enumerate(experts))

    def systems(self, what: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Systems:
        """What is measured of each way to compute the sum: itself, or its gradients."""
        here = (self.experts, self.x, self.router)
        plain = jax.jit(what(self.plain))
        every, sparse = (pw.program(what(f), name="mixture") for f in (self._every, self._moe))
        return {
            PLAIN: lambda: jax.block_until_ready(plain(*here)),
            ALL: lambda: jax.block_until_ready(every(*self.there)),
            SPARSE: lambda: jax.block_until_ready(sparse(*self.there)),
        }


def forward(mix: Callable[..., Any]) -> Callable[..., Any]:
    """The sum itself."""
    return lambda *args: mix(*args)


def gradients(mix: Callable[..., Any]) -> Callable[..., Any]:
    """Gradients of parameters, rows and the router."""
    return jax.grad(lambda *args: (mix(*args) ** 2).mean(), argnums=(0, 1, 2))


def check(systems: Systems) -> None:
    """Compile, and raise AssertionError where two ways do not give the same."""
    first, *others = [jax.device_get(run()) for run in systems.values()]
    for other in others:
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5), first, other
        )


def measure(systems: Systems, rounds: int, each: int) -> dict[str, list[float]]:
    """Seconds divided by *each*, the systems in turn."""
    times: dict[str, list[float]] = {name: [] for name in systems}
    for _ in range(rounds):
        for name, run in systems.items():
            began = time.perf_counter()
            run()
            times[name].append((time.perf_counter() - began) / each)
    return times


def main() -> None:
    """Measure, print, publish."""
    parser = arguments(__doc__, rounds=15, budget=0.0)
    parser.add_argument("--turns", type=int, default=1000)
    parser.add_argument("--rows", type=int, default=1024)
    parser.add_argument("--width", type=int, default=128)
    chosen = parser.parse_args()
    how, loops, mixtures = settings(chosen), Measured(), Measured()
    with pw.start(islands=2, hosts_per_island=1, devices_per_host=EXPERTS, progress=False) as lab:
        turns = loop(lab, chosen.turns)
        check(turns)
        name = f"{chosen.turns} turns over two islands"
        loops.times[name] = measure(turns, max(3, how.rounds // 3), chosen.turns)
        print(name, file=sys.stderr, flush=True)
        mixture = Mixture(lab, chosen.rows, chosen.width)
        for title, what in (("forward", forward), ("gradients", gradients)):
            systems = mixture.systems(what)
            check(systems)
            name = f"{chosen.rows} rows of {chosen.width}, two of {EXPERTS} experts, {title}"
            mixtures.times[name] = measure(systems, how.rounds, 1)
            print(name, file=sys.stderr, flush=True)
    publish(Report("deciding", "A loop that a value ends", "turn", loops, UNROLLED), how.folder)
    publish(Report("experts", "A mixture of experts", "call", mixtures, PLAIN), how.folder)


if __name__ == "__main__":
    main()
