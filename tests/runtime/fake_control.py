"""A control plane of a few lines, so that real device processes can be tested alone.

It listens for hosts on a real link, numbers grants per island, and remembers
what hosts say.  A client's data link is here too.
"""

from __future__ import annotations

import itertools
import secrets
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pathways_lab.core.errors import Failure
from pathways_lab.core.messages import Grant, HostReport
from pathways_lab.core.program.folding import folded
from pathways_lab.core.program.layout import Layout, boxes
from pathways_lab.core.program.program import Call, Line, Plan, Transfer, Value
from pathways_lab.core.slices.topology import SliceBinding
from pathways_lab.runtime import arrays
from pathways_lab.runtime.data_messages import upload_fields
from pathways_lab.runtime.host.compiler import Code
from pathways_lab.runtime.islands.process_group import Formation
from pathways_lab.runtime.processes.child_process import Child, spawn
from pathways_lab.timeline.records import Record, Span
from pathways_lab.transport import record_encoding
from pathways_lab.transport.addresses import private_folder, remove_folder
from pathways_lab.transport.auth import HOSTS, key_of
from pathways_lab.transport.codec import pack, pack_fields, unpack, unpack_fields
from pathways_lab.transport.link import Link
from pathways_lab.transport.reactor import Reactor
from tests.runtime.formation_kit import Fates
from tests.runtime.host_kit import wire
from tests.runtime.launch_kit import Draft, with_bytes


