"""The sentence of advice: of the largest cause of idle time, and of none that is small."""

from __future__ import annotations

import re
from itertools import pairwise

import numpy as np
import pytest

from pathways_lab.notebook.draw.svg import WIDTH, picture
from pathways_lab.notebook.panels import PANELS
from pathways_lab.notebook.scene.advice import _CAUSES, advice
from pathways_lab.notebook.scene.plot import wide
from pathways_lab.notebook.scene.scene import WAITS, Scene
from pathways_lab.timeline.records import Event, Record, Span
from pathways_lab.timeline.waits import known_order
from tests.notebook.synthetic import Cluster
from tests.notebook.test_steps import scene_at, starts

STEPS = [[False, "made", 1, 8, [], ""], [False, "head", 2, 8, [0], ""]]

LINE = "cell.py:7: y = all(x, and_more_than_fits_into_a_sentence)"


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
    said = advice(scene(made=5.0, dispatch=1.0, busy=4.0), 10.0)
    assert said.startswith(
        "made is waited for: island1 computes 40 % of the time, waits 50 % for earlier "
        "computation (mostly before head), 10 % for other things; more microbatches"
    )
    said = advice(scene(made=1.0, dispatch=6.0, busy=3.0), 10.0)
    assert said.startswith(
        "starting computations takes the lab long: island1 computes 30 % of the time, waits 60 % "
        "for dispatch (mostly before head), 10 % for other things; a first run needs more of it"
    )


@pytest.mark.parametrize("busy", [3.0, 5.0])
def test_the_island_that_computes_much_more_than_others_is_named(busy):
    said = advice(scene(made=6.0, dispatch=4.0 - busy / 2, busy=busy), 20.0)
    assert "for earlier computation" in said
    told = "the others wait for island0, which computes 2.0 times as long as they do, mostly made: "
    assert said.startswith(told) == ("stages of equal length wait less" in said) == (busy < 4.0)


def test_a_computation_that_might_fill_the_gap_is_named():
    """Each microbatch goes there and back before the next one is called."""
    called: list[list[object]] = []
    for n in range(0, 15, 5):
        for m, (node, where) in enumerate(
            (("fwd0", 0), ("", 1), ("all1", 1), ("", 0), ("bwd0", 0))
        ):
            line = f"cell.py:{m}: {node}(x)" if node == "fwd0" else ""
            called.append([not node, node, where, 8, [n + m - 1] * (m > 0), line])
    cluster = Cluster()
    cluster.records += [
        Event("plan", 0.0, args={"plan": "k", "steps": called}),
        Event("submitted", 0.0, run=1, program="p", args={"plan": "k"}),
    ]
    end = 0.0
    for n in range(0, 15, 5):
        end = cluster.gang(0, 1, n, "p", "fwd0", "", end, 0.1, 0.0)
        end = cluster.transfer(0, 1, 1, n + 1, "p", "", end, 0.01)
        end = cluster.gang(1, 1, n + 2, "p", "all1", LINE, end, 0.26, 0.0)
        end = cluster.transfer(1, 0, 1, n + 3, "p", "", end, 0.01)
        end = cluster.gang(0, 1, n + 4, "p", "bwd0", "", end, 0.1, 0.0)
    found = Scene(0.0, 20.0)
    found.add(sorted(cluster.records, key=known_order), end)
    assert advice(found, end) == (
        "all1 on island1 (line 7 of cell.py: y = all(x, and_more_than_fits_into…) is waited for: "
        "island0 computes 42 % of the time, waits 56 % for earlier computation"
        " (mostly before bwd0), "
        "2 % for other things; "
        "call fwd0 (line 0 of cell.py: fwd0(x)) before bwd0 in the program: it has its inputs"
        " earlier, and computes meanwhile"
    )


