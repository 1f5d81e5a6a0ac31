"""Laws of the simulated machine: FIFO devices, rendezvous, memory in order, time that adds up."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

from pathways_lab.core.errors import PathwaysError
from pathways_lab.core.messages import HostReport
from pathways_lab.core.program.layout import Layout
from pathways_lab.core.program.program import Call, Program, Signature, Value
from pathways_lab.core.scheduling.policies import ProportionalShare
from pathways_lab.sim import streams
from pathways_lab.sim.agenda import Agenda
from pathways_lab.sim.cores import Cores
from pathways_lab.sim.machine import Costs, FunctionCost, Machine
from pathways_lab.sim.result import Simulated
from pathways_lab.sim.simulate import Load, chain, simulate
from pathways_lab.sim.world import World
from pathways_lab.testing import replay
from pathways_lab.timeline.records import Event, Span

FREE = Costs(**{f.name: 1e18 if f.metadata["unit"] == "bytes/s" else 0.0 for f in fields(Costs)})
"""Nothing but computations takes time."""


def gangs(found: Simulated) -> list[Span]:
    return [r for r in found.records if isinstance(r, Span) and r.kind == "gang"]


def test_the_agenda_decides_ties_by_priority_and_then_by_order_of_entry() -> None:
    agenda, said = Agenda(), []
    for name, priority in (("b", 1), ("c", 1), ("a", 0)):
        agenda.at(1.0, said.append, name, priority=priority)
    agenda.after(0.5, agenda.after, 0.0, said.append, "first")
    assert agenda.run() == 5
    assert said == ["first", "a", "b", "c"]
    assert agenda.now == 1.0


def test_gangs_on_one_device_take_turns_and_on_two_run_together() -> None:
    """50 ms each: 50 ms together on disjoint devices, 100 ms on the same ones."""
    machine = Machine(1, 1, 4, costs=FREE, default=FunctionCost(0.05, compile=0.0))
    for devices, seconds in ((2, 0.05), (4, 0.10)):
        loads = [Load(chain(n, devices, [f"{n}.f"]), client=n) for n in ("one", "two")]
        found = simulate(loads, machine)
        assert found.seconds == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("cores", "seconds"), [(float("inf"), 0.05), (4, 0.05), (3, 4 / 3 * 0.05), (2, 0.1), (1, 0.1)]
)
def test_computations_share_the_cores_that_there_are(cores: float, seconds: float) -> None:
    """Two gangs of two devices; a gang alone is as fast as it was measured."""
    machine = Machine(1, 1, 4, costs=FREE, default=FunctionCost(0.05), cores=cores)
    loads = [Load(chain(n, 2, [f"{n}.f"]), client=n) for n in ("one", "two")]
    assert simulate(loads[:1], machine).seconds == pytest.approx(0.05)
    assert simulate(loads, machine).seconds == pytest.approx(seconds)
    idle = replace(machine, default=FunctionCost(0.05, cores=0.0))
    assert simulate(loads, idle).seconds == pytest.approx(0.05)


@pytest.mark.parametrize(("cores", "seconds"), [(2.0, 0.05), (1.0, 0.06), (float("inf"), 0.05)])
def test_what_the_lab_computes_takes_cores_from_devices(cores: float, seconds: float) -> None:
    """A run that costs 10 ms beside its 50 ms, where there are so many cores."""
    costs = replace(FREE, run_work=0.01)
    machine = Machine(1, 1, 1, costs=costs, default=FunctionCost(0.05), cores=cores)
    found = simulate(Load(chain("one", 1, ["f"])), machine)
    assert found.seconds == pytest.approx(seconds)


def test_who_computes_on_alone_goes_faster_from_then_on() -> None:
    agenda, ended = Agenda(), []
    cores = Cores(agenda, 1.5)
    for name, start, work in (("long", 0.0, 3.0), ("short", 1.0, 0.75)):
        agenda.at(start, cores.compute, work, 1.0, lambda n=name: ended.append((n, agenda.now)))
    agenda.run()
    # From 1 on both go at 3/4: the short one needs 1 s; the long one has 1.25 left then.
    assert ended == [("short", pytest.approx(2.0)), ("long", pytest.approx(3.25))]


def test_a_pipeline_over_two_islands_overlaps() -> None:
    row = Layout((("x", 4),), ((),))
    values = tuple(Value((4,), "uint8", s, row, 4) for s in (0, 0, 1))
    program = Program(
        "stages", values,
        (Call("f", 0, (0,), (1,), name="f"), Call("g", 1, (1,), (2,), name="g")), (0,), (2,),
        {"f": Signature("f", 0, (row,), (row,)), "g": Signature("g", 1, (row,), (row,))},
    )  # fmt: skip
    machine = Machine(2, 1, 4, costs=FREE, default=FunctionCost(0.01, compile=0.0))
    load = Load(program, runs=10, flight=4, islands={0: "island0", 1: "island1"})
    found = simulate(load, machine)
    assert found.seconds == pytest.approx(0.11)  # ten steps of 10 ms and the last one's way out
    assert {s.island for s in gangs(found)} == {"island0", "island1"}
    assert sum(isinstance(r, Span) and r.kind == "transfer" for r in found.records) == 10


@pytest.mark.parametrize(("devices", "cut"), [(1, ()), (4, ()), (4, ("x",))])
def test_transfers_take_latency_and_bandwidth(devices: int, cut: tuple[str, ...]) -> None:
    """Of a thousand bytes; devices of one host that need the same ones share them."""
    row = Layout((("x", devices),), (cut,))
    nbytes = 1000 // (devices if cut else 1)
    values = (Value((1000,), "uint8", 0, row, nbytes), Value((4,), "uint8", 1, row, 1))
    program = Program(
        "move", values, (Call("g", 1, (0,), (1,), name="g"),), (0,), (1,),
        {"g": Signature("g", 1, (row,), (row,))},
    )  # fmt: skip
    costs = replace(FREE, dcn=1e5, dcn_latency=0.002)
    machine = Machine(2, 1, devices, costs=costs, default=FunctionCost(0.0, compile=0.0))
    found = simulate(Load(program, islands={0: "island0", 1: "island1"}), machine)
    assert found.seconds == pytest.approx(0.012)


def test_the_same_seed_gives_the_same_timeline_and_another_one_another() -> None:
    load = Load(chain("c", 8, ["f", "g"]), runs=5)
    machine = Machine(1, 2, 4)
    first, again, other = (simulate(load, machine, seed=s).records for s in (1, 1, 2))
    assert first == again
    assert first != other


def test_every_figure_of_a_machine_says_where_it_comes_from() -> None:
    named = {f.name for f in Machine().figures()}
    for kind, prefix in ((Machine, ""), (Costs, "costs."), (FunctionCost, "default.")):
        parts = {"costs", "functions", "default", "origin", "unlike"} if kind is Machine else set()
        assert {prefix + f.name for f in fields(kind) if f.name not in parts} <= named
    for f in Machine().figures():
        assert f.source.startswith(("measured", "published", "assumed")), f
        assert len(f.source) > len("assumed") or f.source == "assumed"
    given = {f.name: f.source for f in Machine(islands=9).calibrated({"launch": 1.0}).figures()}
    assert (given["islands"], given["costs.launch"]) == ("measured", "measured")
    assert given["costs.dcn"].startswith("assumed")
    one = Machine(islands=1, hosts_per_island=1, devices_per_host=4)
    assert "simulated machine: 1 island, 4 devices<" in one._repr_html_()
    image = "<img src=x onerror=alert(1)>"
    odd = Machine(depth=9, origin=image)
    assert "&lt;img src=x" in odd._repr_html_()
    assert image not in odd._repr_html_()


def test_a_machine_refuses_figures_that_cannot_be() -> None:
    with pytest.raises(ValueError, match="streams of a machine is 0"):
        Machine(streams=0)
    with pytest.raises(ValueError, match="speed: no such cost"):
        Machine().calibrated({"speed": 1.0})


def test_records_are_like_those_of_a_real_cluster_and_say_that_they_are_simulated() -> None:
    found = simulate(chain("c", 4, ["f"]), Machine(1, 1, 4))
    (span,) = gangs(found)
    assert (span.host, span.devices, span.program, span.node) == (
        "island0/host0", (0, 1, 2, 3), "c", "f",
    )  # fmt: skip
    assert span.client == "kernel-1"
    assert span.args == {
        "seq": 0,
        "slice": span.args["slice"],
        "simulated": True,
        "poisoned": False,
    }
    assert [r.kind for r in found.records if not isinstance(r, Span)] == [
        "host-joined", "client-joined", "slice-bound", "plan", "submitted", "granted", "launched",
        "resolved", "finished",
    ]  # fmt: skip
    assert all(r.args["simulated"] for r in found.records)


def test_a_machine_that_is_too_small_is_told() -> None:
    with pytest.raises(PathwaysError, match="asked for 64 devices"):
        simulate(chain("c", 64, ["f"]), Machine(1, 1, 4))


def test_2048_devices_take_seconds() -> None:
    machine = Machine(1, 512, 4)
    load = Load(chain("c", 2048, ["f", "g"]), runs=3, feeds={0: 0})
    found = simulate(load, machine)
    assert len(gangs(found)) == 3 * 2 * 512
    assert all(failure is None for _, failure in found.ended.values())


@pytest.mark.parametrize("weights", [(1, 1, 1, 1), (1, 2, 4, 8)])
def test_shares_of_four_clients_are_within_five_percent(weights: tuple[int, ...]) -> None:
    machine = Machine(1, 2, 4, default=FunctionCost(0.002))
    loads = [
        Load(chain(f"p{n}", 8, [f"f{n}"]), client=f"kernel-{n}", runs=10**6, flight=120)
        for n in range(4)
    ]
    shares = {f"kernel-{n}": float(w) for n, w in enumerate(weights)}
    found = simulate(loads, machine, ProportionalShare(shares), until=7.0)
    late = found.busy(since=1.0)
    for name, weight in shares.items():
        part = late[name] / sum(late.values())
        assert part == pytest.approx(weight / sum(weights), rel=0.05)


def test_shares_hold_for_clients_with_long_queues_of_several_programs() -> None:
    """A run far back in its own client's queue is not overtaken by those who go before it."""
    machine = Machine(1, 2, 4, default=FunctionCost(0.002))
    loads = [
        Load(chain(f"p{n}", 8, [f"f{n}"]), client=client, runs=10**6, flight=300)
        for n, client in enumerate(("small", "small", "small", "large"))
    ]
    policy = ProportionalShare({"small": 1.0, "large": 8.0})
    late = simulate(loads, machine, policy, until=7.0).busy(since=1.0)
    assert late["large"] / sum(late.values()) == pytest.approx(8 / 9, rel=0.05)


