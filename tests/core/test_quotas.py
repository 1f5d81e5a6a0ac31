"""Quotas and the line for devices: what never can be is refused, what is in use now waits."""

from __future__ import annotations

import pytest

from pathways_lab.core.errors import PathwaysError
from pathways_lab.core.messages import (
    BuffersDropped,
    ClientJoined,
    ClientLeft,
    Command,
    LeaseRequested,
    LeaseReturned,
    PolicyChosen,
    QuotaChosen,
    Refused,
    SliceBound,
    SliceReleased,
    SliceRequested,
    SliceWaiting,
)
from pathways_lab.core.messages.elastic import (
    Answer,
    HostsLeaving,
    ResumeRequested,
    SuspendRequested,
)
from pathways_lab.core.program.program import Plan
from pathways_lab.core.scheduling.policies import INITIAL, Priority
from pathways_lab.core.scheduling.rules import Rules
from pathways_lab.core.slices.topology import SliceRequest
from pathways_lab.testing import Script, Sketch
from tests.core.stories import KNOWN


def limit(script: Script, whom: str, devices: int | None = None, nbytes: int | None = None) -> None:
    kept, *_ = script.send(QuotaChosen(script.time, "quota", "kernel-1", whom, devices, nbytes, 7))
    assert kept == Answer("quota", "kernel-1", 7)


def ask(
    script: Script, number: int, client: str, devices: int, island: str | None = None
) -> list[Command]:
    request = SliceRequest((devices,), ("x",), island)
    return script.send(SliceRequested(script.time, "ask", client, number, request, wait=True))


def places(commands: list[Command]) -> dict[int, tuple[int, int]]:
    return {c.slice: (c.place, c.waiting) for c in commands if isinstance(c, SliceWaiting)}


# --- devices ---------------------------------------------------------------------------


def test_more_devices_than_a_quota_are_refused_with_the_numbers() -> None:
    script = Script(devices=8)
    limit(script, "kernel-1", devices=4)
    with pytest.raises(PathwaysError, match="5 devices are more than the quota of kernel-1"):
        script.slice(5)
    first = script.slice(3)
    with pytest.raises(PathwaysError, match=r"its slices hold s\d+ \(3\)") as error:
        script.slice(2)
    assert "lab.quota('kernel-1', devices=...)" in error.value.failure.remedy
    script.slice(1)
    script.client("other")  # has no quota
    script.slice(8, client="other")
    assert script.binding(first)


def test_the_usual_quota_is_for_those_without_one_of_their_own() -> None:
    script = Script(devices=8)
    limit(script, "", devices=2)
    limit(script, "kernel-1")
    script.client("other")
    script.slice(8)
    with pytest.raises(PathwaysError, match="quota of other"):
        script.slice(3, client="other")


def test_who_has_reached_a_quota_waits_and_is_told_the_place() -> None:
    script = Script(devices=8)
    script.client("other")
    limit(script, "", devices=2)
    held = script.slice(2), script.slice(2, client="other")
    assert places(ask(script, 101, "kernel-1", 2)) == {101: (1, 1)}
    assert places(ask(script, 102, "other", 1)) == {101: (1, 2), 102: (2, 2)}
    # A later one of the same client does not pass, although nothing but the order is against it.
    assert places(ask(script, 103, "kernel-1", 1))[103] == (3, 3)
    done = script.send(SliceReleased(script.time, "release", "other", held[1]))
    assert [c.binding.slice for c in done if isinstance(c, SliceBound)] == [102]
    assert places(done) == {101: (1, 2), 103: (2, 2)}
    done = script.send(SliceReleased(script.time, "release", "kernel-1", 101))  # gives up
    assert places(done) == {103: (1, 1)}
    done = script.send(SliceReleased(script.time, "release", "kernel-1", held[0]))
    assert [c.binding.slice for c in done if isinstance(c, SliceBound)] == [103]


def test_a_larger_quota_lets_the_line_move_and_a_smaller_one_refuses() -> None:
    script = Script(devices=8)
    limit(script, "", devices=4)
    script.slice(4)
    ask(script, 101, "kernel-1", 4)
    script.client("other")
    script.slice(4, client="other")
    ask(script, 102, "other", 4)
    done = script.send(QuotaChosen(0.0, "quota", "kernel-1", "kernel-1", 8))
    assert [c.binding.slice for c in done if isinstance(c, SliceBound)] == [101]
    done = script.send(QuotaChosen(0.0, "quota", "kernel-1", "other", 3))
    (refused,) = (c for c in done if isinstance(c, Refused))
    assert "4 devices are more than the quota of other" in refused.failure.message


