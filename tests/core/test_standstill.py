"""Laws: it is a deadlock exactly when all hosts in its cycle confirm it; else it is late."""

from __future__ import annotations

from pathways_lab.core.diagnosis.overdue import Overdue
from pathways_lab.core.diagnosis.stall import LAUNCHED, QUEUED, WAITING, Seen, explain
from pathways_lab.core.diagnosis.stall_story import Stuck
from pathways_lab.core.program.program import Line

BOTH = ("host0", "host1")


def gang(
    run: int, node: str, hosts: tuple[str, ...] = BOTH, since: float = 3.0, *needs: tuple[int, int]
) -> Overdue:
    line = Line("cell.py", run, f"{node}(x)")
    return Overdue(run, "kernel-1", f"p{run}", 0, node, line, hosts, since, True, needs)


def seen(run: int, state: str = LAUNCHED, devices: tuple[int, ...] = (0,)) -> Seen:
    return Seen(run, 0, state, 2.0, devices)


A, B = gang(1, "A"), gang(2, "B")


def story(*gangs: Overdue, **told: list[Seen]) -> Stuck:
    found = explain(gangs, told)
    assert found is not None
    return found


def test_two_hosts_in_two_collectives() -> None:
    found = story(A, B, host0=[seen(1), seen(2)], host1=[seen(2), seen(1)])
    assert found.kind == "deadlock"
    assert found.headline == (
        "'A' waits for host1, which is in 'B'; 'B' waits for host0, which is in 'A'"
    )
    assert [g.inside for g in found.gangs] == [("host0",), ("host1",)]
    assert "cell.py:2: B(x)" in str(found)
    assert found.seconds == 3.0


def test_it_is_none_before_both_have_launched() -> None:
    """Queued behind earlier work: the cycle may come, and may be is called late until then."""
    found = story(
        gang(9, "earlier", ("host0",)), A, B,
        host0=[seen(9), seen(1, QUEUED), seen(2, QUEUED)], host1=[seen(2), seen(1)],
    )  # fmt: skip
    assert found.kind == "late"
    found = story(A, B, host0=[seen(1, QUEUED), seen(2, QUEUED)], host1=[seen(2), seen(1)])
    assert found.kind == "late"


def test_nine_seconds_of_earlier_work_are_legal() -> None:
    """A collective behind long work of one host: named as what everything waits for."""
    found = story(
        gang(2, "collective", since=9.0), gang(1, "long", ("host0",), 8.9),
        host0=[seen(1), seen(2, QUEUED)], host1=[seen(2)],
    )  # fmt: skip
    assert found.kind == "late"
    assert found.headline == (
        "'collective' waits for host0, which is in 'long'; "
        "'long' has not ended on host0, 8.9 s after it was granted"
    )


def test_a_chain_over_results() -> None:
    found = story(
        gang(3, "reader", ("host0",), 5.0, (2, 0)), gang(2, "maker", ("host1",), 4.0),
        host0=[seen(3, WAITING)], host1=[seen(2)],
    )  # fmt: skip
    assert found.headline.startswith("'reader' waits for the result of 'maker'; 'maker' has not")


def test_a_cycle_of_three_hosts() -> None:
    hosts = ("host0", "host1", "host2")
    three = [gang(n, name, hosts) for n, name in enumerate("ABC")]
    found = explain(
        three,
        {h: [seen((n + k) % 3, devices=(0, 1)) for k in range(3)] for n, h in enumerate(hosts)},
    )
    assert found is not None
    assert found.kind == "deadlock"
    assert len(found.gangs) == len(found.arrows) >= 2


def test_disjoint_devices_of_a_host_do_not_wait_for_each_other() -> None:
    found = story(
        A, B,
        host0=[seen(1, devices=(0,)), seen(2, devices=(1,))],
        host1=[seen(2, devices=(1,)), seen(1, devices=(0,))],
    )  # fmt: skip
    assert found.kind == "late"
    assert found.arrows == ()


def test_silent_hosts_are_named_and_nothing_is_a_story_of_its_own() -> None:
    found = explain([A], {"host0": [seen(1)]}, silent=["host1"])
    assert found is not None
    assert found.headline.endswith("host1 does not answer")
    assert explain([], {}) is None
