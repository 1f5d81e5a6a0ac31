"""Runs that make what is kept ahead of its values go on when their client leaves."""

from __future__ import annotations

import pytest

from pathways_lab.core.messages import (
    CancelRequested,
    HandleUnpublished,
    HostLost,
    QuotaChosen,
    SliceFreed,
    SlicesKept,
    UploadLost,
)
from pathways_lab.core.messages.elastic import Answer, ResumeRequested, SuspendRequested
from pathways_lab.testing import Sketch
from tests.core.stories import BROKEN, told
from tests.core.test_keeping import ANN, Ann


class Detached(Ann):
    """She has two runs, one after the other on her other slice, and keeps the result as "out".

    Nothing is granted before ``self.script.compiled()``.  beside: a run that nobody keeps.
    """

    def __init__(self, ahead: bool = True, arrive: bool = True) -> None:
        super().__init__(compile=False)
        one = Sketch("one").chain(self.other, "f", nbytes=8)
        plan = self.script.register(one, client=ANN)
        self.x = self.script.upload(self.other, 8, client=ANN, arrive=arrive)
        self.first = self.script.submit(plan, [self.x], client=ANN)
        self.last = self.script.submit(plan, self.first.outputs, client=ANN)
        self.beside = self.script.submit(plan, [self.x], client=ANN)
        self.out = self.last.outputs[0]
        self.answers = len(told(self.script, Answer))
        self.keep(self.out, name="out", ahead=ahead)

    @property
    def answered(self) -> bool:
        return len(told(self.script, Answer)) > self.answers

    def release(self) -> None:
        self.say(HandleUnpublished, "kernel-1", name="out")


@pytest.mark.parametrize("ahead", [True, False])
def test_queued_runs_go_on_without_their_client_where_it_kept_ahead(ahead: bool) -> None:
    ann = Detached(ahead)
    assert ann.answered is ahead
    ann.leave()
    state = ann.script.control.state
    assert set(state.runs) == ({ann.first.run, ann.last.run} if ahead else set())
    assert ann.seats[ANN] == ({ann.slice, ann.other} if ahead else {ann.slice})
    kept = told(ann.script, SlicesKept)[-1]
    assert kept.runs == ((ann.first.run, ann.last.run) if ahead else ())
    ann.script.compiled()
    ann.script.finish_all()
    assert not state.runs
    if not ahead:
        return
    assert [ann.script.ended[r].outcome for r in (ann.first.run, ann.last.run)] == ["finished"] * 2
    assert ann.free(ann.first.outputs[0]), "nobody reads it any more"
    assert not ann.free(ann.out)
    ann.join()
    assert ann.script.resolved[ann.take("out")] is None


def test_a_client_that_is_back_meanwhile_has_the_runs_again() -> None:
    ann = Detached()
    ann.leave()
    ann.join()
    control = ann.script.control
    assert control.state.clients[ANN] == {ann.first.run, ann.last.run}
    assert not control.keeping.going
    taken = ann.take("out")
    assert taken not in ann.script.resolved
    ann.leave()
    ann.join()
    ann.script.compiled()
    taken = ann.take("out")
    ann.script.finish_all()
    assert ann.script.resolved[taken] is None
    assert ann.script.ended[ann.last.run].outcome == "finished"


def test_a_client_that_is_back_cancels_them_by_their_results() -> None:
    ann = Detached()
    ann.leave()
    ann.join()
    taken = ann.take("out")
    ann.say(CancelRequested, runs=(), buffers=(taken,))
    assert not ann.script.control.state.runs
    failure = ann.script.resolved[taken]
    assert failure is not None
    assert failure.kind == "cancelled"


def test_keeping_ahead_waits_for_what_the_client_uploads() -> None:
    ann = Detached(arrive=False)
    assert not ann.answered
    ann.script.arrive(ann.x, ann.other)
    assert ann.answered
    ann.leave()
    assert ann.script.control.state.runs


def test_a_client_that_leaves_in_the_middle_of_its_upload_keeps_nothing_ahead() -> None:
    ann = Detached(arrive=False)
    ann.leave()
    assert not ann.script.control.state.runs
    assert ann.script.control.sharing.names.keys() == {"w"}


def test_an_upload_that_is_lost_is_the_answer() -> None:
    ann = Detached(arrive=False)
    ann.say(UploadLost, buffer=ann.x, failure=BROKEN)
    assert ann.script.refused[-1].failure.message == BROKEN.message
    ann.leave()
    assert ann.script.control.sharing.names.keys() == {"w"}


def test_slices_that_only_the_runs_used_go_with_them() -> None:
    ann = Ann()
    moving = Sketch("moving")
    (there,) = moving.call("f", ann.other, [], [8])
    moving.output(*moving.call("g", ann.slice, [there], [8]))
    run = ann.script.submit(ann.script.register(moving, client=ANN), client=ANN)
    ann.keep(run.outputs[0], ahead=True)
    ann.leave()
    assert ann.seats == {ANN: {ann.slice, ann.other}}
    ann.script.finish_all()
    assert ann.seats == {ANN: {ann.slice}}
    assert [c.slice for c in told(ann.script, SliceFreed)] == [ann.other]


@pytest.mark.parametrize("how", ["fails", "lost"])
def test_the_next_client_hears_why_they_failed(how: str) -> None:
    ann = Detached()
    ann.leave()
    ann.script.compiled()
    if how == "fails":
        ann.script.finish(ann.first.run, failure=BROKEN)
        ann.script.finish_all()
    else:
        ann.script.send(HostLost(0.0, "test", "island0/host0", "killed"))
    assert not ann.script.control.state.runs
    ann.join()
    ann.take("out")
    failure = ann.script.refused[-1].failure
    assert failure.message == BROKEN.message if how == "fails" else failure.kind == "lost"
    ann.say(HandleUnpublished, name="out")
    assert "out" not in ann.script.control.sharing.names


def test_an_owner_of_the_lab_ends_runs_that_nobody_comes_back_for() -> None:
    ann = Detached()
    ann.leave()
    ann.release()
    state = ann.script.control.state
    assert not state.runs, "nothing of them had begun"
    assert ann.seats == {ANN: {ann.slice}}


def test_runs_that_began_end_on_their_slices_before_these_go() -> None:
    ann = Detached()
    ann.script.compiled()
    ann.leave()
    ann.release()
    assert ann.seats[ANN] == {ann.slice, ann.other}
    ann.script.finish_all()
    assert ann.seats == {ANN: {ann.slice}}
    assert ann.other not in ann.script.control.slices


def test_their_memory_counts_in_the_quota_of_their_client() -> None:
    ann = Detached()
    ann.say(QuotaChosen, "kernel-1", whom=ANN, devices=None, nbytes=70)
    ann.leave()
    ann.script.compiled()
    assert 16 < ann.account <= 70
    ann.script.finish_all()
    assert ann.account == 32, "what is kept, on two devices each"


def test_queued_runs_follow_their_slice_to_other_devices_without_their_client() -> None:
    ann = Detached()
    ann.leave()
    ann.say(SuspendRequested, "kernel-1", whose=ANN)
    ann.say(ResumeRequested, "kernel-1", whose=ANN, island="island1")
    assert ann.script.binding(ann.other).island == "island1"
    ann.script.compiled()
    ann.script.finish_all()
    assert ann.script.ended[ann.last.run].outcome == "finished"
    granted = {g.host for g in ann.script.grants if g.run == ann.last.run}
    assert granted == {"island1/host0"}
