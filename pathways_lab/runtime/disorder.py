"""What happens when hosts launch in different orders: for real, apart from the lab.

Problem: "the gang scheduler prevents deadlock" is a claim until one has seen
the deadlock.  Two hosts, in processes of their own, launch two programs over
the same devices, in one order or in two, and this module tells what came of
it: right results, wrong results, a hang, the death of a process.  Afterwards
the hosts form again and compute in one order.

Rule for maintainers: nothing here touches a lab, its hosts or their order; no
case is simulated.  What each case does is in :data:`CASES`, as measured.

Paper: section 2 (multi-tenancy and deadlock), section 4.4 (gang scheduling).
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pathways_lab.core.errors import Failure
from pathways_lab.runtime import lifeline
from pathways_lab.runtime.address import private_folder, remove_folder
from pathways_lab.runtime.codec import pack, unpack
from pathways_lab.runtime.coordination import Coordination, CoordinationLost
from pathways_lab.runtime.formation import Formation
from pathways_lab.runtime.gangs import outwait
from pathways_lab.runtime.lifeline import ChildDied

MODULE = "pathways_lab.runtime.disorder"
DEVICES = 2
"""Per host.  Device i of all, row-major over hosts and devices, contributes i + 1."""
_START_SECONDS = 60.0
_CUT_SECONDS = 0.25


@dataclass(frozen=True, slots=True)
class Program:
    """One collective over devices of both hosts.

    over: mesh axes, of ``host`` and ``device``.  kind: ``"sum"`` or ``"gather"``.
    scale: factor of what devices contribute.  size: elements on each device.
    column: only this device of each host takes part; None means all.
    """

    over: tuple[str, ...] = ("host", "device")
    kind: str = "sum"
    scale: float = 1.0
    size: int = 1
    column: int | None = None


@dataclass(frozen=True, slots=True)
class Case:
    """Two programs, and what comes of launching them as A, B on one host and B, A on the other."""

    a: Program
    b: Program
    story: str


CASES = {
    "deadlock": Case(
        Program(),
        Program(over=("host",), scale=10.0),
        "Different groups of the same devices: each host is in one collective and waits for the "
        "other.  Both hang until the collective timeout, then raise.",
    ),
    "wrong": Case(
        Program(),
        Program(scale=10.0),
        "Same group, same operation, same size: A meets B, both end at once, both are wrong, "
        "nobody is told.",
    ),
    "kinds": Case(
        Program(),
        Program(kind="gather", scale=10.0),
        "Same group, different operations: hang until the collective timeout, then raise.",
    ),
    "sizes": Case(
        Program(),
        Program(scale=10.0, size=1024),
        "Same group, different sizes: one process dies by SIGABRT; the other waits, even when its "
        "connections are cut, until the collective timeout, then raises.",
    ),
    "columns": Case(
        Program(column=0),
        Program(column=1, scale=10.0),
        "Disjoint devices, one launching thread: cheap computations on a host's single device "
        "run in whoever launches, so the second is never launched.  Hang, then raise.",
    ),
}


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of one program on one host.  values: distinct ones on its devices; or an error."""

    values: tuple[float, ...] = ()
    error: str = ""


Outcomes = dict[str, dict[str, Outcome]]
"""By host, by program (``"A"``, ``"B"``)."""


@dataclass(frozen=True, slots=True)
class Demonstration:
    """What was seen.

    before: both programs in one order: the right results.
    during: in the orders asked for; a host that died or went on waiting is missing.
    hung: hosts that had not finished after the notice time.
    seconds: from the launch until every host had finished, raised or died.
    deaths: exit codes of hosts that died.
    after: in one order, once the hosts had formed again; empty where not all could.
    """

    before: Outcomes
    during: Outcomes
    hung: tuple[str, ...]
    seconds: float
    deaths: dict[str, int | None]
    after: Outcomes


