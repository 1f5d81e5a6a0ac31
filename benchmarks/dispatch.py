"""Dispatch overhead (the paper's Figure 5): ours against every peer, in one interleaved run.

    python -m benchmarks.dispatch --peers-python PATH

A computation is one scalar AllReduce and one scalar addition on one device of
each host, each depending on the last; ``add`` is the same gang without the
AllReduce.  Modes: OpByOp is a call per computation (waited for each time, or
only at the end), Chained a call per program of 128 nodes, Fused a call per node
that holds 128 computations.

Every framework runs the same compiled function on the same machine: frameworks
without collectives of their own run multi-controller JAX inside their workers.
Dask must be installed (the lab needs it); Ray, Monarch and ipyparallel may live
in another environment, which then needs JAX too:

    python -m venv PEERS && PEERS/bin/pip install jax ray ipyparallel torchmonarch
"""

from __future__ import annotations

import sys

from benchmarks.gangs.work import (
    ADD,
    ALLREDUCE,
    CHAIN,
    FUSED,
    MODES,
    NODES,
    OP,
    WAIT,
    WORKS,
    case,
)
from benchmarks.harness.child import Child
from benchmarks.harness.command import Settings, arguments, settings
from benchmarks.harness.report import Claim, Report, judged, matrix, publish, verdict_table
from benchmarks.harness.rounds import Measured, measure

OURS, JAX, LOOPED = "Pathways Lab", "multi-controller JAX", "the lab's hosts, multi-controller"
DASK, ACTORS, COMPILED = "Dask", "Ray actors", "Ray Compiled Graph"
CALL, BROADCAST, VIEW = "Monarch call", "Monarch broadcast", "ipyparallel"
UNCHAINED = (WAIT, OP, FUSED)


def systems(hosts: int, peers: str) -> list[Child]:
    """All systems on a number of hosts.  peers: the interpreter that has the peers."""

    def made(name: str, module: str, modes: tuple[str, ...] = MODES, **options: object) -> Child:
        here = options.pop("here", False)
        cases = [case(work, mode) for work in WORKS for mode in modes]
        python = sys.executable if here else peers
        return Child(name, f"benchmarks.gangs.{module}", cases, python, hosts=hosts, **options)

    return [
        made(OURS, "ours", here=True),
        made(JAX, "multi_controller", UNCHAINED, here=True),
        made(LOOPED, "ours", UNCHAINED, here=True, controllers="many"),
        made(DASK, "dask_tasks", here=True),
        made(ACTORS, "ray_actors", compiled=False),
        made(COMPILED, "ray_actors", compiled=True),
        made(CALL, "monarch_actors", UNCHAINED, broadcast=False),
        made(BROADCAST, "monarch_actors", (OP, FUSED), broadcast=True),
        made(VIEW, "ipyparallel_view", UNCHAINED),
    ]


def claims(work: str) -> list[Claim]:
    """What is to be shown of one kind of work."""

    def claim(factor: float, slow: str, slow_mode: str, mode: str) -> Claim:
        text = f"{work}, {mode}: {slow}" + (f", {slow_mode}" if slow_mode != mode else "")
        return Claim(text, (case(work, slow_mode), slow), (case(work, mode), OURS), factor)

    faster = {COMPILED: 5, CALL: 5, BROADCAST: 3, ACTORS: 20, DASK: 100}
    return [
        claim(0.97, JAX, FUSED, FUSED),
        claim(1.0, JAX, OP, CHAIN),
        *(claim(factor, peer, OP, OP) for peer, factor in faster.items()),
        *(claim(1.0, peer, WAIT, WAIT) for peer in (COMPILED, CALL, ACTORS, DASK, VIEW)),
    ]


def run(hosts: int, works: list[str], names: list[str], peers: str, how: Settings) -> Measured:
    """Measure on a number of hosts, print the tables, leave the files."""
    taking = [each for each in systems(hosts, peers) if not names or each.name in names]
    cases = [case(work, mode) for work in works for mode in MODES]
    measured = measure(taking, cases, rounds=how.rounds, budget=how.budget, seed=how.seed)
    title = f"Dispatch on {hosts} host{'s' * (hosts > 1)}"
    report = Report(f"dispatch-{hosts}", title, "computation", measured, OURS)
    for work in works:
        of = {case(work, mode): mode for mode in MODES}
        report.notes += [f"### {work}", "", matrix(measured, of), ""]
        verdicts = judged(claims(work), measured)
        report.notes += ["As fast as:", "", verdict_table(verdicts), ""]
        report.verdicts += verdicts
    if ADD in works:
        report.notes.append(
            f"XLA folds the {NODES} additions of a fused `{ADD}` into one: its time is that of a"
            f" call, divided by {NODES}."
        )
    missing = [f"Without {name}: {why}." for name, why in measured.missing.items()]
    publish(report, how.folder, "\n".join([*report.notes, *missing]))
    return measured


def main() -> None:
    """Parse, measure, publish, for each number of hosts."""
    parser = arguments(__doc__)
    parser.add_argument("--hosts", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--work", nargs="+", choices=WORKS, default=list(WORKS))
    parser.add_argument("--systems", nargs="+", default=[], help="only these, by name")
    parser.add_argument(
        "--peers-python", default=sys.executable, help="an interpreter that has the peers"
    )
    chosen = parser.parse_args()
    how = settings(chosen)
    works = [ALLREDUCE] if how.quick else chosen.work
    for hosts in chosen.hosts:
        run(hosts, works, chosen.systems, chosen.peers_python, how)


if __name__ == "__main__":
    main()
