"""Slices that span islands: where they lie, and the places of their gangs."""

from __future__ import annotations

from typing import ClassVar

import pytest

from pathways_lab.core.errors import Failure, PathwaysError
from pathways_lab.core.messages import (
    Grant,
    HostLost,
    HostReport,
    LeaseRequested,
    LeaseReturned,
)
from pathways_lab.core.messages.elastic import (
    RebindRequested,
    ResumeRequested,
    SuspendRequested,
)
from pathways_lab.core.scheduling.policies import FIFO, PlaceView
from pathways_lab.core.scheduling.rules import Rules
from pathways_lab.core.slices.slices import ResourceManager
from pathways_lab.core.slices.topology import SliceBinding, SliceRequest
from pathways_lab.testing import Script, Sketch
from tests.core.test_slices import bind, join, machine, refusal

BOTH = ("", "")
LEFT, RIGHT = "island0/host0", "island1/host0"

# --- devices ------------------------------------------------------------------------------


def test_each_island_has_an_equal_part_of_the_first_axis() -> None:
    bound = bind(machine(islands=2, hosts=1, devices=4), 1, 4, 2, islands=BOTH)
    assert bound.devices == tuple((host, n) for host in (LEFT, RIGHT) for n in range(4))
    assert (bound.island, bound.islands) == ("island0", ("island0", "island1"))
    assert bound.home == {LEFT: "island0", RIGHT: "island1"}


def test_named_islands_keep_their_order_and_others_are_the_least_shared() -> None:
    resources = machine(islands=3, hosts=1, devices=2)
    assert bind(resources, 1, 4, islands=("island2", "island0")).islands == ("island2", "island0")
    assert bind(resources, 2, 4, islands=("", "island2")).islands == ("island1", "island2")
    assert bind(resources, 3, 4, islands=BOTH).islands == ("island0", "island1")


def test_a_slice_does_not_span_devices_of_two_kinds() -> None:
    resources = ResourceManager()
    for n, kind in enumerate(("gpu", "cpu", "gpu")):
        join(resources, f"island{n}/host0", 2, kind=kind)
    assert bind(resources, 1, 4, islands=BOTH).islands == ("island0", "island2")
    assert "no 2 islands can hold" in refusal(resources, 4, islands=BOTH, kind="cpu").message


def test_a_slice_spans_islands_of_one_site_only() -> None:
    """Hosts on machines that do not trust the network between them do not compute together."""
    resources = ResourceManager()
    for n, site in enumerate("abb"):
        join(resources, f"island{n}/host0", 2, site=site)
    assert bind(resources, 1, 4, islands=BOTH).islands == ("island1", "island2")
    for wishes in (
        {"islands": ("island0", "")},
        {"at": tuple((f"island{n}/host0", m) for n in (0, 1) for m in (0, 1))},
    ):
        told = refusal(resources, 4, **wishes)
        assert "island0/host0 (cpu) and island1/host0 (cpu) cannot compute together" in told.message
        assert "plain_collectives=True" in told.remedy


@pytest.mark.parametrize(
    ("shape", "wishes", "words"),
    [
        ((3,), {"islands": BOTH}, "cannot be cut into 2 equal parts"),
        ((2,), {"islands": ("island0", "island0")}, "each once"),
        ((2,), {"islands": BOTH, "island": "island0"}, "each once"),
        ((4,), {"islands": ("island0", "island7")}, "no island 'island7'"),
        ((12,), {"islands": BOTH}, "no 2 islands can hold equal parts"),
        ((12,), {}, "no island can hold"),
        ((3,), {"islands": ("",) * 3}, "no 3 islands"),
    ],
)
def test_a_wish_that_cannot_be_is_refused_with_the_rule(
    shape: tuple[int, ...], wishes: dict[str, object], words: str
) -> None:
    assert words in refusal(machine(islands=2, hosts=1, devices=4), *shape, **wishes).message


def test_a_slice_that_does_not_fit_one_island_is_told_that_it_may_span_several() -> None:
    assert "islands=2" in refusal(machine(islands=2, hosts=1, devices=4), 8).remedy


