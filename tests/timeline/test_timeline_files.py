"""Timelines that outlive their lab: saved, loaded, and opened in other tools."""

from __future__ import annotations

import itertools
import json
import sys
from collections import Counter
from typing import Any

import numpy as np
import pytest

from pathways_lab.timeline.export import files, frame, perfetto
from pathways_lab.timeline.log import Timeline, load
from pathways_lab.timeline.records import Event, Sample, Span
from tests.notebook.synthetic import training


def example() -> Timeline:
    timeline = Timeline(clock=lambda: 99.0)
    timeline.extend(training(2, hosts=2, devices=2))
    for n in range(3):
        args = {"device": n, "most": 1 << 30}
        timeline.extend([Sample("memory", 0.1 * n, 1e6 * n, "island0", "island0/host0", args)])
    timeline.extend([Sample("dropped", 0.5, 7.0)])
    return timeline


def plain(record: Any) -> Any:
    """Tuples in args come back as lists, as in JSON."""
    return type(record), *(
        json.loads(json.dumps(dict(v))) if name == "args" else v
        for name, v in ((f, getattr(record, f)) for f in record.__dataclass_fields__)
    )


def test_what_is_loaded_is_what_was_saved(tmp_path):
    timeline = example()
    path = timeline.save(tmp_path / "run")
    assert path.suffix == ".npz"
    assert path.stat().st_size < 20_000
    again = load(path)
    assert list(map(plain, again.records)) == list(map(plain, timeline.records))
    assert again.clock() == 99.0
    assert again.dropped == timeline.dropped == 7
    assert again.programs == timeline.programs
    assert again.loaded == str(path)


def test_plans_are_saved_when_the_bound_has_pushed_them_out(tmp_path):
    timeline = Timeline(capacity=20)
    timeline.extend(training(1))
    assert not any(isinstance(r, Event) and r.kind == "plan" for r in timeline.records)
    again = load(timeline.save(tmp_path / "run.npz"))
    assert len(again.plans) == len(timeline.plans) == 1
    assert len(again.runs) == len(timeline.runs) == 1
    assert again.dropped == timeline.dropped > 0


def test_other_files_are_refused(tmp_path, monkeypatch):
    other = tmp_path / "x.npz"
    other.write_bytes(b"no zip at all")
    with pytest.raises(ValueError, match="is not a timeline"):
        load(other)
    np.savez(other, a=np.zeros(3))
    with pytest.raises(ValueError, match="is not a timeline"):
        load(other)
    with pytest.raises(ValueError, match="3 is not a timeline"):
        load(3)
    with pytest.raises(FileNotFoundError):
        load(tmp_path / "absent.npz")
    monkeypatch.setattr(files, "VERSION", 999)
    path = example().save(tmp_path / "new.npz")
    monkeypatch.undo()
    with pytest.raises(ValueError, match="version 999"):
        load(path)


# --- the public format of trace events --------------------------------------------

PHASES = {"X": {"dur"}, "i": {"s"}, "C": {"args"}, "M": {"args"}, "s": {"id"}, "f": {"id", "bp"}}


def check_format(trace: dict[str, Any]) -> None:
    """The rules that viewers rely on."""
    events = trace["traceEvents"]
    flows: dict[Any, list[dict[str, Any]]] = {}
    slices: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for event in events:
        assert event["ph"] in PHASES, event
        assert PHASES[event["ph"]] <= event.keys()
        assert isinstance(event["name"], str)
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        assert event["ts"] >= 0
        if event["ph"] == "X":
            assert event["dur"] >= 0
            at = slices.setdefault((event["pid"], event["tid"]), [])
            at.append((event["ts"], event["ts"] + event["dur"]))
        elif event["ph"] == "C":
            assert all(isinstance(v, int | float) for v in event["args"].values())
        elif event["ph"] in "sf":
            flows.setdefault((event["cat"], event["name"], event["id"]), []).append(event)
    for held in slices.values():
        held.sort()
        for (_, end), (start, _) in itertools.pairwise(held):
            assert start >= end - 1e-3  # slices of a thread do not overlap
    for ends in flows.values():
        assert sorted(e["ph"] for e in ends) == ["f", "s"]
        times = {e["ph"]: e["ts"] for e in ends}
        assert times["s"] <= times["f"]
        for end in ends:
            held = slices[end["pid"], end["tid"]]
            assert any(a - 1e-3 <= end["ts"] <= b + 1e-3 for a, b in held), end


