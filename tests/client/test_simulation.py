"""Laws of ``pw.simulate``: what was captured is simulated as it is, and says so; no lab starts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import pathways_lab as pw
from benchmarks.gangs.microbatches import shortest
from benchmarks.loops import simulated
from pathways_lab.core.errors import PathwaysError
from pathways_lab.core.scheduling.policies import FIFO, Priority, ProportionalShare
from pathways_lab.timeline.log import Timeline
from pathways_lab.timeline.records import Span

MACHINE = {"islands": 2, "hosts_per_island": 2, "devices_per_host": 2}


def staged(machine: pw.Machine, milliseconds: float = 10.0) -> Any:
    """A program of two stages on two islands."""
    near, far = machine.slice(4, island="island0"), machine.slice(4, island="island1")
    first = pw.jit(lambda x: pw.emulated(milliseconds)(x + 1), on=near, name="first")
    second = pw.jit(lambda x: pw.emulated(milliseconds)(x * 2), on=far, name="second")

    @pw.program
    def stages(x: Any) -> Any:
        return second(first(x))

    return stages


@pytest.fixture(autouse=True)
def no_lab() -> Iterator[None]:
    from pathways_lab.client.lab import lab

    before = tuple(lab._labs)
    yield
    assert tuple(lab._labs) == before


def test_a_program_is_simulated_as_it_was_captured() -> None:
    machine = pw.Machine(**MACHINE)
    found = pw.simulate(staged(machine).capture(np.ones(4, np.float32)), machine, runs=10)
    gangs = [r for r in found.timeline.records if isinstance(r, Span) and r.kind == "gang"]
    assert {(g.node, g.island) for g in gangs} == {("first", "island0"), ("second", "island1")}
    assert len(gangs) == 10 * 2 * 2  # of two gangs on two hosts each
    # Emulated times are known, and the stages of different runs overlap.
    assert 0.105 < found.seconds < 0.14
    assert not found.open


def test_the_same_seed_is_the_same_timeline_and_so_is_the_program_itself() -> None:
    machine = pw.Machine(**MACHINE)
    stages = staged(machine)
    with pytest.raises(PathwaysError, match="not captured yet"):
        pw.simulate(stages, machine)
    stages.capture(1.0)
    one, two, other = (pw.simulate(stages, machine, seed=s).records for s in (3, 3, 4))
    assert one == two
    assert one != other


def test_a_program_of_one_machine_runs_on_a_bigger_and_on_a_smaller_one() -> None:
    captured = staged(pw.Machine(**MACHINE)).capture(1.0)
    big = pw.simulate(captured, pw.Machine(4, 64, 4))
    assert {r.island for r in big.records if isinstance(r, Span)} == {"island0", "island1"}
    # One island: both slices lie there, and share its devices.
    small = pw.simulate(captured, pw.Machine(1, 2, 2), runs=10)
    assert small.seconds > 0.2
    with pytest.raises(PathwaysError, match="asked for 4 devices"):
        pw.simulate(captured, pw.Machine(2, 1, 2))


def test_a_slice_of_a_machine_computes_nothing_and_says_what_to_do() -> None:
    machine = pw.Machine(**MACHINE)
    with pytest.raises(PathwaysError, match="slice of a simulated machine"):
        staged(machine)(1.0)
    with pytest.raises(PathwaysError, match="asked for 5 devices"):
        machine.slice(5)
    machine.slice(4).release()


def test_times_are_measured_or_given_or_emulated_or_assumed() -> None:
    machine = pw.Machine(**MACHINE)
    stages = staged(machine).capture(1.0)
    assert pw.simulate(stages, machine, times={"first": 0.5}).seconds == pytest.approx(0.51, 0.1)
    slow = pw.simulate(stages, machine, times={"first": 0.2, "second": 0.3})
    again = pw.simulate(stages, machine, times=slow.timeline)
    assert again.seconds == pytest.approx(slow.seconds, 0.05)
    with pytest.raises(
        ValueError, match=r"times for frist: the programs call \['first', 'second'\]"
    ):
        pw.simulate(stages, machine, times={"frist": 1.0})
    lazy = pw.Machine(**MACHINE, default=pw.FunctionCost(0.25))
    plain = pw.jit(lambda x: x, on=lazy.slice(2), name="plain")

    @pw.program
    def work(x: Any) -> Any:
        return plain(x)

    assert pw.simulate(work.capture(1.0), lazy).seconds == pytest.approx(0.25, 0.1)


def test_a_loop_around_an_emulated_time_counts() -> None:
    machine = pw.Machine(1, 1, 2)

    def body(x: Any) -> Any:
        return jax.lax.fori_loop(0, 5, lambda _, y: pw.emulated(4)(y), x)

    looped = pw.jit(body, on=machine.slice(2), name="looped")

    @pw.program
    def work(x: Any) -> Any:
        return looped(x)

    captured = work.capture(jax.ShapeDtypeStruct((2,), jnp.float32))
    assert list(captured.held.values()) == [pytest.approx(0.020)]


def test_large_inputs_are_uploaded_and_take_memory() -> None:
    def program(machine: pw.Machine) -> Any:
        on = machine.slice(4)
        total = pw.jit(lambda x: x.sum(), on=on, in_shardings=P("x"), name="total")

        @pw.program
        def work(x: Any) -> Any:
            return total(x)

        return work.capture(jax.ShapeDtypeStruct((4, 1 << 20), jnp.float32))

    slow = pw.Machine(1, 1, 4, costs=pw.Costs(dcn=16e6, jitter=0.0))
    found = pw.simulate(program(slow), slow)
    assert found.seconds > 1.0  # 16 MiB at 16 MB/s, before the gang
    tight = pw.Machine(1, 1, 4, memory=1 << 20)
    found = pw.simulate(program(tight), tight)
    ((_, failure),) = found.ended.values()
    assert failure is not None
    assert failure.kind == "memory"


@dataclass(frozen=True)
class Backwards:
    """A policy of a user's own."""

    def choose(self, view: Any) -> int:
        return int(view.candidates[-1].run)


