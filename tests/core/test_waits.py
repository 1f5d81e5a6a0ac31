"""Laws: a cycle is found exactly when something can never move, and predicted when it could be."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pathways_lab.core.diagnosis.wait_cycles import (
    Launch,
    Wait,
    find_cycle,
    launches,
    possible_cycle,
)
from pathways_lab.core.program.plans import index_plan
from pathways_lab.testing import Script, Sketch

A = Launch("A", ("host0", "host1"))
B = Launch("B", ("host0", "host1"))
C = Launch("C", ("host0", "host1"))


def test_two_programs_in_two_orders_wait_for_each_other() -> None:
    cycle = find_cycle([A, B], {"host0": "AB", "host1": "BA"})
    assert cycle == (Wait("A", "B", "host1"), Wait("B", "A", "host0"))
    assert [str(w) for w in cycle] == [
        "A waits on host1 behind B",
        "B waits on host0 behind A",
    ]


def test_one_order_never_deadlocks() -> None:
    assert find_cycle([A, B], {"host0": "AB", "host1": "AB"}) == ()


def test_two_streams_cure_two_programs_and_three_programs_bring_it_back() -> None:
    assert find_cycle([A, B], {"host0": "AB", "host1": "BA"}, streams=2) == ()
    orders = {"host0": "ABC", "host1": "CBA"}
    assert find_cycle([A, B, C], orders, streams=2) == ()  # B runs beside either
    three = [Launch(n, ("host0", "host1", "host2")) for n in "ABC"]
    orders = {"host0": "ABC", "host1": "BCA", "host2": "CAB"}
    assert find_cycle(three, orders, streams=2)
    assert find_cycle(three, orders, streams=3) == ()


def test_results_close_a_cycle_even_without_collectives() -> None:
    """Why a gang is granted only after the gangs that make its inputs."""
    gangs = [
        Launch("p1", ("host0",)), Launch("p2", ("host1",), ("p1",)),
        Launch("q1", ("host1",)), Launch("q2", ("host0",), ("q1",)),
    ]  # fmt: skip
    cycle = find_cycle(gangs, {"host0": ("q2", "p1"), "host1": ("p2", "q1")})
    assert {w.gang for w in cycle} == {"p1", "p2", "q1", "q2"}
    assert find_cycle(gangs, {"host0": ("p1", "q2"), "host1": ("q1", "p2")}) == ()


def test_a_gang_that_was_never_launched_somewhere_is_named() -> None:
    (wait,) = find_cycle([A], {"host0": "A", "host1": ""})
    assert wait == Wait("A", None, "host1")


class Counted(tuple[str, ...]):
    """Queues that count how often somebody goes through them."""

    looks = 0

    def __iter__(self) -> Iterator[str]:
        Counted.looks += 1
        return super().__iter__()


def test_a_gang_is_looked_at_again_only_when_what_it_waited_for_has_ended() -> None:
    """So that a thousand gangs take a thousand times as long as one, and not a million times."""
    chain = [Launch(n, Counted((f"host{n % 4}",)), (n - 1,) if n else ()) for n in range(200)]
    orders = {f"host{h}": range(h, 200, 4) for h in range(4)}
    before = Counted.looks
    assert find_cycle(chain, orders) == ()
    assert Counted.looks - before <= 4 * len(chain)


@st.composite
def crowds(draw: st.DrawFn) -> dict[str, tuple[Launch, ...]]:
    """Up to three programs of a few gangs on up to four queues."""
    programs = {}
    for name in draw(st.sampled_from(("PQ", "PQR"))):
        gangs: list[Launch] = []
        for n in range(draw(st.integers(1, 3))):
            queues = draw(st.sets(st.integers(0, 3), min_size=1, max_size=3))
            after = draw(st.sets(st.sampled_from([g.name for g in gangs]))) if gangs else set()
            gangs.append(Launch(f"{name}{n}", tuple(sorted(queues)), tuple(sorted(after))))
        programs[name] = tuple(gangs)
    return programs


@settings(deadline=None)
@given(crowds(), st.randoms(use_true_random=False))
def test_a_predicted_cycle_really_deadlocks_and_an_impossible_one_never_does(
    programs: dict[str, tuple[Launch, ...]], rng: random.Random
) -> None:
    gangs = [g for of in programs.values() for g in of]
    cycle, orders = possible_cycle(programs)
    if cycle:
        for queue, order in orders.items():
            assert sorted(order) == sorted(g.name for g in gangs if queue in g.queues)
        assert find_cycle(gangs, orders)
        assert all(w.behind == v.gang for w, v in zip(cycle, (*cycle[1:], cycle[0]), strict=True))
        return
    for _ in range(20):
        mixed: dict[object, list[object]] = {}
        for queue in {q for g in gangs for q in g.queues}:
            rest = [[g.name for g in of if queue in g.queues] for of in programs.values()]
            rest = [r for r in rest if r]
            mixed[queue] = []
            while rest:
                chosen = rng.choice(rest)
                mixed[queue].append(chosen.pop(0))
                rest = [r for r in rest if r]
        assert find_cycle(gangs, mixed) == ()


@pytest.mark.parametrize(("devices", "possible"), [(2, True), (1, False)])
def test_programs_of_the_lab_can_be_checked_before_they_run(devices: int, possible: bool) -> None:
    """Collectives over two hosts can deadlock, those of one host cannot."""
    script = Script(hosts=2, devices=1)
    programs = {}
    for name in "PQ":
        where = script.slice(devices)
        plan = script.register(Sketch(name).chain(where, f"{name}.f"))
        index = index_plan(plan, "", {where: script.binding(where)})
        programs[name] = launches(index, name)
    cycle, orders = possible_cycle(programs)
    assert bool(cycle) == possible
    if possible:
        assert set(orders) == {"island0/host0", "island0/host1"}


def test_results_pass_through_transfers() -> None:
    script = Script(islands=2)
    left, right = script.slice(1, island="island0"), script.slice(1, island="island1")
    sketch = Sketch("pair")
    (x,) = sketch.call("a", left, [sketch.input(left, 1)], [1])
    (y,) = sketch.call("b", right, [x], [1])
    plan = script.register(sketch.output(y))
    bindings = {s: script.binding(s) for s in (left, right)}
    first, second = launches(index_plan(plan, "", bindings), "run 1")
    assert second.after == (first.name,)
    assert first.name == ("run 1", "a", 0)
