"""Records on their way to observers: written once, read only when an observer looks.

Problem: a gang can take less time than the records about it.  They pass through
three processes, and most of them are never looked at.  So the first process writes
bytes, the next ones move bytes, and only a view, a test or a question turns them into
records.  Fields that many gangs have in common are written once for all of them.

Rule for maintainers: :func:`read` gives back exactly the records of
:mod:`pathways_lab.timeline.records`, and raises CodecError for anything else;
nothing but this module knows the forms in between.

Paper: section 5 (timelines of single gangs).
"""

from __future__ import annotations

import functools
import math
import sys
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from operator import attrgetter
from typing import Any, NamedTuple

import msgpack

from pathways_lab.timeline.packed import About, Granted, Item, Row, records_of_gang, single
from pathways_lab.timeline.records import Event, Record, Sample, Span
from pathways_lab.timeline.records_of import Placing, Window, message
from pathways_lab.transport.codec import CodecError, pack, unpack

_GANGS = "gangs"
_ROW = "row"
_PLACES = "places"
_MESSAGES = "messages"
_SINGLE = frozenset(cls.__name__.encode() for cls in (Event, Sample, Span))
_SHORT, _SHORT_FROM, _SHORT_MOST = 0xA0, 2, 31
"""In msgpack: what is added to the length of a short text, up to which, and where one begins that
is the first of a short list."""
_event_fields = attrgetter(*Event.__dataclass_fields__)


_packed: Callable[[Any], bytes] = msgpack.packb


def write(record: Record) -> bytes:
    """One record."""
    if type(record) is Event:
        return _packed(("Event", *_event_fields(record)))  # the quick way of codec.pack
    return _packed(pack(record))


class Ended(NamedTuple):
    """A gang that is over on a host, as far as the timeline is concerned.

    about: of :func:`about`.  announced: a ``launched`` event was written before.
    opens: it is the first one of its grant that is written.
    Times are seconds on the host's clock: its grant was *received*, and prepared
    from *began* to *prepared*; its turn and its inputs had come (*handed*); the
    launching call was *called* and *returned*; on its devices it was from
    *start* to *end*.
    """

    about: bytes
    run: int
    step: int
    seq: int
    poisoned: bool
    announced: bool
    opens: bool
    received: float
    began: float
    prepared: float
    handed: float
    called: float
    returned: float
    start: float
    end: float


_TIMES = 8
_HEAD = (str, str, bool, float)
_GANG: list[type] = [int, int, int, int, bool, bool, bool]
_TOP = 7 if sys.byteorder == "little" else 0
"""The byte of a float64 with its sign and most of its exponent, all ones in what is no number."""
_GANGS_BEFORE = 5
"""Fields of an entry of gangs between its form and its rows."""


def about(
    program: str, node: str, client: str, line: str, slice_id: int, devices: tuple[int, ...]
) -> bytes:
    """The fields that all gangs of one step have in common on a host."""
    return _packed((program, node, client, line, slice_id, devices))


def gangs(island: str, host: str, emulated: bool, ended: Iterable[Ended], offset: float) -> bytes:
    """Gangs of one host.  offset: what to add to its clock."""
    abouts: dict[bytes, int] = {}
    rows: list[tuple[int, int, int, int, bool, bool, bool]] = []
    times = array("d")
    for gang in ended:
        number = abouts.setdefault(gang[0], len(abouts))
        rows.append((number, *gang[1:7]))
        times.extend(gang[7:])
    head = (_GANGS, island, host, emulated, offset, list(abouts), rows, times.tobytes())
    return _packed(head)


def row(
    island: str,
    host: str,
    emulated: bool,
    offset: float,
    abouts: Sequence[bytes],
    first: tuple[int, int, int],
    poisoned: Iterable[int],
    announced: int,
    opens: bool,
    once: tuple[float, float, float, float],
    times: tuple[Sequence[float], Sequence[float], Sequence[float], Sequence[float]],
) -> bytes:
    """Gangs of one run, one step after the other, in columns; see :class:`Ended`.

    abouts: of each.  first: run, step and place of the first one.
    poisoned: which of them, from 0.  announced: so many of the first ones.
    once: received, began, prepared, handed.  times: called, returned, start, end of each.
    """
    known = dict.fromkeys(abouts)
    numbers: list[int] = []
    if len(known) > 1:
        number = {about: at for at, about in enumerate(known)}
        numbers = [number[about] for about in abouts]
    columns = [array("d", column).tobytes() for column in times]
    return _packed(
        (
            _ROW, island, host, emulated, offset, list(known), numbers, first, sorted(poisoned),
            announced, opens, once, columns,
        )
    )  # fmt: skip


