"""Laws of slices that outlive their devices, each by the smallest story, and all by a storm."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest

from pathways_lab.core.errors import PathwaysError
from pathways_lab.core.messages import (
    ClientLeft,
    Command,
    HandlePublished,
    HandleTaken,
    HostLost,
    HostReport,
    Prepare,
    Refused,
    SliceFreed,
    SliceReleased,
)
from pathways_lab.core.messages.elastic import (
    Answer,
    HostsLeaving,
    HostsLeft,
    Park,
    RebindRequested,
    ResumeRequested,
    SliceMoved,
    SliceWithdrawn,
    SuspendRequested,
)
from pathways_lab.core.program.program import Plan
from pathways_lab.core.scheduling.rules import Rules
from pathways_lab.core.slices import migration
from pathways_lab.testing import Script, Sketch
from tests.core.stories import heavy, told, two_islands

ME, BOB = "kernel-1", "bob"


def kill(script: Script, host: str) -> None:
    script.send(HostLost(script.time, "watch", host, "killed"))
    script.waiting.pop(host, None)


def rebind(script: Script, where: int, island: str | None = None) -> None:
    script.send(RebindRequested(script.time, "rebind", ME, where, island))


def suspend(script: Script, whose: str = ME, by: str = ME) -> None:
    script.send(SuspendRequested(script.time, "suspend", by, whose, 7))


def resume(script: Script, whose: str = ME, by: str = ME, island: str | None = None) -> None:
    script.send(ResumeRequested(script.time, "resume", by, whose, island, 8))


@pytest.fixture
def worked_out(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Keys of plans, as they are worked out again for other devices."""
    keys: list[str] = []
    real = migration.index_plan

    def noted(plan: Plan, client: str, bindings: Any) -> Any:
        keys.append(plan.key)
        return real(plan, client, bindings)

    monkeypatch.setattr(migration, "index_plan", noted)
    return keys


def state(script: Script, where: int) -> str:
    return script.control.slices[where].state


# --- bound again ---------------------------------------------------------------------------


def test_a_lost_slice_is_bound_again_and_its_programs_run_without_being_registered_again(
    worked_out: list[str],
) -> None:
    script, first, second, pair = two_islands()
    lone = script.register(Sketch("lone").chain(second, "c", nbytes=4))
    kept = script.submit(pair)
    script.finish_all()
    kill(script, "island0/host0")
    assert script.resolved[kept.outputs[0]] is not None
    refused = script.submit(pair)
    assert script.ended[refused.run].outcome == "failed"
    seen = len(script.log)
    rebind(script, first)
    binding = script.binding(first)
    assert (binding.island, binding.generation) == ("island1", 1)
    prepared = [c for _, cs in script.log[seen:] for c in cs if isinstance(c, Prepare)]
    assert [(p.function, p.slice, p.hosts) for p in prepared] == [("a", first, ("island1/host0",))]
    assert worked_out == [pair.key], "once, and only what uses the slice"
    again, beside = script.submit(pair), script.submit(lone)
    script.finish_all()
    assert script.ended[again.run].outcome == script.ended[beside.run].outcome == "finished"
    assert script.resolved[kept.outputs[0]] is not None, "what was lost stays lost"


def test_a_slice_waits_for_what_still_hangs_on_its_old_devices() -> None:
    script = Script(islands=2, hosts=2, devices=2)
    where = script.slice(4, island="island0")
    run = script.submit(heavy(script, where, 4))
    other = script.slice(4, island="island1")
    sketch = Sketch("pair")
    (x,) = sketch.call("a", where, [sketch.input(where, 4)], [4])
    (y,) = sketch.call("b", other, [x], [4])
    both = script.submit(script.register(sketch.output(y)))
    kill(script, "island0/host1")
    rebind(script, where)
    assert state(script, where) == "lost"
    script.finish_all()
    assert state(script, where) == "bound"
    assert script.ended[run.run].outcome == script.ended[both.run].outcome == "failed"


def test_only_lost_slices_of_ones_own_are_bound_again_and_only_where_there_is_room() -> None:
    script = Script()
    where = script.slice(4)
    rebind(script, where)
    assert "it is bound" in script.refused[-1].failure.message
    rebind(script, 999)
    assert "has no such slice" in script.refused[-1].failure.message
    kill(script, "island0/host0")
    rebind(script, where)
    assert "no host has joined" in script.refused[-1].failure.message
    assert "wait until lab.islands has some" in script.refused[-1].failure.remedy
    script.join("island0/host0")
    rebind(script, where)
    assert state(script, where) == "bound"


