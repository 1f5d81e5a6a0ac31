"""Values that a kernel and its own door give each other: handles as JAX's arrays, and back.

Problem: a kernel with a door has values of the lab in two forms, handles of its client and arrays
of its JAX, and each is nothing to the other.

How: one client publishes to the other.  JAX's part is a program with one operation, a custom call,
which the door serves itself, without a gang.

Rule for maintainers: nobody waits for an answer.  The kernel numbers the exchanges, the number is
the first argument of the operation and part of the publication's name, and each side waits for a
publication of this name.

Paper: section 4.2 (values are handles; nothing moves that nobody asks for).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from pathways_lab.client.functions.array_types import ArrayType

PATIENCE = 10.0
"""Seconds for which a publication may be on its way."""
NUMBER = ArrayType((), "int32")
"""The first argument of an exchange, and the result of :data:`GIVE`."""
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


def of(targets: Iterable[str]) -> Exchange | None:
    """The exchange among the targets of a module's custom calls, if it is one."""
    for target in targets:
        way, _, other = target.partition(" ")
        if way in _WAYS:
            return Exchange(way, other)
    return None
