"""Hosts wait at launch for the real free, and no wait points to a later grant."""

from __future__ import annotations

from dataclasses import dataclass

from pathways_lab.core.errors import Failure
from pathways_lab.core.slices.topology import SliceBinding
from pathways_lab.executor.actions import Receive
from pathways_lab.executor.device_memory import Memory
from pathways_lab.executor.steps import Segment
from tests.runtime.launch_kit import (
    BYTES,
    HOST,
    Bench,
    OneByOne,
    PlanBuilder,
    binding,
    grant,
    value,
)


@dataclass(eq=False)
class Claim:
    """So many bytes, on these devices.  taken: what it takes, where that is less."""

    room: int
    locals: tuple[int, ...] = (0,)
    taken: int | None = None

    def need(self) -> int:
        return self.room if self.taken is None else self.taken


def begin(memory: Memory[Claim], claim: Claim) -> bool:
    """Begin it and take its bytes, if it may."""
    if memory.begin(claim):
        memory.take(claim.locals, claim.need())
        return True
    return False


def test_a_claim_waits_until_bytes_are_really_free() -> None:
    memory: Memory[Claim] = Memory(10)
    first, second = Claim(6), Claim(6)
    for claim in (first, second):
        memory.lodge(claim)
    assert begin(memory, first)
    assert not begin(memory, second)
    assert memory.waits(second)
    assert "needs 6 bytes on device 0, where 6 of 10 are in use" in memory.story(second)
    assert memory.freed() == []
    memory.give((0,), 6)
    assert memory.freed() == [second]
    assert begin(memory, second)
    assert memory.most == {0: 6}


def test_a_later_claim_never_takes_what_an_earlier_one_needs() -> None:
    memory: Memory[Claim] = Memory(10)
    earlier, beside, too_much = Claim(6), Claim(4), Claim(5)
    for claim in (earlier, beside, too_much):
        memory.lodge(claim)
    assert not begin(memory, too_much), "an earlier one waits for its data, and needs the room"
    assert begin(memory, beside), "there is room for both"
    assert begin(memory, earlier)
    memory.give((0,), 4)
    assert memory.freed() == []
    memory.give((0,), 6)
    assert memory.freed() == [too_much]


def test_who_waits_behind_a_claim_that_is_withdrawn_is_tried_again() -> None:
    memory: Memory[Claim] = Memory(10)
    earlier, later = Claim(8), Claim(6)
    for claim in (earlier, later):
        memory.lodge(claim)
    assert not begin(memory, later)
    assert memory.freed() == []
    memory.withdraw(earlier)
    assert memory.freed() == [later]


def test_who_takes_nothing_any_more_waits_for_nobody() -> None:
    memory: Memory[Claim] = Memory(10)
    running, earlier, later = Claim(8), Claim(6), Claim(4)
    for claim in (running, earlier, later):
        memory.lodge(claim)
    assert begin(memory, running)
    assert not begin(memory, later)
    later.taken = 0
    assert begin(memory, later)


def test_there_is_plenty_where_all_that_was_granted_fits_at_once() -> None:
    memory: Memory[Claim] = Memory(10)
    begun, granted = Claim(3), Claim(3)
    for claim in (begun, granted):
        memory.lodge(claim)
    assert begin(memory, begun)
    assert memory.plenty(Claim(4))
    assert not memory.plenty(Claim(5))


def test_devices_are_accounted_for_one_by_one() -> None:
    memory: Memory[Claim] = Memory(10)
    wide, here, there = Claim(6, (0, 1)), Claim(6, (0,)), Claim(4, (1,))
    for claim in (wide, here, there):
        memory.lodge(claim)
    assert begin(memory, wide)
    assert not begin(memory, here)
    assert begin(memory, there)
    memory.withdraw(here)
    memory.give((0, 1), 6)
    assert memory.freed() == []
    assert memory.used == {0: 0, 1: 4}


def test_without_a_limit_nothing_waits_and_all_is_counted() -> None:
    memory: Memory[Claim] = Memory()
    claims = [Claim(100) for _ in range(3)]
    for claim in claims:
        memory.lodge(claim)
    assert all(begin(memory, claim) for claim in reversed(claims))
    assert memory.most == {0: 300}
    memory.give((0,), 200)
    assert memory.look() == {0: 300}
    memory.take((0,), 50)
    memory.give((0,), 50)
    assert memory.look() == {0: 150}
    assert memory.look() == memory.used == {0: 100}


# --- in the launcher -----------------------------------------------------------------


def small(limit: int, *bindings: SliceBinding) -> Bench:
    """A launcher with so many bytes on each device."""
    bench = Bench()
    bench.launcher = OneByOne(HOST, "island0", limit)
    for lane, bound in enumerate(bindings):
        bench.launcher.bind(bound, f"lane{lane}")
    return bench


