"""A control plane in this process, two good clients at work, and hosts that do as they are told.

Problem: who attacks a door must harm nobody, so somebody must be there who would notice:
:meth:`Lab.look` does, after each round of :mod:`tests.runtime.fuzz`.
"""

from __future__ import annotations

import contextlib
import functools
import random
from collections.abc import Sequence
from typing import Any

from pathways_lab.core.control import Control
from pathways_lab.core.diagnosis.invariants import check
from pathways_lab.core.diagnosis.stall import Seen
from pathways_lab.core.errors import Failure
from pathways_lab.core.messages import Command, Event, Grant
from pathways_lab.core.program.array_types import shard_bytes
from pathways_lab.core.program.bundles import APART, apart, arrays_of
from pathways_lab.core.program.folding import Folded, folded, laid_out
from pathways_lab.core.program.layout import Layout
from pathways_lab.core.program.lowering import lower
from pathways_lab.core.program.program import Call, Line, Plan, Program, Signature, Value
from pathways_lab.core.scheduling.policies import INITIAL
from pathways_lab.core.slices.topology import SliceRequest
from pathways_lab.runtime.control_plane.directory import HostSeen
from pathways_lab.runtime.control_plane.driver import Rim
from pathways_lab.timeline.packed import single
from pathways_lab.timeline.records import Span
from pathways_lab.transport import record_encoding
from pathways_lab.transport.codec import pack, unpack, unpack_fields
from pathways_lab.transport.edge import Malformed
from pathways_lab.transport.framing import Letter, encode
from tests.runtime.mutate import Said
from tests.runtime.rim_kit import DATA_KEY, Peer, Services

GOOD_HOSTS = ("i0/h0", "i0/h1")
EVIL_HOST = "i1/h0"
LAYOUT = Layout((("x", 2),), ((),))
LEAF = [[4], "uint8"]


class Desk:
    """Nobody's code gets this far."""

    def try_out(self, client: str, request: int, name: str, code: Any) -> None:
        raise AssertionError(f"code of {client} was taken")

    def ask(self, command: Any) -> None:
        raise AssertionError("nobody may have set a policy")

    def keep(self, policy: Any) -> None:
        """A built-in one."""


class Watched(Control):
    """A core whose bugs are not passed over."""

    def handle(self, event: Event) -> list[Command]:
        with failing(f"the core failed on {event!r:.300}"):
            return super().handle(event)


@contextlib.contextmanager
def failing(what: str) -> Any:
    """What is raised here is no Exception, so that nobody catches it on the way."""
    try:
        yield
    except Exception as error:
        raise Broken(f"{what}: {error!r}") from error


class Broken(BaseException):
    """Something that may never happen has happened."""


