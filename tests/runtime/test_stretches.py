"""Stretches: found where they are; a segment of n gangs is the same as n segments of one."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from pathways_lab.core.errors import Failure
from pathways_lab.core.program.program import Call, Plan
from pathways_lab.executor.actions import (
    Action,
    Key,
    Receive,
    Report,
    Send,
    Serve,
)
from pathways_lab.executor.launcher import Launcher
from pathways_lab.executor.local_array import Slot
from pathways_lab.executor.steps import Segment
from pathways_lab.executor.stretches import Part, Stretch, stretches
from tests.runtime.launch_kit import BYTES, HOST, OneByOne, PlanBuilder, binding, grant

SEEDS = range(400)
WIDE = replace(binding(1, 0, 1), devices=((HOST, 0), (HOST, 1), ("island0/host1", 0)))
"""A slice over two hosts."""


def chain(length: int, slice_id: int = 1) -> Plan:
    made = PlanBuilder()
    for number in range(length):
        made.call(slice_id, "f", [f"v{number}"], [f"v{number + 1}"])
    return made.plan(["v0"], [f"v{length}"])


def cut(plan: Plan, first: int, last: int, special: str = "") -> dict[int, Stretch]:
    ours = [True] * len(plan.steps)
    return stretches(plan, first, last, ours, lambda call: call.function != special, lambda _: ())


def ranges(plan: Plan, *, first: int = 0, last: int = 99, special: str = "") -> list[list[int]]:
    found = cut(plan, first, last, special)
    return [[part.index for part in stretch.parts] for stretch in found.values()]


def test_a_chain_is_one_stretch_of_cells() -> None:
    plan = chain(4)
    assert ranges(plan) == [[0, 1, 2, 3]]
    stretch = cut(plan, 0, 4)[0]
    assert stretch.externals == (0,)
    assert (stretch.grows, stretch.kept) == (4 * BYTES, BYTES)
    assert [part.exports for part in stretch.parts] == [(), (), (), ((0, 4),)]
    assert [part.clears for part in stretch.parts] == [(0,), (1,), (2,), (3, 4)]
    assert stretch.parts[0].releases == (0,)


def test_a_window_ends_a_stretch_and_what_crosses_it_is_exported() -> None:
    plan = chain(4)
    assert ranges(plan, last=2) == [[0, 1]]
    assert cut(plan, 0, 2)[0].parts[1].exports == ((0, 2),)
    behind = cut(plan, 2, 4)[2]
    assert [part.frees for part in behind.parts] == [(2,), (4,)]


def test_whatever_is_special_is_a_stretch_by_itself() -> None:
    made = PlanBuilder()
    made.call(1, "f", ["a"], ["b"]).call(1, "f", ["b"], ["c"])
    made.call(1, "prints", ["c"], ["d"])
    made.call(1, "f", ["d"], ["e"]).call(1, "f", ["e"], ["g"])
    made.call(1, "f", ["g"], ["h"], donated=(0,))
    made.move("h", 2, "far").call(2, "f", ["far"], ["i"])
    made.call(1, "f", ["h"], ["j"]).call(1, "f", ["j"], ["k"])
    made.call(3, "f", ["x"], ["y"]).call(3, "f", ["y"], ["z"])
    plan = made.plan(["a", "x"], ["i", "k", "z"])
    assert ranges(plan, special="prints") == [
        [0, 1], [2], [3, 4, 5], [7], [8, 9], [10, 11]
    ]  # fmt: skip


class Bench:
    """A launcher and its lanes, which launch when they are told to.

    fails: steps that go wrong by themselves.
    """

    def __init__(self, many: bool, fails: frozenset[int] = frozenset(), limit: Any = None) -> None:
        self.launcher = (Launcher if many else OneByOne)(HOST, "island0", limit)
        self.fails = fails
        self.lane: list[Segment] = []
        self.failures: dict[Key, str] = {}
        self.long = 0

    def do(self, actions: list[Action]) -> None:
        while actions:
            action, *actions = actions
            match action:
                case Segment():
                    self.lane.append(action)
                    self.long += len(action.stretch.parts) > 1
                case Report(run=run, first=first, times=times, failures=failures):
                    for step in range(first, first + len(times)):
                        assert (run, step) not in self.failures, "reported twice"
                        why = failures.get(step)
                        self.failures[run, step] = why.message if why else ""
                case Send(key=key):
                    actions += self.launcher.sent(key)
                case Receive(key=key, target=target):
                    actions += self.launcher.received(key, f"moved {target.value.name}")
                case _:
                    pass

    def compute(self, step: int, call: Call, inputs: list[Any]) -> tuple[list[Any], Failure | None]:
        """What a device makes of it: of nothing an error, or something from zeros."""
        if step in self.fails:
            return [None] * len(call.outputs), Failure("execute", f"step {step} failed")
        if None in inputs:
            echo = Failure("execute", "an echo") if step % 2 else None
            return [None if echo else "from zeros"] * len(call.outputs), echo
        return [f"{call.function}({', '.join(inputs)})"] * len(call.outputs), None

    def run(self, rng: random.Random) -> None:
        while self.lane:
            self.launch(self.lane.pop(0), rng)

    def launch(self, launch: Segment, rng: random.Random) -> None:
        parts = launch.stretch.parts
        times: list[float] = []
        failures: dict[int, Failure] = {}
        cells: list[Any] = [slot.payload for slot in launch.inputs]
        cells += [None] * (len(launch.stretch.sizes) - len(cells))
        for cell in set(launch.stretch.gives) - launch.copies:
            launch.inputs[cell].payload = None
        for at, part in enumerate(parts):
            inputs = [cells[cell] for cell in part.inputs]
            lost = None in inputs
            results, failure = self.compute(part.index, part.call, inputs)
            if lost:
                results = [None] * len(results)
            for cell, result in zip(part.outputs, results, strict=True):
                cells[cell] = result
            for position, value in part.exports:
                launch.outputs[value].payload = results[position]
            for cell in part.clears:
                cells[cell] = None
            times.append(0.0)
            if failure is not None and not lost:
                failures[at] = failure
            if rng.random() < 0.3 or at == len(parts) - 1:
                self.do(self.launcher.done(launch.key, times, failures))
                times, failures = [], {}


def random_plan(rng: random.Random) -> Plan:
    made, alive = PlanBuilder(), {1: ["a"], 2: ["b"]}
    made.add(1, "a")
    made.add(2, "b")
    for number in range(rng.randint(1, 14)):
        on, new = rng.choice([1, 1, 1, 2]), f"v{number}"
        if rng.random() < 0.15:
            made.move(rng.choice(alive[3 - on]), on, new)
        else:
            arity = rng.randint(1, 2)
            inputs = [rng.choice(alive[on]) for _ in range(arity)]
            donated: tuple[int, ...] = ()
            if rng.random() < 0.3 and inputs.count(inputs[0]) == 1:
                donated = (0,)
                alive[on].remove(inputs[0])
            made.call(on, rng.choice("fgh"), inputs, [new], donated)
        alive[on].append(new)
    made_here = [v for v in (*alive[1], *alive[2]) if v not in ("a", "b")]
    return made.plan(["a", "b"], rng.sample(made_here, rng.randint(0, len(made_here))))


def played(many: bool, seed: int) -> tuple[Bench, list[tuple[str, Any]]]:
    """A few runs of one random plan: their reports, and what became of their outputs."""
    rng = random.Random(seed)
    plan = random_plan(rng)
    fails = frozenset(i for i in range(len(plan.steps)) if rng.random() < rng.choice([0, 0.1]))
    bench = Bench(many, fails, limit=rng.choice([None, BYTES * 60]))
    launcher = bench.launcher
    # The second slice shares a device with the first one, which may be on another host, too.
    launcher.bind(rng.choice([binding(1, 0, 1), WIDE]), "lane 1")
    launcher.bind(binding(2, *rng.choice([(1, 2), (2, 3)])), "lane 2")
    launcher.program(plan)
    place, slots, kept = 0, list[Slot](), list[int]()
    for run in range(1, 4):
        ids = tuple(range(run * 100, run * 100 + len(plan.outputs)))
        given = {0: "a", 1: "b"} if rng.random() < 0.8 else {1: "b"}
        cut = rng.randint(0, len(plan.steps))
        for first, last in ((0, cut), (cut, len(plan.steps))):
            if first == last:
                continue
            window = grant(
                run, plan, place=place, previous=place - 1 if place else -1, first=first,
                last=last, inputs=(None, None), outputs=ids,
            )  # fmt: skip
            place += 1
            bench.do(launcher.grant(window, given if not first or first == cut else {}))
            slots += [launcher.buffers.get(i) for i in ids if first == 0 or cut == 0]  # type: ignore[misc]
            if rng.random() < 0.5:
                bench.run(random.Random(seed))
        kept += ids
    bench.run(random.Random(seed))
    told = [(slot.state, slot.payload, slot.failure and slot.failure.message) for slot in slots]
    bench.do(launcher.free(tuple(kept)))
    return bench, told  # type: ignore[return-value]


@pytest.mark.parametrize("seed", range(0, 400, 50))
def test_a_segment_of_n_is_n_segments_of_one(seed: int) -> None:
    long = 0
    for each in range(seed, seed + 50):
        slow, wanted = played(False, each)
        fast, found = played(True, each)
        assert found == wanted, each
        assert fast.failures == slow.failures, each
        assert fast.launcher.idle
        assert not any(fast.launcher.memory.used.values()), each
        assert not slow.long
        long += fast.long
    assert long > 20, "hardly any segment was long"


def test_the_search_notices_a_cause_that_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    cause = Segment.cause

    def forgetful(self: Segment, part: Part, failure: Failure | None = None) -> Failure | None:
        first = part is self.stretch.parts[0]
        return cause(self, part, failure) if first else failure

    monkeypatch.setattr(Segment, "cause", forgetful)
    assert any(played(True, seed)[0].failures != played(False, seed)[0].failures for seed in SEEDS)


def donating(length: int) -> Plan:
    """``t = f(t)`` again and again, each time in the same memory."""
    made = PlanBuilder()
    for number in range(length):
        made.call(1, "f", [f"v{number}"], [f"v{number + 1}"], donated=(0,))
    return made.plan(["v0"], [f"v{length}"])


def test_a_loop_that_donates_its_state_is_one_segment_in_the_memory_of_two() -> None:
    """Of two, for it may turn out that somebody else names the first."""
    plan = donating(5)
    stretch = cut(plan, 0, 5)[0]
    assert (len(stretch.parts), stretch.grows, stretch.most) == (5, 0, BYTES)
    for limit, long in ((BYTES * 2, 1), (BYTES * 2 - 1, 0)):
        bench = Bench(True, limit=limit)
        bench.launcher.bind(binding(1, 0), "lane 1")
        bench.launcher.program(plan)
        bench.do(bench.launcher.grant(grant(1, plan, inputs=(None,), outputs=(5,)), {0: "a"}))
        assert bench.launcher.memory.used == {0: BYTES}
        bench.run(random.Random(0))
        assert (bench.long, len(bench.failures)) == (long, 5)
        assert bench.launcher.memory.most == {0: BYTES}


def test_what_a_donation_leaves_over_is_held_until_its_segment_is_over() -> None:
    """Two arrays are given for one, and a later gang may not count on the other's bytes."""
    made = PlanBuilder().call(1, "f", ["a", "b"], ["c"], donated=(0, 1))
    plan = made.call(1, "f", ["c"], ["d"]).plan(["a", "b"], ["c", "d"])
    bench = Bench(True)
    bench.launcher.bind(binding(1, 0), "lane 1")
    bench.launcher.program(plan)
    window = grant(1, plan, inputs=(None, None), outputs=(5, 6))
    bench.do(bench.launcher.grant(window, {0: "a", 1: "b"}))
    assert bench.launcher.memory.used == {0: 3 * BYTES}
    bench.run(random.Random(0))
    assert bench.long
    assert bench.launcher.memory.used == {0: 2 * BYTES}


