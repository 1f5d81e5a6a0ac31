"""Messages that are almost right, by the million, at every door; nobody else may notice.

``python -m tests.runtime.fuzz --inputs 1000000`` drives the real rim and the real core in
this process, with the real wire format before them, once for each door: of clients, of
hosts, of observers.  Whoever is behind the door says what its table allows, changed in one
place (:mod:`tests.runtime.mutate`), again, in another order, with numbers of others, or as
damaged bytes.  Hosts are played here; they believe what they are told, and say when it is
wrong.  Two good clients work all the time.  After every round it must hold that

* nothing was raised: not by the decoder, the rim, or the core; nothing is a bug of ours,
* the core's invariants hold,
* both good clients' runs have ended well, and their kept, published and taken values are there,
* a good client that watches could read every record,
* no host was told anything that real ones could not do,
* who was refused was told, and counted,
* nothing is left of the attacker when it has left.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from pathways_lab.core.diagnosis.stall_story import Stuck
from pathways_lab.core.program.folding import folded
from pathways_lab.core.program.layout import Layout
from pathways_lab.core.scheduling.policies import ProportionalShare
from pathways_lab.core.slices.topology import SliceRequest
from pathways_lab.runtime.client_messages import CLIENTS
from pathways_lab.runtime.host_messages import HOSTS, NOBODY
from pathways_lab.timeline.records import Event as Told
from pathways_lab.timeline.records import Sample
from pathways_lab.transport import record_encoding
from pathways_lab.transport.codec import pack
from pathways_lab.transport.edge import Door, Malformed, parsed
from pathways_lab.transport.framing import Decoder, Limits, WireError, encode
from tests.runtime import fuzz_command
from tests.runtime.door_messages import Messages
from tests.runtime.fuzz_lab import (
    EVIL_HOST,
    GOOD_HOSTS,
    LAYOUT,
    Broken,
    Closed,
    Lab,
    failing,
    function_of,
    plan_of,
    run_of,
)
from tests.runtime.mutate import Mutator, Said

ROUND = 500
"""Inputs between two looks; the attacker comes anew after each."""
_ANEW = 0.02


class ClientDoor:
    """An attacker that was invited.  Its link is closed by what is malformed, and it comes back.

    operations: those that it begins with, some of them more often.
    """

    door: Door = CLIENTS

    def __init__(self, lab: Lab) -> None:
        self.lab, rng = lab, lab.rng
        often = ("submit",) * 8 + ("program", "function", "drop") * 3
        self.operations: tuple[str, ...] = (*CLIENTS, *often)
        self._count = 9
        self._key, self._plans = "f", list[str]()
        pools: dict[Any, Callable[[], Any]] = {
            "slice": lambda: self._id(rng.choice((1, 1, 2, 3))),
            "run": lambda: self._some(),
            "buffer": lambda: self._some(),
            "race": lambda: self._id(rng.randrange(3)),
            "buffers": lambda: [self._some() for _ in range(rng.randrange(3))],
            "dropped": lambda: [self._some() for _ in range(rng.randrange(2))],
            "plans": lambda: [plan_of(lab.evil_number).key],
            "functions": lambda: [["f", self._id(1)]],
            "island": lambda: rng.choice(("i1", "i1", "i0", "nowhere")),
            "name": lambda: rng.choice(("weights", "mine", "other")),
            "whom": lambda: rng.choice(("ann", "evil", "")),
            "whose": lambda: rng.choice(("ann", "evil", "evil")),
            "orders": lambda: {EVIL_HOST: [0, 1]},
            Stuck: Stuck,
            SliceRequest: lambda: SliceRequest((rng.choice((1, 2)),), ("x",), "i1"),
            Layout: lambda: LAYOUT,
            ProportionalShare: ProportionalShare,
        }
        makers = {
            "submit": self._submit,
            "function": self._function,
            "program": self._program,
            "release-slice": lambda: {"slice": self._id(1 if rng.random() < 0.1 else 2)},
            "forget": lambda: {"plans": self._plans[:1], "functions": [["g", self._id(1)]]},
            "suspend": lambda: {"whose": "evil" if rng.random() < 0.1 else "ann"},
        }
        parcels: dict[str, Callable[[dict[str, Any]], Sequence[bytes]]] = {
            "submit": lambda fields: [b"1234"] * len(fields["arguments"]),
            "policy": lambda fields: [],
        }
        self.messages = Messages(rng, CLIENTS, pools, makers, parcels)

    @property
    def foreign(self) -> list[Any]:
        """What belongs to others."""
        return [g.high | n for g in self.lab.good for n in (1, 400, 500, 700, 1001)] + [
            "ann", "weights", "i0", GOOD_HOSTS[0], self.lab.good[0].number,
        ]  # fmt: skip

    def _id(self, count: int) -> int:
        return self.lab.evil_number << 32 | count

    def _some(self) -> int:
        """A number that was used, or is new."""
        self._count += self.lab.rng.random() < 0.3
        return self._id(self._count - self.lab.rng.choice((0, 0, 1, 2, 3)))

    def _submit(self) -> dict[str, Any]:
        given = self._some() if self.lab.rng.random() < 0.4 else None
        self._count += 1
        run, output = self._id(self._count), self._id(self._count)
        fields = run_of(self.lab.evil_number, run, output, given)
        if not given and self._plans and self.lab.rng.random() < 0.5:
            fields["plan"] = self._plans[-self.lab.rng.choice((1, 1, len(self._plans)))]
        return {**fields, "race": [self._id(1), 0] if self.lab.rng.random() < 0.1 else None}

    def _function(self) -> dict[str, Any]:
        """A new one: a key is given once."""
        self._key = f"f{self._some()}"
        return {**function_of(self._id(1)), "function": self._key}

    def _program(self) -> dict[str, Any]:
        """A new one, of a function that was announced."""
        plan = plan_of(self.lab.evil_number)
        (step,) = plan.steps
        if self.lab.rng.random() < 0.5:
            step = replace(step, node=replace(step.node, function=self._key))
        self._count += 1
        self._plans = [*self._plans[-2:], f"plan {self._count}"]
        return {"plan": pack(folded(replace(plan, key=self._plans[-1], steps=(step,))))}

    def right(self) -> Said:
        """A message as it should be."""
        return self.messages.one(self.lab.rng.choice(self.operations))

    def say(self, said: Said) -> None:
        """Raises Closed."""
        self.lab.say("evil", *said)

    def again(self) -> None:
        """The link was closed."""
        self.lab.leave("it sent a malformed message")
        self.lab.come()
        self._key, self._plans = "f", []


class HostDoor:
    """A device process that something went wrong in."""

    door: Door = HOSTS

    def __init__(self, lab: Lab) -> None:
        self.lab, rng = lab, lab.rng
        self._runs = 9
        about = record_encoding.about("p", "f", "evil", "a.py:1", 1, (0, 1))
        gang = record_encoding.Ended([about], 5, 0, 0, (), 0, True, (1.0,) * 4, ([1.0],) * 4)
        some = [
            record_encoding.write(Told("launched", 1.0, "i1", EVIL_HOST, 5, 0)),
            record_encoding.write(Sample("memory", 1.0, 5.0, "i1", EVIL_HOST)),
            record_encoding.segments("i1", EVIL_HOST, False, [gang], 0.0),
        ]
        pools: dict[Any, Callable[[], Any]] = {
            Stuck: Stuck,
            "records": lambda: rng.sample(some, rng.randrange(3)),
            "ended": lambda: [[self._run(), 0, [0.1]]],
            "resident": lambda: [self._id(rng.randrange(20))],
            "parked": lambda: [self._id(1)] if rng.random() < 0.2 else [],
            "moved": lambda: [self._id(1)] if rng.random() < 0.2 else [],
            "compiled": lambda: [["f", self._id(1), 0, None]],
            "run": self._run,
            "slice": lambda: self._id(rng.choice((1, 2))),
            "number": lambda: rng.randrange(9),
            "client": lambda: rng.choice((lab.evil_number, lab.good[0].number)),
        }
        self.messages = Messages(rng, HOSTS, pools, {}, {})

    @property
    def foreign(self) -> list[Any]:
        """What belongs to others."""
        return [g.high | n for g in self.lab.good for n in (1, 400, 500, 1001)]

    def _id(self, count: int) -> int:
        return self.lab.evil_number << 32 | count

    def _run(self) -> int:
        return self._id(self.lab.rng.randrange(max(0, self._runs - 3), self._runs + 1))

    def right(self) -> Said:
        """A message as it should be; now and then a client begins a run there."""
        if self.lab.rng.random() < 0.2:
            self._runs += 1
            run = run_of(self.lab.evil_number, self._id(self._runs), self._id(self._runs))
            self.lab.say("evil", "submit", run, [b"1234"])
        return self.messages.one(self.lab.rng.choice((*HOSTS, "report", "report")))

    def say(self, said: Said) -> None:
        """Raises Closed."""
        op, fields, buffers = said
        with failing(f"a host said {op} {fields!r:.300}"):
            try:
                self.lab.rim.from_host(EVIL_HOST, op, fields, [memoryview(b) for b in buffers], 1)
            except Malformed as error:
                raise Closed(str(error)) from None
        self.lab.rest()
        if op in ("closing", "leaving"):
            self.again()

    def again(self) -> None:
        """The link was closed: another process takes the place, and its client begins anew."""
        self.lab.rim.host_lost(EVIL_HOST, "it sent a malformed message")
        self.lab.reports.clear()
        self.lab.host_comes(EVIL_HOST)
        self.lab.leave("its host is gone")
        self.lab.come()
        self._runs = 9


class ObserverDoor:
    """A process that follows the lab, and has nothing to say: any message closes its link."""

    door: Door = NOBODY

    def __init__(self, lab: Lab) -> None:
        self.lab = lab
        self._clients = ClientDoor(lab)

    @property
    def foreign(self) -> list[Any]:
        """What belongs to others."""
        return self._clients.foreign

    def right(self) -> Said:
        """What a client would say."""
        return self._clients.right()

    def say(self, said: Said) -> None:
        """Raises Closed."""
        op, fields, buffers = said
        try:
            parsed(NOBODY, op, fields, buffers)
        except Malformed as error:
            raise Closed(str(error)) from None
        raise Broken(f"an observer was heard: {op}")

    def again(self) -> None:
        """Nothing of it was there."""


DOORS = {"clients": ClientDoor, "hosts": HostDoor, "observers": ObserverDoor}


class Fuzz:
    """inputs: delivered so far.  unreadable: of these, what was no message at all.

    closed: what closed the link.
    """

    def __init__(self, seed: int, door: str = "clients") -> None:
        self.rng = random.Random(seed)
        self.lab = Lab(self.rng)
        self.door = DOORS[door](self.lab)
        self.inputs = self.unreadable = self.closed = self.rounds = 0
        self.limits = Limits(header=1 << 20, buffers=64, body=1 << 20)

    def once(self, mutator: Mutator, sent: list[Said]) -> None:
        """One input."""
        rng, self.inputs = self.rng, self.inputs + 1
        chance = rng.random()
        if chance < 0.15 and sent:
            said = rng.choice(sent[-12:])  # again, a little later
        else:
            said = self.door.right()
            if chance > 0.45:
                said = mutator.said(said, tuple(self.door.door))
        for message in self._over_the_wire(said, mutator if rng.random() < 0.1 else None):
            sent.append(message)
            try:
                self.door.say(message)
            except Closed:
                self.closed += 1
                # What is malformed has changed nothing; to come anew each time takes long.
                if rng.random() < _ANEW:
                    self.door.again()
                    sent.clear()

    def _over_the_wire(self, said: Said, mutator: Mutator | None) -> list[Said]:
        """What arrives; nothing when the bytes are no messages, which closes the link."""
        try:
            data = b"".join(bytes(part) for part in encode(*said))
            if mutator is not None:
                data = mutator.damaged(data)
            messages = Decoder(self.limits).feed(data)
        except WireError:
            self.unreadable += 1
            return []
        return [(m.op, m.fields, [bytes(b) for b in m.buffers]) for m in messages]

    def round(self) -> None:
        """An attacker's stay."""
        sent: list[Said] = []
        for number in range(ROUND):
            if number % 50 == 0:
                # Else a slice that it has released would end all that hangs on it.
                self.door.again()
                sent.clear()
                mutator = Mutator(self.rng, self.door.foreign)
            self.once(mutator, sent)
            if number % 100 == 99:
                for good in self.lab.good:
                    good.work()
                self.lab.rim.look()
                self.lab.rest()
        self.rounds += 1
        self.lab.look()


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    parser = fuzz_command.parser(__doc__)
    parser.add_argument("--door", choices=DOORS, help="only to this one")
    chosen = parser.parse_args(arguments)
    for door in [chosen.door] if chosen.door else DOORS:
        fuzz = Fuzz(chosen.seed, door)
        tried = fuzz_command.drive(fuzz, chosen.inputs, fuzz.round, f"{door}: ")
        print(
            f"{tried}: {fuzz.unreadable:,} no messages, {fuzz.closed:,} closed the link,"
            f" {fuzz.lab.rim.rejected:,} closed or refused and counted, nothing raised; two other"
            f" clients worked {fuzz.rounds * (ROUND // 100 + 1):,} times, always well",
            flush=True,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