class HostPeer(Peer):
    """A host that does what it is told, and knows what it could not do.

    late: ends of gangs that it has not reported.
    """

    def __init__(self, lab: Lab, name: str) -> None:
        super().__init__()
        self.lab, self.name = lab, name
        self.plans: dict[str, Plan] = {}
        self.functions: dict[tuple[str, int], dict[str, Any]] = {}
        self.bound: set[int] = set()
        self.granted: dict[int, int] = {}
        self.over: set[int] = set()
        self.late: list[list[Any]] = []

    def forward(self, letter: Letter) -> int:
        with failing(f"{self.name} was told {letter.op} {letter.fields!r:.300}"):
            encode(letter.op, letter.fields, letter.buffers)
            told = getattr(self, f"_{letter.op}", None)
            if told is not None:
                told(letter.fields)
        return 100

    def _say(self, op: str, **fields: Any) -> None:
        self.lab.reports.append((self.name, op, fields))

    def _bind(self, fields: dict[str, Any]) -> None:
        self.bound.add(fields["binding"][1])

    def _unbind(self, fields: dict[str, Any]) -> None:
        self.bound.discard(fields["slice"])

    def _prepare(self, fields: dict[str, Any]) -> None:
        assert fields["slice"] in self.bound, "a function for a slice that is not here"
        line = unpack(Line, fields["line"])
        for side in ("in", "out"):
            for (shape, dtype), layout in zip(
                fields[f"{side}_types"], fields[f"{side}_layouts"], strict=True
            ):
                shard_bytes(tuple(shape), dtype, unpack(Layout, layout))
        self.functions[fields["function"], fields["slice"]] = fields
        span = Span("compile", 1.0, 2.0, "", self.name, node=fields["name"], line=str(line))
        done = [(fields["function"], fields["slice"], 0, None)]
        self._say("report", compiled=done, records=[record_encoding.write(span)])

    def _program(self, fields: dict[str, Any]) -> None:
        plan = self.plans[fields["plan"][1]] = laid_out(unpack(Folded, fields["plan"]))
        for value in arrays_of(plan.values):
            assert value.layout is not None
            assert shard_bytes(value.shape, value.dtype, value.layout) == value.nbytes
        for node in (step.node for step in plan.steps):
            if isinstance(node, Call) and node.slice in self.bound:
                known = self.functions[node.function, node.slice]
                given = arrays_of([plan.values[v] for v in node.inputs])
                assert len(known["in_types"]) == len(given)

    def _grant(self, fields: dict[str, Any]) -> None:
        grant = unpack_fields(Grant, {**fields, "host": self.name})
        assert grant.run not in self.over, f"granted a part of run {grant.run}, which is over"
        assert len(grant.inputs) == len(self.plans[grant.plan].inputs)
        self.granted[grant.run] = grant.last
        if grant.last == len(self.plans[grant.plan].steps):
            self.over.add(grant.run)
        self.late += [[grant.run, step, [0.001]] for step in range(grant.first, grant.last)]
        if self.lab.rng.random() < 0.8:
            self.catch_up()

    def _abort(self, fields: dict[str, Any]) -> None:
        self.over.add(fields["run"])

    def _progress(self, fields: dict[str, Any]) -> None:
        gangs = [pack(Seen(run, step, "launched", 1.0, (0,))) for run, step, _ in self.late]
        self._say("progress", number=fields["number"], gangs=gangs)

    def catch_up(self) -> None:
        """Report what has ended."""
        done, self.late = self.late, []
        if done:
            self._say("report", ended=done)


class ClientPeer(Peer):
    """Counts what is refused, and remembers the ends of runs.  records: as they came."""

    def __init__(self) -> None:
        super().__init__()
        self.refused: list[Failure] = []
        self.ended: dict[int, str] = {}
        self.lost: list[int] = []
        self.answers: dict[int, dict[str, Any]] = {}
        self.records: list[bytes] = []

    def forward(self, letter: Letter) -> int:
        op, fields = letter.op, letter.fields
        assert fields is not None
        if op == "closing":
            raise Broken(f"the lab ended: {fields}")
        if op in ("refused", "answered") and fields["failure"] is not None:
            failure = unpack(Failure, fields["failure"])
            if failure.kind == "internal":
                raise Broken(f"{fields}: {failure.details}")
            self.refused.append(failure)
        if op == "answered":
            self.answers[fields["id"]] = fields
        elif op == "run-ended":
            self.ended[fields["run"]] = fields["outcome"]
        elif op == "records":
            self.records += fields["records"]
        for buffers_, failure in fields.get("resolved", ()):
            self.lost += buffers_ if failure is not None else ()
        return 100


