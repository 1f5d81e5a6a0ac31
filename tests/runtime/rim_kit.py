"""A rim with scripted neighbours: two clients, two hosts, and a core that answers as it is told."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from pathways_lab.core import messages as m
from pathways_lab.core.diagnosis.overdue import Overdue
from pathways_lab.core.program.folding import folded
from pathways_lab.core.program.layout import Layout
from pathways_lab.core.program.program import Call, Line, Plan, Step, Transfer, Value
from pathways_lab.core.slices.topology import SliceBinding, SliceRequest
from pathways_lab.runtime.control_plane.directory import HostSeen
from pathways_lab.runtime.control_plane.driver import Rim
from pathways_lab.timeline.records import Record
from pathways_lab.transport import record_encoding
from pathways_lab.transport.codec import pack
from pathways_lab.transport.framing import Letter

ONE = 1 << 32
TWO = 2 << 32
LAYOUT = Layout((("x", 1),), ((),))


def plan_on(slices: tuple[int, int], key: str = "plan") -> Plan:
    """A call on one island, a transfer, a call on the other."""
    value = [Value((1,), "float32", s, LAYOUT, 4) for s in (slices[0], *slices, slices[1])]
    steps = (
        Step(Call("f", slices[0], (0,), (1,), name="f", line=Line("a.py", 3, "f(x)"))),
        Step(Transfer(1, 2)),
        Step(Call("g", slices[1], (2,), (3,), name="g")),
    )
    return Plan(key, "train", tuple(value), steps, (0,), (3,), tuple(sorted(slices)))


def announcement(
    slice_id: int, shape: tuple[int, ...] = (1,), layout: Layout = LAYOUT
) -> dict[str, Any]:
    """What a client says of the function "f", of one float32 array to another."""
    kind, packed = [[*shape], "float32"], pack(layout)
    return {
        "function": "f", "slice": slice_id, "kind": "export", "name": "f",
        "in_layouts": [packed], "out_layouts": [packed], "in_types": [kind], "out_types": [kind],
        "donated": [], "line": pack(Line("a.py", 3, "f(x)")), "loop": None, "checks": [],
    }  # fmt: skip


class Peer:
    """Remembers what it was sent."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, dict[str, Any], list[bytes]]] = []
        self.letters: list[Letter] = []
        self.pending = 0
        self.gone = False

    def forward(self, letter: Letter) -> int:
        if self.gone:
            raise ConnectionError
        self.letters.append(letter)
        self.sent.append((letter.op, letter.fields or {}, [bytes(b) for b in letter.buffers]))
        return 100

    def of(self, op: str) -> list[dict[str, Any]]:
        return [fields for name, fields, _ in self.sent if name == op]


class Script:
    """A core that remembers events and answers as it is told."""

    def __init__(self) -> None:
        self.events: list[m.Event] = []
        self.answer: Callable[[m.Event], list[m.Command]] = lambda event: []
        self.due = math.inf

    def handle(self, event: m.Event) -> list[m.Command]:
        self.events.append(event)
        return self.answer(event)

    def overdue(self, seconds: float, now: float) -> tuple[Overdue, ...]:
        return ()


DATA_KEY = b"k" * 32


class Services:
    """Remembers which formations were opened and closed."""

    def __init__(self) -> None:
        self.said: list[tuple[str, int]] = []

    def open(self, formation: int, processes: int, book: object) -> None:
        self.said.append(("open", formation))

    def close(self, formation: int) -> None:
        self.said.append(("close", formation))


class Desk:
    """Remembers what was to be done about policies."""

    def __init__(self, lab: Lab) -> None:
        self.said = lab.asked

    def try_out(self, client: str, request: int, name: str, code: Any) -> None:
        self.said.append(("try", client, request, name, bytes(code)))

    def ask(self, command: m.AskPolicy) -> None:
        self.said.append(("ask", command.question))

    def keep(self, policy: Any) -> None:
        self.said.append(("keep", policy))


class Lab:
    """Two clients, two hosts on two islands, one slice of client 1 on each."""

    def __init__(self) -> None:
        self.core = Script()
        self.now = 0.0
        self.flushes = 0
        self.services = Services()
        self.asked: list[Any] = []
        self.rim = Rim(
            self.core, self._clock, self._due, self.services, lambda rim: Desk(self), DATA_KEY
        )
        self.clients = [Peer(), Peer()]
        for peer in self.clients:
            self.rim.client_joined(self.rim.new_client("", 7), peer)
        self.hosts = {f"i{i}/h": Peer() for i in range(2)}
        for i, (name, peer) in enumerate(self.hosts.items()):
            self.rim.host_joined(HostSeen(name, f"i{i}", 1, "cpu", 10, 1, 2, f"d{i}", False), peer)
        for i in range(2):
            binding = SliceBinding(
                ONE + i, "kernel-1", f"i{i}", (1,), ("x",), ((f"i{i}/h", 0),), "cpu"
            )
            self.core.answer = lambda event, b=binding: [m.SliceBound("c", "kernel-1", b)]  # type: ignore[misc, assignment]
            self.say(1, "slice", slice=ONE + i, request=pack(SliceRequest((1,), ("x",))))
        self.core.answer = lambda event: []

    def _clock(self) -> float:
        self.now += 0.001
        return self.now

    def _due(self) -> None:
        self.flushes += 1

    def say(self, client: int, op: str, *buffers: bytes, **fields: Any) -> None:
        self.rim.from_client(f"kernel-{client}", op, fields, [memoryview(b) for b in buffers], 50)

    def records(self, client: int = 0) -> list[Record]:
        self.rim.diary.flush()
        return [
            r
            for f in self.clients[client].of("records")
            for r in record_encoding.read(f["records"])
        ]


def grants(run: int) -> list[m.Command]:
    return [
        m.Grant("c", "i0/h", run, "plan", 0, 3, 1, 40, -1, (None,), (ONE + 6,)),
        m.Grant("c", "i1/h", run, "plan", 0, 3, 1, 70, -1, (None,), (ONE + 6,)),
    ]


def submitted(lab: Lab, **more: Any) -> None:
    lab.say(1, "program", plan=pack(folded(plan_on((ONE, ONE + 1)))))
    lab.core.answer = lambda event: [m.ShareProgram("c", ("i0/h",), "plan"), *grants(ONE + 9)]
    lab.say(1, "submit", b"arg", run=ONE + 9, plan="plan", inputs=[None], outputs=[ONE + 6],
            arguments={0: 0}, **more)  # fmt: skip
