"""``pw.simulate``: a program on a machine that one does not have.

Problem: the objects of a notebook (a captured program, a policy, a measured
timeline) shall run on a simulated machine as they are, and a program for 2,048
devices shall be captured without any.  No lab is started, nothing is computed.

Rule for maintainers: only translation.  :mod:`pathways_lab.sim` simulates, with the
core that decides on real clusters.

Paper: section 5 (experiments that can be repeated here).
"""

from __future__ import annotations

import copy
import functools
import itertools
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Self

from pathways_lab.client.lab.devices import Slice
from pathways_lab.client.lab.lab import Lab
from pathways_lab.client.lab.slice_request import bytes_of, slice_request
from pathways_lab.client.program.program import CapturedProgram, ProgramFunction
from pathways_lab.client.session import failures
from pathways_lab.core.errors import Failure, PathwaysError
from pathways_lab.core.messages import HostJoined
from pathways_lab.core.program.program import Call, Plan, Program, SliceId
from pathways_lab.core.scheduling.policies import INITIAL, Policy
from pathways_lab.core.slices.slices import ResourceManager
from pathways_lab.core.slices.topology import SliceBinding
from pathways_lab.sim import machine as machines
from pathways_lab.sim import simulate as simulator
from pathways_lab.sim.result import Simulated
from pathways_lab.sim.simulate import Load
from pathways_lab.timeline.log import Timeline
from pathways_lab.timeline.records import Event, Span
from pathways_lab.timeline.text_table import TextTable

_numbers = itertools.count(1)
"""Slices of simulated machines: the number of no client is in their high bits."""

Work = ProgramFunction | CapturedProgram | Program | Plan
Seconds = Timeline | Mapping[str, float]


