"""A captured program as the field's own IR: Shardy's ``mpmd`` dialect.

Problem: tools and people outside of this project know MLIR.  A lowered program
says the same in it: a topology of named meshes, one fragment of StableHLO for
each compiled function, transfers between meshes.

The dialect has no conditions.  A decision is the number of a case, read off its mesh, and MLIR's
own ``scf.index_switch`` on it; each case is a function of its steps, since transfers stand in
functions only.  A loop is a chain of decisions, as in the plan.

Rule for maintainers: the text is put together here and verified by the dialect
itself; what it refuses is never shown.  Order of operations is order of grants.

Paper: section 4.2 (location-free program, lowered in passes).  Source of the
dialect: https://github.com/openxla/shardy (docs/mpmd).
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from jax import export as jax_export

from pathways_lab.client.code.export import Executable
from pathways_lab.client.lab.devices import Slice
from pathways_lab.client.program.graph import Prepared
from pathways_lab.client.session import failures
from pathways_lab.core.program import lowering
from pathways_lab.core.program.layout import Layout
from pathways_lab.core.program.legality import inputs_of, outputs_of
from pathways_lab.core.program.program import Call, Node, SliceId, Value, When
from pathways_lab.runtime import jax_private
from pathways_lab.runtime.jax_private import Fragment, quoted

Code = tuple[str, SliceId]
DEEPEST = 100
"""Decisions in a row: each is in a function of its own, which the one before it calls."""


class _Step(NamedTuple):
    """A step of the plan.  whens: its condition and those around it, the outermost first."""

    at: int
    node: Node
    whens: tuple[When, ...]

    def reads(self, depth: int) -> tuple[int, ...]:
        """The values that it needs below *depth* conditions: inputs, and what else decides."""
        return (*inputs_of(self.node), *[when.value for when in self.whens[depth:]])


def mpmd(prepared: Prepared) -> str:
    """The lowered program in the ``mpmd`` dialect, verified.

    Raises PathwaysError for functions that call back into Python, and for very long loops.
    """
    return _Printer(prepared).module()


class _Printer:
    def __init__(self, prepared: Prepared) -> None:
        self._prepared = prepared
        self._plan = lowering.lower(prepared.program)  # MLIR knows single arrays only
        self._slices = {on.id: on for on in prepared.slices}
        self._meshes: dict[tuple[SliceId, tuple[tuple[str, int], ...]], str] = {}
        self._fragments: dict[Code, tuple[str, Fragment]] = {}
        self._tensors: dict[int, str] = {}
        self._names: dict[str, int] = {}
        self._last_read: dict[int, int] = {}
        self._functions: list[str] = []
        self._decisions = itertools.count(1)

    def module(self) -> str:
        for executable, slice_id in self._prepared.functions:
            self._add_fragment(executable, slice_id)
        self._find_tensors()
        body = self._body()
        meshes = [f"sdy.mesh @{name} = {_mesh(axes)}" for (_, axes), name in self._meshes.items()]
        fragments = [fragment.text for _, fragment in self._fragments.values()]
        return jax_private.verified_mlir("\n".join((*meshes, body, *fragments)))

    def _add_fragment(self, executable: Executable, slice_id: SliceId) -> None:
        on = self._slices[slice_id]
        if executable.kind != "export":
            raise failures.refused(
                f"{executable.name!r} calls back into Python, which StableHLO cannot say",
                "print the program without it, or see its plan: .ir()",
                program=self._plan.name,
                node=executable.name,
            )
        base = _symbol(f"{executable.name}_{on.name}")
        count = self._names[base] = self._names.get(base, 0) + 1
        name = base if count == 1 else f"{base}_{count}"
        mesh = self._mesh_name(slice_id, on.axis_sizes)
        module = str(jax_export.deserialize(bytearray(executable.blob)).mlir_module())
        made = jax_private.fragment(module, name, mesh, on.axis_sizes)
        self._fragments[executable.key, slice_id] = name, made

    def _find_tensors(self) -> None:
        """MLIR's type of every value: the code that makes or reads it knows."""
        nodes = [step.node for step in self._plan.steps]
        for node in nodes:
            if isinstance(node, Call):
                _, code = self._fragments[node.function, node.slice]
                self._tensors.update(zip(node.inputs, code.inputs, strict=True))
                self._tensors.update(zip(node.outputs, code.outputs, strict=True))
        moves = [node for node in nodes if not isinstance(node, Call)]
        for node in (*moves, *reversed(moves)):
            for known, other in ((node.input, node.output), (node.output, node.input)):
                if known in self._tensors:
                    self._tensors.setdefault(other, self._tensors[known])

    def _body(self) -> str:
        plan = self._plan
        around: dict[int, tuple[When, ...]] = {}
        steps = []
        for at, node in enumerate(step.node for step in plan.steps):
            when = node.when
            whens = () if when is None else (*around[when.value], when)
            around.update(dict.fromkeys(outputs_of(node), whens))
            steps.append(_Step(at, node, whens))
            self._last_read.update(dict.fromkeys(steps[-1].reads(0), at))
        self._last_read.update(dict.fromkeys(plan.outputs, len(steps)))
        deepest = max([len(step.whens) for step in steps], default=0)
        if deepest > DEEPEST:
            raise failures.refused(
                f"{plan.name!r} takes up to {deepest} decisions in a row, and at most {DEEPEST} are"
                " printed",
                "print it with a smaller at_most= of pw.until, or see its plan: .ir()",
                program=plan.name,
            )
        self._function("public", _symbol(plan.name), 0, steps, plan.inputs, plan.outputs)
        return "\n".join(self._functions)

    def _function(
        self,
        visibility: str,
        name: str,
        depth: int,
        steps: Sequence[_Step],
        inputs: Sequence[int],
        outputs: Sequence[int],
    ) -> None:
        """A function of the steps below *depth* conditions, and before it those of its cases."""
        names = {value: f"%{_name(value)}" for value in inputs}
        lines = []
        for decision, group in itertools.groupby(steps, lambda s: _decision(s, depth)):
            if decision is None:
                lines += [self._line(step.node, names) for step in group]
            else:
                lines += self._switch(decision, depth, list(group), names)
        topology = ", ".join(
            f"<{quoted(on.name)} : {_mesh(on.axis_sizes)}>" for on in self._prepared.slices
        )
        given = ", ".join(f"%{_name(v)}: {self._types((v,))}" for v in inputs)
        head = f"func.func {visibility} @{name}({given}) -> ({self._types(outputs)})"
        head += f" attributes {{topology = #mpmd.topology<{topology}>}} {{"
        ends = f"return {_listed(names, outputs)} : {self._types(outputs)}" if outputs else "return"
        self._functions.append("\n".join((head, *lines, ends, "}")))

    def _line(self, node: Node, names: dict[int, str]) -> str:
        inputs, outputs = inputs_of(node), outputs_of(node)
        given = _listed(names, inputs)
        names.update({value: f"%{_name(value)}" for value in outputs})
        made = _listed(names, outputs)
        if not isinstance(node, Call):
            types = f"({self._types(inputs)}) -> {self._types(outputs)}"
            return f"{made} = mpmd.transfer {given} : {types}"
        name, _ = self._fragments[node.function, node.slice]
        mesh = self._slices[node.slice].name
        types = f"({self._types(inputs)}) -> ({self._types(outputs)})"
        # The dialect reads any text, and prints it without its escapes.
        origin = quoted(re.sub(r'[\x00-\x1f\\"]', "'", node.name or name))
        call = f"mpmd.fragment_call<mesh={quoted(mesh)}, origin=[{origin}]> @{name}"
        return f"{made} = {call}({given}) : {types}" if made else ""

    def _switch(
        self, decision: When, depth: int, steps: Sequence[_Step], names: dict[int, str]
    ) -> list[str]:
        """The cases of a decision, as functions; a value that a case does not make is of no use."""
        made = dict.fromkeys(value for step in steps for value in outputs_of(step.node))
        results = [v for v in made if self._last_read.get(v, -1) > steps[-1].at]
        number, types = next(self._decisions), self._types((decision.value,))
        lines = [
            f"%t{number} = mpmd.unassign {names[decision.value]} : ({types}) -> tensor<i32>",
            f"%n{number} = tensor.extract %t{number}[] : tensor<i32>",
            f"%i{number} = arith.index_cast %n{number} : i32 to index",
        ]
        regions = []
        for case in range(decision.cases):
            mine = [step for step in steps if step.whens[depth].case == case]
            function = f"{_symbol(self._plan.name)}_decision{number}_case{case}"
            regions.append(f"case {case} {{" if case < decision.cases - 1 else "default {")
            regions += self._case(function, depth + 1, mine, results, names)
        begin, found = _results(f"%s{number}", results)
        head = f"{begin}scf.index_switch %i{number}"
        lines.append(f"{head} -> {self._types(results)}" if results else head)
        names.update(found)
        return [*lines, *regions]

    def _case(
        self,
        function: str,
        depth: int,
        steps: Sequence[_Step],
        results: Sequence[int],
        names: Mapping[int, str],
    ) -> list[str]:
        """One case: a call of a function of its own, for the results that it makes."""
        own = {value for step in steps for value in outputs_of(step.node)}
        makes = [value for value in results if value in own]
        reads = dict.fromkeys(value for step in steps for value in step.reads(depth))
        takes = [value for value in reads if value in names and value not in own]
        lines = []
        there = dict(names)
        if steps:
            self._function("private", function, depth, steps, takes, makes)
            made, found = _results("%r", makes)
            there.update(found)
            types = f"({self._types(takes)}) -> ({self._types(makes)})"
            lines.append(f"{made}func.call @{function}({_listed(names, takes)}) : {types}")
        for value in results:
            if value not in there:
                there[value] = f"%none{value}"
                cast = "builtin.unrealized_conversion_cast to"
                lines.append(f"{there[value]} = {cast} {self._types((value,))}")
        types = f" {_listed(there, results)} : {self._types(results)}" if results else ""
        return [*lines, f"scf.yield{types}", "}"]

    def _types(self, values: Sequence[int]) -> str:
        return ", ".join(self._type(v, self._plan.values[v]) for v in values)

    def _type(self, number: int, value: Value) -> str:
        assert value.slice is not None
        on = self._slices[value.slice]
        tensor = self._tensors[number]
        cut = self._sharding(on, value.layout, tensor)
        return f"!mpmd.mesh_tensor<{quoted(on.name)}, {tensor}{cut}>"

    def _sharding(self, on: Slice, layout: Layout | None, tensor: str) -> str:
        if layout is None or not any(layout.spec):
            return ""
        mesh = self._mesh_name(on.id, layout.mesh)
        axes = ["{" + ", ".join(map(quoted, cut)) + "}" for cut in layout.spec]
        # A key array has a dimension more in MLIR, which is never cut.
        axes += ["{}"] * (len(re.findall(r"\d+x", tensor)) - len(axes))
        return f", sharding=<@{mesh}, [{', '.join(axes)}]>"

    def _mesh_name(self, slice_id: SliceId, axes: tuple[tuple[str, int], ...]) -> str:
        on = self._slices[slice_id]
        own = axes == on.axis_sizes
        name = f"mesh_{_symbol(on.name)}" + ("" if own else f"_{len(self._meshes)}")
        return self._meshes.setdefault((slice_id, axes), name)


def _decision(step: _Step, depth: int) -> When | None:
    """The decision on which a step hangs below *depth* conditions, as its first case."""
    return replace(step.whens[depth], case=0) if len(step.whens) > depth else None


def _listed(names: Mapping[int, str], values: Sequence[int]) -> str:
    return ", ".join([names[value] for value in values])


def _results(name: str, values: Sequence[int]) -> tuple[str, dict[int, str]]:
    """How an operation begins that makes these, and how each is called afterwards."""
    if len(values) < 2:
        return f"{name} = " if values else "", dict.fromkeys(values, name)
    return f"{name}:{len(values)} = ", {v: f"{name}#{n}" for n, v in enumerate(values)}


def _symbol(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9_]", "_", name)


def _name(value: int) -> str:
    return f"v{value}"


def _mesh(axes: tuple[tuple[str, int], ...]) -> str:
    return "<[" + ", ".join(f"{quoted(name)}={size}" for name, size in axes) + "]>"