def demonstrate(
    case: str,
    orders: Sequence[str] = ("AB", "BA"),
    *,
    notice: float = 1.5,
    collective_timeout: int | None = None,
) -> Demonstration:
    """Run a case on two hosts; blocks for some seconds, most of it their start.

    orders: per host.  notice: seconds after which unfinished hosts count as
    hung.  collective_timeout: seconds after which JAX itself gives up; None
    means never, and what hangs is ended from here.
    """
    folder = private_folder()
    stage = _Stage(folder, CASES[case], collective_timeout)
    try:
        return stage.play(orders, notice, collective_timeout)
    finally:
        stage.close()
        remove_folder(folder)


class _Stage:
    """Two hosts and their coordination process."""

    def __init__(self, folder: Path, case: Case, collective_timeout: int | None) -> None:
        self._case = case
        self._coordination = Coordination(folder)
        self._coordination.start()
        flags = f"--xla_cpu_collective_timeout_seconds={collective_timeout or 86400}"
        self._hosts = {
            name: lifeline.spawn(
                MODULE,
                {"host": name, "folder": str(folder)},
                name=name,
                folder=folder,
                # Enough threads that what hangs does not keep others from being launched.
                environment={"XLA_FLAGS": flags, "NPROC": "16", "JAX_PLATFORMS": "cpu"},
            )
            for name in ("host0", "host1")
        }
        self._number = 0

    def close(self) -> None:
        for child in self._hosts.values():
            child.let_go()
        for child in self._hosts.values():
            child.end()
        self._coordination.end()

    def play(
        self, orders: Sequence[str], notice: float, collective_timeout: int | None
    ) -> Demonstration:
        for child in self._hosts.values():
            child.hear(_START_SECONDS)
        self._form()
        before = self._launch(["AB", "AB"], _START_SECONDS)[0]
        started = time.monotonic()
        during, hung = self._launch(orders, notice)
        if hung:
            if collective_timeout is None:
                for name in hung:
                    self._hosts[name].tell({"end": "the two hosts wait for each other"})
            rest, _ = self._collect(hung, (collective_timeout or 0) + 10.0)
            during |= rest
        seconds = time.monotonic() - started
        deaths = {n: child.exit_code for n, child in self._hosts.items() if not child.alive}
        after: Outcomes = {}
        if len(during) == len(self._hosts):
            self._form()
            after = self._launch(["AB", "AB"], _START_SECONDS)[0]
        return Demonstration(before, during, tuple(hung), seconds, deaths, after)

    def _form(self) -> None:
        self._number += 1
        answers: queue.Queue[str | CoordinationLost] = queue.Queue()
        self._coordination.open(self._number, len(self._hosts), answers.put)
        address = answers.get(timeout=_START_SECONDS)
        if isinstance(address, CoordinationLost):
            raise address
        locals_ = tuple(range(DEVICES))
        formation = Formation(self._number, "", 0, tuple((name, locals_) for name in self._hosts))
        programs = [pack(self._case.a), pack(self._case.b)]
        request = {"formation": pack(formation), "address": address, "programs": programs}
        for child in self._hosts.values():
            child.tell(request)
        for child in self._hosts.values():
            child.hear(_START_SECONDS)

    def _launch(self, orders: Sequence[str], patience: float) -> tuple[Outcomes, list[str]]:
        for child, order in zip(self._hosts.values(), orders, strict=True):
            child.tell({"order": order})
        return self._collect(list(self._hosts), patience)

    def _collect(self, names: list[str], patience: float) -> tuple[Outcomes, list[str]]:
        """What these hosts say within the time, and which of them say nothing and live."""
        outcomes: Outcomes = {}
        silent: list[str] = []
        deadline = time.monotonic() + patience
        for name in names:
            child = self._hosts[name]
            try:
                told = child.hear(max(0.01, deadline - time.monotonic()))
            except ChildDied:
                if child.alive:
                    silent.append(name)
                continue
            outcomes[name] = {
                program: unpack(Outcome, outcome) for program, outcome in told["outcomes"].items()
            }
        return outcomes, silent


# --- one host ------------------------------------------------------------------------