WAITED = "cell.py:9: y.block_until_ready()"
WORKED = "cell.py:3: batch = slow(next(batches))", "cell.py:4: log(batch)"


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("where", [False, True])
def test_a_client_that_waits_for_each_call_is_told_to_make_the_next_ones(ahead, where):
    """While they do not wait, its devices have nothing to do; devices that it never used are not
    named.  The line is that which waits, where it is known."""
    cluster = Cluster(islands=2)
    of = {"program": "p", "client": "kernel-1"}
    for n in range(5):
        submitted = 0.0 if ahead else 0.4 * n + 0.3
        waited = {"waited": WAITED} if n and where else {}
        cluster.records.append(Event("submitted", submitted, run=n + 1, args=waited, **of))
        if ahead:  # what was asked for meanwhile travelled with it
            cluster.records += [Event(kind, 0.4 * n + 0.3, run=10 * n + 11, **of)
                                for kind in ("submitted", "finished")]  # fmt: skip
        end = cluster.gang(0, n + 1, 0, "p", "f", LINE, 0.4 * n + 0.4, 0.2, submitted)
        cluster.records.append(Event("finished", end, run=n + 1, **of))
    found = Scene(0.0, 20.0)
    found.add(sorted(cluster.records, key=known_order), end)
    said = advice(found, end)
    line = (
        "waits (line 9 of cell.py: y.block_until_ready()) for each call of p"
        if where
        else "waits for each call of p (line 7 of cell.py: y = all(x, and_more_than_fits_into…)"
    )
    told = (
        f"kernel-1 {line} before it makes the next one: island0 "
        "computes 45 % of the time, waits 23 %, has nothing to do 32 %; make the next calls before "
        "you wait"
    )
    assert said.startswith(told) != ahead
    assert said.startswith("starting computations takes the lab long: ") == ahead


@pytest.mark.parametrize(("seconds", "back"), [(0.02, 0.0), (0.2, 0.0), (0.2, 0.15)])
def test_transfers_are_told_of_where_a_client_waits_for_each_call(seconds, back):
    """back: seconds of a transfer before the first computation, too."""
    cluster = Cluster(islands=2)
    of = {"program": "p", "client": "kernel-1"}
    end, first = 0.0, int(back > 0)
    for n in range(5):
        run = n + 1
        cluster.records.append(Event("submitted", end, run=run, args={"plan": "k"}, **of))
        begun = cluster.transfer(1, 0, run, 0, "p", "", end, back) if back else end
        sent = cluster.gang(0, run, first, "p", "made", LINE, begun, 0.1, end)
        came = cluster.transfer(0, 1, run, first + 1, "p", "", sent, seconds)
        end = cluster.gang(1, run, first + 2, "p", "head", LINE, came, 0.05, end)
        cluster.records.append(Event("finished", end, run=run, **of))
    steps = [[False, "made", 1, 8, [0][:first], ""], [True, "", 2, 8, [first], ""],
             [False, "head", 2, 8, [first + 1], ""]]  # fmt: skip
    steps = [[True, "", 1, 8, [], ""]][:first] + steps
    cluster.records.append(Event("plan", 0.0, args={"plan": "k", "steps": steps}))
    found = Scene(0.0, 20.0)
    found.add(sorted(cluster.records, key=known_order), end)
    said = advice(found, end)
    share = 100 * (seconds + back) / (0.15 + seconds + back)
    held = (
        f"transfers hold up head{' and made' * first}"
        " (line 7 of cell.py: y = all(x, and_more_than_fits_into…)"
        f" in each call of p, {share:.0f} % of the time while no device computes: "
    )
    assert said.startswith(held) == ("; send less, or place" in said) == (seconds > 0.1)
    assert said.startswith("kernel-1 waits for each call of p ") == (seconds < 0.1)
    assert ("; more microbatches in each fill it, too" in said) == (seconds < 0.1)
    assert (" % (mostly before head (line 7" in said) == (seconds < 0.1)


