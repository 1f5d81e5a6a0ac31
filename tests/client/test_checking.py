"""Possible deadlocks: found from the programs alone, and only where there can be one."""

from __future__ import annotations

from typing import Any
from xml.etree import ElementTree

import jax.numpy as jnp
import numpy as np
import pytest

import pathways_lab as pw
from pathways_lab.notebook.reports import stall_figure
from tests.client.kit import a_slice

X = np.zeros((4, 4), np.float32)


def program(*slices: pw.Slice, name: str = "program") -> Any:
    """One gang on each slice, one after the other; captured."""
    functions = [
        pw.jit(lambda x: x @ jnp.ones((4, 4)), on=on, name=f"on_{on.name}") for on in slices
    ]

    def body(x: Any) -> list[Any]:
        return [f(x) for f in functions]

    made = pw.program(body, name=name)
    made.capture(X)
    return made


def test_two_programs_over_two_hosts_can_deadlock() -> None:
    on, also = a_slice(2, 2), a_slice(4)
    found = pw.possible_deadlock(program(on, name="one"), program(also, name="two"))
    assert found is not None
    assert found.kind == "possible"
    assert {gang.program for gang in found.gangs} == {"one", "two"}
    assert all("pw.jit" in gang.line.text or gang.line.number for gang in found.gangs)
    assert "would be in" in str(found)
    # One host launches in one order: it takes two to wait for each other.
    assert {arrow.host for arrow in found.arrows} == {"island0/host0", "island0/host1"}


def test_one_host_alone_is_one_order_on_all_its_devices() -> None:
    assert pw.possible_deadlock(program(a_slice(2)), program(a_slice(2))) is None


def test_devices_that_are_not_shared_are_no_danger() -> None:
    here, there = a_slice(4, island="island0"), a_slice(4, island="island1")
    assert pw.possible_deadlock(program(here), program(there)) is None


def test_one_shared_device_is_one_order() -> None:
    assert pw.possible_deadlock(program(a_slice(1)), program(a_slice(1))) is None


def test_one_program_alone_is_in_order() -> None:
    assert pw.possible_deadlock(program(a_slice(4), a_slice(2, 2))) is None


def test_a_program_that_was_never_captured() -> None:
    with pytest.raises(pw.PathwaysError, match="not captured yet"):
        pw.possible_deadlock(pw.program(lambda x: x))


def test_the_picture_of_a_cycle() -> None:
    found = pw.possible_deadlock(program(a_slice(2, 2), name="a<b"), program(a_slice(4)))
    assert found is not None
    svg = ElementTree.fromstring(stall_figure.picture(found))
    texts = "".join(svg.itertext())
    assert "program a<b" in texts
    hosts = {arrow.host for arrow in found.arrows}
    assert all(host in texts for host in hosts)
    boxes = [e for e in svg if e.tag.endswith("rect") and e.get("class") != "ground"]
    arrows = [e for e in svg if e.tag.endswith("line")]
    assert len(boxes) == len(found.gangs) + len(hosts)
    assert len(arrows) == 2 * len(found.arrows)
