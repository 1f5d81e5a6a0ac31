"""Values that a client keeps stay when it leaves, on its account, and are its own again later."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pathways_lab.core.memory.quotas import Quota
from pathways_lab.core.messages import (
    BuffersDropped,
    ClientJoined,
    ClientLeft,
    Event,
    FreeBuffers,
    FunctionAnnounced,
    HandlePublished,
    HandleTaken,
    HandleUnpublished,
    HostLost,
    Prepare,
    ProgramsForgotten,
    QuotaChosen,
    SliceFreed,
    SliceReleased,
    SlicesKept,
)
from pathways_lab.core.messages.elastic import Answer
from pathways_lab.testing import Script, Sketch
from tests.core.stories import BROKEN, told

ANN, BOB = "ann", "bob"


class Ann:
    """She keeps 8 bytes per device as "w", on one of her two slices."""

    def __init__(self, keep: bool = True, **more: Any) -> None:
        self.script = Script(islands=2, **more)
        self.script.client(ANN)
        self.slice = self.script.slice(2, client=ANN, island="island0")
        self.other = self.script.slice(2, client=ANN, island="island0")
        self.w = self.script.upload(self.slice, 8, client=ANN)
        self.keep(self.w, keep)
        self._numbers = 0

    def say(self, kind: type[Event], client: str = ANN, **fields: object) -> None:
        self.script.send(kind(time=0.0, cause="test", client=client, **fields))  # type: ignore[call-arg, arg-type]

    def keep(
        self, buffer: int, keep: bool = True, name: str = "w", client: str = ANN, **more: object
    ) -> None:
        self.say(HandlePublished, client, name=name, buffers=(buffer,), keep=keep, **more)

    def take(self, name: str = "w", client: str = ANN) -> int:
        """The number of the reference."""
        self._numbers += 1
        number = (9 << 32) + self._numbers
        self.say(HandleTaken, client, name=name, buffers=(number,))
        return number

    def drop(self, buffer: int, client: str = ANN) -> None:
        self.say(BuffersDropped, client, buffers=(buffer,))

    def leave(self, client: str = ANN) -> None:
        self.say(ClientLeft, client, reason="killed")

    def join(self, client: str = ANN, owner: bool = True) -> None:
        self.say(ClientJoined, client, number=7, owner=owner)

    def free(self, buffer: int) -> bool:
        return any(buffer in c.buffers for c in told(self.script, FreeBuffers))

    @property
    def account(self) -> int:
        return self.script.control.state.accounts.of(ANN).nbytes

    @property
    def seats(self) -> dict[str, set[int]]:
        seats = self.script.control.keeping.seats
        return {client: seat.slices for client, seat in seats.items()}

    def step(self) -> Sketch:
        return Sketch("step").chain(self.slice, "step.f", nbytes=8)


def test_kept_values_and_their_slices_stay_and_nothing_else_does() -> None:
    ann = Ann()
    rest = ann.script.upload(ann.slice, 16, client=ANN)
    ann.leave()
    assert ann.free(rest)
    assert not ann.free(ann.w)
    assert ann.account == 16, "8 bytes on two devices"
    assert [c.slice for c in told(ann.script, SliceFreed)] == [ann.other]
    assert ann.seats == {ANN: {ann.slice}}
    assert told(ann.script, SlicesKept)[-1].slices == (ann.slice,)


def test_what_is_only_published_goes_with_its_client() -> None:
    ann = Ann(keep=False)
    ann.leave()
    assert ann.free(ann.w)
    assert not ann.seats
    assert not told(ann.script, SlicesKept)


def test_the_next_client_of_the_name_computes_with_them_and_compiles_nothing() -> None:
    ann = Ann()
    plan = ann.script.register(ann.step(), client=ANN)
    count = len(told(ann.script, Prepare))
    ann.leave()
    assert told(ann.script, ProgramsForgotten)[-1].plans == (plan.key,)
    ann.join()
    assert not ann.seats
    taken = ann.take()
    assert ann.script.resolved[taken] is None
    again = ann.script.register(ann.step(), client=ANN)
    run = ann.script.submit(again, [taken], client=ANN)
    ann.script.finish_all()
    assert ann.script.ended[run.run].outcome == "finished"
    assert len(told(ann.script, Prepare)) == count
    assert not ann.script.refused
    # The new one takes the place of the old one, whose bytes go with the last reference.
    ann.keep(run.outputs[0])
    assert not ann.free(ann.w)
    ann.drop(taken)
    assert ann.free(ann.w)
    assert ann.account == 16
    # A slice that is nobody's any more than hers can be given back.
    ann.say(SliceReleased, slice=ann.slice)
    ann.say(HandleUnpublished, name="w")
    ann.drop(run.outputs[0])
    assert ann.slice in [c.slice for c in told(ann.script, SliceFreed)]


def test_a_client_that_keeps_nothing_new_leaves_again_and_all_stays() -> None:
    ann = Ann()
    for _ in range(3):
        ann.leave()
        ann.join()
        assert ann.script.resolved[ann.take()] is None
    ann.leave()
    assert (ann.account, ann.seats) == (16, {ANN: {ann.slice}})


def test_runs_of_a_client_that_left_are_cancelled_and_what_it_kept_stays() -> None:
    ann = Ann()
    plan = ann.script.register(ann.step(), client=ANN)
    ran = ann.script.submit(plan, [ann.w], client=ANN)
    queued = [ann.script.submit(plan, [ran.outputs[0]], client=ANN) for _ in range(200)]
    ann.leave()
    ann.script.finish_all()
    assert not ann.script.control.state.runs, f"{len(queued)} runs are still there"
    assert not ann.free(ann.w)
    assert ann.account == 16


@pytest.mark.parametrize("killed", [False, True])
def test_what_is_to_be_kept_has_its_name_when_it_is_there(killed: bool) -> None:
    ann = Ann()
    plan = ann.script.register(ann.step(), client=ANN)
    run = ann.script.submit(plan, [ann.w], client=ANN)
    answers = len(told(ann.script, Answer))
    ann.keep(run.outputs[0])
    ann.drop(ann.w)
    if killed:
        ann.leave()
    assert not ann.free(ann.w), "the one before has the name"
    assert len(told(ann.script, Answer)) == answers
    ann.script.finish_all()
    assert ann.free(ann.w) is not killed
    assert ann.free(run.outputs[0]) is killed
    assert len(told(ann.script, Answer)) == answers + (not killed)
    assert ann.account == 16


def test_what_fails_is_not_kept() -> None:
    ann = Ann()
    plan = ann.script.register(ann.step(), client=ANN)
    run = ann.script.submit(plan, [ann.w], client=ANN)
    ann.keep(run.outputs[0])
    ann.script.finish(run.run, failure=BROKEN)
    ann.keep(run.outputs[0], name="other")
    assert [r.failure.message for r in ann.script.refused] == [BROKEN.message] * 2
    ann.leave()
    assert ann.script.control.sharing.names.keys() == {"w"}


def test_another_client_reads_them_and_computes_elsewhere() -> None:
    ann = Ann()
    ann.leave()
    ann.script.client(BOB)
    taken = ann.take(client=BOB)
    assert ann.script.resolved[taken] is None
    ann.script.register(ann.step(), client=BOB)
    assert "belongs to another client" in ann.script.refused[-1].failure.message
    ann.leave(BOB)
    assert ann.account == 16


@pytest.mark.parametrize("by", ["owner", "client"])
def test_an_owner_of_the_lab_ends_what_nobody_comes_back_for(by: str) -> None:
    ann = Ann()
    ann.leave()
    ann.join(BOB, owner=by == "owner")
    ann.say(HandleUnpublished, BOB, name="w")
    assert ann.free(ann.w) is (by == "owner")
    assert (ann.slice in ann.script.control.slices) is (by != "owner")
    assert bool(ann.seats) is (by != "owner")
    if by == "owner":
        assert told(ann.script, SlicesKept)[-1].slices is None
        assert ann.account == 0


def test_nobody_takes_a_name_back_while_its_client_is_there() -> None:
    ann = Ann()
    ann.join(BOB)
    ann.say(HandleUnpublished, BOB, name="w")
    assert "not published by this client" in ann.script.refused[-1].failure.message
    assert not ann.free(ann.w)


def test_a_seat_ends_with_its_hosts_as_a_whole_name() -> None:
    ann = Ann()
    far = ann.script.slice(2, client=ANN, island="island1")
    second = ann.script.upload(far, 8, client=ANN)
    ann.say(HandlePublished, ANN, name="both", buffers=(ann.w, second), keep=True)
    ann.leave()
    ann.script.send(HostLost(0.0, "test", "island1/host0", "killed"))
    assert ann.seats == {ANN: {ann.slice}}, "one name is left"
    assert "both" not in ann.script.control.sharing.names
    assert far not in ann.script.control.slices
    ann.script.send(HostLost(0.0, "test", "island0/host0", "killed"))
    assert not ann.seats
    assert not ann.script.control.slices
    ann.join()
    assert not ann.script.control.clients[ANN].slices


def test_what_is_kept_counts_in_the_quotas_of_its_client() -> None:
    ann = Ann()
    quota = Quota(devices=3, nbytes=24)
    ann.say(QuotaChosen, "kernel-1", whom=ANN, devices=quota.devices, nbytes=quota.nbytes)
    ann.leave()
    ann.join()
    assert sum(ann.script.control.state.resources.held_by(ANN).values()) == 2
    sketch = Sketch("new")
    plan = ann.script.register(sketch.output(*sketch.call("new.f", ann.slice, [], [8])), client=ANN)
    run = ann.script.submit(plan, [], client=ANN)
    ann.script.pass_time(1.0)
    failure = ann.script.ended[run.run].failure
    assert failure is not None
    assert "16 bytes of the quota of ann, 8 of 24 are free" in failure.message
    assert "kept by its name 'w'" in failure.message
    ann.say(HandleUnpublished, name="w")
    again = ann.script.submit(plan, [], client=ANN)
    ann.script.finish_all()
    assert ann.script.ended[again.run].outcome == "finished"


def test_functions_of_a_slice_that_goes_are_forgotten() -> None:
    ann = Ann()
    ann.say(FunctionAnnounced, function="f", slice=ann.slice)
    ann.leave()
    assert ("f", ann.slice) in ann.script.control.state.functions.records
    ann.say(HandleUnpublished, "kernel-1", name="w")
    assert ("f", ann.slice) not in ann.script.control.state.functions.records


STEPS = st.lists(
    st.tuples(
        st.sampled_from([ANN, BOB]),
        st.sampled_from(["leave", "join", "slice", "upload", "keep", "ahead", "publish", "give",
                         "end", "take", "drop", "run", "finish", "release", "lose"]),
        st.integers(0, 3),
    ),
    max_size=40,
)  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(STEPS)
def test_the_invariants_hold_whatever_clients_do(steps: list[tuple[str, str, int]]) -> None:
    ann = Ann()  # the script checks the invariants after each event
    script = ann.script
    here, mine = {ANN}, {ANN: [ann.w], BOB: []}
    slices: dict[str, list[int]] = {ANN: [ann.slice, ann.other], BOB: []}
    for client, what, number in steps:
        if (
            what == "lose"
            and number == 0
            and "island0/host0" in script.control.state.resources.hosts
        ):
            script.send(HostLost(0.0, "test", "island0/host0", "killed"))
        elif what == "finish":
            script.finish_all()
        elif what == "join" and client not in here:
            ann.join(client)
            here.add(client)
            slices[client] = sorted(script.control.clients[client].slices)
            mine[client] = []
        elif client not in here:
            continue
        elif what == "leave":
            ann.leave(client)
            here.remove(client)
        elif what == "slice":
            slices[client].append(script.slice(1, client=client, island="island1"))
        elif what == "upload" and slices[client]:
            on = slices[client][number % len(slices[client])]
            mine[client].append(script.upload(on, 8, client=client))
        elif what in ("keep", "ahead", "publish") and mine[client]:
            buffer, name = mine[client][number % len(mine[client])], f"n{number}"
            ann.keep(buffer, what != "publish", name, client, ahead=what == "ahead")
        elif what == "give" and mine[client]:
            buffers = (mine[client][number % len(mine[client])],)
            to = ANN if client == BOB else BOB
            ann.say(HandlePublished, client, name=f"n{number}", buffers=buffers, to=to)
        elif what == "end":
            ann.say(HandleUnpublished, client, name=f"n{number}")
        elif what == "take":
            mine[client].append(ann.take(f"n{number}", client))
        elif what == "drop" and mine[client]:
            ann.drop(mine[client].pop(number % len(mine[client])), client)
        elif what == "run" and slices[client] and mine[client]:
            on = slices[client][number % len(slices[client])]
            plan = script.register(Sketch(f"p{on}").chain(on, "f", nbytes=8), client=client)
            run = script.submit(plan, [mine[client][-1]], client=client)
            mine[client] += run.outputs
        elif what == "release" and slices[client]:
            ann.say(SliceReleased, client, slice=slices[client].pop(number % len(slices[client])))
    for client in sorted(here):
        ann.leave(client)
    script.finish_all()
    for name in sorted(script.control.sharing.names):
        ann.say(HandleUnpublished, "kernel-1", name=name)
    state = script.control.state
    assert (state.store.buffers, script.control.slices, ann.seats) == ({}, {}, {})
    assert not any(row.nbytes for row in state.accounts.rows.values())
