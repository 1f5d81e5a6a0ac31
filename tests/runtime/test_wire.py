"""Frames: any chunking gives the same messages; bad bytes give one clear error."""

from __future__ import annotations

import contextlib
import random

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pathways_lab.transport.framing import Decoder, Limits, Message, WireError, encode

plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.text(max_size=8)
    | st.binary(max_size=8)
    | st.floats(allow_nan=False),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=8,
)
fields = st.dictionaries(st.text(max_size=6), plain, max_size=4)
sizes = st.sampled_from([0, 1, 3, 100, 40_000, 70_000, 300_000])


def stream_of(messages: list[tuple[str, dict[str, object], list[bytes]]]) -> bytes:
    return b"".join(b"".join(encode(*message)) for message in messages)


def plain_of(messages: list[Message]) -> list[tuple[str, dict[str, object], list[bytes]]]:
    return [(m.op, m.fields, [bytes(b) for b in m.buffers]) for m in messages]


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.text(max_size=5), fields, st.lists(sizes, max_size=3)), max_size=5),
    st.integers(0, 2**32),
)
def test_any_chunking_decodes_to_the_same_messages(
    shapes: list[tuple[str, dict[str, object], list[int]]], seed: int
) -> None:
    draw = random.Random(seed)
    sent = [(op, f, [draw.randbytes(n) for n in lengths]) for op, f, lengths in shapes]
    stream = stream_of(sent)
    decoder, got, at = Decoder(), [], 0
    while at < len(stream):
        step = min(draw.choice([1, 3, 4, 50, 5_000, 100_000]), len(stream) - at)
        got += decoder.feed(stream[at : at + step])
        at += step
    assert plain_of(got) == sent
    assert sum(m.size for m in got) == len(stream)


def test_a_large_buffer_is_received_in_place_and_aligned() -> None:
    data = np.arange(1 << 20, dtype=np.float32)
    frame = b"".join(encode("x", {}, [data]))
    decoder = Decoder()
    decoder.feed(frame[:2000])
    space = decoder.space()
    assert len(space) > data.nbytes - 2000  # the rest goes straight to its place
    (message,) = decoder.feed(frame[2000:])
    array = np.frombuffer(message.buffers[0], np.float32)
    assert np.array_equal(array, data)
    assert array.ctypes.data % 4096 == 0
    assert array.flags.writeable


def test_large_buffers_are_borrowed_and_small_ones_copied() -> None:
    large = bytearray(100_000)
    pieces = encode("x", {}, [large])
    large[0] = 7
    assert pieces[1][0] == 7
    small = bytearray(10)
    (piece,) = encode("x", {}, [small])
    small[0] = 7
    assert bytes(piece)[-10:] == bytes(10)


def test_empty_and_multidimensional_buffers_travel() -> None:
    (message,) = Decoder().feed(b"".join(encode("x", None, [np.zeros((0, 3)), np.ones((2, 2))])))
    assert [len(b) for b in message.buffers] == [0, 32]


def test_what_cannot_be_sent_is_refused_by_name() -> None:
    with pytest.raises(WireError, match="'odd' cannot be encoded"):
        encode("odd", {"value": object()})
    with pytest.raises(WireError, match="C order"):
        encode("x", {}, [np.ones((4, 4))[:, 1]])


def framed(head: object) -> bytes:
    body = msgpack.packb(head)
    return len(body).to_bytes(4, "big") + body


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"\xff\xff\xff\xff", "over the limit"),
        (b"\x00\x00\x00\x01\xc1", "not msgpack"),
        (framed(3), "not \\[op"),
        (framed([1, {}, []]), "not \\[text"),
        (framed(["a", {1: 2}, []]), "name is not text"),
        (framed(["a", {}, [-1]]), "not a size"),
        (framed(["a", {}, [1 << 50]]), "has 1 buffers"),
        (framed(["a", {}, [0] * 70_000]), "has 70,000 buffers"),
        (b"\x00\x00\x10\x00" + b"\x91" * 4096, "not msgpack"),
    ],
)
def test_malformed_frames_are_wire_errors(data: bytes, says: str) -> None:
    with pytest.raises(WireError, match=says):
        Decoder().feed(data)


@settings(deadline=None, max_examples=300)
@given(st.binary(max_size=200))
def test_random_bytes_never_raise_anything_else(data: bytes) -> None:
    with contextlib.suppress(WireError):
        Decoder(Limits(header=1000, buffers=4, body=1000)).feed(data)


def test_half_a_character_is_shown_as_its_number() -> None:
    """What user code raises or prints must not end the link that tells of it."""
    (message,) = Decoder().feed(b"".join(encode("x", {"text": "a\ud800b", "data": b"\xff"})))
    assert message.fields == {"text": "a\\ud800b", "data": b"\xff"}


def test_a_buffer_for_which_there_is_no_memory_is_an_error_of_its_message(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def none(nbytes: int) -> memoryview:
        raise MemoryError

    monkeypatch.setattr("pathways_lab.transport.framing._pages.take", none)
    frame = b"".join(encode("x", {}, [bytes(100_000)]))
    with pytest.raises(WireError, match="no memory for 100,000 bytes"):
        Decoder().feed(frame[: len(frame) // 2])