def placing(places: Placing) -> bytes:
    """The input of :func:`places`, once for all runs."""
    return _packed((places.island, places.program, places.client, places.gangs))


def places(window: Window, placing: bytes) -> bytes:
    """The places that a window gives the gangs of one island."""
    return _packed((_PLACES, window, placing))


Sent = tuple[float, str, str, Sequence[str], int, int, str]
"""The same wire message to each target: time, kind, source, targets, bytes, run, program.

run: 0 for several.  bytes: of one of them.
"""


def messages(sent: Iterable[Sent]) -> bytes:
    """Wire messages as one entry."""
    entries = list(sent)
    return _packed((_MESSAGES, sum([len(entry[3]) for entry in entries]), entries))


def read(written: Iterable[bytes]) -> list[Record]:
    """The records in what was written.  Raises CodecError."""
    return single(read_packed(written))


def read_packed(written: Iterable[bytes]) -> list[Item]:
    """The same, with what came in columns left in columns.  Raises CodecError."""
    items: list[Item] = []
    for entry in written:
        try:
            plain = msgpack.unpackb(entry, strict_map_key=False)
            if plain[0] == _GANGS:
                items += _read_gangs(*plain[1:])
            elif plain[0] == _ROW:
                items.append(_read_row(*plain[1:]))
            elif plain[0] == _PLACES:
                time, run, epoch, place = plain[1]
                items.append(Granted(time, run, epoch, place, _read_placing(plain[2])))
            elif plain[0] == _MESSAGES:
                items += [
                    message(time, kind, source, target, *rest)
                    for time, kind, source, targets, *rest in plain[2]
                    for target in targets
                ]
            else:
                items.append(unpack(Record, plain))
        except CodecError:
            raise
        except Exception as error:  # msgpack raises many types; all mean the same here
            raise CodecError(f"what was written is not a record: {error!r}") from None
    return items


def check(written: Iterable[bytes]) -> None:
    """Whether what a host has written can be read by everybody.  Raises CodecError."""
    for entry in written:
        try:
            plain = msgpack.unpackb(entry, strict_map_key=False)
            if plain[0] == _GANGS:
                _check_gangs(*plain[1:])
            elif plain[0] == _ROW:
                _check_row(_read_row(*plain[1:]))
            else:
                unpack(Record, plain)
        except CodecError:
            raise
        except Exception as error:  # as in read_packed
            raise CodecError(f"what was written is not a record of a host: {error!r}") from None


def _check_gangs(
    island: str, host: str, emulated: bool, offset: float, abouts: Any, rows: Any, times: bytes
) -> None:
    for written in abouts:
        _read_about(written)
    # All at once, at the pace of C: there may be thousands of gangs.
    flat = [*chain.from_iterable(rows)]
    right = (
        (type(island), type(host), type(emulated), type(offset)) == _HEAD
        and {*map(len, rows)} == {len(_GANG)}
        and [*map(type, flat)] == _GANG * len(rows)
        and 0 <= min(numbers := flat[:: len(_GANG)]) <= max(numbers) < len(abouts)
        and type(times) is bytes
        and len(times) == 8 * _TIMES * len(rows)
        and math.isfinite(offset)
        and _finite(times)
    )
    if not right:
        raise CodecError("gangs are told wrongly")


def _check_row(row: Row) -> None:
    once = (*row.once, row.offset)
    numbers = (row.run, row.step, row.seq, row.announced, *row.numbers, *row.poisoned)
    right = (
        (type(row.island), type(row.host), type(row.emulated), type(row.offset)) == _HEAD
        and {*map(type, once)} == {float}
        and math.isfinite(sum(once))
        and _finite(b"".join(row.columns))
        and {*map(type, numbers)} == {int}
        and type(row.opens) is bool
    )
    if not right:
        raise CodecError("a row of gangs is told wrongly")