class Turns:
    """A policy with a memory: every other time the last one."""

    def __init__(self) -> None:
        self.asked = 0

    def choose(self, view: Any) -> int:
        self.asked += 1
        return int(view.candidates[-(self.asked % 2)].run)


@dataclass(frozen=True)
class Broken:
    def choose(self, view: Any) -> int:
        raise RuntimeError("no idea")


def competing(machine: pw.Machine) -> list[pw.Load]:
    stages = staged(machine).capture(1.0)
    return [
        pw.Load(stages, "kernel-1", runs=60, flight=60),
        pw.Load(stages, "kernel-2", runs=60, flight=60, priority=1),
    ]


def test_policies_are_compared_on_the_same_work() -> None:
    machine = pw.Machine(**MACHINE)
    policies = (FIFO(), Priority(), ProportionalShare({"kernel-1": 3.0}), Backwards())
    table = pw.compare_policies(competing(machine), machine, policies)
    waits = {name: of for name, _, of in table.rows()}
    assert list(waits) == ["FIFO", "Priority", "ProportionalShare", "Backwards"]
    assert waits["Priority"]["kernel-2"] < 0.8 * waits["FIFO"]["kernel-2"]
    assert waits["ProportionalShare"]["kernel-1"] < waits["FIFO"]["kernel-1"]
    assert ">simulated</caption>" in table._repr_html_()
    assert "Priority: " in repr(table)
    with pytest.raises(PathwaysError, match="no idea"):
        pw.simulate(competing(machine), machine, Broken())


def test_a_policy_begins_anew_in_each_simulation() -> None:
    machine, turns = pw.Machine(**MACHINE), Turns()
    first, again = (pw.simulate(competing(machine), machine, turns).records for _ in range(2))
    assert first == again
    assert turns.asked == 0


def test_what_is_simulated_says_so_and_looks_like_a_lab() -> None:
    machine = pw.Machine(**MACHINE)
    found = pw.simulate(staged(machine).capture(1.0), machine, runs=3)
    assert repr(found).startswith("<simulated: machine 8 devices (2 x 2 x 2), default costs; mak")
    assert ">simulated</caption>" in found._repr_html_()
    assert isinstance(found.timeline, Timeline)
    assert found.utilisation().keys() == {"island0", "island1"}
    view = found.view()
    assert view.title.startswith("Simulated: stages")
    assert "simulated: nothing of this was computed" in view.picture.notes()
    data, metadata = view.bundle()
    assert metadata["pathways_lab"]["computations"] == 3 * 2 * 4
    assert data["text/plain"].startswith("Simulated: stages")
    both = pw.compare_timelines({"simulated": found.recording})
    assert both.bundle()[1]["pathways_lab"]["simulated"]["seconds"] == round(found.seconds, 6)


def test_512_hosts_of_4_devices_without_a_lab() -> None:
    machine = pw.Machine(islands=1, hosts_per_island=512, devices_per_host=4)
    on = machine.slice((512, 4), ("data", "model"))
    step = pw.jit(
        lambda x: pw.emulated(5)(x @ x.T), on=on, in_shardings=P("data", "model"), name="step"
    )

    @pw.program
    def work(x: Any) -> Any:
        return step(x)

    captured = work.capture(jax.ShapeDtypeStruct((2048, 64), jnp.float32))
    found = pw.simulate(captured, machine, runs=3)
    gangs = [r for r in found.records if isinstance(r, Span) and r.kind == "gang"]
    assert sum(len(g.devices) for g in gangs) == 3 * 2048


