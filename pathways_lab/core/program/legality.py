"""The checks that a program and a plan are legal.

Problem: a mistake in a captured program must be reported at the user's own line
before anything runs, and a plan that arrives from a client must never be able
to confuse the control plane.  Both checks live here, so that they agree.

Rule for maintainers: a check returns a :class:`Failure` or None and never
raises on any input that its types allow.

Paper: section 4.3 (legality of the lowered program).
"""

from __future__ import annotations

from pathways_lab.core.errors import Failure
from pathways_lab.core.program.decisions import Scopes
from pathways_lab.core.program.program import (
    LONGEST_WINDOW,
    Call,
    Line,
    Node,
    Plan,
    Program,
    ValueId,
    is_window,
)


def inputs_of(node: Node) -> tuple[ValueId, ...]:
    """The values that a node reads."""
    return node.inputs if isinstance(node, Call) else (node.input,)


def outputs_of(node: Node) -> tuple[ValueId, ...]:
    """The values that a node makes."""
    return node.outputs if isinstance(node, Call) else (node.output,)


def donated_of(node: Node) -> tuple[ValueId, ...]:
    """The values that a node consumes."""
    return tuple(node.inputs[p] for p in node.donated) if isinstance(node, Call) else ()


def check_program(program: Program) -> Failure | None:
    """Arity, known values, an order without cycles, no use after donation."""
    for node in program.nodes:
        if isinstance(node, Call) and (failure := _arity(program, node)):
            return failure
    return check_order(program.name, len(program.values), program.inputs, program.nodes,
                  program.outputs, tuple(v.name for v in program.values))  # fmt: skip


def check_plan(plan: Plan) -> Failure | None:
    """All that the control plane relies on when it orders and admits a plan."""
    nodes = tuple(step.node for step in plan.steps)
    names = tuple(v.name for v in plan.values)
    for node in nodes:
        if isinstance(node, Call) and any(not 0 <= p < len(node.inputs) for p in node.donated):
            return _failure(plan.name, node, "donates an argument that it does not have")
        if isinstance(node, Call) and not is_window(node.window):
            return _failure(
                plan.name, node, f"has a window of {node.window!r}",
                f"give seconds, 0 to {LONGEST_WINDOW:g}",
            )  # fmt: skip
    failure = check_order(plan.name, len(plan.values), plan.inputs, nodes, plan.outputs, names)
    if failure:
        return failure
    for decision in {node.when.value for node in nodes if node.when is not None}:
        about = plan.values[decision]
        if about.shape or about.dtype != "int32" or about.leaves:
            return Failure(
                "refused",
                f"value {decision} of plan {plan.name!r} decides, and is {about.dtype}"
                f"{list(about.shape)}: a decision is one int32",
                program=plan.name,
            )
    made = {v for node in nodes for v in outputs_of(node)}
    if len(set(plan.outputs)) != len(plan.outputs) or not made.issuperset(plan.outputs):
        return Failure(
            "refused",
            f"the outputs of plan {plan.name!r} are not distinct values that its steps make",
            "lower the program with pathways_lab.core.program.lowering.lower",
            program=plan.name,
        )
    return _placed(plan) or _frees(plan)


def _arity(program: Program, node: Call) -> Failure | None:
    signature = program.signatures.get(node.function)
    if signature is None:
        return _failure(program.name, node, f"calls unknown function {node.function!r}")
    for what, have, want in (
        ("arguments", len(node.inputs), len(signature.inputs)),
        ("results", len(node.outputs), len(signature.outputs)),
    ):
        if have != want:
            return _failure(program.name, node, f"has {have} {what}, {signature.name!r} has {want}")
    if any(not 0 <= p < len(node.inputs) for p in node.donated):
        return _failure(program.name, node, "donates an argument that it does not have")
    return None


