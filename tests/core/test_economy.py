"""What is sent about a run does not grow with devices, nor with the nodes of its program."""

from __future__ import annotations

from dataclasses import replace

from pathways_lab.core.control import Control
from pathways_lab.core.messages import (
    ClientJoined,
    Command,
    Event,
    FunctionAnnounced,
    Grant,
    HostJoined,
    HostReport,
    Prepare,
    ProgramRegistered,
    RunSubmitted,
    SliceBound,
    SliceRequested,
)
from pathways_lab.core.program.layout import Layout
from pathways_lab.core.program.program import Call, Plan, Step, Value
from pathways_lab.core.slices.topology import SliceRequest
from tests.core.stories import KNOWN

PER_HOST = 8


def chain(nodes: int, devices: int) -> Plan:
    """A chain of sharded calls."""
    layout = Layout((("x", devices),), (("x",),))
    values = tuple(
        Value((devices * 4,), "float32", 1, layout, 16, f"v{n}") for n in range(nodes + 1)
    )
    steps = tuple(Step(Call("f", 1, (n,), (n + 1,), name="f"), (n,)) for n in range(nodes))
    return Plan("plan", "chain", values, steps, (0,), (nodes,), (1,))


def granted(nodes: int, devices: int) -> tuple[Plan, list[Grant]]:
    """The grants of one run of a chain on so many devices."""
    control, plan = Control(KNOWN), chain(nodes, devices)
    hosts = [f"i/h{n:03}" for n in range(max(1, devices // PER_HOST))]
    base = (0.0, "test")

    def say(event: Event) -> list[Command]:
        return control.handle(event)

    for host in hosts:
        say(HostJoined(*base, host, "i", min(devices, PER_HOST), "cpu", 1 << 40))
    say(ClientJoined(*base, "k"))
    (bound,) = say(SliceRequested(*base, "k", 1, SliceRequest((devices,), ("x",))))
    assert isinstance(bound, SliceBound)
    (prepare,) = say(FunctionAnnounced(*base, "k", "f", 1))
    assert isinstance(prepare, Prepare)
    for host in hosts:
        say(HostReport(*base, host, compiled=(("f", 1, 0, None),)))
    say(ProgramRegistered(*base, "k", plan))
    commands = say(RunSubmitted(*base, "k", 7, "plan", (None,), (8,)))
    return plan, [c for c in commands if isinstance(c, Grant)]


def test_a_program_is_as_large_for_one_device_as_for_two_thousand() -> None:
    small, large = chain(3, 1), chain(3, 2048)
    assert len(small.steps) == len(large.steps)
    # Only the digits of the numbers differ.
    assert abs(len(repr(small)) - len(repr(large))) < 16 * len(small.values)


def test_one_message_per_host_whatever_the_number_of_nodes() -> None:
    for nodes in (1, 4, 10):
        _, grants = granted(nodes, 16)
        assert [g.host for g in grants] == ["i/h000", "i/h001"]
        assert {(g.first, g.last) for g in grants} == {(0, nodes)}


def test_a_grant_says_the_same_for_one_device_as_for_two_thousand() -> None:
    _, one = granted(3, 1)
    _, many = granted(3, 2048)
    assert len(many) == 2048 // PER_HOST
    assert {replace(g, host="") for g in many} == {replace(one[0], host="")}
