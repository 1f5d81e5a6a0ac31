"""Handles that clients share: who may read, and what keeps the bytes."""

from __future__ import annotations

import pytest

from pathways_lab.core import messages
from pathways_lab.core.messages import (
    BuffersDropped,
    ClientLeft,
    Event,
    FreeBuffers,
    HandlePublished,
    HandleTaken,
    HandleUnpublished,
    HostLost,
    Refused,
    SliceFreed,
    Taken,
)
from pathways_lab.testing import Script, Sketch
from tests.core.stories import told

ANN, BOB = "kernel-1", "bob"
NUMBER = 2 << 32 | 1
"""What Bob calls what he has taken."""


class Pair:
    """Ann has published 8 bytes as "w"; Bob has a slice of his own."""

    def __init__(self, arrive: bool = True) -> None:
        self.script = Script()
        self.script.client(BOB)
        self.anns = self.script.slice(2)
        self.bobs = self.script.slice(2, client=BOB)
        self.buffer = self.script.upload(self.anns, 8, arrive=arrive)
        self.say(HandlePublished, ANN, name="w", buffers=(self.buffer,), about=b"8 bytes")

    def say(self, kind: type[Event], client: str, **fields: object) -> None:
        self.script.send(kind(time=0.0, cause="test", client=client, **fields))  # type: ignore[call-arg, arg-type]

    def take(self, number: int = NUMBER) -> None:
        self.say(HandleTaken, BOB, name="w", buffers=(number,))

    def drop(self, client: str, number: int) -> None:
        self.say(BuffersDropped, client, buffers=(number,))

    @property
    def freed(self) -> bool:
        return any(self.buffer in c.buffers for c in told(self.script, FreeBuffers))

    @property
    def used(self) -> int:
        return sum(self.script.control.state.store.ledger.used)

    def moves(self, *, donated: bool = False) -> Sketch:
        """Bob's program reads what lies on Ann's slice."""
        sketch = Sketch("read")
        (y,) = sketch.call("f", self.bobs, [sketch.input(self.anns, 8)], [8])
        return sketch.output(y)

    def refused(self) -> str:
        return self.script.refused[-1].failure.message


def test_who_takes_may_read_and_who_does_not_may_not() -> None:
    pair = Pair()
    pair.script.register(pair.moves(), client=BOB)
    assert "belongs to another client" in pair.refused()
    pair.take()
    (taken,) = told(pair.script, Taken)
    assert (taken.stored, taken.slices) == ((pair.buffer,), (pair.anns,))
    assert taken.about == b"8 bytes"
    assert pair.script.resolved[NUMBER] is None
    count = len(pair.script.refused)
    plan = pair.script.register(pair.moves(), client=BOB)
    run = pair.script.submit(plan, [NUMBER], client=BOB)
    pair.script.finish_all()
    assert pair.script.ended[run.run].outcome == "finished"
    assert len(pair.script.refused) == count
    # The number of the one is nothing in the hands of the other.
    for client, number in ((BOB, pair.buffer), (ANN, NUMBER)):
        pair.script.submit(plan, [number], client=client)
        assert len(pair.script.refused) > count
        pair.drop(client, number)
        assert "it is unknown" in pair.refused()
    assert not pair.freed


@pytest.mark.parametrize("last", ["taker", "owner", "name"])
def test_the_last_who_has_it_frees_it(last: str) -> None:
    pair = Pair()
    pair.take()
    ends = {
        "taker": lambda: pair.drop(BOB, NUMBER),
        "owner": lambda: pair.drop(ANN, pair.buffer),
        "name": lambda: pair.say(HandleUnpublished, ANN, name="w"),
    }
    final = ends.pop(last)
    for end in ends.values():
        end()
        assert (pair.freed, pair.used) == (False, 8)
    final()
    assert (pair.freed, pair.used) == (True, 0)


def test_what_was_taken_outlives_its_owner_and_nothing_else_does() -> None:
    pair = Pair()
    pair.take()
    other = pair.script.upload(pair.anns, 16)
    plan = pair.script.register(pair.moves(), client=BOB)
    pair.say(ClientLeft, ANN, reason="killed")
    assert any(other in c.buffers for c in told(pair.script, FreeBuffers))
    assert (pair.freed, pair.used) == (False, 8)
    assert not pair.script.control.sharing.names
    assert pair.anns in pair.script.control.slices, "its slice stays as long as the bytes"
    run = pair.script.submit(plan, [NUMBER], client=BOB)
    pair.script.finish_all()
    assert pair.script.ended[run.run].outcome == "finished"
    pair.drop(BOB, NUMBER)
    pair.drop(BOB, run.outputs[0])
    assert (pair.freed, pair.used) == (True, 0)
    assert [c.slice for c in told(pair.script, SliceFreed)] == [pair.anns]
    pair.script.submit(plan, [NUMBER], client=BOB)
    assert "was released" in pair.refused()


