"""What does one more host cost the control plane?

``python -m benchmarks.fanout`` starts the control plane's own process and, here, one
client and hosts that only talk: they take grants and report ends as real hosts do (every
10 ms while busy), over real sockets, and compute nothing.  So what a run of one gang over all hosts
costs the control plane can be measured for as many hosts as there may be, and not only
for those that fit on this machine.  The seconds are processor time of its process alone.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import psutil

from benchmarks.harness.command import arguments, settings
from benchmarks.harness.figure import curves
from benchmarks.harness.report import Report, publish
from benchmarks.harness.rounds import Measured
from pathways_lab.core.program.folding import folded
from pathways_lab.core.program.lowering import lower
from pathways_lab.core.program.program import Call, Node, Plan
from pathways_lab.core.slices.topology import SliceRequest
from pathways_lab.runtime.cluster.start_control_plane import ControlProcess, ControlSettings
from pathways_lab.runtime.host.reports import PERIOD
from pathways_lab.testing import Sketch
from pathways_lab.transport import auth, record_encoding
from pathways_lab.transport.codec import pack
from pathways_lab.transport.link import Link
from pathways_lab.transport.reactor import Reactor

PER_HOST = 4
HOSTS = (1, 4, 16, 64, 256, 512)
FLIGHT = 64
"""Runs that the client has submitted and not heard the end of."""


@dataclass
class Host:
    """One that only talks.  rows: windows to be reported, as real hosts do it of gangs in a row."""

    link: Link
    name: str
    about: bytes
    rows: list[tuple[int, int, tuple[float, ...]]] = field(default_factory=list)
    gangs: list[record_encoding.Ended] = field(default_factory=list)
    places: deque[int] = field(default_factory=lambda: deque(maxlen=1000))
    """Of the last windows that it was granted."""

    def take(self, grant: dict[str, Any]) -> None:
        """A window is granted: its gangs end at once."""
        self.places.append(grant["place"])
        now, steps = time.monotonic(), range(grant["first"], grant["last"])
        self.rows.append((grant["run"], grant["first"], len(steps) * (1e-4,)))
        for place, step in enumerate(steps, grant["place"]):
            self.gangs.append(
                record_encoding.Ended(
                    [self.about], grant["run"], step, place, (), 0, True, (now,) * 4, ([now],) * 4
                )
            )

    def report(self) -> None:
        """What has ended since the last time."""
        records = [record_encoding.segments("island0", self.name, True, self.gangs, 0.0)]
        self.link.send("report", {"ended": self.rows, "records": records})
        self.rows, self.gangs = [], []


class Crowd:
    """A control plane, hosts that only talk, and one client with a slice over all of them."""

    def __init__(self, hosts: int, nodes: int) -> None:
        self.control = ControlProcess(ControlSettings.fresh())
        self.control.wait_ready()
        self.nodes = nodes
        self._ready = threading.Event()
        self._room = threading.Semaphore(FLIGHT)
        self._due = False
        self.hosts: list[Host] = []
        self._number = 0
        self._reactor = Reactor("crowd", self._message, lambda link, reason: None)
        self._reactor.start()
        try:
            self._join(hosts)
        except BaseException:
            self.close()
            raise

    def _join(self, hosts: int) -> None:
        where = self.control.settings
        for number in range(hosts):
            name = f"island0/host{number}"
            hello = {
                "role": "host", "name": name, "island": "island0", "devices": PER_HOST,
                "kind": "talk", "memory": 1 << 40, "pid": 0, "worker_pid": 0,
                "data_address": f"unix:none{number}", "emulated": True, "assembled": True,
            }  # fmt: skip
            link = self._reactor.connect(
                self.control.address, where.host_key, hello, holder=auth.HOSTS
            )
            about = record_encoding.about("work", "f", "kernel-1", "", 0, tuple(range(PER_HOST)))
            link.tag = Host(link, name, about)
            self.hosts.append(link.tag)
        hello = {"role": "client", "name": "", "pid": 0}
        self.client = self._reactor.connect(self.control.address, where.key, hello)
        self.first = int(self.client.peer["number"]) << 32
        devices = hosts * PER_HOST
        request = pack(SliceRequest((devices,), ("x",)))
        self.client.send("slice", {"slice": self.first, "request": request})
        sketch = Sketch("work").chain(self.first, *(f"f{n}" for n in range(self.nodes)))
        # Nobody reads what they make.
        sketch.nodes = [replace(call, keep=True) for call in sketch.nodes]
        self.plan = lower(sketch.program({self.first: devices}))
        for step in self.plan.steps:
            self.client.send("function", _announced(self.plan, step.node), [b"code"])
        self.client.send("program", {"plan": pack(folded(self.plan))})
        self.run(1)

    def _message(self, link: Link, op: str, fields: dict[str, Any], buffers: Any) -> None:
        host = link.tag
        if isinstance(host, Host):
            if op == "grant":
                host.take(fields)
                if not self._due:
                    self._due = True
                    self._reactor.call_later(PERIOD, self._report)
            elif op == "prepare":
                ready = [[fields["function"], fields["slice"], 0, None]]
                link.send("report", {"compiled": ready})
        elif op == "run-ended":
            if fields["failure"] is not None:
                raise RuntimeError(f"a run failed: {fields['failure']}")
            self._room.release()

    def _report(self) -> None:
        self._due = False
        for host in self.hosts:
            if host.rows:
                host.report()

    def run(self, runs: int) -> None:
        """Submit so many runs, and wait until all have ended."""
        for _ in range(runs):
            if not self._room.acquire(timeout=60):
                raise TimeoutError("runs do not end")
            self._number += 2
            run, made = self.first + self._number, self.first + self._number + 1
            fields = {
                "run": run, "plan": self.plan.key, "inputs": [None], "outputs": [made],
                "arguments": {0: 0}, "dropped": [made],
            }  # fmt: skip
            self.client.send("submit", fields, [b"\0\0\0\0"])
        for _ in range(FLIGHT):
            if not self._room.acquire(timeout=60):
                raise TimeoutError("runs do not end")
        for _ in range(FLIGHT):
            self._room.release()

    def seconds(self) -> float:
        """Processor time of the control plane so far."""
        used = psutil.Process(self.control.pid).cpu_times()
        return float(used.user + used.system)

    def close(self) -> None:
        """End everything."""
        self._reactor.close()
        self.control.close()


def measured(hosts: int, nodes: int, rounds: int, budget: float) -> list[float]:
    """Seconds of the control plane per run, in each round of at least *budget* such seconds."""
    crowd = Crowd(hosts, nodes)
    try:
        crowd.run(100)
        found = []
        for _ in range(rounds):
            begun, runs = crowd.seconds(), 0
            while crowd.seconds() - begun < budget:
                crowd.run(2 * FLIGHT)
                runs += 2 * FLIGHT
            found.append((crowd.seconds() - begun) / runs)
        return found
    finally:
        crowd.close()


def _announced(plan: Plan, node: Node) -> dict[str, Any]:
    """What a client says of the function that a node calls."""
    assert isinstance(node, Call)
    ins, outs = ([plan.values[v] for v in side] for side in (node.inputs, node.outputs))
    return {
        "function": node.function, "slice": node.slice, "kind": "export", "name": node.name,
        "in_layouts": [pack(v.layout) for v in ins], "out_layouts": [pack(v.layout) for v in outs],
        "in_types": [[v.shape, v.dtype] for v in ins],
        "out_types": [[v.shape, v.dtype] for v in outs],
        "donated": node.donated, "line": pack(node.line), "loop": None, "checks": (),
    }  # fmt: skip


class Line(NamedTuple):
    """Seconds of the control plane: of any run, and more of it for each host."""

    base: float
    per_host: float


def line(costs: Sequence[tuple[float, float]]) -> Line:
    """The line through (hosts, seconds per run), neither part below nothing."""
    per_host, base = statistics.linear_regression(*zip(*costs, strict=True))
    if base < 0 or per_host < 0:
        return Line(0.0, max(seconds / hosts for hosts, seconds in costs))
    return Line(base, per_host)


def main() -> None:
    """See the module's docstring."""
    parser = arguments(__doc__, rounds=5, budget=0.5)
    parser.add_argument("--hosts", type=int, nargs="+", default=list(HOSTS))
    chosen = parser.parse_args()
    how = settings(chosen)
    result = Measured()
    lines: dict[str, list[tuple[float, float]]] = {}
    facts: dict[str, Any] = {}
    for nodes in (1, 32):
        runs = f"runs of {nodes}"
        costs: list[tuple[float, float]] = []
        for hosts in chosen.hosts:
            samples = measured(hosts, nodes, how.rounds, how.budget)
            result.times[f"{hosts} hosts, {runs}"] = {
                "a run": samples,
                "for each host": [sample / hosts for sample in samples],
            }
            costs.append((float(hosts), statistics.median(samples)))
        lines[runs] = [(hosts, 1e6 * seconds / hosts) for hosts, seconds in costs]
        if len(costs) > 1:
            facts[runs] = line(costs)._asdict()
    report = Report("fanout", "What a run costs the control plane", "run", result, "a run", facts)
    text = [report.table(), ""]
    text += [
        f"{runs}: {1e6 * found['per_host']:.1f} us more for each host."
        for runs, found in facts.items()
    ]
    picture = curves(report.title, lines, "hosts", "microseconds of one core, for each host")
    publish(report, how.folder, "\n".join(text), picture)


if __name__ == "__main__":
    main()