def test_requests_wait_for_the_end_of_a_lease_and_end_with_their_client() -> None:
    script = Script(islands=2, devices=4)
    script.client("other")
    script.client("third")
    script.send(LeaseRequested(0.0, "lease", "kernel-1", "island0"))
    waiting = ask(script, 101, "other", 4, "island0")
    (told,) = (c for c in waiting if isinstance(c, SliceWaiting))
    assert told.why == "island0 is leased to kernel-1"
    assert any(isinstance(c, SliceBound) for c in ask(script, 102, "third", 4))  # island1 is free
    assert places(ask(script, 103, "third", 1, "island0")) == {101: (1, 2), 103: (2, 2)}
    gone = script.send(ClientLeft(0.0, "leave", "other", "closed"))
    assert places(gone) == {103: (1, 1)}
    done = script.send(LeaseReturned(0.0, "return", "kernel-1", "island0"))
    assert [c.binding.slice for c in done if isinstance(c, SliceBound)] == [103]


def test_what_no_island_can_ever_hold_is_refused_although_it_would_wait() -> None:
    script = Script(devices=4)
    script.client("other")
    script.send(LeaseRequested(0.0, "lease", "kernel-1", "island0"))
    (refused,) = ask(script, 101, "other", 5)
    assert isinstance(refused, Refused)


# --- bytes -----------------------------------------------------------------------------


def test_a_run_waits_while_its_clients_other_runs_fill_the_quota() -> None:
    script = Script(devices=2, memory=1000, rules=KNOWN)
    script.client("other")
    limit(script, "kernel-1", nbytes=50)
    plan = script.register(Sketch("p").chain(script.slice(2), "f", nbytes=10))
    first, second = script.submit(plan), script.submit(plan)  # 40 each: in and out on 2 devices
    assert script.order == [first.run]
    theirs = script.register(
        Sketch("q").chain(script.slice(2, client="other"), "g", nbytes=10), client="other"
    )
    third = script.submit(theirs, client="other")  # whoever has no quota passes
    assert script.order == [first.run, third.run]
    script.drop(*first.outputs)  # 20 bytes, which are free for whoever is granted later
    assert script.order == [first.run, third.run, second.run]


def test_a_run_and_an_upload_beyond_the_quota_are_refused_with_the_numbers() -> None:
    script = Script(devices=2, memory=1000)
    limit(script, "kernel-1", nbytes=30)
    where = script.slice(2)
    run = script.submit(script.register(Sketch("p").chain(where, "f", nbytes=10)))
    failure = script.ended[run.run].failure
    assert failure is not None
    assert "needs 40 bytes on all its devices together, and the quota of kernel-1 is 30" in (
        failure.message
    )
    assert script.resolved[script.upload(where, 15)] is None  # all of it
    number = script.upload(where, 16)
    found = script.resolved[number]
    assert found is not None
    assert "32 bytes" in found.message


def test_what_a_run_reads_counts_in_what_the_quota_could_never_hold() -> None:
    script = Script(devices=2, memory=1000)
    limit(script, "kernel-1", nbytes=50)
    where = script.slice(2)
    given = script.upload(where, 15)
    run = script.submit(script.register(Sketch("p").chain(where, "f", nbytes=15)), [given])
    failure = script.ended[run.run].failure
    assert failure is not None
    assert "needs 60 bytes on all its devices together" in failure.message


def test_a_full_quota_that_nothing_will_empty_is_told_soon_with_who_holds_it() -> None:
    script = Script(devices=2, memory=1000)
    limit(script, "kernel-1", nbytes=50)
    where = script.slice(2)
    kept = script.upload(where, 15)
    assert script.resolved[kept] is None
    other = script.upload(where, 15)
    script.pass_time(1.0)
    failure = script.resolved[other]
    assert failure is not None
    assert failure.kind == "stalemate"
    assert "upload 'upload' needs 30 bytes of the quota of kernel-1, 20 of 50 are free" in (
        failure.message
    )
    assert "ask an owner of the lab for a larger quota" in failure.remedy
    assert "kept by its handle" in failure.message
    script.drop(kept)
    assert script.resolved[script.upload(where, 15)] is None


def test_an_upload_that_fills_the_quota_ends_the_hope_of_those_behind_it() -> None:
    """Others' runs go on there, and no end of theirs would be room in this quota."""
    script = Script(devices=2, memory=100)
    script.client("other")
    limit(script, "kernel-1", nbytes=100)
    at, where = script.slice(2, client="other"), script.slice(2)
    kept = script.upload(at, 70, client="other")
    plan = script.register(Sketch("p").chain(at, "f", nbytes=5), client="other")
    run = script.submit(plan, client="other")
    first, second = script.upload(where, 30), script.upload(where, 30)
    assert not script.control.state.store.buffers[first].admitted
    assert script.resolved[second] is None, "it waits for memory, and for no quota yet"
    script.drop(kept, client="other")
    assert script.control.state.store.buffers[first].admitted
    script.pass_time(1.0)
    failure = script.resolved[second]
    assert run.run not in script.ended
    assert failure is not None
    assert failure.kind == "stalemate"


def consume(script: Script, where: int, size: int, result: int) -> Plan:
    """A program that consumes its argument."""
    sketch = Sketch("consume")
    made = sketch.call("c", where, [sketch.input(where, size)], [result], donated=(0,))
    return script.register(sketch.output(*made))


