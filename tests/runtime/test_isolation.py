"""What one client does over its data links never touches another's values.

Real device processes, and clients that lie about buffers, slices, roles and keys.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from pathways_lab.core.slices.topology import SliceBinding
from pathways_lab.runtime.arrays import as_bytes
from pathways_lab.runtime.data_messages import Part, Parts, upload_fields
from pathways_lab.transport.auth import AuthenticationError, key_of
from pathways_lab.transport.codec import pack_fields
from pathways_lab.transport.handshake import Refused
from tests.runtime.fake_control import Data, Lab
from tests.runtime.host_kit import binding, layout

pytestmark = pytest.mark.cluster

HOST = "island0/host0"
ANN, EVE = 1, 2
numbers = itertools.count(1)
DATA = np.arange(4, dtype=np.float32)


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    made = Lab([HOST])
    yield made
    made.close()


def put_fields(slice_: SliceBinding, buffer: int) -> dict[str, Any]:
    fields = upload_fields(buffer, slice_.slice, [4], "float32", layout(slice_, None))
    return {**fields, "devices": [0]}


@pytest.fixture
def value(lab: Lab) -> Iterator[tuple[Data, SliceBinding, int]]:
    """A value of Ann's, with her link."""
    lab.rejected.clear()
    number = next(numbers)
    buffer = ANN << 32 | number
    slice_ = lab.bind(binding(ANN << 32 | number, (1,), [0], HOST))
    ann = Data(lab, HOST, ANN)
    ann.link.send("put", put_fields(slice_, buffer), [as_bytes(DATA)])
    lab.wait(lambda: (HOST, buffer) in lab.resident)
    yield ann, slice_, buffer
    assert np.array_equal(np.frombuffer(ann.fetch(buffer, [0])[0], np.float32), DATA)
    assert ann.link.closed is None
    lab.broadcast("free", buffers=[buffer])
    lab.broadcast("unbind", slice=slice_.slice)
    lab.resident.clear()
    ann.reactor.close()


Given = tuple[Data, SliceBinding, int]


def test_nobody_reads_by_number(lab: Lab, value: Given) -> None:
    _, _, buffer = value
    eve = Data(lab, HOST, EVE)
    eve.ask(buffer, [0])
    assert eve.closed.wait(60)
    assert not eve.answers
    lab.wait(lambda: bool(lab.rejected))
    ((host, number, reason),) = lab.rejected
    assert (host, number) == (HOST, EVE)
    assert f"buffer {buffer} does not belong to client {EVE}" in reason


@pytest.mark.parametrize("own", ["buffer", "slice"])
def test_nobody_writes_by_number(lab: Lab, value: Given, own: str) -> None:
    """Neither over another's value, nor into memory on another's slice."""
    _, slice_, buffer = value
    eve = Data(lab, HOST, EVE)
    fields = put_fields(slice_, buffer)
    fields[own] = EVE << 32 | 1
    eve.link.send("put", fields, [as_bytes(-DATA)])
    assert eve.closed.wait(60)
    lab.wait(lambda: len(lab.rejected) == 1)


def test_only_hosts_send_parts(lab: Lab, value: Given) -> None:
    eve = Data(lab, HOST, EVE)
    fields = pack_fields(Parts(ANN << 32 | 1, 0, (Part(0, ((0, 4),)),)))
    eve.link.send("parts", fields, [as_bytes(-DATA)])
    assert eve.closed.wait(60)
    lab.wait(lambda: len(lab.rejected) == 1)
    with pytest.raises(Refused, match="each with a key of its own"):
        Data(lab, HOST, EVE, role="host", name="island1/host0")


def test_a_number_is_proved_not_said(lab: Lab, value: Given) -> None:
    """Eve has her own key, and says that she is Ann."""
    forged = Data(lab, HOST, EVE)
    address = lab.hellos[HOST]["data_address"]
    for holder in (ANN, 0):
        with pytest.raises(AuthenticationError):
            forged.reactor.connect(
                address, key_of(lab.data_key, EVE), {"role": "client"}, holder=holder
            )


def test_who_has_left_is_not_heard_any_more(lab: Lab, value: Given) -> None:
    eve = Data(lab, HOST, EVE)
    lab.broadcast("clients", newest=2, present=[ANN])
    assert eve.closed.wait(60)
    with pytest.raises(Refused, match="has left the lab"):
        Data(lab, HOST, EVE)
    newer = Data(lab, HOST, 3)  # joined since; this host has not heard of it yet
    lab.broadcast("clients", newest=3, present=[ANN, EVE, 3])
    newer.reactor.close()