def test_a_taker_who_leaves_takes_only_his_reference_along() -> None:
    pair = Pair()
    pair.take()
    pair.say(ClientLeft, BOB, reason="killed")
    assert (pair.freed, pair.used) == (False, 8)
    assert not pair.script.control.state.store.references
    pair.say(ClientLeft, ANN, reason="killed")
    assert (pair.freed, pair.used) == (True, 0)
    assert not pair.script.control.slices


def test_takers_hear_what_becomes_of_it() -> None:
    pair = Pair(arrive=False)
    pair.take()
    assert NUMBER not in pair.script.resolved
    pair.say(ClientLeft, ANN, reason="killed")  # in the middle of its upload
    failure = pair.script.resolved[NUMBER]
    assert failure is not None
    assert "left: killed" in failure.message


def test_lost_hosts_fail_it_for_everybody() -> None:
    pair = Pair()
    pair.take()
    pair.script.send(HostLost(0.0, "test", "island0/host0", "killed"))
    assert pair.script.resolved[NUMBER] is not None
    assert pair.script.resolved[pair.buffer] is not None
    pair.drop(BOB, NUMBER)
    pair.say(HandleUnpublished, ANN, name="w")
    pair.drop(ANN, pair.buffer)
    assert not pair.script.control.state.store.buffers


def test_what_is_shared_is_not_donated() -> None:
    pair = Pair()
    sketch = Sketch("donate")
    (y,) = sketch.call("g", pair.anns, [sketch.input(pair.anns, 8)], [8], donated=(0,))
    plan = pair.script.register(sketch.output(y))
    pair.script.submit(plan, [pair.buffer])
    assert "cannot be donated: it is also kept by its handle and its name 'w'" in pair.refused()
    control = pair.script.control
    told_before = control.why_not_donated(ANN, pair.buffer)
    assert told_before is not None
    assert told_before[0] == pair.refused()
    assert control.why_not_donated(BOB, pair.buffer) is None, (
        "others' buffers are nobody's business"
    )
    pair.say(HandleUnpublished, ANN, name="w")
    assert control.why_not_donated(ANN, pair.buffer) is None
    run = pair.script.submit(plan, [pair.buffer])
    pair.script.finish_all()
    assert pair.script.ended[run.run].outcome == "finished"
    pair.say(HandlePublished, ANN, name="w", buffers=(pair.buffer,))
    assert "was donated" in pair.refused()


def test_nothing_is_computed_on_anothers_slice() -> None:
    pair = Pair()
    pair.take()
    sketch = Sketch("intrude")
    (y,) = sketch.call("h", pair.anns, [sketch.input(pair.anns, 8)], [8])
    pair.script.register(sketch.output(y), client=BOB)
    assert "read there, and no more" in pair.refused()


def test_names() -> None:
    pair = Pair()
    newer = pair.script.upload(pair.anns, 8)
    pair.say(
        HandlePublished, BOB, name="w", buffers=(pair.script.upload(pair.bobs, 8, client=BOB),)
    )
    assert "kernel-1 has published something under this name" in pair.refused()
    pair.say(HandlePublished, BOB, name="v", buffers=(pair.buffer,))
    assert "only a client that has a handle" in pair.refused()
    pair.say(HandleUnpublished, BOB, name="w")
    assert "not published by this client" in pair.refused()
    pair.say(HandleTaken, ANN, name="w", buffers=(1 << 32 | 99,))
    assert "has the handle" in pair.refused()
    pair.say(HandleTaken, BOB, name="x", buffers=(NUMBER,))
    assert "there is w" in pair.refused()
    pair.drop(ANN, pair.buffer)
    assert not pair.freed
    pair.say(HandlePublished, ANN, name="w", buffers=(newer,))  # moves the name
    assert pair.freed
    pair.take()
    pair.take()
    assert "in use" in pair.refused()
    assert told(pair.script, Taken)[-1].stored == (newer,)


def test_what_was_taken_can_be_published_and_outlives_its_owner_and_its_publisher() -> None:
    pair = Pair()
    pair.take()
    pair.script.client("eve")
    pair.say(HandlePublished, BOB, name="again", buffers=(NUMBER,), about=b"bob's words")
    pair.say(HandleTaken, "eve", name="again", buffers=(3 << 32 | 1,))
    assert told(pair.script, Taken)[-1].stored == (pair.buffer,)
    assert told(pair.script, Taken)[-1].about == b"bob's words"
    pair.say(ClientLeft, ANN, reason="left")
    assert pair.script.control.sharing.names_of(BOB) == ["again"]
    pair.say(ClientLeft, BOB, reason="left")
    assert not pair.script.control.sharing.names
    assert not pair.freed
    pair.drop("eve", 3 << 32 | 1)
    assert (pair.freed, pair.used) == (True, 0)


