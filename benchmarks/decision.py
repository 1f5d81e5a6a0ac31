"""How long does the control plane think about one gang, and how does that grow?

``python -m benchmarks.decision`` shows, for 8 to 2,048 devices (four per host),
what one core in one Python process needs

* to *decide*: from a submitted run to its grants, per run and per gang, for
  runs of one gang and of 32,
* to *hear*: for a host's report that its gangs have ended,
* with 16 clients whose runs compete under proportional shares.

* with 16 runs to choose from, a policy of a user's own in its process: from the
  core's question to its answer.

But for the last, nothing is simulated and nothing is sent: events go straight
into the core, and times are CPU seconds of this process, so that other processes
do not count.  A question goes there and back, by the clock on the wall.
"""

from __future__ import annotations

import gc
import queue
import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import cloudpickle

from benchmarks.harness.command import Settings, arguments, settings
from benchmarks.harness.figure import curves
from benchmarks.harness.report import Report, publish
from benchmarks.harness.rounds import Measured
from pathways_lab.core.control import Control
from pathways_lab.core.errors import Failure, PathwaysError
from pathways_lab.core.messages import (
    AskPolicy,
    BuffersDropped,
    ClientJoined,
    Command,
    Event,
    FunctionAnnounced,
    HostJoined,
    HostReport,
    PolicyAnswered,
    PolicyChosen,
    ProgramRegistered,
    RunSubmitted,
    SliceRequested,
)
from pathways_lab.core.program.lowering import lower
from pathways_lab.core.program.program import Call, Plan
from pathways_lab.core.scheduling.policies import FIFO, Candidate, PolicyView, ProportionalShare
from pathways_lab.core.scheduling.rules import Rules
from pathways_lab.core.slices.topology import SliceRequest
from pathways_lab.runtime.control_plane.policy_supervisor import PolicyDesk, Processes
from pathways_lab.testing import Sketch
from pathways_lab.transport.addresses import private_folder, remove_folder
from pathways_lab.transport.auth import new_key
from pathways_lab.transport.link import Link
from pathways_lab.transport.reactor import Reactor

PER_HOST = 4