# --- deadlock, and the other cure --------------------------------------------------------


@pytest.mark.parametrize(
    ("programs", "count", "hangs"),
    [(2, 1, True), (2, 2, False), (3, 2, True), (3, 3, False)],
)
def test_streams_cure_a_deadlock_until_more_programs_come(
    programs: int, count: int, hangs: bool
) -> None:
    found = streams.crossed(programs, count)
    assert bool(found.open) == hangs
    assert bool(found.stuck) == hangs
    assert found.story().count("waits for its turn on") == len(found.stuck)
    if hangs:
        assert len(found.stuck) >= 2
        assert {w.gang for w in found.stuck} <= {(run, 0) for run in found.world.control.state.runs}
    else:
        assert found.seconds < 3 * programs * streams.SECONDS + 2.0


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("programs", [2, 3, 4])
def test_with_one_order_no_number_of_streams_is_needed(programs: int, count: int) -> None:
    found = streams.crossed(programs, count, order=True)
    assert not found.open
    assert all(failure is None for _, failure in found.ended.values())


def test_the_table_of_programs_and_streams_can_be_read() -> None:
    table = streams.table(3)
    assert [line.split() for line in table.lines()] == [
        ["1", "stream", "2", "streams", "3", "streams"],
        ["2", "programs", "hangs", "ends", "ends"],
        ["3", "programs", "hangs", "hangs", "ends"],
    ]
    assert ">hangs</td>" in table._repr_html_()


