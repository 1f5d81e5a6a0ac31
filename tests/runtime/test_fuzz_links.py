"""A short form of ``python -m tests.runtime.fuzz_links``, and that it sees what it looks for."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pathways_lab.transport import framing, link, shared_memory
from tests.runtime.fuzz_links import Fuzz, heads

pytestmark = pytest.mark.skipif(not shared_memory.SUPPORTED, reason="no sealed shared memory here")


@pytest.fixture
def fuzz() -> Iterator[Fuzz]:
    made = Fuzz(0)
    yield made
    made.close()


def many(fuzz: Fuzz) -> None:
    for _ in range(5000):
        fuzz.once()


def test_every_frame_is_read_or_ends_its_link(fuzz: Fuzz) -> None:
    many(fuzz)
    assert fuzz.read > 200


def test_all_that_links_say_to_each_other_is_tried() -> None:
    between = {
        value for value in vars(link).values() if isinstance(value, str) and value[:1] == "\0"
    }
    assert between
    assert between == {op for op, *_ in heads() if op[:1] == "\0"}


def test_an_arena_beyond_the_limit_is_found(fuzz: Fuzz, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its memory is its reader's: 4 GiB that nobody has written are 4 GiB once they are read."""
    monkeypatch.setattr(shared_memory, "SPAN", 1 << 40)
    with pytest.raises(AssertionError, match="more than the limit"):
        many(fuzz)


def test_a_length_that_is_not_checked_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(framing.Decoder, "_check_lengths", lambda *_: None)

    def several() -> None:
        for seed in range(30):  # a huge length may be first, which swallows all that follows
            fuzz = Fuzz(seed)
            for _ in range(200):
                fuzz.once()
            fuzz.close()

    with pytest.raises((TypeError, ValueError, OverflowError, AssertionError)):
        several()