@pytest.mark.parametrize("pause", [0.3, 3.0])
def test_a_loop_that_comes_late_with_its_calls_is_told_to_have_inputs_made_meanwhile(pause):
    """A person who runs a cell now and then is no loop."""
    cluster, at = Cluster(islands=2), 0.0
    for n in range(12):
        program = ("fit", "score")[n % 2]
        of = {"program": program, "client": "kernel-1"}
        at += pause * (program == "fit")
        args = {"waited": WAITED, "worked": WORKED[n % 5 == 0]} if program == "fit" else {}
        cluster.records.append(Event("submitted", at, run=n + 1, args=args, **of))
        at = cluster.gang(n % 2, n + 1, 0, program, program, LINE, at + 0.01, 0.1, at)
        cluster.records.append(Event("finished", at, run=n + 1, **of))
    found = Scene(0.0, 20.0)
    found.add(sorted(cluster.records, key=known_order), at)
    late = advice(found, at).startswith(
        "kernel-1 takes long from its last result (line 9 of cell.py: y.block_until_ready()) to its"
        " next call of fit (line 7 of cell.py: y = all(x, and_more_than_fits_into…), mostly in its"
        " own code (line 3 of cell.py: batch = slow(next(batches))): "
    )
    assert late == ("lab.feed(make) does" in advice(found, at)) == (pause < 1.0)


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
        "island0/host1 is up to 300 ms late beside the others of its gang: f takes it up to 300 ms"
        " longer, and the rest of island0 waits 25 % of the time for it; a slice without this host"
        " helps at once, and lab.stacks('island0/host1') shows what slows it"
    )


@pytest.mark.parametrize("late", [0.4, 0.0])
def test_a_late_host_is_named_where_another_island_waits_for_its_computation(late):
    hosts = [f"island0/host{n}" for n in range(2)]
    of = {"run": 1, "program": "p"}
    records: list[Record] = [
        Event("host-joined", 0.0, *at, args={"devices": 1})
        for at in (("island0", hosts[0]), ("island0", hosts[1]), ("island1", "island1/host0"))
    ]
    records += [
        Event("plan", 0.0, args={"plan": "k", "steps": STEPS}),
        Event("submitted", 0.0, run=1, args={"plan": "k"}),
        Event("granted", 0.0, "island0", step=0, **of),
        Span("gang", 0.0, 1.0, "island0", hosts[0], (0,), step=0, node="made", **of),
        Span("gang", 0.0, 1.0 + late, "island0", hosts[1], (0,), step=0, node="made", **of),
        Span("gang", 1.0 + late, 1.6, "island1", "island1/host0", (0,), step=1, node="head", **of),
    ]
    found = Scene(0.0, 20.0)
    found.add(records, 1.6)
    said = advice(found, 1.6)
    assert said.startswith("island0/host1 is up to 400 ms late") == (late > 0)
    assert ("and island1 waits for its results, too;" in said) == (late > 0)
    assert ("for earlier computation" in said) == (late == 0)


@pytest.mark.parametrize("over", [True, False])
@pytest.mark.parametrize("late", [0.4, 0.1, 0.04])
def test_a_late_host_is_not_blamed_for_waits_that_are_much_longer(late, over):
    """Another island waits for four computations, the last of which ends late on a host.

    Where that is a part of the wait, it is named beside its other causes.
    """
    hosts = [f"island0/host{n}" for n in range(2)]
    of = {"run": 1, "program": "p"}
    records: list[Record] = [
        Event("host-joined", 0.0, *at, args={"devices": 1})
        for at in (("island0", hosts[0]), ("island0", hosts[1]), ("island1", "island1/host0"))
    ]
    steps = [
        *[[False, f"made{n}", 0, 8, [n - 1] * (n > 0), ""] for n in range(4)],
        [False, "head", 1, 8, [3], ""],
    ]  # fmt: skip
    records += [
        Event("plan", 0.0, args={"plan": "k", "steps": steps}),
        Event("submitted", 0.0, run=1, args={"plan": "k"}),
        Event("granted", 0.0, "island0", step=0, **of),
    ]
    for host in hosts:
        for n in range(4):
            end = 0.3 * (n + 1) + late * (n == 3 and host == hosts[1])
            records.append(
                Span("gang", 0.3 * n, end, "island0", host, (0,), step=n, node=f"made{n}", **of)
            )
    head = ("island1", "island1/host0", (0,))
    records.append(Event("slice-bound", 0.0, "island1", args={
        "slice": 1, "devices": [("island1/host0", 0)], "shape": [1], "axes": ["x"]}))  # fmt: skip
    if over:
        records.append(Span("gang", 1.2 + late, 1.7, *head, step=4, node="head", **of))
    else:  # another run was there before, and this one's last computation has not begun
        records.append(Span("gang", -0.2, 0.0, *head, 9, 0, "p", "head"))
        records.append(Event("granted", 0.0, "island1", step=4, node="head", **of,
                             args={"slice": 1}))  # fmt: skip
    found = Scene(0.0, 20.0)
    found.add(sorted(records, key=known_order), 1.7)
    said = advice(found, 1.7)
    assert ("and island1 waits for its results, too" in said) == (late > 0.2), (
        "more than a fifth of 1.6 s, or less of 1.3"
    )
    named = ", and island0/host1 ends up to 100 ms late: island1 computes "
    assert (named in said) == ("; a slice without island0/host1 helps at once, and " in said)
    assert (named in said) == (late == 0.1)


