"""The same step function without a controller: one Python loop per host.

Problem: what a single controller costs, and what it is good for, is seen only
beside the classic way: every host runs the same Python loop over the same
compiled step, and no message is sent between two steps.  Both must run the
same code on the same devices and be remembered in the same timeline.

How: the step is compiled as ``pw.jit`` compiles it; what travels is the code
with the number of steps, and the loop (:mod:`pathways_lab.runtime.host.host_loop`) is
one gang.  The controller starts it and hears of its end.

Rule for maintainers: nothing here knows what a host does between two steps.

Paper: section 2 (multi-controller), section 5.1 (dispatch overhead, figure 5).
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence
from typing import Any, cast

import jax

from pathways_lab.client.code import source_lines
from pathways_lab.client.code.export import Executable
from pathways_lab.client.functions.jit import BoundCall
from pathways_lab.client.functions.traced_function import Body
from pathways_lab.client.lab.devices import Slice
from pathways_lab.client.lab.tags import NOTHING, Tag, beneath
from pathways_lab.client.program.calls import prepare_call, session_of
from pathways_lab.client.program.graph import Prepared
from pathways_lab.client.session import failures
from pathways_lab.client.session.handles import Handle
from pathways_lab.core.program.layout import Layout
from pathways_lab.runtime.client_messages import Loop


def start(call: BoundCall, place: Slice, loop: Loop, tag: Tag = NOTHING) -> Any:
    """Run the loop of a bound call on its slice's hosts; a pytree of handles, at once.

    tag: of its run; it goes before the one of the function.
    """
    body = call.body
    _check(call, loop)
    key = (
        place,
        loop,
        source_lines.place_of_caller(),
        tuple((x.slice, x.layout) if isinstance(x, Handle) else None for x in call.leaves),
    )
    known: Prepared | None = body.prepared.get(key)
    if known is None:
        repeated = cast(Body, _Repeated(body, loop))
        known = prepare_call(call, place, repeated)
        body.prepared.add(key, known)
    with beneath(tag.over(call.function.tag)):
        return jax.tree.unflatten(body.out_tree, session_of(place).run(known, call.leaves))


def _check(call: BoundCall, loop: Loop) -> None:
    body, n = call.body, loop.carried
    if not isinstance(loop.steps, int) or loop.steps < 1:
        raise failures.refused(
            f"steps={loop.steps!r} of {body.name!r}: a loop has a whole number of steps, at least"
            " one",
            "steps=100, say",
            node=body.name,
        )
    carried, made = body.in_types[:n], body.out_types[:n]
    if loop.steps > 1 and [(t.shape, t.dtype) for t in carried] != [
        (t.shape, t.dtype) for t in made
    ]:
        raise failures.refused(
            f"{body.name!r} cannot be repeated: its first results are {_types(made)}, and they"
            f" become the first arguments of the next step, which are {_types(carried)}",
            "return the new state first, like the arguments that it replaces;"
            " carry= says how many arguments that are",
            node=body.name,
        )
    gone = [body.labels[number] for number in body.donated if number >= n]
    if loop.steps > 1 and gone:
        raise failures.refused(
            f"{body.name!r} cannot be repeated: it donates {', '.join(map(repr, gone))}, and no"
            " result takes that place in the next step",
            "donate only what carry= counts",
            node=body.name,
        )


def _types(kinds: Sequence[Any]) -> str:
    return ", ".join(map(str, kinds)) or "nothing"


class _Repeated:
    """A body whose code is repeated by the hosts."""

    def __init__(self, body: Body, loop: Loop) -> None:
        self._body = body
        self._loop = loop

    def __getattr__(self, name: str) -> Any:
        return getattr(self._body, name)

    def on(
        self, place: Slice, wanted: Sequence[Layout | None], pinned: Sequence[Layout | None] | None
    ) -> Executable:
        """As the body; results that are carried lie as the arguments that they become."""
        code = self._body.on(place, wanted, pinned)
        n = self._loop.carried
        if code.out_layouts[:n] != code.in_layouts[:n]:
            pins = (*code.in_layouts[:n], *(None for _ in code.out_layouts[n:]))
            code = self._body.on(place, code.in_layouts, pins)
        for number, (given, made) in enumerate(
            zip(code.in_layouts[:n], code.out_layouts[:n], strict=True)
        ):
            if given != made and self._loop.steps > 1:
                raise failures.refused(
                    f"result {number} of {code.name!r} is {made}, and the argument that it becomes"
                    f" in the next step is {given}",
                    "give in_shardings and out_shardings that agree on what is carried",
                    node=code.name,
                )
        digest = hashlib.sha256(f"{code.key} {self._loop}".encode()).hexdigest()[:32]
        return dataclasses.replace(code, key=digest, loop=self._loop)
