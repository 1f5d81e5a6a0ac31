"""Malformed, replayed and foreign messages, by the million; another client must notice nothing.

``python -m tests.runtime.fuzz --inputs 1000000`` drives the real rim and the real core
in this process, with the real wire format before them: messages of every kind that
clients send are made, changed at random (fields, numbers, types, other clients' ids,
bytes of the encoded message, repeats) and delivered.  Hosts are played here, and end
everything at once.  After every round it must hold that

* nothing was raised: not by the decoder, the rim, or the core,
* the core's invariants hold,
* the other client's run has ended well and its kept value is still there,
* who was refused was told, and counted,
* nothing is left of the attacker when it has left.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Sequence
from typing import Any

from pathways_lab.core.control import Control
from pathways_lab.core.errors import Failure
from pathways_lab.core.invariants import check
from pathways_lab.core.layout import Layout
from pathways_lab.core.lowering import lower
from pathways_lab.core.policies import FIFO
from pathways_lab.core.program import Call, Line, Plan, Program, Signature, Value
from pathways_lab.core.topology import SliceRequest
from pathways_lab.runtime.codec import pack, unpack
from pathways_lab.runtime.registry import HostSeen
from pathways_lab.runtime.rim import Rim
from pathways_lab.runtime.wire import Decoder, Letter, Limits, WireError, encode
from tests.runtime.rim_kit import Peer, Services, ticket

ROUND = 500
"""Inputs between two looks; the attacker comes anew after each."""
HOSTS = ("i0/h0", "i0/h1")
Said = tuple[str, dict[str, Any], list[bytes]]


class Desk:
    """Nobody's code gets this far."""

    def try_out(self, client: str, request: int, name: str, code: Any) -> None:
        raise AssertionError(f"code of {client} was taken")

    def ask(self, command: Any) -> None:
        raise AssertionError("nobody may have set a policy")

    def keep(self, policy: Any) -> None:
        """A built-in one."""


class HostPeer(Peer):
    """A host that does what it is told, at once."""

    def __init__(self, lab: Lab, name: str) -> None:
        super().__init__()
        self.lab, self.name = lab, name

    def forward(self, letter: Letter) -> int:
        op, fields = letter.op, letter.fields
        assert fields is not None
        if op == "prepare":
            done = [(fields["function"], fields["slice"], 0, None)]
            self.lab.reports.append((self.name, {"compiled": done}))
        elif op == "grant":
            steps = range(fields["first"], fields["last"])
            done = [(fields["run"], step, 0.001) for step in steps]
            self.lab.reports.append((self.name, {"finished": done}))
        return 100


class ClientPeer(Peer):
    """Counts what is refused, and remembers the ends of runs."""

    def __init__(self) -> None:
        super().__init__()
        self.refused = 0
        self.internal: list[str] = []
        self.ended: dict[int, str] = {}
        self.lost: list[int] = []

    def forward(self, letter: Letter) -> int:
        op, fields = letter.op, letter.fields
        assert fields is not None
        if op == "refused":
            self.refused += 1
            failure = unpack(Failure, fields["failure"])
            if failure.kind == "internal":
                self.internal.append(f"{fields['subject']}: {failure.details}")
        elif op == "run-ended":
            self.ended[fields["run"]] = fields["outcome"]
        for buffers_, failure in fields.get("resolved", ()):
            self.lost += buffers_ if failure is not None else ()
        return 100


