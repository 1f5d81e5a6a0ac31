"""Laws: after an exception in the core nothing reaches a host, and every client learns why."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from pathways_lab.core.admin import Decisions
from pathways_lab.core.control import Control
from pathways_lab.core.memory.ledger import Ledger
from pathways_lab.core.messages import Event, RunSubmitted
from pathways_lab.core.scheduling.grants import Grants
from pathways_lab.runtime.control_plane import effects
from pathways_lab.runtime.control_plane.driver import Rim
from pathways_lab.runtime.control_plane.transcript import (
    IncompleteTranscript,
    Transcript,
    differences,
    read,
)
from tests.runtime import fuzz_lab
from tests.runtime.rim_kit import Peer


class Bug(Exception):
    """Nobody expected it."""


def failing_after(cls: type, name: str) -> Callable[[pytest.MonkeyPatch], None]:
    """A method that does its work and raises then."""
    whole = getattr(cls, name)

    def work(*args: Any, **named: Any) -> None:
        whole(*args, **named)
        raise Bug

    return lambda patch: patch.setattr(cls, name, work)


def failing_before(cls: type, name: str) -> Callable[[pytest.MonkeyPatch], None]:
    """A method that raises at once."""

    def work(*_: Any, **__: Any) -> None:
        raise Bug

    return lambda patch: patch.setattr(cls, name, work)


class Lab(fuzz_lab.Lab):
    """A real core with a rim, and neighbours that only listen from now on."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        patch.setattr(fuzz_lab.Watched, "handle", Control.handle)
        super().__init__(random.Random(1))
        self.ended: list[str] = []
        self.rim._ended = self.ended.append
        self.clients = {name: Peer() for name in self.rim.peers.clients}
        self.rim.peers.clients = {**self.clients}
        self.listening = {name: Peer() for name in self.hosts}
        self.rim.peers.hosts = {**self.listening}

    def submit(self, run: int) -> None:
        number = self.good[0].number
        fields = fuzz_lab.run_of(number, number << 32 | run, number << 32 | 1 << 20 | run)
        self.say("ann", "submit", fields, [b"1234"])

    def heard(self) -> list[str]:
        """All that hosts were told since."""
        return [op for peer in self.listening.values() for op, *_ in peer.sent]


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Lab:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return Lab(monkeypatch)


STRIKES = {
    "before anything": failing_before(Grants, "submit"),
    "before memory is reserved": failing_before(Ledger, "reserve"),
    "amid the grant": failing_before(Ledger, "advance"),
    "after the grant": failing_after(Grants, "_grant_window"),
    "after everything": failing_before(Decisions, "tell_policy"),
}


@pytest.mark.parametrize("inject", STRIKES.values(), ids=STRIKES)
def test_nothing_that_was_half_done_is_granted(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, inject: Callable[[pytest.MonkeyPatch], None]
) -> None:
    with monkeypatch.context() as patch:
        inject(patch)
        lab.submit(2001)
    # The core would do all of this, and more, were it asked.
    lab.submit(2002)
    lab.say("bob", "cancel", {"runs": []})
    lab.rim.host_lost("i1/h0", "gone")
    lab.rim.look()
    assert lab.heard() == []
    assert len(lab.ended) == 1
    for peer in lab.clients.values():
        ((op, fields, _),) = peer.sent
        assert op == "closing"
        assert "failed on RunSubmitted (ann:" in fields["reason"]
        assert "Bug" in fields["reason"]
        assert "start another lab" in fields["remedy"]
        assert "raise Bug" in fields["details"]


def test_without_a_bug_hosts_hear_of_the_run(lab: Lab) -> None:
    """... so that silence above says something."""
    lab.submit(2001)
    assert lab.heard() == ["grant"]
    assert not lab.rim.failed


def test_commands_that_cannot_be_carried_out_end_the_lab_too(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some hosts may have heard of them, and some not."""
    monkeypatch.delattr(effects, "pack_fields")
    lab.submit(2001)
    assert lab.rim.failed
    assert lab.heard() == []
    assert [op for op, *_ in lab.clients["bob"].sent] == ["closing"]


def test_the_reason_is_told_once(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        STRIKES["amid the grant"](patch)
        lab.submit(2001)
    lab.rim.closing("the lab was closed")
    assert [len(peer.sent) for peer in lab.clients.values()] == [1, 1, 1]


def told_path(lab: Lab) -> Path:
    """The file that clients are told of."""
    remedy = lab.clients["ann"].of("closing")[0]["remedy"]
    return Path(remedy.partition("report the bug with ")[2].split(" on ")[0])


@pytest.mark.parametrize("written", [False, True], ids=["last events", "transcript"])
def test_the_file_that_users_are_told_of_leads_to_the_bug_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: bool
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = tmp_path / "transcript"
    if written:
        monkeypatch.setattr(fuzz_lab, "Rim", partial(Rim, record=Transcript(path)))
    lab = Lab(monkeypatch)
    lab.submit(2001)
    with monkeypatch.context() as patch:
        STRIKES["amid the grant"](patch)
        lab.submit(2002)
        lab.submit(2003)
        found = told_path(lab)
        assert (found == path) is written
        with pytest.raises(Bug):
            differences(found)
    # Where the bug has been mended, it says so.
    with pytest.raises(IncompleteTranscript, match=r"failed on RunSubmitted(.|\n)*raise Bug"):
        differences(found)
    events: list[Event] = []
    with pytest.raises(IncompleteTranscript):
        events.extend(event for event, _ in read(found))
    assert isinstance(events[-1], RunSubmitted)
    assert events[-1].run & 0xFFFF == 2002


def test_a_cache_that_cannot_be_written_hides_no_reason(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError("no space left")

    monkeypatch.setattr("tempfile.mkstemp", full)
    STRIKES["amid the grant"](monkeypatch)
    lab.submit(2001)
    (fields,) = lab.clients["bob"].of("closing")
    assert "failed on RunSubmitted" in fields["reason"]
    assert "no space left" in fields["remedy"]
