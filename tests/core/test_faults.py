"""Laws of ownership, faults, stuck gangs and leases, each by the smallest story."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pathways_lab.core.errors import PathwaysError
from pathways_lab.core.messages import (
    AbortRun,
    BufferDeclared,
    BuffersDropped,
    CancelRequested,
    ClientLeft,
    FreeBuffers,
    FunctionAnnounced,
    Grant,
    HostLost,
    HostReport,
    Leased,
    LeaseRequested,
    LeaseReturned,
    ProgramRegistered,
    Refused,
    Resolved,
    RunEnded,
    RunSubmitted,
    SliceBound,
    SliceFreed,
    SliceReleased,
    SliceRequested,
    SlicesLost,
)
from pathways_lab.core.messages.elastic import SliceWithdrawn
from pathways_lab.core.program.lowering import lower
from pathways_lab.core.scheduling.rules import Rules
from pathways_lab.core.slices.topology import SliceRequest
from pathways_lab.testing import Script, Sketch
from tests.core.stories import BROKEN, heavy, told, two_islands

# --- ownership and errors ----------------------------------------------------------------


def test_requests_about_things_of_others_are_refused() -> None:
    script = Script()
    where = script.slice(2)
    plan = heavy(script, where, 4)
    mine = script.submit(plan)
    script.client("kernel-2")
    other = script.slice(2, client="kernel-2")
    their = script.register(Sketch("q").chain(other, "g"), client="kernel-2")
    at, who = 0.0, "kernel-2"
    for event, words in (
        (BuffersDropped(at, "x", who, mine.outputs), "belongs to another client"),
        (CancelRequested(at, "x", who, (mine.run,)), "belongs to another client"),
        (SliceReleased(at, "x", who, where), "has no such slice"),
        (FunctionAnnounced(at, "x", who, "f", where), "belongs to another client"),
        (ProgramRegistered(at, "x", who, plan), "belongs to another client"),
        (BufferDeclared(at, "x", who, 9, where, 1), "belongs to another client"),
        (RunSubmitted(at, "x", who, 8, plan.key, (None,), (9,)), "is unknown"),
        (RunSubmitted(at, "x", who, 9, their.key, mine.outputs, (10,)), "another client"),
        (RunSubmitted(at, "x", who, 10, their.key, (), (11,)), "takes 1 inputs"),
        (RunSubmitted(at, "x", who, mine.run, their.key, (None,), (12,)), "in use"),
        (RunSubmitted(at, "x", who, 11, their.key, (None,), mine.outputs), "in use"),
        (SliceRequested(at, "x", who, where, SliceRequest((1,), ("x",))), "exists already"),
        (CancelRequested(at, "x", "kernel-9", (mine.run,)), "is not connected"),
    ):
        answers = [c for c in script.send(event) if isinstance(c, Refused)]
        assert len(answers) == 1, event
        assert words in answers[0].failure.message, event
    script.finish_all()
    assert script.ended[mine.run].outcome == "finished"


def test_a_refused_run_still_ends_and_its_outputs_carry_the_reason() -> None:
    script = Script()
    plan = heavy(script, script.slice(2), 4)
    refused = script.submit(plan, [12345])
    assert script.ended[refused.run].outcome == "failed"
    after = script.submit(plan, refused.outputs)
    assert "buffer 12345 is unknown" in script.resolved[after.outputs[0]].message  # type: ignore[union-attr]


def test_unknown_runs_steps_and_buffers_in_reports_change_nothing() -> None:
    script = Script()
    run = script.submit(heavy(script, script.slice(2), 4))
    host = "island0/host0"
    ends = ((999, 0, (0.1,)), (run.run, 7, (0.1, 0.1)), (run.run, -1, (0.1,)))
    script.send(HostReport(0.0, "r", host, ends))
    script.send(HostReport(0.0, "r", host, (), ((run.run, 7, BROKEN), (999, 0, BROKEN))))
    script.send(HostReport(0.0, "r", host, resident=(4242,), compiled=(("zz", 3, 0, None),)))
    script.send(HostReport(0.0, "r", "island9/host0", ((run.run, 0, (0.1,)),)))
    assert script.ended == {}
    script.finish(run.run)
    script.send(HostReport(0.0, "r", host, ((run.run, 0, (0.1,)),)))
    assert script.ended[run.run].outcome == "finished"


def test_a_released_slice_takes_nothing_new_and_ends_with_its_last_buffer() -> None:
    script = Script()
    where = script.slice(2)
    plan = heavy(script, where, 4)
    run = script.submit(plan)
    script.send(SliceReleased(0.0, "release", "kernel-1", where))
    late = script.submit(plan)
    assert "was released" in script.ended[late.run].failure.message  # type: ignore[union-attr]
    script.finish_all()
    assert script.ended[run.run].outcome == "finished"
    assert told(script, SliceFreed) == []
    script.drop(*run.outputs)
    assert [f.slice for f in told(script, SliceFreed)] == [where]
    assert script.control.slices == {}


def test_everything_of_a_client_that_left_is_freed_and_others_go_on() -> None:
    script = Script(rules=Rules(window=0.005, ahead=0.005, least=1))
    where = script.slice(4)
    mine = script.submit(heavy(script, where, 4))
    script.client("kernel-2")
    theirs = script.slice(4, client="kernel-2")
    plan = script.register(Sketch("q").chain(theirs, "g", "h", nbytes=4), client="kernel-2")
    script.upload(theirs, 4, client="kernel-2", arrive=False)
    for _ in range(3):
        script.submit(plan, client="kernel-2")
    script.send(ClientLeft(0.0, "gone", "kernel-2", "its kernel died"))
    script.finish_all()
    assert list(script.control.slices) == [where]
    assert script.used() == [4]
    assert set(script.control.state.store.buffers) == set(mine.outputs)
    assert {c.client for c in told(script, RunEnded)} == {"kernel-1"}


# --- faults ------------------------------------------------------------------------------


def test_a_lost_host_fails_what_used_it_by_name_and_leaves_the_rest_alone() -> None:
    script, first, second, pair = two_islands(hosts=2, devices=2)
    lone = script.register(Sketch("lone").chain(second, "c", nbytes=4))
    kept = script.submit(lone)
    script.finish_all()
    run, safe = script.submit(pair), script.submit(lone, kept.outputs)
    dead = script.binding(first).hosts[0]
    script.send(HostLost(1.0, "watch", dead, "killed"))
    failure = script.ended[run.run].failure if run.run in script.ended else None
    assert failure is None or failure.kind == "lost"
    assert all(
        f is not None and f.kind == "lost" and dead in f.message
        for f in map(script.resolved.get, run.outputs)
    )
    script.waiting.pop(dead)
    script.finish_all()
    assert script.ended[run.run].outcome == "failed"
    assert script.ended[safe.run].outcome == "finished"
    assert [a.run for a in told(script, AbortRun)] == [run.run]
    later = script.submit(pair)
    assert dead in script.ended[later.run].failure.message  # type: ignore[union-attr]


def test_a_lost_host_ends_the_epoch_of_its_island() -> None:
    script = Script(hosts=2, devices=1)
    whole, single = script.slice(2), script.slice(1)
    for where, name in ((whole, "w"), (single, "s")):
        script.submit(heavy(script, where, 1, name))
    dead = next(
        h for h in ("island0/host0", "island0/host1") if h not in script.binding(single).hosts
    )
    script.send(HostLost(1.0, "watch", dead, "killed"))
    script.waiting.pop(dead)
    script.join(dead, devices=1)
    again = script.slice(2)
    script.submit(heavy(script, again, 1, "again"))
    last = [g for g in script.grants if g.run == script.order[-1]]
    assert {(g.epoch, g.place, g.previous) for g in last} == {(1, 0, -1)}


def test_results_on_a_lost_host_are_taken_back() -> None:
    script = Script()
    where = script.slice(4)
    plan = heavy(script, where, 4)
    run = script.submit(plan)
    script.finish_all()
    assert script.resolved[run.outputs[0]] is None
    script.send(HostLost(1.0, "watch", "island0/host0", "killed"))
    assert script.resolved[run.outputs[0]].kind == "lost"  # type: ignore[union-attr]
    script.drop(*run.outputs)
    assert told(script, FreeBuffers) == []  # there is nobody left to tell


def test_bytes_that_died_with_their_host_do_not_count_for_its_successor() -> None:
    script = Script()
    host = "island0/host0"
    script.send(HostReport(0.0, "early", host, resident=(77,)))
    script.join(host)
    where = script.slice(2)
    script.send(BufferDeclared(0.0, "declare", "kernel-1", 77, where, 8))
    assert 77 not in script.resolved
    script.arrive(77, where)
    assert script.resolved[77] is None


def test_a_replaced_device_process_is_a_lost_one() -> None:
    script = Script()
    where = script.slice(4)
    run = script.submit(heavy(script, where, 4))
    script.join("island0/host0")
    assert "was replaced" in script.ended[run.run].failure.message  # type: ignore[union-attr]
    assert script.submit(heavy(script, script.slice(4), 4, "again")).run in script.order


def test_the_story_of_a_run_is_told_by_its_messages() -> None:
    script = Script()
    run = script.submit(heavy(script, script.slice(4), 4))
    script.finish_all()
    story = script.story(run.run)
    for word in ("RunSubmitted", "Grant", "HostReport", "Resolved", "RunEnded"):
        assert word in story
    assert "SliceBound" not in story
    assert [type(c) for c in told(script, SliceBound)] == [SliceBound]
    assert len(told(script, Resolved)) == 1
    assert len(told(script, Grant)) == 1


@pytest.mark.parametrize("size", [0, 1])
def test_a_program_without_steps_ends_at_once(size: int) -> None:
    script = Script()
    where = script.slice(1)
    sketch = Sketch("nothing")
    sketch.input(where, size)
    run = script.submit(script.register(sketch))
    assert script.ended[run.run].outcome == "finished"


def test_what_is_late_is_named_with_hosts_and_line() -> None:
    script, *_, plan = two_islands(hosts=2, devices=1)
    run = script.submit(plan)
    script.pass_time(3.0)
    script.finish(run.run, 0, "island0/host0")
    late = script.control.overdue(1.0, script.control.state.time)
    assert [(o.step, o.hosts, o.ready) for o in late[:1]] == [(0, ("island0/host1",), True)]
    assert [o.ready for o in late[1:]] == [False, False]
    assert str(late[0].line) == "sketch.py:1: a(...)"
    assert late[0].since == 3.0
    assert script.control.overdue(10.0, script.control.state.time) == ()


# --- leases ------------------------------------------------------------------------------


def test_an_island_is_leased_to_one_client_and_comes_back_with_it() -> None:
    script = Script(islands=2)
    script.client("kernel-2")
    script.send(LeaseRequested(0.0, "lease", "kernel-2", "island1"))
    assert [c.island for c in told(script, Leased)] == ["island1"]
    assert script.binding(script.slice(4)).island == "island0"
    with pytest.raises(PathwaysError, match="is leased to kernel-2"):
        script.slice(1, island="island1")
    assert script.binding(script.slice(4, client="kernel-2", island="island1")).island == "island1"
    script.send(ClientLeft(0.0, "gone", "kernel-2", "closed"))
    script.slice(1, island="island1")


def test_no_lease_while_others_have_anything_there() -> None:
    script = Script()
    script.client("kernel-2")
    where = script.slice(1)
    for client, island, words in (
        ("kernel-2", "island0", "kernel-1 has slice s1 (bound, 1 devices)"),
        ("kernel-2", "island9", "there is no island"),
    ):
        script.send(LeaseRequested(0.0, "lease", client, island))
        assert words in script.refused[-1].failure.message
    script.send(LeaseReturned(0.0, "lease", "kernel-2", "island0"))
    assert "has no such lease" in script.refused[-1].failure.message
    script.send(SliceReleased(0.0, "release", "kernel-1", where))
    script.send(LeaseRequested(0.0, "lease", "kernel-2", "island0"))
    assert [c.island for c in told(script, Leased)] == ["island0"]
    script.send(LeaseReturned(0.0, "lease", "kernel-2", "island0"))
    script.slice(1)


def test_a_program_that_came_too_late_for_its_host_is_refused_naming_the_host() -> None:
    """Registered after the loss, or registered before it and its slice released since."""
    script = Script()
    where = script.slice(2)
    known = heavy(script, where, 4)
    script.send(HostLost(0.0, "lost", "island0/host0", "it was killed"))
    new = heavy(script, where, 4, "late")
    script.send(SliceReleased(0.0, "release", "kernel-1", where))
    for plan in (known, new):
        failure = script.ended[script.submit(plan).run].failure
        assert failure is not None
        assert failure.kind == "lost"
        assert failure.host == "island0/host0"
        assert "was lost: it was killed" in failure.message


def test_a_lost_host_is_named_once_and_its_slices_can_be_had_again() -> None:
    script = Script()
    run = script.submit(heavy(script, script.slice(2), 4))
    reason = "island0/host0 closed the connection"
    script.send(HostLost(0.0, "lost", "island0/host0", reason))
    failure = script.ended[run.run].failure
    assert failure is not None
    assert failure.host == "island0/host0"
    told = str(PathwaysError(failure))
    assert told.startswith("host island0/host0 was lost: it closed the connection\n")
    assert told.count("island0/host0") == 1
    assert "slice.rebind()" in told
    other = replace(failure, host="island1/host0")
    assert "host island1/host0" in str(PathwaysError(other))


def test_a_program_may_be_registered_again_after_it_was_refused() -> None:
    script = Script()
    where = script.slice(2)
    sketch = Sketch("p").chain(where, "never.announced")
    plan = lower(sketch.program({where: 2}))
    script.send(ProgramRegistered(0.0, "x", "kernel-1", plan))
    refused = script.submit(plan)
    assert "unannounced" in script.ended[refused.run].failure.message  # type: ignore[union-attr]
    script.register(sketch)
    again = script.submit(plan)
    script.finish_all()
    assert script.ended[again.run].outcome == "finished"


def test_slices_whose_collectives_broke_are_lost_and_their_devices_serve_again() -> None:
    """All hosts live: what was on the slices fails, the order goes on, new slices work."""
    script = Script(islands=1)
    broken, other = script.slice(4), script.slice(4)
    plan, beside = heavy(script, broken, 4), heavy(script, other, 4, "beside")
    kept, running = script.submit(plan), script.submit(plan)
    script.finish(kept.run)
    going_on = script.submit(beside)
    script.send(SlicesLost(1.0, "broken", (broken, 77), "the network broke"))
    for run in (kept, running):
        failure = script.resolved[run.outputs[0]]
        assert failure is not None
        assert failure.kind == "lost"
        assert "the network broke" in failure.message
    assert script.ended[running.run].outcome == "failed"
    late = script.ended[script.submit(plan).run].failure
    assert late is not None
    assert "the network broke" in late.message
    again = script.slice(4)
    more = script.submit(heavy(script, again, 4, "again"))
    script.finish_all()
    assert script.ended[going_on.run].outcome == script.ended[more.run].outcome == "finished"
    grants = told(script, Grant)
    assert len({grant.epoch for grant in grants}) == 1, "no host was lost: the order goes on"
    assert [f.slice for f in told(script, SliceWithdrawn)] == [broken]