def test_of_islands_that_wait_alike_the_most_idle_one_of_what_is_shown_is_told_of():
    """Over two seconds that was the other one, by less than is told."""
    of = {"program": "p", "client": "kernel-1"}
    records: list[Record] = [
        Event("host-joined", 0.0, f"island{n}", f"island{n}/host0", args={"devices": 1})
        for n in range(2)
    ]
    for n in range(8):
        begun, busy = n / 2, (0.10, 0.15) if n < 6 else (0.16, 0.14)
        records.append(Event("submitted", begun, run=n + 1, **of))
        for island in range(2):
            start = begun + 0.2 * island
            place = f"island{island}", f"island{island}/host0", (0,), n + 1, island
            records.append(Span("gang", start, start + busy[island], *place, node="f", **of))
        records.append(Event("finished", begun + 0.49, run=n + 1, **of))
    found = Scene(0.0, 20.0, stepwise=True)
    found.add(sorted(records, key=known_order), 4.0)
    assert found.shown is not None
    assert ": island1 computes" in advice(found, 4.0)


@pytest.mark.parametrize("own", [False, True])
def test_a_host_that_began_late_is_not_what_others_wait_for(own):
    """Its inputs came later than those of the others."""
    hosts = [f"island0/host{n}" for n in range(2)]
    records: list[Record] = [
        Event("host-joined", 0.0, "island0", host, args={"devices": 1}) for host in hosts
    ]
    records += [
        Span("gang", 0.0, 0.4, "island0", hosts[0], (0,), 1, 0, "p", "f"),
        Span("gang", 0.3 * (not own), 0.7, "island0", hosts[1], (0,), 1, 0, "p", "f"),
    ]
    found = Scene(0.0, 20.0)
    found.add(records, 1.0)
    assert ("island0/host1 is up to 300 ms late" in advice(found, 1.0)) == own


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
    told = (
        "island0/host1 is up to 200 ms late beside the others of its gang: f takes it up to 200 ms"
    )
    assert advice(found, 1.0).startswith(told) == (by > 0.1)


def test_a_late_host_is_named_with_the_function_that_takes_it_longer():
    """The next function ends late there, too, since it began late."""
    hosts = [f"island0/host{n}" for n in range(3)]
    records: list[Record] = [
        Event("host-joined", 0.0, "island0", host, args={"devices": 1}) for host in hosts
    ]
    for n, host in enumerate(hosts):
        late = 0.2 * (n == 1)
        of = {"run": 1, "program": "p"}
        for step, (node, start, end) in enumerate(
            (("f", 0.0, 0.5), ("g", 0.5, 0.7 + late), ("h", 0.7 + late, 1.0 + 1.1 * late))
        ):
            place = ("island0", host, (0,))
            records.append(Span("gang", start, end, *place, step=step, node=node, **of))
    found = Scene(0.0, 20.0, final=True)
    found.add(sorted(records, key=known_order), 1.3)
    said = "island0/host1 is up to 220 ms late beside the others of its gang: g takes it up to 200"
    assert advice(found, 1.3).startswith(said)
    assert "220 ms late" in PANELS["queues"](found, 1.3).readouts.values(), "the same number"