def test_what_is_registered_while_a_slice_is_lost_works_when_it_is_bound_again() -> None:
    script = Script(islands=2)
    where = script.slice(4, island="island0")
    kill(script, "island0/host0")
    plan = heavy(script, where, 4)
    assert not script.refused
    assert script.ended[script.submit(plan).run].outcome == "failed"
    rebind(script, where)
    run = script.submit(plan)
    script.finish_all()
    assert script.ended[run.run].outcome == "finished"


def test_hosts_hear_once_that_a_lost_slice_is_gone_and_everybody_that_it_is_freed() -> None:
    script = Script(hosts=2, devices=2)
    where = script.slice(4)
    kill(script, "island0/host0")
    assert [c.hosts for c in told(script, SliceWithdrawn)] == [("island0/host1",)]
    assert not told(script, SliceFreed)
    script.send(SliceReleased(0.0, "release", ME, where))
    assert [c.hosts for c in told(script, SliceFreed)] == [()]
    assert script.control.slices == {}


# --- suspended and resumed -------------------------------------------------------------------


def test_a_suspended_client_waits_and_its_devices_and_bytes_are_others() -> None:
    script = Script(devices=4, memory=100)
    where = script.slice(4)
    plan = heavy(script, where, 30)
    kept = script.upload(where, 30)
    script.client(BOB)
    suspend(script, by=BOB)
    assert state(script, where) == "suspended"
    assert [a.client for a in told(script, Answer)] == [BOB]
    assert script.used() == []
    theirs = script.slice(4, client=BOB)
    big = script.register(Sketch("big").chain(theirs, "g", nbytes=45), client=BOB)
    mine = script.submit(plan)
    run = script.submit(big, client=BOB)
    script.finish_all()
    assert script.ended[run.run].outcome == "finished"
    assert mine.run not in script.ended
    script.drop(*run.outputs, client=BOB)
    resume(script, by=BOB)
    script.finish_all()
    assert script.ended[mine.run].outcome == "finished"
    assert script.resolved[kept] is None


@pytest.mark.parametrize("fits", [True, False])
def test_who_waits_for_memory_waits_for_that_of_a_slice_about_to_be_suspended(fits: bool) -> None:
    script = Script(memory=13)
    script.client(BOB)
    mine, theirs = script.slice(4), script.slice(4, client=BOB)
    script.upload(theirs, 5 if fits else 6, client=BOB)
    sketch = Sketch("mine")
    made = sketch.call("f", mine, [], [6])
    first = script.submit(script.register(sketch.output(*made)))
    plan = script.register(Sketch("theirs").chain(theirs, "g", nbytes=4), client=BOB)
    run = script.submit(plan, client=BOB)
    suspend(script)
    assert script.order == [first.run]
    script.finish(first.run)
    assert script.order == [first.run, run.run][: 1 + fits]
    script.pass_time(1.0)
    assert (run.run in script.ended) == (not fits), "it is given up when nothing is left to come"


def test_what_is_admitted_ends_before_a_slice_is_parked() -> None:
    script = Script()
    where = script.slice(4)
    plan = heavy(script, where, 4)
    running = script.submit(plan)
    suspend(script)
    waiting = script.submit(plan, running.outputs)
    assert not told(script, Park)
    script.finish_all()
    assert [p.slice for p in told(script, Park)] == [where]
    assert script.ended[running.run].outcome == "finished"
    assert waiting.run not in script.ended
    resume(script)
    script.finish_all()
    assert script.ended[waiting.run].outcome == "finished"


def test_a_slice_that_comes_back_to_its_devices_moves_and_compiles_nothing(
    worked_out: list[str],
) -> None:
    script = Script(islands=2)
    where = script.slice(4, island="island1")
    heavy(script, where, 4)
    before, prepared = script.binding(where), len(told(script, Prepare))
    suspend(script)
    resume(script)
    assert script.binding(where) == before
    assert [m.hosts for m in told(script, SliceMoved)] == [()]
    assert len(told(script, Prepare)) == prepared
    assert worked_out == []


