"""The sentence of advice: of the largest cause of idle time, and of none that is small."""

from __future__ import annotations

import re

import pytest

from pathways_lab.notebook.draw.svg import WIDTH, picture
from pathways_lab.notebook.scene.advice import _REMEDIES, advice
from pathways_lab.notebook.scene.plot import wide
from pathways_lab.notebook.scene.scene import WAITS, Scene
from pathways_lab.timeline.records import Event, Record, Span
from pathways_lab.timeline.waits import known_order
from tests.notebook.synthetic import Cluster
from tests.notebook.test_steps import scene_at, starts

STEPS = [[False, "made", 1, 8, [], ""], [False, "head", 2, 8, [0], ""]]


def scene(made: float, dispatch: float, busy: float, end: float | None = None) -> Scene:
    """One run: *made* seconds of ``made`` on island0, then *busy* seconds of ``head`` on island1,
    which two devices wait for."""
    start = made + dispatch
    records: list[Record] = [
        Event("host-joined", 0.0, "island0", "island0/host0", args={"devices": 1}),
        Event("host-joined", 0.0, "island1", "island1/host0", args={"devices": 4}),
        Event("plan", 0.0, args={"plan": "k", "steps": STEPS}),
        Event("submitted", 0.0, run=1, args={"plan": "k"}),
        Event("granted", 0.0, run=1, step=0),
        Span("gang", 0.0, made, "island0", "island0/host0", (0,), 1, 0, "p", "made"),
        Span("gang", start, start + busy, "island1", "island1/host0", (0, 1), 1, 1, "p", "head"),
    ]
    found = Scene(0.0, 20.0, final=True)
    found.add(records, start + busy if end is None else end)
    return found


def test_the_largest_cause_is_told_with_its_share_and_a_remedy():
    said = advice(scene(made=6.0, dispatch=1.0, busy=3.0), 10.0)
    assert said.startswith(
        "island1 waits 60 % of the time for an earlier computation, mostly before head: "
    )
    assert "microbatches" in said
    said = advice(scene(made=1.0, dispatch=6.0, busy=3.0), 10.0)
    assert said.startswith(
        "island1 waits 60 % of the time for the lab to start its next computation"
    )


@pytest.mark.parametrize("busy", [3.0, 5.0])
def test_the_island_that_computes_much_more_than_others_is_named(busy):
    said = advice(scene(made=6.0, dispatch=4.0 - busy / 2, busy=busy), 20.0)
    assert "for an earlier computation" in said
    told = "; even stages wait less: island0 computes 2.0 times as long as others"
    assert said.endswith(told) == (busy < 4.0)


def test_time_that_is_to_come_is_not_counted():
    """A window that stands has room for the rest of a step."""
    cluster, at = Cluster(), 0.0
    for _ in range(6):
        at = cluster.pipeline(micro=1, at=at)
    records = cluster.in_order()
    now = starts(records)[-1] + 0.06
    found = scene_at(records, now)
    assert found.busy
    assert found.range(now)[1] > now + 0.1
    said = advice(found, now)
    assert "waits" in said
    found.shown = found.shown._replace(end=now)
    assert advice(found, now) == said


def test_a_host_that_is_late_is_named_in_place_of_a_remedy_for_pipelines():
    """Places are withheld until it has ended, too."""
    hosts = [f"island0/host{n}" for n in range(3)]
    records: list[Record] = [
        Event("host-joined", 0.0, "island0", host, args={"devices": 1}) for host in hosts
    ]
    for n in range(6):
        of = {"run": n + 1, "program": "p"}
        records.append(Event("submitted", 0.0, **of))
        records.append(Event("granted", n + 0.0, "island0", node="f", step=0, **of))
        records += [
            Span("gang", n, n + took, "island0", host, (0,), step=0, node="f", **of)
            for host, took in zip(hosts, (0.65, 0.95, 0.65), strict=True)
        ]
    found = Scene(0.0, 20.0)
    found.add(records, 6.0)
    assert advice(found, 6.0) == (
        "the rest of island0 waits 25 % of the time for an earlier computation, mostly before f: "
        "island0/host1 ends up to 300 ms after the others of its gang; "
        "lab.stacks('island0/host1') shows its work"
    )


