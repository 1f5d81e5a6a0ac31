"""The edge of a process: bytes of others become typed values here, or close their link.

Problem: a connected process may send anything.  An exception in the middle of an action
leaves half of it done, and a wrong value that is passed on harms somebody else.  So a
*door* is a table of the operations that may come over a kind of links, each with a
dataclass whose type hints say all that its fields may be; nothing acts on a message
before all of it has been parsed.

The line between malformed and refused: a message that is not in the table, or whose
fields are of other types or out of their bounds, is *malformed*.  No client of this
package sends one, whatever its user does, so its link is closed.  A message that parses
and asks for something that may not be (another's buffer, a name in use, a program that
is not legal) is *refused*: its sender gets an answer.  Both are counted.

Rule for maintainers: an operation exists by its entry in a table, and the fuzzer
(``tests/runtime/fuzz.py``) makes its messages from there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Protocol

from pathways_lab.transport.codec import Within, unpack_fields

Id = Annotated[int, Within(1, (1 << 63) - 1)]
"""A client's number in the high 32 bits, and its own count."""
Count = Annotated[int, Within(0, (1 << 31) - 1)]
Size = Annotated[int, Within(0, (1 << 63) - 1)]
"""Bytes."""
Length = Annotated[int, Within(0, (1 << 63) - 1)]
"""Elements along a dimension: an array is judged by its bytes, where they are known."""
Seconds = Annotated[float, Within(0.0, 1e12)]
Number = Annotated[int, Within(0, (1 << 63) - 1)]
"""By which a client knows its question; 0: it waits for no answer."""


class Malformed(ValueError):
    """A message that is none of its door's.  Its link is closed."""


class Said(Protocol):
    """A class of messages.  parcels: the least and the most buffers that come with one."""

    parcels: ClassVar[tuple[int, int]]


Door = Mapping[str, type[Said]]
"""By operation."""


@dataclass(frozen=True, slots=True)
class Plain:
    """A message of fields alone."""

    parcels: ClassVar[tuple[int, int]] = 0, 0


def parsed(door: Door, op: str, fields: dict[str, Any], buffers: Sequence[object]) -> Any:
    """The message, of the class that *door* has for it.  Raises Malformed."""
    kind = door.get(op)
    if kind is None:
        raise Malformed(f"{op[:40]!r}: there is no such message")
    least, most = kind.parcels
    if not least <= len(buffers) <= most:
        raise Malformed(f"{op!r}: {len(buffers)} buffers, not {least} to {most}")
    try:
        return unpack_fields(kind, fields)
    except ValueError as error:  # CodecError is one; others are of classes that check themselves
        raise Malformed(f"{op!r}: {error}") from None
