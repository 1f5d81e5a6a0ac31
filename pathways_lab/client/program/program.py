"""Programs: ``@pw.program``, and what a captured program is.

Problem: one Python function that calls many compiled functions becomes one
program, captured once per set of argument types and places, lowered once, and
then run with one message each time.

Rule for maintainers: a repeated call is one lookup and one run; capture sees
only types, so the cache key is types, places, static values and JAX's own context.

Paper: section 3 (the program tracer), section 4.2.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict, Unpack, overload

import jax
from jax import device_put as jax_device_put  # JAX's own, also while routed

from pathways_lab.client.code import layouts
from pathways_lab.client.code.layouts import Requested
from pathways_lab.client.functions import array_types, scopes
from pathways_lab.client.functions.arguments import Names, Numbers, Roles, broadcast, options_of
from pathways_lab.client.functions.array_types import ArrayType
from pathways_lab.client.functions.flat import with_static
from pathways_lab.client.lab import tags
from pathways_lab.client.lab.devices import OnSlices, Slice, VirtualDevice
from pathways_lab.client.lab.run_options import USUAL, Running
from pathways_lab.client.lab.tags import Tag
from pathways_lab.client.program import capture, fusing, mlir
from pathways_lab.client.program.calls import session_of
from pathways_lab.client.program.capture import Capture, Captured, Standin
from pathways_lab.client.program.graph import (
    Argument,
    Constant,
    GraphNode,
    Held,
    Prepared,
    Ref,
    check,
    prepare,
)
from pathways_lab.client.program.placement import Given, place
from pathways_lab.client.program.primitives import Move
from pathways_lab.client.session import failures
from pathways_lab.client.session.handles import Handle
from pathways_lab.core.memory import liveness
from pathways_lab.core.program import legality, lowering
from pathways_lab.core.program.program import Call, Program
from pathways_lab.core.slices.topology import Owned, SliceBinding
from pathways_lab.runtime.jax_private import trace_context

DISPATCH = ("parallel", "sequential")
ORDERS = ("turns", "written")


@dataclass(frozen=True)
class Output:
    """Output *index* of the run."""

    index: int


@dataclass(frozen=True)
class Passed:
    """An input that is returned untouched; on: where a host array goes, if anywhere."""

    source: Argument | Constant | Held
    type: ArrayType
    name: str
    on: Slice | None


@dataclass(frozen=True)
class How:
    """Options of lowering: fuse neighbouring calls; sequential dispatch; what is said of runs.

    written: the order of the program is that of its calls.
    """

    fuse: bool = False
    sequential: bool = False
    running: Running = USUAL
    written: bool = False

    @classmethod
    def of(cls, fuse: bool, dispatch: str, running: Running = USUAL, order: str = ORDERS[0]) -> How:
        """Raises PathwaysError for a dispatch, or an order, that does not exist."""
        for option, given, known in ("dispatch", dispatch, DISPATCH), ("order", order, ORDERS):
            if given not in known:
                raise failures.refused(
                    f"{option}={given!r} does not exist", f"one of {', '.join(known)}"
                )
        return cls(fuse, dispatch == "sequential", running, order == "written")


AHEAD = How()


class CapturedProgram:
    """A program for one set of argument types and places, ready to run.

    name: of the program.  prepared: None when nothing in it runs.
    how: options of its lowering.  tag: of its runs.
    """

    def __init__(
        self,
        captured: Captured,
        inputs: Sequence[Ref | Given],
        default: Slice | None = None,
        how: How = AHEAD,
        tag: Tag = tags.NOTHING,
    ) -> None:
        self.name = captured.name
        self.tag = tag
        self.jaxpr = captured.jaxpr
        self._tree = captured.tree
        self._sequential = how.sequential
        try:
            graph = place(captured, inputs, default)
            returned = [x for x in graph.results if isinstance(x, Ref)]
            check(captured.name, graph.nodes, returned)
            outputs = list(dict.fromkeys(ref for ref in returned if ref.source is None))
            self.prepared: Prepared | None = None
            self._fused = ""
            nodes: Sequence[GraphNode] = graph.nodes
            if how.fuse:
                if any(node.when is not None for node in nodes):
                    raise failures.capture_failure(
                        "fuse=True makes neighbouring calls one, and this program decides which of"
                        " its calls run",
                        "leave fuse=True out, or fuse by hand: pw.jit of what belongs together",
                    )
                nodes, self._fused = fusing.fused(nodes, outputs)
            if nodes:
                self.prepared = prepare(
                    captured.name, nodes, outputs, sequential=how.sequential, written=how.written,
                    running=how.running,
                )  # fmt: skip
        except Exception as error:
            failures.reraise(error, program=captured.name)
        numbers = {ref: Output(number) for number, ref in enumerate(outputs)}
        on = default or _first_slice(inputs, self.prepared)
        self._leaves = tuple(
            self._result(graph.results[leaf.index], numbers, on)
            if isinstance(leaf, Standin)
            else leaf
            for leaf in captured.leaves
        )

    @staticmethod
    def _result(item: Ref | Given, numbers: dict[Ref, Output], on: Slice | None) -> Output | Passed:
        if isinstance(item, Ref) and item.source is None:
            return numbers[item]
        assert item.source is not None
        where = item.slice if isinstance(item, Ref) else on
        return Passed(item.source, item.type, item.name, where)

    @property
    def ready(self) -> tuple[Prepared, ...]:
        """Itself, if anything of it runs."""
        return () if self.prepared is None else (self.prepared,)

    @property
    def released(self) -> bool:
        """Whether a slice that it uses was released."""
        return self.prepared is not None and self.prepared.released

    def run(self, leaves: Sequence[Any]) -> Any:
        """Submit one run with these flat arguments; its results, at once."""
        failures.check_values(leaves, program=self.name)
        handles: list[Handle] = []
        if self.prepared is not None:
            self.prepared.check()
            session = session_of(self.prepared.place)
            with tags.beneath(self.tag):
                handles = session.run(self.prepared, leaves)
        results = [self._leaf(leaf, leaves, handles) for leaf in self._leaves]
        return jax.tree.unflatten(self._tree, results)

    def _leaf(self, leaf: Any, leaves: Sequence[Any], handles: list[Handle]) -> Any:
        if isinstance(leaf, Output):
            return handles[leaf.index]
        if not isinstance(leaf, Passed):
            return leaf
        if isinstance(leaf.source, Held):
            return leaf.source.handle
        source = leaf.source
        value = source.data if isinstance(source, Constant) else leaves[source.index]
        if isinstance(value, Handle) or leaf.on is None:
            return value
        layout = layouts.replicated(leaf.on, len(leaf.type.shape))
        return session_of(leaf.on).put(value, leaf.type, leaf.on, layout, leaf.name)

    @property
    def program(self) -> Program:
        """The location-free program, with its dispatch.  Raises PathwaysError if nothing runs."""
        program = self._must_run().program
        return lowering.behind(program) if self._sequential else program

    @property
    def bindings(self) -> tuple[SliceBinding, ...]:
        """Where its slices lie."""
        return tuple(on.binding for on in self._must_run().slices)

    @property
    def held(self) -> dict[str, float]:
        """Seconds that ``pw.emulated`` holds devices, by function key, where it does."""
        functions = self._must_run().functions
        return {code.key: code.held for code, _ in functions if code.held}

    def memory(self, temporary: Mapping[str, int] | None = None) -> dict[Owned, int]:
        """By device, host and number: the most bytes that a run of it makes it hold at once.

        temporary: bytes that functions take while they run, by function key; hosts know them when
            they have compiled the functions (``"compile"`` in the timeline).

        Counted along the plan's order: inputs that the program does not donate all the time, those
        that it donates, and what it makes, until their last reader; a transfer's target from the
        transfer on.  A run on devices without more room never holds more.  Where there is more,
        hosts run ahead of the order.

        >>> max(step.capture(params, batch).memory().values())           # doctest: +SKIP
        1310720
        """
        plan, needs = self._must_run().plan, temporary or {}
        taken = {v for step in plan.steps for v in legality.donated_of(step.node)}
        beside = dict.fromkeys(plan.slices, 0)
        for value in {*plan.inputs} - taken:
            where = plan.values[value].slice
            assert where is not None, "a plan has a place for each value"
            beside[where] += plan.values[value].nbytes
        nodes = [step.node for step in plan.steps]
        during = [needs.get(n.function, 0) if isinstance(n, Call) else 0 for n in nodes]
        lines = liveness.profile(plan, taken.intersection(plan.inputs), during)
        held: dict[Owned, list[list[int]]] = {}
        for binding in self.bindings:
            line = [beside[binding.slice] + more for more in lines[binding.slice]]
            for device in binding.devices:
                held.setdefault(device, []).append(line)
        return {device: max(liveness.peaks(each)) for device, each in held.items()}

    def _must_run(self) -> Prepared:
        if self.prepared is None:
            raise failures.capture_failure(
                f"nothing in program {self.name!r} runs on a device",
                "call a compiled function in it",
            )
        return self.prepared

    def ir(self) -> str:
        """Every stage as text: captured (JAX's own form), location free, lowered."""
        stages = [("captured", str(self.jaxpr))]
        if self._fused:
            stages.append(("fused", self._fused))
        if self.prepared is not None:
            stages.append(("program", lowering.show(self.prepared.program)))
            stages.append(("plan", lowering.show_plan(self.prepared.plan)))
        return "\n\n".join(f"--- {title} ---\n{text}" for title, text in stages)

    def mlir(self) -> str:
        """The program in Shardy's ``mpmd`` dialect, verified: meshes, fragments, transfers.

        Decisions are ``scf.index_switch`` on a value that is read off its mesh.  IFRT IR has none,
        so ``pw.mpmd.load`` takes back only what was printed of a program without decisions.

        Raises PathwaysError for functions that call back into Python, and for loops of more than
        100 turns.
        """
        return "module {}" if self.prepared is None else mlir.mpmd(self.prepared)

    def __repr__(self) -> str:
        steps = len(self.prepared.plan.steps) if self.prepared is not None else 0
        return f"<captured program {self.name}: {steps} steps>"


def _first_slice(inputs: Sequence[Ref | Given], prepared: Prepared | None) -> Slice | None:
    if prepared is not None:
        return prepared.place
    places = (item.slice for item in inputs if isinstance(item, Ref))
    return next((on for on in places if not on.taken), None)


def input_item(index: int, leaf: Any, kind: ArrayType, name: str) -> Ref | Given:
    """The input of the graph that is flat argument *index*."""
    if isinstance(leaf, Handle):
        return Ref(kind, leaf.slice, leaf.layout, name, Argument(index))
    return Given(kind, Argument(index), name)


class ProgramFunction:
    """A Python function whose calls are programs.

    on: where operations run that nothing else gives a place.
    tag: of its runs.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        static_argnums: Numbers = None,
        static_argnames: Names = None,
        on: Slice | None = None,
        name: str | None = None,
        fuse: bool = False,
        dispatch: str = "parallel",
        order: str = "turns",
        keep: bool = False,
        window: float | None = None,
        priority: int | None = None,
        data: Mapping[str, Any] | None = None,
    ) -> None:
        if not callable(function):
            raise TypeError(f"pw.program takes a function, got {type(function).__name__}")
        functools.update_wrapper(self, function, updated=())
        self.function = function
        self.name = str(name or getattr(function, "__name__", type(function).__name__))
        self._on = on
        self._how = How.of(fuse, dispatch, Running.of(keep, window), order)
        self.tag = Tag.of(priority, data)
        self._roles = Roles(function, static_argnums, static_argnames)
        self._captured = OnSlices[Any, CapturedProgram]()
        self.last: CapturedProgram | None = None

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Run the program; what its function returns, with handles for arrays, at once."""
        if capture.current() is not None:
            # A program inside a program is part of it.
            return self.function(*args, **kwargs)
        program, leaves = self._find(args, kwargs)
        return program.run(leaves)

    @property
    def ready(self) -> tuple[Prepared, ...]:
        """The programs that calls of it have come to."""
        return tuple(ready for captured in [*self._captured.values()] for ready in captured.ready)

    def capture(self, /, *args: Any, **kwargs: Any) -> CapturedProgram:
        """The captured program for these arguments, without running it."""
        return self._find(args, kwargs)[0]

    def ir(self, /, *args: Any, **kwargs: Any) -> str:
        """Every stage of the program for these arguments (default: of the last call) as text."""
        if not args and not kwargs and self.last is not None:
            return self.last.ir()
        return self.capture(*args, **kwargs).ir()

    def mlir(self, /, *args: Any, **kwargs: Any) -> str:
        """The program for these arguments (default: of the last call) as verified MLIR."""
        if not args and not kwargs and self.last is not None:
            return self.last.mlir()
        return self.capture(*args, **kwargs).mlir()

    def _find(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[CapturedProgram, list[Any]]:
        split = self._roles.split(args, kwargs)
        leaves, tree = jax.tree.flatten((split.args, split.kwargs))
        kinds = tuple(
            leaf.type if isinstance(leaf, Handle) else array_types.host_type(leaf)
            for leaf in leaves
        )
        places = tuple((x.slice, x.layout) if isinstance(x, Handle) else None for x in leaves)
        key = (tree, kinds, places, split.static_key, trace_context())
        program = self._captured.get(key)
        if program is None:
            labels = self._roles.labels(split)
            inputs = []
            for index, (leaf, kind, label) in enumerate(zip(leaves, kinds, labels, strict=True)):
                if kind is None:
                    raise array_types.no_array(leaf, f"{label} of {self.name!r}")
                inputs.append(input_item(index, leaf, kind, label))

            def body(standins: list[Any]) -> Any:
                args, kwargs = jax.tree.unflatten(tree, standins)
                full, named = with_static(args, kwargs, split.static)
                return self.function(*full, **named)

            captured = Capture(self.name).run(
                body,
                [item.type for item in inputs],
                [item.slice if isinstance(item, Ref) else None for item in inputs],
            )
            program = CapturedProgram(captured, inputs, self._on, self._how, self.tag)
            self._captured.add(key, program)
        self.last = program
        return program, leaves

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)

    def __repr__(self) -> str:
        return f"<program {self.name}>"


class Options(TypedDict, total=False):
    """See :func:`program`."""

    static_argnums: Numbers
    static_argnames: Names
    on: Slice | None
    name: str | None
    fuse: bool
    dispatch: str
    order: str
    keep: bool
    window: float | None
    priority: int | None
    data: Mapping[str, Any] | None


@overload
def program(
    function: None = None, /, **options: Unpack[Options]
) -> Callable[[Callable[..., Any]], ProgramFunction]: ...
@overload
def program(function: Callable[..., Any], /, **options: Unpack[Options]) -> ProgramFunction: ...
@options_of(ProgramFunction)
def program(function: Callable[..., Any] | None = None, /, **options: Unpack[Options]) -> Any:
    """Make a function that calls compiled functions into one program.

    The function is captured once per set of argument types and places: each
    call of a compiled function in it is a node, operators and ``jnp`` calls
    become nodes where their operands are, and moves between slices are
    inserted.  A call submits one run, with one message, and returns at once
    what the function returns, with a handle in place of each array that it
    makes.  An argument from the host that it returns untouched is put on *on*,
    or on the program's first slice; in a program without any it comes back as
    it is, and so does whatever else the function returns.
    Arrays and handles that the function reads from outside are part of the
    captured program, as in ``jax.jit``.

    static_argnums, static_argnames: arguments that are part of the program
        (numbers of microbatches, switches), as in ``jax.jit``.
    on: where operations run that nothing else gives a place.
    fuse: calls that follow each other on one slice become one gang; results may
        differ in the last place where the compiler joins roundings.
    dispatch: ``"parallel"`` does the hosts' work for all nodes at once, ahead of
        the data; ``"sequential"``, for comparison, only for nodes whose inputs
        are there.
    order: each slice computes in the order of the calls.  Between slices places are given in
        ``"turns"``, in the order in which calls of equal length could begin, so that a plain
        loop over microbatches fills all stages; ``"written"``: in the order of the calls, for
        loops that are timed by hand.
    keep, window: as of ``pw.jit``, for all of it.
    priority, data: of its runs, for policies: a whole number, and a few names with plain
        values; blocks of :func:`pathways_lab.tagged` around a call go before them.

    Raises PathwaysError with the user's own line for what cannot be captured.
    """
    if function is None:
        return lambda given: ProgramFunction(given, **options)
    return ProgramFunction(function, **options)


def device_put(tree: Any, to: Any) -> Any:
    """Copy arrays or handles to a slice.

    tree: a pytree of arrays, numbers and handles.
    to: a slice (the layout stays as near as its mesh allows; host arrays are
        copied to every device), a sharding over ``slice.mesh``, or a pytree
        prefix of these.

    Outside of a program: handles, at once.  Inside: a transfer of its own.
    """
    paths, structure = jax.tree.flatten_with_path(tree)
    moves = _moves(to, tree, "the target of device_put")
    scope = scopes.current()
    if isinstance(scope, scopes.Body):
        # Inside of a compiled function it is JAX's business.
        return jax_device_put(tree, _as_shardings(moves, structure))
    moved = [
        scope.record_move(leaf, move, f"device_put{jax.tree_util.keystr(path)}")
        for (path, leaf), move in zip(paths, moves, strict=True)
    ]
    return jax.tree.unflatten(structure, moved)


def _as_shardings(moves: list[Move], structure: Any) -> Any:
    shardings = [
        move.requested if move.requested is not None else move.slice.sharding() for move in moves
    ]
    return jax.tree.unflatten(structure, shardings)


def _is_target(entry: Any) -> bool:
    return isinstance(entry, Slice | VirtualDevice | jax.sharding.Sharding)


def targets_of(to: Any, tree: Any, what: str) -> list[tuple[Slice, Requested]]:
    """Where each leaf of *tree* goes: a slice, and the sharding there if one was given.

    Raises PathwaysError when *to* is no place, or no prefix of the tree; *what* names it.
    """
    return [(move.slice, move.requested) for move in _moves(to, tree, what)]


def _moves(to: Any, tree: Any, what: str) -> list[Move]:
    return [_move(target) for target in broadcast(to, tree, what, _is_target)]


def _move(target: Any) -> Move:
    if isinstance(target, VirtualDevice) and len(target.slice) == 1:
        target = target.slice
    if isinstance(target, Slice):
        return Move(target, None)
    on = layouts.slice_of_sharding(target)
    if on is None:
        raise failures.capture_failure(
            f"pw.device_put to {target!r}, which is neither a slice nor a sharding over one",
            "pass a slice, slice.sharding(spec), or NamedSharding(slice.mesh, spec)",
        )
    return Move(on, target)
