"""Records that hosts write are checked before anybody keeps them."""

from __future__ import annotations

import random
from typing import Any

import msgpack
import pytest

from pathways_lab.runtime import chronicle
from pathways_lab.runtime.codec import CodecError
from pathways_lab.timeline.packed import single
from pathways_lab.timeline.records import Event, Sample, Span
from tests.runtime.mutate import Mutator

ABOUT = chronicle.about("p", "n", "c", "a.py:3", 1 << 32, (0, 1))
TIMES = [float(n) for n in range(8)]
GANG = chronicle.Ended(ABOUT, 5, 0, 0, False, False, True, *TIMES)
GANGS = chronicle.gangs("i", "h", False, [GANG, GANG], 0.5)
ROW = chronicle.row(
    "i", "h", False, 0.5, [ABOUT, ABOUT], (5, 0, 0), [], 0, True, (0.0, 1.0, 2.0, 3.0),
    ([4.0, 5.0], [4.5, 5.5], [5.0, 6.0], [6.0, 7.0]),
)  # fmt: skip
WRITTEN = (
    chronicle.write(Event("launched", 1.0, "i", "h", 5, 0, args={"x": 1})),
    chronicle.write(Span("compile", 1.0, 2.0, "i", "h", (0,))),
    chronicle.write(Sample("memory", 1.0, 2.0, "i", "h")),
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
    chronicle.check(WRITTEN)
    assert len(chronicle.read(WRITTEN)) > len(WRITTEN)


@pytest.mark.parametrize(
    "entry",
    [
        b"", b"\xc1", b"\x90", msgpack.packb(5), msgpack.packb(["Plan"]),
        changed(WRITTEN[0], (8,), None),  # the node
        changed(WRITTEN[0], (2,), float("nan")),
        changed(GANGS, (1,), None),
        changed(GANGS, (5, 0), chronicle.about("p", None, "c", "", 1, (0,))),  # type: ignore[arg-type]
        changed(GANGS, (6, 0, 0), 9),
        changed(GANGS, (6, 0, 1), "run"),
        changed(GANGS, (6,), []),
        changed(GANGS, (7,), b"\xff" * 128),
        changed(ROW, (5, 0), chronicle.about("p", "n", "c", "", 1, ("0",))),  # type: ignore[arg-type]
        changed(ROW, (7, 0), None),
        changed(ROW, (11, 2), float("inf")),
        changed(ROW, (12, 0), b"\xff" * 16),
        changed(ROW, (12, 0), b""),
    ],
)  # fmt: skip
def test_what_somebody_could_not_read_is_refused(entry: bytes) -> None:
    with pytest.raises(CodecError):
        chronicle.check([WRITTEN[0], entry])


def test_whatever_passes_can_be_read() -> None:
    """Records that are right but for one thing either do not pass, or harm no reader."""
    rng = random.Random(0)
    mutator, passed = Mutator(rng), 0
    for _ in range(5000):
        plain = mutator.value(msgpack.unpackb(rng.choice(WRITTEN)))
        try:
            entry = msgpack.packb(plain)
            chronicle.check([entry])
        except (CodecError, ValueError, OverflowError):
            continue
        passed += 1
        for record in single(chronicle.read_packed([entry])):
            assert type(getattr(record, "node", "")) is str
        chronicle.count([entry])
        chronicle.look(entry)
    assert passed > 100
