"""``pw.mpmd.jit``: what a user says of a step, and where its parts go when nothing is said.

Problem: who has a model and a lab wants the best cut of the one on the other, and not to say it.

How: ``on="auto"`` takes a slice of each island.  At the first use, when types are known, the step
is cut by counted work, and :func:`~pathways_lab.pipeline.search.search` measures other cuts.

Rule for maintainers: what is chosen is chosen once, and shown (``step.on``).

Paper: section 5.3 ("stages balanced").
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pathways_lab.client.functions.arguments import Names, Numbers
from pathways_lab.client.lab.devices import Slice
from pathways_lab.client.lab.opening import current
from pathways_lab.client.session import failures
from pathways_lab.pipeline.mpmd.cutting import cut
from pathways_lab.pipeline.mpmd.flat import Flat
from pathways_lab.pipeline.mpmd.order import Schedules
from pathways_lab.pipeline.mpmd.step import Step, Types

AUTO = "auto"
SECONDS = 20.0
"""For which cuts are measured at the first use of an automatic step."""


class _Automatic(Step):
    """A step on a slice of each island, with the best cut that was measured."""

    def _chosen(self, step: Flat, types: Types) -> dict[str, Slice]:
        lab = current()
        parts = dict.fromkeys(e.mark for e in step.equations if e.mark is not None)
        slices = [
            lab.slice(
                sum(host.devices for host in island.hosts), axes=("data",), island=island.name
            )
            for island in lab.islands[: max(1, len(parts))]
            if island.hosts
        ]
        counted = cut(step, slices)
        if len(slices) == 1:
            return counted
        from pathways_lab.pipeline.search import search  # it knows steps, and so imports them

        trial = self.otherwise(on=counted)
        args, kwargs = types
        trial.partition(*args, **kwargs)
        found = search(trial, lab, over=("cut", "placement"), seconds=SECONDS)
        chosen = dict(found.winner.way.layout)
        for unused in {*slices} - {*chosen.values()}:
            unused.release()
        return chosen


@failures.at_caller()
def jit(
    function: Callable[..., Any],
    *,
    on: Mapping[str, Slice] | Sequence[Slice] | str,
    schedule: Schedules | None = None,
    in_shardings: Any = None,
    static_argnums: Numbers = None,
    static_argnames: Names = None,
    donate_argnums: Numbers = None,
    donate_argnames: Names = None,
    name: str | None = None,
    dispatch: str = "parallel",
    priority: int | None = None,
    data: Mapping[str, Any] | None = None,
) -> Step:
    """Make a training step, written for one device, one program over slices.

    function: the whole step, ordinary JAX: the loss, ``jax.value_and_grad``, the optimizer, a loop
        over microbatches in Python or by ``jax.lax.scan``.  Parts of the model in it are marked by
        :func:`named`.
    on: by name, the slice of a part: of its forward work, of its backward work, of its parameters
        and of the optimizer's memory for them.  All other code runs where its operands are.
        Or a list of slices: then each slice has neighbouring parts, as many as make its work go
        with its number of devices; :attr:`Step.on` says which.
        Or ``"auto"``: a slice of all devices of each island, with one axis, ``"data"``, and the
        cut of which the measured time is best and that fits their memory: the first ``place``,
        ``capture`` or call takes up to 20 seconds for that.
    schedule: the name of one of ``pw.pipeline``'s (``"1f1b"``, ``"zb-h2"``, ``"dualpipev"``,
        ...), whose stages are the parts in the order of *on*, neighbours on one slice together;
        a ``pw.pipeline.Schedule`` of one's own, with a stage for each part; a
        ``pw.pipeline.Comparison``; or by towers, ``{("a", "b"): "1f1b", ("c",): "gpipe"}``: each
        has slices of its own.  None: in the order of the code.
    in_shardings: a pytree prefix of the positional arguments with ``PartitionSpec`` entries: how
        each is cut over the mesh of its slice, and a state that replaces it too.
    static_argnums, static_argnames, donate_argnums, donate_argnames: as in ``jax.jit``.
    name, dispatch, priority, data: of the program, as for ``pw.program``.

    >>> step = pw.mpmd.jit(train_step, on={"encoder": left, "decoder": right},
    ...                    schedule="1f1b", donate_argnums=(0, 1))           # doctest: +SKIP
    >>> params, memory, loss = step(params, memory, batch)                   # doctest: +SKIP

    A call is one run and one message, and returns handles at once.  State stays where it is used:
    a result with the structure of an argument comes out where that went in.

    Raises PathwaysError for parts without a slice, slices without a part, and schedules that do
    not fit the step or would hang.
    """
    options: dict[str, Any] = {
        "static_argnums": static_argnums, "static_argnames": static_argnames, "name": name,
        "dispatch": dispatch, "priority": priority, "data": data,
    }  # fmt: skip
    donate = donate_argnums, donate_argnames
    if isinstance(on, str) and on == AUTO:
        return _Automatic(function, (), schedule, in_shardings, donate, **options)
    listed = isinstance(on, list | tuple) and len(on) > 0
    entries = on.items() if isinstance(on, Mapping) else enumerate(on if listed else [on])
    right = [isinstance(at, Slice) and (listed or isinstance(part, str)) for part, at in entries]
    if isinstance(on, str) or not all(right):
        raise failures.refused(
            f"on={on!r:.80} does not say for each part, by its name, the slice",
            'on={"encoder": lab.slice(2), "decoder": lab.slice(2)}, on=[slice, slice], or'
            ' on="auto"',
        )
    return Step(function, on, schedule, in_shardings, donate, **options)
