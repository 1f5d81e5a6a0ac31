"""The computation that every system runs, and one host's part of it.

A *computation* is one scalar AllReduce and one scalar addition on all hosts,
each depending on the one before (the paper's section 5.1); ``add`` leaves out
the AllReduce, so that only dispatch is compared.  The mean over the hosts is
added to one, so the value counts the computations: a system that skips some is
caught.

Frameworks without collectives run the very same multi-controller JAX inside
their workers: a :class:`Member` per host, whose state stays where it is and
whose calls come in order.  That is the cheapest that they can be asked for: no
array travels, a call carries two flags.

Rule for maintainers: imports JAX only inside, after the platform was chosen.
"""

from __future__ import annotations

import abc
import os
import socket
import time
from typing import Any

NODES = 128
WAIT, OP, CHAIN, FUSED = "OpByOp, wait each", "OpByOp", f"Chained {NODES}", f"Fused {NODES}"
MODES = (WAIT, OP, CHAIN, FUSED)
"""How a user calls it: a call per computation, waited for or not; a call per
program of 128 nodes; a call per node that holds 128 computations."""

ALLREDUCE, ADD = "AllReduce + add", "add"
WORKS = (ALLREDUCE, ADD)


def case(work: str, mode: str) -> str:
    """The name of a case."""
    return f"{work}: {mode}"


def parts(case: str) -> tuple[str, str]:
    """Work and mode of a case."""
    work, mode = case.split(": ", 1)
    return work, mode


def computation(work: str) -> Any:
    """The function of one device's part of the value, for use inside ``shard_map`` over ``x``."""
    import jax

    def allreduce(value: Any) -> Any:
        return jax.lax.pmean(value, "x") + 1

    def add(value: Any) -> Any:
        return value + 1

    return {ALLREDUCE: allreduce, ADD: add}[work]


def repeated(function: Any, times: int) -> Any:
    """*function* after itself, *times* times."""

    def many(value: Any) -> Any:
        for _ in range(times):
            value = function(value)
        return value

    return many


def free_port() -> int:
    """A TCP port of this machine that nobody listens at."""
    with socket.socket() as made:
        made.bind(("127.0.0.1", 0))
        return int(made.getsockname()[1])


class Gang(abc.ABC):
    """A child that runs the gang: what a framework has to say, and what all share."""

    def __init__(self, hosts: int) -> None:
        self.hosts = hosts

    @abc.abstractmethod
    def start(self) -> None:
        """Start the framework and the members."""

    @abc.abstractmethod
    def reset(self) -> None:
        """Make the value zero, and wait for that."""

    @abc.abstractmethod
    def calls(self, work: str, mode: str, count: int) -> None:
        """*count* calls as the mode says; return when all is done on all hosts."""

    @abc.abstractmethod
    def value(self) -> float:
        """The value on the first host."""

    @abc.abstractmethod
    def stop(self) -> None:
        """End the framework."""

    def timed(self, work: str, mode: str, count: int) -> float:
        """Seconds of *count* calls."""
        begun = time.perf_counter()
        self.calls(work, mode, count)
        return time.perf_counter() - begun

    def round(self, case: str, units: int) -> tuple[float, float]:
        """At least *units* computations.  Raises RuntimeError when the value is wrong."""
        work, mode = parts(case)
        each = 1 if mode in (WAIT, OP) else NODES
        count = -(-units // each)
        self.reset()
        seconds = self.timed(work, mode, count)
        value, wanted = self.value(), float(count * each)
        if value != wanted:
            raise RuntimeError(f"after {wanted:.0f} computations the value is {value:.0f}")
        return seconds, wanted


class Member:
    """One host of multi-controller JAX with one CPU device.

    number, of: which host of how many.  address: of the first, ``host:port``.
    """

    def __init__(self, number: int, of: int, address: str) -> None:
        os.environ["JAX_PLATFORMS"] = "cpu"
        # Whoever tests may have asked for several devices per process.
        os.environ.pop("XLA_FLAGS", None)
        import jax
        import numpy as np
        from jax.sharding import NamedSharding, PartitionSpec

        jax.config.update("jax_platforms", "cpu")
        if of > 1:
            jax.config.update("jax_cpu_collectives_implementation", "gloo")
            jax.distributed.initialize(address, of, number)
        mesh = jax.make_mesh((of,), ("x",))
        spread = PartitionSpec("x")
        self._functions = {}
        for work in WORKS:
            one = jax.shard_map(computation(work), mesh=mesh, in_specs=spread, out_specs=spread)
            self._functions[work, False] = jax.jit(one)
            self._functions[work, True] = jax.jit(repeated(one, NODES))
        self._zero = jax.make_array_from_callback(
            (of,), NamedSharding(mesh, spread), lambda _: np.zeros(1, np.float32)
        )
        self._x = self._zero
        for work in WORKS:
            self.step(work, False, True)
            self.step(work, True, True)

    def step(self, work: str, fused: bool, wait: bool) -> int:
        """One computation, or 128 of them in one; *wait* until it is done."""
        self._x = self._functions[work, fused](self._x)
        if wait:
            self._x.block_until_ready()
        return 0

    def run(self, work: str, mode: str, count: int) -> float:
        """Multi-controller: this host makes all calls by itself.  Returns seconds."""
        self.step(ALLREDUCE, False, True)  # all hosts begin together
        function, x = self._functions[work, mode == FUSED], self._zero
        begun = time.perf_counter()
        for _ in range(count):
            x = function(x)
            if mode == WAIT:
                x.block_until_ready()
        self._x = x.block_until_ready()
        return time.perf_counter() - begun

    def reset(self) -> int:
        """Make the value zero."""
        self._x = self._zero
        return 0

    def value(self) -> float:
        """The part of the value that is here."""
        import numpy as np

        return float(np.asarray(self._x.addressable_shards[0].data)[0])


_members: list[Member] = []


def begin(number: int, of: int, address: str) -> int:
    """Make this process a member, for frameworks that call functions."""
    _members[:] = [Member(number, of, address)]
    return number


def step(work: str, fused: bool, wait: bool, after: object = None) -> int:
    """One call of this process's member.  after: what it depends on; not looked at."""
    return _members[0].step(work, fused, wait)


def reset() -> int:
    """Make the value of this process's member zero."""
    return _members[0].reset()


def value() -> float:
    """The value of this process's member."""
    return _members[0].value()
