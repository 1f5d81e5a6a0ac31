"""Data parallel over islands: ``pw.data_parallel``.

Problem: two islands have no collectives in common, so the gradients must travel over
the DCN, which is slow; sent at the end of the backward pass they cost all of their
time, sent layer by layer while it goes on they cost almost none.

How: each island has all parameters and a part of the batch.  The layers are cut into
chunks; as soon as a chunk's gradients are there they are sent to the other islands,
by transfers of their own, while the next chunk's are computed.  Every island sums what
all have found, in the same order, so that all have the same parameters, to the bit.

Rule for maintainers: nothing that waits for another island comes before a backward
task in the order of an island, or there is no overlap.

Paper: section 5.3 and figure 12 (two islands, data parallel over the DCN).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from pathways_lab.client.functions.jit import CompiledFunction, jit
from pathways_lab.client.lab.devices import Slice
from pathways_lab.client.lab.tags import beneath
from pathways_lab.client.program.program import device_put, program
from pathways_lab.client.session import failures
from pathways_lab.core.errors import refused
from pathways_lab.pipeline.layered import Layered, Model, PartState, initial, updated

CHUNKS = 4
"""Parts of the layers, unless a user says otherwise: more overlap better, and more is sent."""

State = tuple[tuple[PartState, ...], ...]
"""By slice and chunk: parameters (a tuple, one pytree per layer), and the optimizer's memory."""


class Part:
    """Some layers on one slice: what is compiled for it."""

    def __init__(self, model: Model, number: int, on: Slice, shares: Sequence[int]) -> None:
        last, whole, batch = number == len(model.parts) - 1, PartitionSpec(), model.batch

        def compiled(
            function: Callable[..., Any], name: str, takes: tuple[Any, ...], gives: Any
        ) -> CompiledFunction:
            called = f"{name}{number}"
            return jit(function, on=on, name=called, in_shardings=takes, out_shardings=gives)

        labels, result = ((batch,), whole) if last else ((), batch)
        self._forward = compiled(model.forward(number), "forward", (whole, batch, *labels), result)
        change = functools.partial(_update, model.optimizer, shares)
        self.update = compiled(
            change, "update", (whole, None, *(whole,) * len(shares)), (whole, whole)
        )
        self._first = not number

    def forward(self, own: Any, x: Any, *labels: Any) -> tuple[Any, Callable[[Any], Any]]:
        """The result, and its pullback: from its gradient to those of parameters and input.

        There is no gradient of the model's input, which nobody wants.
        """
        if self._first:
            return jax.vjp(lambda own: self._forward(own, x, *labels), own)
        return jax.vjp(lambda own, x: self._forward(own, x, *labels), own, x)