class _Host:
    def __init__(self, name: str, folder: Path) -> None:
        self._name, self._folder = name, folder
        self._joint: Any = None
        self._ended: Failure | None = None
        self._launching: threading.Thread | None = None
        self._programs: dict[str, tuple[Any, Any]] = {}

    def form(self, formation: Formation, address: str, programs: Sequence[Program]) -> None:
        from pathways_lab.runtime.joining import Joint

        if self._joint is not None:
            self._joint.end("it forms again")
        self._ended = None
        self._joint = Joint(formation, self._name, address, self._folder)
        self._joint.join()
        self._programs = {
            name: self._compile(program) for name, program in zip("AB", programs, strict=True)
        }

    def begin(self, order: str) -> None:
        """Launch in a thread, the one launching thread of this host; it may hang."""

        def launch() -> None:
            outcomes = self.launch(order)
            lifeline.report(outcomes={name: pack(outcome) for name, outcome in outcomes.items()})

        self._launching = threading.Thread(target=launch, daemon=True)
        self._launching.start()

    def end(self, reason: str) -> None:
        """Cut the connections, and again: what was being launched may have missed it."""
        joint, launching = self._joint, self._launching
        joint.end(reason)
        self._ended = Failure("lost", f"{joint.formation} has ended: {reason}", host=self._name)

        def cut() -> None:
            while launching is not None and launching.is_alive():
                launching.join(_CUT_SECONDS)
                joint.sever()

        threading.Thread(target=cut, daemon=True).start()

    def _compile(self, program: Program) -> tuple[Any, Any]:
        import jax
        import numpy as np
        from jax.sharding import Mesh, NamedSharding, PartitionSpec

        joint = self._joint
        hosts = joint.formation.hosts
        grid = np.array([[joint.devices[host, n] for n in range(DEVICES)] for host in hosts])
        ordinals = np.arange(grid.size).reshape(grid.shape)
        if program.column is not None:
            grid = grid[:, program.column : program.column + 1]
            ordinals = ordinals[:, program.column : program.column + 1]
        mesh = Mesh(grid, ("host", "device"))

        def collective(v: jax.Array) -> Any:
            if program.kind == "gather":
                return jax.lax.all_gather(v, program.over).sum(0)
            return jax.lax.psum(v, program.over)

        spec = PartitionSpec(("host", "device"))
        rest = tuple(axis for axis in mesh.axis_names if axis not in program.over)
        # A gathered value is not known to be equal everywhere; it is.
        whole = jax.shard_map(
            collective, mesh=mesh, in_specs=spec, out_specs=PartitionSpec(rest), check_vma=False
        )
        shards = [
            jax.device_put(np.full(program.size, program.scale * (i + 1), np.float32), device)
            for device, i in zip(grid.flat, ordinals.flat, strict=True)
            if device.process_index == joint.rank
        ]
        x = jax.make_array_from_single_device_arrays(
            (program.size * grid.size,), NamedSharding(mesh, spec), shards
        )
        return jax.jit(whole).lower(x).compile(), x

    def launch(self, order: str) -> dict[str, Outcome]:
        """Launch in this order, waiting for nothing; then wait for both."""
        launched: dict[str, Any] = {}
        outcomes: dict[str, Outcome] = {}
        for name in order:
            run, x = self._programs[name]
            try:
                launched[name] = run(x)
            except Exception as error:
                outcomes[name] = Outcome(error=_first_line(error))
        for name, result in launched.items():
            try:
                outwait(result, lambda: self._ended)
                values = {float(v) for s in result.addressable_shards for v in s.data.ravel()[:1]}
                outcomes[name] = Outcome(values=tuple(sorted(values)))
            except Exception as error:
                outcomes[name] = Outcome(error=_first_line(error))
        return outcomes


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]


def main() -> None:
    """One host: forms, launches and ends as it is told, each answered with a report."""
    lifeline.begin()
    configuration = lifeline.configuration()
    import pathways_lab.runtime.joining  # noqa: F401

    host = _Host(configuration["host"], Path(configuration["folder"]))
    lifeline.report(ready=os.getpid())

    while True:
        request = lifeline.configuration()
        if "formation" in request:
            programs = [unpack(Program, program) for program in request["programs"]]
            host.form(unpack(Formation, request["formation"]), request["address"], programs)
            lifeline.report(formed=True)
        elif "order" in request:
            host.begin(request["order"])
        else:
            host.end(request["end"])


if __name__ == "__main__":
    main()