class Good:
    """A client that works, and whose results are looked at."""

    def __init__(self, lab: Lab, name: str, owner: bool) -> None:
        self.lab, self.name = lab, name
        self.peer, number = lab.join(name, owner)
        self.number, self.high = number, number << 32
        self._runs, self._asked = 1000, 0
        for letter in beginning(number, "i0"):
            lab.say(name, *letter)
        self.kept = self.high | 500
        self._run(self.high | 400, self.kept, None)

    def ask(self, op: str, **fields: Any) -> dict[str, Any]:
        """The answer to a question."""
        self._asked += 1
        self.lab.say(self.name, op, {**fields, "id": self._asked})
        return self.peer.answers.pop(self._asked)

    def _run(self, run: int, output: int, given: int | None) -> None:
        argument = [] if given else [b"1234"]
        self.lab.say(self.name, "submit", run_of(self.number, run, output, given), argument)
        self.lab.catch_up()
        assert self.peer.ended.pop(run, None) == "finished", f"run {run} did not end well"

    def work(self) -> None:
        """A run on what it keeps, and a question."""
        self._runs += 1
        output = self.high | (1 << 20) + self._runs
        self._run(self.high | self._runs, output, self.kept)
        self.lab.say(self.name, "drop", {"buffers": [output]})
        assert self.ask("stuck", seconds=1e9)["failure"] is None
        assert not self.peer.refused, f"{self.name} was refused {self.peer.refused[0]}"
        assert not self.peer.lost, f"{self.name} lost {self.peer.lost}"
        kept = self.lab.control.state.store.buffers.get(self.kept)
        assert kept is not None, "its kept value is gone"
        assert kept.state == "resident", "its kept value is gone"


class Lab:
    """The rim and the core, three hosts, two clients that work, and an attacker."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.control = Watched()
        self.now = 0.0
        self.reports: list[tuple[str, str, dict[str, Any]]] = []
        self.hosts: dict[str, HostPeer] = {}
        desk: Any = Desk()
        self.rim = Rim(
            self.control, self._clock, lambda: None, Services(), lambda rim: desk, DATA_KEY
        )
        for name in (*GOOD_HOSTS, EVIL_HOST):
            self.host_comes(name)
        self.good = (Good(self, "ann", True), Good(self, "bob", False))
        ann, bob = self.good
        ann.ask("quota", whom="evil", devices=64, nbytes=1 << 40)
        ann.ask("publish", name="weights", buffers=[ann.kept])
        bob.ask("take", name="weights", buffers=[bob.high | 700])
        bob.ask("publish", name="other", buffers=[bob.kept])
        self.say("bob", "watch", {})
        self.evil, self.evil_number = ClientPeer(), 0
        self.come()

    def _clock(self) -> float:
        self.now += 1e-5
        return self.now

    def join(self, name: str, owner: bool = False) -> tuple[ClientPeer, int]:
        """A client comes."""
        peer = ClientPeer()
        seen = self.rim.new_client(name, 1, 0 if owner else 1)
        self.rim.client_joined(seen, peer)
        return peer, seen.number

    def host_comes(self, name: str) -> None:
        """A device process, or a new one in its place."""
        peer = self.hosts[name] = HostPeer(self, name)
        hello = HostSeen(
            name, name[:2], 2, "cpu", 1 << 50, 1, 2, "d", False, worker=name, assembled=True
        )
        self.rim.host_joined(hello, peer)

    def come(self) -> None:
        """The attacker, with honest intentions at first."""
        self.evil, self.evil_number = self.join("evil")
        for letter in beginning(self.evil_number, "i1"):
            self.say("evil", *letter)
        assert not self.evil.refused, self.evil.refused[0]

    def leave(self, why: str) -> None:
        """The attacker's link is closed."""
        self.rim.client_left("evil", why)
        self.rest()

    def say(
        self, name: str, op: str, fields: dict[str, Any], buffers: Sequence[bytes] = ()
    ) -> None:
        """A message of a client, and what hosts do about it.  Raises Malformed."""
        with failing(f"{name} said {op} {fields!r:.300}"):
            try:
                self.rim.from_client(name, op, fields, [memoryview(b) for b in buffers], 100)
            except Malformed as error:
                raise Closed(str(error)) from None
        self.rest()

    def rest(self) -> None:
        """Hosts say what they have to say."""
        while self.reports:
            name, op, fields = self.reports.pop(0)
            with failing(f"{name} said {op} {fields!r:.300}"):
                self.rim.from_host(name, op, fields, [], 100)

    def catch_up(self) -> None:
        """Nothing is under way any more on hosts."""
        for host in self.hosts.values():
            host.catch_up()
        self.rest()

    def look(self) -> None:
        """After every round."""
        self.catch_up()
        self.rim.look()
        self.rest()
        check(self.control)
        for good in self.good:
            good.work()
        ann, bob = self.good
        self.leave("enough")
        state, registry = self.control.state, self.rim.registry
        for name in [name for name, client in registry.published.items() if client == "evil"]:
            assert name in registry.kept, f"{name!r} is left"
            ann.ask("unpublish", name=name)
        assert not registry.seats
        self.catch_up()
        assert {b.owner for b in state.store.buffers.values()} == {"ann", "bob"}, "buffers are left"
        assert {r.binding.client for r in self.control.slices.values()} == {"ann", "bob"}
        assert not state.runs
        assert not self.control.bookings.line
        assert {name for name, _ in registry.plans.values()} <= {"ann", "bob"}
        assert registry.published == {"weights": "ann", "other": "bob"}
        assert not registry.programs
        assert not registry.arguments
        assert not registry.leases
        assert not self.rim.races
        assert len(registry.functions) == len(registry.blobs) == 2 * len(registry.devices) == 4
        assert registry.policy == INITIAL
        self.rim.diary.flush()
        for record in single(record_encoding.read_packed(bob.peer.records)):
            assert type(getattr(record, "node", "")) is str
        bob.peer.records.clear()
        for host in self.hosts.values():
            host.over.clear()
        self.come()


