"""Programs that decide: conditions and loops over nodes, by a value on a device.

Problem: which nodes run may depend on data.  In a captured program Python's ``if`` and
``while`` cannot ask for a value that comes after the run; these functions record all branches,
and the host that has the value decides, without the client.

How: each branch is captured once, as JAX's own form of code.  A branch may read values from
around it: they are more arguments of it.  :mod:`~pathways_lab.client.program.placement` puts
the nodes of every branch under its condition.  The branch of a condition that is differentiated is
computed again in the backward pass, so that nothing of it is kept.

Rule for maintainers: outside of a program, and where the value is Python's own, nothing is
recorded: the branch is called.

Paper: section 4.5 (nodes whose needs are unknown until a predecessor ends).
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer, eval_jaxpr
from jax.interpreters import ad, batching

from pathways_lab.client.functions import scopes
from pathways_lab.client.functions.array_types import ArrayType, type_of
from pathways_lab.client.lab.slice_request import count
from pathways_lab.client.program.capture import Capture
from pathways_lab.client.program.primitives import beside_p, switch_p, until_p, within_p
from pathways_lab.client.program.transformations import derived, moving_of, refuses
from pathways_lab.client.session import failures
from pathways_lab.client.session.handles import Handle

MOST = 10_000
"""Turns of a loop: each is a part of the plan."""


def cond(pred: Any, on_true: Callable[..., Any], on_false: Callable[..., Any], *args: Any) -> Any:
    """Run the nodes of *on_true* where *pred* is true, else those of *on_false*; both get *args*.

    In a program (:func:`program`), *pred* is a value on a device, and both functions call compiled
    functions, on any slices.  The nodes and transfers of the other function are skipped: nothing
    of them is computed or sent.  Both give the same types, layouts and slices.  The host
    that has *pred* decides, without the client.  Outside of a program *pred* is read.

    Example::

        @pw.program
        def step(x):
            return pw.cond(score(x) > 0.5, accept, refine, x)
    """
    captured_in("cond")
    return switch(_number(pred), (on_false, on_true), *args)


def switch(index: Any, branches: Sequence[Callable[..., Any]], *args: Any) -> Any:
    """Run the nodes of one of the *branches*; *index* is clamped, as by ``jax.lax.switch``.

    See :func:`cond`, which is a switch of two.

    Example::

        @pw.program
        def route(x):
            return pw.switch(choose(x), [small, medium, large], x)
    """
    if not branches:
        raise failures.refused("pw.switch has no branches", "give one function or more")
    capture = captured_in("switch")
    if capture is None or not isinstance(index, Handle | Tracer):
        return branches[int(min(max(int(index), 0), len(branches) - 1))](*args)
    return decided(
        jnp.clip(_one(capture, index).astype("int32"), 0, len(branches) - 1), branches, *args
    )


def decided(number: Any, branches: Sequence[Callable[..., Any]], *args: Any) -> Any:
    """:func:`switch` in a program, by an int32 that is the number of a branch for sure.

    It may say more, see :class:`pathways_lab.core.program.program.When`.
    """
    capture = captured_in("switch")
    assert capture is not None
    leaves, tree = _flat(capture, args)
    made = [_Recorded(branch, leaves, tree) for branch in branches]
    for branch in made[1:]:
        _same(branch, made[0].tree, made[0].types, f"{made[0].name!r}")
    results = switch_p.bind(
        number,
        *leaves,
        *[value for branch in made for value in branch.around],
        branches=tuple(branch.code for branch in made),
        around=tuple(len(branch.around) for branch in made),
        types=made[0].types,
    )
    return jax.tree.unflatten(made[0].tree, results)


def within(number: Any, case: int, cases: int, function: Callable[[], Any]) -> Any:
    """Nodes that run when *number* is *case*, one of *cases*: a part of a branch.

    So the parts of several branches may take turns in the order of a program.  Only other parts of
    the same case, and that branch of :func:`decided`, may read the results.
    """
    made = _Recorded(function, (), jax.tree.structure(()))
    results = within_p.bind(
        number, *made.around, code=made.code, case=case, cases=cases, types=made.types
    )
    return jax.tree.unflatten(made.tree, results)


def until(
    done: Callable[[Any], Any], body: Callable[[Any], Any], state: Any, *, at_most: int
) -> Any:
    """Repeat ``state = body(state)`` until ``done(state)`` is true, *at_most* so many times.

    ``done(state)`` is asked before each turn.  In a program (:func:`program`) both functions
    call compiled functions, on any slices; the client takes no part between turns.  The plan is
    sent once, with one turn, and hosts lay out a turn when they reach it.  A hundred turns of six
    nodes cost a tenth of a second of capture, and 1 MB in the kernel and in the control plane.
    Turns that are not needed are skipped.  Outside of a program ``done`` is read.

    Example::

        @pw.program
        def solve(x):
            return pw.until(converged, improve, x, at_most=100)
    """
    at_most = count("at_most", at_most, 0, MOST)
    capture = captured_in("until")
    if capture is None:
        for _ in range(at_most):
            if bool(done(state)):
                break
            state = body(state)
        return state
    leaves, tree = _flat(capture, (state,))
    asked = _Recorded(lambda *args: _number(done(*args)), leaves, tree)
    turn = _Recorded(body, leaves, tree)
    kinds = [type_of(jax.typeof(leaf)) for leaf in leaves]
    _same(turn, jax.tree.structure(state), tuple(kinds), "its argument")
    results = until_p.bind(
        *leaves,
        *asked.around,
        *turn.around,
        done=asked.code,
        body=turn.code,
        most=at_most,
        around=(len(asked.around), len(turn.around)),
        types=turn.types,
    )
    return jax.tree.unflatten(turn.tree, results)


def captured_in(name: str) -> Capture | None:
    """The program that is being captured, if one is."""
    scope = scopes.current()
    if isinstance(scope, scopes.Body):
        raise failures.capture_failure(
            f"pw.{name} is called inside compiled function {scope.name!r}, which is one node",
            "use jax.lax.cond, switch or while_loop there",
            node=scope.name,
        )
    return scope if isinstance(scope, Capture) else None


def _number(value: Any) -> Any:
    """A truth value as the number of its case."""
    scope = scopes.current()
    if isinstance(scope, Capture) and isinstance(value, Handle | Tracer):
        return (_one(scope, value) != 0).astype("int32")
    return int(bool(value))


def _one(capture: Capture, value: Any) -> Any:
    """A value that decides, in a program.  Raises PathwaysError unless it is one number."""
    number = capture.lift(value)
    if number.shape:
        raise failures.capture_failure(
            f"a decision is one number, and this one has the shape {number.shape}",
            "reduce it in a compiled function: x.any(), x.max()",
        )
    return number


def _flat(capture: Capture, args: tuple[Any, ...]) -> tuple[list[Any], Any]:
    leaves, tree = jax.tree.flatten(args)
    return [jnp.asarray(capture.lift(leaf)) for leaf in leaves], tree


class _Recorded:
    """A captured branch.  around: what it reads beside its arguments."""

    def __init__(self, function: Callable[..., Any], leaves: Sequence[Any], tree: Any) -> None:
        self.name = getattr(function, "__name__", repr(function))

        def flat(*values: Any) -> list[Any]:
            result = function(*jax.tree.unflatten(tree, values))
            found, self.tree = jax.tree.flatten(result)
            scope = scopes.current()
            assert isinstance(scope, Capture)
            return [jnp.asarray(scope.lift(leaf)) for leaf in found]

        structs = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves]
        closed = jax.make_jaxpr(flat)(*structs)
        self.types: tuple[ArrayType, ...] = tuple(map(type_of, closed.out_avals))
        self.around = [value for value in closed.consts if isinstance(value, Tracer)]
        self.code = closed


def _same(branch: _Recorded, tree: Any, types: Sequence[ArrayType], other: str) -> None:
    """Raises PathwaysError when the results of a branch are not like others."""
    if branch.tree != tree:
        raise failures.capture_failure(
            f"{branch.name!r} gives {branch.tree}, and {other} is {tree}",
            "all branches give the same structure",
        )
    for at, (mine, theirs) in enumerate(zip(branch.types, types, strict=True)):
        if (mine.shape, mine.dtype) != (theirs.shape, theirs.dtype):
            raise failures.capture_failure(
                f"result {at} of {branch.name!r} is {mine}, that of {other} is {theirs}",
                "all branches give the same types",
            )


# --- gradients ----------------------------------------------------------------------------


def _of_switch(primals: Sequence[Any], tangents: Sequence[Any], **parameters: Any) -> Any:
    bound = functools.partial(switch_p.bind, **parameters)
    moving = moving_of(tangents)
    codes, around = parameters["branches"], parameters["around"]
    own = len(primals) - 1 - sum(around)
    starts = list(itertools.accumulate(around, initial=own))

    def backward(args: Any, of_results: list[Any]) -> list[Any]:
        index, *operands = args
        given = [n for n, value in enumerate(of_results) if value is not None]

        def of_branch(case: int) -> Callable[..., Any]:
            code = codes[case]

            def branch(operands: Sequence[Any], cotangents: Sequence[Any]) -> list[Any]:
                def of_moving(*moved: Any) -> list[Any]:
                    flat = list(operands)
                    for n, value in zip(moving, moved, strict=True):
                        flat[n - 1] = value
                    around = iter(flat[starts[case] : starts[case + 1]])
                    consts = [next(around) if isinstance(c, Tracer) else c for c in code.consts]
                    results = eval_jaxpr(code.jaxpr, consts, *flat[:own])
                    return [results[n] for n in given]

                moved = [operands[n - 1] for n in moving]
                _, pullback = jax.vjp(of_moving, *moved)
                found = pullback(list(cotangents))
                return [beside_p.bind(g, x) for g, x in zip(found, moved, strict=True)]

            return branch

        found = iter(
            decided(
                index,
                [of_branch(case) for case in range(len(codes))],
                operands,
                [of_results[n] for n in given],
            )
        )
        return [next(found) if n in moving else None for n in range(len(args))]

    return derived(bound, lambda *args: (bound(*args), args), backward, primals, tangents)


_SWITCH = "pw.cond and pw.switch, which run the nodes of one branch"
_UNTIL = "pw.until, whose number of turns is not known"
ad.primitive_jvps[switch_p] = _of_switch
ad.primitive_jvps[until_p] = refuses("jax.grad", _UNTIL)
batching.primitive_batchers[switch_p] = refuses("jax.vmap", _SWITCH)
batching.primitive_batchers[until_p] = refuses("jax.vmap", _UNTIL)