def test_a_gang_is_launched_when_its_predecessor_has_freed_its_input() -> None:
    """a -> b -> c: with room for two, the second gang waits for the end of the first."""
    chain = PlanBuilder().call(1, "f", ["a"], ["b"]).call(1, "g", ["b"], ["c"]).plan(["a"], ["c"])
    for limit, launched in ((3 * BYTES, ["f", "g"]), (2 * BYTES, ["f"])):
        bench = small(limit, binding(1, 0))
        bench.launcher.program(chain)
        bench.grant(grant(1, chain, inputs=(None,), outputs=(10,)), _0=object())
        assert bench.launched() == launched
        assert ("waits for memory" in str(bench.launcher.unfinished())) == (len(launched) == 1)
        bench.done("f")
        assert bench.launched() == ["f", "g"]
        bench.done("g")
        assert bench.launcher.memory.most[0] == limit
        assert bench.memory() == BYTES


def test_temporary_bytes_count_from_launch_to_end() -> None:
    plan = PlanBuilder().call(1, "f", ["a"], ["b"]).plan(["a"], ["b"])
    bench = small(3 * BYTES, binding(1, 0))
    bench.launcher.program(plan)
    bench.launcher.needs("f", 1, BYTES)
    bench.grant(grant(1, plan, inputs=(None,), outputs=(10,)), _0=object())
    assert bench.memory() == 3 * BYTES
    bench.done("f")
    assert bench.memory() == BYTES


def test_what_a_donation_leaves_over_is_free_at_the_end() -> None:
    """Two inputs are donated for one output: the rest is held as long as the gang runs."""
    plan = PlanBuilder().call(1, "f", ["a", "b"], ["c"], donated=(0, 1)).plan(["a", "b"], ["c"])
    bench = small(2 * BYTES, binding(1, 0))
    bench.launcher.program(plan)
    bench.grant(grant(1, plan, inputs=(None, None), outputs=(10,)), _0=object(), _1=object())
    assert bench.memory() == 2 * BYTES
    bench.done("f")
    assert bench.memory() == BYTES


def receiving() -> Bench:
    """A bench of two buffers where a gang runs, and something is to be received behind it."""
    plan = (
        PlanBuilder()
        .call(1, "f", ["a"], ["b"])
        .call(2, "g", ["c"], ["d"])
        .move("d", 1, "e")
        .plan(["a", "c"], ["b", "e"])
    )
    bench = small(2 * BYTES, binding(1, 0))
    bench.launcher.bind(binding(2, 0, host="island1/host0"))
    bench.launcher.program(plan)
    bench.grant(grant(1, plan, inputs=(None, None), outputs=(10, 11)), _0=object())
    return bench


def test_a_receive_buffer_is_accepted_when_there_is_room_for_it() -> None:
    bench = receiving()
    assert bench.launched() == ["f"]
    assert bench.receives() == []
    bench.done("f")  # its input is free now
    assert len(bench.receives()) == 1


def test_a_run_that_ends_early_gives_back_what_it_waits_for() -> None:
    bench = receiving()
    bench.take(bench.launcher.abort(1, Failure("cancelled", "")))
    assert not any(isinstance(a, Receive) for a in bench.actions)
    bench.done("f")
    bench.take(bench.launcher.free((10, 11)))
    assert bench.memory() == 0
    again = PlanBuilder("next").call(1, "h", ["a"], ["b"]).plan(["a"], ["b"])
    bench.launcher.program(again)
    bench.grant(grant(2, again, inputs=(None,), outputs=(20,)), _0=object())
    assert bench.launched() == ["f", "h"]


def test_an_upload_takes_memory_with_its_first_reader() -> None:
    bench = small(2 * BYTES, binding(1, 0))
    for buffer in range(1, 6):
        bench.take(bench.launcher.uploaded(buffer, value(1, "v"), object()))
    assert bench.memory() == 0, "five uploads wait in the host's own memory"
    plan = PlanBuilder().call(1, "f", ["a"], ["b"]).plan(["a"], ["b"])
    bench.launcher.program(plan)
    bench.grant(grant(1, plan, inputs=(3,), outputs=(10,)))
    assert bench.memory() == 2 * BYTES
    bench.done("f")
    bench.take(bench.launcher.free((3, 10)))
    assert bench.memory() == 0


def test_an_input_made_by_a_run_granted_after_an_earlier_window() -> None:
    """The reader's first window does not touch it; its second comes after its maker's."""
    two = PlanBuilder("two").call(1, "f", ["a"], ["b"]).call(1, "g", ["b", "x"], ["c"])
    reader = two.plan(["a", "x"], ["c"])
    maker = PlanBuilder("make").call(1, "m", ["y"], ["x"]).plan(["y"], ["x"])
    bench = Bench(binding(1, 0))
    bench.launcher.program(reader)
    bench.launcher.program(maker)
    bench.grant(grant(1, reader, last=1, inputs=(None, 7), outputs=(8,)), _0=object())
    bench.grant(grant(2, maker, inputs=(None,), outputs=(7,)), _0=object())
    bench.grant(grant(1, reader, first=1, inputs=(None, 7), outputs=(8,)))
    assert bench.launched() == ["f", "m", "g"]
    assert not any(a.lost for a in bench.actions if isinstance(a, Segment))
