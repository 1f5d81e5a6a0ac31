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

from pathways_lab.timeline.packed import About, Granted, Item, Row, single
from pathways_lab.timeline.records import Event, Record, Sample, Span
from pathways_lab.timeline.records_of import Placing, Window, message
from pathways_lab.transport.codec import CodecError, pack, unpack

_SEGMENTS = "segments"
_PLACES = "places"
_MESSAGES = "messages"
_SINGLE = frozenset(cls.__name__.encode() for cls in (Event, Sample, Span))
_SHORT, _SHORT_FROM, _SHORT_MOST = 0xA0, 2, 31
"""In msgpack: what is added to the length of a short text, up to which, and where one begins that
is the first of a short list."""
_event_fields = attrgetter(*Event.__dataclass_fields__)


Head = tuple[int, int, int, Sequence[int], int, bool, Sequence[int], int]
"""Fields of a segment but for its times; the last two say which of the entry's *abouts* its gangs
are, only once where all are alike, and how many gangs there are."""

_packed: Callable[[Any], bytes] = msgpack.packb


def write(record: Record) -> bytes:
    """One record."""
    if type(record) is Event:
        return _packed(("Event", *_event_fields(record)))  # the quick way of codec.pack
    return _packed(pack(record))


class Ended(NamedTuple):
    """Gangs of one run that are over on a host, one step after the other.

    abouts: of each, of :func:`about`.  step, seq: step and place of the first one.
    poisoned: which of them, from 0.  announced: so many from the first on had a ``launched`` event
        of their own.
    opens: no gang of their grant was written before.
    once: seconds on the host's clock at which their grant was received and began to be prepared,
        was prepared, and their turn and inputs had come.
    columns: when each was called, returned, started and ended.
    """

    abouts: Sequence[bytes]
    run: int
    step: int
    seq: int
    poisoned: Sequence[int]
    announced: int
    opens: bool
    once: tuple[float, float, float, float]
    columns: tuple[Sequence[float], Sequence[float], Sequence[float], Sequence[float]]


_HEAD = (str, str, bool, float, bytes)
_SEGMENT: list[type] = [int, int, int, list, int, bool, list, int]
_ONCE, _EACH = 4, 4
"""Times that a segment has once, and times of each gang."""
_TOP = 7 if sys.byteorder == "little" else 0
"""The byte of a float64 with its sign and most of its exponent, all ones in what is no number."""
_SEGMENTS_BEFORE = 5
"""Fields of an entry of segments between its form and its times."""


def about(
    program: str, node: str, client: str, line: str, slice_id: int, devices: tuple[int, ...]
) -> bytes:
    """The fields that all gangs of one step have in common on a host."""
    return _packed((program, node, client, line, slice_id, devices))


def segments(
    island: str, host: str, emulated: bool, ended: Iterable[Ended], offset: float
) -> bytes:
    """Segments of one host.  offset: what to add to its clock."""
    abouts: dict[bytes, int] = {}
    heads: list[Head] = []
    times = array("d")
    for each in ended:
        called, returned, start, end = each.columns
        alike = each.abouts if len({*each.abouts}) > 1 else each.abouts[:1]
        numbers = [abouts.setdefault(about, len(abouts)) for about in alike]
        heads.append((*each[1:7], numbers, len(called)))
        times.fromlist([*each.once, *called, *returned, *start, *end])
    head = (_SEGMENTS, island, host, emulated, offset, list(abouts), times.tobytes(), heads)
    return _packed(head)


def placing(places: Placing) -> bytes:
    """The input of :func:`places`, once for all runs."""
    return _packed((places.island, places.program, places.client, places.gangs, places.again))


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
            if plain[0] == _SEGMENTS:
                items += _read_segments(*plain[1:])
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
            if plain[0] == _SEGMENTS:
                _check_segments(*plain[1:])
            else:
                unpack(Record, plain)
        except CodecError:
            raise
        except Exception as error:  # as in read_packed
            raise CodecError(f"what was written is not a record of a host: {error!r}") from None


def _check_segments(
    island: str, host: str, emulated: bool, offset: float, abouts: Any, times: bytes, heads: Any
) -> None:
    for written in abouts:
        _read_about(written)
    # All at once, at the pace of C: there may be thousands of gangs.
    flat = [*chain.from_iterable(heads)]
    every = len(_SEGMENT)
    poisoned, named, counts = flat[3::every], flat[6::every], flat[7::every]
    numbers = [*chain.from_iterable(named)]
    right = (
        (type(island), type(host), type(emulated), type(offset), type(times)) == _HEAD
        and {*map(len, heads)} == {every}
        and [*map(type, flat)] == _SEGMENT * len(heads)
        and {*map(type, chain(numbers, *poisoned))} == {int}
        and 0 <= min(numbers) <= max(numbers) < len(abouts)
        and min(counts) > 0
        and all(len(of) in (1, count) for of, count in zip(named, counts, strict=True))
        and len(times) == 8 * (_ONCE * len(heads) + _EACH * sum(counts))
        and math.isfinite(offset)
        and _finite(times)
    )
    if not right:
        raise CodecError("gangs are told wrongly")


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
    unpacker.read_array_header()
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
    if form == _SEGMENTS:
        for _ in range(_SEGMENTS_BEFORE):
            unpacker.skip()
        times = len(unpacker.unpack()) // 8
        return "", 2 * (times - _ONCE * unpacker.read_array_header()) // _EACH
    return str(unpacker.unpack()), 1


@functools.lru_cache(maxsize=256)
def _read_placing(written: bytes) -> Placing:
    island, program, client, gangs, again = msgpack.unpackb(written)
    told = tuple([(*gang[:5], tuple(gang[5])) for gang in gangs])
    return Placing(island, program, client, told, tuple(again))


@functools.lru_cache(maxsize=4096)
def _read_about(written: bytes) -> About:
    program, node, client, line, slice_id, devices = msgpack.unpackb(written)
    texts = {*map(type, (program, node, client, line))}
    if texts != {str} or {*map(type, (slice_id, *devices))} != {int}:
        raise CodecError("the step of a gang is told wrongly")
    return About(program, node, client, line, slice_id, tuple(devices))


def _read_segments(
    island: str,
    host: str,
    emulated: bool,
    offset: float,
    abouts: list[bytes],
    times: bytes,
    heads: list[Head],
) -> Iterator[Row]:
    known, stamps = [_read_about(written) for written in abouts], memoryview(times).cast("d")
    at = 0
    for run, step, seq, poisoned, announced, opens, numbers, count in heads:
        received, began, prepared, handed = stamps[at : at + _ONCE]
        at += _ONCE
        columns = [bytes(stamps[at + n * count : at + (n + 1) * count]) for n in range(_EACH)]
        at += _EACH * count
        named = {number: place for place, number in enumerate(dict.fromkeys(numbers))}
        yield Row(
            island, host, emulated, tuple([known[number] for number in named]),
            tuple([named[number] for number in numbers]) if len(named) > 1 else (),
            run, step, seq, frozenset(poisoned), announced, opens,
            (received + offset, began + offset, prepared + offset, handed + offset),
            offset, (columns[0], columns[1], columns[2], columns[3]),
        )  # fmt: skip
    if at != len(stamps):
        raise CodecError("the times of gangs are more or fewer than the gangs")
