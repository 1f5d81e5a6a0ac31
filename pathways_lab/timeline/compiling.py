"""The functions that hosts make at this moment.

Problem: compiling takes seconds in which no device computes, and a picture that says nothing then
looks like one of a lab that is stuck.

Rule for maintainers: fed with records only.  A host says what it begins to make, and how many it
was asked for that it has not looked at; a span says what it has made.

Paper: section 4.2 (registering computations).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from pathways_lab.timeline.records import Event, Record, Sample

LOST = "host-lost"

KINDS = ("compiling", "compile", LOST)
"""Kinds of records that are folded."""


class Making(NamedTuple):
    """A function that is made.

    number: it is which of *total* functions that its host makes one after the other.
    since: seconds on the records' clock.  line: the user's, where it is defined.
    """

    name: str
    number: int
    total: int
    since: float
    line: str = ""


@dataclass(slots=True)
class _Host:
    begun: dict[tuple[str, int], tuple[str, float, str]] = field(default_factory=dict)
    done: int = 0
    waiting: int = 0


class Compiling:
    """Folds records into the functions that are made at a moment."""

    def __init__(self) -> None:
        self._hosts: dict[str, _Host] = {}

    def add(self, record: Record) -> None:
        """Fold one record."""
        if isinstance(record, Sample) or record.kind not in KINDS:
            return
        if record.kind == LOST:
            self._hosts.pop(record.host, None)
            return
        host = self._hosts.setdefault(record.host, _Host())
        key = str(record.args.get("function", "")), int(record.args.get("slice", -1))
        if isinstance(record, Event):
            host.begun[key] = record.node, record.time, str(record.args.get("line", ""))
            host.waiting = int(record.args.get("waiting", 0))
        elif host.begun.pop(key, None):
            host.done += 1
            if not host.begun and not host.waiting:
                host.done = 0

    def now(self) -> Making | None:
        """The function that is being made for the longest time."""
        found: Making | None = None
        for host in self._hosts.values():
            for name, since, line in host.begun.values():
                if found is None or since < found.since:
                    total = host.done + len(host.begun) + host.waiting
                    found = Making(name, host.done + 1, total, since, line)
        return found
