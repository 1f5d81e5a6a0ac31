"""A layered model as an MPMD pipeline over slices: ``pw.pipeline``.

Problem: written by hand, a pipeline is some hundred lines in which the
schedule, the model and the placement cannot be told apart.  Here the model is
a list of layers, the placement a list of slices, the schedule a table, and the
program follows from them.

Rule for maintainers: the captured function below only walks along the
schedule.  Its results are those of the model on one device, up to the order of
sums over microbatches; the schedule changes times and memory, never values.

Paper: section 5.3 (pipelined language models), appendix A.
"""

from __future__ import annotations

import functools
import html
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from pathways_lab.client.lab.devices import Slice
from pathways_lab.client.lab.tags import beneath
from pathways_lab.client.program.program import program
from pathways_lab.client.session import failures
from pathways_lab.core.errors import Failure, PathwaysError
from pathways_lab.pipeline.layered import Layered, Model, Part, PartState
from pathways_lab.pipeline.schedule import Costs, Schedule, Table
from pathways_lab.pipeline.schedules import called
from pathways_lab.pipeline.stages import update

State = tuple[PartState, ...]
"""Per stage: parameters (a tuple, one pytree per layer), and the optimizer's memory."""


class Pipeline(Layered[State]):
    """A layered model as one program; made by :func:`pipeline`.

    stages: by stage, the numbers of its layers.  slices: by stage, where it is.
    schedule: who does what in which order.  costs: of a microbatch, relative.
    options: of the program.
    program: what is captured; ``pipe.program.ir()`` prints it after a step.
    """

    def __init__(
        self, model: Model, slices: Sequence[Slice], schedule: Schedule, **options: Any
    ) -> None:
        count = schedule.microbatches
        super().__init__(model, count, f"{count} equal microbatches along its first axis")
        self.schedule = schedule
        self.stages = model.parts
        self.slices = tuple(slices[number] for number in schedule.slices)
        totals = [sum(model.costs[n] for n in stage) for stage in self.stages]
        forward = [total / (min(totals) or 1.0) for total in totals]
        self.costs = Costs(forward, [2 * cost for cost in forward], forward)
        change = functools.partial(update, model.optimizer, count)
        self._parts = [Part(model, stage, on, change) for stage, on in enumerate(self.slices)]
        self.program = program(self._step, **options)

    def init(self) -> State:
        """The given parameters on their slices, and the optimizer's memory for them."""
        with beneath(self.program.tag):
            return tuple(part.init() for part in self._parts)

    def types(self) -> State:
        """The types of a state: for ``pipe.program.capture(...)``, where nothing can run."""
        return self._model.types()

    def parameters(self, state: State) -> list[Any]:
        """By layer, in the order in which they were given: the parameters of a state."""
        return [own for parameters, _ in state for own in parameters]

    def planned(self, costs: Costs | None = None) -> Table:
        """The schedule with times: of estimated costs (relative), or of these."""
        return self.schedule.timed(costs or self.costs)

    def __repr__(self) -> str:
        return f"{self._described()}\n{self.planned()}"

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(self._described())}</pre>{self.planned()._repr_html_()}"

    def _described(self) -> str:
        count = self.schedule.microbatches
        rows = [f"pipeline of {len(self.stages)} stages, {count} microbatches"]
        for s, (stage, on) in enumerate(zip(self.stages, self.slices, strict=True)):
            first, last = stage.start, stage.stop - 1
            layers = f"layer {first}" if first == last else f"layers {first} to {last}"
            rows.append(f"  stage {s} on {on.name} ({on.island}): {layers}")
        return "\n".join(rows)

    # --- the program ---------------------------------------------------------------------

    def _step(self, state: State, inputs: Any, labels: Any) -> tuple[State, Any]:
        """Captured: the tasks of the schedule, one after the other."""
        count, last = self.schedule.microbatches, len(self.stages) - 1
        parts = _cut(inputs, count), _cut(labels, count)
        results: dict[tuple[int, int], Any] = {}
        kept: dict[tuple[int, int], Any] = {}
        gradients: dict[tuple[int, int], Any] = {}
        between: dict[tuple[int, int], Any] = {}
        totals: list[Any] = [None] * len(self.stages)
        for task in self.schedule.linear():
            stage, m = task.stage, task.microbatch
            part, parameters = self._parts[stage], state[stage][0]
            if task.kind == "forward":
                x = results[stage - 1, m] if stage else parts[0][m]
                more = (parts[1][m],) if stage == last else ()
                results[stage, m], kept[stage, m] = part.forward(parameters, x, *more)
                continue
            own = parameters, kept[stage, m]
            if task.kind == "weight":
                totals[stage] = part.weight(*own, between.pop((stage, m)), totals[stage])
                continue
            of_result = gradients.get((stage, m))
            if self.schedule.split:
                of_input, between[stage, m] = part.backward_input(*own, of_result)
            else:
                of_input, totals[stage] = part.backward(*own, of_result, totals[stage])
            gradients[stage - 1, m] = of_input
        losses = [results[last, m] for m in range(count)]
        new = tuple(
            part.update(*own, total)
            for part, own, total in zip(self._parts, state, totals, strict=True)
        )
        return new, functools.reduce(lambda a, b: a + b, losses) / count


