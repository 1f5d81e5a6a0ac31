"""One training in many ways: SPMD with many controllers or one, and pipelines.

Problem: what SPMD, MPMD, one controller and many are worth shows only when the
very same work runs on the very same devices, and nobody compares what took a
day to write down each time.

Rule for maintainers: a way decides who launches what and where, and never what is
computed: all start from the same parameters, take the same batch in every step,
and end with the same parameters, up to the order of sums.

Paper: section 2 and figure 1 (a: multi-controller; b: a single controller; c: a
single controller and a pipeline).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import PartitionSpec

from pathways_lab.client.functions.jit import jit
from pathways_lab.client.lab.devices import Slice
from pathways_lab.client.lab.lab import Lab
from pathways_lab.client.program.program import device_put
from pathways_lab.core.errors import refused
from pathways_lab.pipeline.automatic import pipeline
from pathways_lab.pipeline.layered import updated
from pathways_lab.pipeline.modules import Layer
from pathways_lab.pipeline.schedule import Schedule
from pathways_lab.pipeline.schedules import SCHEDULES

BARRIER, ISLANDS = "-barrier", "-islands"
SPMD, TF1, MANY = "spmd", "single-controller-barrier", "multi-controller"


@dataclass(frozen=True)
class Work:
    """The training, and its length.  Fields as of ``pw.pipeline``.

    batch: inputs and labels, pytrees of [examples, ...].  steps: on that same batch.
    stages: of pipelines; None: as many as there are devices and layers for.
    """

    layers: Sequence[tuple[Layer, Any]]
    loss: Callable[[Any, Any], Any]
    optimizer: Any
    batch: tuple[Any, Any]
    steps: int
    microbatches: int | None = None
    stages: int | None = None
    costs: Sequence[float] | None = None

    @property
    def examples(self) -> int:
        """In a batch."""
        return int(jax.tree.leaves(self.batch)[0].shape[0])

    def step(self, state: tuple[Any, Any], inputs: Any, labels: Any) -> tuple[Any, Any]:
        """One step in plain JAX.  state: parameters by layer, and the optimizer's memory."""
        parameters, memory = state

        def whole(parameters: Any) -> Any:
            x = inputs
            for (layer, _), own in zip(self.layers, parameters, strict=True):
                x = layer(own, x)
            return self.loss(x, labels)

        value, gradient = jax.value_and_grad(whole)(parameters)
        return updated(self.optimizer, gradient, memory, parameters), value


@dataclass(frozen=True)
class Ready:
    """A way whose slices are there.

    go: so many steps from the first parameters: parameters by layer, and the last loss; handles.
    warm: how many steps to take first, so that everything is compiled.
    bubble: idle share of the devices by plan, or None.  note: for people.
    """

    slices: tuple[Slice, ...]
    go: Callable[[int], tuple[list[Any], Any]]
    warm: int
    bubble: float | None
    note: str


def name_of(way: str | Schedule) -> str:
    """The name of a way."""
    return f"pipeline-{way.name}" if isinstance(way, Schedule) else way


def check(ways: Sequence[str | Schedule]) -> None:
    """Raises PathwaysError for a way that there is not, and for one that is there twice."""
    if isinstance(ways, str) or not isinstance(ways, Iterable):
        raise refused(f"ways={ways!r:.60} is not a list of ways", "for example ['spmd']")
    names = [name_of(way) for way in ways]
    for way, name in zip(ways, names, strict=True):
        base = name.removeprefix("pipeline-").removesuffix(BARRIER).removesuffix(ISLANDS)
        known = isinstance(way, Schedule) or (name.startswith("pipeline-") and base in SCHEDULES)
        if not known and name not in (SPMD, TF1, MANY):
            pipelines = ", ".join(f"'pipeline-{schedule}'" for schedule in SCHEDULES)
            raise refused(
                f"there is no way called {name!r}",
                f"{SPMD!r}, {MANY!r}, {TF1!r}, {pipelines} (and with {ISLANDS!r} or {BARRIER!r}"
                " behind it), or a Schedule of your own",
            )
        if names.count(name) > 1:
            raise refused(f"{name!r} is there more than once", "name each way once")