def test_an_array_that_a_later_gang_consumes_is_copied_if_it_has_another_name() -> None:
    made = PlanBuilder().call(1, "f", ["x"], ["y"]).call(1, "g", ["a"], ["b"], donated=(0,))
    plan = made.call(1, "g", ["other"], ["c"]).plan(["x", "a", "other"], ["y", "b", "c"])
    for names, copies in (((7, 8), 0), ((7, 7), 1)):
        bench = Bench(True)
        bench.launcher.bind(binding(1, 0), "lane 1")
        bench.launcher.program(plan)
        for number in set(names):
            bench.launcher.uploaded(number, plan.values[plan.inputs[1]], f"array {number}")
        window = grant(1, plan, inputs=(None, *names), outputs=(10, 11, 12))
        bench.do(bench.launcher.grant(window, {0: "x"}))
        assert [len(launch.copies) for launch in bench.lane] == [copies]
        bench.run(random.Random(0))
        assert bench.launcher.buffers.get(12).payload == f"g(array {names[1]})"  # type: ignore[union-attr]


def test_a_later_gang_that_waits_for_a_reader_of_what_it_consumes_goes_by_itself() -> None:
    made = PlanBuilder().call(1, "f", ["x"], ["y"]).call(1, "g", ["a"], ["b"], donated=(0,))
    plan = made.plan(["x", "a"], ["y", "b"])
    launcher = Launcher(HOST, "island0")
    launcher.bind(binding(1, 0), "lane 1")
    launcher.program(plan)
    launcher.uploaded(7, plan.values[plan.inputs[1]], "a")
    (serve,) = launcher.fetch("somebody", 7)
    assert isinstance(serve, Serve)
    window = grant(1, plan, inputs=(None, 7), outputs=(10, 11))
    (only,) = launcher.grant(window, {0: "x"})
    assert isinstance(only, Segment)
    assert only.key == (1, 0), "the first gang does not wait for the reader"
    (second,) = launcher.served(serve.slot, serve.reader)
    assert isinstance(second, Segment)
    assert second.key == (1, 1)


