"""A layered model in parts, on slices, trained in steps of one program.

Problem: a pipeline gives each slice a part of the layers, data parallelism gives every
slice all parts.  A part is the same thing in both: some layers, their parameters, and the
memory of the optimizer for them.

Rule for maintainers: nothing here knows the order in which parts run, nor how many slices
have the same part.

Paper: section 5.3.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import jax
import numpy as np
from jax.sharding import PartitionSpec

from pathways_lab.client.functions.jit import jit
from pathways_lab.client.lab.devices import Slice
from pathways_lab.client.program.program import ProgramFunction, device_put
from pathways_lab.client.session import failures
from pathways_lab.core.errors import refused
from pathways_lab.pipeline.apart import check_optimizer
from pathways_lab.pipeline.balance import operations, partition
from pathways_lab.pipeline.modules import Layer, as_layers

State = TypeVar("State")
PartState = tuple[Any, Any]
"""Parameters of a part (a tuple, one pytree per layer), and the optimizer's memory for them."""


@dataclass(frozen=True, slots=True)
class Model:
    """Layers and how they are trained.

    layers: each with its parameters.  parts: by part, the numbers of its layers.
    costs: by layer, relative.  batch: how inputs and activations are cut over a slice.
    specs: by layer, PartitionSpecs of its parameters (a pytree prefix).
    """

    layers: Sequence[tuple[Layer, Any]]
    parts: tuple[range, ...]
    costs: Sequence[float]
    loss: Callable[[Any, Any], Any]
    optimizer: Any
    batch: PartitionSpec
    specs: Sequence[Any]

    @classmethod
    def of(
        cls,
        layers: Sequence[Any],
        slices: Sequence[Slice],
        parts: int,
        loss: Callable[[Any, Any], Any],
        optimizer: Any,
        *,
        example: Any,
        costs: Sequence[float] | None,
        batch: PartitionSpec | None,
        specs: Sequence[Any] | None = None,
    ) -> Model:
        """As ``pw.pipeline`` is told.  Raises PathwaysError for what cannot be trained in parts."""
        layers = as_layers(layers)
        dear = costs if costs is not None else estimated(layers, example)
        if len(dear) != len(layers):
            why = f"{len(dear)} costs for {len(layers)} layers"
            raise refused(why, "one for each layer")
        cut = partition(dear, parts)
        check_optimizer(optimizer, [own for _, own in layers], cut)
        if batch is None:
            shared = all("data" in on.axes for on in slices)
            batch = PartitionSpec("data") if shared else PartitionSpec()
        whole = [PartitionSpec()] * len(layers)
        return cls(layers, cut, dear, loss, optimizer, batch, whole if specs is None else specs)

    def spec(self, part: int) -> tuple[Any, ...]:
        """A PartitionSpec for every parameter of a part."""
        return tuple(jax.tree.broadcast(self.specs[n], self.layers[n][1]) for n in self.parts[part])

    def forward(self, part: int) -> Callable[..., Any]:
        """A function of a part's parameters and what comes in, and in the last part of labels: what
        goes out, or the loss."""
        layers = [self.layers[n][0] for n in self.parts[part]]

        def forward(parameters: Sequence[Any], x: Any, *labels: Any) -> Any:
            for layer, own in zip(layers, parameters, strict=True):
                x = layer(own, x)
            return self.loss(x, *labels) if labels else x

        return forward

    def types(self) -> tuple[PartState, ...]:
        """By part, the types of its state."""
        found = []
        for part in self.parts:
            own = tuple(self.layers[n][1] for n in part)
            types = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), own)
            found.append((types, jax.eval_shape(self.optimizer.init, types)))
        return tuple(found)


def initial(model: Model, number: int, on: Slice, memory: PartitionSpec | None = None) -> PartState:
    """The parameters of a part on a slice, and the optimizer's memory for them.

    memory: how that is cut; None: as propagation decides.
    """
    own, spec = tuple(model.layers[n][1] for n in model.parts[number]), model.spec(number)
    parameters = device_put(own, jax.tree.map(on.sharding, spec))
    remember = jit(
        model.optimizer.init, on=on, name=f"init{number}", in_shardings=(spec,),
        out_shardings=memory,
    )  # fmt: skip
    return parameters, remember(parameters)


class Layered(Generic[State]):
    """A layered model as one program.

    examples: a batch has a multiple of so many.  cut: into what it is cut, for people.
    """

    program: ProgramFunction

    def __init__(self, model: Model, examples: int, cut: str) -> None:
        self._model = model
        self._examples = examples
        self._cut_into = cut

    @failures.at_caller()
    def step(self, state: State, inputs: Any, labels: Any) -> tuple[State, Any]:
        """One step of training: the new state, and the mean loss; handles, at once.

        inputs, labels: pytrees of arrays of [batch, ...]; the batch is cut along the first
            axis, in order: into microbatches, or into the shares of slices.
        Raises PathwaysError when it cannot be cut so, and for arrays of different [batch].
        """
        leaves = jax.tree.leaves((inputs, labels))
        for leaf in leaves:
            if not np.ndim(leaf) or np.shape(leaf)[0] % self._examples:
                raise refused(
                    f"a batch of shape {np.shape(leaf)} cannot be cut into {self._cut_into}",
                    f"use a multiple of {self._examples} examples",
                )
            if np.shape(leaf)[0] != np.shape(leaves[0])[0]:
                raise refused(
                    f"arrays of shapes {np.shape(leaves[0])} and {np.shape(leaf)} in one batch have"
                    " different numbers of examples along their first axes",
                    "give as many labels as inputs: a part of a batch is cut from all its arrays",
                )
        result: tuple[State, Any] = self.program(state, inputs, labels)
        return result


def estimated(layers: Sequence[tuple[Layer, Any]], example: Any) -> list[float]:
    """By layer, what it costs on inputs like *example*: operations, without a device."""
    found = []
    x = example
    for layer, parameters in layers:
        cost, x = operations(layer, parameters, x)
        found.append(cost)
    return found


def updated(optimizer: Any, gradients: Any, memory: Any, parameters: Any) -> tuple[Any, Any]:
    """Parameters and the optimizer's memory after one step."""
    changes, memory = optimizer.update(gradients, memory, parameters)
    return jax.tree.map(lambda p, change: (p + change).astype(p.dtype), parameters, changes), memory