def _finite(stamps: bytes) -> bool:
    """Whether these float64 are surely numbers: each is below 2 to the power of 769."""
    tops = stamps[_TOP::8]
    return 0x7F not in tops and 0xFF not in tops


def count(entries: Iterable[bytes]) -> int:
    """At least so many records are in these entries."""
    return sum([look(entry)[1] for entry in entries])


def look(entry: bytes) -> tuple[str, int]:
    """The kind and the least number of records of an entry, without reading the rest.

    The kind of a span, event or sample; "" for several at once.
    """
    # Most are single records: their class and kind are short texts at the very beginning.
    at = _SHORT_FROM + entry[1] - _SHORT
    if entry[_SHORT_FROM:at] in _SINGLE and 0 <= (length := entry[at] - _SHORT) <= _SHORT_MOST:
        return entry[at + 1 : at + 1 + length].decode(), 1
    unpacker = msgpack.Unpacker(strict_map_key=False)
    unpacker.feed(entry)
    fields = unpacker.read_array_header()
    form = unpacker.unpack()
    if form == _MESSAGES:
        return "", int(unpacker.unpack())
    if form == _PLACES:
        unpacker.skip()
        inner = msgpack.Unpacker()
        inner.feed(unpacker.unpack())
        inner.read_array_header()
        for _ in range(3):
            inner.skip()
        return "", inner.read_array_header()
    if form == _GANGS:
        for _ in range(_GANGS_BEFORE):
            unpacker.skip()
        return "", 2 * unpacker.read_array_header()
    if form == _ROW:
        for _ in range(fields - 2):
            unpacker.skip()
        unpacker.read_array_header()
        return "", 2 * (len(unpacker.unpack()) // 8)
    return str(unpacker.unpack()), 1


@functools.lru_cache(maxsize=256)
def _read_placing(written: bytes) -> Placing:
    island, program, client, gangs = msgpack.unpackb(written)
    return Placing(island, program, client, tuple([(*gang[:5], tuple(gang[5])) for gang in gangs]))


@functools.lru_cache(maxsize=4096)
def _read_about(written: bytes) -> About:
    program, node, client, line, slice_id, devices = msgpack.unpackb(written)
    texts = {*map(type, (program, node, client, line))}
    if texts != {str} or {*map(type, (slice_id, *devices))} != {int}:
        raise CodecError("the step of a gang is told wrongly")
    return About(program, node, client, line, slice_id, tuple(devices))


def _read_gangs(
    island: str,
    host: str,
    emulated: bool,
    offset: float,
    abouts: list[bytes],
    rows: list[tuple[int, int, int, int, bool, bool, bool]],
    times: bytes,
) -> Iterator[Record]:
    stamps = [stamp + offset for stamp in memoryview(times).cast("d")]
    for at, (number, *place, poisoned, announced, opens) in enumerate(rows):
        yield from records_of_gang(
            island, host, emulated, _read_about(abouts[number]), (place[0], place[1], place[2]),
            poisoned, announced, opens, stamps[at * _TIMES : (at + 1) * _TIMES],
        )  # fmt: skip


def _read_row(
    island: str,
    host: str,
    emulated: bool,
    offset: float,
    abouts: list[bytes],
    numbers: list[int],
    first: tuple[int, int, int],
    poisoned: list[int],
    announced: int,
    opens: bool,
    once: tuple[float, float, float, float],
    columns: list[bytes],
) -> Row:
    known = tuple([_read_about(written) for written in abouts])
    received, began, prepared, handed = once
    called, returned, start, end = columns
    if not len(called) == len(returned) == len(start) == len(end) > 0 == len(end) % 8:
        raise CodecError("the columns of a row differ in length, or are empty")
    if not known or (
        numbers
        and not (len(numbers) == len(end) // 8 and max(numbers) < len(known) > min(numbers) >= 0)
    ):
        raise CodecError("a row names what it does not have")
    return Row(
        island, host, emulated, known, tuple(numbers), *first, frozenset(poisoned), announced,
        opens, (received + offset, began + offset, prepared + offset, handed + offset),
        offset, (called, returned, start, end),
    )  # fmt: skip