def test_without_room_for_all_of_it_gangs_go_one_by_one() -> None:
    for limit, long in ((BYTES * 6, 1), (BYTES * 6 - 1, 0)):
        bench, plan = Bench(True, limit=limit), chain(5)
        bench.launcher.bind(binding(1, 0), "lane 1")
        bench.launcher.program(plan)
        bench.do(bench.launcher.grant(grant(1, plan, inputs=(None,), outputs=(5,)), {0: "a"}))
        bench.run(random.Random(0))
        assert (bench.long, len(bench.failures)) == (long, 5)


def test_gangs_that_would_wait_within_a_row_go_one_by_one() -> None:
    made = PlanBuilder().call(1, "f", ["a"], ["b"]).call(1, "f", ["b", "late"], ["c"])
    plan = made.plan(["a", "late"], ["c"])
    first = PlanBuilder("first")
    first.add(2, "x")
    source = first.move("x", 1, "y").plan(["x"], ["y"])
    launcher = Launcher(HOST, "island0")
    launcher.bind(binding(1, 0), "lane 1")
    launcher.bind(binding(2, 1), "lane 2")
    launcher.program(plan)
    launcher.program(source)
    launcher.grant(grant(1, source, inputs=(None,), outputs=(7,)), {0: "x"})
    window = grant(2, plan, place=1, previous=0, inputs=(None, 7), outputs=(8,))
    (only,) = launcher.grant(window, {0: "a"})
    assert isinstance(only, Segment)
    assert len(only.stretch.parts) == 1, "the first gang does not wait for what comes late"


