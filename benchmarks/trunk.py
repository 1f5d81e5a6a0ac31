"""One trunk for many clients, beside a copy for each of them on the same device.

    python -m benchmarks.trunk [--clients 8] [--widths 256 3072 6144] [--milliseconds 20 0 0]

Every client asks for one row through a model, two calls under way.  A small model holds the device
for some milliseconds whatever the rows, as an accelerator does that reads its weights (emulated);
a large one takes the time that it takes here.  *a copy each*: weights and a function of its own,
so gangs of clients take turns on the device.
*one trunk*: all calls go through one copy, joined.  Each call's result is compared with NumPy's.
Then every client asks for more than the trunk can do, under shares of 1, 2, 4 ...
"""

from __future__ import annotations

import contextlib
import functools
import sys
import tempfile
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

import pathways_lab as pw
from benchmarks.harness.command import arguments, settings
from benchmarks.harness.report import Report, publish
from benchmarks.harness.rounds import Measured
from pathways_lab.client.trunk.trunk import ServingTrunk

UNDER_WAY = 2
"""Calls of a client."""
ALONE, TRUNK = "a copy each", "one trunk"
Call = Callable[[Any], Any]


LAYERS = 4


@dataclass(frozen=True)
class Model:
    """Products of one width.  milliseconds: for which a gang holds the device."""

    width: int
    milliseconds: float

    def __call__(self, weights: Any, x: Any) -> Any:
        """Values stay about as large as they are."""
        for w in weights:
            x = jnp.tanh(x @ w)
        return pw.emulated(self.milliseconds)(x) if self.milliseconds else x

    def weights(self) -> list[np.ndarray]:
        """Of all layers."""
        shape, rng = (self.width, self.width), np.random.default_rng(0)
        made = [rng.normal(size=shape, scale=self.width**-0.5) for _ in range(LAYERS)]
        return [w.astype(np.float32) for w in made]

    @property
    def name(self) -> str:
        """In tables."""
        nbytes = 4 * LAYERS * self.width**2
        held = f", {self.milliseconds:g} ms a gang (emulated)" if self.milliseconds else ""
        return f"{nbytes / 1e6:.0f} MB of weights{held}"


class Asking:
    """Clients that ask at the same time.  calls: of each that are over."""

    def __init__(self, calls: dict[str, Call], rows: dict[str, Any]) -> None:
        self.calls = Counter[str]()
        self.last: dict[str, Any] = {}
        self._until = 0.0
        self._asked = [(name, call, rows[name]) for name, call in calls.items()]

    def for_seconds(self, seconds: float) -> float:
        """Ask for so long; the seconds until all is over."""
        began = time.perf_counter()
        self._until = began + seconds
        with ThreadPoolExecutor(len(self._asked)) as pool:
            for each in [pool.submit(self._ask, *asked) for asked in self._asked]:
                each.result()
        return time.perf_counter() - began

    def _ask(self, name: str, call: Call, row: Any) -> None:
        flying: deque[Any] = deque()
        while time.perf_counter() < self._until:
            flying.append(call(row))
            if len(flying) == UNDER_WAY:
                self.last[name] = flying.popleft().block_until_ready()
                self.calls[name] += 1
        for each in flying:
            each.block_until_ready()
            self.calls[name] += 1


