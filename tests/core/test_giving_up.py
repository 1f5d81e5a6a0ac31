"""Runs that an owner's rule gives up: they fail at once, and leave nothing behind."""

from __future__ import annotations

import pytest

from pathways_lab.core.diagnosis.invariants import check
from pathways_lab.core.errors import Failure
from pathways_lab.core.messages import (
    AbortRun,
    GivenUp,
    HostReport,
    LeaseRequested,
)
from pathways_lab.testing import Script
from tests.core.stories import heavy, told

STUCK = Failure("stuck", "everybody has waited for it")


@pytest.mark.parametrize("finished", [True, False])
def test_a_run_that_is_given_up_fails_at_once_and_ends_with_its_hosts(finished: bool) -> None:
    script = Script()
    plan = heavy(script, script.slice(2), 4)
    first, second = script.submit(plan), script.submit(plan)
    script.send(GivenUp(0.0, "watchdog", STUCK, runs=(first.run, 4711)))
    check(script.control)
    failure = script.resolved[first.outputs[0]]
    assert failure is not None
    assert failure.kind == "stuck"
    assert script.resolved.get(second.outputs[0]) is None, "who waits is not to blame"
    assert [abort.run for abort in told(script, AbortRun)] == [first.run]
    assert first.run not in script.ended, "its gang is on the devices"
    if finished:
        script.finish(first.run)
    else:
        script.send(HostReport(0.0, "r", "island0/host0", (), ((first.run, 0, STUCK),)))
    script.finish_all()
    assert script.ended[first.run].outcome == "failed"
    assert script.ended[second.run].outcome == "finished"
    assert len(told(script, AbortRun)) == 1
    script.drop(*first.outputs, *second.outputs)
    assert not script.control.state.store.buffers
    check(script.control)


@pytest.mark.parametrize("order", [True, False])
def test_gangs_are_given_up_only_where_the_order_is_off(order: bool) -> None:
    """Elsewhere their wait ends by itself."""
    script = Script()
    script.send(LeaseRequested(0.0, "lease", "kernel-1", "island0", order=order))
    run = script.submit(heavy(script, script.slice(2), 4))
    script.send(GivenUp(0.0, "watchdog", STUCK, ((run.run, 0), (4711, 0))))
    assert (run.outputs[0] in script.resolved) != order
    script.finish_all()
    assert script.ended[run.run].outcome == ("finished" if order else "failed")
