"""The search for the best way, on devices that are simulated, so that the truth is known."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import pathways_lab as pw
from pathways_lab.pipeline import search as searching
from pathways_lab.pipeline.candidates import layouts, ways
from pathways_lab.pipeline.mpmd.step import Step
from pathways_lab.pipeline.search import Candidate, Search
from pathways_lab.pipeline.what_if import predictions
from pathways_lab.timeline.log import Timeline
from tests.client.kit import a_slice
from tests.pipeline.mpmd_kit import X, Y, dense, layer

COSTS = pw.Costs(jitter=0.0, dcn_latency=1e-3, launch=1e-4, wake=1e-4)
MACHINE = pw.Machine(2, 1, 1, costs=COSTS, unlike={"island1": {"speed": 1 / 3}})
"""The second island is three times as slow."""
PARTS = [pw.mpmd.named(part, dense) for part in "abcd"]
PARAMETERS = [layer(6, 6, seed=seed) for seed in range(4)]


def train_step(parameters: Any, x: Any, y: Any, microbatches: int = 4) -> Any:
    def loss(parameters: Any, x: Any, y: Any) -> Any:
        for part, own in zip(PARTS, parameters, strict=True):
            x = part(own, x)
        return jnp.mean((x - y) ** 2)

    def turn(total: Any, rows: Any) -> Any:
        return jax.tree.map(jnp.add, total, jax.grad(loss)(parameters, *rows)), None

    rows = [a.reshape(microbatches, -1, *a.shape[1:]) for a in (x, y)]
    slopes, _ = jax.lax.scan(turn, jax.tree.map(jnp.zeros_like, parameters), tuple(rows))
    return jax.tree.map(lambda w, d: w - 0.1 * d, parameters, slopes)


@pytest.fixture(scope="module")
def step() -> Step:
    fast, slow = (MACHINE.slice(1, island=f"island{n}") for n in range(2))
    on = dict(zip("abcd", (fast, fast, slow, slow), strict=True))
    made = pw.mpmd.jit(train_step, on=on, schedule="gpipe")
    made.partition(PARAMETERS, X, Y)
    return made


def seconds_of(step: Step) -> Any:
    """Two runs of a step: 24 ms forward for the whole batch, twice that backward, for each part."""
    args, kwargs = step.types
    captured = step.capture(*args, **kwargs)
    turns = step.partition(*args, **kwargs).microbatches
    names = {fragment.name for fragment in step.fragments}
    times = {}
    for name in names:
        kind, _, part = name.partition("_")
        whole = {"forward": 0.024, "backward": 0.048, "weight": 0.048}.get(kind, 0.001)
        if {f"backward_{part}", f"weight_{part}"} <= names and kind != "forward":
            whole = 0.024
        times[name] = whole / turns
    return pw.simulate(pw.Load(captured, runs=2, flight=1), MACHINE, times=times)


class Simulated(searching._Search):
    """Runs are simulated.  stops: after so many."""

    stops = 1000

    def _measure(self, c: Candidate, runs: int) -> None:
        c.compiled = True
        for _ in range(runs):
            if not self.stops:
                raise KeyboardInterrupt
            self.stops -= 1
            self._note(c, seconds_of(c.step).recording)


@pytest.fixture
def simulated(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Simulated]]:
    monkeypatch.setattr(searching, "_Search", Simulated)
    yield Simulated
    Simulated.stops = 1000


LAB: Any = types.SimpleNamespace(timeline=Timeline())


def search(step: Step, *over: str, **options: Any) -> Search:
    return pw.search(step, LAB, over=over, progress=False, **{"seconds": 300, **options})


def test_the_best_cut_and_schedule_are_found_and_predicted(step: Step, simulated: Any) -> None:
    """The slow island gets one part of four; no way is better than the one found."""
    found = search(step, "schedule", "cut")
    assert [part for part, on in found.winner.way.layout if on.island == "island1"] == ["d"]
    tried = [c for c in found.candidates if not c.why]
    best = min(_seconds(c.step) for c in tried)
    assert found.winner.measured == pytest.approx(best, rel=0.02)
    assert found.winner.measured < 0.75 * found.default.measured
    for c in tried:
        if c.predicted is not None and not c.calibrated:
            assert c.predicted == pytest.approx(_seconds(c.step), rel=0.05), c.way
    assert "calibrates" in repr(found)
    assert "predicted" in found._repr_html_()
    assert found.best.on["d"].island == "island1"


def _seconds(step: Step) -> float:
    found = seconds_of(step)
    return found.timeline.planned(max(found.ended)).actual


def test_which_island_has_which_part(step: Step, simulated: Any) -> None:
    """Fragments that ran on one of two islands only are measured on the other."""
    found = search(step, "placement")
    assert len(found.candidates) == 2
    assert all(c.times for c in found.candidates)


def test_numbers_of_microbatches(step: Step, simulated: Any) -> None:
    """Four times as many do not divide the batch: refused, and no more."""
    found = search(step, "microbatches")
    many = {c.way.microbatches: c for c in found.candidates}
    assert many[16].why
    assert many[2].measured is not None
    assert many[2].measured > many[8].measured  # type: ignore[operator]
    assert found.winner.way.microbatches == 8


def test_no_time_leaves_the_default(step: Step, simulated: Any) -> None:
    found = search(step, "schedule", seconds=0)
    assert found.best is step
    assert found.unseen


def test_the_best_predicted_way_is_run_however_late_it_is(
    step: Step, simulated: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Late from the moment on at which all are predicted."""
    over: list[None] = []
    monkeypatch.setattr(simulated, "_late", lambda self, share=1.0: bool(over))
    finals = simulated._finals
    monkeypatch.setattr(simulated, "_finals", lambda self: (over.append(None), finals(self)))
    found = search(step, "schedule", "cut", few=2)
    measured = [c for c in found.candidates if c.times and not c.calibrated]
    predicted = [c for c in found.candidates if c.predicted is not None and not c.why]
    assert measured == [min(predicted, key=lambda c: c.predicted or 0.0)]
    assert found.winner is measured[0]