def test_a_slice_resumed_elsewhere_waits_for_its_values(worked_out: list[str]) -> None:
    script = Script(islands=2, moving=False)
    where = script.slice(4, island="island0")
    plan = heavy(script, where, 4)
    kept = script.upload(where, 4)
    suspend(script)
    queued = script.submit(plan, [kept])
    resume(script, island="island1")
    (moved,) = told(script, SliceMoved)
    assert (moved.hosts, moved.binding.hosts) == (("island0/host0",), ("island1/host0",))
    assert [a.request for a in told(script, Answer)] == [7], "not there yet"
    script.finish_all()
    assert queued.run not in script.ended
    script.send(HostReport(0.0, "r", "island1/host0", resident=(kept,)))
    assert queued.run not in script.order, "somebody still has something to send"
    script.arrive_moved(moved)
    assert [a.request for a in told(script, Answer)] == [7, 8]
    script.finish_all()
    assert script.ended[queued.run].outcome == "finished"
    assert worked_out == [plan.key]


def test_a_slice_on_the_move_waits_for_its_own_values_and_for_nobody_elses() -> None:
    script = Script(islands=2, moving=False)
    script.client(BOB)
    where, other = script.slice(4, island="island0"), script.slice(4, client=BOB, island="island1")
    kept, theirs = script.upload(where, 4), script.upload(other, 4, client=BOB, arrive=False)
    suspend(script)
    resume(script, island="island1")
    script.send(HostReport(0.0, "sent", "island0/host0", moved=(where,)))
    assert [a.request for a in told(script, Answer)] == [7], "all is sent, and has not come"
    script.arrive(theirs, other)
    assert script.resolved[theirs] is None
    assert [a.request for a in told(script, Answer)] == [7]
    script.arrive(kept, where)
    assert [a.request for a in told(script, Answer)] == [7, 8]


def test_what_a_host_says_of_its_old_devices_is_no_arrival_on_the_new_ones() -> None:
    script = Script(islands=1, hosts=3, devices=2, moving=False)
    where = script.slice(4)
    old = script.binding(where).hosts
    pending = script.upload(where, 4, arrive=False)
    suspend(script)
    kill_free = next(h for h in ("island0/host0", "island0/host1", "island0/host2") if h not in old)
    script.client(BOB)
    blocked = script.slice(2, client=BOB)  # on one of the old hosts, most likely
    resume(script)
    if not script.control.elastic._moves:
        pytest.skip("the old devices were the best ones again")
    new = script.binding(where).hosts
    both = [h for h in new if h in old]
    for host in both:
        script.send(HostReport(0.0, "r", host, resident=(pending,)))
    for host in new:
        if host not in old:
            script.send(HostReport(0.0, "r", host, resident=(pending,)))
    assert pending not in script.resolved
    script.arrive_moved(told(script, SliceMoved)[-1])
    assert script.resolved[pending] is None
    assert (kill_free in new) == (blocked is not None and new != old)


def test_a_resumption_without_room_says_so_and_changes_nothing() -> None:
    script = Script(devices=4, memory=100)
    where = script.slice(4)
    script.upload(where, 60)
    suspend(script)
    script.client(BOB)
    theirs = script.slice(4, client=BOB)
    held = script.upload(theirs, 60, client=BOB)
    resume(script, by=BOB)
    failure = told(script, Answer)[-1].failure
    assert failure is not None
    assert "60 bytes per device" in failure.message
    assert state(script, where) == "suspended"
    script.drop(held, client=BOB)
    resume(script, by=BOB)
    assert state(script, where) == "bound"


def test_wishes_about_nobody_are_answered() -> None:
    script = Script()
    suspend(script, "nobody")
    suspend(script)
    resume(script)
    words = [a.failure.message for a in told(script, Answer) if a.failure is not None]
    assert ["no client" in words[0], "no slice" in words[1], "no suspended" in words[2]] == [
        True
    ] * 3


def test_a_suspended_client_that_leaves_or_loses_its_host_leaves_nothing() -> None:
    for ending in ("leaves", "host"):
        script = Script()
        script.client(BOB)
        where = script.slice(4, client=BOB)
        plan = script.register(Sketch("q").chain(where, "g", nbytes=4), client=BOB)
        script.upload(where, 4, client=BOB)
        suspend(script, BOB)
        run = script.submit(plan, client=BOB)
        if ending == "leaves":
            script.send(ClientLeft(0.0, "gone", BOB, "closed"))
            assert script.control.slices == {}
            assert script.control.state.store.buffers == {}
        else:
            kill(script, "island0/host0")
            assert script.ended[run.run].outcome == "failed"
            assert state(script, where) == "lost"
        assert not script.control.state.withheld
        assert not script.control.elastic.busy


