"""Hosts that form one JAX runtime, compute together, die, hang, and form again.

Real processes on loopback; one island of three hosts for the whole file, in
which killed hosts are replaced.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.runtime.formation_kit import LONG, Error, Fates, Host, Island
from tests.runtime.processes import stop, until

pytestmark = pytest.mark.cluster


@pytest.fixture(scope="module")
def island(folder: Path) -> Iterator[Island]:
    made = Island(folder, hosts=3)
    yield made
    made.close()


def test_a_sum_over_two_hosts(island: Island) -> None:
    """Devices are numbered by rank, then local number; JAX sees those of both hosts."""
    number = island.form({0: [0, 1], 1: [0, 1]})
    first, second = island.all("numbering", [0, 1], number=number)
    assert [row[1] for row in first] == [0, 0, 1, 1]
    assert [row[2] for row in first] == [True, True, False, False]
    assert [row[2] for row in second] == [False, False, True, True]
    assert [row[0] for row in first] == [row[0] for row in second], "ids differ between hosts"
    island.all("program", [0, 1], number=number)
    assert island.all("run", [0, 1], number=number) == [[10.0], [10.0]]
    island.leave(number, [0, 1])


def policies(host: Host) -> list[int]:
    """The scheduling policy of each of its threads."""
    found = []
    for thread in os.listdir(f"/proc/{host.child.pid}/task"):
        with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
            found.append(os.sched_getscheduler(int(thread)))
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has threads that give way")
def test_what_serves_collectives_gives_way_to_who_wakes_it(island: Island) -> None:
    """Not the thread that asked for the formation, nor any other."""
    before = policies(island.hosts[0])
    number = island.form({0: [0], 1: [0]})
    during = policies(island.hosts[0])
    assert during.count(os.SCHED_BATCH) > before.count(os.SCHED_BATCH)
    assert during.count(os.SCHED_OTHER) >= before.count(os.SCHED_OTHER)
    assert os.sched_getscheduler(island.hosts[0].child.pid) == os.SCHED_OTHER
    island.leave(number, [0, 1])


def test_hosts_may_give_different_numbers_of_devices(island: Island) -> None:
    number = island.form({0: [3], 1: [0, 1, 2], 2: [1, 5]})
    rows = island.hosts[2].do("numbering", number=number)
    assert [row[1] for row in rows] == [0, 1, 1, 1, 2, 2]
    island.all("program", number=number)
    assert island.all("run", number=number) == [[21.0]] * 3
    island.leave(number, [0, 1, 2])


def test_a_mesh_may_interleave_hosts(island: Island) -> None:
    """Row-major device i of the mesh contributes i + 1, wherever it lives."""
    number = island.form({0: [0, 1], 1: [0, 1]})
    # Row-major: host 1 device 0, host 0 device 0, host 1 device 1, host 0 device 1.
    island.all(
        "program", [0, 1], number=number, shape=[2, 2], axes=["x", "y"], over=["x"],
        order=[2, 0, 3, 1],
    )  # fmt: skip
    # Columns of ((1, 2), (3, 4)): host 1 has the first one, host 0 the second.
    assert island.all("run", [0, 1], number=number) == [[6.0], [4.0]]
    island.leave(number, [0, 1])


def test_two_formations_of_the_same_hosts_do_not_wait_for_each_other(island: Island) -> None:
    first = island.form({0: [0, 1], 1: [0, 1]})
    second = island.form({0: [2], 1: [2, 3]})
    for number in (first, second):
        island.all("program", [0, 1], number=number)
        island.all("run", [0, 1], number=number)
    island.hosts[0].ask("run", thread="first", number=first)
    assert island.hosts[0].waits("first")
    assert island.all("run", [0, 1], number=second, times=20) == [[6.0], [6.0]]
    assert island.hosts[1].do("run", number=first) == [10.0]
    assert island.hosts[0].value("first") == [10.0]
    for number in (first, second):
        island.leave(number, [0, 1])


def test_a_part_of_an_island_needs_no_other_host(island: Island) -> None:
    """Hosts 0 and 1 compute, then 1 and 2, while the third is stopped in its tracks."""
    for pair, idle in (([0, 1], 2), ([1, 2], 0)):
        stopped = island.hosts[idle].child.pid
        stop(stopped)
        try:
            number = island.form({pair[0]: [0, 1], pair[1]: [0]})
            island.all("program", pair, number=number)
            assert island.all("run", pair, number=number) == [[6.0], [6.0]]
        finally:
            os.kill(stopped, signal.SIGCONT)
        island.leave(number, pair)


def test_competing_collectives_in_one_order_are_right(island: Island) -> None:
    """200 iterations of two programs over different groups of the same devices."""
    number = island.form({0: [0, 1], 1: [0, 1]})
    for name, over, scale in (("A", ["h", "d"], 1.0), ("B", ["h"], 10.0)):
        island.all(
            "program", [0, 1], number=number, name=name, shape=[2, 2], axes=["h", "d"], over=over,
            scale=scale,
        )  # fmt: skip
    found = island.all("alternate", [0, 1], number=number, names=["A", "B"], times=200)
    assert found == [{"A": [10.0], "B": [40.0, 60.0]}] * 2
    island.leave(number, [0, 1])


def test_a_host_nine_seconds_late_is_waited_for(island: Island) -> None:
    """Right results, nobody killed; also when the group meets for the first time."""
    number = island.form({0: [0, 1], 1: [0, 1]})
    island.all("program", [0, 1], number=number)
    early, late = island.hosts[:2]
    early.ask("meet", thread="meet", number=number, name="first")
    assert early.waits("meet", 1.0)
    late.do("meet", number=number, name="first")
    early.value("meet")
    island.all("run", [0, 1], number=number)
    early.ask("run", thread="early", number=number, times=3)
    late.do("sleep", seconds=9.0)
    assert late.do("run", number=number, times=3) == [10.0]
    assert early.value("early") == [10.0]
    island.leave(number, [0, 1])


def test_forming_again_leaves_no_threads_behind(island: Island) -> None:
    def form_and_leave() -> int:
        number = island.form({0: [0, 1], 1: [0, 1]})
        island.all("program", [0, 1], number=number)
        island.all("run", [0, 1], number=number)
        during = island.hosts[0].do("threads")
        island.leave(number, [0, 1])
        return int(during)

    form_and_leave()
    before = island.hosts[0].do("threads")
    for _ in range(5):
        assert form_and_leave() > before + 20
    # Those of the connection to the coordination process linger for a moment.
    until(lambda: island.hosts[0].do("threads") <= before)


# --- getting out alive ----------------------------------------------------------------


def test_a_killed_host_is_survived_and_replaced(island: Island) -> None:
    """The wait for it ends with an error, arrays stay readable, and the island forms again."""
    number = island.form({0: [0, 1], 1: [0, 1], 2: [0, 1]})
    island.all("program", number=number)
    island.all("run", number=number)
    survivors = [0, 1]
    island.all("keep", survivors, number=number)
    for index in survivors:
        island.hosts[index].ask("run", thread="run", number=number)
    assert island.hosts[0].waits("run")
    island.hosts[2].kill()
    island.all("end", survivors, number=number, reason="h2 was lost")
    for index in survivors:
        with pytest.raises(Error, match="Gloo"):
            island.hosts[index].value("run")
    assert island.all("read_kept", survivors) == [[[1.0, 2.0]], [[3.0, 4.0]]]
    with pytest.raises(Error, match=r"formation \d+ of h0.* has ended: h2 was lost"):
        island.hosts[0].do("numbering", number=number)
    island.leave(number, survivors)
    # Alone, and with a new process in the place of the dead one.
    smaller = island.form({0: [0, 1], 1: [0]})
    island.all("program", survivors, number=smaller)
    assert island.all("run", survivors, number=smaller) == [[6.0], [6.0]]
    island.leave(smaller, survivors)
    island.replace(2)
    whole = island.form({0: [0, 1], 1: [0, 1], 2: [0, 1]})
    island.all("program", number=whole)
    assert island.all("run", number=whole) == [[21.0]] * 3
    island.leave(whole, [0, 1, 2])


def test_a_hanging_collective_can_be_ended(island: Island) -> None:
    """Its partner never comes; other formations of the same hosts do not notice."""
    number = island.form({0: [0, 1], 1: [0, 1]})
    other = island.form({0: [2], 1: [2]})
    for each in (number, other):
        island.all("program", [0, 1], number=each)
        island.all("run", [0, 1], number=each)
    island.hosts[0].ask("run", thread="hangs", number=number, times=5)
    assert island.hosts[0].waits("hangs", 1.0)
    assert island.hosts[0].do("end", number=number) < 10.0
    with pytest.raises(Error, match="Gloo"):
        island.hosts[0].value("hangs")
    assert island.all("run", [0, 1], number=other) == [[3.0], [3.0]]
    island.leave(number, [0, 1])
    island.leave(other, [0, 1])


def test_who_waits_for_introductions_can_be_released(island: Island) -> None:
    """In a meeting, and in the first computation of a group."""
    number = island.form({0: [0, 1], 1: [0, 1]})
    island.all("program", [0, 1], number=number)
    host = island.hosts[0]
    host.ask("meet", thread="meet", number=number, name="first")
    host.ask("run", thread="run", number=number)
    assert host.waits("meet")
    assert host.waits("run")
    island.all("end", [0, 1], number=number, reason="enough")
    with pytest.raises(Error, match="has ended: enough"):
        host.value("meet")
    with pytest.raises(Error, match="Gloo"):
        host.value("run")
    island.leave(number, [0, 1])


def test_a_host_that_never_comes(island: Island) -> None:
    """Joining gives up, the process lives and can join others; one thread stays behind."""
    number, address = island.open(2)
    host = island.hosts[0]
    parts = [("h0", [0]), ("h9", [0])]
    host.ask("join", number=number, parts=parts, address=address, timeout=0.5)
    with pytest.raises(Error, match=r"not all of its hosts came within 0\.5 s"):
        host.value()
    state, _, stuck = host.do("state", number=number)
    assert state.startswith("ended")
    assert stuck
    island.coordination.close(number)
    again = island.form({0: [0], 1: [0]})
    island.all("program", [0, 1], number=again)
    assert island.all("run", [0, 1], number=again) == [[3.0], [3.0]]
    island.leave(again, [0, 1])


def test_a_host_that_dies_while_forming(island: Island) -> None:
    """Everybody connected, one said no more: the others can stop waiting, nothing is left."""
    number, address = island.open(1)
    host = island.hosts[0]
    parts = [("h0", [0]), ("h9", [0])]
    host.ask("join", thread="join", number=number, parts=parts, address=address)
    assert host.waits("join", 0.5)
    host.do("end", number=number, reason="h9 was lost")
    with pytest.raises(Error, match="has ended: h9 was lost"):
        host.value("join")
    state, _, stuck = host.do("state", number=number)
    assert state == "ended: h9 was lost"
    assert not stuck
    island.coordination.close(number)


def test_the_coordination_process_may_die(island: Island) -> None:
    """What runs goes on; groups that never met are told at once; the next formation is served."""
    number = island.form({0: [0, 1], 1: [0, 1]})
    island.all("program", [0, 1], number=number)
    island.all("run", [0, 1], number=number)
    island.all(
        "program", [0, 1], number=number, name="new", shape=[2, 2], axes=["h", "d"], over=["h"]
    )
    other = island.form({0: [2], 1: [2]})
    island.hosts[0].ask("meet", thread="meet", number=other, name="never")
    assert island.hosts[0].waits("meet", 1.0)
    island.fates.lost.clear()
    pid = island.coordination.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(Error, match="its hosts could not meet"):
        island.hosts[0].value("meet")
    until(lambda: len(island.fates.lost) == 2)
    assert island.fates.lost == [number, other]
    assert island.all("run", [0, 1], number=number, times=20) == [[10.0], [10.0]]
    assert island.hosts[0].do("state", number=number) == ["joined", True, False]
    for host in island.hosts[:2]:
        with pytest.raises(Error, match="Gloo"):
            host.do("run", number=number, name="new")
    assert island.all("run", [0, 1], number=number) == [[10.0], [10.0]]
    island.leave(number, [0, 1])
    island.leave(other, [0, 1])
    again = island.form({0: [0, 1], 1: [0, 1]})
    island.all("program", [0, 1], number=again)
    assert island.all("run", [0, 1], number=again) == [[10.0], [10.0]]
    island.leave(again, [0, 1])


def test_without_the_relay_a_host_dies_with_its_coordination_process(folder: Path) -> None:
    """What the relay is for."""
    island = Island(folder, hosts=0)
    host = Host("h0", folder, LONG).ready()
    try:
        number, address = island.open(1)
        host.do("join_directly", number=number, parts=[("h0", [0])], address=address)
        island.coordination.end()
        host.child.wait()
        assert host.child.exit_code == -6
    finally:
        host.child.end()
        island.close()


def test_a_coordination_process_that_cannot_serve_says_why(tmp_path: Path) -> None:
    """An address that cannot be bound would be a crash of native code."""
    (folder := tmp_path / ("long" * 25)).mkdir()
    fates = Fates(folder)
    try:
        for number in (1, 2):
            with pytest.raises(Error, match="the path of a Unix socket may have"):
                fates.open(number, 2)
        assert fates.coordination.pid is not None
    finally:
        fates.coordination.end()
    with pytest.raises(Error, match="closing"):
        fates.open(3, 2)