@dataclass
class Bench:
    """A core with one island; times of every kind of event in microseconds.

    Runs are granted as if their functions had been measured before.
    """

    devices: int
    nodes: int
    clients: int = 1
    control: Control = field(default_factory=lambda: Control(Rules(assumed=1e-4)))
    plans: list[Plan] = field(default_factory=list)
    times: dict[str, list[float]] = field(default_factory=dict)
    number: int = 1 << 32

    def __post_init__(self) -> None:
        self.hosts = [f"island0/host{h}" for h in range(self.devices // PER_HOST)]
        for host in self.hosts:
            self.event(HostJoined(0.0, "b", host, "island0", PER_HOST, "none", 1 << 40))
        for c in range(self.clients):
            name = f"kernel-{c}"
            where = self.new()
            self.event(ClientJoined(0.0, "b", name))
            request = SliceRequest((self.devices,), ("x",))
            self.event(SliceRequested(0.0, "b", name, where, request))
            sketch = Sketch(f"p{c}").chain(where, *(f"f{n}" for n in range(self.nodes)))
            plan = lower(sketch.program({where: self.devices}))
            self.plans.append(plan)
            for step in plan.steps:
                if isinstance(step.node, Call):
                    key = step.node.function
                    self.event(FunctionAnnounced(0.0, "b", name, key, where))
                    ready = ((key, where, 0, None),)
                    for host in self.hosts:
                        self.event(HostReport(0.0, "b", host, compiled=ready))
            self.event(ProgramRegistered(0.0, "b", name, plan))

    def new(self) -> int:
        """A number for a slice, run or buffer."""
        self.number += 1
        return self.number

    def event(self, event: Event, kind: str = "") -> list[Command]:
        """One event, timed."""
        begun = time.process_time_ns()
        commands = self.control.handle(event)
        self.times.setdefault(kind, []).append((time.process_time_ns() - begun) / 1e3)
        return commands

    def run(self, client: int) -> None:
        """One run from its submission to the end of its result."""
        name, plan = f"kernel-{client}", self.plans[client]
        run, output = self.new(), self.new()
        submit = RunSubmitted(0.0, "b", name, run, plan.key, (None,), (output,))
        granted = self.event(submit, "decide")
        assert len(granted) >= len(self.hosts)
        ended = ((run, 0, (1e-4,) * self.nodes),)
        for host in self.hosts:
            self.event(HostReport(0.0, "b", host, ended), "hear")
        self.event(BuffersDropped(0.0, "b", name, (output,)), "drop")

    def measure(self, runs: int) -> None:
        """Some runs of all clients in turn, after a few to warm up."""
        for n in range(8):
            self.run(n % self.clients)
        self.times.clear()
        for n in range(runs):
            self.run(n % self.clients)


def growth(most: int, how: Settings) -> Report:
    """Decisions over devices, from 8 to *most*, for runs of one gang and of 32."""
    measured = Measured()
    for nodes in (1, 32):
        devices = 8
        while devices <= most:
            bench = Bench(devices, nodes)
            bench.measure(max(3, 80 // devices) if how.quick else max(20, 4000 // devices))
            decide, hear = bench.times["decide"], bench.times["hear"]
            per_run = len(hear) // len(decide)
            rest = [sum(hear[n * per_run : (n + 1) * per_run]) for n in range(len(decide))]
            whole = map(sum, zip(decide, rest, bench.times["drop"], strict=True))
            measured.times[f"{devices} devices, runs of {nodes}"] = {
                "decide, per gang": [us / nodes / 1e6 for us in decide],
                "hear, per report": [us / 1e6 for us in hear],
                "all, per gang": [us / nodes / 1e6 for us in whole],
            }
            devices *= 4
    title = "Time that the control plane thinks about a gang"
    return Report("decision", title, "gang or report", measured, "decide, per gang")


def picture(report: Report) -> str:
    """Medians over devices."""
    lines: dict[str, list[tuple[float, float]]] = {}
    for case, times in report.measured.times.items():
        devices, _, runs = case.partition(" devices, ")
        for kind, samples in times.items():
            lines.setdefault(f"{kind}, {runs}", []).append(
                (float(devices), 1e6 * statistics.median(samples))
            )
    return curves(report.title, lines, "devices", "microseconds of one core")


def crowd() -> dict[str, list[float]]:
    """Sixteen clients with shares, a deep queue: seconds to submit, and to find who is next."""
    bench = Bench(32, 1, clients=16)
    shares = {f"kernel-{c}": 1.0 + c for c in range(16)}
    bench.event(PolicyChosen(0.0, "b", "kernel-0", ProportionalShare(shares)))
    granted: list[int] = []
    moment = 0.0

    def submit(client: int) -> None:
        name, plan = f"kernel-{client}", bench.plans[client]
        event = RunSubmitted(moment, "b", name, bench.new(), plan.key, (None,), (bench.new(),))
        take(bench.event(event, "submit"))

    def take(commands: list[Command]) -> None:
        for command in commands:
            placed = getattr(command, "place", None) is not None
            run = getattr(command, "run", 0) if placed else 0
            if run and run not in granted:
                granted.append(run)

    for _ in range(40):
        for client in range(16):
            submit(client)
    for number in range(2000):
        run = granted.pop(0)
        moment += 1e-3
        for host in bench.hosts[:-1]:
            bench.event(HostReport(moment, "b", host, ((run, 0, (1e-3,)),)), "others")
        last = HostReport(moment, "b", bench.hosts[-1], ((run, 0, (1e-3,)),))
        take(bench.event(last, "turn"))
        submit(number % 16)
    return {kind: [us / 1e6 for us in bench.times[kind]] for kind in ("submit", "turn")}


class Newest:
    """A user's own policy."""

    def choose(self, view: PolicyView) -> int:
        return view.candidates[-1].run


class Elsewhere:
    """A control plane's end of one policy: it asks, and hears answers."""

    def __init__(self, folder: Path) -> None:
        self.heard: queue.Queue[Event] = queue.Queue()
        key = new_key()
        self.reactor = Reactor("bench", self._message, lambda *_: None, self._opened)
        address = self.reactor.listen(f"unix:{folder}/policies.sock", key, self._meet)
        processes = Processes(address, key, folder, self.reactor.call_soon)
        self.desk = PolicyDesk(self, processes, time.monotonic, self.reactor.call_later)
        self.reactor.start()
        code = memoryview(cloudpickle.dumps(Newest()))
        self.reactor.call_soon(self.desk.try_out, "a", 1, "Newest", code)
        assert isinstance(self.heard.get(timeout=30), PolicyChosen)

    def _meet(self, link: Link, hello: dict[str, Any]) -> dict[str, Any]:
        link.tag = hello["token"]
        return {"name": "control"}

    def _opened(self, link: Link, hello: dict[str, Any]) -> None:
        self.desk.joined(link.tag, link)

    def _message(self, link: Link, op: str, fields: dict[str, Any], _: Any) -> None:
        self.desk.said(link.tag, op, fields)

    def happened(self, event: Event) -> None:
        self.heard.put(event)

    def policy_refused(self, client: str, request: int, failure: Failure) -> None:
        raise PathwaysError(failure)

    def policy_printed(self, client: str, name: str, text: str) -> None:
        print(text)

    def ask(self, number: int, view: PolicyView) -> float:
        """Seconds from a question to its answer, with both ends' packing."""
        begun = time.perf_counter()
        self.reactor.call_soon(self.desk.ask, AskPolicy("b", 1, number, view))
        while not isinstance(self.heard.get(timeout=5), PolicyAnswered):
            pass  # late, on a machine that is busy
        return time.perf_counter() - begun


def elsewhere(questions: int) -> dict[str, list[float]]:
    """Questions to a policy in its own process, and back: seconds."""
    some = tuple(
        Candidate((1 << 32) | n, f"kernel-{n}", "train", 0, n, 0.5, 0.05, 0.1, 8, False, 0)
        for n in range(16)
    )
    view = PolicyView(1.0, some, {c.client: 1.0 for c in some}, {"train": 16.0})
    folder = private_folder()
    there = Elsewhere(folder)
    try:
        return {"there and back": [there.ask(n, view) for n in range(1, questions + 1)]}
    finally:
        there.reactor.call_soon(there.desk.keep, FIFO())
        there.reactor.close()
        remove_folder(folder)


def main() -> None:
    """Everything."""
    parser = arguments(__doc__)
    parser.add_argument("--most", type=int, default=2048, help="devices at most")
    chosen = parser.parse_args()
    how = settings(chosen)
    gc.freeze()
    report = growth(min(chosen.most, 32) if how.quick else chosen.most, how)
    growing = picture(report)
    report.measured.times["16 clients compete: shares, 640 runs wait, 8 hosts"] = crowd()
    asked = elsewhere(200 if how.quick else 2000)
    report.measured.times["a user's own policy in its process: 16 runs to choose from"] = asked
    publish(report, how.folder, svg=growing)


if __name__ == "__main__":
    main()
