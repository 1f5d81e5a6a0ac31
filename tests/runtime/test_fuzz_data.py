"""A short form of ``python -m tests.runtime.fuzz_data``, and that it sees what it looks for."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from pathways_lab.core.program.layout import Layout, shard_shape
from pathways_lab.runtime import data_messages
from pathways_lab.runtime.data_messages import DATA, Ask, Put
from pathways_lab.runtime.host import driver
from pathways_lab.runtime.host.client_io import Desk
from pathways_lab.runtime.host.driver import HostRim
from pathways_lab.runtime.host.transfer_engine import Exchange
from pathways_lab.transport.codec import unpack_fields
from pathways_lab.transport.edge import Door
from tests.runtime.fuzz_data import EVE, ROUND, Fuzz, messages


@pytest.fixture
def fuzz() -> Iterator[Fuzz]:
    made = Fuzz(0)
    yield made
    made.lab.close()


def test_wrong_messages_raise_nothing_and_nobody_else_notices(fuzz: Fuzz) -> None:
    for _ in range(10):
        fuzz.round()
    assert fuzz.inputs == 10 * ROUND
    assert fuzz.lab.control.rejected > 5 * ROUND
    # What is right is taken, of every operation: no link is closed.
    links = {role: fuzz.lab.come(role, EVE * (role == "client")) for role in ("client", "host")}
    for op, fields, buffers in fuzz.known:
        fuzz.lab.say(links["host" if op == "parts" else "client"], op, fields, buffers)
    assert {link.closed for link in links.values()} == {None}


def test_every_operation_of_the_door_is_tried(fuzz: Fuzz) -> None:
    assert {op for op, _, _ in messages(fuzz.lab)} == DATA.keys() == HostRim.from_data.keys()
    # And every field of each is there to be changed.
    for op, message in DATA.items():
        kind: Any = message
        tried = {name for known, fields, _ in fuzz.known if known == op for name in fields}
        assert tried == {field.name for field in dataclasses.fields(kind)}


# --- what it finds --------------------------------------------------------------------------


def _rounds(fuzz: Fuzz) -> None:
    for _ in range(100):
        fuzz.round()


def _unchecked(door: Door, op: str, fields: dict[str, Any], _: Any) -> Any:
    """A message as its fields are, whatever they are."""
    kind: Any = door.get(op, Ask)
    found = object.__new__(kind)
    for field in dataclasses.fields(kind):
        value = fields.get(field.name, field.default)
        if field.name == "layout":
            value = Layout(*value)
        object.__setattr__(found, field.name, value)
    return found


def _parsed(shape: tuple[int, ...], dtype: str, layout: Layout) -> int:
    """The bytes of a shard, of a type that NumPy parses and a shape that nobody has checked."""
    return math.prod(shard_shape(layout, shape)) * np.dtype(dtype).itemsize


@pytest.mark.parametrize(
    ("where", "name", "instead", "found"),
    [
        (driver, "parsed", _unchecked, "could not take|Traceback"),
        (data_messages, "shard_bytes", _parsed, "ZeroDivisionError|SyntaxError|KeyError|TypeError"),
        (Desk, "_check_own", lambda *args: None, "another's value|are left"),
    ],
)
def test_without_a_check_it_finds_what_the_check_is_for(
    fuzz: Fuzz, monkeypatch: pytest.MonkeyPatch, where: Any, name: str, instead: Any, found: str
) -> None:
    monkeypatch.setattr(where, name, instead)
    monkeypatch.setattr("tests.runtime.fuzz_data.PATIENCE", 5.0)  # some only wait, for ever
    with pytest.raises(AssertionError, match=found):
        _rounds(fuzz)


def test_a_fault_behind_the_edge_is_found_and_costs_one_link(
    fuzz: Fuzz, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: Any) -> None:
        raise ZeroDivisionError

    lab, (message, *_) = fuzz.lab, fuzz.known
    with monkeypatch.context() as faults:
        faults.setattr(Desk, "put", broken)
        lab.say(fuzz.links["client"], *message)
    assert "could not take 'put'" in str(fuzz.links["client"].closed)
    assert lab.control.wrong.pop()
    for client in lab.clients:
        client.work()


def test_a_fault_in_an_answer_fails_that_question(
    fuzz: Fuzz, monkeypatch: pytest.MonkeyPatch
) -> None:
    lab, ann = fuzz.lab, fuzz.lab.clients[0]
    submit: Callable[..., None] = Exchange.submit

    def broken(self: Exchange, function: Callable[..., None], *args: Any, **more: Any) -> None:
        if function == self.read:
            raise ZeroDivisionError
        submit(self, function, *args, **more)

    with monkeypatch.context() as faults:
        faults.setattr(Exchange, "submit", broken)
        lab.say(ann.link, "fetch", {"id": 1, "buffer": ann.kept, "devices": [0]})
    assert [op for op, _, _ in ann.link.said] == ["fetch-failed"]
    ann.link.said.clear()
    ann.work()


# --- what it does not try ---------------------------------------------------------------------


def test_questions_and_early_parts_of_one_link_are_bounded(
    fuzz: Fuzz, monkeypatch: pytest.MonkeyPatch
) -> None:
    lab = fuzz.lab
    monkeypatch.setattr("pathways_lab.runtime.host.client_io._ASKED", 3)
    monkeypatch.setattr("pathways_lab.runtime.host.client_io._RECORD", 2 << 30)
    link, high = lab.come("client", EVE), EVE << 32
    asked = {"id": 1, "buffer": high | 99, "devices": []}
    for _ in range(3):
        lab.say(link, "fetch", asked)
    assert link.closed is None
    lab.say(link, "fetch", asked)
    assert f"3 questions of client {EVE} are open" in str(link.closed)
    link = lab.come("client", EVE)
    empty = messages(lab)[5][1] | {"slice": high | 5, "devices": []}
    for _ in range(4):
        lab.say(link, "put", empty)
    assert "not complete take" in str(link.closed)
    assert unpack_fields(Put, empty).value.nbytes


@pytest.mark.parametrize("arguments", [{0: 9}, {7: 0}, {0: 0}])
def test_arguments_that_are_none_fail_their_run_and_nothing_else(
    fuzz: Fuzz, arguments: dict[int, int]
) -> None:
    lab, ann = fuzz.lab, fuzz.lab.clients[0]
    made = next(ann.numbers)
    lab.grant(made, ann.plan.key, None, made, arguments, [b"not these bytes"])
    (failure,) = lab.control.wrong
    assert "argument 0" in failure
    lab.control.wrong.clear()
    ann.work()
