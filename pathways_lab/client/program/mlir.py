"""A captured program as the field's own IR: Shardy's ``mpmd`` dialect.

Problem: tools and people outside of this project know MLIR.  A lowered program
says the same in it: a topology of named meshes, one fragment of StableHLO for
each compiled function, transfers between meshes.

Rule for maintainers: the text is put together here and verified by the dialect
itself; what it refuses is never shown.  Order of operations is order of grants.

Paper: section 4.2 (location-free program, lowered in passes).  Source of the
dialect: https://github.com/openxla/shardy (docs/mpmd).
"""

from __future__ import annotations

import re

from jax import export as jax_export

from pathways_lab.client.code.export import Executable
from pathways_lab.client.lab.devices import Slice
from pathways_lab.client.program.graph import Prepared
from pathways_lab.client.session import failures
from pathways_lab.core.program import lowering
from pathways_lab.core.program.layout import Layout
from pathways_lab.core.program.program import Call, SliceId, Value
from pathways_lab.runtime import jax_private
from pathways_lab.runtime.jax_private import Fragment, quoted

Code = tuple[str, SliceId]


def mpmd(prepared: Prepared) -> str:
    """The lowered program in the ``mpmd`` dialect, verified.

    Raises PathwaysError for functions that call back into Python.
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
            raise failures.failure(
                "refused",
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
        lines = []
        for step in plan.steps:
            node = step.node
            if isinstance(node, Call):
                name, _ = self._fragments[node.function, node.slice]
                mesh = self._slices[node.slice].name
                made = ", ".join(f"%{v}" for v in map(_name, node.outputs))
                given = ", ".join(f"%{v}" for v in map(_name, node.inputs))
                types = f"({self._types(node.inputs)}) -> ({self._types(node.outputs)})"
                # The dialect reads any text, and prints it without its escapes.
                origin = quoted(re.sub(r'[\x00-\x1f\\"]', "'", node.name or name))
                call = f"mpmd.fragment_call<mesh={quoted(mesh)}, origin=[{origin}]> @{name}"
                lines.append(f"{made} = {call}({given}) : {types}" if made else "")
            else:
                types = f"({self._types((node.input,))}) -> {self._types((node.output,))}"
                lines.append(
                    f"%{_name(node.output)} = mpmd.transfer %{_name(node.input)} : {types}"
                )
        given = ", ".join(f"%{_name(v)}: {self._types((v,))}" for v in plan.inputs)
        results = ", ".join(f"%{_name(v)}" for v in plan.outputs)
        topology = ", ".join(
            f"<{quoted(on.name)} : {_mesh(on.axis_sizes)}>" for on in self._prepared.slices
        )
        head = f"func.func public @{_symbol(plan.name)}({given}) -> ({self._types(plan.outputs)})"
        head += f" attributes {{topology = #mpmd.topology<{topology}>}} {{"
        return "\n".join((head, *lines, f"return {results} : {self._types(plan.outputs)}", "}"))

    def _types(self, values: tuple[int, ...]) -> str:
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


def _symbol(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9_]", "_", name)


def _name(value: int) -> str:
    return f"v{value}"


def _mesh(axes: tuple[tuple[str, int], ...]) -> str:
    return "<[" + ", ".join(f"{quoted(name)}={size}" for name, size in axes) + "]>"