def test_the_function_that_takes_a_late_host_longer_is_that_of_what_is_shown():
    """A longer one was before that."""
    hosts, records = [f"island0/host{n}" for n in range(3)], []
    for n, host in enumerate(hosts):
        records.append(Event("host-joined", 0.0, "island0", host, args={"devices": 1}))
        for run, f, g in ((1, 0.5, 0.2), (2, 0.2, 0.3), (3, 0.2, 0.3)):
            begun, more = run - 1.0, n == 1
            ends = begun + 0.2 + (f - 0.2) * more, begun + 0.4 + (f + g - 0.4) * more
            for step, (node, start, end) in enumerate((("f", begun, ends[0]), ("g", *ends))):
                place = ("island0", host, (0,), run, step, "p", node)
                records.append(Span("gang", start, end, *place))
    found = Scene(0.0, 20.0, final=True)
    found.add(sorted(records, key=known_order), 3.0)
    assert found.slowest("island0/host1", 3.0) == ("f", pytest.approx(0.3))
    found.window = 1.5
    assert found.slowest("island0/host1", 3.0) == ("g", pytest.approx(0.1))


@pytest.mark.parametrize("idle", [0.4, 0.0])
def test_small_differences_add_up_only_while_a_host_computes_without_a_rest(idle):
    """In each of twenty steps it takes 0.02 s longer; or it begins late, too, for its inputs."""
    records: list[Record] = []
    for n in range(2):
        host = f"island0/host{n}"
        records.append(Event("host-joined", 0.0, "island0", host, args={"devices": 1}))
        for run in range(20):
            begun = run * 1.0 + n * 0.3 if idle else run * (0.1 + 0.02 * n)
            place = ("island0", host, (0,), run + 1, 0, "p", "f")
            records.append(Span("gang", begun, begun + 0.1 + 0.02 * n, *place))
    end = 19.5 if idle else 2.5
    found = Scene(0.0, 20.0, final=True)
    found.add(sorted(records, key=known_order), end)
    assert ("island0/host1" in found.late(end)) == (not idle)


@pytest.mark.parametrize("more", [0.05, 0.0])
def test_a_host_is_late_by_all_that_its_computations_took_it_longer(more):
    """Eight computations follow each other on each host; or the first began late on one of them."""
    records: list[Record] = []
    for n in range(2):
        host, end = f"island0/host{n}", 0.4 * n * (not more)
        records.append(Event("host-joined", 0.0, "island0", host, args={"devices": 1}))
        for step in range(8):
            begun, end = end, end + 0.1 + n * more
            place = ("island0", host, (0,), 1, step, "p", "f")
            records.append(Span("gang", begun, end, *place))
    found = Scene(0.0, 20.0, final=True)
    found.add(sorted(records, key=known_order), 1.2)
    named = (
        "island0/host1 is up to 400 ms late beside the others of its gang: f takes it up to 50 ms"
    )
    assert advice(found, 1.2).startswith(named) == bool(more)
    assert found.late(1.2) == ({"island0/host1": pytest.approx(0.4)} if more else {})


@pytest.mark.parametrize("took", [0.5, 0.1])
def test_transfers_are_named_where_a_longer_wait_is_for_what_waits_for_them(took):
    """Places are withheld on one island until the other one has got its bytes and computed."""
    called = [[False, "f0", 0, 8, [], ""], [True, "", 1, 8, [0], ""], [False, "f1", 1, 8, [1], ""]]
    cluster = Cluster()
    cluster.records.append(Event("plan", 0.0, args={"plan": "k", "steps": called}))
    of, end = {"program": "p", "args": {"plan": "k"}}, 0.0
    for n in range(1, 6):
        cluster.records.append(Event("submitted", 0.0, run=n, **of))
        begun = cluster.gang(0, n, 0, "p", "f0", "", end, 0.3, end)
        begun = cluster.transfer(0, 1, n, 1, "p", "", begun, took)
        end = cluster.gang(1, n, 2, "p", "f1", LINE, begun, 0.2, end) + 0.01
    found = Scene(0.0, 20.0)
    found.add(sorted(cluster.records, key=known_order), end)
    said = advice(found, end)
    assert said.startswith("transfers to island1 hold it up: island1 computes ") == (took > 0.3)
    assert ("; send less, or place both" in said) == (took > 0.3)
    assert ("(mostly before f1 (line 7 of cell.py: y = all(x," in said) == (took > 0.3)


