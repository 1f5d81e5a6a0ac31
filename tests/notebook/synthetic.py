"""Timelines of a cluster that does not exist: deterministic, with exact times.

A pipeline over islands with microbatches, on first-in-first-out devices, in
the same records that the real lab writes.  Tests of figures use it at once;
browser tests play it at the pace of the clock.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from pathways_lab.timeline.log import Timeline
from pathways_lab.timeline.records import Event, Record, Span


def arrival(record: Record) -> float:
    """When a record can be known: a span at its end."""
    return record.end if isinstance(record, Span) else record.time


@dataclass
class Cluster:
    """Islands of hosts; slice *i* is the whole of island *i*.

    gap: seconds that the controller runs ahead: a gang is granted that long
        before its devices could start it.
    """

    islands: int = 2
    hosts: int = 1
    devices: int = 4
    start: float = 0.0
    emulated: bool = False
    records: list[Record] = field(default_factory=list)
    seq: dict[str, int] = field(default_factory=dict)
    free: dict[str, float] = field(default_factory=dict)
    runs: int = 0

    def __post_init__(self) -> None:
        for i in range(self.islands):
            for host in self.hosts_of(i):
                self.records.append(
                    Event(
                        "host-joined", self.start, f"island{i}", host,
                        args={"devices": self.devices, "kind": "cpu", "emulated": self.emulated},
                    )
                )  # fmt: skip
            self.records.append(
                Event(
                    "slice-bound", self.start, f"island{i}", client="kernel-1",
                    args={
                        "slice": i,
                        "devices": [(h, d) for h in self.hosts_of(i) for d in range(self.devices)],
                        "shape": (self.hosts, self.devices),
                        "axes": ("data", "model"),
                    },
                )
            )  # fmt: skip

    def hosts_of(self, island: int) -> tuple[str, ...]:
        return tuple(f"island{island}/host{h}" for h in range(self.hosts))

    def gang(
        self, island: int, run: int, step: int, program: str, node: str, line: str,
        ready: float, seconds: float, granted: float,
    ) -> float:  # fmt: skip
        """Grant, launch and run one gang as soon as its devices are free; returns its end."""
        name = f"island{island}"
        seq = self.seq.get(name, 0)
        self.seq[name] = seq + 1
        begin = max(ready, self.free.get(name, self.start))
        end = begin + seconds
        self.free[name] = end
        common = {"run": run, "step": step, "program": program, "node": node, "client": "kernel-1"}
        hosts = self.hosts_of(island)
        args = {"seq": seq, "slice": island}
        self.records.append(
            Event("granted", granted, name, args={**args, "line": line, "hosts": hosts}, **common)
        )
        for host in hosts:
            launched = max(granted, begin - 0.002)
            devices = tuple(range(self.devices))
            self.records.append(
                Event("launched", launched, name, host, args={**args, "devices": devices}, **common)
            )
            self.records.append(
                Span("gang", begin, end, name, host, devices, line=line, args=args, **common)
            )
        return end

    def transfer(
        self, source: int, island: int, run: int, step: int, program: str, line: str,
        ready: float, seconds: float,
    ) -> float:  # fmt: skip
        name = f"island{island}"
        for host, other in zip(self.hosts_of(island), self.hosts_of(source), strict=True):
            self.records.append(
                Span(
                    "transfer", ready, ready + seconds, name, host, tuple(range(self.devices)),
                    run, step, program, "transfer", "kernel-1", line,
                    {"nbytes": 1 << 20, "source": other, "target": host},
                )
            )  # fmt: skip
        return ready + seconds

    def pipeline(
        self, program: str = "train", micro: int = 4, at: float = 0.0,
        forward: float = 0.040, hop: float = 0.010,
    ) -> float:  # fmt: skip
        """One training step: forward and backward over all islands, GPipe order; returns its end.

        Backward passes take twice the forward time, updates half of it.
        """
        self.runs += 1
        run = (1 << 32) + self.runs
        client = "kernel-1"
        plan = {"plan": f"{program}/{micro}"}
        steps = self.steps(micro)
        self.records.append(
            Event("plan", at, program=program, client=client, args={**plan, "steps": steps})
        )
        self.records.append(
            Event("submitted", at, run=run, program=program, client=client, args=plan)
        )
        self.records.append(
            Event("message", at, run=run, program=program, client=client,
                  args={"source": client, "target": "control", "kind": "submit", "bytes": 400})
        )  # fmt: skip
        step = 0
        last = at
        done: list[float] = []
        lines = {
            "fwd": "h = forward(params, x)",
            "bwd": "grads = backward(params, h, g)",
            "update": "params = update(params, grads)",
        }
        for m in range(micro):
            ready = at + 0.004
            for i in range(self.islands):
                ready = self.gang(i, run, step, program, f"fwd{i}", lines["fwd"], ready, forward,
                                  at + 0.001 + m * 0.001)  # fmt: skip
                step += 1
                if i + 1 < self.islands:
                    ready = self.transfer(i, i + 1, run, step, program, lines["fwd"], ready, hop)
                    step += 1
            done.append(ready)
        for m in range(micro):
            ready = done[m]
            for i in reversed(range(self.islands)):
                ready = self.gang(i, run, step, program, f"bwd{i}", lines["bwd"], ready,
                                  2 * forward, at + 0.006 + m * 0.001)  # fmt: skip
                step += 1
                if i:
                    ready = self.transfer(i, i - 1, run, step, program, lines["bwd"], ready, hop)
                    step += 1
            last = max(last, ready)
        for i in range(self.islands):
            end = self.gang(i, run, step, program, f"update{i}", lines["update"],
                            self.free[f"island{i}"], forward / 2, at + 0.010)  # fmt: skip
            step += 1
            last = max(last, end)
        self.records.append(Event("finished", last, run=run, program=program, client=client))
        return last

    def steps(self, micro: int) -> list[list[object]]:
        """What :meth:`pipeline` consists of, as its ``plan`` record has it."""
        out: list[list[object]] = []

        def add(transfer: bool, node: str, where: int, after: list[int]) -> int:
            out.append([transfer, node, where, 1 << 20, after, f"line of {node}"])
            return len(out) - 1

        done, grads = [], []
        for _ in range(micro):
            after: list[int] = []
            for i in range(self.islands):
                after = [add(False, f"fwd{i}", i, after)]
                if i + 1 < self.islands:
                    after = [add(True, "transfer", i + 1, after)]
            done.append(after)
        for m in range(micro):
            after = done[m]
            for i in reversed(range(self.islands)):
                after = [add(False, f"bwd{i}", i, after)]
                grads.append(after[0])
                if i:
                    after = [add(True, "transfer", i - 1, after)]
        for i in range(self.islands):
            add(False, f"update{i}", i, [g for g in grads if out[g][2] == i])
        return out

    def in_order(self) -> list[Record]:
        """All records, in the order in which they become known."""
        return sorted(self.records, key=arrival)


def training(steps: int = 3, **options: int) -> list[Record]:
    """*steps* training steps, one after another."""
    cluster = Cluster(**options)  # type: ignore[arg-type]
    at = 0.0
    for _ in range(steps):
        at = cluster.pipeline(at=at) + 0.005
    return cluster.in_order()


def play(timeline: Timeline, records: Iterable[Record], tick: float = 0.02) -> threading.Thread:
    """Feed *records* to *timeline* from a thread, each when its time has come.

    Record times are seconds from now on.
    """
    origin = timeline.clock()

    def run() -> None:
        waiting: Iterator[Record] = iter(sorted(records, key=arrival))
        pending: list[Record] = []
        record = next(waiting, None)
        while record is not None:
            now = timeline.clock() - origin
            while record is not None and arrival(record) <= now:
                pending.append(shifted(record, origin))
                record = next(waiting, None)
            timeline.extend(pending)
            pending = []
            time.sleep(tick)

    thread = threading.Thread(target=run, name="synthetic feed", daemon=True)
    thread.start()
    return thread


def shifted(record: Record, by: float) -> Record:
    """The same record, *by* seconds later."""
    from dataclasses import replace

    if isinstance(record, Span):
        return replace(record, start=record.start + by, end=record.end + by)
    return replace(record, time=record.time + by)