def test_a_host_with_nine_seconds_of_earlier_work_only_makes_the_others_wait() -> None:
    machine = Machine(1, 2, 1, costs=FREE, functions={"slow": FunctionCost(9.0, compile=0.0)},
                      default=FunctionCost(0.001, compile=0.0))  # fmt: skip
    loads = [
        Load(chain("busy", 1, ["slow"]), client="a"),
        Load(chain("both", 2, ["f"]), client="b", start=0.1),
    ]
    found = simulate(loads, machine)
    assert found.seconds == pytest.approx(9.001, abs=0.01)
    assert all(failure is None for _, failure in found.ended.values())


# --- the same decisions again ------------------------------------------------------------


def test_replaying_the_events_gives_the_same_commands() -> None:
    world = World(Machine(2, 2, 2), seed=5)
    events, commands = [], []
    world.observers.append(lambda e, c: (events.append(e), commands.append(c)))
    simulate([Load(chain("c", 4, ["f", "g"]), runs=4, feeds={0: 0})], world=world)
    assert any(isinstance(e, HostReport) for e in events)
    assert replay(events) == commands


def test_a_warm_load_waits_for_its_first_run_and_then_keeps_its_flight() -> None:
    program = chain("p", 4, ["f"])
    machine = Machine(islands=1, hosts_per_island=1, devices_per_host=4)
    result = simulate(Load(program, runs=6, flight=4, warm=True), machine)
    ends = sorted(time for time, _ in result.ended.values())
    submitted = sorted(
        r.time for r in result.records if isinstance(r, Event) and r.kind == "submitted"
    )
    assert len(ends) == len(submitted) == 6
    assert submitted[1] > ends[0]
    assert submitted[4] < ends[1], "four more are in flight at once"