def test_with_the_order_off_gangs_go_one_by_one() -> None:
    launcher, plan = Launcher(HOST, "island0"), chain(3)
    launcher.bind(binding(1, 0), "lane 1")
    launcher.program(plan)
    window = grant(1, plan, inputs=(None,), outputs=(5,))
    actions = launcher.grant(window, {0: "a"}, free=True)
    assert [len(a.stretch.parts) for a in actions if isinstance(a, Segment)] == [1] * 3


def test_on_several_hosts_the_first_gang_of_a_function_goes_by_itself_and_then_rows_go() -> None:
    launcher, plan = Launcher(HOST, "island0"), chain(3)
    launcher.bind(WIDE, "lane 1")
    launcher.program(plan)
    launcher.first_launches_alone("f", 1)
    seen = []
    for run in (1, 2):
        window = grant(
            run, plan, place=run * 3, previous=3 if run == 2 else -1, inputs=(None,), outputs=(run,)
        )
        actions = launcher.grant(window, {0: "a"})
        while actions:
            action, *actions = actions
            if isinstance(action, Segment):
                assert action.together
                assert action.first == (run == 1 and action.key[1] == 0)
                length = len(action.stretch.parts)
                seen.append(length)
                actions += launcher.done(action.key, [0.0] * length, {})
    assert seen == [1, 1, 1, 3]
