"""Random models: parts that skip, share weights and stand beside each other.

``python -m tests.pipeline.test_mpmd_graphs 200`` tries so many, five steps of each.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from pathways_lab.core.errors import PathwaysError
from pathways_lab.pipeline.schedules import SCHEDULES, Comparison
from tests.pipeline.mpmd_kit import LOOPS, check_steps, dense, layer, named, parts_of, weights

X, Y = weights(12, 4, seed=1), weights(12, 4, seed=2)
OLDEST = Comparison(lambda task, other: task.microbatch < other.microbatch)
DO_NOT_FIT = (
    " stages and ",
    "must be a multiple of",
    "it needs two microbatches",
    "would hang",
    " on one slice, and ",
)


@dataclass(frozen=True)
class Graph:
    """A model.  reads: by part, the earlier parts whose results it reads (0: the batch).

    own: by part, whose weights it has.  places: by part, its slice.  remat: parts that are
    recomputed.  loose: part whose result is also in the loss.
    """

    reads: tuple[tuple[int, ...], ...]
    own: tuple[int, ...]
    places: tuple[int, ...]
    remat: tuple[bool, ...]
    loose: int
    loop: str
    microbatches: int
    schedule: str | Comparison | None

    def loss(self, parameters: Any, x: Any, y: Any) -> Any:
        made = [x]
        for number, reads in enumerate(self.reads):
            call = named(f"part{number}", dense)
            call = jax.checkpoint(call) if self.remat[number] else call
            given = sum((made[read] for read in reads[1:]), made[reads[0]])
            made.append(call(parameters[self.own[number]], given))
        return jnp.mean((made[-1] - y) ** 2) + 0.1 * jnp.mean(made[self.loose] ** 2)


@st.composite
def graphs(draw: st.DrawFn) -> Graph:
    count = draw(st.integers(2, 4))
    reads = []
    for number in range(count):
        before = st.lists(st.integers(0, number), min_size=1, max_size=2, unique=True)
        reads.append(tuple(draw(before)))
    unread = set(range(1, count)) - {read for own in reads for read in own}
    reads[-1] = tuple(sorted({*reads[-1], *unread} - {count}))
    own = tuple(draw(st.sampled_from([number, number, 0])) for number in range(count))
    return Graph(
        tuple(reads),
        own,
        tuple(draw(st.integers(0, number)) for number in range(count)),
        tuple(draw(st.booleans()) for _ in range(count)),
        draw(st.integers(0, count)),
        draw(st.sampled_from(sorted(LOOPS))),
        draw(st.sampled_from([1, 2, 3, 4])),
        draw(st.sampled_from([None, OLDEST, *SCHEDULES])),
    )


def check(graph: Graph, steps: int = 2) -> None:
    parameters = [layer(4, 4, seed) for seed in range(len(graph.reads))]
    slices = list(parts_of(*map(str, range(len(graph.reads)))).values())
    on = {f"part{number}": slices[place] for number, place in enumerate(graph.places)}
    train_step = LOOPS[graph.loop](graph.loss, graph.microbatches)
    try:
        check_steps(train_step, parameters, (X, Y), on, (graph.schedule,), steps)
    except PathwaysError as error:
        # Some schedules want more parts, or more microbatches, than the model has.
        assume(not any(said in error.failure.message for said in DO_NOT_FIT))
        raise


@settings(max_examples=5)
@given(graphs())
def test_random_models_train_as_on_one_device(graph: Graph) -> None:
    check(graph)


if __name__ == "__main__":
    five = given(graphs())(lambda graph: check(graph, steps=5))
    settings(max_examples=int(sys.argv[1]), deadline=None)(five)()
