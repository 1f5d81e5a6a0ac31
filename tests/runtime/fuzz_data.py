"""Almost right messages at a host's data door, by the million; two clients at work notice nothing.

``python -m tests.runtime.fuzz_data --inputs 1000000`` drives a whole device process but its
sockets: the wire format, :class:`HostRim` with real CPU devices, and two clients whose values
are computed and read back.  The attacker is a client (and another host, where hosts send):
each message of each operation of the door with one thing changed, again, and out of order.
It must hold that

* nothing is raised behind the edge: a message is taken, or refused as what it is;
* the host lives, nobody but the attacker is closed, every value of the others is right, and
  none of theirs is given away;
* nothing of the attacker's is left when it has left.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from pathways_lab.core.errors import Failure
from pathways_lab.core.messages import Grant
from pathways_lab.core.program.folding import folded
from pathways_lab.core.slices.topology import SliceBinding
from pathways_lab.runtime import virtual_devices as bindings
from pathways_lab.runtime.arrays import as_bytes
from pathways_lab.runtime.data_messages import DATA, Part, Parts, upload_fields
from pathways_lab.runtime.devices import CpuRuntime
from pathways_lab.runtime.host.driver import HostRim
from pathways_lab.transport.auth import ticket_of
from pathways_lab.transport.clock_sync import Difference
from pathways_lab.transport.codec import pack, pack_fields
from pathways_lab.transport.framing import Decoder, Limits, WireError, encode
from pathways_lab.transport.handshake import Refused
from tests.runtime import fuzz_command
from tests.runtime.fake_control import Program
from tests.runtime.host_kit import HOST, binding, code, layout, wire
from tests.runtime.mutate import Mutator, Said

ROUND = 500
"""Inputs between two looks; the attacker comes anew after each."""
ANN, BOB, EVE = 5, 7, 11
PATIENCE = 60.0
LIMITS = Limits(header=1 << 20, buffers=64, body=1 << 20)
SIZE = 4


class Link:
    """One end of a link without a socket.  closed: why, once it is."""

    def __init__(self, holder: int, role: str, tag: str = "data") -> None:
        self.holder, self.tag = holder, tag
        self.name, self.peer = f"{role} {holder}", {"role": role}
        self.closed: str | None = None
        self.clock = Difference()
        self.said: list[tuple[str, dict[str, Any], list[bytes]]] = []

    def send(self, op: str, fields: dict[str, Any], buffers: Sequence[Any] = ()) -> int:
        """Raises WireError, as a real one does."""
        encode(op, fields, buffers)
        self.said.append((op, fields, [bytes(data) for data in buffers]))
        return 0

    def close(self, reason: str) -> None:
        self.closed = self.closed or reason


class Control(Link):
    """The control plane, as far as one host needs it."""

    def __init__(self) -> None:
        super().__init__(0, "control", "control")
        self.ready: set[Any] = set()
        self.wrong: list[str] = []
        self.rejected = 0

    def send(self, op: str, fields: dict[str, Any], buffers: Sequence[Any] = ()) -> int:
        encode(op, fields, buffers)
        if op == "rejected":
            self.rejected += 1
            if " refused " not in fields["reason"] or fields["client"] in (ANN, BOB):
                self.wrong.append(fields["reason"])
        elif op == "report":
            self.ready.update(fields.get("resident", ()))
            for run, first, times in fields.get("ended", ()):
                self.ready.update((run, step) for step, _ in enumerate(times, first))
            self.ready.update(entry[0] for entry in fields.get("compiled", ()))
            self.wrong += [str(entry) for entry in fields.get("failed", ())]
        return 0


class Client:
    """A client at work on the host: a value that it keeps, and runs whose results it reads."""

    def __init__(self, lab: Lab, number: int) -> None:
        self.lab, self.number = lab, number
        self.link = lab.come("client", number)
        self.numbers = itertools.count(number << 32 | 100)
        self.on = binding(number << 32 | 1, (2,), [0, 1])
        self.cut = layout(self.on, "a")
        lab.tell("bind", {"binding": pack(self.on)})
        kind = ((SIZE,), "float32"), self.cut
        self.double = code(lambda x: (x * 2,), self.on, [kind], [kind], name="double")
        lab.tell("prepare", wire(self.double), [self.double.blob])
        lab.wait(lambda: self.double.function in lab.control.ready)
        program = Program(f"of {number}").value("x", self.on.slice, *kind[0], self.cut)
        self.plan = program.call(self.double, ["x"], ["y"]).plan(["x"], ["y"])
        lab.tell("program", {"plan": pack(folded(self.plan)), "bindings": [pack(self.on)]})
        self.kept, self.data = self.put(), self.sent

    def put(self) -> int:
        """Upload something new; its number."""
        buffer = next(self.numbers)
        self.sent = np.full(SIZE, buffer % 1009, np.float32) + np.arange(SIZE, dtype=np.float32)
        fields = upload_fields(buffer, self.on.slice, [SIZE], "float32", self.cut)
        parts = [bytes(as_bytes(part)) for part in np.split(self.sent, 2)]
        self.lab.say(self.link, "put", {**fields, "devices": [0, 1]}, parts)
        self.lab.wait(lambda: buffer in self.lab.control.ready)
        return buffer

    def read(self, buffer: int) -> np.ndarray[Any, Any]:
        """The value of a buffer."""
        number = next(self.numbers)
        self.lab.say(self.link, "fetch", {"id": number, "buffer": buffer, "devices": [0, 1]})
        self.lab.wait(lambda: bool(self.link.said) or self.link.closed is not None)
        ((op, fields, buffers),) = self.link.said
        self.link.said.clear()
        assert (op, fields["id"]) == ("fetched", number), (op, fields)
        return np.frombuffer(b"".join(buffers), np.float32)

    def work(self) -> None:
        """Upload, compute, read back and drop; what it keeps is as it was."""
        given, sent, made = self.put(), self.sent, next(self.numbers)
        self.lab.grant(made, self.plan.key, given, made)
        assert np.array_equal(self.read(made), sent * 2)
        assert np.array_equal(self.read(self.kept), self.data)
        self.lab.tell("free", {"buffers": [given, made]})
        self.lab.control.ready -= {given}
        assert self.link.closed is None, self.link.closed


class Lab:
    """A host, what the control plane says to it, and who comes to its door."""

    def __init__(self) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.ends: list[str] = []
        self.key = b"k" * 32
        printed = sys.stdout
        runtime = CpuRuntime(HOST, 2, 1 << 30)
        self.rim = HostRim(
            HOST, "island0", runtime, self.key, f"unix:{self.folder.name}/d", self.ends.append
        )
        sys.stdout = printed
        self.control = Control()
        stand_in: Any = self.control
        self.rim._control = stand_in
        self.place = -1
        self.clients = [Client(self, ANN), Client(self, BOB)]
        self.tell("clients", {"newest": EVE, "present": [ANN, BOB, EVE]})

    def close(self) -> None:
        """Its slices mean nothing in this process any more."""
        self.rim.exchange.close()
        self.rim.reactor.close()
        bindings._resolvers.remove(self.rim.tenants.device)
        self.folder.cleanup()

    def handle(self, function: Callable[..., Any], *args: Any) -> None:
        """As the reactor does, with all that follows."""
        reactor, handled = self.rim.reactor, threading.Event()
        reactor.call_here(function, *args)
        reactor.call_here(handled.set)
        while not handled.is_set():  # a lane handles something just now
            time.sleep(0.0)
            reactor.call_here(handled.set)
        assert not self.ends, self.ends[0]

    def wait(self, condition: Callable[[], bool]) -> None:
        """Until other threads have done it."""
        deadline = time.monotonic() + PATIENCE
        while not condition():
            assert time.monotonic() < deadline, self.control.wrong
            time.sleep(0.0002)
            self.handle(self.rim._carrier.look)
            self.rim.reports.flush()

    def tell(self, op: str, fields: dict[str, Any], buffers: Sequence[bytes] = ()) -> None:
        """The control plane says something."""
        self.say(self.control, op, fields, buffers)

    def grant(
        self,
        run: int,
        plan: str,
        given: int | None,
        made: int,
        arguments: dict[int, int] | None = None,
        buffers: Sequence[bytes] = (),
    ) -> None:
        """The next place goes to this run of one step."""
        before, self.place = self.place, self.place + 1
        grant = Grant("", HOST, run, plan, 0, 1, 0, self.place, before, (given,), (made,))
        self.tell("grant", {**pack_fields(grant), "arguments": arguments}, buffers)
        self.wait(lambda: (run, 0) in self.control.ready)
        self.control.ready.discard((run, 0))

    def come(self, role: str, holder: int, **more: Any) -> Link:
        """Somebody with a key of the door."""
        link: Any = Link(holder, role)
        self.rim.desk.meet(link, {"role": role, "name": "x", **more})
        made: Link = link
        return made

    def say(
        self, link: Link, op: str, fields: dict[str, Any], buffers: Sequence[bytes] = ()
    ) -> None:
        """A message over a link."""
        views = [memoryview(bytearray(data)) for data in buffers]
        self.handle(self.rim._message, link, op, fields, views)

    def leave(self, link: Link, reason: str = "enough") -> None:
        """A link is closed."""
        self.handle(self.rim._closed, link, reason)


def messages(lab: Lab, stay: int = 0) -> list[Said]:
    """Every message of every operation of the door, as it should be: a client's are Eve's.

    stay: how often she was here before; what was dropped has no value any more.
    """
    high = EVE << 32
    one, two = binding(high | 1, (2,), [0, 1]), high | 1
    number = high + 100 * stay
    cut, whole = layout(one, "a"), layout(one, None)
    half, full = b"12345678", b"1234567812345678"

    def put(buffer: int, where: int, devices: list[int], parts: list[bytes], **more: Any) -> Said:
        form = cut if parts == [half] * len(parts) else whole
        fields = upload_fields(number + buffer, where, [SIZE], "float32", form)
        return "put", {**fields, "devices": devices, **more}, parts

    def ask(**fields: Any) -> Said:
        return "fetch", {"id": 5, "devices": [0, 1], **fields}, []

    def parts(*parts: Part, **fields: Any) -> Said:
        return "parts", pack_fields(Parts(high | 7, 0, parts, **fields)), [full] * len(parts)

    theirs = lab.clients[0].kept
    return [
        put(10, two, [0, 1], [half, half]),
        put(11, two, [0], [half]),
        put(11, two, [1], [half]),
        put(12, two, [0, 1], [full, full]),
        put(13, high | 2, [0, 1], [half, half], generation=2),
        put(14, high | 3, [0], [half]),
        put(15, two, [0, 1], [full], sources=[0, 0]),
        ask(buffer=number + 10),
        ask(buffer=number + 10, devices=[], slice=two, generation=0),
        ask(buffer=number + 99),
        ask(buffer=theirs, ticket=ticket_of(lab.key, theirs, EVE), leaf=0),
        ask(buffer=number + 14, slice=high | 3),
        parts(Part(1, ((0, 4),)), sent=1.5),
        parts(Part(0, ((0, 4),)), Part(1, ((0, 4),), (0, 4), (("island1/host0", 1),))),
        parts(failure=Failure("execute", "it failed")),
        ("parted", {}, []),
    ]


class Fuzz:
    """inputs: delivered so far.  unreadable: of these, what was no message at all."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.lab = Lab()
        self.inputs = self.unreadable = self.rounds = 0
        foreign = [self.lab.clients[0].kept, *[self.lab.clients[1].kept] * 3]
        # Another host may put anybody's shards: it is wrong here, and not a thief.
        self.mutators = {
            "client": Mutator(self.rng, [*foreign, ANN << 32 | 1, ANN, "island0/host1"]),
            "host": Mutator(self.rng),
        }
        bob = self.lab.clients[1]
        self.secrets = {bytes(as_bytes(part)) for part in np.split(bob.data, 2)}
        self.begin()

    def begin(self) -> None:
        """The attacker's slices: one here, one that is not known yet, one that lies elsewhere."""
        lab, high = self.lab, EVE << 32
        self.known = messages(lab, self.rounds)
        lab.tell("bind", {"binding": pack(binding(high | 1, (2,), [0, 1]))})
        away = SliceBinding(high | 3, "eve", "i", (2,), ("a",), (("g", 0), ("g", 1)), "cpu", 1)
        lab.rim.desk.moved[high | 3] = away
        lab.wait(lambda: lab.rim.tenants.where(high | 1) is not None)
        self.links = {"client": lab.come("client", EVE), "host": lab.come("host", 0)}

    def said(self, role: str) -> Iterator[Said]:
        """What comes of one input: nothing, when it is no message."""
        rng, mutator = self.rng, self.mutators[role]
        message = rng.choice(self.known)
        if rng.random() < 0.8:
            message = mutator.said(message, [*DATA])
        try:
            data = b"".join(bytes(piece) for piece in encode(*message))
            if rng.random() < 0.1:
                data = mutator.damaged(data)
            decoded = Decoder(LIMITS).feed(data)
        except WireError:
            decoded = []
        self.unreadable += not decoded
        for op, fields, buffers, _ in decoded:
            yield op, fields, [bytes(data) for data in buffers]

    def once(self) -> None:
        """One input."""
        self.inputs += 1
        lab, role = self.lab, self.rng.choice(("client", "client", "client", "host"))
        for op, fields, buffers in self.said(role):
            link = self.links[role]
            lab.say(link, op, fields, buffers)
            if link.closed is not None:
                lab.leave(link, link.closed)
                self.links[role] = self.come(role)
        for _, _, buffers in self.links["client"].said:
            assert not self.secrets.intersection(buffers), "it was given another's value"
        self.links["client"].said.clear()

    def come(self, role: str) -> Link:
        """The attacker comes again, with any greeting."""
        lab, holder = self.lab, EVE if role == "client" else 0
        hello = self.mutators[role].fields({"role": role, "name": "x"})
        link: Any = Link(holder, str(hello.get("role")))
        with contextlib.suppress(Refused):
            lab.rim.desk.meet(link, hello)
            lab.leave(link)
        return lab.come(role, holder)

    def round(self) -> None:
        """An attacker's stay, and a look at the others."""
        lab = self.lab
        for _ in range(ROUND):
            self.once()
        for client in lab.clients:
            client.work()
        for link in self.links.values():
            lab.leave(link)
        desk, high = lab.rim.desk, EVE << 32
        assert not desk._uploads, "uploads are left"
        assert not any(desk._early.values()), "early parts are left"
        assert not +desk._waiting, desk._waiting
        assert {link.holder for link in +desk._asked} <= {ANN, BOB}, "questions are left"
        lab.tell("unbind", {"slice": high | 1})
        kept = {number for number in lab.rim.launcher.buffers._slots if number >> 32 == EVE}
        assert not kept, f"values are left: {kept}"
        lab.rim.exchange._early.clear()  # what another host sent goes with its run
        assert not lab.control.wrong, lab.control.wrong[0]
        self.rounds += 1
        self.begin()


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    chosen = fuzz_command.parser(__doc__).parse_args(arguments)
    fuzz = Fuzz(chosen.seed)
    tried = fuzz_command.drive(fuzz, chosen.inputs, fuzz.round)
    print(
        f"{tried}: {fuzz.unreadable:,} no messages, {fuzz.lab.control.rejected:,} refused and"
        f" counted, nothing raised; two other clients did {2 * fuzz.rounds:,} runs, all right"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
