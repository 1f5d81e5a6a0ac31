"""The table of what devices hold: names of variables, sums, text and page."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import numpy as np

import pathways_lab as pw
from pathways_lab.client.code import variables
from pathways_lab.client.lab.memory_table import Memory
from pathways_lab.client.session.handles import Handle
from pathways_lab.core.memory.holdings import DeviceUse, Holding, Holdings, Reserved
from pathways_lab.core.program.program import NO_LINE, Line
from pathways_lab.core.slices.topology import SliceBinding
from tests.client.kit import FakeLab

WHERE = SliceBinding(1 << 32 | 4, "ann", "island0", (2,), ("x",), (("h", 0), ("h", 3)), "cpu")


class Broken:
    """A class of the user's that cannot be taken apart."""


def put(fake: FakeLab) -> Handle:
    handle: Any = pw.device_put(np.ones(4, np.float32), fake.slice(1))
    assert isinstance(handle, Handle)
    return handle


def test_a_handle_is_called_as_the_user_would_type_it(fake: FakeLab) -> None:
    w, first = put(fake), put(fake)
    params = {"b": put(fake), "layers": [first, SimpleNamespace()]}
    both = _ = w
    nothing = [list(range(200_000)), Broken, np, lambda: w]
    names = variables.of_caller()
    assert {names[w.buffer_id], names[both.buffer_id]} <= {"w", "both"}
    assert names[first.buffer_id] == "first"
    assert names[params["b"].buffer_id] == "params['b']"  # type: ignore[attr-defined]
    assert not any(name.startswith(("nothing", "_")) for name in names.values())
    assert len(nothing) == 4


def holding(number: int, nbytes: int, **fields: Any) -> Holding:
    usual = {"state": "resident", "program": "", "name": "", "line": NO_LINE, "why": ()}
    return Holding(number, "ann", WHERE.slice, nbytes, **{**usual, **fields})


def found(*values: Holding) -> Holdings:
    return Holdings(
        values,
        (Reserved(1 << 32 | 7, "ann", "train", 96),),
        (WHERE,),
        (DeviceUse(("h", 0), 40, 48, 100), DeviceUse(("h", 1), 0, 0, 100)),
        {"ann": 136, "bob": 200},
    )


def test_values_are_ranked_named_and_placed() -> None:
    line = Line("cell.py", 3, "w = step(<x>)")
    memory = Memory.of(
        found(
            holding(1, 10, why=("a handle is held",)),
            holding(2, 30, program="step", name="add", line=line),
            holding(3, 20, state="suspended", name="feed"),
        ),
        {1: "params['w']"},
    )
    assert [(value.name, value.nbytes, value.state) for value in memory.values] == [
        ("step: add", 60, "on devices"), ("feed", 40, "suspended"),
        ("params['w']", 20, "on devices"),
    ]  # fmt: skip
    assert memory.values[0].devices == {("h", 0): 30, ("h", 3): 30}
    assert memory.values[1].devices == {}
    assert memory.total == 88
    text, page = repr(memory), memory._repr_html_()
    assert text.startswith("88 B on 2 devices; the fullest is 88.0% full\n")
    for told in ("s4: 2 of h", "cell.py:3", "run 7 of 'train'", "h device 0", "bob", "200 B"):
        assert told in text
    assert "h device 1" not in text, "an empty device"
    assert "step(&lt;x&gt;)" in page
    assert "color" not in page, "it reads on light and on dark pages"


def test_a_long_table_is_cut_and_says_so() -> None:
    memory = Memory.of(found(*(holding(n, 5) for n in range(1, 101))), {})
    assert len(memory.values) == 100
    assert "60 more" in repr(memory)
    assert "600 B" in repr(memory)


def test_values_that_were_not_described_are_told_too() -> None:
    many = dataclasses.replace(found(*(holding(n, 5) for n in range(1, 51))), others=10**5)
    memory = Memory.of(dataclasses.replace(many, others_bytes=1 << 20), {})
    assert (memory.others, memory.others_bytes) == (10**5, 1 << 20)
    assert "100,010 more" in repr(memory)
    assert "1 MiB" in repr(memory)


def test_an_empty_lab_says_so() -> None:
    assert repr(Memory.of(Holdings((), (), (), (), {}), {})).startswith("0 B on 0 devices")
