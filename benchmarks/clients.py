"""Many clients on one lab: what they get together, and how busy the devices are.

    python -m benchmarks.clients [--clients 1 4 8 16] [--milliseconds 0.33 1]

Paper, section 5.3: Figure 8 has the throughput of concurrent clients against
multi-controller JAX, Figure 11 the utilisation of the devices that they share.  Client
processes call a function that holds all devices of one island for so long (emulated),
each call on the result of the one before, and not waiting.  Multi-controller JAX is one
loop per host, which has the devices for itself, on a lab of its own that rests
meanwhile.  What is held of the devices' time is that of the emulated computations
themselves; the share of each client is of what the control plane accounts for.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.gangs.tenant import milliseconds
from benchmarks.harness.child import Child
from benchmarks.harness.command import arguments, settings
from benchmarks.harness.numbers import brief, spread
from benchmarks.harness.report import Report, markdown, publish
from benchmarks.harness.rounds import System, Timed, measure

JAX = "multi-controller JAX"
MODULE = "benchmarks.gangs.tenant"


class Crowd:
    """The first so many of a lab's clients, all at once.

    used: per case and round, the share of device time that all of them held, and the
    least and the most that one of them had of it, as a factor of its fair share.
    """

    def __init__(self, lab: Any, tenants: Sequence[System], cases: Sequence[str]) -> None:
        self.name = name_of(len(tenants))
        self.cases = cases
        self._lab, self._tenants = lab, tenants
        self.used: dict[str, list[tuple[float, float, float]]] = {case: [] for case in cases}

    def start(self) -> None:
        """Its clients are there."""

    def round(self, case: str, units: int) -> Timed:
        """Each does its part of *units*; until the last of them is done."""
        each = -(-units // len(self._tenants))
        before = self._lab.accounts()
        with ThreadPoolExecutor(len(self._tenants)) as pool:
            begun = time.perf_counter()
            list(pool.map(lambda tenant: tenant.round(case, each), self._tenants))
            seconds = time.perf_counter() - begun
        count = each * len(self._tenants)
        used = self._used(before, count)
        held, fair = count * milliseconds(case) / 1e3 / seconds, sum(used) / len(used)
        self.used[case].append((held, min(used) / fair, max(used) / fair))
        return Timed(seconds, count)

    def _used(self, before: Any, count: int) -> list[float]:
        """Device seconds of each client since then, as soon as all gangs have been told."""
        told = before.total.gangs + count
        deadline = time.monotonic() + 10.0
        while (after := self._lab.accounts()).total.gangs < told:
            if time.monotonic() > deadline:
                raise RuntimeError(f"{told - after.total.gangs} gangs were not accounted for")
            time.sleep(0.01)
        return [
            after.clients[tenant.name].device_seconds - before.clients[tenant.name].device_seconds
            for tenant in self._tenants
        ]

    def stop(self) -> None:
        """Its clients end with the lab."""


def name_of(clients: int) -> str:
    """As systems are called."""
    return "1 client" if clients == 1 else f"{clients} clients"


def main() -> None:
    """Measure, print, publish."""
    import pathways_lab as pw

    parser = arguments(__doc__, rounds=7, budget=1.5)
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 4, 8, 16])
    parser.add_argument("--milliseconds", type=float, nargs="+", default=[0.33, 1.0])
    parser.add_argument("--hosts", type=int, default=2, help="of the island")
    parser.add_argument("--devices", type=int, default=4, help="of all hosts together")
    chosen = parser.parse_args()
    how = settings(chosen)
    cases = [f"{ms:g} ms" for ms in chosen.milliseconds]
    each = chosen.devices // chosen.hosts
    same = {"held": cases, "devices": chosen.devices}
    tenants: list[Child] = []
    with (
        tempfile.TemporaryDirectory() as folder,
        pw.start(
            islands=1, hosts_per_island=chosen.hosts, devices_per_host=each, progress=False
        ) as lab,
    ):
        file = Path(folder) / "lab.json"
        lab.invite(file)
        try:
            for number in range(max(chosen.clients)):
                name = f"client-{number}"
                tenants.append(Child(name, MODULE, cases, file=str(file), client=name, **same))
                tenants[-1].start()
                print(f"{name} is there", flush=True)
            crowds = [Crowd(lab, tenants[:n], cases) for n in chosen.clients]
            alone = Child(JAX, MODULE, cases, hosts=chosen.hosts, **same)
            systems: list[System] = [alone, *crowds]
            measured = measure(systems, cases, rounds=how.rounds, budget=how.budget, seed=how.seed)
        finally:
            for tenant in tenants:
                tenant.stop()
    title = f"Many clients, {chosen.hosts} hosts, {chosen.devices} devices (emulated computations)"
    report = Report("clients", title, "computation", measured, JAX)
    rows = [("case", "system", "devices held", "least and most of a client, of its fair share")]
    for case in cases:
        for crowd in crowds:
            used = crowd.used[case][-how.rounds :]
            if len(used) < 2:
                continue  # it broke
            share = spread([u[0] for u in used])
            least, most = (spread([u[k] for u in used]).median for k in (1, 2))
            text = f"{share.median:.1%} ({share.low:.1%} .. {share.high:.1%})"
            rows.append((case, crowd.name, text, f"{brief(least)} .. {brief(most)}"))
            report.facts[f"{case}, {crowd.name}"] = used
    report.notes += ["", markdown(rows)]
    publish(report, how.folder)


if __name__ == "__main__":
    main()