def test_a_lost_part_is_replaced_on_as_many_islands_or_the_whole_on_one_that_is_named() -> None:
    resources = machine(islands=3, hosts=1, devices=4)
    assert bind(resources, 1, 4, islands=BOTH).islands == ("island0", "island1")
    resources.lose(RIGHT, Failure("lost", "it is gone"))
    again = resources.bind_again(1, None)
    assert isinstance(again, SliceBinding)
    assert again.islands == ("island0", "island2")
    resources.lose("island2/host0", Failure("lost", "it is gone"))
    assert isinstance(resources.bind_again(1, None), Failure)
    alone = resources.bind_again(1, "island0")
    assert isinstance(alone, SliceBinding)
    assert alone.islands == ("island0",)


class Asked(FIFO):
    """It is asked for the island of a slice."""

    views: ClassVar[list[PlaceView]] = []

    def place(self, view: PlaceView) -> str:
        self.views.append(view)
        return view.candidates[-1].island


def test_a_policy_chooses_no_island_for_a_slice_that_spans_some() -> None:
    script = Script(islands=2, policy=Asked())
    Asked.views.clear()  # it was tried first
    assert script.binding(script.slice(4, islands=BOTH)).islands == ("island0", "island1")
    assert Asked.views == []
    assert script.binding(script.slice(4)).islands == ("island1",)
    assert len(Asked.views) == 1


def test_a_slice_that_leaves_its_devices_comes_back_to_all_of_them() -> None:
    script = Script(islands=2)
    where = script.slice(8, islands=BOTH)
    bound, plan = script.binding(where), script.register(Sketch("p").chain(where, "f"))
    script.submit(plan)
    script.finish_all()
    script.send(SuspendRequested(script.time, "suspend", "kernel-1", "kernel-1"))
    assert script.control.slices[where].away
    script.send(ResumeRequested(script.time, "resume", "kernel-1", "kernel-1"))
    assert script.binding(where) == bound
    run = script.submit(plan)
    script.finish_all()
    assert script.ended[run.run].outcome == "finished"


# --- places -------------------------------------------------------------------------------


def two_clients(**rules: bool) -> tuple[Script, list[int]]:
    """Each of two clients has a gang over both islands; both gangs get their places in one event.

    Returns the runs too.
    """
    script = Script(islands=2, compile=False, rules=Rules(**rules))
    script.client("kernel-2")
    runs = []
    for client in ("kernel-1", "kernel-2"):
        where = script.slice(8, client=client, islands=BOTH)
        plan = script.register(Sketch(client).chain(where, f"{client}.f"), client=client)
        runs.append(script.submit(plan, client=client).run)
    compiled = tuple((p.function, p.slice, 0, None) for p in script.compiling)
    for host in (LEFT, RIGHT):
        script.send(HostReport(script.time, "compiled", host, compiled=compiled))
    return script, runs


def places(script: Script, host: str) -> list[tuple[int, int]]:
    """Place and run of every grant of a host, in the order in which it heard of them."""
    return [(grant.place, grant.run) for grant in script.grants if grant.host == host]


def test_gangs_of_two_clients_have_the_same_order_on_all_their_islands() -> None:
    script, runs = two_clients()
    assert places(script, LEFT) == places(script, RIGHT)
    assert sorted(run for _, run in places(script, LEFT)) == runs
    (steps,) = {
        tuple((c.run, c.host) for c in commands if isinstance(c, Grant))
        for _, commands in script.log
    } - {()}
    first, second = (run for _, run in places(script, LEFT))
    assert steps == ((first, LEFT), (first, RIGHT), (second, LEFT), (second, RIGHT))
    script.finish_all()
    assert {end.outcome for end in script.ended.values()} == {"finished"}


def test_without_that_rule_they_meet_in_two_orders() -> None:
    """And wait for each other for ever."""
    script, runs = two_clients(together=False)
    left, right = ([run for _, run in places(script, host)] for host in (LEFT, RIGHT))
    assert sorted(left) == sorted(right) == sorted(runs)
    assert left != right


def test_a_gang_of_one_island_takes_its_place_between_those_that_span() -> None:
    script = Script(islands=2)
    wide, narrow = script.slice(4, islands=BOTH), script.slice(2, island="island1")
    over = script.register(Sketch("over").chain(wide, "f"))
    alone = script.register(Sketch("alone").chain(narrow, "g"))
    a, b, c = (script.submit(plan).run for plan in (over, alone, over))
    script.finish_all()
    assert places(script, LEFT) == [(0, a), (1, c)]
    assert places(script, RIGHT) == [(0, a), (1, b), (2, c)]