def test_a_client_that_leaves_while_hosts_put_its_values_aside_leaves_nothing() -> None:
    class Slow(Script):
        def _carry_out(self, command: Command) -> None:
            if not isinstance(command, Park):
                super()._carry_out(command)

    script = Slow()
    script.client(BOB)
    script.upload(script.slice(4, client=BOB), 4, client=BOB)
    suspend(script, BOB)
    assert script.control.elastic.busy
    script.send(ClientLeft(0.0, "gone", BOB, "closed"))
    assert script.control.slices == {}
    assert not script.control.elastic.busy


def test_runs_that_wait_for_memory_wait_for_a_suspended_slice_too() -> None:
    script = Script(memory=10)
    script.client(BOB)
    plan = heavy(script, script.slice(4), 4)
    first, second = script.submit(plan), script.submit(plan)
    assert script.order == [first.run]
    suspend(script)
    script.drop(*first.outputs)
    script.finish_all()
    assert script.order == [first.run]
    resume(script)
    assert script.order == [first.run, second.run]


def test_a_slice_released_while_it_is_suspended_is_gone_with_its_runs() -> None:
    script = Script()
    where = script.slice(4)
    plan = heavy(script, where, 4)
    suspend(script)
    run = script.submit(plan)
    script.send(SliceReleased(0.0, "release", ME, where))
    assert "while it was suspended" in script.ended[run.run].failure.message  # type: ignore[union-attr]
    script.drop(*run.outputs)
    assert script.control.slices == {}


def test_a_slice_released_while_it_is_being_suspended_ends_its_runs_first() -> None:
    script = Script()
    where = script.slice(4)
    plan = heavy(script, where, 4)
    first = script.submit(plan)
    suspend(script)
    second = script.submit(plan)
    script.send(SliceReleased(0.0, "release", ME, where))
    script.finish_all()
    assert [script.ended[r.run].outcome for r in (first, second)] == ["finished", "cancelled"]
    assert [a.request for a in told(script, Answer)] == [7]


def test_others_who_read_a_suspended_clients_values_wait_with_it() -> None:

    script = Script(islands=2)
    where = script.slice(4, island="island0")
    weights = script.upload(where, 4)
    script.send(HandlePublished(0.0, "p", ME, "w", (weights,)))
    script.client(BOB)
    theirs = script.slice(4, client=BOB, island="island1")
    number = (2 << 32) | 1
    script.send(HandleTaken(0.0, "t", BOB, "w", (number,)))
    sketch = Sketch("moved")
    (moved,) = sketch.call("g", theirs, [sketch.input(where, 4)], [4])
    plan = script.register(sketch.output(moved), client=BOB)
    suspend(script)
    run = script.submit(plan, [number], client=BOB)
    script.finish_all()
    assert run.run not in script.ended
    resume(script)
    script.finish_all()
    assert script.ended[run.run].outcome == "finished"


# --- hosts that leave --------------------------------------------------------------------------


def leave(script: Script, *hosts: str, anyway: bool) -> None:
    script.send(HostsLeaving(script.time, "leave", hosts, "ann took it away", ME, anyway, 9))


def test_an_island_in_use_is_not_taken_away_unless_one_insists() -> None:
    script = Script(islands=2)
    where = script.slice(4, island="island0")
    script.upload(where, 4)
    leave(script, "island0/host0", anyway=False)
    failure = told(script, Answer)[-1].failure
    assert failure is not None
    assert "slice s1 of kernel-1 (4 devices on island0, 1 handle)" in failure.message
    assert not told(script, HostsLeft)
    run = script.submit(heavy(script, where, 4))
    late = script.submit(script.plans[next(iter(script.plans))], run.outputs)
    leave(script, "island0/host0", anyway=True)
    queued = script.submit(script.plans[next(iter(script.plans))])
    assert not told(script, HostsLeft), "what is admitted ends first"
    with pytest.raises(PathwaysError, match="about to leave"):
        script.slice(4, island="island0")
    script.finish_all()
    assert script.ended[run.run].outcome == script.ended[late.run].outcome == "finished"
    assert [c.hosts for c in told(script, HostsLeft)] == [("island0/host0",)]
    script.send(HostsLeaving(script.time, "retire", ("island0/host0",), "its worker leaves"))
    assert len(told(script, HostsLeft)) == 1, "it goes already"
    answers = len(told(script, Answer))
    assert script.resolved[run.outputs[0]] is None, "it hands over what somebody waits for"
    script.send(HostLost(script.time, "test", "island0/host0", "ann took it away"))
    assert "ann took it away" in script.resolved[run.outputs[0]].message
    assert "ann took it away" in script.ended[queued.run].failure.message  # type: ignore[union-attr]
    assert len(told(script, Answer)) == answers + 1
    assert told(script, Answer)[-1].lines == (
        "slice s1 of kernel-1 (4 devices on island0, 4 handles)",
    )
    rebind(script, where)
    assert script.binding(where).island == "island1"