class Lab:
    """The rim and the core, two hosts, a client that works, and an attacker."""

    def __init__(self) -> None:
        self.control = Control()
        self.now = 0.0
        self.reports: list[tuple[str, dict[str, Any]]] = []
        desk: Any = Desk()
        self.rim = Rim(
            self.control, self._clock, lambda: None, Services(), lambda rim: desk, ticket
        )
        for name in HOSTS:
            seen = HostSeen(name, "i0", 2, "cpu", 1 << 50, 1, 2, "d", False, assembled=True)
            self.rim.host_joined(seen, HostPeer(self, name))
        self.good, self.good_number = self.join("good", owner=True)
        self.evil, self.evil_number = ClientPeer(), 0
        self.say("good", "quota", {"whom": "evil", "devices": 64, "nbytes": 1 << 40, "id": 1})
        for letter in letters(self.good_number)[:3]:
            self.say("good", *letter)
        high = self.good_number << 32
        self.kept = high | 500
        self.say("good", "submit", run_of(self.good_number, high | 400, self.kept), [b"1234"])
        self.runs = 1000
        self.check_good(high | 400)
        self.come()

    def _clock(self) -> float:
        self.now += 1e-5
        return self.now

    def join(self, name: str, owner: bool = False) -> tuple[ClientPeer, int]:
        """A client comes."""
        peer = ClientPeer()
        seen = self.rim.new_client(name, 1, owner)
        self.rim.client_joined(seen, peer)
        return peer, seen.number

    def come(self) -> None:
        """The attacker, with honest intentions at first."""
        self.evil, self.evil_number = self.join("evil")
        for letter in letters(self.evil_number)[:3]:
            self.say("evil", *letter)
        assert not self.evil.refused

    def say(
        self, name: str, op: str, fields: dict[str, Any], buffers: Sequence[bytes] = ()
    ) -> None:
        """A message of a client, and what hosts do about it."""
        self.rim.from_client(name, op, fields, [memoryview(b) for b in buffers], 100)
        while self.reports:
            host, report = self.reports.pop(0)
            self.rim.from_host(host, "report", report, [], 100)

    def check_good(self, run: int) -> None:
        """The other client has noticed nothing."""
        assert self.good.ended.pop(run, None) == "finished", f"run {run} did not end well"
        assert not self.good.refused, "it was refused something"
        assert not self.good.lost, f"it lost {self.good.lost}"
        kept = self.control.state.store.buffers.get(self.kept)
        assert kept is not None, "its kept value is gone"
        assert kept.state == "resident", "its kept value is gone"

    def look(self) -> None:
        """After every round."""
        assert not self.evil.internal, self.evil.internal[0]
        check(self.control)
        high = self.good_number << 32
        self.runs += 1
        run, output = high | self.runs, high | (1 << 20) + self.runs
        self.say("good", "submit", run_of(self.good_number, run, output, self.kept))
        self.check_good(run)
        self.say("good", "drop", {"buffers": [output]})
        self.rim.client_left("evil", "enough")
        state, registry = self.control.state, self.rim.registry
        assert {b.owner for b in state.store.buffers.values()} == {"good"}, "buffers are left"
        assert {r.binding.client for r in self.control.slices.values()} == {"good"}
        assert not state.runs
        assert not self.control.bookings.line
        assert {name for name, _ in registry.plans.values()} <= {"good"}
        assert not registry.programs
        assert not registry.arguments
        assert isinstance(registry.policy, FIFO)
        self.rim.diary.flush()
        self.come()


def plan_of(number: int) -> Plan:
    """One call on the client's slice."""
    where = number << 32 | 1
    layout = Layout((("x", 2),), ((),))
    values = tuple(Value((4,), "uint8", where, layout, 4, name) for name in ("in", "out"))
    signature = Signature("f", where, (layout,), (layout,))
    call = Call("f", where, (0,), (1,), (), "f", Line("a.py", 1, "f(x)"))
    return lower(Program(f"of {number}", values, (call,), (0,), (1,), {"f": signature}))


def run_of(number: int, run: int, output: int, given: int | None = None) -> dict[str, Any]:
    """A run of that program."""
    return {
        "run": run, "plan": plan_of(number).key, "inputs": [given], "outputs": [output],
        "priority": 0, "arguments": {0: 0} if given is None else {}, "hear": 7,
        "data": [["deadline", 1.0]],
    }  # fmt: skip


def letters(number: int) -> list[Said]:
    """Every message that a client sends, as it should be; the first three are a beginning."""
    high = number << 32
    where = high | 1
    function = {
        "function": "f", "slice": where, "kind": "export", "name": "f", "in_layouts": [],
        "out_layouts": [], "in_types": [], "out_types": [], "donated": [],
        "line": pack(Line("a.py", 1, "f(x)")), "loop": None,
    }  # fmt: skip
    request = pack(SliceRequest((2,), ("x",)))
    return [
        ("slice", {"slice": where, "request": request, "wait": True}, []),
        ("function", function, [b"code"]),
        ("program", {"plan": pack(plan_of(number))}, []),
        ("forget", {"plans": [plan_of(number).key], "functions": [["f", where]]}, []),
        ("submit", run_of(number, high | 10, high | 11), [b"1234"]),
        ("submit", run_of(number, high | 12, high | 13, high | 11), []),
        ("declare", {"buffer": high | 20, "slice": where, "nbytes": 4}, []),
        ("drop", {"buffers": [high | 11, high | 20]}, []),
        ("cancel", {"runs": [high | 12], "buffers": [high | 13], "id": high | 14}, []),
        ("release-slice", {"slice": high | 2}, []),
        ("slice", {"slice": high | 2, "request": request, "wait": True}, []),
        ("policy", {"policy": pack(FIFO()), "request": 1}, []),
        ("policy", {"name": "Mine", "request": 2}, [b"code"]),
        ("quota", {"whom": "good", "devices": 0, "nbytes": 0, "id": 5}, []),
        ("lease", {"island": "i0", "order": False, "patience": 1.0}, []),
        ("return-lease", {"island": "i0"}, []),
        ("publish", {"name": "mine", "buffers": [high | 11]}, [b"about"]),
        ("unpublish", {"name": "mine"}, []),
        ("take", {"name": "mine", "buffers": [high | 30]}, []),
        ("named", {"name": "mine", "id": 9}, []),
        ("stuck", {"seconds": 1.0, "id": 6}, []),
        ("accounts", {"id": 7}, []),
        ("donation", {"buffers": [high | 11], "id": 8}, []),
        ("memory", {"id": 8}, []),
        ("race", {"race": high | 1, "island": "i0", "orders": {"i0/h0": [0]}}, []),
        ("race-go", {"race": high | 1}, []),
        ("watch", {"on": False}, []),
        ("topology", {}, []),
    ]