def test_a_perfetto_file_follows_the_format_and_its_counts_are_the_timelines(tmp_path):
    timeline = example()
    trace = json.loads(timeline.to_perfetto(tmp_path / "run").read_text())
    check_format(trace)
    counted = Counter(e["cat"] for e in trace["traceEvents"] if e["ph"] in "XC")
    spans = [r for r in timeline.records if isinstance(r, Span)]
    assert counted["gang"] == sum(len(s.devices) for s in spans if s.kind == "gang")
    assert counted["transfer"] == sum(1 for s in spans if s.kind == "transfer")
    assert counted["run"] == 2
    assert counted["memory"] == 3
    held = sum(e["dur"] for e in trace["traceEvents"] if e.get("cat") == "gang")
    expected = sum(len(s.devices) * (s.end - s.start) for s in spans if s.kind == "gang")
    assert held / 1e6 == pytest.approx(expected, abs=1e-6 * len(spans))
    names = {e["args"]["name"] for e in trace["traceEvents"] if e["ph"] == "M"}
    assert {"island1/host1", "device 1", "transfers that arrive", "runs"} <= names
    assert trace["otherData"]["dropped"] == 7


def test_flows_follow_the_data_edges():
    found = perfetto.events(training(1, hosts=1, devices=1, islands=2))
    starts = [e for e in found if e["ph"] == "s"]
    # Per microbatch 3 edges forward and 3 back, less the one before the first; updates read all.
    assert len(starts) == 4 * 5 + 2 * 4


@pytest.mark.parametrize("broken", ["dur", "finish", "overlap"])
def test_the_check_finds_what_is_wrong(broken):
    events = perfetto.events(training(1))
    if broken == "dur":
        next(e for e in events if e["ph"] == "X")["dur"] = -1.0
    elif broken == "finish":
        events.remove(next(e for e in events if e["ph"] == "f"))
    else:
        next(e for e in events if e["ph"] == "X" and e["cat"] == "gang")["dur"] += 1e6
    with pytest.raises(AssertionError):
        check_format({"traceEvents": events})


def test_columns_have_a_row_per_record() -> None:
    timeline = example()
    found = frame.columns(timeline.records)
    assert {len(column) for column in found.values()} == {len(timeline)}
    assert found["type"].count("Sample") == 4
    assert [k for k in found["kind"] if k == "gang"]


def test_a_frame_has_a_row_per_record():
    pytest.importorskip("pandas")
    timeline = example()
    made = timeline.to_dataframe()
    assert len(made) == len(timeline)
    gangs = made[(made.type == "Span") & (made.kind == "gang")]
    assert len(gangs) == sum(1 for r in timeline.records if getattr(r, "kind", "") == "gang")


def test_without_pandas_a_frame_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install pandas, or use timeline\.records"):
        example().to_dataframe()


def test_a_loaded_timeline_answers_the_same_questions(tmp_path):
    timeline = example()
    again = load(timeline.save(tmp_path / "run"))
    run = timeline.records[6].run or (1 << 32) + 1
    assert again.utilisation(0.0, 1.0) == timeline.utilisation(0.0, 1.0)
    assert again.waits(0.0, 1.0) == timeline.waits(0.0, 1.0)
    gangs = [r for r in timeline.records if isinstance(r, Span) and r.kind == "gang"]
    all_of_it = min(g.start for g in gangs), max(g.end for g in gangs)
    assert again.utilisation() == timeline.utilisation(*all_of_it)
    assert again.waits() == timeline.waits(*all_of_it)
    assert Timeline(clock=lambda: 0.0).utilisation() == Timeline(clock=lambda: 0.0).waits() == {}
    assert again.messages() == timeline.messages()
    assert again.messages()
    assert len(again.story(run)) == len(timeline.story(run)) > 0
    assert again.planned(run).gap() == timeline.planned(run).gap()
