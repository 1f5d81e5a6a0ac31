"""Two hosts in two orders: what one order prevents, really happening.

The deadlock and the silently wrong result are JAX's own, on real processes;
one order of the same programs gives the right results, before and after.
"""

from __future__ import annotations

import pytest

from pathways_lab.runtime.disorder import CASES, Demonstration, Outcome, demonstrate

pytestmark = pytest.mark.cluster

RIGHT = {"A": Outcome((10.0,)), "B": Outcome((40.0, 60.0))}
"""Of the deadlock's programs: over all devices, and over hosts."""


def outcomes(seen: Demonstration) -> list[Outcome]:
    return [outcome for host in seen.during.values() for outcome in host.values()]


def test_one_order_is_right() -> None:
    """The guarantee switched on: same programs, same hosts, no hang."""
    seen = demonstrate("deadlock", ("BA", "BA"), notice=20.0)
    assert seen.hung == ()
    assert seen.before == seen.during == seen.after == {"host0": RIGHT, "host1": RIGHT}


def test_two_orders_deadlock_and_are_ended() -> None:
    """Both hosts hang; ending the formation makes them raise; formed again, all is well."""
    seen = demonstrate("deadlock", ("AB", "BA"))
    assert seen.hung == ("host0", "host1")
    assert len(outcomes(seen)) == 4
    # Nearly always of their connections; the rare one that missed the cut is left behind.
    words = ("Gloo", "has ended")
    assert all(any(w in o.error for w in words) and not o.values for o in outcomes(seen))
    assert seen.deaths == {}
    assert seen.seconds < 5.0
    assert seen.after == {"host0": RIGHT, "host1": RIGHT}


def test_a_deadlock_lasts_until_the_collective_timeout() -> None:
    """Nobody ends it: JAX gives up by itself, once per program.

    Who gives up a moment earlier may meet the other one in its next program after all.
    """
    seen = demonstrate("deadlock", ("AB", "BA"), collective_timeout=2)
    assert seen.hung == ("host0", "host1")
    assert seen.seconds >= 2.0
    failed = [outcome for outcome in outcomes(seen) if outcome.error]
    assert len(failed) >= 2
    assert all("Gloo" in outcome.error for outcome in failed), failed
    met = [
        (name, outcome)
        for host in seen.during.values()
        for name, outcome in host.items()
        if not outcome.error
    ]
    assert all(outcome == RIGHT[name] for name, outcome in met), met
    assert seen.after == {"host0": RIGHT, "host1": RIGHT}


def test_two_orders_give_wrong_results_without_an_error() -> None:
    """Same group, operation and size: A on one host adds up with B on the other."""
    seen = demonstrate("wrong", ("AB", "BA"))
    right = {"A": Outcome((10.0,)), "B": Outcome((100.0,))}
    assert seen.hung == ()
    assert seen.deaths == {}
    assert all(not outcome.error for outcome in outcomes(seen))
    for host in seen.during.values():
        assert host != right
    # 1 + 2 of one host and 30 + 40 of the other, and the reverse.
    found = {value for outcome in outcomes(seen) for value in outcome.values}
    assert found == {73.0, 37.0}
    assert seen.before == seen.after == {"host0": right, "host1": right}


def test_cases_tell_their_story() -> None:
    assert set(CASES) == {"deadlock", "wrong", "kinds", "sizes", "columns"}
    for case in CASES.values():
        assert case.a != case.b
        assert len(case.story) > 60