class Mutator:
    """Changes messages.  other: the number of the client whose ids are tried."""

    def __init__(self, rng: random.Random, other: int) -> None:
        self.rng = rng
        self.other = other

    def value(self, old: Any) -> Any:
        """Something else in its place."""
        rng = self.rng
        kind = rng.randrange(12)
        if kind == 0 and isinstance(old, int):
            return old + rng.choice((-1, 1, 1 << 31, 1 << 32, -(1 << 40)))
        if kind <= 2 and isinstance(old, int):
            return (self.other << 32) | (old & 0xFFFFFFFF)
        if kind <= 5 and isinstance(old, int):
            return (self.other << 32) | rng.choice((1, 400, 500, 500, 1000))
        if kind <= 8 and isinstance(old, list) and old:
            place = rng.randrange(len(old))
            return [self.value(v) if n == place else v for n, v in enumerate(old)]
        if kind <= 6 and isinstance(old, dict) and old:
            return self.fields(old)
        if kind == 9 and isinstance(old, list):
            return old * rng.choice((0, 2, 50))
        return rng.choice(
            (None, True, -1, 0, 1 << 63, 1e308, float("nan"), "", "x" * 300, b"\xff", [], {},
             [[]], {"": 1}, "good", "i0", (self.other << 32) | 500)
        )  # fmt: skip

    def fields(self, old: dict[str, Any]) -> dict[str, Any]:
        """A field less, more, or another."""
        found = dict(old)
        names = list(found)
        for _ in range(self.rng.choice((1, 1, 1, 2, 3))):
            chance = self.rng.random()
            if names and chance < 0.15:
                found.pop(self.rng.choice(names), None)
            elif names and chance < 0.95:
                name = self.rng.choice(names)
                found[name] = self.value(found.get(name))
            else:
                found[self.rng.choice(("race", "client", "time", "cause", "loop"))] = self.value(1)
        return found

    def letter(self, letter: Said) -> Said:
        """A message that is wrong, perhaps."""
        op, fields, buffers = letter
        chance = self.rng.random()
        if chance < 0.05:
            op = self.rng.choice(("", "hello", "report", "grant", "x" * 100, "submit", "drop"))
        if chance < 0.9:
            fields = self.fields(fields)
        if self.rng.random() < 0.1:
            buffers = [b"z" * self.rng.choice((0, 1, 70_000))] * self.rng.choice((0, 1, 3))
        return op, fields, buffers

    def bytes(self, data: bytes) -> bytes:
        """An encoded message, damaged."""
        found = bytearray(data)
        for _ in range(self.rng.choice((1, 1, 2, 8))):
            if found:
                found[self.rng.randrange(len(found))] = self.rng.randrange(256)
        if self.rng.random() < 0.3:
            del found[self.rng.randrange(len(found) + 1) :]
        return bytes(found)


class Fuzz:
    """inputs: delivered so far.  unreadable: of these, what was no message at all."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.lab = Lab()
        self.inputs = self.unreadable = 0
        self.limits = Limits(header=1 << 20, buffers=64, body=1 << 20)

    def once(self, mutator: Mutator, known: list[Said], sent: list[Said]) -> None:
        """One input."""
        rng, self.inputs = self.rng, self.inputs + 1
        letter = rng.choice(known)
        chance = rng.random()
        if chance < 0.1 and sent:
            letter = rng.choice(sent)  # again, as it was
        elif chance < 0.85:
            letter = mutator.letter(letter)
        if rng.random() < 0.3:
            try:
                data = b"".join(bytes(part) for part in encode(*letter))
                messages = Decoder(self.limits).feed(mutator.bytes(data))
            except (WireError, TypeError, ValueError, OverflowError):
                # What could not even be encoded, or is no message: its link is closed.
                self.unreadable += 1
                return
            if not messages:
                self.unreadable += 1
            for message in messages:
                self.lab.say(
                    "evil", message.op, message.fields, [bytes(b) for b in message.buffers]
                )
            return
        sent.append(letter)
        self.lab.say("evil", *letter)

    def round(self) -> None:
        """An attacker's stay."""
        known = letters(self.lab.evil_number)
        mutator = Mutator(self.rng, self.lab.good_number)
        sent: list[Said] = []
        for _ in range(ROUND):
            self.once(mutator, known, sent)
        self.lab.look()


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--inputs", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args(arguments)
    fuzz, begun = Fuzz(chosen.seed), time.monotonic()
    while fuzz.inputs < chosen.inputs:
        fuzz.round()
        if fuzz.inputs % 100_000 == 0:
            print(f"{fuzz.inputs:,} inputs, {time.monotonic() - begun:.0f} s", flush=True)
    lab = fuzz.lab
    print(
        f"{fuzz.inputs:,} inputs in {time.monotonic() - begun:.0f} s: {fuzz.unreadable:,} no"
        f" messages, {lab.rim.rejected:,} rejected and counted, nothing raised; the other client"
        f" ended {lab.runs - 1000:,} runs, all well"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