@pytest.mark.parametrize("settled", [2.0, 0.0])
def test_a_sentence_stands_where_the_largest_cause_of_two_runs_is_another_one_each_time(
    monkeypatch, settled
):
    """Two runs wait more for their inputs, and the next two for dispatch."""
    monkeypatch.setattr("pathways_lab.notebook.scene.advice.SETTLED", settled)
    called = [[False, "f0", 0, 8, [], ""], [True, "", 1, 8, [0], ""], [False, "f1", 1, 8, [1], ""]]
    cluster = Cluster()
    cluster.records.append(Event("plan", 0.0, args={"plan": "k", "steps": called}))
    of, end, moments = {"program": "p", "args": {"plan": "k"}}, 0.0, []
    for n in range(1, 41):
        cluster.records.append(Event("submitted", end, run=n, **of))
        begun = cluster.gang(0, n, 0, "p", "f0", "", end, 0.02, end)
        begun = cluster.transfer(0, 1, n, 1, "p", "", begun, 0.07 if n % 4 < 2 else 0.02)
        end = cluster.gang(1, n, 2, "p", "f1", "", begun + 0.02 + 0.04 * (n % 4 > 1), 0.02, end)
        moments += [end - 1e-6] * (n > 28)
    records = sorted(cluster.records, key=known_order)
    said = {advice(scene_at(records, now), now).partition(":")[0] for now in moments}
    assert (len(said) == 1) == (settled > 0.0), said


@pytest.mark.parametrize("queued", [1, 2])
@pytest.mark.parametrize("over", [True, False])
@pytest.mark.parametrize("same", [True, False])
def test_a_client_that_waits_while_its_devices_compute_for_another_one_is_named(same, over, queued):
    """Nothing is idle, so no cause of idle time says it.  It waits for one computation of the other
    one at a time, or for two."""
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
            ends = np.linspace(start, end, 1 + (queued if client == "ann" else 1)).tolist()
            records += [
                Span("gang", *both, "island0", *place, step=step, node="f", **of)
                for step, both in enumerate(pairwise(ends))
            ]
    last = records.pop() if not over else None
    if last is not None:
        records.append(Event("launched", 4.0, "island0", "island0/host0", run=8, program="bobs",
                             client="bob", step=0, args={"devices": [0]}))  # fmt: skip
    found = Scene(0.0, 20.0)
    found.add(sorted(records, key=known_order), 4.1)
    said = advice(found, 4.1)
    assert (
        said
        == (
            "devices compute f for ann while bob waits for its turn, 88 % of the time: "
            + (
                "in ann, pw.jit(window=0.0) or pw.program(window=0.0) queue no work ahead and let"
                " bob in after one f"
                if queued > 1
                else "nothing interrupts a computation, so shorter ones of ann let bob in sooner"
            )
            + "; a slice on other devices, for example on island0, spares it the wait"
        )
        or not same
    )
    assert said.startswith("devices compute f for ann while bob") == same


