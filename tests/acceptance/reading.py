"""What acceptance tests read from a lab's timeline."""

from __future__ import annotations

import time

import pathways_lab as pw
from pathways_lab.timeline.records import Event, Span


def gangs(lab: pw.Lab) -> list[Span]:
    """Every computation that ran on devices, once the records of all ended runs are here.

    Records travel in batches behind the values: a run counts as complete when
    its end and, per granted gang, its span have come.
    """
    until = time.monotonic() + 60
    while time.monotonic() < until:
        records = lab.timeline.records
        spans = [r for r in records if isinstance(r, Span) and r.kind == "gang"]
        runs = {r.run for r in records if isinstance(r, Event) and r.kind == "submitted"}
        ended = {r.run for r in records if isinstance(r, Event) and r.kind in ENDS}
        launched = sum(isinstance(r, Event) and r.kind == "launched" for r in records)
        if runs <= ended and len(runs) == lab.submitted and launched == len(spans):
            return spans
        time.sleep(0.02)
    raise AssertionError("the timeline did not become complete within a minute")


ENDS = ("finished", "failed", "cancelled")