@contextmanager
def ready(lab: Lab, way: str | Schedule, work: Work, island: str) -> Iterator[Ready]:
    """A way on all devices of an island, or on as many of all islands; given back afterwards."""
    there = {i.name: i.devices for i in lab.islands}
    if island not in there:
        raise refused(
            f"there is no island {island!r} to compare on; there is {', '.join(there)}",
            "name one that is there, or none for the first",
        )
    count = there[island]
    with ExitStack() as stack:
        if isinstance(way, str) and way in (SPMD, TF1, MANY):
            on = stack.enter_context(lab.slice(count, "data", island=island))
            if way == MANY:
                stack.enter_context(lab.lease(island))
            yield _spmd(lab, way, work, on)
            return
        name = name_of(way)
        spread = name.removesuffix(BARRIER).endswith(ISLANDS)
        islands = [i.name for i in lab.islands] if spread else [island]
        schedule: str | Schedule = way
        if isinstance(way, str):
            base = name.removeprefix("pipeline-").removesuffix(BARRIER).removesuffix(ISLANDS)
            schedule = base
        stages = _stages(work, schedule, count)
        slices = tuple(
            stack.enter_context(
                lab.slice(count // stages, "data", island=islands[s * len(islands) // stages])
            )
            for s in range(stages)
        )
        _apart(slices)
        yield _pipelined(schedule, work, slices, name.endswith(BARRIER))


def _spmd(lab: Lab, way: str, work: Work, on: Slice) -> Ready:
    whole, rows = PartitionSpec(), PartitionSpec("data")
    step = jit(work.step, on=on, name="step", in_shardings=(whole, rows, rows), out_shardings=whole)
    remember = jit(work.optimizer.init, on=on, name="init", out_shardings=whole)
    parameters = device_put([own for _, own in work.layers], on.sharding(whole))
    first = parameters, remember(parameters)
    inputs, labels = device_put(work.batch, on.sharding(rows))

    def looped(steps: int) -> tuple[list[Any], Any]:
        state, value = lab.multi_controller(step, first, inputs, labels, steps=steps, carry=1)
        return state[0], value

    def one_by_one(steps: int) -> tuple[list[Any], Any]:
        state, value = first, None
        for _ in range(steps):
            state, value = step(state, inputs, labels)
            if way == TF1:
                jax.block_until_ready(state)
        return state[0], value

    if way == MANY:
        # The number of steps is part of a loop's code.
        return Ready((on,), looped, work.steps, None, "a Python loop on every host")
    note = "waits for each step" if way == TF1 else "one controller, runs ahead"
    return Ready((on,), one_by_one, min(2, work.steps), None, note)


def _pipelined(
    schedule: str | Schedule, work: Work, slices: tuple[Slice, ...], barrier: bool
) -> Ready:
    microbatches = work.microbatches or 4 * len(slices)
    rows = max(1, work.examples // microbatches)
    example = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct((rows, *x.shape[1:]), x.dtype), work.batch[0]
    )
    pipe = pipeline(
        work.layers, slices, loss=work.loss, optimizer=work.optimizer, example=example,
        schedule=schedule, microbatches=microbatches, costs=work.costs,
        dispatch="sequential" if barrier else "parallel",
    )  # fmt: skip
    first = pipe.init()
    inputs = device_put(work.batch[0], pipe.slices[0])
    labels = device_put(work.batch[1], pipe.slices[-1])

    def go(steps: int) -> tuple[list[Any], Any]:
        state, value = first, None
        for _ in range(steps):
            state, value = pipe.step(state, inputs, labels)
            if barrier:
                jax.block_until_ready(state)
        return pipe.parameters(state), value

    note = f"{len(pipe.stages)} stages, {microbatches} microbatches"
    note += ", node by node, waits for each step" if barrier else ""
    return Ready(slices, go, min(2, work.steps), pipe.planned().bubble, note)


def _stages(work: Work, schedule: str | Schedule, devices: int) -> int:
    """How many slices a pipeline has."""
    if isinstance(schedule, Schedule):
        wanted = len(schedule.order)
    elif work.stages is not None:
        wanted = work.stages
    else:
        most = len(work.layers) // (2 if schedule == "interleaved" else 1)
        wanted = max(s for s in range(1, devices + 1) if devices % s == 0 and s <= max(1, most))
    if wanted < 1 or devices % wanted:
        raise refused(
            f"{devices} devices cannot be cut into {wanted} equal slices for as many stages",
            f"stages= a divisor of {devices}",
        )
    return wanted


def _apart(slices: Sequence[Slice]) -> None:
    """Raises PathwaysError where stages share devices: other slices are in the way."""
    devices = [device for on in slices for device in on.binding.devices]
    if len(set(devices)) < len(devices):
        raise refused(
            "the stages of a pipeline came to share devices, because other slices of this lab"
            " lie on some devices and not on others",
            "release them first (slice.release()), or compare in a lab of its own",
        )
