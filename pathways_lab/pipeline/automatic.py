"""A layered model as an MPMD pipeline over slices: ``pw.pipeline``.

Problem: many models are a list of layers, and what a training step of one is need not be written
again for each: a loss, the mean of its gradients over microbatches, an optimizer.

How: the step is written here as for one device, and each stage is a marked part of it;
:func:`pathways_lab.pipeline.mpmd.front.jit` makes it a program over the slices.

Rule for maintainers: nothing here knows how a step is taken apart.  A stage has its own parameters
and its own memory of the optimizer.

Paper: section 5.3 (pipelined language models), appendix A.
"""

from __future__ import annotations

import html
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from pathways_lab.client.lab.devices import Slice
from pathways_lab.client.lab.tags import beneath
from pathways_lab.client.session import failures
from pathways_lab.core.errors import PathwaysError, refused
from pathways_lab.pipeline.layered import Layered, Model, PartState, initial, updated
from pathways_lab.pipeline.mpmd.front import jit as mpmd_jit
from pathways_lab.pipeline.mpmd.marks import named
from pathways_lab.pipeline.schedule import Costs, Schedule, Table
from pathways_lab.pipeline.schedules import Named, called

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
        self._parts = [named(f"stage{n}", model.forward(n)) for n in range(len(self.stages))]
        state = tuple((model.spec(number), None) for number in range(len(self.stages)))
        self.program = mpmd_jit(
            self._train,
            on={f"stage{number}": on for number, on in enumerate(self.slices)},
            schedule=schedule,
            in_shardings=(state, model.batch, model.batch),
            **options,
        )

    def init(self) -> State:
        """The given parameters on their slices, and the optimizer's memory for them."""
        with beneath(self.program.tag):
            return tuple(initial(self._model, number, on) for number, on in enumerate(self.slices))

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

    # --- the step ------------------------------------------------------------------------

    def _train(self, state: State, inputs: Any, labels: Any) -> tuple[State, Any]:
        """A step of training, for one device."""
        count = self.schedule.microbatches
        parameters = tuple(own for own, _ in state)
        rows = jax.tree.map(lambda x: x.reshape(count, -1, *x.shape[1:]), (inputs, labels))

        def turn(total: Any, row: Any) -> tuple[Any, None]:
            found = jax.value_and_grad(self._loss)(parameters, *row)
            return jax.tree.map(jnp.add, total, found), None

        zero = jnp.zeros(()), jax.tree.map(jnp.zeros_like, parameters)
        (value, slopes), _ = jax.lax.scan(turn, zero, rows)
        return tuple(map(self._changed, state, slopes)), value / count

    def _loss(self, parameters: Sequence[Any], x: Any, labels: Any) -> Any:
        """The loss of one microbatch; the last stage computes it."""
        for part, own in zip(self._parts[:-1], parameters, strict=False):
            x = part(own, x)
        return self._parts[-1](parameters[-1], x, labels)

    def _changed(self, state: PartState, slopes: Any) -> PartState:
        mean = jax.tree.map(lambda slope: slope / self.schedule.microbatches, slopes)
        parameters, memory = state
        return updated(self._model.optimizer, mean, memory, parameters)


@failures.at_caller()
def pipeline(
    layers: Sequence[Any],
    slices: Sequence[Slice],
    *,
    loss: Callable[[Any, Any], Any],
    optimizer: Any,
    example: Any,
    schedule: Named = "1f1b",
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
    slices: one for each stage; they may be on any islands.  ``"circular"``,
        ``"interleaved"`` and ``"dualpipev"`` put two stages on each.
    loss: ``loss(y, labels)`` of one microbatch, a scalar mean.
    optimizer: with optax's ``init`` and ``update``.
    example: one microbatch of inputs, or its types, for estimating costs.
    schedule: ``"gpipe"``, ``"circular"``, ``"1f1b"``, ``"eager-1f1b"``, ``"interleaved"``,
        ``"zero-bubble"``, ``"zb-h2"``, ``"dualpipev"``, a :class:`Schedule` of one's own, or a
        :class:`Comparison`.
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
    ``pw.mpmd.jit`` trains these too, in a step of one's own.
    """
    count = 4 * len(slices) if microbatches is None else microbatches
    made = called(schedule, len(slices), count)
    problem = made.problem()
    if problem is not None:
        raise PathwaysError(problem)
    if len(made.order) != len(slices):
        raise refused(
            f"schedule {made.name!r} is for {len(made.order)} slices, not for {len(slices)}",
            "give one slice for each of its rows",
        )
    model = Model.of(
        layers, slices, made.stages, loss, optimizer,
        example=example, costs=costs, batch=batch, specs=specs,
    )  # fmt: skip
    return Pipeline(model, slices, made, name=name, dispatch=dispatch, priority=priority, data=data)
