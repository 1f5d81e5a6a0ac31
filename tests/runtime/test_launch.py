"""Order, poison, donation and memory on one host, without threads and without JAX."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from pathways_lab.core.errors import Failure
from pathways_lab.core.slices.topology import SliceBinding
from pathways_lab.executor.actions import (
    Broken,
    CancelReceive,
    Refuse,
    RunOver,
    Serve,
)
from pathways_lab.executor.launcher import Launcher
from pathways_lab.executor.steps import Segment
from tests.runtime.launch_kit import BYTES, HOST, Bench, PlanBuilder, binding, grant, value

BOOM = Failure("execute", "boom")
OTHER = "island0/host1"
FAR = "island1/host0"


# --- order ------------------------------------------------------------------------------


def test_a_chain_on_one_lane_is_handed_over_at_once() -> None:
    """Nothing waits for a computation: the lane is a queue."""
    bench = Bench(binding(1, 0, 1))
    plan = PlanBuilder().call(1, "f", ["a"], ["b"]).call(1, "g", ["b"], ["c"]).plan(["a"], ["c"])
    bench.launcher.program(plan)
    bench.grant(grant(7, plan, inputs=(None,), outputs=(70,)), _0="A")
    assert bench.launched() == ["f", "g"]
    assert [a.seq for a in bench.actions if isinstance(a, Segment)] == [0, 1]
    bench.done("f")
    bench.done("g")
    assert [key for key, _ in bench.reports()] == [(7, 0), (7, 1)]
    assert isinstance(bench.actions[-1], RunOver)


def test_overlapping_lanes_are_chained_by_completion_in_grant_order() -> None:
    bench = Bench(binding(1, 0, 1), binding(2, 1, 2), binding(3, 2, 3))
    plan = (
        PlanBuilder()
        .call(1, "f", [], ["a"])
        .call(2, "g", [], ["b"])
        .call(3, "h", [], ["c"])
        .call(1, "i", [], ["d"])
        .plan([], [])
    )
    bench.launcher.program(plan)
    bench.grant(grant(1, plan))
    assert bench.launched() == ["f"]  # g waits for f, h for g, i for g
    bench.done("f")
    assert bench.launched() == ["f", "g"]
    bench.done("g")
    assert bench.launched() == ["f", "g", "h", "i"]


def test_disjoint_lanes_do_not_wait_for_each_other() -> None:
    bench = Bench(binding(1, 0), binding(2, 1))
    plan = PlanBuilder().call(1, "f", [], ["a"]).call(2, "g", [], ["b"]).plan([], [])
    bench.launcher.program(plan)
    bench.grant(grant(1, plan))
    assert bench.launched() == ["f", "g"]


def waiting_gang_bench(second: SliceBinding) -> Bench:
    """Run 1's gang on slice 1 waits for a transfer; run 2's gang is on *second*."""
    bench = Bench(binding(1, 0, 1), second, binding(9, 0, host=FAR))
    build = PlanBuilder("waits")
    build.add(9, "far")
    waits = build.move("far", 1, "near").call(1, "f", ["near"], ["a"]).plan(["far"], [])
    other = PlanBuilder("other").call(second.slice, "g", [], ["b"]).plan([], [])
    for plan in (waits, other):
        bench.launcher.program(plan)
    bench.grant(grant(1, waits, inputs=(10,)))
    bench.grant(grant(2, other))
    return bench


def test_a_waiting_gang_is_passed_over_by_disjoint_ones() -> None:
    bench = waiting_gang_bench(binding(2, 2, 3))
    assert bench.launched() == ["g"]
    bench.take(bench.launcher.received((1, 0), "payload"))
    assert bench.launched() == ["g", "f"]


@pytest.mark.parametrize("devices", [(0, 1), (1, 2), (1,)])
def test_a_waiting_gang_holds_back_those_that_share_a_device(devices: tuple[int, ...]) -> None:
    bench = waiting_gang_bench(binding(2, *devices))
    assert bench.launched() == []
    bench.take(bench.launcher.received((1, 0), "payload"))
    bench.done("f")
    assert bench.launched() == ["f", "g"]


def test_a_device_shared_on_another_host_keeps_the_order_but_needs_no_completion() -> None:
    """Rule 1 speaks of devices on any host; the other host chains them itself."""
    wide = SliceBinding(1, "k", "island0", (2,), ("x",), ((HOST, 0), (OTHER, 0)), "cpu")
    cross = SliceBinding(2, "k", "island0", (2,), ("x",), ((HOST, 1), (OTHER, 0)), "cpu")
    bench = Bench(wide, cross, binding(9, 0, host=FAR))
    build = PlanBuilder("waits")
    build.add(9, "far")
    plan = (
        build.move("far", 1, "near")
        .call(1, "f", ["near"], ["a"])
        .call(2, "g", [], ["b"])
        .plan(["far"], [])
    )
    bench.launcher.program(plan)
    bench.grant(grant(1, plan, inputs=(10,)))
    assert bench.launched() == []
    bench.take(bench.launcher.received((1, 0), "payload"))
    assert bench.launched() == ["f", "g"]  # no waiting for the end of f


def test_the_place_of_a_gang_is_found_without_a_look_at_its_devices() -> None:
    """A slice may have thousands: what two of them share is worked out once."""
    looks = 0

    class Devices(tuple[Any, ...]):
        def __iter__(self) -> Iterator[Any]:
            nonlocal looks
            looks += 1
            return super().__iter__()

    slices = [binding(1, *range(6)), binding(2, *range(4, 9)), binding(3, 20)]
    bench = Bench(*(replace(b, devices=Devices(b.devices)) for b in slices))
    build = PlanBuilder()
    for slice_id in (1, 2, 3, 1):
        build.call(slice_id, "f", [], [f"v{len(build.nodes)}"])
    plan = build.plan([], [])
    bench.launcher.program(plan)
    for run in (1, 2):
        bench.grant(grant(run, plan))
    before = looks
    for run in range(3, 8):
        bench.grant(grant(run, plan))
    assert looks == before


def test_a_function_that_calls_back_is_alone_on_its_lane() -> None:
    """It may fail on one device only; who comes next must know before it starts."""
    bench = Bench(binding(1, 0))
    plan = (
        PlanBuilder()
        .call(1, "f", [], ["a"])
        .call(1, "prints", ["a"], ["b"])
        .call(1, "g", ["b"], ["c"])
        .plan([], [])
    )
    bench.launcher.program(plan)
    bench.launcher.launches_alone("prints", 1)
    bench.grant(grant(1, plan))
    assert bench.launched() == ["f"]
    bench.done("f")
    assert bench.launched() == ["f", "prints"]
    bench.done("prints", BOOM)
    assert bench.launched() == ["f", "prints", "g"]
    assert bench.poison("g") is BOOM


def test_the_first_gang_of_a_function_on_several_hosts_is_alone() -> None:
    """Its hosts meet before it; nothing may be in flight with it, and later ones are free."""
    bench = Bench(binding(1, 0))
    build = PlanBuilder().call(1, "f", [], ["a"]).call(1, "g", ["a"], ["b"])
    plan = build.call(1, "h", ["b"], ["c"]).plan([], [])
    again = PlanBuilder("again").call(1, "g", [], ["d"]).call(1, "h", [], ["e"]).plan([], [])
    for each in (plan, again):
        bench.launcher.program(each)
    bench.launcher.first_launches_alone("g", 1)
    bench.grant(grant(1, plan))
    assert bench.launched() == ["f"]
    bench.done("f")
    assert bench.launched() == ["f", "g"]
    assert bench.launch("g").first
    bench.done("g")
    assert bench.launched() == ["f", "g", "h"]
    bench.grant(grant(2, again))
    assert bench.launched() == ["f", "g", "h", "g", "h"]
    assert not any(a.first for a in bench.actions[-2:] if isinstance(a, Segment))


# --- grants --------------------------------------------------------------------------------


def test_repeats_are_ignored_and_gaps_reported() -> None:
    launcher = Launcher(HOST, "island0")
    launcher.bind(binding(1, 0), "0")
    plan = PlanBuilder().call(1, "f", [], ["a"]).call(1, "g", [], ["b"]).plan([], [])
    launcher.program(plan)
    first = grant(1, plan, last=1, place=5)
    assert len(launcher.grant(first)) == 1
    assert launcher.grant(first) == []
    (broken,) = launcher.grant(grant(1, plan, first=1, place=8, previous=7))
    assert isinstance(broken, Broken)
    assert "place 8" in broken.message
    assert "last one it saw is 5" in broken.message
    assert len(launcher.grant(grant(1, plan, first=1, place=8, previous=5))) == 1


def test_a_new_epoch_starts_over_and_an_old_one_is_ignored() -> None:
    launcher = Launcher(HOST, "island0")
    launcher.bind(binding(1, 0), "0")
    plan = PlanBuilder().call(1, "f", [], ["a"]).plan([], [])
    launcher.program(plan)
    assert launcher.grant(grant(1, plan, place=5, epoch=1))
    assert launcher.grant(grant(2, plan, place=0, epoch=2))
    assert launcher.grant(grant(3, plan, place=6, previous=5, epoch=1)) == []


@pytest.mark.parametrize("missing", ["plan", "slice", "over"])
def test_a_grant_that_makes_no_sense_breaks_the_host(missing: str) -> None:
    launcher = Launcher(HOST, "island0")
    plan = PlanBuilder().call(1, "f", [], ["a"]).plan([], [])
    if missing != "slice":
        launcher.bind(binding(1, 0), "0")
    if missing != "plan":
        launcher.program(plan)
    if missing == "over":
        launcher.abort(1, BOOM)
    (action,) = launcher.grant(grant(1, plan))
    assert isinstance(action, Broken)


def test_a_run_ends_when_the_last_step_of_this_host_does() -> None:
    """A host is not told of later windows that do not concern it."""
    bench = Bench(binding(1, 0), binding(9, 0, host=FAR))
    bench.launcher.bind(binding(9, 0, host=FAR), "")
    build = PlanBuilder().call(1, "f", [], ["a"]).move("a", 9, "b").call(9, "g", ["b"], ["c"])
    plan = build.plan([], ["c"])
    bench.launcher.program(plan)
    bench.grant(grant(1, plan, last=2, outputs=(10,)))
    bench.done("f")
    bench.take(bench.launcher.sent((1, 1)))
    assert isinstance(bench.actions[-1], RunOver)
    assert bench.launcher.idle
    assert bench.memory() == 0


# --- failures ---------------------------------------------------------------------------------


def test_a_missing_input_is_zeros_and_poison_not_a_skipped_gang() -> None:
    bench = Bench(binding(1, 0))
    plan = PlanBuilder().call(1, "f", ["a"], ["b"]).call(1, "g", ["b"], ["c"]).plan(["a"], ["c"])
    bench.launcher.program(plan)
    bench.grant(grant(1, plan, inputs=(99,), outputs=(10,)))  # buffer 99 is unknown here
    assert bench.launched() == ["f", "g"]
    poison = [bench.poison(function) for function in ("f", "g")]
    assert all(why and "99" in why.message for why in poison)
    bench.done("f")
    bench.done("g")
    assert [why and why.kind for _, why in bench.reports()] == ["internal", "internal"]
    bench.take(bench.launcher.fetch("me", 10))
    assert isinstance(bench.actions[-1], Refuse)
    assert bench.memory() == 0


@pytest.mark.parametrize("echo", [Failure("execute", "an input was an error"), None])
def test_a_failure_in_flight_is_the_cause_of_its_echoes(echo: Failure | None) -> None:
    """Also of those that were computed from zeros, without an echo."""
    bench = Bench(binding(1, 0))
    plan = PlanBuilder().call(1, "f", [], ["a"]).call(1, "g", ["a"], ["b"]).plan([], [])
    bench.launcher.program(plan)
    bench.grant(grant(1, plan))
    assert bench.launched() == ["f", "g"]
    bench.done("f", BOOM)
    bench.done("g", echo)
    assert [why for _, why in bench.reports()] == [BOOM, BOOM]


def test_a_failed_source_is_told_to_the_receivers() -> None:
    bench = Bench(binding(1, 0), binding(2, 1))
    plan = (
        PlanBuilder()
        .call(1, "f", [], ["a"])
        .move("a", 2, "b")
        .call(2, "g", ["b"], ["c"])
        .plan([], [])
    )
    bench.launcher.program(plan)
    bench.grant(grant(1, plan))
    assert bench.launched() == ["f"]
    assert bench.sends() == []
    bench.done("f", BOOM)
    (send,) = bench.sends()
    assert send.failure is BOOM
    bench.take(bench.launcher.received((1, 1), failure=BOOM))
    assert bench.poison("g") is BOOM
    assert [key for key, _ in bench.reports()] == [(1, 0)]  # the transfer reports once, at its end
    bench.take(bench.launcher.sent((1, 1), BOOM))
    assert [key for key, _ in bench.reports()] == [(1, 0), (1, 1)]


def test_abort_waits_for_nothing_but_launches_what_was_granted() -> None:
    bench = waiting_gang_bench(binding(2, 1))
    bench.take(bench.launcher.abort(1, Failure("cancelled", "by its client")))
    assert any(isinstance(a, CancelReceive) for a in bench.actions)
    assert bench.launched() == ["f"]
    poison = bench.poison("f")
    assert poison is not None
    assert poison.kind == "cancelled"
    bench.done("f")
    assert bench.launched() == ["f", "g"]
    assert bench.take(bench.launcher.received((1, 0), "too late")) == []
    bench.done("g")
    assert sorted(key for key, _ in bench.reports()) == [(1, 0), (1, 1), (2, 0)]
    assert bench.launcher.idle


def test_abort_of_a_run_in_mid_window_ends_it() -> None:
    """Its later windows never come: outputs that nobody made fail."""
    bench = Bench(binding(1, 0))
    plan = PlanBuilder().call(1, "f", [], ["a"]).call(1, "g", ["a"], ["b"]).plan([], ["b"])
    bench.launcher.program(plan)
    bench.grant(grant(1, plan, last=1, outputs=(10,)))
    bench.take(bench.launcher.fetch("me", 10))
    bench.done("f")
    assert not any(isinstance(a, RunOver) for a in bench.actions)
    bench.take(bench.launcher.abort(1, BOOM))
    assert any(isinstance(a, RunOver) for a in bench.actions)
    refusals = [a for a in bench.actions if isinstance(a, Refuse)]
    assert [r.failure for r in refusals] == [BOOM]


# --- memory, donation, buffers ----------------------------------------------------------------


def test_memory_is_given_back_after_the_last_use() -> None:
    bench = Bench(binding(1, 0, 1))
    plan = (
        PlanBuilder()
        .call(1, "f", ["a"], ["b"])
        .call(1, "g", ["b"], ["c"])
        .call(1, "h", ["c"], ["d"])
        .plan(["a"], ["d"])
    )
    bench.launcher.program(plan)
    bench.grant(grant(1, plan, inputs=(None,), outputs=(10,)), _0="A")
    two = 2 * BYTES
    assert bench.memory() == 4 * two
    bench.done("f")
    assert bench.memory() == 3 * two
    bench.done("g")
    bench.done("h")
    assert bench.memory() == two
    slot = bench.launcher.buffers.get(10)
    assert slot is not None
    assert slot.payload is not None
    bench.take(bench.launcher.free((10,)))
    assert bench.memory() == 0
    assert slot.payload is None


def test_buffers_carry_values_to_later_runs() -> None:
    bench = Bench(binding(1, 0))
    first = PlanBuilder("p").call(1, "f", [], ["a"]).plan([], ["a"])
    second = PlanBuilder("q").call(1, "g", ["a"], ["b"]).plan(["a"], [])
    for plan in (first, second):
        bench.launcher.program(plan)
    bench.grant(grant(1, first, outputs=(10,)))
    bench.grant(grant(2, second, inputs=(10,)))
    assert bench.launched() == ["f", "g"]
    assert bench.launch("g").inputs[0] is next(iter(bench.launch("f").outputs.values()))
    bench.take(bench.launcher.free((10,)))  # the handle goes while both are in flight
    bench.done("f")
    assert bench.memory() > 0
    bench.done("g")
    assert bench.memory() == 0


def test_a_buffer_freed_before_it_exists_is_never_stored() -> None:
    bench = Bench(binding(1, 0))
    plan = PlanBuilder().call(1, "f", [], ["a"]).plan([], ["a"])
    bench.launcher.program(plan)
    bench.take(bench.launcher.free((10, 11)))
    bench.grant(grant(1, plan, outputs=(10,)))
    bench.done("f")
    bench.take(bench.launcher.uploaded(11, value(1, "u"), "payload"))
    assert len(bench.launcher.buffers) == 0
    assert bench.memory() == 0


def test_donation_moves_the_memory_and_ends_the_value() -> None:
    bench = Bench(binding(1, 0))
    bench.take(bench.launcher.uploaded(10, value(1, "u"), "payload"))
    plan = PlanBuilder().call(1, "f", ["a"], ["b"], donated=(0,)).plan(["a"], ["b"])
    bench.launcher.program(plan)
    bench.grant(grant(1, plan, inputs=(10,), outputs=(11,)))
    assert bench.memory() == BYTES
    assert bench.launch("f").copies == frozenset()
    bench.take(bench.launcher.fetch("me", 10))
    refusal = bench.actions[-1]
    assert isinstance(refusal, Refuse)
    assert "donated" in refusal.failure.message
    bench.done("f")
    bench.take(bench.launcher.free((10, 11)))
    assert bench.memory() == 0


def test_a_donated_array_with_another_name_is_copied() -> None:
    bench = Bench(binding(1, 0))
    both = PlanBuilder("p").call(1, "f", [], ["a"]).plan([], ["a", "a"])
    donates = PlanBuilder("q").call(1, "g", ["a"], ["b"], donated=(0,)).plan(["a"], [])
    for plan in (both, donates):
        bench.launcher.program(plan)
    bench.grant(grant(1, both, outputs=(10, 11)))
    bench.done("f")
    bench.grant(grant(2, donates, inputs=(10,)))
    assert bench.launch("g").copies == {0}
    bench.take(bench.launcher.fetch("me", 11))
    assert isinstance(bench.actions[-1], Serve)


@pytest.mark.parametrize("reader", ["transfer", "fetch"])
def test_a_donation_waits_for_earlier_readers(reader: str) -> None:
    bench = Bench(binding(1, 0), binding(2, 1))
    bench.take(bench.launcher.uploaded(10, value(1, "u"), "payload"))
    build = PlanBuilder()
    build.add(1, "a")
    if reader == "transfer":
        build.move("a", 2, "copy")
    else:
        bench.take(bench.launcher.fetch("me", 10))
    plan = build.call(1, "f", ["a"], ["b"], donated=(0,)).plan(["a"], [])
    bench.launcher.program(plan)
    bench.grant(grant(1, plan, inputs=(10,)))
    assert bench.launched() == []
    if reader == "transfer":
        bench.take(bench.launcher.sent((1, 0)))
    else:
        (serve,) = [a for a in bench.actions if isinstance(a, Serve)]
        bench.take(bench.launcher.served(serve.slot, serve.reader))
    assert bench.launched() == ["f"]


def test_a_fetch_waits_for_the_value_whenever_it_was_asked() -> None:
    bench = Bench(binding(1, 0))
    plan = PlanBuilder().call(1, "f", [], ["a"]).plan([], ["a"])
    bench.launcher.program(plan)
    bench.take(bench.launcher.fetch("early", 10))
    bench.grant(grant(1, plan, outputs=(10,)))
    bench.take(bench.launcher.fetch("late", 10))
    assert not any(isinstance(a, Serve) for a in bench.actions)
    bench.done("f")
    assert [a.fetch for a in bench.actions if isinstance(a, Serve)] == ["early", "late"]


def test_fetches_of_a_dropped_buffer_and_of_a_lost_client() -> None:
    bench = Bench(binding(1, 0))
    bench.take(bench.launcher.fetch(("link-a", 1), 10))
    bench.take(bench.launcher.fetch(("link-b", 1), 11))
    bench.launcher.forget_fetches(lambda f: f[0] == "link-a")  # type: ignore[index]
    bench.take(bench.launcher.free((10, 11)))
    assert [a.fetch for a in bench.actions if isinstance(a, Refuse)] == [("link-b", 1)]


def test_unbinding_a_slice_drops_its_buffers() -> None:
    bench = Bench(binding(1, 0))
    bench.take(bench.launcher.uploaded(10, value(1, "u"), "payload"))
    bench.take(bench.launcher.unbind(1))
    assert bench.memory() == 0
