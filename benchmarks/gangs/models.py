"""Training steps of real models, each forward, backward and update as one donated function.

Language models of 2, 4 and 12 layers (:mod:`pathways_lab.workloads.language`), a multilayer
perceptron and a convolutional network, with optax's adamw.  Their state is dozens to hundreds of
arrays; examples are cut over the devices, everything else is copied to all of them.  Plain JAX
runs a step in its one process on as many devices as the lab's host has, the lab on one host;
through the door JAX's own code runs on the lab's devices.  On several hosts the peer is
multi-controller JAX: a process for each host, each with this loop in it.

Rule for maintainers: both systems get the same functions, and their first losses are compared
with those of plain JAX on one device before anything is timed.
"""

from __future__ import annotations

import abc
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from benchmarks.gangs.multi_controller import Controllers, Obey
from benchmarks.gangs.one_host import lab_and_slice, plain_mesh
from benchmarks.harness.child import Served, serve

LAYERS = {f"GPT, {blocks} layers": blocks for blocks in (2, 4, 12)}
MLP = "MLP, 4 layers"
CONVOLUTION = "Convolution, 4 layers"
MODELS = (*LAYERS, MLP, CONVOLUTION)
WIDE = "GPT, 4 layers, wide"
"""50 million numbers, for accelerators."""
EXAMPLES = 8
FIRST = 3
"""So many losses are compared."""
AHEAD = 8
"""Every so many steps the loop waits for the loss of so many steps before.

More than 32 launches ahead on several devices, JAX's process ends: its threads starve each other.
"""
CLOSE = 1e-4
"""As far as sums over several devices may differ, relative."""


def model(case: str) -> tuple[Callable[..., Any], Any, Any]:
    """The step ``(state, batch) -> (state, loss)`` of a case, its first state and its batch."""
    import jax
    import numpy as np
    import optax

    own, batch, loss = _PARTS.get(case, _language)(case)
    adamw = optax.adamw(1e-3)

    def step(state: Any, batch: Any) -> Any:
        own, moments = state
        value, gradients = jax.value_and_grad(loss)(own, *batch)
        changes, moments = adamw.update(gradients, moments, own)
        return (optax.apply_updates(own, changes), moments), value

    moments = jax.tree.map(np.asarray, adamw.init(own))
    return step, (own, moments), batch


Parts = tuple[Any, Any, Callable[..., Any]]
"""Parameters, a batch, and the loss of both."""


def _language(case: str) -> Parts:
    from pathways_lab.workloads import language

    size = (
        language.Size(4, width=1024, hidden=4096, heads=16, context=512)
        if case == WIDE
        else language.Size(LAYERS[case], width=64, hidden=256, heads=4, context=32)
    )

    def loss(own: Any, symbols: Any, labels: Any) -> Any:
        return language.plain_loss(size, own, symbols, labels)

    return language.parameters(size), next(language.batches(size, EXAMPLES)), loss


def _perceptron(case: str) -> Parts:
    import jax
    import numpy as np

    rng = np.random.default_rng(0)
    own = [
        {"w": (rng.normal(size=(128, 128)) / 11).astype(np.float32), "b": np.zeros(128, "f4")}
        for _ in range(4)
    ]
    x = rng.normal(size=(EXAMPLES * 8, 128)).astype(np.float32)

    def loss(own: Any, x: Any, y: Any) -> Any:
        for layer in own:
            x = jax.nn.tanh(x @ layer["w"] + layer["b"])
        return ((x - y) ** 2).mean()

    return own, (x, np.tanh(x)), loss


def _convolution(case: str) -> Parts:
    import jax
    import numpy as np

    rng = np.random.default_rng(0)
    own = [
        {"w": (rng.normal(size=(3, 3, n, 32)) / 12).astype(np.float32), "b": np.zeros(32, "f4")}
        for n in (3, 32, 32, 32)
    ]
    x = rng.normal(size=(EXAMPLES, 32, 32, 3)).astype(np.float32)
    y = np.sign(rng.normal(size=(EXAMPLES, 32))).astype(np.float32)

    def loss(own: Any, x: Any, y: Any) -> Any:
        for layer in own:
            x = jax.lax.conv_general_dilated(
                x, layer["w"], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
            )
            x = jax.nn.relu(x + layer["b"])
        return ((x.mean((1, 2)) - y) ** 2).mean()

    return own, (x, y), loss


_PARTS = {MLP: _perceptron, CONVOLUTION: _convolution}


def first_losses(case: str) -> list[float]:
    """Those of plain JAX on one device."""
    import jax

    step, state, batch = model(case)
    step, found = jax.jit(step), []
    for _ in range(FIRST):
        state, loss = step(state, batch)
        found.append(float(loss))
    return found


def arrays(case: str) -> int:
    """How many arrays its state has."""
    import jax

    return len(jax.tree.leaves(model(case)[1]))


