"""Who is told that a device process has ended, and what: with scripted neighbours."""

from __future__ import annotations

from typing import Any

import pytest

from pathways_lab.core import messages as m
from pathways_lab.core.diagnosis.overdue import Overdue
from pathways_lab.core.diagnosis.stall_story import Stuck
from pathways_lab.core.messages import elastic as em
from pathways_lab.core.program.program import Line
from pathways_lab.runtime.cluster.death_reports import DeathReports
from pathways_lab.runtime.cluster.device_supervisor import Change
from pathways_lab.runtime.control_plane.directory import LEFT_OUT
from pathways_lab.transport.codec import unpack
from tests.runtime.rim_kit import ONE, Lab

WHY = "was ended by signal 11 (SIGSEGV)"


def report(lab: Lab, state: str = "died", **more: Any) -> None:
    """The worker of the host of island i0 says how its process ended."""
    sent: list[dict[str, Any]] = []
    reports = DeathReports({"name": "i0/h", "island": "i0", "worker": "w"})
    change: dict[str, Any] = {"pid": 1, "code": -11, "reason": WHY, "words": "oh", **more}
    reports.changed(Change("ready"))
    reports.changed(Change(state, **change))  # type: ignore[arg-type]

    class Worker:
        def log_event(self, topic: str, event: dict[str, Any]) -> None:
            sent.append(event)

    reports.attach(Worker())
    (said,) = sent
    assert "worker" not in said, "Dask writes its own there"
    lab.rim.host_down({**said, "worker": "tcp://there"})


@pytest.fixture
def lab() -> Lab:
    lab = Lab()
    gang = Overdue(
        ONE + 9, "kernel-1", "train", 0, "f", Line("a.py", 3, "f(x)"), ("i0/h",), 1, True
    )
    lab.rim.overdue = lambda seconds, now: (gang,)
    return lab


def test_the_reason_reaches_the_core_before_the_loss_and_who_had_slices_there(lab: Lab) -> None:
    lab.say(1, "watch", on=True)
    report(lab)
    down, lost = lab.core.events[-2:]
    assert isinstance(down, em.HostDown)
    assert isinstance(lost, m.HostLost)
    assert down.until > lab.now
    assert lost.reason == f"its device process {WHY}"
    (printed,) = lab.clients[0].of("output")
    assert printed["run"] == ONE + 9
    for word in (WHY, "in node 'f' of program 'train' of kernel-1, at a.py:3", "started again"):
        assert word in printed["text"]
    assert not lab.clients[1].of("output"), "it has no slice there"
    (told,) = lab.clients[1].of("topology")[-1]["down"]
    assert (told["name"], told["again"]) == ("i0/h", True)
    (record,) = [r for r in lab.records() if getattr(r, "kind", "") == "host-down"]
    assert record.args["words"] == "oh"


def test_what_ran_there_is_blamed_for_its_end_and_not_for_starts_that_fail(lab: Lab) -> None:
    """Nobody reads the same twice while it is tried again."""
    why = "could not be started: no process left"
    report(lab)
    for _ in range(4):
        report(lab, pid=0, code=None, reason=why)
    report(lab, "given up", pid=0, code=None, reason=why)
    first, second, last = (printed["text"] for printed in lab.clients[0].of("output"))
    assert "in node 'f' of program 'train'" in first
    assert second == f"i0/h is down: its device process {why}; it is being started again"
    assert "it was given up" in last
    assert "'f'" not in last


def test_one_that_is_given_up_is_named_by_stuck_and_started_by_word(lab: Lab) -> None:
    started: list[tuple[str, str]] = []
    lab.rim.downs._wish = lambda do, *whom: started.append(whom)
    report(lab, "given up")
    lab.say(2, "stuck", id=1, seconds=0.0)
    story = unpack(Stuck, lab.clients[1].of("answered")[-1]["story"])
    assert story.kind == "down"
    assert WHY in str(story)
    assert "lab.restart('i0')" in str(story)
    lab.say(1, "restart", id=2, name="i0")
    assert started == [("i0/h", "w")]
    answer = {"id": 2, "failure": None, "hosts": {"i0/h": 0}}
    assert lab.clients[0].of("answered")[-1] == answer
    event = lab.core.events[-1]
    assert isinstance(event, em.HostDown)
    assert event.until > lab.now
    lab.say(1, "restart", id=3, name="nowhere")
    assert "nowhere" in str(lab.clients[0].of("answered")[-1]["failure"])


def test_one_that_is_left_out_is_named_and_no_restart_is_recommended(lab: Lab) -> None:
    """Its worker lacks something: nothing that an owner does in the lab would help."""
    started: list[tuple[str, str]] = []
    lab.rim.downs._wish = lambda do, *whom: started.append(whom)
    why = "was not started on late: the lab has JAX 0.10"
    report(lab, "left out", pid=0, code=None, reason=why)
    (down,) = (told["told"] for told in lab.clients[0].of("topology")[-1]["down"])
    assert f"{why}; mend its worker" in down
    assert "restart" not in down
    event = next(e for e in reversed(lab.core.events) if isinstance(e, em.HostDown))
    assert event.remedy == LEFT_OUT
    assert event.until == 0.0
    lab.say(1, "restart", id=2, name="i0")
    assert started == []


def test_only_owners_restart(lab: Lab) -> None:
    lab.rim.registry.clients["kernel-2"].owner = False
    lab.say(2, "restart", id=2, name="i0")
    answer = lab.clients[1].of("answered")[-1]
    assert (answer["id"], bool(answer["failure"])) == (2, True)
    assert "i0/h" in lab.rim.registry.hosts


def test_a_host_that_lives_is_restarted_too(lab: Lab) -> None:
    lab.say(1, "restart", id=2, name="i0/h")
    assert lab.hosts["i0/h"].of("restart")
    assert lab.clients[0].of("answered")[-1]["hosts"] == {"i0/h": 1}


def test_an_older_process_is_of_no_interest(lab: Lab) -> None:
    before = len(lab.core.events)
    report(lab, pid=99)
    assert len(lab.core.events) == before


@pytest.mark.parametrize(
    ("code", "asked", "guilty"), [(-6, False, 1), (-9, False, 0), (-6, True, 0)]
)
def test_what_was_being_compiled_is_named_and_blamed_for_what_it_did(
    lab: Lab, code: int, asked: bool, guilty: int
) -> None:
    """A signal from elsewhere is nobody's fault."""
    report(lab, code=code, asked=asked, compiling=[["key", "loss", "b.py", 5, "loss(x)"]])
    down, lost = lab.core.events[-2:]
    assert isinstance(down, em.HostDown)
    assert isinstance(lost, m.HostLost)
    assert [c.function for c in down.compiling] == ["key"] * guilty
    assert "while it compiled 'loss', at b.py:5" in lost.reason


def test_who_joins_is_down_no_more_and_a_worker_takes_its_hosts_along(lab: Lab) -> None:
    host = lab.rim.registry.hosts["i0/h"]
    report(lab)
    lab.rim.host_joined(host, lab.hosts["i0/h"])
    assert not lab.rim.registry.down
    report(lab, "given up")
    lab.rim.worker_left("w")
    assert not lab.rim.registry.down
    assert isinstance(lab.core.events[-1], em.HostForgotten)
    assert lab.clients[0].of("topology")[-1]["down"] == []


def test_nobody_reads_of_a_process_that_was_ended_on_purpose(lab: Lab) -> None:
    report(lab, asked=True)
    assert not lab.clients[0].of("output")
