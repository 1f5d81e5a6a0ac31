"""One trunk for many clients, beside a copy for each of them on the same device.

    python -m benchmarks.trunk [--clients 8] [--widths 256 3072 6144] [--milliseconds 20 0 0]

Every client, a process of its own, asks for one row through a model, two calls under way.  A small
model holds the device for some milliseconds whatever the rows, as an accelerator does that reads
its weights (emulated); a large one takes the time that it takes here.  *a copy each*: weights and
a function of its own, so gangs of clients take turns on the device.  *one copy, in turns*: a trunk
that joins no calls.  *one trunk*: all calls go through one copy, joined.  Results are compared
(:mod:`benchmarks.gangs.asking`).
Then every client asks for more than the trunk can do, under shares of 1, 2, 4 ...

A model of which an accelerator holds one copy: ``--platform gpu --one-copy --dtype bfloat16
--widths 24576 --layers 64 --milliseconds 0``.
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pathways_lab as pw
from benchmarks.gangs.asking import COPIES, TRUNK, TURNS, Asker, Model
from benchmarks.harness.child import Child
from benchmarks.harness.command import arguments, settings
from benchmarks.harness.report import Report, publish
from benchmarks.harness.rounds import Measured
from pathways_lab.client.trunk.trunk import ServingTrunk


class Bench:
    """A lab of one device, and its clients for one model."""

    def __init__(self, lab: pw.Lab, clients: Sequence[Child | Asker], model: Model) -> None:
        self.clients, self._lab, self._model = clients, lab, model
        self._on = lab.slice(1)
        self._weights = pw.jit(model.weights, on=self._on)(0)

    @contextlib.contextmanager
    def trunk(self, name: str, most: int, policy: Any = None) -> Iterator[ServingTrunk]:
        """A trunk, for so many calls a gang."""
        made = self._lab.trunk(
            name, self._model, self._weights, on=self._on, most=most, policy=policy
        )
        assert isinstance(made, ServingTrunk)
        with made:
            yield made

    def ask(self, way: str, seconds: float, first: int | None = None) -> tuple[float, list[float]]:
        """All clients, or the *first* ones, ask for so long: seconds a call, and calls of each."""
        asked, milliseconds = self.clients[:first], max(1, round(1e3 * seconds))
        with ThreadPoolExecutor(len(asked)) as pool:
            timed = list(pool.map(lambda client: client.round(way, milliseconds), asked))
        calls = [units for _, units in timed]
        return max(took for took, _ in timed) / sum(calls), calls


@contextlib.contextmanager
def one_device(clients: int, model: Model, platform: str, copies: bool) -> Iterator[Bench]:
    """A lab with one device, and clients that are processes of their own, with *copies* or not."""
    memory = "8 GB" if platform == "cpu" else None
    with (
        contextlib.ExitStack() as ends,
        tempfile.TemporaryDirectory() as folder,
        pw.start(1, 1, 1, platform=platform, memory=memory, progress=False) as lab,
    ):
        file = Path(folder) / "lab.json"
        lab.invite(file)
        there: list[Child] = []
        for seed in range(clients):
            name = f"client{seed}"
            there.append(
                Child(
                    name, "benchmarks.gangs.asking", [],
                    file=str(file), client=name, seed=seed, copy=copies, **asdict(model),
                )
            )  # fmt: skip
            ends.callback(there[-1].stop)
        with ThreadPoolExecutor(clients) as pool:
            list(pool.map(Child.start, there))
        yield Bench(lab, there, model)


def case(
    bench: Bench, model: Model, ways: Sequence[str], rounds: int, budget: float
) -> tuple[dict[str, list[float]], str]:
    """Seconds a call of all ways, and the shares under a policy, in words."""
    times: dict[str, list[float]] = {way: [] for way in ways}
    with bench.trunk(TRUNK, len(bench.clients)) as trunk, bench.trunk(TURNS, 1):
        for way in ways:
            bench.ask(way, budget)  # compiles
        gangs, before = trunk.gangs, trunk.calls.total()
        for number in range(rounds):
            for way, seconds in times.items():
                seconds.append(bench.ask(way, budget)[0])
            told = ", ".join(f"{way} {1e3 * times[way][-1]:.3g} ms a call" for way in ways)
            print(f"{model.name}: {number + 1} of {rounds}: {told}", file=sys.stderr, flush=True)
        together = (trunk.calls.total() - before) / max(1, trunk.gangs - gangs)
    weights = {"client0": 1.0, "client1": 2.0, "client2": 4.0}
    with bench.trunk(TRUNK, 1, pw.ProportionalShare(weights)):
        _, had = bench.ask(TRUNK, 3 * budget, len(weights))
    shares = ", ".join(f"{calls / sum(had):.1%}" for calls in had)
    told = f"{together:.1f} calls in a gang; weights 1, 2, 4 and a gang for each call: {shares}"
    return times, f"{model.name}: {told}."


def main() -> None:
    """Measure, print, publish."""
    parser = arguments(__doc__, rounds=5, budget=3.0)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--widths", type=int, nargs="+", default=[256, 3072, 6144])
    parser.add_argument("--milliseconds", type=float, nargs="+", default=[20.0, 0.0, 0.0])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--platform", default="cpu")
    parser.add_argument("--one-copy", action="store_true", help="clients have none of their own")
    chosen = parser.parse_args()
    how, measured, notes = settings(chosen), Measured(), [""]
    ways = (TURNS, TRUNK) if chosen.one_copy else (COPIES, TURNS, TRUNK)
    for width, milliseconds in zip(chosen.widths, chosen.milliseconds, strict=True):
        model = Model(width, milliseconds, chosen.layers, chosen.dtype)
        with one_device(chosen.clients, model, chosen.platform, not chosen.one_copy) as bench:
            times, told = case(bench, model, ways, how.rounds, max(how.budget, 0.2))
        measured.times[model.name] = times
        notes.append(told)
    title = f"One trunk for {chosen.clients} clients, and a copy for each"
    publish(Report("trunk", title, "call", measured, ways[0], notes=notes), how.folder)


if __name__ == "__main__":
    main()
