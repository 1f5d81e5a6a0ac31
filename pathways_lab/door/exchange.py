"""Values that a kernel and its own door give each other: handles as JAX's arrays, and back.

Problem: a kernel with a door has values of the lab in two forms, handles of its client and arrays
of its JAX, and each is nothing to the other.

How: one client publishes to the other.  JAX's part is a program with one operation, a custom call,
which the door serves itself, without a gang.

Rule for maintainers: a publication has a number in its name and may come late, so the door says
which one it took or made.

Paper: section 4.2 (values are handles; nothing moves that nobody asks for).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from pathways_lab.client.functions.array_types import ArrayType
from pathways_lab.client.session.connection import Connection
from pathways_lab.door.server import NOT_FOUND, Status

PATIENCE = 10.0
"""Seconds for which a publication may be on its way."""
NUMBER = ArrayType((), "int32")
"""The last result of an exchange: the number of the publication."""
_WAYS = TAKE, GIVE = "pathways_lab.take", "pathways_lab.give"
_NAME = "between a kernel and its door, "


class Exchange(NamedTuple):
    """The target of a custom call.  way: :data:`TAKE` or :data:`GIVE`.  other: the client."""

    way: str
    other: str

    @property
    def target(self) -> str:
        """As the module has it."""
        return f"{self.way} {self.other}"


def named(number: int) -> str:
    """The name of a publication."""
    return f"{_NAME}{number}"


def newest(connection: Connection, giver: str) -> int:
    """The number of a client's last publication that was not taken.  Raises Status."""

    def numbers() -> list[int]:
        given = [name for by, name in tuple(connection.given) if by == giver]
        return [int(name.removeprefix(_NAME)) for name in given if name.startswith(_NAME)]

    try:
        connection.board.wait(lambda: bool(numbers()), PATIENCE, f"values of {giver}")
    except TimeoutError as error:
        raise Status(NOT_FOUND, str(error)) from None
    return max(numbers())


def of(targets: Iterable[str]) -> Exchange | None:
    """The exchange among the targets of a module's custom calls, if it is one."""
    for target in targets:
        way, _, other = target.partition(" ")
        if way in _WAYS:
            return Exchange(way, other)
    return None