@pytest.mark.parametrize("by", [0.2, 0.01])
def test_a_host_that_is_late_is_named_where_no_device_waits_for_what_is_submitted(by):
    """Its client asks for the next computation when it has ended."""
    hosts = [f"island0/host{n}" for n in range(3)]
    records: list[Record] = [
        Event("host-joined", 0.0, "island0", host, args={"devices": 1}) for host in hosts
    ]
    records += [
        Span("gang", 0.0, 0.5 + by * (host == hosts[1]), "island0", host, (0,), 1, 0, "p", "f")
        for host in hosts
    ]
    found = Scene(0.0, 20.0)
    found.add(records, 1.0)
    told = "island0/host1 ends up to 200 ms after the others of its gang; lab.stacks("
    assert advice(found, 1.0).startswith(told) == (by > 0.1)


@pytest.mark.parametrize("took", [0.95, 0.5])
def test_a_network_that_is_full_is_named_in_place_of_a_remedy_for_pipelines(took):
    """Places are withheld on one island while bytes are on their way to the other."""
    records: list[Record] = [
        Event("host-joined", 0.0, name, f"{name}/host0", args={"devices": 1})
        for name in ("island0", "island1")
    ]
    for n in range(8):
        of = {"run": n + 1, "program": "p"}
        records.append(Event("submitted", 0.0, **of))
        records += [Event("granted", n - 0.05, f"island{i}", step=i, args={"slice": i}, **of)
                    for i in range(2)]  # fmt: skip
        for i, start, end in ((0, n, n + 0.3), (1, n + 0.95, n + 1.9)):
            records.append(
                Span("gang", start, end, f"island{i}", f"island{i}/host0", (0,), step=i,
                     node=f"f{i}", args={"slice": i}, **of)
            )  # fmt: skip
        records.append(
            Span("transfer", n + 0.0, n + took, "island1", "island1/host0", (0,), step=9, **of)
        )
    found = Scene(0.0, 20.0)
    found.add(sorted(records, key=known_order), 8.0)
    said = advice(found, 8.0)
    assert "for an earlier computation" in said
    assert ("bytes are on their way to island1 for 92 % of it; send less" in said) == (took > 0.8)


@pytest.mark.parametrize("over", [True, False])
@pytest.mark.parametrize("same", [True, False])
def test_a_client_that_waits_while_its_devices_compute_for_another_one_is_named(same, over):
    """Nothing is idle, so no cause of idle time says it."""
    records: list[Record] = [
        Event("host-joined", 0.0, "island0", f"island0/host{n}", args={"devices": 1})
        for n in range(2)
    ]
    for n in range(4):
        for client, run, host, start, end in (
            ("ann", 2 * n, 0, n + 0.1, n + 1.0),
            ("bob", 2 * n + 1, 0 if same else 1, n + 1.0, n + 1.1),
        ):
            of = {"run": run + 1, "program": f"{client}s", "client": client}
            records.append(Event("submitted", n + 0.1, **of))
            place = (f"island0/host{host}", (0,))
            records.append(Span("gang", start, end, "island0", *place, step=0, node="f", **of))
    last = records.pop() if not over else None
    if last is not None:
        records.append(Event("launched", 4.0, "island0", "island0/host0", run=8, program="bobs",
                             client="bob", step=0, args={"devices": [0]}))  # fmt: skip
    found = Scene(0.0, 20.0)
    found.add(sorted(records, key=known_order), 4.1)
    said = advice(found, 4.1)
    told = "bob waits 88 % of the time for its turn while devices compute for ann: lab.policy can"
    assert said.startswith(told) == same
    assert ("window=0.0 of ann's programs" in said) == same


def test_less_than_a_fifth_of_the_time_needs_no_advice():
    assert advice(scene(made=1.9, dispatch=0.1, busy=8.0), 10.0) == ""
    assert advice(Scene(), 10.0) == ""


def test_time_for_which_nobody_asked_counts_neither_way():
    """A picture that goes on after the last computation says the same as at its end."""
    late = scene(made=6.0, dispatch=1.0, busy=3.0, end=15.0)
    assert advice(late, 15.0) == advice(scene(made=6.0, dispatch=1.0, busy=3.0), 10.0)


@pytest.mark.parametrize("cause", WAITS)
def test_every_cause_has_a_remedy(cause):
    assert all(_REMEDIES[cause])


def test_a_long_sentence_goes_on_in_the_next_line_of_a_saved_picture():
    said = advice(scene(made=1.0, dispatch=6.0, busy=3.0), 10.0)
    drawn = picture((), "p", advice=said)
    lines = [text for text in re.findall(r"<text[^>]*>([^<]*)</text>", drawn) if text != "p"]
    assert " ".join(lines) == said
    assert len(lines) > 1
    assert all(wide(line) <= WIDTH for line in lines)