def test_what_waits_for_a_quota_waits_for_runs_of_its_client_that_are_not_compiled() -> None:
    script = Script(devices=2, memory=1000, compile=False)
    limit(script, "kernel-1", nbytes=50)
    where = script.slice(2)
    kept = script.upload(where, 15)
    donor = script.submit(consume(script, where, 15, 5), [kept])
    other = script.upload(where, 15)
    assert script.resolved[other] is None  # it has come, and has no device memory
    script.compiled()
    script.drop(kept, *donor.outputs)
    script.finish_all()
    assert script.order == [donor.run]
    assert script.control.state.store.buffers[other].admitted


def test_what_waits_for_a_quota_waits_for_runs_of_its_client_that_will_find_room() -> None:
    script = Script(devices=2, memory=100)
    script.client("other")
    limit(script, "kernel-1", nbytes=100)
    theirs = Sketch("theirs")
    at = script.slice(2, client="other")
    (made,) = theirs.call("t", at, [], [60])
    first = script.submit(script.register(theirs.output(made), client="other"), client="other")
    where = script.slice(2)
    kept = script.upload(where, 15)
    donor = script.submit(consume(script, where, 15, 45), [kept])  # beside 60
    other = script.upload(where, 40)
    assert script.resolved[other] is None
    assert script.order == [first.run]
    script.drop(kept)
    script.drop(*first.outputs, client="other")
    script.finish(first.run)
    script.drop(*donor.outputs)
    script.finish_all()
    assert script.order == [first.run, donor.run]
    assert script.control.state.store.buffers[other].admitted


def test_who_waits_for_its_own_quota_is_overtaken_by_nobody() -> None:
    script = Script(devices=1, memory=16, rules=Rules(overtaking=2, assumed=0.005))
    script.client("other")
    limit(script, "kernel-1", nbytes=13)
    plans = []
    for client, size in (("kernel-1", 2), ("kernel-1", 12), ("other", 1)):
        sketch = Sketch(f"{size}")
        made = sketch.call(f"f{size}", script.slice(1, client=client), [], [size])
        plans.append(script.register(sketch.output(*made), client=client))
    running, waits = script.submit(plans[0]), script.submit(plans[1])
    theirs = [script.submit(plans[2], client="other").run for _ in range(3)]
    limit(script, "kernel-1")  # now it waits for memory, and may be passed so often from now on
    theirs += [script.submit(plans[2], client="other").run for _ in range(3)]
    assert script.order == [running.run, *theirs[:5]]
    assert waits.run not in script.ended


def test_a_smaller_quota_refuses_what_waits_and_will_never_fit() -> None:
    script = Script(devices=1, memory=80)
    where = script.slice(1)
    plan = script.register(Sketch("p").chain(where, "f", nbytes=30))
    first, second = script.submit(plan), script.submit(plan)
    limit(script, "", nbytes=50)
    failure = script.ended[second.run].failure
    assert failure is not None
    assert "quota of kernel-1 is 50" in failure.message
    script.finish(first.run)
    assert script.ended[first.run].outcome == "finished"


def test_without_the_rule_a_client_has_more_than_its_quota() -> None:
    script = Script(devices=2, memory=100, rules=Rules(quotas=False))
    limit(script, "", devices=1, nbytes=30)
    where = script.slice(1)
    script.slice(1)
    script.upload(where, 40)
    assert sorted(script.used()) == [0, 40]
    script.slice(2)


# --- roles -----------------------------------------------------------------------------


def test_only_owners_set_quotas_and_policies_and_switch_the_order_off() -> None:
    script = Script(devices=2)
    script.send(ClientJoined(0.0, "join", "guest", 9, owner=False))
    for event in (
        QuotaChosen(0.0, "quota", "guest", "kernel-1", 0),
        PolicyChosen(0.0, "policy", "guest", Priority()),
        LeaseRequested(0.0, "lease", "guest", "island0", order=False),
    ):
        (refused,) = script.send(event)
        assert isinstance(refused, Refused)
        assert "guest is a client of this lab, and only its owners" in refused.failure.message
    assert script.control.state.turns.policy == INITIAL
    script.slice(2, client="guest")
    script.send(BuffersDropped(0.0, "drop", "guest", ()))


def test_a_client_may_suspend_itself_and_nobody_else_and_takes_no_hosts_away() -> None:
    script = Script(devices=2)
    script.send(ClientJoined(0.0, "join", "guest", 9, owner=False))
    script.slice(1)
    for event in (
        SuspendRequested(0.0, "suspend", "guest", "kernel-1", request=1),
        ResumeRequested(0.0, "resume", "guest", "kernel-1", request=2),
        HostsLeaving(0.0, "leave", ("island0/host0",), "because", "guest", request=3),
    ):
        (denied,) = script.send(event)
        assert isinstance(denied, Answer)
        assert denied.failure is not None
        assert "only its owners" in denied.failure.message
    limit(script, "guest", devices=1)
    script.slice(1, client="guest")
    assert not any(
        isinstance(c, Answer) for c in script.send(SuspendRequested(0.0, "s", "guest", "guest"))
    )
