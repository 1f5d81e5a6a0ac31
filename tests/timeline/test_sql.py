"""SQL over timelines: the tables say what records say, and a query reaches nothing else."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from pathways_lab.sim.machine import FunctionCost, Machine
from pathways_lab.sim.simulate import Load, simulate
from pathways_lab.timeline import waits
from pathways_lab.timeline.export.tables import TABLES, columns
from pathways_lab.timeline.log import Timeline
from pathways_lab.timeline.packed import single
from pathways_lab.timeline.records import Event, Sample, Span
from tests.timeline.streams import stream
from tests.timeline.truth import FREE, RATE, chain, one

PAGE = Path(__file__).parents[2] / "docs" / "sql.md"


def example() -> Timeline:
    """Two clients; ann's second gang waits a second for a transfer."""
    costs = replace(FREE, dcn=RATE, launch=0.125)
    functions = {name: FunctionCost(0.5, compile=0.0) for name in "fgh"}
    loads = [
        Load(chain(["f"], "g", 1.0), "ann", islands={0: "island0", 1: "island1"}),
        Load(one("h", 2), "bob", start=4.0, islands={1: "island1"}),
    ]
    return simulate(loads, Machine(2, 1, 2, functions=functions, costs=costs)).timeline


@pytest.fixture(scope="module")
def timeline() -> Timeline:
    pytest.importorskip("duckdb", reason="DuckDB, the extra 'sql', is not installed")
    return example()


def test_gangs_waits_and_transfers_say_what_was_simulated(timeline: Timeline) -> None:
    gangs = timeline.sql("select client, node, host, device, seconds from gangs order by all")
    assert [row[:4] for row in gangs] == [
        ("ann", "f", "island0/host0", 0), ("ann", "f", "island0/host0", 1),
        ("ann", "g", "island1/host0", 0), ("ann", "g", "island1/host0", 1),
        ("bob", "h", "island1/host0", 0), ("bob", "h", "island1/host0", 1),
    ]  # fmt: skip
    assert all(row[4] == pytest.approx(0.5) for row in gangs)
    (moved,) = timeline.sql("select source, target, bytes, round(seconds, 3) from transfers")
    assert moved == ("island0/host0", "island1/host0", 2 * RATE, 1.0)
    told = timeline.sql(
        "select client, cause, round(sum(seconds), 3) from waits"
        " where island = 'island1' group by all order by all"
    )
    assert list(told) == [
        ("ann", "dispatch", 0.25), ("ann", "earlier computation", 1.25),
        ("ann", "input transfer", 2.0), ("bob", "dispatch", 0.25),
        (None, "nothing to do", pytest.approx(3.5)),
    ]  # fmt: skip


@pytest.mark.parametrize("seed", range(5))
def test_waits_add_up_to_what_the_timeline_says(seed: int) -> None:
    log = Timeline()
    log.extend(stream(seed, runs=12))
    table = columns("waits", log.with_kept())
    start = min(r.time for r in log.records if isinstance(r, Event) and r.kind == "submitted")
    found = dict[tuple[str, str, int, str], float]()
    where = zip(table["island"], table["host"], table["device"], table["cause"], strict=True)
    for key, seconds in zip(where, table["seconds"], strict=True):
        found[key] = found.get(key, 0.0) + seconds
    expected = {
        (*lane, cause): pytest.approx(seconds)
        for lane, causes in log.waits(start=start).items()
        for cause, seconds in causes.items()
        if cause != waits.RUNNING
    }
    assert found == expected


def test_columns_and_single_records_give_the_same_tables() -> None:
    items = stream(3, runs=12, calm=True)
    packed, plain = Timeline(), Timeline()
    packed.extend(items)
    plain.extend(single(items))
    for name in TABLES:
        assert columns(name, packed.with_kept()) == columns(name, plain.with_kept())


def test_a_saved_timeline_answers_the_same(timeline: Timeline, tmp_path: Path) -> None:
    again = Timeline.load(timeline.save(tmp_path / "run"))
    for name in TABLES:
        text = f"select * from {name}"
        assert list(again.sql(text)) == list(timeline.sql(text)) or name == "events"


