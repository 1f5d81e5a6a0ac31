"""Hosts that exchange shards without a network: a letter is noted, and delivered later."""

from __future__ import annotations

import queue
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from pathways_lab.core.errors import Failure
from pathways_lab.core.program.layout import Layout
from pathways_lab.core.program.program import Plan, Transfer, Value
from pathways_lab.core.slices.topology import SliceBinding
from pathways_lab.executor.actions import Receive, Send
from pathways_lab.executor.local_array import READY, Slot
from pathways_lab.executor.transfer_routes import Route, route
from pathways_lab.runtime.devices import CpuRuntime, Place
from pathways_lab.runtime.host.transfer_engine import Arrived, Exchange
from tests.runtime.host_kit import binding, layout
from tests.runtime.launch_kit import with_bytes

NEAR, FAR = "island0/host0", "island1/host0"


class Wire:
    """Peers that note what is sent, and hand it over when told."""

    def __init__(self) -> None:
        self.letters: list[tuple[str, dict[str, Any], list[bytes]]] = []
        self.broken: Exception | None = None

    def send(
        self, host: str, op: str, fields: dict[str, Any], buffers: Sequence[Any], done: Any
    ) -> None:
        self.letters.append((host, fields, [bytes(b) for b in buffers]))
        done(self.broken)


class Bench:
    """One host's exchange; what it posts is waited for here."""

    def __init__(self, host: str, wire: Wire) -> None:
        self.host = host
        self.runtime = CpuRuntime(host, 4)
        self.posted: queue.Queue[tuple[Callable[..., None], tuple[Any, ...]]] = queue.Queue()
        self.sent: list[tuple[Send, Failure | None, float, float, int]] = []
        self.arrived: list[Arrived] = []
        self.deaths: list[BaseException] = []
        self.exchange = Exchange(
            host,
            wire,  # type: ignore[arg-type]
            lambda: 1.0,
            lambda function, *args: self.posted.put((function, args)),
            self.deaths.append,
        )

    def settle(self) -> None:
        """Until everything that was submitted has been done and handed over."""
        self.exchange.submit(lambda: self.posted.put((_stop, ())))
        while True:
            function, args = self.posted.get(timeout=10)
            if function is _stop:
                assert self.deaths == []
                return
            function(*args)


def _stop() -> None:
    raise AssertionError


class Case:
    """A transfer between two slices, with a real source array."""

    def __init__(
        self,
        benches: dict[str, Bench],
        shape: tuple[int, ...],
        source: tuple[SliceBinding, Layout],
        target: tuple[SliceBinding, Layout],
        trimmed: bool = False,
        step: int = 0,
    ) -> None:
        self.benches, self.key = benches, (1, step)
        self.bindings = (source[0], target[0])
        self.values = tuple(
            with_bytes(shape, "float32", on.slice, where) for on, where in (source, target)
        )
        self.node = Transfer(0, 1, trimmed=trimmed)
        self.plan = Plan("p", "p", self.values, (), (), (), ())
        self.places: tuple[Place, ...] = tuple(
            benches[on.hosts[0]].runtime.open(on) for on in self.bindings
        )
        self.data = np.arange(np.prod(shape), dtype=np.float32).reshape(shape) + 1
        if trimmed:
            self.data[:2] = self.data[5:] = 0
        # Made by a computation, so that its memory is JAX's own.
        where = self.places[0].sharding(source[1])
        self.array = jax.jit(lambda x: x + 0, out_shardings=where)(jax.device_put(self.data, where))
        self.source, self.target = (self.slot(v) for v in self.values)
        self.source.payload = self.array
        self.source.become(READY)

    def slot(self, value: Value) -> Slot:
        return Slot(value, ())

    def route(self, host: str) -> Route:
        source, target = self.values
        assert source.layout
        assert target.layout
        return route(source.shape, source.layout, target.layout, *self.bindings, host)

    def send(self, failure: Failure | None = None) -> None:
        host = self.bindings[0].hosts[0]
        action = Send(self.key, self.plan, self.node, self.source, failure, 0)
        exchange, sent = self.benches[host].exchange, self.benches[host].sent
        exchange.submit(
            exchange.send, action, self.places[0], self.route(host), lambda *what: sent.append(what)
        )
        self.benches[host].settle()

    def receive(self, route: Route | None = None) -> None:
        host = self.bindings[1].hosts[0]
        route = route or self.route(host)
        action = Receive(self.key, self.plan, self.node, self.target, 0)
        exchange, arrived = self.benches[host].exchange, self.benches[host].arrived
        exchange.submit(exchange.receive, action, self.places[1], route, arrived.append)
        self.benches[host].settle()


def gathered(benches: dict[str, Bench]) -> Case:
    """Eight elements from two devices of a host to one of the other host."""
    near, far = binding(1, (2,), [0, 1], NEAR), binding(2, (1,), [0], FAR)
    return Case(benches, (8,), (near, layout(near, "a")), (far, layout(far, None)))
