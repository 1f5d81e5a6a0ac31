"""Recordings below each other on one scale."""

from __future__ import annotations

import base64
import re

import pytest

from pathways_lab.notebook.reports.timelines import compare_timelines
from pathways_lab.notebook.view.frozen import LIMIT
from pathways_lab.timeline.log import Timeline
from tests.notebook.synthetic import Cluster, shifted


def test_two_stretches_share_one_scale() -> None:
    now = [0.0]
    log = Timeline(clock=lambda: now[0])
    recordings = {}
    for name, micro in (("slow", 8), ("quick", 4)):
        with log.recording() as recording:
            cluster = Cluster()
            seconds = cluster.pipeline(micro=micro)
            log.extend(shifted(r, now[0]) for r in cluster.in_order())
            now[0] += seconds
        recordings[name] = recording
        now[0] += 1.0
    data, metadata = compare_timelines(recordings).bundle()
    facts = metadata["pathways_lab"]
    assert facts["slow"]["seconds"] == pytest.approx(1.074, abs=0.1)
    assert facts["quick"]["seconds"] < facts["slow"]["seconds"]
    assert 0.5 < facts["quick"]["busy"] < 1.0
    assert data["text/plain"].startswith("slow: ")
    assert sum(map(len, data.values())) <= LIMIT
    # Whatever is drawn is explained, of all stretches; the work of hosts is not drawn.
    svg = base64.b64decode(re.findall(r"base64,([^\"]+)", data["text/html"])[0]).decode()
    headings = re.findall(r'font-weight="[^>]*>([^<]+)<', svg)
    assert headings.index("train") < headings.index("waits for") < headings.index("slow")
    assert "host work" not in headings


def test_nothing_to_compare_is_refused() -> None:
    with pytest.raises(ValueError, match="nothing to compare"):
        compare_timelines({})
    for wrong in (3, {"a": 3}):
        with pytest.raises(ValueError, match="are not recordings by title"):
            compare_timelines(wrong)  # type: ignore[arg-type]