class Training(abc.ABC):
    """A child that times steps.  expected: the first losses of each case."""

    def __init__(self, devices: int, expected: dict[str, Sequence[float]]) -> None:
        self.devices = devices
        self._expected = expected
        self._running: dict[str, Any] = {}

    @abc.abstractmethod
    def start(self) -> None:
        """Open the devices."""

    @abc.abstractmethod
    def put(self, tree: Any, *spec: str) -> Any:
        """Arrays on all devices, whole or cut."""

    @abc.abstractmethod
    def jit(self, step: Any) -> Any:
        """The compiled function, which may overwrite its state."""

    @abc.abstractmethod
    def stop(self) -> None:
        """End everything."""

    def round(self, case: str, units: int) -> tuple[float, float]:
        """So many steps, in a loop that looks at its losses now and then."""
        import jax

        if case not in self._running:
            self._running[case] = self._begun(case)
        step, state, batch = self._running[case]
        begun = time.perf_counter()
        earlier = None
        for number in range(1, units + 1):
            state, loss = step(state, batch)
            if number % AHEAD == 0:
                jax.block_until_ready(earlier)
                earlier = loss
        jax.block_until_ready((state, loss))
        seconds = time.perf_counter() - begun
        self._running[case] = step, state, batch
        return seconds, units

    def _begun(self, case: str) -> tuple[Any, Any, Any]:
        """The step, its state and its batch.  Raises RuntimeError for wrong losses."""
        import numpy as np

        function, state, batch = model(case)
        step, state, batch = self.jit(function), self.put(state), self.put(batch, "x")
        found = []
        for _ in range(FIRST):
            state, loss = step(state, batch)
            found.append(float(np.asarray(loss)))
        if not np.allclose(found, self._expected[case], rtol=CLOSE):
            raise RuntimeError(f"losses of {case}: {found}, not {self._expected[case]}")
        return step, state, batch


class PlainTraining(Training):
    """JAX in this process."""

    def start(self) -> None:
        self._mesh = plain_mesh(self.devices)

    def put(self, tree: Any, *spec: str) -> Any:
        import jax

        sharding = jax.sharding.NamedSharding(self._mesh, jax.sharding.PartitionSpec(*spec))
        return jax.device_put(tree, sharding)

    def jit(self, step: Any) -> Any:
        import jax

        whole = jax.sharding.NamedSharding(self._mesh, jax.sharding.PartitionSpec())
        return jax.jit(step, donate_argnums=(0,), out_shardings=whole)

    def stop(self) -> None:
        """Its devices end with the process."""


class ControllerTraining(PlainTraining):
    """JAX in this process, which is one of several, and their devices."""

    def join(self, number: int, of: int, address: str) -> None:
        """Open the devices together with the other processes."""
        import jax
        import numpy as np

        jax.config.update("jax_num_cpu_devices", self.devices // of)
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(address, of, number)
        self._mesh = jax.sharding.Mesh(np.array(jax.devices()), ("x",))


class MultiControllerTraining:
    """A process of JAX for each host; the slowest takes the time."""

    def __init__(self, devices: int, hosts: int, expected: dict[str, Sequence[float]]) -> None:
        self._join = partial(joined, devices, expected)
        self._hosts = hosts

    def start(self) -> None:
        self._controllers = Controllers(self._join, self._hosts)

    def round(self, case: str, units: int) -> tuple[float, float]:
        """So many steps.  Raises RuntimeError for wrong losses."""
        answers = self._controllers.tell(case, units)
        wrong = [answer for answer in answers if isinstance(answer, str)]
        if wrong:
            raise RuntimeError(wrong[0])
        seconds, done = max(answers)
        return float(seconds), int(done)

    def stop(self) -> None:
        self._controllers.stop()


def joined(
    devices: int, expected: dict[str, Sequence[float]], number: int, of: int, address: str
) -> Obey:
    """One process of several: the rounds that it takes, or its error's text."""
    training = ControllerTraining(devices, expected)
    training.join(number, of, address)

    def obey(case: str, units: int) -> tuple[float, float] | str:
        try:
            return training.round(case, units)
        except RuntimeError as error:
            return str(error)

    return obey


class LabTraining(Training):
    """One island of a lab."""

    def __init__(self, devices: int, expected: dict[str, Sequence[float]], hosts: int = 1) -> None:
        super().__init__(devices, expected)
        self._hosts = hosts

    def start(self) -> None:
        self._lab, self._slice = lab_and_slice(self.devices, self._hosts)

    def put(self, tree: Any, *spec: str) -> Any:
        import jax

        import pathways_lab as pw

        return pw.device_put(tree, self._slice.sharding(jax.sharding.PartitionSpec(*spec)))

    def jit(self, step: Any) -> Any:
        import pathways_lab as pw

        whole = self._slice.sharding()
        return pw.jit(step, on=self._slice, donate_argnums=(0,), out_shardings=whole)

    def stop(self) -> None:
        self._lab.close()


class DoorTraining(PlainTraining):
    """JAX in this process, on the devices of a lab."""

    def start(self) -> None:
        self._lab, place = lab_and_slice(self.devices)
        self._lab.open_door()
        self._mesh = place.mesh

    def stop(self) -> None:
        self._lab.close()


SYSTEMS: dict[str, Callable[..., Served]] = {
    "jax": PlainTraining,
    "lab": LabTraining,
    "door": DoorTraining,
    "controllers": MultiControllerTraining,
}


def make(system: str, **options: Any) -> Served:
    """The child for a system."""
    return SYSTEMS[system](**options)


if __name__ == "__main__":
    serve(make)