class Bench:
    """A lab of one device, its clients, and both ways to call the model."""

    def __init__(self, lab: pw.Lab, clients: Sequence[pw.Lab], model: Model) -> None:
        weights, self._model = model.weights(), model
        rng = np.random.default_rng(1)
        values = {c.name: rng.normal(size=(1, model.width)).astype(np.float32) for c in clients}
        slices = {c.name: c.slice(1) for c in clients}
        self.rows = {name: pw.device_put(x, slices[name]) for name, x in values.items()}
        plain = Model(model.width, 0.0)
        self.wanted = {name: plain(weights, x) for name, x in values.items()}
        own = lab.slice(1)
        self.lab, self._on, self._clients = lab, own, clients
        self._there = pw.device_put(weights, own)
        function = pw.jit(model, name="model")
        copies = {name: pw.device_put(weights, on) for name, on in slices.items()}
        self._alone: dict[str, Call] = {
            name: functools.partial(function, w) for name, w in copies.items()
        }

    @contextlib.contextmanager
    def trunk(
        self, most: int, policy: Any = None
    ) -> Iterator[tuple[ServingTrunk, dict[str, Call]]]:
        """The trunk, and the calls of its clients."""
        made = self.lab.trunk(
            "model", self._model, self._there, on=self._on, most=most, policy=policy
        )
        assert isinstance(made, ServingTrunk)
        with made:
            for client in self._clients:
                while "model" not in client.published:
                    time.sleep(0.001)
            yield made, {client.name: client.trunk("model") for client in self._clients}

    def rate(self, calls: dict[str, Call], seconds: float) -> tuple[float, Counter[str]]:
        """Seconds a call, and each client's calls.  Raises AssertionError for wrong results."""
        asking = Asking(calls, self.rows)
        took = asking.for_seconds(seconds)
        for name, made in asking.last.items():
            np.testing.assert_allclose(made.result(), self.wanted[name], rtol=1e-3, atol=1e-4)
        return took / asking.calls.total(), asking.calls

    def alone(self, seconds: float) -> float:
        """Seconds a call with a copy for each client."""
        return self.rate(self._alone, seconds)[0]


@contextlib.contextmanager
def one_device(clients: int) -> Iterator[tuple[pw.Lab, list[pw.Lab]]]:
    """A lab with one device, and its clients."""
    with (
        contextlib.ExitStack() as ends,
        tempfile.TemporaryDirectory() as folder,
        pw.start(
            islands=1, hosts_per_island=1, devices_per_host=1, memory="8 GB", progress=False
        ) as lab,
    ):
        file = Path(folder) / "lab.json"
        lab.invite(file)
        yield lab, [ends.enter_context(pw.connect(file, name=f"client{n}")) for n in range(clients)]


def case(
    lab: pw.Lab, clients: Sequence[pw.Lab], model: Model, rounds: int, budget: float
) -> tuple[list[float], list[float], str]:
    """Seconds a call of both ways, and the shares under a policy, in words."""
    bench, weights = Bench(lab, clients, model), {"client0": 1.0, "client1": 2.0, "client2": 4.0}
    alone, joined = [], []
    with bench.trunk(len(clients)) as (trunk, calls):
        bench.alone(budget), bench.rate(calls, budget)  # compiles
        gangs, before = trunk.gangs, trunk.calls.total()
        for number in range(rounds):
            alone.append(bench.alone(budget))
            joined.append(bench.rate(calls, budget)[0])
            print(f"{model.name}: {number + 1} of {rounds}", file=sys.stderr, flush=True)
        together = (trunk.calls.total() - before) / max(1, trunk.gangs - gangs)
    with bench.trunk(1, pw.ProportionalShare(weights)) as (_, calls):
        _, had = bench.rate({name: calls[name] for name in weights}, 3 * budget)
    shares = ", ".join(f"{had[name] / had.total():.1%}" for name in weights)
    told = f"{together:.1f} calls in a gang; weights 1, 2, 4 and a gang for each call: {shares}"
    return alone, joined, f"{model.name}: {told}."


def main() -> None:
    """Measure, print, publish."""
    parser = arguments(__doc__, rounds=5, budget=3.0)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--widths", type=int, nargs="+", default=[256, 3072, 6144])
    parser.add_argument("--milliseconds", type=float, nargs="+", default=[20.0, 0.0, 0.0])
    chosen = parser.parse_args()
    how, measured, notes = settings(chosen), Measured(), [""]
    for width, milliseconds in zip(chosen.widths, chosen.milliseconds, strict=True):
        model = Model(width, milliseconds)
        with one_device(chosen.clients) as (lab, clients):
            alone, joined, told = case(lab, clients, model, how.rounds, max(how.budget, 0.2))
        measured.times[model.name] = {ALONE: alone, TRUNK: joined}
        notes.append(told)
    title = f"One trunk for {chosen.clients} clients, and a copy for each"
    publish(Report("trunk", title, "call", measured, ALONE, notes=notes), how.folder)


if __name__ == "__main__":
    main()
