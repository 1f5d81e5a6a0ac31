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
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import PartitionSpec

from pathways_lab.client.functions.jit import CompiledFunction, jit
from pathways_lab.client.lab.devices import Slice
from pathways_lab.client.program.program import ProgramFunction, device_put, program
from pathways_lab.client.session import failures
from pathways_lab.core.errors import Failure, PathwaysError
from pathways_lab.pipeline.apart import check_optimizer
from pathways_lab.pipeline.automatic import data_spec, estimated, state_types
from pathways_lab.pipeline.balance import partition
from pathways_lab.pipeline.modules import as_layers
from pathways_lab.pipeline.stages import Layer, StageFunctions

State = tuple[tuple[tuple[Any, Any], ...], ...]
"""By slice and chunk: parameters (a tuple, one pytree per layer), and the optimizer's memory."""


class _Compiled(NamedTuple):
    """The functions of one chunk on one slice."""

    forward: CompiledFunction
    backward: CompiledFunction
    update: CompiledFunction
    remember: CompiledFunction


class DataParallel:
    """A layered model on several slices at once; made by :func:`data_parallel`.

    chunks: by chunk, the numbers of its layers.  shares: by slice, its part of a batch.
    program: what is captured; ``.program.ir()`` prints it after a step.
    """

    def __init__(
        self,
        layers: Sequence[tuple[Layer, Any]],
        slices: Sequence[Slice],
        loss: Callable[[Any, Any], Any],
        optimizer: Any,
        chunks: tuple[range, ...],
        shares: Sequence[int],
        batch: PartitionSpec,
        name: str,
    ) -> None:
        self.slices = tuple(slices)
        self.chunks = chunks
        self.shares = tuple(shares)
        self._layers = layers
        self._optimizer = optimizer
        self._batch = batch
        self._compiled = [
            [self._compile(chunk, on, loss, optimizer) for chunk in range(len(chunks))]
            for on in self.slices
        ]
        self.program: ProgramFunction = program(self._step, name=name)

    def init(self) -> State:
        """The given parameters on every slice, and the optimizer's memory for them."""
        state = []
        for on, functions in zip(self.slices, self._compiled, strict=True):
            row = []
            for chunk, compiled in zip(self.chunks, functions, strict=True):
                parameters = tuple(
                    device_put(self._layers[n][1], on.sharding(PartitionSpec())) for n in chunk
                )
                row.append((parameters, compiled.remember(parameters)))
            state.append(tuple(row))
        return tuple(state)

    def types(self) -> State:
        """The types of a state: for ``.program.capture(...)``, where nothing can run."""
        row = tuple(
            state_types(self._optimizer, tuple(self._layers[n][1] for n in chunk))
            for chunk in self.chunks
        )
        return (row,) * len(self.slices)

    @failures.at_caller()
    def step(self, state: State, inputs: Any, labels: Any) -> tuple[State, Any]:
        """One step of training: the new state, and the mean loss; handles, at once.

        inputs, labels: pytrees of arrays of [batch, ...]; each slice gets its share, in order.
        Raises PathwaysError when the batch cannot be cut by the shares.
        """
        total = sum(self.shares)
        for leaf in jax.tree.leaves((inputs, labels)):
            if not np.ndim(leaf) or np.shape(leaf)[0] % total:
                raise PathwaysError(
                    Failure(
                        "refused",
                        f"a batch of shape {np.shape(leaf)} cannot be cut into shares of"
                        f" {', '.join(map(str, self.shares))}",
                        f"use a multiple of {total} examples",
                    )
                )
        result: tuple[State, Any] = self.program(state, inputs, labels)
        return result

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
        kept: dict[tuple[int, int], Any] = {}
        for chunk in range(last + 1):
            for at in every:
                more = (y[at],) if chunk == last else ()
                own = state[at][chunk][0]
                x[at], kept[at, chunk] = self._compiled[at][chunk].forward(own, x[at], *more)
        losses, back = list(x), [None] * len(self.slices)
        found: dict[tuple[int, int], list[Any]] = {}
        for chunk in range(last, -1, -1):
            made = []
            for at in every:
                own = state[at][chunk][0]
                back[at], gradient = self._compiled[at][chunk].backward(
                    own, kept[at, chunk], back[at], None
                )
                made.append(gradient)
            for at, on in enumerate(self.slices):
                found[at, chunk] = [
                    g if of == at else device_put(g, on.sharding(PartitionSpec()))
                    for of, g in enumerate(made)
                ]
        new: list[list[Any]] = [[None] * (last + 1) for _ in every]
        for chunk in range(last, -1, -1):
            for at in every:
                update = self._compiled[at][chunk].update
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

    def _compile(
        self, chunk: int, on: Slice, loss: Callable[[Any, Any], Any], optimizer: Any
    ) -> _Compiled:
        last = chunk == len(self.chunks) - 1
        own = tuple(self._layers[n][0] for n in self.chunks[chunk])
        functions = StageFunctions(own, loss if last else None, chunk == 0)
        batch, whole = self._batch, PartitionSpec()
        arguments = (whole, batch, batch) if last else (whole, batch)

        def compiled(function: Callable[..., Any], name: str, **shardings: Any) -> CompiledFunction:
            return jit(function, on=on, name=f"{name}{chunk}", **shardings)

        return _Compiled(
            compiled(
                functions.forward,
                "forward",
                in_shardings=arguments,
                out_shardings=(whole if last else batch, None),
            ),
            compiled(
                functions.backward,
                "backward",
                in_shardings=(whole, None, None, None),
                out_shardings=(batch, whole),
            ),
            compiled(
                functools.partial(_update, optimizer, self.shares), "update", out_shardings=whole
            ),
            compiled(optimizer.init, "init", out_shardings=whole),
        )


