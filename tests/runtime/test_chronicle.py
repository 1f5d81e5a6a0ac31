"""Records that hosts write are checked before anybody keeps them."""

from __future__ import annotations

import math
import random
import struct
from typing import Any

import msgpack
import pytest

from pathways_lab.timeline.packed import single
from pathways_lab.timeline.records import Event, Sample, Span
from pathways_lab.transport import record_encoding
from pathways_lab.transport.codec import CodecError
from tests.runtime.mutate import Mutator

ABOUT = record_encoding.about("p", "n", "c", "a.py:3", 1 << 32, (0, 1))
ONCE = (0.0, 1.0, 2.0, 3.0)
GANG = record_encoding.Ended([ABOUT], 5, 0, 0, (), 0, True, ONCE, ([4.0], [5.0], [6.0], [7.0]))
GANGS = record_encoding.segments("i", "h", False, [GANG, GANG], 0.5)
OTHER = record_encoding.about("p", "m", "c", "a.py:4", 1 << 32, (0, 1))
ROW = record_encoding.segments(
    "i", "h", False,
    [record_encoding.Ended(
        [ABOUT, OTHER], 5, 0, 0, [1], 0, True, ONCE,
        ([4.0, 5.0], [4.5, 5.5], [5.0, 6.0], [6.0, 7.0]),
    )],
    0.5,
)  # fmt: skip
NO_NUMBERS = (math.inf, -math.inf, math.nan)
WRITTEN = (
    record_encoding.write(Event("launched", 1.0, "i", "h", 5, 0, args={"x": 1})),
    record_encoding.write(Span("compile", 1.0, 2.0, "i", "h", (0,))),
    record_encoding.write(Sample("memory", 1.0, 2.0, "i", "h")),
    GANGS,
    ROW,
)


def changed(entry: bytes, at: tuple[int, ...], value: Any) -> bytes:
    """The entry with another value at a place."""
    plain = msgpack.unpackb(entry)
    inner = plain
    for step in at[:-1]:
        inner = inner[step]
    inner[at[-1]] = value
    packed: bytes = msgpack.packb(plain)
    return packed


def test_what_hosts_write_is_right() -> None:
    record_encoding.check(WRITTEN)
    assert len(record_encoding.read(WRITTEN)) > len(WRITTEN)


@pytest.mark.parametrize(
    "entry",
    [
        b"", b"\xc1", b"\x90", msgpack.packb(5), msgpack.packb(["Plan"]),
        changed(WRITTEN[0], (8,), None),  # the node
        changed(WRITTEN[0], (2,), float("nan")),
        changed(GANGS, (1,), None),
        changed(GANGS, (5, 0), record_encoding.about("p", None, "c", "", 1, (0,))),  # type: ignore[arg-type]
        changed(GANGS, (7, 0, 6), [9]),
        changed(GANGS, (7, 0, 6), []),
        changed(GANGS, (7, 0, 6), [0, 0]),
        changed(GANGS, (7, 0, 6), ["0"]),
        changed(GANGS, (7, 0, 7), 0),
        changed(GANGS, (7, 0, 7), 2),
        changed(GANGS, (7, 0, 0), "run"),
        changed(GANGS, (7,), []),
        changed(GANGS, (7,), [[5, 0, 0, [], 0, True, [0]], [1, 5, 1, 1, [], 0, True, [0], 1]]),
        changed(GANGS, (6,), b"\xff" * 128),
        *(changed(GANGS, (6,), struct.pack("16d", *[1.0] * 15, wrong)) for wrong in NO_NUMBERS),
        changed(GANGS, (6,), struct.pack("15d", *[1.0] * 15)),
        changed(GANGS, (6,), [1.0] * 128),
        changed(ROW, (5, 0), record_encoding.about("p", "n", "c", "", 1, ("0",))),  # type: ignore[arg-type]
        changed(ROW, (7, 0, 0), None),
        changed(ROW, (7, 0, 3), ["1"]),
        changed(ROW, (7, 0, 6), [0, 1, 0]),
        changed(ROW, (7, 0, 6), [0, 2]),
        *(changed(ROW, (6,), struct.pack("12d", *[1.0] * 11, wrong)) for wrong in NO_NUMBERS),
        changed(ROW, (6,), b""),
        record_encoding.segments("i", "h", False, [GANG._replace(columns=([], [], [], []))], 0.5),
    ],
)  # fmt: skip
def test_what_somebody_could_not_read_is_refused(entry: bytes) -> None:
    with pytest.raises(CodecError):
        record_encoding.check([WRITTEN[0], entry])


def test_whatever_passes_can_be_read() -> None:
    """Records that are right but for one thing either do not pass, or harm no reader."""
    rng = random.Random(0)
    mutator, passed = Mutator(rng), 0
    for _ in range(5000):
        plain = mutator.value(msgpack.unpackb(rng.choice(WRITTEN)))
        try:
            entry = msgpack.packb(plain)
            record_encoding.check([entry])
        except (CodecError, ValueError, OverflowError):
            continue
        passed += 1
        for record in single(record_encoding.read_packed([entry])):
            assert type(getattr(record, "node", "")) is str
        record_encoding.count([entry])
        record_encoding.look(entry)
    assert passed > 100