def test_bytes_that_a_transfer_brings_to_other_islands_count_and_others_do_not() -> None:
    script = Script(islands=2)
    wide, narrow = script.slice(4, islands=BOTH), script.slice(2, island="island0")
    sketch = Sketch("there and back")
    (x,) = sketch.call("a", narrow, [sketch.input(narrow, 4)], [4])
    (y,) = sketch.call("b", wide, [x], [4])
    (z,) = sketch.call("c", narrow, [y], [4])
    script.submit(script.register(sketch.output(z)))
    script.finish_all()
    assert script.control.state.accounts.of("kernel-1").dcn_bytes == 4


def test_bytes_of_collectives_over_islands_count_as_those_of_transfers() -> None:
    script = Script(islands=2, compile=False)
    wide = script.slice(4, islands=BOTH)
    plan = script.register(Sketch("over").chain(wide, "f"))
    for host in (LEFT, LEFT, RIGHT):  # one that compiles again says it again
        told = HostReport(
            script.time, "compiled", host, compiled=(("f", wide, 0, None),),
            crossing=(("f", wide, 100),),
        )  # fmt: skip
        script.send(told)
    script.submit(plan)
    script.submit(plan)
    assert script.control.state.accounts.of("kernel-1").dcn_bytes == 0
    script.finish_all()
    assert script.control.state.accounts.of("kernel-1").dcn_bytes == 400


# --- faults -------------------------------------------------------------------------------


def test_a_lost_host_fails_the_gang_on_all_islands_and_both_go_on() -> None:
    script = Script(islands=2, hosts=2, devices=1)
    wide = script.slice(2, islands=BOTH)
    others = [script.slice(1, island=island) for island in ("island0", "island1")]
    over = script.register(Sketch("over").chain(wide, "f", "g"))
    lost = script.submit(over)
    victim = script.binding(wide).hosts[1]
    script.send(HostLost(script.time, "lost", victim, "its process was killed"))
    failure = script.ended[lost.run].failure
    assert failure is not None
    assert victim in failure.message
    told = script.resolved[lost.outputs[0]]
    assert told is not None
    assert told.message == failure.message
    script.waiting.pop(victim)
    for where in others:
        if victim not in script.binding(where).hosts:
            run = script.submit(script.register(Sketch(f"on {where}").chain(where, f"{where}")))
            script.finish_all()
            assert script.ended[run.run].outcome == "finished"
    script.send(RebindRequested(script.time, "rebind", "kernel-1", wide))
    assert script.binding(wide).islands == ("island0", "island1")
    assert victim not in script.binding(wide).hosts
    again = script.submit(over)
    script.finish_all()
    assert script.ended[again.run].outcome == "finished"


def test_where_the_order_is_off_no_slice_spans_islands() -> None:
    script = Script(islands=2)
    script.slice(2, islands=BOTH)
    lease = LeaseRequested(script.time, "lease", "kernel-1", "island1", order=False)
    script.send(lease)
    assert "needs the order of all of them" in script.refused[-1].failure.message
    free = Script(islands=2)
    free.send(lease)
    with pytest.raises(PathwaysError, match="needs the order of all of them"):
        free.slice(2, islands=BOTH)
    free.send(LeaseReturned(free.time, "return", "kernel-1", "island1"))
    free.slice(2, islands=BOTH)


def test_a_slice_waits_for_all_islands_that_it_spans() -> None:
    """Each is leased to somebody else."""
    resources = machine(islands=2, hosts=1, devices=2)
    for island in ("island0", "island1"):
        assert resources.lease(island, "ann", True, {}) is None
    request = SliceRequest((4,), ("x",), islands=BOTH)
    told = resources.kept_from("bob", request)
    assert told == "island0 is leased to ann; island1 is leased to ann"
    assert resources.end_lease("island0", "ann")
    assert resources.kept_from("bob", request) == "island1 is leased to ann"
    assert resources.kept_from("ann", request) == ""