def test_without_order_two_programs_can_hang_and_the_result_says_who_waits() -> None:
    machine = pw.Machine(1, 4, 1)
    loads = []
    for name in ("a", "b"):
        step = pw.jit(lambda x: pw.emulated(20)(x), on=machine.slice(4), name=f"{name}.step")

        @pw.program(name=name)
        def work(x: Any, step: Any = step) -> Any:
            return step(x)

        loads.append(pw.Load(work.capture(1.0), f"kernel-{name}", runs=10))
    assert not pw.simulate(loads, machine).stuck
    found = pw.simulate(loads, machine, order=False)
    assert found.open
    assert len(found.stuck) >= 2
    assert " waits for its turn on island0/host" in found.story()
    assert found.story().splitlines()[0] in repr(found)


def test_sequential_dispatch_is_simulated_as_such() -> None:
    machine = pw.Machine(islands=1, hosts_per_island=4, devices_per_host=1)
    stages = [pw.jit(pw.emulated(0.2), on=machine.slice(1), name=f"f{n}") for n in range(4)]

    def chain(x: Any) -> Any:
        for stage in stages:
            x = stage(x)
        return x

    x = np.zeros(4, np.float32)
    seconds = {
        how: pw.simulate(pw.program(chain, dispatch=how).capture(x), machine).seconds
        for how in ("parallel", "sequential")
    }
    assert seconds["sequential"] > 1.05 * seconds["parallel"]


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: pw.FunctionCost(seconds=-1), "seconds of FunctionCost is -1: a finite number"),
        (lambda: pw.FunctionCost(seconds="1"), "seconds of FunctionCost is '1'"),
        (lambda: pw.Costs(submit=-1), "submit of Costs is -1: a finite number from 0 on"),
        (lambda: pw.Costs(dcn_latency=float("nan")), "dcn_latency of Costs is nan"),
        (lambda: pw.Costs(dcn=0), "dcn of Costs is 0: a number above 0"),
        (lambda: pw.Machine(block="a"), "block of a machine is 'a'"),
        (lambda: pw.Machine(block=(3,)), "the product 4, as many devices as a host has"),
    ],
)
def test_figures_that_cannot_be_are_named(make: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        make()


def test_memory_of_a_machine_is_written_as_that_of_a_lab() -> None:
    assert pw.Machine(memory="16 GB").memory == 16 * 10**9
    assert pw.Machine(1, 1, 4, block=(2, 2)).slice((2, 2)).shape == (2, 2)
    for memory in ("much", -1):
        with pytest.raises(PathwaysError, match="is not a size"):
            pw.Machine(memory=memory)


def test_what_cannot_be_simulated_is_named() -> None:
    machine = pw.Machine(**MACHINE)
    stages = staged(machine).capture(1.0)
    for seconds in (-1, float("nan"), "1"):
        with pytest.raises(ValueError, match="times of 'first': seconds of FunctionCost is"):
            pw.simulate(stages, machine, times={"first": seconds})
    with pytest.raises(ValueError, match="times=3 is neither seconds by function nor a timeline"):
        pw.simulate(stages, machine, times=3)
    with pytest.raises(PathwaysError, match="policies=3 is not a list of policies"):
        pw.compare_policies(stages, machine, 3)
    for runs in (-1, 0, 1.5):
        with pytest.raises(ValueError, match=f"runs of a load is {runs}: a whole number"):
            pw.simulate(stages, machine, runs=runs)
    plain = pw.jit(lambda x: x, on=machine.slice(2), name="plain")
    for work in (plain, 3, "stages"):
        with pytest.raises(PathwaysError, match="is not a program that was captured"):
            pw.simulate(work, machine)
    with pytest.raises(PathwaysError, match="is not a load, and a list is one of loads"):
        pw.simulate([stages], machine)
    with pytest.raises(PathwaysError, match="'a lab' is not a machine to simulate") as caught:
        pw.simulate(stages, "a lab")
    assert "pw.Machine.like(lab)" in caught.value.failure.remedy


def test_the_timeline_of_a_simulation_is_over_and_its_view_is_a_picture() -> None:
    machine = pw.Machine(**MACHINE)
    found = pw.simulate(staged(machine).capture(np.zeros((8, 4), np.float32)), machine)
    assert not found.timeline.grows
    view = found.timeline.view("planned")
    assert view.outcome == "ended"
    assert "text/html" in view.bundle()[0]


@pytest.mark.parametrize("order", ["turns", "written"])
def test_a_plain_loop_over_microbatches_fills_a_pipeline(order: str) -> None:
    """Grants follow the linear order: stages would be idle if slices did not take turns in it."""
    seconds, ideal = simulated(order, 8, 16, 20.0), shortest(8, 16, 20.0)
    assert ideal == pytest.approx((16 + 7) * 0.060)
    assert (seconds < 1.05 * ideal) is (order == "turns")