def check_order(
    program: str,
    count: int,
    inputs: tuple[ValueId, ...],
    nodes: tuple[Node, ...],
    outputs: tuple[ValueId, ...],
    names: tuple[str, ...],
) -> Failure | None:
    """Known values, an order without cycles, nothing used or returned after donation.

    names: of the values, of which there are *count*.
    """

    def called(value: ValueId) -> str:
        named = names[value] if 0 <= value < count else ""
        return f"value {value}" + (f" ({named})" if named else "")

    known = set(inputs)
    scopes = Scopes(inputs)
    later = {v for node in nodes for v in outputs_of(node)}
    if (
        len(known) != len(inputs)
        or not known <= set(range(count))
        or not later <= set(range(count))
    ):
        return Failure(
            "refused", f"the values of {program!r} are numbered wrongly", program=program
        )
    gone: dict[ValueId, Node] = {}
    for node in nodes:
        used = inputs_of(node)
        wrong = scopes.enter(node.when)
        if wrong:
            return _failure(program, node, wrong)
        for value in used:
            if value in gone:
                by = gone[value]
                return _failure(
                    program, node,
                    f"uses {called(value)}, which was donated to {by.name!r} at {by.line.told}",
                    "use the result of that call, or do not donate the argument",
                )  # fmt: skip
            if value not in known:
                why = (
                    "which only a later node makes: the nodes form a cycle or are out of order"
                    if value in later
                    else "which nobody makes"
                )
                return _failure(program, node, f"uses {called(value)}, {why}")
            if not scopes.certain(value, node.when):
                return _failure(
                    program, node, f"uses {called(value)}, which only another branch makes"
                )
        for value in donated_of(node):
            if used.count(value) > 1:
                return _failure(
                    program, node, f"donates {called(value)}, which it also reads",
                    "pass a copy, or do not donate the argument",
                )  # fmt: skip
            if not scopes.own(value, node.when):
                return _failure(
                    program, node, f"donates {called(value)}, which comes from outside of its"
                    " branch: a branch that is not taken would have kept it",
                    "do not donate the argument, or move the call out of the branch",
                )  # fmt: skip
            gone[value] = node
        for value in outputs_of(node):
            if not scopes.make(value, node.when):
                return _failure(program, node, f"makes {called(value)} a second time")
            known.add(value)
    for value in outputs:
        if value in gone:
            return _failure(
                program, gone[value], f"consumes {called(value)}, which the program returns",
                "return the result of that call, or do not donate the argument",
            )  # fmt: skip
        if value not in known:
            return Failure(
                "refused", f"{program!r} returns {called(value)}, which nobody makes",
                program=program,
            )  # fmt: skip
        if not scopes.certain(value, None):
            return Failure(
                "refused", f"{program!r} returns {called(value)}, which only a branch makes",
                program=program,
            )  # fmt: skip
    return None


def _placed(plan: Plan) -> Failure | None:
    touched = set()
    for step in plan.steps:
        node = step.node
        where = {plan.values[v].slice for v in (*inputs_of(node), *outputs_of(node))}
        if isinstance(node, Call):
            where.add(node.slice)
            if len(where) > 1:
                return _failure(plan.name, node, "has arguments or results on another slice")
        if None in where:
            return _failure(plan.name, node, "has arguments or results without a place")
        touched |= where
    if any(v.nbytes < 0 for v in plan.values) or touched != set(plan.slices):
        return Failure("refused", f"plan {plan.name!r} misstates its slices or bytes",
                       program=plan.name)  # fmt: skip
    return None


def _frees(plan: Plan) -> Failure | None:
    """Each value that a step touches is freed at its last use, unless it is returned."""
    last = last_uses(tuple(step.node for step in plan.steps), plan.outputs)
    for index, step in enumerate(plan.steps):
        if len(set(step.frees)) != len(step.frees) or set(step.frees) != last.get(index, set()):
            return _failure(
                plan.name, step.node, "frees other values than those it is the last to use"
            )
    return None


def last_uses(nodes: tuple[Node, ...], outputs: tuple[ValueId, ...]) -> dict[int, set[ValueId]]:
    """By node index, the values that nobody uses after that node."""
    last: dict[ValueId, int] = {}
    for index, node in enumerate(nodes):
        for value in (*inputs_of(node), *outputs_of(node)):
            last[value] = index
    for value in outputs:
        last.pop(value, None)
    by_node: dict[int, set[ValueId]] = {}
    for value, index in last.items():
        by_node.setdefault(index, set()).add(value)
    return by_node


def _failure(program: str, node: Node, message: str, remedy: str = "") -> Failure:
    line: Line = node.line
    return Failure(
        "refused", f"node {node.name!r} {message}", remedy,
        program=program, node=node.name, line=line,
    )  # fmt: skip
