"""Machines whose islands differ, and figures that no machine can have."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

import pathways_lab as pw
from pathways_lab.sim.machine import Costs, FunctionCost, Machine
from pathways_lab.sim.simulate import Load, chain, simulate
from pathways_lab.timeline.records import Event, Span

EXACT = Costs(
    submit=0.0, control_latency=0.0, decision=0.0, hearing=0.0, wake=0.0, launch=0.0, report=0.0,
    jitter=0.0,
)  # fmt: skip


def test_islands_differ_in_devices_speed_kind_and_memory() -> None:
    machine = Machine(
        2, 1, 4, costs=EXACT, default=FunctionCost(0.1),
        unlike={"island1": {"hosts_per_island": 2, "devices_per_host": 8, "speed": 0.5,
                            "kind": "gpu", "memory": 1000}},
    )  # fmt: skip
    assert machine.devices == 4 + 16
    assert machine.hosts() == [
        ("island0/host0", "island0"), ("island1/host0", "island1"), ("island1/host1", "island1"),
    ]  # fmt: skip
    assert machine.size == "1 x 1 x 4 + 2 x 8"
    loads = [
        Load(chain("here", 4, ["f"]), "a", islands={0: "island0"}),
        Load(chain("there", 16, ["f"]), "b", islands={0: "island1"}),
    ]
    found = simulate(loads, machine)
    took = {r.program: r.end - r.start for r in found.records
            if isinstance(r, Span) and r.kind == "gang"}  # fmt: skip
    assert took == pytest.approx({"here": 0.1, "there": 0.2})
    joined = [r for r in found.records if isinstance(r, Event) and r.kind == "host-joined"]
    kinds = {r.host: (r.args["kind"], r.args["devices"]) for r in joined}
    assert kinds["island1/host1"] == ("gpu", 8)
    assert kinds["island0/host0"] == ("simulated", 4)
    assert found.utilisation()["island1"] == pytest.approx(1.0, abs=0.01)
    for devices, island, fits in (16, "island1", False), (4, "island0", True):
        large = Load(chain("large", devices, ["f"], nbytes=2000), islands={0: island})
        ((_, failure),) = simulate(large, machine).ended.values()
        assert (failure is None) == fits


def test_slices_of_a_machine_are_of_the_kind_that_is_asked_for() -> None:
    machine = pw.Machine(2, 1, 4, unlike={"island1": {"kind": "tpu"}})
    assert machine.slice(4, kind="tpu").binding.island == "island1"
    assert machine.slice(4, kind="cpu").binding.island == "island0"
    with pytest.raises(pw.PathwaysError, match="gpu"):
        machine.slice(4, kind="gpu")


def test_a_machine_like_a_lab_has_its_unlike_islands() -> None:
    class Lab:
        islands = tuple(
            SimpleNamespace(hosts=("h",) * hosts, devices=devices)
            for hosts, devices in ((1, 2), (2, 8))
        )

    machine = pw.Machine.like(Lab(), memory="1 GB")  # type: ignore[arg-type]
    assert machine.size == "1 x 2 x 4 + 1 x 2"
    assert machine.of("island0").memory == machine.of("island1").memory == 10**9


@pytest.mark.parametrize("kind", ["v5p", "", "CPU", 5, None])
def test_a_kind_that_programs_cannot_be_captured_for_is_refused(kind: Any) -> None:
    with pytest.raises(
        ValueError, match=r"kind of a machine is .*: one of 'simulated', .* origin="
    ):
        pw.Machine(kind=kind)


@pytest.mark.parametrize(
    ("unlike", "rule"),
    [
        ({"island7": {"speed": 2.0}}, "its islands are island0 to island1"),
        ({"island1": {"color": 2.0}}, "a mapping, with the names hosts_per_island"),
        ({"island1": 3}, "a mapping, with the names hosts_per_island"),
        ([("island1", {})], "differences by island, like"),
        ({"island1": {"speed": 0.0}}, "speed of a machine is 0.0: a number above 0"),
        ({"island1": {"speed": float("inf")}}, "a finite number above 0"),
        ({"island1": {"kind": "v5p"}}, "one of 'simulated'"),
        ({"island1": {"devices_per_host": 0}}, "a whole number from 1 on"),
    ],
)
def test_differences_that_cannot_be_are_refused(unlike: Any, rule: str) -> None:
    with pytest.raises(ValueError, match=rule):
        Machine(unlike=unlike)
