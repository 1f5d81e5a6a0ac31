"""Who waits for a value in vain is told what the lab knows, and waits no longer for that."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import pathways_lab as pw
from pathways_lab.client.code.source_lines import place_of_thread
from pathways_lab.client.session import lateness
from pathways_lab.client.session.own_work import LOOKS, OwnWork
from pathways_lab.client.session.requests import Questions
from pathways_lab.core.diagnosis.stall_story import Member, Stuck
from pathways_lab.core.program.program import Line
from pathways_lab.transport.codec import pack, unpack
from tests.client.kit import FakeLab
from tests.runtime.processes import until

STORY = Stuck(
    "late",
    (Member(1, 0, "ann", "train", "x to s2", Line("a.py", 3, "train(x)"), (), 4.0, ("i1/h",)),),
    (),
    ("i0/h",),
)


class Connection:
    """Time passes when somebody waits; a question is answered at once with *story*, or never."""

    closed = None

    def __init__(self, story: Stuck | None, answers: bool = True) -> None:
        self.waited: list[float | None] = []
        self.asked: list[str] = []
        self.board: Any = self
        self.questions = Questions(self)
        self._story, self._answers = story, answers

    def wait(self, done: Callable[[], bool], timeout: float | None, what: str) -> None:
        self.waited.append(timeout)
        if not done():
            raise TimeoutError(f"{what} took longer than {timeout} s; it goes on")

    def settle(self, entries: Any, failure: Any) -> None:
        for entry in entries:
            entry.done = True

    def new_id(self, kind: str) -> int:
        return 7

    def send(self, op: str, fields: Any = None, buffers: Any = ()) -> None:
        self.asked.append(op)
        if self._answers:
            story = None if self._story is None else pack(self._story)
            self.questions.answered({"id": fields["id"], "failure": None, "story": story}, [])


def told(connection: Connection, timeout: float) -> str:
    with pytest.raises(TimeoutError) as late:
        lateness.wait(connection, lambda: False, timeout, "x", timeout)  # type: ignore[arg-type]
    assert connection.questions.open == []
    return str(late.value)


def test_what_is_late_and_where_is_part_of_the_error() -> None:
    connection = Connection(STORY)
    text = told(connection, 5.0)
    assert text.startswith("x took longer than 5.0 s; it goes on; late, and nothing is wrong")
    assert "'x to s2' has not ended on i1/h" in text
    assert "i0/h does not answer" in text
    assert "a.py:3" in text
    assert sum(seconds or 0.0 for seconds in connection.waited) == 5.0


@pytest.mark.parametrize(("story", "answers"), [(None, True), (STORY, False)])
def test_nothing_to_tell_is_no_reason_to_wait_longer(story: Stuck | None, answers: bool) -> None:
    connection = Connection(story, answers)
    assert told(connection, 5.0) == "x took longer than 5.0 s; it goes on"
    assert sum(seconds or 0.0 for seconds in connection.waited) == 5.0


def test_who_polls_or_has_the_value_asks_nobody() -> None:
    connection = Connection(STORY)
    assert told(connection, 0.5) == "x took longer than 0.5 s; it goes on"
    for timeout in (5.0, 0.5, None):
        lateness.wait(connection, lambda: True, timeout, "x", timeout)  # type: ignore[arg-type]
    assert connection.asked == []


def test_a_run_says_which_line_waited_before_it(fake: FakeLab) -> None:
    """Once, and only of what was not there; a picture names it."""
    double = pw.jit(lambda x: x * 2, on=fake.slice(4))
    fake.held = True
    value = double(np.arange(8.0, dtype=np.float32))
    threading.Timer(0.05, fake.release).start()
    value.block_until_ready()  # this line
    value.block_until_ready()
    for _ in range(2):
        value = double(value)
    fake.release()
    value.result()
    told = [unpack(Line, fields["waited"]) for fields in fake.of("submit") if "waited" in fields]
    assert [(line.file, line.text) for line in told] == [
        (__file__, "value.block_until_ready()  # this line")
    ]


def test_the_line_at_which_a_client_was_seen_most_between_its_calls_is_told_once() -> None:
    own_work = OwnWork()
    with ThreadPoolExecutor(1) as elsewhere:
        for _ in range(LOOKS):
            elsewhere.submit(own_work.look).result()  # this line
        elsewhere.submit(own_work.look).result()
    told = unpack(Line, own_work.take()["worked"])
    assert (told.file, told.text[-11:]) == (__file__, "# this line")
    assert own_work.take() == {}


def test_a_client_that_waits_is_not_at_work(fake: FakeLab) -> None:
    double = pw.jit(lambda x: x * 2, on=fake.slice(4))
    fake.held = True
    value = double(np.arange(8.0, dtype=np.float32))
    own_work, me = fake.connection.own_work, threading.get_ident()

    def look() -> None:
        try:
            until(lambda: place_of_thread(me) is None, 10.0)
            own_work.look()
        finally:
            fake.release()

    with ThreadPoolExecutor(1) as elsewhere:
        looking = elsewhere.submit(look)
        value.block_until_ready()
        looking.result()
    assert own_work.take().keys() == {"waited"}