class Lab:
    """Device processes and the control plane that the test plays."""

    def __init__(self, hosts: Sequence[str] = ("island0/host0",), devices: int = 4) -> None:
        self.folder: Path = private_folder()
        self.key, self.data_key = secrets.token_bytes(32), secrets.token_bytes(32)
        self.changed = threading.Condition()
        self.links: dict[str, Link] = {}
        self.hellos: dict[str, dict[str, Any]] = {}
        self.closed: dict[str, str] = {}
        self.finished: dict[tuple[str, int, int], float] = {}
        self.failed: dict[tuple[str, int, int], Failure] = {}
        self.resident: set[tuple[str, int]] = set()
        self.compiled: dict[tuple[str, str, int], tuple[int, Failure | None]] = {}
        self.records: list[Record] = []
        self.output: list[tuple[str, int, int, str]] = []
        self.reasons: dict[str, str] = {}
        self.rejected: list[tuple[str, int, str]] = []
        self.reports = 0
        self.fates: Fates | None = None
        self.formations = itertools.count(1)
        self.spans: dict[int, int] = {}
        self.joined: dict[tuple[str, int], Any] = {}
        self.bindings: dict[int, SliceBinding] = {}
        self.places: dict[str, int] = {}
        self.previous: dict[str, int] = {}
        self.reactor = Reactor("control", self._message, self._gone, self._joined)
        hello = {"role": "control", "name": "control"}
        self.address = self.reactor.listen(f"unix:{self.folder}/c.sock", self.key, hello)
        self.reactor.start()
        self.children: dict[str, Child] = {}
        for host in hosts:
            self.start_host(host, devices)
        self.wait(lambda: len(self.links) == len(hosts), 60)
        self.clients = {host: Data(self, host) for host in hosts}

    def start_host(self, host: str, devices: int) -> None:
        settings = {
            "control": self.address,
            "key": key_of(self.key, HOSTS).hex(),
            "data_key": self.data_key.hex(),
            "name": host,
            "island": host.partition("/")[0],
            "devices": devices,
            "platform": "cpu",
            "memory": 1 << 30,
            "data_listen": f"unix:{self.folder}/{host.replace('/', '-')}.sock",
            "worker_pid": 1,
            "tls": None,
            "private": tempfile.mkdtemp(dir=self.folder),  # also where the host is killed
        }
        self.children[host] = spawn(
            "pathways_lab.runtime.host.process", settings, name=host, folder=self.folder
        )

    def close(self) -> None:
        for child in self.children.values():
            child.let_go()
        for child in self.children.values():
            child.end()
        if self.fates is not None:
            self.fates.coordination.end()
        self.reactor.close()
        remove_folder(self.folder)

    # --- what hosts say ---------------------------------------------------------------

    def _joined(self, link: Link, hello: dict[str, Any]) -> None:
        with self.changed:
            self.links[link.name] = link
            self.hellos[link.name] = hello
            self.changed.notify_all()
        peers = {name: h["data_address"] for name, h in self.hellos.items()}
        for other in self.links.values():
            other.send("peers", {"peers": peers})

    def _gone(self, link: Link, reason: str) -> None:
        with self.changed:
            self.closed[link.name] = reason
            self.changed.notify_all()

    def _message(self, link: Link, op: str, fields: dict[str, Any], buffers: list[Any]) -> None:
        with self.changed:
            if op == "rejected":
                self.rejected.append((link.name, fields["client"], fields["reason"]))
            elif op == "report":
                self.reports += 1
                base = {"time": 0.0, "cause": "", "host": link.name}
                report = unpack_fields(HostReport, {**fields, **base})
                for run, first, times in report.ended:
                    for step, seconds in enumerate(times, first):
                        assert (link.name, run, step) not in self.finished, "reported twice"
                        self.finished[link.name, run, step] = seconds
                for run, step, failure in report.failed:
                    self.failed[link.name, run, step] = failure
                self.resident |= {(link.name, buffer) for buffer in report.resident}
                for function, slice_id, temporary, why in report.compiled:
                    self.compiled[link.name, function, slice_id] = (temporary, why)
                self.records += record_encoding.read(fields["records"])
            elif op == "joined":
                self.joined[link.name, fields["number"]] = fields["failure"]
            elif op == "output":
                self.output.append((link.name, fields["run"], fields["device"], fields["text"]))
            else:
                assert op == "closing"
                self.reasons[link.name] = fields["reason"]
            self.changed.notify_all()

    def wait(self, condition: Callable[[], bool], timeout: float = 30.0) -> None:
        with self.changed:
            if not self.changed.wait_for(condition, timeout):
                words = [child.last_words() for child in self.children.values()]
                raise AssertionError(f"not within {timeout} s; hosts said: {words}")

    # --- what it tells them -----------------------------------------------------------

    def span(self, binding: SliceBinding) -> SliceBinding:
        """Bind a slice whose hosts compute together."""
        if self.fates is None:
            self.fates = Fates(self.folder)
        formation = Formation.of(binding, next(self.formations), 0)
        for host in binding.hosts:
            fields = {"slice": binding.slice, "formation": pack(formation)}
            self.links[host].send("span", fields)
        self.bind(binding)
        address = self.fates.open(formation.number, len(binding.hosts))
        for host in binding.hosts:
            fields = {"number": formation.number, "address": address}
            self.links[host].send("form", fields)
        self.spans[binding.slice] = formation.number
        return binding

    def bind(self, binding: SliceBinding) -> SliceBinding:
        self.bindings[binding.slice] = binding
        for host in binding.hosts:
            self.links[host].send("bind", {"binding": pack(binding)})
        return binding

    def prepare(self, made: Code, *, wait: bool = True) -> str:
        hosts = self.bindings[made.slice].hosts
        for host in hosts:
            self.links[host].send("prepare", wire(made), [made.blob])
        keys = [(host, made.function, made.slice) for host in hosts]
        if wait:
            self.wait(lambda: all(key in self.compiled for key in keys), 60)
        return made.function

    def program(self, plan: Plan) -> Plan:
        bindings = [pack(self.bindings[s]) for s in plan.slices]
        for host in self.involved(plan):
            self.links[host].send("program", {"plan": pack(folded(plan)), "bindings": bindings})
        return plan

    def involved(self, plan: Plan) -> tuple[str, ...]:
        hosts = [h for s in plan.slices for h in self.bindings[s].hosts]
        return tuple(dict.fromkeys(hosts))

    def hosts_of(self, plan: Plan, index: int) -> set[str]:
        """Who has a part in a step."""
        node = plan.steps[index].node
        ends = (
            (node.slice,)
            if isinstance(node, Call)
            else (plan.values[node.input].slice, plan.values[node.output].slice)
        )
        return {h for s in ends if s is not None for h in self.bindings[s].hosts}

    def grant(
        self,
        run: int,
        plan: Plan,
        inputs: Sequence[int | np.ndarray[Any, Any] | None] = (),
        outputs: Sequence[int] = (),
        *,
        first: int = 0,
        last: int | None = None,
        hosts: Iterable[str] | None = None,
    ) -> None:
        """Grant a window to the hosts with a step in it, as the core does, or to some.

        Arrays among the inputs travel with it.
        """
        stop = len(plan.steps) if last is None else last
        if hosts is None:
            hosts = dict.fromkeys(h for i in range(first, stop) for h in self.hosts_of(plan, i))
        buffers, arguments = [], {}
        for position, given in enumerate(inputs):
            if isinstance(given, np.ndarray):
                arguments[position] = len(buffers)
                buffers.append(arrays.as_bytes(np.asarray(given, order="C")))
        ids = tuple(i if isinstance(i, int) else None for i in inputs)
        islands: dict[str, int] = {}
        for host in hosts:
            island = host.partition("/")[0]
            if island not in islands:
                islands[island] = self.places.get(island, 0)
                self.places[island] = islands[island] + (stop - first)
            grant = Grant(
                f"run {run}", host, run, plan.key, first, stop, 0, islands[island],
                self.previous.get(host, -1), ids, tuple(outputs),
            )  # fmt: skip
            self.previous[host] = islands[island]
            fields = {**pack_fields(grant), "arguments": arguments}
            self.links[host].send("grant", fields, buffers)

    def run_over(self, run: int, plan: Plan, timeout: float = 30.0) -> None:
        """Until every host has reported every step of the run that concerns it."""
        keys = [
            (host, run, index)
            for index in range(len(plan.steps))
            for host in self.hosts_of(plan, index)
        ]
        self.wait(lambda: all(key in self.finished for key in keys), timeout)

    def broadcast(self, op: str, **fields: Any) -> None:
        for link in self.links.values():
            link.send(op, fields)

    # --- what clients do ----------------------------------------------------------------

    def put(self, buffer: int, value: Value, data: np.ndarray[Any, Any]) -> None:
        """Upload a whole array, shard by shard, and wait until it is resident."""
        assert value.slice is not None
        kind = arrays.physical_of(value)
        cuts = kind.boxes()
        binding = self.bindings[value.slice]
        for host in binding.hosts:
            devices = [n for n, (h, _) in enumerate(binding.devices) if h == host]
            shards = [np.asarray(data[arrays.index(cuts[n])], kind.dtype, "C") for n in devices]
            fields = upload_fields(buffer, value.slice, value.shape, value.dtype, value.layout)
            fields["devices"] = devices
            self.clients[host].link.send("put", fields, [arrays.as_bytes(s) for s in shards])
        self.wait(lambda: all((h, buffer) in self.resident for h in binding.hosts))

    def fetch(self, buffer: int, value: Value, timeout: float = 30.0) -> np.ndarray[Any, Any]:
        """The whole array, from all devices; replicas must agree.  Raises FetchFailed."""
        assert value.slice is not None
        kind = arrays.physical_of(value)
        binding = self.bindings[value.slice]
        whole = np.zeros(kind.shape, kind.dtype)
        seen = np.zeros(kind.shape, bool)
        cuts = boxes(kind.layout, kind.shape)
        for host in binding.hosts:
            devices = [n for n, (h, _) in enumerate(binding.devices) if h == host]
            for device, data in zip(
                devices, self.clients[host].fetch(buffer, devices, timeout), strict=True
            ):
                at = arrays.index(cuts[device])
                shard = arrays.from_bytes(data, whole[at].shape, kind.dtype)
                same = whole[at][seen[at]].tobytes() == shard[seen[at]].tobytes()
                assert same, "replicas differ"
                whole[at], seen[at] = shard, True
        return whole


