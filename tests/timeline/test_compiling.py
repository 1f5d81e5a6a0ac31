"""The functions that hosts make at a moment: named, counted, and over when they are made."""

from __future__ import annotations

from pathways_lab.timeline.compiling import Compiling, Making
from pathways_lab.timeline.records import Event, Record, Span


def begins(name: str, at: float, waiting: int = 0, host: str = "i/a", line: str = "") -> Event:
    args = {"function": f"key of {name}", "slice": 1, "waiting": waiting, "line": line}
    return Event("compiling", at, "i", host, node=name, args=args)


def made(name: str, start: float, end: float, host: str = "i/a") -> Span:
    args = {"function": f"key of {name}", "slice": 1}
    return Span("compile", start, end, "i", host, node=name, args=args)


def after(*records: Record) -> Making | None:
    seen = Compiling()
    for record in records:
        seen.add(record)
    return seen.now()


def test_a_function_is_named_from_its_beginning_to_its_end() -> None:
    first = begins("forward", 1.0, waiting=4)
    assert after() is None
    assert after(first) == Making("forward", 1, 5, 1.0)
    assert after(begins("f", 1.0, line="a.py:3: f(x)")) == Making("f", 1, 1, 1.0, "a.py:3: f(x)")
    second = begins("backward", 1.0, waiting=3)
    assert after(first, second) == Making("forward", 1, 5, 1.0), "two at a time"
    assert after(first, second, made("forward", 1.0, 3.0)) == Making("backward", 2, 5, 1.0)
    assert after(begins("f", 1.0), made("f", 1.0, 2.0)) is None
    again = after(begins("f", 1.0), made("f", 1.0, 2.0), begins("g", 8.0))
    assert again == Making("g", 1, 1, 8.0), "the next ones are counted anew"


def test_of_several_hosts_the_one_that_takes_longest_is_told() -> None:
    assert after(begins("g", 2.0, host="i/b"), begins("f", 1.0, 1)) == Making("f", 1, 2, 1.0)
    lost = Event("host-lost", 3.0, "i", "i/a")
    assert after(begins("g", 2.0, host="i/b"), begins("f", 1.0), lost) == Making("g", 1, 1, 2.0)
    assert after(made("f", 1.0, 2.0)) is None, "its beginning was before the record"