class Closed(BaseException):
    """The link is closed: what came was no message of its door."""


@functools.lru_cache(maxsize=8)
def plan_of(number: int) -> Plan:
    """One call on the client's slice."""
    where = number << 32 | 1
    values = tuple(Value((4,), "uint8", where, LAYOUT, 4, name) for name in ("in", "out"))
    signature = Signature("f", where, (LAYOUT,), (LAYOUT,))
    call = Call("f", where, (0,), (1,), (), "f", Line("a.py", 1, "f(x)"))
    return lower(Program(f"of {number}", values, (call,), (0,), (1,), {"f": signature}))


APART_OF_TWO = {
    "function": "g", "kind": APART, "donated": [0, 1],
    **{f"{side}_layouts": [pack(LAYOUT)] * 2 for side in ("in", "out")},
    **{f"{side}_types": [LEAF] * 2 for side in ("in", "out")},
}  # fmt: skip
"""The other fields of the function that takes a bundle of two apart."""


@functools.lru_cache(maxsize=8)
def apart_of(number: int) -> Plan:
    """The program that calls it."""
    arrays = [Value((4,), "uint8", number << 32 | 1, LAYOUT, 4, name) for name in ("a", "b")]
    return apart("apart", "g", arrays, Line("a.py", 1, "f(x)"))


def run_of(number: int, run: int, output: int, given: int | None = None) -> dict[str, Any]:
    """A run of that program."""
    return {
        "run": run, "plan": plan_of(number).key, "inputs": [given], "outputs": [output],
        "priority": 0, "arguments": {0: 0} if given is None else {}, "hear": 7,
        "data": [["deadline", 1.0]],
    }  # fmt: skip


def function_of(slice_id: int) -> dict[str, Any]:
    """The function that it calls."""
    layout = pack(LAYOUT)
    return {
        "function": "f", "slice": slice_id, "kind": "export", "name": "f",
        "in_layouts": [layout], "out_layouts": [layout], "in_types": [LEAF], "out_types": [LEAF],
        "donated": [], "line": pack(Line("a.py", 1, "f(x)")), "loop": None, "checks": [],
    }  # fmt: skip


def beginning(number: int, island: str) -> list[Said]:
    """What a client says before its first run."""
    where = number << 32 | 1
    request = pack(SliceRequest((2,), ("x",), island))
    return [
        ("slice", {"slice": where, "request": request, "wait": True}, []),
        ("function", function_of(where), [b"code"]),
        ("program", {"plan": pack(folded(plan_of(number)))}, []),
        ("function", {**function_of(where), **APART_OF_TWO}, [b""]),
        ("program", {"plan": pack(folded(apart_of(number)))}, []),
    ]