@pytest.mark.parametrize("same", [True, False])
def test_a_client_also_waits_for_what_its_devices_compute_now_for_another_one(same):
    of = {"program": "anns", "client": "ann"}
    place = ("island0", "island0/host0")
    now = place if same else ("island0", "island0/host1")
    records = [
        Event("host-joined", 0.0, *place, args={"devices": 1}),
        Event("host-joined", 0.0, "island0", "island0/host1", args={"devices": 1}),
        Event("submitted", 0.0, run=1, **of), Event("submitted", 0.0, run=2, **of),
        Event("submitted", 0.0, run=3, program="bobs", client="bob"),
        Span("gang", 0.0, 0.1, *place, (0,), 3, 0, "bobs", "g", "bob"),
        Event("finished", 0.1, run=3, program="bobs", client="bob"),
        Span("gang", 0.1, 0.2, *place, (0,), 1, 0, node="f", **of),
        Event("submitted", 0.1, run=4, program="bobs", client="bob"),
        Event("launched", 0.2, *now, run=2, step=0, node="f", args={"devices": [0]}, **of),
    ]  # fmt: skip
    found = Scene(0.0, 20.0)
    found.add(sorted(records, key=known_order), 1.0)
    told = "devices compute f for ann while bob waits for its turn, 90 % of the time: "
    assert advice(found, 1.0).startswith(told) == same


def test_a_client_that_waits_for_all_of_what_is_shown_is_named():
    """Its own computations are all before that."""
    records: list[Record] = [Event("host-joined", 0.0, "island0", "island0/host0",
                                   args={"devices": 1})]  # fmt: skip
    for client, run, start, end in (("bob", 1, 0.0, 0.1), ("ann", 2, 0.1, 9.0)):
        of = {"run": run, "program": f"{client}s", "client": client}
        records.append(Event("submitted", 0.0, **of))
        place = ("island0", "island0/host0", (0,))
        records.append(Span("gang", start, end, *place, step=0, node="f", **of))
        records.append(Event("finished", end, **of))
    records.append(Event("submitted", 0.1, run=3, program="bobs", client="bob"))
    found = Scene(0.0, 20.0)
    found.add(sorted(records, key=known_order), 9.0)
    found.window = 8.0
    assert advice(found, 9.0).startswith("devices compute f for ann while bob waits for its turn")


@pytest.mark.parametrize("dispatch", [0.1, 3.0])
def test_devices_that_compute_nearly_all_of_the_time_need_no_less_waiting(dispatch):
    said = advice(scene(made=0.0, dispatch=dispatch, busy=9.9), 9.9 + dispatch)
    told = "nothing waits for long: devices compute at least 99 % of the time; faster functions or"
    assert said.startswith(told) == (dispatch < 1.0)


def test_waiting_is_worth_advice_where_all_of_it_is_more_than_a_fifth_of_the_time():
    """Though no cause of it is."""
    said = advice(scene(made=1.5, dispatch=1.1, busy=7.4), 10.0)
    assert said.startswith("starting computations takes the lab long: island1 computes 74 % of")
    told = "nothing waits for long: devices compute at least 19 % of the time; more calls at once"
    assert advice(scene(made=1.9, dispatch=0.1, busy=8.0), 10.0).startswith(told)
    assert advice(scene(made=1.9, dispatch=0.1, busy=2.0, end=20.0), 20.0) == ""
    assert advice(Scene(), 10.0) == ""


def test_shares_are_of_the_time_that_is_drawn_also_after_the_last_computation():
    """As those of tiles and of utilisation are."""
    late = scene(made=8.0, dispatch=1.0, busy=3.0, end=15.0)
    told = "computes 20 % of the time, waits 53 % for earlier computation (mostly before head), 7 %"
    assert f"island1 {told} for other things, has nothing to do 20 %" in advice(late, 15.0)
    assert PANELS["utilisation"](late, 15.0).readouts[1.0] == "10 %", "of two of four devices"


@pytest.mark.parametrize("cause", WAITS)
def test_every_cause_has_a_remedy(cause):
    assert all(_CAUSES[cause])


def test_a_long_sentence_goes_on_in_the_next_line_of_a_saved_picture():
    said = advice(scene(made=1.0, dispatch=6.0, busy=3.0), 10.0)
    drawn = picture((), "p", advice=said)
    lines = [text for text in re.findall(r"<text[^>]*>([^<]*)</text>", drawn) if text != "p"]
    assert " ".join(lines) == said
    assert len(lines) > 1
    assert all(wide(line) <= WIDTH for line in lines)