def test_every_column_can_be_asked_for_by_its_name(timeline: Timeline) -> None:
    log = Timeline()
    log.extend([
        Event("client-joined", 1.0, client="ann"),
        Event("host-joined", 1.0, "i", "i/h", args={"devices": 1, "kind": "cpu", "memory": 8}),
        Event("message", 2.0, run=1, program="p",
              args={"kind": "submit", "source": "ann", "target": "control plane", "bytes": 7}),
        Sample("memory", 2.0, 5.0, "i", "i/h", {"device": 0, "most": 6}),
        Span("compile", 1.0, 2.0, "i", "i/h", node="f"),
    ])  # fmt: skip
    for name, table in TABLES.items():
        made = log.sql(f"select {', '.join(table.columns)} from {name}")
        assert made.columns == tuple(table.columns)
        kinds = log.sql(f"describe {name}")
        assert [row[1] for row in kinds] == [column.type for column in table.columns.values()]
    assert list(log.sql("from memory")) == [(2.0, "i", "i/h", 0, 5, 6)]
    assert list(log.sql("from hosts")) == [("i", "i/h", 1, "cpu", 8, None)]
    assert list(log.sql("from clients")) == [("ann", 1.0, None)]
    assert list(log.sql("select * exclude (time) from messages")) == [
        ("submit", "ann", "control plane", 7, 1, "p")
    ]
    assert log.sql("from work")[0][:2] == ("compile", "i")
    assert log.sql("select kind from events where args ->> 'devices' = '1'")[0] == ("host-joined",)
    told = {(table, column) for table, column, *_ in log.sql()}
    assert told == {(name, column) for name, t in TABLES.items() for column in t.columns}


@pytest.mark.parametrize(
    "query",
    [
        "select * from read_text('{file}')",
        "select * from '{file}'",
        "select * from read_csv('{file}')",
        "select * from read_text('https://example.com/x')",
        "select * from secret",  # a variable of this module
        "copy (select 1) to '{file}.new'",
        "explain analyze copy (select 1) to '{file}.new'",
        "attach '{file}.new'",
        "install httpfs",
        "load httpfs",
        "set enable_external_access = true",
        "create table mine as select 1",
        "delete from gangs",
        "select 1; select 2",
        "select",
        "-- nothing",
        "select * from gangs where nobody = 1",
    ],
)
def test_a_query_reads_the_tables_and_nothing_else(
    timeline: Timeline, query: str, tmp_path: Path
) -> None:
    file = tmp_path / "secret.csv"
    file.write_text("a,b\n1,2\n")
    with pytest.raises(ValueError) as error:
        timeline.sql(query.format(file=file))
    assert "lab.sql() has their columns" in str(error.value) or "read only" in str(error.value)
    assert list(tmp_path.iterdir()) == [file]


secret = {"a": [1]}


def test_what_is_no_text_is_no_query() -> None:
    with pytest.raises(TypeError, match=r"a query is text, like .* and not 3"):
        Timeline().sql(3)  # type: ignore[arg-type]


def test_without_duckdb_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "duckdb", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'pathways-lab\[sql\]'"):
        example().sql("select 1")


def test_the_queries_of_the_page_have_answers(timeline: Timeline) -> None:
    text = PAGE.read_text()
    queries = re.findall(r"```sql\n(.*?)```", text, re.DOTALL)
    longest, slowest, edges = [timeline.sql(query) for query in queries]
    assert longest[0][:2] == ("ann", "input transfer")
    assert slowest.columns[-1] == "slowest"
    assert edges[0][:3] == ("island0/host0", "island1/host0", 2 * RATE)
    rows = dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", text, re.MULTILINE))
    assert rows == {name: table.about for name, table in TABLES.items()}


def test_an_answer_shows_itself_as_a_table(timeline: Timeline) -> None:
    answer = timeline.sql("select unnest(range(100)) as n, null as nothing, '<b>' as text")
    assert repr(answer).startswith("the first 40 of 100 rows\n")
    assert ">&lt;b&gt;</td>" in answer._repr_html_()
    assert len(answer[10:13]) == 3
    assert repr(answer[5:6]).splitlines()[1].split() == ["5", "<b>"]
    pytest.importorskip("pandas")
    assert answer.to_dataframe().n.sum() == 4950