class DataParallel(Layered[State]):
    """A layered model on several slices at once; made by :func:`data_parallel`.

    chunks: by chunk, the numbers of its layers.  shares: by slice, its part of a batch.
    options: of the program.
    program: what is captured; ``.program.ir()`` prints it after a step.
    """

    def __init__(
        self, model: Model, slices: Sequence[Slice], shares: tuple[int, ...], **options: Any
    ) -> None:
        super().__init__(model, sum(shares), f"shares of {', '.join(map(str, shares))}")
        self.slices = tuple(slices)
        self.chunks = model.parts
        self.shares = shares
        self._parts = [
            [Part(model, chunk, on, shares) for chunk in range(len(self.chunks))]
            for on in self.slices
        ]
        self.program = program(self._step, **options)

    def init(self) -> State:
        """The given parameters on every slice, and the optimizer's memory for them."""
        with beneath(self.program.tag):
            return tuple(
                tuple(
                    initial(self._model, chunk, on, PartitionSpec())
                    for chunk in range(len(self.chunks))
                )
                for on in self.slices
            )

    def types(self) -> State:
        """The types of a state: for ``.program.capture(...)``, where nothing can run."""
        return (self._model.types(),) * len(self.slices)

    def parameters(self, state: State, slice: int = 0) -> list[Any]:
        """By layer: the parameters that one slice has.  All have the same."""
        return [own for parameters, _ in state[slice] for own in parameters]

    def __repr__(self) -> str:
        where = ", ".join(
            f"{share} of {sum(self.shares)} on {on.name} ({on.island})"
            for share, on in zip(self.shares, self.slices, strict=True)
        )
        cuts = ", ".join(f"{chunk.start} to {chunk.stop - 1}" for chunk in self.chunks)
        return f"data parallel: {where}\n  chunks of layers: {cuts}"

    # --- the program ---------------------------------------------------------------------

    def _step(self, state: State, inputs: Any, labels: Any) -> tuple[State, Any]:
        """Captured: forward, backward with the exchange underway, then all updates."""
        every, last = range(len(self.slices)), len(self.chunks) - 1
        x, y = self._cut(inputs), self._cut(labels)
        pull: dict[tuple[int, int], Callable[[Any], Any]] = {}
        for chunk in range(last + 1):
            for at in every:
                more = (y[at],) if chunk == last else ()
                own = state[at][chunk][0]
                x[at], pull[at, chunk] = self._parts[at][chunk].forward(own, x[at], *more)
        losses = list(x)
        back: list[Any] = [jnp.ones(())] * len(self.slices)
        found: dict[tuple[int, int], list[Any]] = {}
        for chunk in range(last, -1, -1):
            made = []
            for at in every:
                of_parameters, *of_input = pull[at, chunk](back[at])
                made.append(of_parameters)
                back[at] = of_input[0] if chunk else None
            for at, on in enumerate(self.slices):
                found[at, chunk] = [
                    g if of == at else device_put(g, on.sharding(PartitionSpec()))
                    for of, g in enumerate(made)
                ]
        new: list[list[Any]] = [[None] * (last + 1) for _ in every]
        for chunk in range(last, -1, -1):
            for at in every:
                update = self._parts[at][chunk].update
                new[at][chunk] = update(*state[at][chunk], *found[at, chunk])
        moved = [device_put(value, self.slices[0]) for value in losses]
        mean = sum(share * value for share, value in zip(self.shares, moved, strict=True))
        return tuple(map(tuple, new)), mean / sum(self.shares)

    def _cut(self, batch: Any) -> list[Any]:
        leaves, tree = jax.tree.flatten(batch)
        total = sum(self.shares)
        ends = np.cumsum(self.shares)[:-1]
        parts = [np.split(leaf, [int(e * leaf.shape[0] // total) for e in ends]) for leaf in leaves]
        return [jax.tree.unflatten(tree, part) for part in zip(*parts, strict=True)]


def _update(
    optimizer: Any, shares: Sequence[int], parameters: Any, memory: Any, *found: Any
) -> tuple[Any, Any]:
    """One step of an optimizer with the mean of what all slices have found."""
    total = sum(shares)

    def mean(*gradients: Any) -> Any:
        return sum(g * (share / total) for g, share in zip(gradients, shares, strict=True))

    return updated(optimizer, jax.tree.map(mean, *found), memory, parameters)


@failures.at_caller()
def data_parallel(
    layers: Sequence[Any],
    slices: Sequence[Slice],
    *,
    loss: Callable[[Any, Any], Any],
    optimizer: Any,
    example: Any,
    chunks: int | None = None,
    shares: Sequence[int] | None = None,
    costs: Sequence[float] | None = None,
    batch: PartitionSpec | None = None,
    name: str = "data_parallel",
    priority: int | None = None,
    data: Mapping[str, Any] | None = None,
) -> DataParallel:
    """Train one layered model on several slices, on any islands, as one program.

    layers, loss, optimizer, costs, batch: as for ``pw.pipeline``.
    slices: each has all parameters, and a share of every batch.
    example: some inputs, or their types, for estimating costs.
    chunks: in so many parts the gradients are exchanged, while the backward pass goes
        on; 1: all at its end.  Default: 4, or the number of layers if that is less.
    shares: by slice, how much of a batch it gets; default: as its number of devices.
        For islands that differ in speed, as their speeds.
    name: of the program, in errors and in the timeline.
    priority, data: of its runs, for policies, as for ``pw.program``.

    Every slice sends its gradients to every other one, so this is for few slices.
    Raises PathwaysError for what cannot be: no slices, more chunks than layers; and, as
    ``pw.pipeline``, for what would be trained otherwise than on one device.

    >>> both = pw.data_parallel(layers, [left, right], loss=loss, optimizer=optax.sgd(0.1),
    ...                         example=x, chunks=4)                        # doctest: +SKIP
    >>> state = both.init()                                                  # doctest: +SKIP
    >>> state, value = both.step(state, x, labels)                           # doctest: +SKIP
    """
    parts = tuple(shares) if shares is not None else tuple(len(on) for on in slices)
    if not slices or len(parts) != len(slices) or any(share < 1 for share in parts):
        raise refused(
            f"shares {parts} for {len(slices)} slices: each slice has a share from 1 on",
            "for example shares=(1, 1) for two slices",
        )
    most = len(layers)
    chunks = min(CHUNKS, most) if chunks is None else chunks
    if not 1 <= chunks <= most:
        raise refused(
            f"chunks={chunks} of {most} layers: each chunk has a layer at least",
            f"chunks={most} or less, or cut the layers finer",
        )
    model = Model.of(
        layers, slices, chunks, loss, optimizer, example=example, costs=costs, batch=batch
    )
    return DataParallel(model, slices, parts, name=name, priority=priority, data=data)