def test_an_idle_host_goes_at_once_and_an_unknown_one_is_named() -> None:
    script = Script(islands=2)
    leave(script, "island1/host0", anyway=False)
    assert [c.hosts for c in told(script, HostsLeft)] == [("island1/host0",)]
    leave(script, "island0/host0", "island0/host1", anyway=False)
    assert [c.hosts for c in told(script, HostsLeft)][1:] == [("island0/host0",)]
    leave(script, "island7/host0", anyway=False)
    assert "island7/host0 is not in the lab" in told(script, Answer)[-1].failure.message  # type: ignore[union-attr]


def test_retired_hosts_go_without_an_answer_and_without_those_that_died() -> None:
    script = Script(hosts=2, devices=2)
    run = script.submit(heavy(script, script.slice(4), 4))
    both = ("island0/host0", "island0/host1")
    script.send(HostsLeaving(0.0, "retire", both, "Dask retires their workers"))
    assert not told(script, HostsLeft)
    kill(script, both[0])
    script.finish_all()
    assert script.ended[run.run].outcome == "failed"
    assert [c.hosts for c in told(script, HostsLeft)] == [both[1:]]
    assert not told(script, Answer)


# --- all of it ---------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(50))
def test_a_storm_of_changes_loses_no_run_and_no_byte(seed: int) -> None:
    """Whatever happens in whatever order, the invariants hold (after every event), every
    run ends, and when everybody has left nothing is left."""
    chance = random.Random(seed)
    script = Script(
        islands=2, hosts=2, devices=2, memory=100, rules=Rules(ahead=0.002, window=0.001)
    )
    script.client(BOB)
    slices = {ME: [script.slice(2), script.slice(4)], BOB: [script.slice(3, client=BOB)]}
    plans = {}
    for client, owned in slices.items():
        for n, where in enumerate(owned):
            sketch = Sketch(f"{client}{n}").chain(where, f"f{n}", f"g{n}", nbytes=9)
            plans[client, where] = script.register(sketch, client=client)
    kept: dict[str, list[int]] = {ME: [], BOB: []}
    for _ in range(60):
        client = chance.choice((ME, BOB))
        where = chance.choice(slices[client])
        match chance.randrange(9):
            case 0 | 1 | 2:
                run = script.submit(plans[client, where], client=client)
                kept[client] += run.outputs
            case 3:
                script.finish_next()
            case 4 if kept[client]:
                script.drop(kept[client].pop(0), client=client)
            case 5:
                suspend(script, client)
            case 6:
                resume(script, client, island=chance.choice((None, "island0", "island1")))
            case 7:
                host = f"island{chance.randrange(2)}/host{chance.randrange(2)}"
                if host in script.control.state.resources.hosts:
                    if chance.random() < 0.5:
                        kill(script, host)
                    else:
                        leave(script, host, anyway=True)
                else:
                    script.join(host, devices=2, memory=100)
            case 8:
                script.send(RebindRequested(script.time, "again", client, where))
    script.finish_all()
    for client in (ME, BOB):
        resume(script, client)
    for i in range(2):
        for h in range(2):
            if f"island{i}/host{h}" not in script.control.state.resources.hosts:
                script.join(f"island{i}/host{h}", devices=2, memory=100)
    for client in (ME, BOB):
        resume(script, client)
    script.finish_all()
    while script.control.due < math.inf:
        script.pass_time(1.0)
        script.finish_all()
    withheld = script.control.state.withheld
    assert not script.control.state.runs or withheld, "a run never ended"
    for client in (ME, BOB):
        script.send(ClientLeft(script.time, "gone", client, "closed"))
    script.finish_all()
    assert script.control.state.store.buffers == {}
    assert script.control.slices == {}
    assert script.used() == []
    assert not script.control.state.withheld
    assert not script.control.elastic._wishes
    assert not script.control.elastic._parking
    assert not script.control.elastic._moves
    assert [type(c) for c in told(script, Refused) if c.failure.kind == "internal"] == []