class FetchFailed(Exception):
    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


class Data:
    """A client's link to one host."""

    def __init__(self, lab: Lab, host: str, holder: int = 0, **hello: str) -> None:
        self.answers: dict[int, tuple[str, dict[str, Any], list[memoryview]]] = {}
        self.changed = threading.Condition()
        self.ids = itertools.count(1)
        self.closed = threading.Event()
        self.reactor = Reactor("client", self._message, lambda link, reason: self.closed.set())
        self.reactor.start()
        address = lab.hellos[host]["data_address"]
        hello = {"role": "client", "name": "kernel-1", **hello}
        key = key_of(lab.data_key, holder)
        self.link = self.reactor.connect(address, key, hello, holder=holder)

    def _message(self, link: Link, op: str, fields: dict[str, Any], buffers: list[Any]) -> None:
        with self.changed:
            self.answers[fields["id"]] = (op, fields, buffers)
            self.changed.notify_all()

    def ask(self, buffer: int, devices: Sequence[int]) -> int:
        number = next(self.ids)
        fields = {"id": number, "buffer": buffer, "devices": list(devices)}
        self.link.send("fetch", fields)
        return number

    def fetch(self, buffer: int, devices: Sequence[int], timeout: float = 30.0) -> list[memoryview]:
        number = self.ask(buffer, devices)
        with self.changed:
            assert self.changed.wait_for(lambda: number in self.answers, timeout), "no answer"
            op, fields, buffers = self.answers.pop(number)
        if op == "fetch-failed":
            raise FetchFailed(unpack(Failure, fields["failure"]))
        return buffers


# --- plans ------------------------------------------------------------------------------


class Program(Draft):
    """A draft of calls of compiled functions."""

    def value(
        self, name: str, slice_id: int, shape: tuple[int, ...], dtype: str, layout: Layout
    ) -> Program:
        self.names[name] = len(self.values)
        self.values.append(with_bytes(shape, dtype, slice_id, layout))
        return self

    def __getitem__(self, name: str) -> Value:
        return self.values[self.names[name]]

    def call(self, made: Code, inputs: Sequence[str], outputs: Sequence[str]) -> Program:
        """One gang; its outputs are declared from the function's types."""
        for name, (shape, dtype), layout in zip(
            outputs, made.out_types, made.out_layouts, strict=True
        ):
            if name not in self.names:
                self.value(name, made.slice, shape, dtype, layout)
        self.nodes.append(
            Call(
                made.function,
                made.slice,
                tuple(self.names[n] for n in inputs),
                tuple(self.names[n] for n in outputs),
                made.donated,
                made.name,
                made.line,
            )
        )
        return self

    def move(self, name: str, output: str, slice_id: int, layout: Layout) -> Program:
        source = self[name]
        self.value(output, slice_id, source.shape, source.dtype, layout)
        node = Transfer(self.names[name], self.names[output], "transfer", Line("cell.py", 9, "t"))
        self.nodes.append(node)
        return self


def spans(records: Sequence[Record], kind: str) -> list[Span]:
    return [r for r in records if isinstance(r, Span) and r.kind == kind]


def settle(seconds: float = 0.05) -> None:
    """Let a process do what it would wrongly do at once."""
    time.sleep(seconds)