def _update(
    optimizer: Any, shares: Sequence[int], parameters: Any, memory: Any, *found: Any
) -> tuple[Any, Any]:
    """One step of an optimizer with the mean of what all slices have found."""
    total = sum(shares)

    def mean(*gradients: Any) -> Any:
        return sum(g * (share / total) for g, share in zip(gradients, shares, strict=True))

    changes, memory = optimizer.update(jax.tree.map(mean, *found), memory, parameters)
    return jax.tree.map(lambda p, c: (p + c).astype(p.dtype), parameters, changes), memory


@failures.at_caller()
def data_parallel(
    layers: Sequence[Any],
    slices: Sequence[Slice],
    *,
    loss: Callable[[Any, Any], Any],
    optimizer: Any,
    example: Any,
    chunks: int = 4,
    shares: Sequence[int] | None = None,
    costs: Sequence[float] | None = None,
    batch: PartitionSpec | None = None,
    name: str = "data_parallel",
) -> DataParallel:
    """Train one layered model on several slices, on any islands, as one program.

    layers, loss, optimizer, costs, batch: as for ``pw.pipeline``.
    slices: each has all parameters, and a share of every batch.
    example: some inputs, or their types, for estimating costs.
    chunks: in so many parts the gradients are exchanged, while the backward pass goes
        on; 1: all at its end.
    shares: by slice, how much of a batch it gets; default: as its number of devices.
        For islands that differ in speed, as their speeds.
    name: of the program, in errors and in the timeline.

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
        raise PathwaysError(
            Failure(
                "refused",
                f"shares {parts} for {len(slices)} slices: each slice has a share from 1 on",
                "for example shares=(1, 1) for two slices",
            )
        )
    layers = as_layers(layers)
    dear = costs if costs is not None else estimated(layers, example)
    cut = partition(dear, chunks)
    check_optimizer(optimizer, [own for _, own in layers], cut)
    return DataParallel(layers, slices, loss, optimizer, cut, parts, data_spec(slices, batch), name)
