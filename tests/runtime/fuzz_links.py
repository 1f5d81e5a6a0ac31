"""Almost right frames on a link, by the million: what lies below the tables of all doors.

``python -m tests.runtime.fuzz_links --inputs 1000000`` gives a link what another one sends:
messages whose buffers follow, or lie in shared memory, what links say to each other, and the
greeting of whoever connects; each with one thing changed in its header, its fields, its bytes
or the descriptor beside it.  It must hold that

* every frame is read, or is a WireError (or LinkClosed): nothing else is raised;
* no buffer is given out that the message does not have, nor memory beyond the limits taken;
* all descriptors and all shared memory are given back when the link is closed.
"""

from __future__ import annotations

import os
import random
import socket
import sys
from collections.abc import Sequence
from typing import Any

import msgpack

from pathways_lab.transport import auth, link, shared_memory
from pathways_lab.transport.auth import AuthenticationError, Initiator
from pathways_lab.transport.framing import Decoder, Limits, WireError, encode
from pathways_lab.transport.handshake import Arrival, Refused
from pathways_lab.transport.link import Link, LinkClosed
from pathways_lab.transport.shared_memory import SPAN, Arena
from tests.runtime import fuzz_command
from tests.runtime.mutate import Mutator

LIMITS = Limits(header=1 << 16, buffers=64, body=1 << 20)
KEY = b"k" * 32
GREETINGS = 0.02
"""Of the inputs, those that are a new connection."""

Head = list[Any]
"""What a frame begins with: operation, fields, lengths, and perhaps where the buffers lie."""


def heads() -> list[Head]:
    """A frame of each kind, as it should be."""
    sizes = [100, 0, 5000]
    between: dict[str, dict[str, Any]] = {
        link._RETURN: {"parts": [0]},
        link._OFFER: {"size": SPAN},
        link._TAKEN: {"taken": True},
        link._COUNT: {"sent": 0},
        link._ASK: {"asked": 1.0},
        link._TELL: {"asked": 1.0, "clock": 2.0},
    }
    return [
        ["put", {"a": 1, "b": [1, "x", None]}, []],
        ["put", {"a": 1}, sizes],
        ["put", {"a": 1}, sizes, 0],
        ["put", {"a": 1}, sizes, 1 << 16],
        *[[op, fields, []] for op, fields in between.items()],
    ]


class Nobody:
    """The reactor of a link that is not read by one."""

    def wants_write(self, link: Link) -> None: ...

    def wants_close(self, link: Link, reason: str, broken: bool = False) -> None: ...

    def wants_return(self, link: Link) -> None: ...

    def is_current(self) -> bool:
        return True


class Fuzz:
    """inputs: so far.  read: messages that were."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.mutator = Mutator(self.rng, [SPAN, SPAN + (1 << 16), 4096, 1 << 40])
        self.known = heads()
        self.inputs = self.read = 0
        self.open()

    def open(self) -> None:
        """A link that shares memory, its other end's arena mapped or not."""
        self.ends = socket.socketpair()
        decoder = Decoder(LIMITS)
        self.link = Link(Nobody(), self.ends[0], "peer", {}, decoder)
        self.link.share(connected=False)
        self.decoder = decoder
        self.offered = False

    def close(self) -> None:
        """Nothing of it is left."""
        self.link.shut("enough")
        borrower = self.link._borrower
        assert borrower is None or not borrower._arrived
        for end in self.ends:
            end.close()

    def frame(self) -> bytes:
        """One input."""
        rng, head = self.rng, self.rng.choice(self.known)
        if rng.random() < 0.85:
            head = self.mutator.value(head)
        try:
            packed: bytes = msgpack.packb(head)
        except (ValueError, OverflowError):
            packed = b""
        if rng.random() < 0.1:
            packed = self.mutator.damaged(packed)
        length = len(packed) if rng.random() < 0.98 else self.mutator.value(len(packed))
        length = length if type(length) is int and 0 <= length < 1 << 32 else 0
        lengths = head[2] if isinstance(head, list) and len(head) == 3 else []
        known = isinstance(lengths, list) and all(type(n) is int for n in lengths)
        body = sum(lengths) if known and rng.random() < 0.9 else rng.randrange(100)
        return length.to_bytes(4, "big") + packed + b"z" * max(0, min(body, 1 << 17))

    def once(self) -> None:
        """One input; after what is wrong, another link."""
        self.inputs += 1
        if self.rng.random() < GREETINGS:
            return self.greet()
        if not self.offered and self.rng.random() < 0.5:
            self.offer()
        try:
            messages = self.decoder.feed(self.frame())
            for message in self.link.admit(messages):
                self.read += 1
                assert sum(len(data) for data in message.buffers) <= LIMITS.body
            self.link.give_back()
        except (WireError, LinkClosed):
            self.close()
            self.open()

    def offer(self) -> None:
        """The other end's arena comes, sparse: smaller, larger or not sealed, now and then."""
        self.offered = True
        borrower = self.link._borrower
        if borrower is None:
            return
        size = self.rng.choice((SPAN, SPAN, SPAN, 1 << 20, 4 * SPAN))
        arena = Arena(size)
        descriptor = os.dup(arena.descriptor)
        if self.rng.random() < 0.1:
            os.close(descriptor)
            descriptor = os.memfd_create("unsealed")
            os.ftruncate(descriptor, size)
        borrower._arrived.append(descriptor)
        try:
            self.link.admit(self.decoder.feed(b"".join(encode(link._OFFER, {"size": size}))))
            memory = borrower._memory
            assert memory is None or len(memory) <= SPAN, "more than the limit was mapped"
        except WireError:
            self.close()
            self.open()

    def greet(self) -> None:
        """Somebody connects."""
        near, far = socket.socketpair()
        with near, far:
            far.setblocking(False)
            arrival, initiator = Arrival(near, KEY, LIMITS), Initiator(KEY)
            steps = self.rng.randrange(3)
            try:
                far.sendall(self._spoilt(initiator.greeting(), steps == 0))
                arrival.step()
                answer = initiator.answer(far.recv(auth.REPLY_BYTES))
                hello = b"".join(encode("hello", self.mutator.fields({"role": "client"})))
                far.sendall(self._spoilt(answer, steps == 1) + self._spoilt(hello, steps == 2))
                self.read += bool(arrival.step())
            except (AuthenticationError, WireError, Refused, OSError):
                return

    def _spoilt(self, data: bytes, whether: bool) -> bytes:
        return self.mutator.damaged(data) if whether else data


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    chosen = fuzz_command.parser(__doc__).parse_args(arguments)
    if not shared_memory.SUPPORTED:
        print("there is no shared memory here: links are tried without")
    fuzz = Fuzz(chosen.seed)
    before = len(os.listdir("/proc/self/fd"))
    tried = fuzz_command.drive(fuzz, chosen.inputs, fuzz.once)
    fuzz.close()
    assert len(os.listdir("/proc/self/fd")) <= before, "descriptors are left"
    print(f"{tried}: {fuzz.read:,} messages read, nothing else raised")
    return 0


if __name__ == "__main__":
    sys.exit(main())
