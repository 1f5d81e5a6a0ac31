"""Calls outside of programs: a program of one node each.

Problem: without a program every call of a compiled function is one message and
one gang, on the same path as everything else.

Rule for maintainers: a repeated call is one dictionary lookup where its arguments are
handles, two where some are host arrays; and one message, or part of one.

Paper: section 3 ("without tracing, each compiled function is a program").
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from jax.core import Tracer
from jax.sharding import NamedSharding
from jax.tree_util import tree_flatten, tree_structure, tree_unflatten

from pathways_lab.client.code import layouts, source_lines
from pathways_lab.client.code.layouts import Requested
from pathways_lab.client.functions import scopes
from pathways_lab.client.functions.array_types import ArrayType, host_type, not_put
from pathways_lab.client.functions.jit import BoundCall, CompiledFunction
from pathways_lab.client.functions.traced_function import Body
from pathways_lab.client.lab.devices import Slice, VirtualDevice
from pathways_lab.client.program.graph import (
    Argument,
    CallNode,
    Prepared,
    Ref,
    TransferNode,
    prepare,
)
from pathways_lab.client.session import failures, in_jax
from pathways_lab.client.session.handles import Handle
from pathways_lab.client.session.session import Session
from pathways_lab.runtime import jax_backends, jax_private
from pathways_lab.runtime.jax_private import trace_context

_ONE = tree_structure(0)


class Immediate:
    """The outermost scope: every call is a run."""

    def call(
        self, function: CompiledFunction, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run one call now; a pytree of handles."""
        leaves, tree = tree_flatten((args, kwargs))
        if (
            jax_private.tracing()
            and in_jax.computes_on(function.slice)
            and any(isinstance(leaf, Tracer) for leaf in leaves)
        ):
            return function.on_slice(*args, **kwargs)  # a part of what JAX compiles
        if in_jax.door is not None:
            given, leaves = leaves, in_jax.door.handles(leaves)
            if leaves is not given:
                args, kwargs = tree_unflatten(tree, leaves)
        like = [x.placed if type(x) is Handle else host_type(x) for x in leaves]
        at = source_lines.place_of_caller()
        key: tuple[Any, ...] = (at, tree, *like)
        try:
            known: _Repeat | None = function.repeats.get(key)
        except TypeError:
            # Parts that cannot be hashed: whether they may be is seen to later.
            key, known = (), None
        if known is not None and known.context == trace_context():
            handles = known.call(leaves)
            return handles[0] if known.tree is None else tree_unflatten(known.tree, handles)
        call = function.bind(args, kwargs)
        prepared, session = _prepared(call, at)
        handles = session.call(prepared, call.leaves)
        if key and None not in like and not function.has_static:
            again = _Repeat(prepared, call)
            function.repeats.add(key, again)
        return tree_unflatten(call.body.out_tree, handles)

    def record_move(self, leaf: Any, move: Any, name: str) -> Handle:
        """One array or handle to a slice, now.  name: of what had none."""
        return put_leaf(leaf, move.slice, move.requested, name)

    def apply(
        self,
        name: str,
        function: Callable[..., Any],
        operands: Sequence[Any],
        options: dict[str, Any],
    ) -> Any:
        """An operator on a handle: a compiled function of its own, made once."""
        return _operator(name, function, *options)(*operands, **options)

    def lift(self, leaf: Any) -> Any:
        """JAX's array of a handle."""
        return in_jax.arrays([leaf])[0] if type(leaf) is Handle else leaf


class _Repeat:
    """The prepared call of such arguments, when there has been one from that line before.

    tree: of the results; None: one handle.
    context: JAX's at that call.  It is compared and no part of the key, whose hash would cost
    more; a line seldom has several.
    """

    def __init__(self, prepared: Prepared, call: BoundCall) -> None:
        self.prepared = prepared
        self.tree = None if call.body.out_tree == _ONE else call.body.out_tree
        self.context = trace_context()
        self._given = [n for n, leaf in enumerate(call.leaves) if type(leaf) is not Handle]
        self._order = [s.index for ref in prepared.inputs if isinstance(s := ref.source, Argument)]
        self._plain = not self._given and len(self._order) == len(prepared.inputs)
        if prepared.donated or prepared.may_have_bundles:
            self._plain = False

    @property
    def released(self) -> bool:
        return self.prepared.released

    def call(self, leaves: Sequence[Any]) -> list[Handle]:
        """Run it."""
        session = session_of(self.prepared.place)
        if self._plain:
            return session.repeat(self.prepared, self._order, leaves)
        failures.check_values([leaves[n] for n in self._given], node=self.prepared.name)
        return session.call(self.prepared, leaves)


def _prepared(call: BoundCall, at: source_lines.Place | None) -> tuple[Prepared, Session]:
    """The program of one call, made when the first such call comes from a line.  at: that."""
    failures.check_values(call.leaves, node=call.function.name)
    place = slice_of_call(call)
    session = session_of(place)
    placements = tuple([(x.slice, x.layout) if type(x) is Handle else None for x in call.leaves])
    key = (place, at, placements)
    known: Prepared | None = call.body.prepared.get(key)
    if known is None:
        known = prepare_call(call, place, call.body)
        call.body.prepared.add(key, known)
    return known, session


