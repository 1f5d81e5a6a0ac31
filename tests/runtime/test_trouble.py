"""Messages that come late, twice or never: what links make of it."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pathways_lab.runtime.fault_injection import Rule, Troubles
from pathways_lab.transport.link import Link
from pathways_lab.transport.reactor import Reactor

KEY = b"k" * 32


class Ends:
    """Two reactors and one link between them; what comes to the second is noted."""

    def __init__(self, folder: Path) -> None:
        self.heard: queue.Queue[tuple[str, int]] = queue.Queue()
        self.closed: queue.Queue[str] = queue.Queue()
        self.answered: queue.Queue[str] = queue.Queue()
        self.here = Reactor("here", lambda *m: self.answered.put(m[1]), lambda link, reason: None)
        self.there = Reactor("there", self._heard, lambda link, reason: self.closed.put(reason))
        self.accepted: list[Link] = []
        address = self.there.listen(f"unix:{folder}/door", KEY, self._meet)
        self.here.start()
        self.there.start()
        self.link = self.here.connect(address, KEY, {"name": "a"}, name="b", bulk=False)
        self.troubles = Troubles(self.there)

    def _meet(self, link: Link, hello: dict[str, Any]) -> dict[str, Any]:
        self.accepted.append(link)
        return {"name": "b"}

    def _heard(self, link: Link, op: str, fields: dict[str, Any], buffers: Any) -> None:
        self.heard.put((op, fields["n"]))

    def begin(self, **rule: Any) -> None:
        done = threading.Event()
        self.there.call_soon(self.troubles.begin, {"peers": ["a"], "lasts": 60.0, **rule})
        self.there.call_soon(done.set)
        assert done.wait(30.0)

    def say(self, *numbers: int) -> None:
        for n in numbers:
            self.link.send("number", {"n": n})

    def numbers(self, count: int) -> list[int]:
        return [self.heard.get(timeout=30.0)[1] for _ in range(count)]


@pytest.fixture
def ends(tmp_path: Path) -> Iterator[Ends]:
    made = Ends(tmp_path)
    yield made
    made.here.close()
    made.there.close()


def test_late_messages_keep_their_order(ends: Ends) -> None:
    ends.begin(kind="delay", seconds=0.2)
    before = time.monotonic()
    ends.say(1, 2, 3)
    assert ends.numbers(3) == [1, 2, 3]
    assert time.monotonic() - before >= 0.2
    assert ends.closed.empty()


def test_a_narrow_link_lets_so_many_bytes_through_in_a_second(ends: Ends) -> None:
    """And a rule of the same name takes its place."""
    ends.begin(kind="delay", rate=1e6, name="dcn")
    before = time.monotonic()
    for n in range(4):
        ends.link.send("number", {"n": n}, [bytes(50_000)])
    assert ends.numbers(4) == [0, 1, 2, 3]
    assert time.monotonic() - before >= 0.19
    ends.begin(kind="delay", name="dcn")
    assert len(ends.troubles._rules) == 1
    before = time.monotonic()
    ends.link.send("number", {"n": 4}, [bytes(20_000_000)])
    assert ends.numbers(1) == [4]
    assert time.monotonic() - before < 10.0, "the rule before would have taken twenty seconds"


def test_held_messages_come_when_it_is_over_or_healed(ends: Ends) -> None:
    ends.begin(kind="hold", lasts=0.3)
    ends.say(1, 2)
    assert ends.heard.empty()
    assert ends.numbers(2) == [1, 2]
    ends.begin(kind="hold", lasts=60.0)
    ends.say(3)
    ends.there.call_soon(ends.troubles.begin, {"heal": True})
    ends.say(4)
    assert ends.numbers(2) == [3, 4]
    assert ends.there.trouble is None or ends.closed.empty()


@pytest.mark.parametrize("kind", ["drop", "duplicate"])
def test_a_link_that_loses_or_repeats_messages_ends(ends: Ends, kind: str) -> None:
    """Also when nothing is said any more."""
    ends.say(1)
    assert ends.numbers(1) == [1]
    ends.begin(kind=kind, count=1)
    ends.say(2)
    reason = ends.closed.get(timeout=60.0)
    assert "messages of a were lost or repeated on the way" in reason
    assert ends.heard.qsize() == (0 if kind == "drop" else 2)


def test_only_messages_of_one_kind(ends: Ends) -> None:
    ends.begin(kind="drop", count=1, op="other")
    ends.say(1, 2)
    assert ends.numbers(2) == [1, 2]


def test_links_count_in_both_directions_and_do_not_end_without_trouble(ends: Ends) -> None:
    for n in range(200):
        ends.say(n)
    assert ends.numbers(200) == list(range(200))
    for _ in range(50):
        ends.accepted[0].send("answer", {})
    for _ in range(50):
        ends.answered.get(timeout=30.0)
    time.sleep(1.2)
    ends.say(7)
    assert ends.numbers(1) == [7]
    assert ends.link.closed is None


@pytest.mark.parametrize("plain", [{"kind": "burn", "peers": ["a"], "lasts": 1.0},
                                   {"kind": "drop", "peers": ["a"], "lasts": 0.0}])  # fmt: skip
def test_what_is_no_trouble(plain: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="no trouble"):
        Rule.from_plain(plain)
