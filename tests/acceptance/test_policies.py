"""Whose gangs go first, on a real lab: set from a cell, shared, replaced, and removed when bad."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import psutil
import pytest

import pathways_lab as pw
from tests.runtime.processes import children, runs, until

pytestmark = pytest.mark.cluster

X = np.zeros((4,), np.float32)


@pytest.fixture(scope="module")
def lab() -> Iterator[pw.Lab]:
    with pw.start(islands=2, hosts_per_island=1, devices_per_host=4, name="ann") as started:
        yield started
        started.policy = LastFirst()
        (process,) = processes(started)
    until(lambda: not runs(process.pid))


@pytest.fixture(scope="module")
def bob(lab: pw.Lab) -> Iterator[pw.Lab]:
    assert lab.embedded is not None
    with pw.Lab(lab.embedded.control, name="bob") as client:
        yield client


@pytest.fixture(autouse=True)
def as_at_first(lab: pw.Lab) -> Iterator[None]:
    yield
    lab.policy = pw.ProportionalShare()


def holding(lab: pw.Lab, ms: float, island: str = "island0") -> Any:
    """A program that holds an island's devices for so long; each call is a run of its own."""
    on = lab.slice((4,), ("x",), island=island)
    call = pw.jit(lambda x: pw.emulated(ms)(x), on=on)
    held = pw.program(lambda x: call(x), name="hold")
    held(X).result(timeout=60)
    return held


def busy(lab: pw.Lab) -> Any:
    """The devices of island0 are, while what is called next comes."""
    return holding(lab, 700)(X)


def crowded(lab: pw.Lab, call: Callable[[], list[Any]]) -> list[Any]:
    """What *call* has made, all of it while the devices were busy: the machine may be slow."""
    while True:
        first = busy(lab)
        wanted = call()
        lab.session.connection.flush()
        came = not first.is_ready()
        for handle in (first, *wanted):
            handle.result(timeout=60)
        if came:
            return wanted


def records(lab: pw.Lab, kind: str) -> list[Any]:
    return [r for r in lab.timeline.records if getattr(r, "kind", "") == kind]


def processes(lab: pw.Lab) -> list[psutil.Process]:
    """Of users' own policies."""
    assert lab.embedded is not None
    return children(
        lab.embedded.pids["control"][0], "pathways_lab.runtime.control_plane.policy_worker"
    )


class LastFirst:
    """Remembers how often it was asked."""

    def __init__(self) -> None:
        self.turns = 0

    def choose(self, view: pw.PolicyView) -> int:
        self.turns += 1
        if self.turns == 1:
            print("the first turn")
        return view.candidates[-1].run


class GoodAtFirst:
    """Turns bad after some turns, in one of several ways."""

    def __init__(self, how: str) -> None:
        self.how = how
        self.turns = 0

    def choose(self, view: pw.PolicyView) -> int:
        self.turns += 1
        if self.turns > 8:
            if self.how == "loops":
                while True:
                    pass
            if self.how == "keeps the interpreter":
                sum(range(10**12))
            if self.how == "raises":
                raise ZeroDivisionError(f"at turn {self.turns}")
            if self.how == "exits":
                import os

                os._exit(3)
            return -5
        return view.candidates[0].run


class Planner(pw.FIFO):
    """Deadlines first; slices on the last island that will do."""

    def choose(self, view: pw.PolicyView) -> int:
        return min(view.candidates, key=lambda c: (c.data.get("deadline", 1e9), c.order)).run

    def place(self, view: pw.PlaceView) -> str:
        return max(candidate.island for candidate in view.candidates)


def test_the_policy_in_force_is_one_for_all(lab: pw.Lab, bob: pw.Lab) -> None:
    assert lab.policy == bob.policy == pw.ProportionalShare()
    until(lambda: set(lab.clients) == {"ann", "bob"})
    lab.policy = pw.ProportionalShare({"ann": 1, "bob": 2})
    until(lambda: bob.policy == pw.ProportionalShare({"ann": 1, "bob": 2}))
    bob.policy = mine = LastFirst()
    assert bob.policy is mine
    until(lambda: repr(lab.policy) == "<policy LastFirst, set by bob>")
    with pytest.raises(pw.PathwaysError, match="code of another client"):
        lab.policy = lab.policy
    assert bob.policy is mine
    told = records(lab, "policy")
    until(lambda: records(lab, "policy")[-1].args["policy"] == "LastFirst")
    assert told[-1].args["owner"] in ("ann", "bob")


def order_of(lab: pw.Lab, handles: list[Any]) -> list[str]:
    """Whose gangs were granted, in order."""
    numbers = {handle.buffer.run for handle in handles}
    until(lambda: len([r for r in records(lab, "granted") if r.run in numbers]) == len(numbers))
    return [r.client for r in records(lab, "granted") if r.run in numbers]


def crowd(lab: pw.Lab, bob: pw.Lab, ms: float = 30) -> list[str]:
    """Ann wants half a second of busy devices, and then bob comes.  ms: of each of his gangs."""
    mine, his = holding(lab, 30), holding(bob, ms)

    def both() -> list[Any]:
        wanted = [mine(X) for _ in range(18)]
        lab.session.connection.flush()
        wanted += [his(X) for _ in range(8)]
        bob.session.connection.flush()
        return wanted

    return order_of(lab, crowded(lab, both))