@pytest.mark.parametrize("runs", [2, 5])
def test_an_interrupt_keeps_the_best_so_far(step: Step, simulated: Any, runs: int) -> None:
    simulated.stops = runs
    found = search(step, "schedule", "cut")
    assert found.default.times
    assert found.winner.measured <= found.default.measured


def test_ways_that_do_not_fit_are_not_run(
    step: Step, simulated: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GPipe keeps all microbatches: less memory than it needs leaves the others."""
    found = search(step, "schedule")
    needs = {c.way.schedule: c.memory for c in found.candidates}
    assert needs["1f1b"] < needs["gpipe"]
    small = dataclasses.replace(MACHINE, memory=needs["1f1b"])
    (own,) = (c.step for c in found.candidates if c.way.schedule == "1f1b")
    monkeypatch.setattr("tests.pipeline.test_search.MACHINE", small)
    found = search(own, "schedule")
    (gpipe,) = (c for c in found.candidates if c.way.schedule == "gpipe")
    assert "bytes" in gpipe.why
    assert not gpipe.times


def test_predictions_are_remembered(step: Step, simulated: Any) -> None:
    known = len(predictions(LAB.timeline))
    search(step, "schedule")
    assert len(predictions(LAB.timeline)) > known


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"over": "schedule"}, "not a tuple"),
        ({"over": ("colour",)}, "placement"),
        ({"over": ()}, "not a tuple"),
        ({"seconds": -1}, "seconds=-1 is not a number of seconds"),
        ({"few": 0}, "few=0"),
    ],
)
def test_what_cannot_be_searched(step: Step, asked: dict[str, Any], said: str) -> None:
    with pytest.raises(pw.PathwaysError, match=said):
        pw.search(step, LAB, **asked)
    with pytest.raises(pw.PathwaysError, match="is no step of"):
        pw.search(len, LAB, **asked)  # type: ignore[arg-type]


def test_types_must_be_known(step: Step) -> None:
    with pytest.raises(pw.PathwaysError, match="never called"):
        pw.search(step.otherwise(), LAB)


# --- ways ---------------------------------------------------------------------------------


def test_neighbours_are_cut_in_every_way() -> None:
    left, right, other = (a_slice(1, island=f"island{n}") for n in range(3))
    on = dict(zip("abcde", (left, left, right, right, other), strict=True))
    cuts = layouts(on, cut=True, placement=False)
    assert len(cuts) == 6  # 4 over 2
    assert cuts[0] == tuple(on.items())
    assert len(layouts(on, cut=True, placement=True)) == 6 * 6
    assert len(layouts(on, cut=False, placement=True)) == 6


def test_the_own_way_comes_first(step: Step) -> None:
    every = ways(step, ("schedule", "microbatches"))
    assert (every[0].schedule, every[0].microbatches) == ("gpipe", 4)
    assert {way.microbatches for way in every} == {4, 8, 2, 16, 1}
    assert ways(step, ("cut",))[0].layout == tuple(step.on.items())