@failures.at_caller()
def pipeline(
    layers: Sequence[Any],
    slices: Sequence[Slice],
    *,
    loss: Callable[[Any, Any], Any],
    optimizer: Any,
    example: Any,
    schedule: str | Schedule = "1f1b",
    microbatches: int | None = None,
    costs: Sequence[float] | None = None,
    batch: PartitionSpec | None = None,
    specs: Sequence[Any] | None = None,
    name: str = "pipeline",
    dispatch: str = "parallel",
    priority: int | None = None,
    data: Mapping[str, Any] | None = None,
) -> Pipeline:
    """Make a layered JAX model one MPMD program over slices.

    layers: ``(function, parameters)`` each, with ``function(parameters, x)`` the
        next layer's ``x``; plain JAX.  Or Flax NNX modules, or Equinox modules (these
        are called with one example at a time).
    slices: one for each stage; they may be on any islands.  ``"interleaved"``
        puts two stages on each.
    loss: ``loss(y, labels)`` of one microbatch, a scalar mean.
    optimizer: with optax's ``init`` and ``update``.
    example: one microbatch of inputs, or its types, for estimating costs.
    schedule: ``"gpipe"``, ``"1f1b"``, ``"interleaved"``, ``"zero-bubble"``, or a
        :class:`Schedule` of one's own.
    microbatches: default: four for each stage.
    costs: by layer, measured or guessed, in any unit; default: estimated.
    batch: how inputs and activations are cut over a slice's mesh; default: the
        first axis over the mesh axis ``"data"`` where there is one.
    specs: by layer, PartitionSpecs of its parameters; default: whole copies.
    name, dispatch, priority, data: of the program, as for ``pw.program``.

    >>> pipe = pw.pipeline(layers, [left, right], loss=loss, optimizer=optax.adam(1e-3),
    ...                    example=x[:8], schedule="1f1b", microbatches=8)   # doctest: +SKIP
    >>> state = pipe.init()                                                  # doctest: +SKIP
    >>> state, value = pipe.step(state, x, labels)                           # doctest: +SKIP

    Raises PathwaysError for what cannot be: too few layers, an illegal schedule; and for what
    would be trained otherwise than on one device: arrays that two layers share, optimizers that
    look at the parameters of all stages together (``optax.clip_by_global_norm``).
    """
    count = 4 * len(slices) if microbatches is None else microbatches
    made = called(schedule, len(slices), count)
    problem = made.problem()
    if problem is not None:
        raise PathwaysError(problem)
    if len(made.order) != len(slices):
        raise PathwaysError(
            Failure(
                "refused",
                f"schedule {made.name!r} is for {len(made.order)} slices, not for {len(slices)}",
                "give one slice for each of its rows",
            )
        )
    model = Model.of(
        layers, slices, made.stages, loss, optimizer,
        example=example, costs=costs, batch=batch, specs=specs,
    )  # fmt: skip
    return Pipeline(model, slices, made, name=name, dispatch=dispatch, priority=priority, data=data)


def _cut(batch: Any, count: int) -> list[Any]:
    """Microbatches, all by one operation: one for each would be as many functions to compile."""
    leaves, tree = jax.tree.flatten(batch)
    parts = zip(*(jnp.split(leaf, count) for leaf in leaves), strict=True)
    return [jax.tree.unflatten(tree, part) for part in parts]