def test_an_own_policy_chooses_and_remembers(lab: pw.Lab, bob: pw.Lab, capsys: Any) -> None:
    assert "bob" in crowd(lab, bob)[:5], "a lab begins with equal shares"
    lab.policy = pw.FIFO()
    assert crowd(lab, bob) == ["ann"] * 18 + ["bob"] * 8
    lab.session.flush_outputs()
    capsys.readouterr()
    lab.policy = LastFirst()
    (process,) = processes(lab)
    order = crowd(lab, bob)
    assert order[-4:] == ["ann"] * 4, "who came last was served first"
    lab.session.flush_outputs()
    assert capsys.readouterr().out == "[policy] the first turn\n", "not while it was tried"
    lab.policy = pw.FIFO()
    until(lambda: not runs(process.pid))


def test_the_shortest_goes_first_as_hosts_have_measured_it(lab: pw.Lab, bob: pw.Lab) -> None:
    """All that is known of the two functions is how long they took before."""
    lab.policy = pw.ShortestFirst()
    assert crowd(lab, bob, 3)[-4:] == ["ann"] * 4
    assert crowd(lab, bob, 45)[-4:] == ["bob"] * 4


@pytest.mark.parametrize(
    ("policy", "words"),
    [
        (type("Loops", (), {"choose": lambda self, view: [None for _ in iter(int, 1)]})(), "0.4 s"),
        (type("Raises", (), {"choose": lambda self, view: 1 / 0})(), "ZeroDivisionError"),
        (type("Nobody", (), {"choose": lambda self, view: None})(), "chose None, which is none"),
        (type("Nothing", (), {})(), "no method choose"),
        (pw.FIFO, "is a class"),
    ],
)
def test_what_is_no_policy_is_refused_and_the_one_before_stays(
    lab: pw.Lab, bob: pw.Lab, policy: Any, words: str
) -> None:
    before = pw.ProportionalShare({"bob": 3})
    bob.policy = before
    with pytest.raises(pw.PathwaysError, match=words):
        lab.policy = policy
    until(lambda: lab.policy == bob.policy == before)
    until(lambda: not processes(lab))


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("loops", "took longer than 0.4 s to choose"),
        ("keeps the interpreter", "took longer than 0.4 s to choose"),
        ("raises", "raised ZeroDivisionError: at turn 9"),
        ("exits", "its process ended"),
        ("names nobody", "chose -5, which is none of the eligible runs"),
    ],
)
def test_a_policy_that_turns_bad_is_removed_and_holds_nobody_up(
    lab: pw.Lab, bob: pw.Lab, capsys: Any, how: str, words: str
) -> None:
    first, second, elsewhere = holding(lab, 4), holding(bob, 4), holding(bob, 4, "island1")
    lab.session.flush_outputs()
    capsys.readouterr()
    lab.policy = GoodAtFirst(how)
    (process,) = processes(lab)

    def gone() -> bool:
        """Whether it is, after some more to choose from: a slow machine asks it seldom."""
        waiting = [busy(lab)] + [f(X) for _ in range(100) for f in (first, second)]
        beside = [elsewhere(X) for _ in range(100)]
        for handle in (*waiting, *beside):
            handle.result(timeout=60)
        return bool(lab.policy == bob.policy == pw.ProportionalShare())

    until(gone)
    until(lambda: not runs(process.pid))
    until(lambda: records(lab, "policy")[-1].args["message"])
    removed = records(lab, "policy")[-1]
    assert words in removed.args["message"]
    assert removed.client == "ann"
    lab.session.flush_outputs()
    said = capsys.readouterr().out
    assert words in said
    assert "the policy was removed; clients share equally again" in said
    if how == "raises":
        assert 'raise ZeroDivisionError(f"at turn {self.turns}")' in said
    if "0.4 s" in words:
        # What was granted between the first late answer and the removal.
        late = records(lab, "policy-late")[-1]
        meanwhile = [r for r in records(lab, "granted") if late.time < r.time < removed.time]
        islands = [r.island for r in meanwhile]
        assert islands.count("island0") >= 5
        assert removed.time - late.time < 10.0, "the policy would have gone on for ever"


def test_an_own_policy_is_told_deadlines_and_chooses_islands(lab: pw.Lab) -> None:
    lab.policy = Planner()
    assert lab.slice((2,), ("x",)).binding.island == "island1"
    held = holding(lab, 30)

    def urgent() -> list[Any]:
        wanted = []
        for n in range(12):
            with pw.tagged(priority=n, data={"deadline": float(-n)}):
                wanted.append(held(X))
        return wanted

    wanted = crowded(lab, urgent)
    numbers = [handle.buffer.run for handle in wanted]
    assert len(order_of(lab, wanted)) == 12
    known = {row.run: row for row in lab.timeline.runs}
    rows = [known[number] for number in numbers]
    assert [(row.priority, row.data) for row in rows[:2]] == [
        (0, {"deadline": 0.0}), (1, {"deadline": -1.0}),
    ]  # fmt: skip
    # The first ones to come may have been alone.
    last = sorted(rows, key=lambda row: row.granted or 0.0)[-4:]
    assert [row.run for row in last] == sorted([row.run for row in last], reverse=True)
    assert last[-1].run in numbers[:4]


def test_who_set_it_may_leave(lab: pw.Lab) -> None:
    assert lab.embedded is not None
    with pw.Lab(lab.embedded.control, name="carl") as carl:
        carl.policy = LastFirst()
    until(lambda: "carl" not in lab.clients)
    assert repr(lab.policy) == "<policy LastFirst, set by carl>"
    assert len(processes(lab)) == 1