class Machine(machines.Machine):
    """A machine to simulate: islands of hosts of devices, with what everything costs.

    Every figure has a default, and every default says where it comes from
    (:meth:`figures`).  Ask for slices as in a lab, ``machine.slice((512, 4))``,
    capture programs for them, and :func:`simulate` them: nothing is started.

    islands, hosts_per_island, devices_per_host: how much of everything.
    memory: bytes per device, or text like ``"16 GB"``.
    streams: computations that a device runs at once.
    kind: ``"cpu"``, ``"gpu"``, ``"tpu"``, or ``"simulated"``: captured as for CPUs.
    speed: of its devices.  unlike: by island, in which of these it differs:
        ``{"island1": {"devices_per_host": 8, "speed": 0.5, "kind": "gpu"}}``.
    costs, default, functions: see :mod:`pathways_lab.sim.machine`.
    """

    def __post_init__(self) -> None:
        object.__setattr__(self, "memory", bytes_of(self.memory))
        super().__post_init__()

    @classmethod
    def like(cls, lab: Lab, **figures: Any) -> Self:
        """As many islands, hosts and devices as a lab has.  figures: any others."""
        sizes = [(len(i.hosts), i.devices // len(i.hosts)) for i in lab.islands]
        hosts, devices = max(sizes)
        unlike = {
            f"island{number}": {"hosts_per_island": size[0], "devices_per_host": size[1]}
            for number, size in enumerate(sizes)
            if size != (hosts, devices)
        }
        return cls(len(sizes), hosts, devices, **{"unlike": unlike, **figures})

    @functools.cached_property
    def _resources(self) -> ResourceManager:
        manager = ResourceManager()
        for host, island in self.hosts():
            m = self.of(island)
            kind = "cpu" if m.kind == "simulated" else m.kind
            manager.join(
                HostJoined(0.0, "join", host, island, m.devices_per_host, kind, m.memory, m.block)
            )
        return manager

    def slice(
        self,
        shape: int | tuple[int, ...],
        axes: str | tuple[str, ...] | None = None,
        *,
        island: str | None = None,
        islands: int | Sequence[str] | None = None,
        kind: str | None = None,
        memory: int | str = 0,
    ) -> Slice:
        """Virtual devices in a mesh, for programs to simulate (see :meth:`Lab.slice`)."""
        request = slice_request(shape, axes, island, kind, memory, islands=islands)
        bound = self._resources.bind(next(_numbers), "kernel-1", request)
        if isinstance(bound, Failure):
            raise PathwaysError(bound)
        return Slice(bound, self)

    def release_slice(self, slice_id: SliceId) -> None:
        """Give a slice back (see :meth:`Slice.release`)."""
        self._resources.release(slice_id)
        self._resources.free(slice_id)

    def rebind_slice(self, slice_id: SliceId, island: str | None) -> SliceBinding:
        """Nothing is ever lost on paper: raises PathwaysError."""
        raise failures.refused("a slice of a simulated machine is never lost")

    def slice_state(self, slice_id: SliceId) -> str:
        """Always ``"bound"``."""
        return "bound"

    @property
    def session(self) -> Any:
        """Nothing can run here: raises PathwaysError."""
        raise failures.refused(
            "a slice of a simulated machine computes nothing",
            "pw.simulate(program.capture(arguments), machine), or take a slice of a lab",
        )


class Simulation(Simulated):
    """Results of a simulation: ``.timeline`` as of a lab, ``.view()``, ``.seconds``, ``.stuck``."""

    def view(self, *panels: str, **options: Any) -> Any:
        """The picture of it, as :meth:`Lab.view` shows a lab, with the same options."""
        programs = ", ".join(list(self.timeline.programs)[:3])
        given = {
            "title": f"Simulated: {programs} on {self.machine.devices:,} devices",
            "origin": self.start,
            "window": max(self.seconds, 1e-3),
            **options,
        }
        return self.timeline.view(*panels, **given).freeze()


def simulate(
    program: Work | Load | Sequence[Load],
    machine: machines.Machine | None = None,
    policy: Policy | None = None,
    seed: int = 0,
    *,
    times: Seconds | None = None,
    runs: int = 1,
    order: bool = True,
    until: float = float("inf"),
    happens: Iterable[tuple[float, str, str]] = (),
) -> Simulation:
    """Simulate *program* on *machine*: a timeline like any other, in simulated time.

    program: a program that was captured (``f.capture(x)``, or ``f`` itself after a
        call), a core program or plan, or :class:`Load` s: how several clients use
        several of them.  Slices of a lab keep their shapes, and their islands where
        the machine has them.  Large inputs are uploaded first.
    machine: :class:`Machine`; default: two islands of two hosts of four devices.
    policy: whose gangs go first; also an object of your own.
    seed: decides all that is left to chance; the same seed gives the same timeline.
    times: seconds of each compiled function: measured ones from a timeline
        (``lab.timeline``), or by function name.  Where neither says anything,
        ``pw.emulated`` counts, else the machine's default, which is assumed.
    runs: how often the program runs, submitted as by a loop; loads say it themselves.
    order: False switches the order of gangs off, to see what it is for.
    until: simulated seconds after which to stop looking.
    happens: hosts and islands that are lost, and that come, with seconds from the beginning:
        ``[(2.0, "lost", "island1/host0"), (5.0, "joined", "island1/host0")]``; what comes
        before it was ever lost is not there at the beginning.  Runs that lose their devices
        fail; those after them wait until their slices are bound again, as ``rebind()`` does.

    Raises PathwaysError when the machine cannot hold a slice, when the policy is
    none or fails, for what is no program or no machine; ValueError for figures that cannot
    be, and for times of functions that there are not.
    """
    if machine is not None and not isinstance(machine, machines.Machine):
        raise failures.refused(
            f"{machine!r} is not a machine to simulate",
            "pw.Machine(...), or pw.Machine.like(lab) for one that is like a lab",
        )
    if not isinstance(program, Load | list | tuple):
        program = Load(_captured(program), runs=runs, flight=runs)
    loads = [program] if isinstance(program, Load) else list(program)
    if wrong := [load for load in loads if not isinstance(load, Load)]:
        raise failures.refused(
            f"{wrong[0]!r} is not a load, and a list is one of loads",
            "[pw.Load(program.capture(...), client='a'), ...]",
        )
    loads = [replace(load, program=_captured(load.program)) for load in loads]
    machine = machine or Machine()
    if not isinstance(times, Timeline | Mapping | None):
        raise ValueError(f"times={times!r} is neither seconds by function nor a timeline")
    functions = {**_costs(loads, machine, times), **machine.functions}
    found = simulator.simulate(
        loads,
        replace(machine, functions=functions),
        # A policy's attributes begin anew each time, as in a lab.
        copy.deepcopy(policy),
        seed,
        until=until,
        order=order,
        happens=happens,
    )
    return Simulation(**{f.name: getattr(found, f.name) for f in fields(found)})


def _captured(work: Any) -> Any:
    if isinstance(work, CapturedProgram | Program | Plan):
        return work
    if not isinstance(work, ProgramFunction):
        raise failures.refused(
            f"{work!r} is not a program that was captured",
            "simulate pw.program(f).capture(example arguments), where f calls compiled functions",
        )
    if work.last is None:
        raise failures.refused(
            f"program {work.name!r} was not captured yet: its arguments' types are not known",
            f"pw.simulate({work.name}.capture(example arguments), ...)",
        )
    return work.last


def _costs(
    loads: Sequence[Load], machine: machines.Machine, times: Seconds | None
) -> dict[str, machines.FunctionCost]:
    """By function key: what each call of the loads costs, as far as anybody says."""
    named = dict(times) if isinstance(times, Mapping) else {}
    measured = measured_seconds(times) if isinstance(times, Timeline) else {}
    found: dict[str, machines.FunctionCost] = {}
    names: set[str] = set()
    for load in loads:
        core: Program | Plan | CapturedProgram = load.program  # type: ignore[assignment]
        held = core.held if isinstance(core, CapturedProgram) else {}
        core = core.program if isinstance(core, CapturedProgram) else core
        nodes = core.nodes if isinstance(core, Program) else [step.node for step in core.steps]
        for node in nodes:
            if not isinstance(node, Call):
                continue
            names.add(node.name)
            # A function that holds its devices without computing keeps no core busy.
            cores = 0.0 if node.function in held else machine.default.cores
            for seconds in (
                named.get(node.name),
                measured.get((core.name, node.name), measured.get(("", node.name))),
                held.get(node.function),
            ):
                if seconds is not None:
                    try:
                        cost = replace(machine.default, seconds=seconds, cores=cores)
                    except ValueError as error:
                        raise ValueError(f"times of {node.name!r}: {error}") from None
                    found[node.function] = cost
                    break
    if unknown := sorted(named.keys() - names):
        raise ValueError(f"times for {', '.join(unknown)}: the programs call {sorted(names)}")
    return found


def measured_seconds(timeline: Timeline) -> dict[tuple[str, str], float]:
    """Median device seconds by ``(program, function name)``, and by ``("", name)``."""
    spans: dict[tuple[str, str], list[float]] = {}
    for r in timeline.records:
        if isinstance(r, Span) and r.kind == "gang" and not r.args.get("poisoned"):
            for program in (r.program, ""):
                spans.setdefault((program, r.node), []).append(r.end - r.start)
    return {name: statistics.median(seconds) for name, seconds in spans.items()}


@dataclass(frozen=True)
class PolicyComparison:
    """The same work under several policies.

    found: by policy, what was simulated.
    """

    found: Mapping[str, Simulation]

    def rows(self) -> list[tuple[str, str, dict[str, float]]]:
        """Policy, makespan, and by client the mean seconds from submission to end."""
        return [(name, f"{s.seconds:.4g} s", waits(s)) for name, s in self.found.items()]

    def __repr__(self) -> str:
        return "\n".join(
            f"{name}: {makespan}, mean seconds per run: "
            + ", ".join(f"{c} {seconds:.4g}" for c, seconds in of.items())
            for name, makespan, of in self.rows()
        )

    def _repr_html_(self) -> str:
        found = self.rows()
        clients = list(found[0][2]) if found else []
        rows = [
            (name, makespan, *(f"{of.get(c, 0.0):.4g}" for c in clients))
            for name, makespan, of in found
        ]
        heads = ("policy", "makespan", *(f"{c}: mean s per run" for c in clients))
        return TextTable(rows, heads, "<>", "simulated")._repr_html_()


def waits(found: Simulated) -> dict[str, float]:
    """By client, the mean seconds from the submission of a run to its end."""
    begun: dict[int, Event] = {}
    taken: dict[str, list[float]] = {}
    for r in found.records:
        if isinstance(r, Event) and r.kind == "submitted":
            begun[r.run] = r
        elif isinstance(r, Event) and r.kind in ("finished", "failed") and r.run in begun:
            taken.setdefault(r.client, []).append(r.time - begun[r.run].time)
    return {client: statistics.mean(seconds) for client, seconds in sorted(taken.items())}


def compare_policies(
    work: Work | Load | Sequence[Load],
    machine: machines.Machine | None = None,
    policies: Sequence[Policy] = (INITIAL,),
    seed: int = 0,
    *,
    times: Seconds | None = None,
    runs: int = 1,
    happens: Sequence[tuple[float, str, str]] = (),
) -> PolicyComparison:
    """:func:`simulate` the same work under each policy: a small table.

    policies: one row each, named after its class; of two of one class, the second is
        called what it is made of.  work, machine, seed, times, runs, happens: as for
        :func:`simulate`, which also says what is raised.
    """
    found: dict[str, Simulation] = {}
    if not isinstance(policies, Iterable):
        raise failures.refused(
            f"policies={policies!r} is not a list of policies", "[pw.FIFO(), pw.Priority()]"
        )
    for policy in policies:
        name = type(policy).__name__
        # Two of one class are told apart by what they are made of.
        name = repr(policy) if name in found else name
        found[name] = simulate(work, machine, policy, seed, times=times, runs=runs, happens=happens)
    return PolicyComparison(found)