def test_one_name_for_many_is_taken_as_a_whole_or_not_at_all() -> None:
    pair = Pair()
    control = pair.script.control
    other = pair.script.upload(pair.anns, 16)
    pair.say(HandlePublished, ANN, name="w", buffers=(pair.buffer, other, other))
    assert (control.count_published("w"), control.count_published("x")) == (3, 0)
    for numbers in ((NUMBER,), (NUMBER, NUMBER + 1, NUMBER + 1)):
        pair.say(HandleTaken, BOB, name="w", buffers=numbers)
    assert [r.failure.message for r in pair.script.refused[-2:]] == [
        "name w: it is 3 arrays, and 1 were asked for: take it again",
        "name w: two of them have the same number",
    ]
    numbers = (NUMBER, NUMBER + 1, NUMBER + 2)
    pair.say(HandleTaken, BOB, name="w", buffers=numbers)
    (taken,) = told(pair.script, Taken)
    assert (taken.buffers, taken.stored) == (numbers, (pair.buffer, other, other))
    assert all(pair.script.resolved[number] is None for number in numbers)
    # The name goes on to one of them: the others lose it, and nobody else has those.
    pair.say(HandlePublished, ANN, name="w", buffers=(other,))
    for number in (*numbers, pair.buffer):
        pair.drop(ANN if number == pair.buffer else BOB, number)
    assert (pair.freed, pair.used) == (True, 16)
    gone = pair.script.upload(pair.anns, 8)
    pair.drop(ANN, gone)
    pair.say(HandlePublished, ANN, name="w", buffers=(other, gone))
    assert "only a client that has a handle" in pair.refused()
    assert control.count_published("w") == 1, "a refused publication changes nothing"


EVES = 3 << 32 | 1


class Given(Pair):
    """Ann has given Bob 8 bytes more, as "g"; Eve is there too."""

    def __init__(self) -> None:
        super().__init__()
        self.script.client("eve")
        self.gift = self.script.upload(self.anns, 8)
        self.give(self.gift)

    def give(self, *buffers: int, by: str = ANN, to: str = BOB) -> None:
        self.say(HandlePublished, by, name="g", buffers=buffers, to=to)

    def accept(self, client: str = BOB, number: int = NUMBER, giver: str = ANN) -> None:
        self.say(HandleTaken, client, name="g", buffers=(number,), giver=giver)

    @property
    def gift_freed(self) -> bool:
        return any(self.gift in c.buffers for c in told(self.script, FreeBuffers))


def test_what_is_given_is_taken_by_one_client_once() -> None:
    pair = Given()
    stored, where = (pair.gift,), (pair.anns,)
    assert told(pair.script, messages.Given)[-1] == messages.Given(
        "test", ANN, "g", BOB, stored, where, b""
    )
    pair.accept("eve", EVES)
    assert pair.refused() == "name g: nothing is published under this name; there is w"
    pair.accept()
    assert told(pair.script, Taken)[-1].stored == (pair.gift,)
    pair.accept(number=NUMBER + 1)
    assert "nothing is published under this name" in pair.refused()
    pair.drop(ANN, pair.gift)
    assert not pair.gift_freed
    pair.drop(BOB, NUMBER)
    assert pair.gift_freed


def test_names_of_what_is_given_are_between_two_clients() -> None:
    pair = Given()
    pair.give(pair.gift, to="eve")
    assert len(told(pair.script, Refused)) == 0
    pair.give(pair.gift)
    assert "bob was given something of this name and has not taken it yet" in pair.refused()
    pair.give(pair.gift, to="nobody")
    assert "there is no client 'nobody' to whom to give it; there is bob, eve" in pair.refused()
    pair.give(pair.gift, to=ANN)
    assert "given to the client that has it" in pair.refused()
    # The same name is another one for another giver, and for everybody.
    eves = pair.script.slice(1, client="eve")
    other, common = (pair.script.upload(eves, 8, client="eve") for _ in range(2))
    count = len(told(pair.script, Refused))
    pair.give(other, by="eve")
    pair.say(HandlePublished, "eve", name="g", buffers=(common,))
    for number, (giver, stored) in enumerate((("eve", other), (ANN, pair.gift), ("", common))):
        pair.accept(giver=giver, number=NUMBER + number)
        assert told(pair.script, Taken)[-1].stored == (stored,)
    assert len(told(pair.script, Refused)) == count


@pytest.mark.parametrize("end", ["taken back", "giver leaves", "taker leaves"])
def test_what_is_given_ends_without_being_taken(end: str) -> None:
    pair = Given()
    pair.drop(ANN, pair.gift)
    assert not pair.gift_freed
    if end == "taken back":
        pair.say(HandleUnpublished, ANN, name="g")
    else:
        pair.say(ClientLeft, ANN if end == "giver leaves" else BOB, reason="killed")
    assert pair.gift_freed
    assert not any(pair.script.control.sharing.gifts.values())


def test_what_is_given_is_not_donated_meanwhile() -> None:
    pair = Given()
    assert pair.script.control.why_not_donated(ANN, pair.gift) == (
        f"buffer {pair.gift} (upload) cannot be donated: it is also kept by its handle and bob,"
        " to whom it was given",
        "unpublish it and wait until its takers drop it, or do not donate it",
    )
