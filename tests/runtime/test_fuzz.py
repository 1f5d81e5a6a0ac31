"""A short form of ``python -m tests.runtime.fuzz``, and that it sees what it looks for."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from pathways_lab.core.memory.store import BufferRecord, Store
from pathways_lab.runtime.client_messages import CLIENTS
from pathways_lab.runtime.control_plane import requests
from pathways_lab.runtime.control_plane.driver import Rim
from pathways_lab.runtime.control_plane.used_numbers import Once
from pathways_lab.transport import record_encoding
from pathways_lab.transport.edge import parsed
from tests.runtime.fuzz import DOORS, ROUND, ClientDoor, Fuzz, HostDoor
from tests.runtime.fuzz_lab import Broken

ROUNDS = 12
"""Within so many rounds whatever is broken on purpose is found."""


@pytest.mark.parametrize("door", DOORS)
def test_wrong_messages_raise_nothing_and_nobody_else_notices(door: str) -> None:
    fuzz = Fuzz(0, door)
    for _ in range(3):
        fuzz.round()
    assert fuzz.inputs == 3 * ROUND
    assert fuzz.closed > ROUND
    if door != "observers":
        assert fuzz.lab.rim.rejected > fuzz.closed, "some are refused by answer"
        assert fuzz.inputs - fuzz.unreadable - fuzz.lab.rim.rejected > ROUND, "others are met"


@pytest.mark.parametrize(
    ("door", "op"), [(door, op) for door in (ClientDoor, HostDoor) for op in door.door]
)
def test_every_operation_of_a_door_is_made_and_is_right(
    door: type[ClientDoor | HostDoor], op: str
) -> None:
    made = door(Fuzz(0).lab)
    for _ in range(20):
        _, fields, buffers = made.messages.one(op)
        assert type(parsed(made.door, op, fields, buffers)) is made.door[op]


def _anybodys(self: Store, number: int, client: str) -> BufferRecord | None:
    return self.buffers.get(number)


def no_owners(patch: pytest.MonkeyPatch) -> None:
    """Whose an id is, is not asked."""
    patch.setattr(requests, "own", lambda client, identities, what: None)
    patch.setattr(Store, "find", _anybodys)


def no_memory_of_numbers(patch: pytest.MonkeyPatch) -> None:
    """A run that is over may come again."""
    patch.setattr(Once, "use", lambda self, number: True)


def no_look_into_plans(patch: pytest.MonkeyPatch) -> None:
    """A plan is believed in what it says of its values."""
    patch.setattr(requests, "check_values", lambda plan, devices, functions: None)


def no_look_into_functions(patch: pytest.MonkeyPatch) -> None:
    """The same of functions."""
    patch.setattr(requests, "wrong_leaves", lambda leaves, devices: "")


def names_of_any_type(patch: pytest.MonkeyPatch) -> None:
    """A compiled function may be called None, and so may the node in its host's record."""
    _loosen(patch, "function", "name")


def questions_without_a_number(patch: pytest.MonkeyPatch) -> None:
    """Who asks what is stuck need not say to whom hosts shall answer."""

    def wonder(self: Rim, client: Any, message: Any) -> None:
        self.standstill.wonder(self._clock(), message.seconds, lambda story: message.id["number"])

    _loosen(patch, "stuck", "id")
    patch.setitem(Rim._from_client.__globals__["_OWN"], CLIENTS["stuck"], wonder)


def an_error_behind_the_edge(patch: pytest.MonkeyPatch) -> None:
    """Of an operation that nothing else hangs on."""

    def broken(self: Rim, *_: Any) -> None:
        raise ZeroDivisionError

    patch.setitem(Rim._from_client.__globals__["_OWN"], CLIENTS["race-go"], broken)


def records_unread(patch: pytest.MonkeyPatch) -> None:
    """Hosts' records are kept as they come."""
    patch.setattr(record_encoding, "check", lambda records: None)


def _loosen(patch: pytest.MonkeyPatch, op: str, name: str) -> None:
    """A field of an operation may be anything."""
    old: Any = CLIENTS[op]
    fields = [
        (f.name, Any if f.name == name else old.__annotations__[f.name])
        for f in dataclasses.fields(old)
    ]
    namespace = {"parcels": old.parcels, "__module__": old.__module__}
    new = dataclasses.make_dataclass(op, fields, namespace=namespace, frozen=True)
    patch.setitem(CLIENTS, op, new)  # type: ignore[arg-type]
    for handlers in (requests._HANDLERS, Rim._from_client.__globals__["_OWN"]):
        if old in handlers:
            patch.setitem(handlers, new, handlers[old])


@pytest.mark.parametrize(
    ("door", "taken_out", "operations"),
    [
        ("clients", no_owners, ("submit",)),
        ("clients", no_memory_of_numbers, ()),
        ("clients", no_look_into_plans, ("program", "submit")),
        ("clients", no_look_into_functions, ("function",)),
        ("clients", names_of_any_type, ("function",)),
        ("clients", questions_without_a_number, ("stuck", "submit")),
        ("clients", an_error_behind_the_edge, ()),
        ("hosts", records_unread, ()),
    ],
)
def test_what_is_taken_out_is_found(
    monkeypatch: pytest.MonkeyPatch,
    door: str,
    taken_out: Callable[[pytest.MonkeyPatch], None],
    operations: tuple[str, ...],
) -> None:
    """operations: on which it hangs; () where all find it as soon."""
    taken_out(monkeypatch)
    fuzz = Fuzz(0, door)
    if operations and isinstance(fuzz.door, ClientDoor):
        fuzz.door.operations = operations

    def several() -> None:
        for _ in range(ROUNDS):
            fuzz.round()

    with pytest.raises((AssertionError, Broken, ValueError)):
        several()