@functools.cache
def _operator(name: str, function: Callable[..., Any], *static: str) -> CompiledFunction:
    return CompiledFunction(function, static_argnames=static, name=name)


def slice_of_call(call: BoundCall) -> Slice:
    """Where a call runs: where its function says, else where its handles are."""
    handles = (leaf for leaf in call.leaves if isinstance(leaf, Handle))
    return call.slice or slice_of_arguments(handles, call.function.name, failures.refused)


def slice_of_arguments(
    placed: Iterable[Handle | Ref], name: str, error: Callable[..., Exception], **at: Any
) -> Slice:
    """Where a function runs that does not say it: where its arguments are.

    error, at: makes an error, and its further arguments.
    """
    places = dict.fromkeys(each.slice for each in placed)
    found = [on for on in places if not on.taken]
    if len(found) == 1:
        return found[0]
    if places and not found:
        raise error(
            f"the arguments of {name!r} are on {next(iter(places)).name}, and nothing is computed"
            " on another client's slice",
            f"what was taken moves to one of your own: pw.jit({name}, on=slice),"
            " or pw.device_put(h, slice)",
            node=name,
            **at,
        )
    if not found:
        raise error(
            f"nothing says on which slice {name!r} runs",
            f"pw.jit({name}, on=slice), or shardings over slice.mesh, or pass handles",
            node=name,
            **at,
        )
    names = " and ".join(place.name for place in found)
    raise error(
        f"the arguments of {name!r} are on slices {names}, and nothing says where it runs",
        f"pw.jit({name}, on=slice): arguments elsewhere are then moved to it",
        node=name,
        **at,
    )


def session_of(place: Slice) -> Session:
    """The session of a slice's lab."""
    place.check()
    owner = place.owner
    session: Session | None = getattr(owner, "session", None)
    if session is None:
        raise failures.refused(
            f"slice {place.name} belongs to no running lab",
            "make slices with lab.slice(...) or pw.make_virtual_device_set(); what was taken from"
            " another client moves to one: pw.device_put(h, slice)",
        )
    return session


def prepare_call(call: BoundCall, place: Slice, body: Body) -> Prepared:
    """A program of one node.  body: what the node runs, with the call's types and names."""
    inputs = tuple(
        input_of(index, leaf, kind, place, label)
        for index, (leaf, kind, label) in enumerate(
            zip(call.leaves, body.in_types, body.labels, strict=True)
        )
    )
    outputs = tuple(
        Ref(kind, place, name=result_name(body.name, number, len(body.out_types)))
        for number, kind in enumerate(body.out_types)
    )
    node = CallNode(body, place, inputs, outputs, body.name, source_lines.of_caller())
    try:
        return prepare(body.name, [node], outputs)
    except Exception as error:
        failures.reraise(error, node=body.name)


def input_of(index: int, leaf: Any, kind: ArrayType, place: Slice, label: str) -> Ref:
    """The value that flat argument *index* is: where its handle is, else on *place*."""
    if isinstance(leaf, Handle):
        return Ref(kind, leaf.slice, leaf.layout, label, Argument(index))
    return Ref(kind, place, None, label, Argument(index))


def result_name(function: str, number: int, count: int) -> str:
    """The name of result *number* of a function in views."""
    return function if count == 1 else f"{function}.{number}"


# --- moves --------------------------------------------------------------------------------


def put_leaf(leaf: Any, on: Slice, requested: Requested, name: str = "") -> Handle:
    """One array or handle on a slice, under a sharding (None: the nearest layout).

    name: what the handle is called if the value had no name.
    """
    session = session_of(on)
    failures.check_values((leaf,))
    if not isinstance(leaf, Handle):
        kind = host_type(leaf)
        if kind is None:
            raise not_put(leaf)
        if requested is None:
            return session.put(leaf, kind, on, layouts.replicated(on, len(kind.shape)), name)
        return session.put(leaf, kind, on, layouts.layout_of(requested, on, kind), name)
    name = leaf.name or name
    given = Ref(leaf.type, leaf.slice, leaf.layout, name, Argument(0))
    moved = Ref(leaf.type, on, name=name)
    node = TransferNode(given, moved, requested, source_lines.of_caller())
    (handle,) = session.run(prepare("device_put", [node], [moved]), [leaf])
    return handle


def _sharding(handle: Handle) -> NamedSharding:
    scopes.for_handles()
    handle.session.connection.check()  # before JAX compiles, in a fork by the client of its parent
    if handle.slice.released:
        in_jax.needed(handle.session)  # such a slice names its lab no more
    return handle.sharding


def _value(handle: Handle) -> Any:
    return scopes.for_handles().lift(handle)


def _real(device: VirtualDevice) -> Any:
    device.slice.check()
    owner = device.slice.owner
    return in_jax.needed(owner and owner.session).device(device.slice, device.number)


jax_backends.take(Handle, _sharding, _value, in_jax.arrays)
jax_backends.stand_for(VirtualDevice, _real)
