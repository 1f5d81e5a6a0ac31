"""The test bench itself: machines share nothing, and the network does what it is told."""

from __future__ import annotations

import sys
import time

import pytest

from tests.machines.bench import Machine, Machines
from tests.machines.conftest import Make
from tests.runtime.processes import gone

pytestmark = pytest.mark.cluster

REACH = """
import socket, sys
try:
    socket.create_connection((sys.argv[1], 7), timeout=float(sys.argv[2])).close()
except ConnectionRefusedError:
    print("reached")
except TimeoutError:
    print("silence")
"""
"""Nobody listens there, so the machine itself refuses."""


TIME = f"{sys.executable} -c 'import time; print(time.monotonic())'"


def reach(one: Machine, other: Machine, seconds: float) -> str:
    with one.python(REACH, other.name, str(seconds)) as process:
        return process.communicate()[0].strip()


@pytest.fixture(scope="module")
def three(machines: Make) -> Machines:
    return machines(("a", "b", "c"))


def test_a_machine_has_nothing_of_another(three: Machines) -> None:
    three["a"].run("touch", "/tmp/here", "/dev/shm/here")
    assert three["b"].run("sh", "-c", "ls /dev/shm; test ! -e /tmp/here") == ""
    names = {three[name].run("hostname") for name in "abc"}
    boots = {three[name].run("cat", "/proc/sys/kernel/random/boot_id") for name in "abc"}
    assert len(names) == len(boots) == 3
    assert "127.0.1.1" in three["a"].run("getent", "hosts", "a")


def test_links_are_cut_and_plugged_in_again(three: Machines) -> None:
    assert reach(three["a"], three["b"], 60) == "reached"
    three.cut("a", "b")
    assert reach(three["a"], three["b"], 0.1) == "silence"
    assert reach(three["a"], three["c"], 60) == "reached"
    three.plug("a")
    assert reach(three["a"], three["b"], 60) == "reached"
    three.unplug("c")
    assert reach(three["a"], three["c"], 0.1) == "silence"
    three.plug("c")
    assert reach(three["a"], three["c"], 60) == "reached"


def test_a_machine_boots_and_is_reached_again(three: Machines) -> None:
    three["b"].run("touch", "/tmp/here")
    three.boot("b")
    assert "here" not in three["b"].files()
    assert reach(three["a"], three["b"], 60) == "reached"


def test_a_network_has_a_delay(machines: Make) -> None:
    far = machines(("east", "west"), delay=0.2)
    began = time.monotonic()
    assert reach(far["east"], far["west"], 60) == "reached"
    assert time.monotonic() - began >= 0.4


def test_a_machine_has_a_clock_of_its_own(machines: Make) -> None:
    ahead = machines(("here", "late"), clocks={"late": 5000})
    here, late = (float(ahead[name].run("sh", "-c", TIME)) for name in ("here", "late"))
    assert 4990 < late - here < 5060


def test_nothing_of_a_killed_machine_stays(machines: Make) -> None:
    lone = machines(("lone", "other"))
    with lone["lone"].start("sleep", "1000") as sleeper:
        lone.kill("lone")
        assert sleeper.wait(60)
    assert not gone([lone["lone"].pid], 60)
