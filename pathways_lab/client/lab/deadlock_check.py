"""Can these programs deadlock when nobody orders them?  Said beforehand, from the programs alone.

Problem: that two programs which are right by themselves can wait for each
other for ever is hard to see in either.  The graph of both, with the devices
of their slices, shows whether any mix of their launches closes a cycle of
waits.

Rule for maintainers: nothing is run and nobody is asked; what a cycle is, is
said in :mod:`pathways_lab.core.diagnosis.wait_cycles`.

Paper: section 2 (deadlock of communicating computations), section 4.4.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from pathways_lab.client.program.graph import Prepared
from pathways_lab.client.program.program import CapturedProgram, ProgramFunction
from pathways_lab.client.session import failures
from pathways_lab.core.diagnosis.stall_story import Arrow, Member, Stuck
from pathways_lab.core.diagnosis.wait_cycles import Launch, Wait, launches, possible_cycle
from pathways_lab.core.program.plans import PlanIndex, index_plan
from pathways_lab.core.program.program import Call, SliceId
from pathways_lab.core.slices.topology import SliceBinding


def possible_deadlock(*programs: ProgramFunction | CapturedProgram) -> Stuck | None:
    """A deadlock that launching these programs without one order could lead to; None: none can.

    programs: captured ones (``program.capture(...)``), or programs that were
        called or captured before: then as they were last.

    The answer prints as a story (who would wait for whom), and shows as a figure
    in a notebook.  In the lab no such deadlock happens: gangs of all clients are
    launched in one order.

    Raises PathwaysError for a program that was never captured.

    >>> pw.possible_deadlock(total, rows)                    # doctest: +SKIP
    """
    indices: dict[str, PlanIndex] = {}
    runs: dict[str, list[Launch]] = {}
    for number, program in enumerate(programs):
        prepared = _prepared(program)
        if prepared is not None:
            bindings = {on.id: on.binding for on in prepared.slices}
            run = f"{number}"
            index = indices[run] = index_plan(prepared.plan, "", bindings)
            runs[run] = _on_devices(index, run, bindings)
    cycle, _ = possible_cycle(runs, _host)
    return _story(cycle, indices) if cycle else None


def _prepared(program: ProgramFunction | CapturedProgram) -> Prepared | None:
    captured = program.last if isinstance(program, ProgramFunction) else program
    if not isinstance(captured, CapturedProgram):
        raise failures.refused(
            f"{program!r} was not captured yet",
            "call it, or pass program.capture(...) with its arguments",
        )
    return captured.prepared


def _on_devices(
    index: PlanIndex, run: str, bindings: Mapping[SliceId, SliceBinding]
) -> list[Launch]:
    """The gangs of a run, with the devices on all of which each must have its turn."""
    found = []
    for launch in launches(index, run):
        node = index.plan.steps[_step(launch.name)].node
        assert isinstance(node, Call)
        found.append(replace(launch, queues=bindings[node.slice].devices))
    return found


def _host(device: object) -> object:
    """The host that launches onto a device; a wait for a result (None) has none."""
    return device[0] if isinstance(device, tuple) else device


def _step(name: object) -> int:
    assert isinstance(name, tuple)
    return int(name[2])


def _story(cycle: tuple[Wait, ...], indices: dict[str, PlanIndex]) -> Stuck:
    names = list(dict.fromkeys(name for w in cycle for name in (w.gang, w.behind)))
    hosts: dict[object, list[str]] = {name: [] for name in names}
    arrows = []
    for wait in cycle:
        host = str(wait.at[0]) if isinstance(wait.at, tuple) else ""
        if host:
            hosts[wait.behind].append(host)
        arrows.append(Arrow(names.index(wait.gang), names.index(wait.behind), host))
    members = []
    for name in names:
        assert isinstance(name, tuple)
        plan, step = indices[name[0]].plan, _step(name)
        node = plan.steps[step].node
        inside = tuple(dict.fromkeys(hosts[name]))
        members.append(Member(int(name[0]), step, "", plan.name, node.name, node.line, inside, 0.0))
    return Stuck("possible", tuple(members), tuple(dict.fromkeys(arrows)))
