"""Kept labs are found by name, the dead ones are forgotten, and a client comes back to its seat."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from pathways_lab.core import messages as m
from pathways_lab.core.errors import PathwaysError
from pathways_lab.core.messages import HandlePublished, Published, SlicesKept
from pathways_lab.core.slices.topology import SliceBinding, SliceRequest
from pathways_lab.runtime.cluster import attach
from pathways_lab.runtime.processes import kept_labs
from pathways_lab.transport.codec import pack
from tests.runtime.rim_kit import ONE, Lab, Peer, grants, submitted


@pytest.fixture
def records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of records that is nobody else's."""
    monkeypatch.setattr(kept_labs, "folder", lambda: tmp_path)
    return tmp_path


def ready(name: str, claimed: int, keeper: int = 1) -> None:
    control = attach.ControlAddress(f"unix:/tmp/{name}/client", b"k" * 32)
    attach.write_lab_file(kept_labs.record(name), control, keeper=keeper)
    assert kept_labs._is(claimed, kept_labs.record(name)), "the lock is on this file"


def test_one_lab_has_a_name_as_long_as_it_lives(records: Path) -> None:
    claimed = kept_labs.claim("mine")
    assert claimed is not None
    assert kept_labs.claim("mine") is None
    ready("mine", claimed)
    assert kept_labs.names() == ["mine"]
    assert attach.find_kept("mine").kept == "mine"
    assert kept_labs.record("mine").stat().st_mode & 0o777 == 0o600
    os.close(claimed)  # as its death does
    assert kept_labs.record("mine").exists()
    assert not kept_labs.is_there("mine")
    assert not kept_labs.record("mine").exists(), "who sees a stale record removes it"
    again = kept_labs.claim("mine")
    assert again is not None
    os.close(again)


def test_a_name_that_nobody_has_is_refused_with_those_that_are_there(records: Path) -> None:
    claimed = kept_labs.claim("mine")
    assert claimed is not None
    ready("mine", claimed)
    with pytest.raises(PathwaysError, match=r"kept as 'nme' .* kept are 'mine'") as error:
        attach.attach("nme")
    assert "pw.start(keep='nme')" in error.value.failure.remedy
    with pytest.raises(PathwaysError, match="'nme'"):
        kept_labs.stop("nme")
    os.close(claimed)
    with pytest.raises(PathwaysError, match="kept is none"):
        attach.attach("mine")


def test_a_file_of_that_name_is_a_lab_file(records: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(records)
    attach.write_lab_file("mine", attach.ControlAddress("unix:/tmp/x/client", b"k" * 32))
    assert attach.attach("mine").kept == ""


KEEPER = """
import json, signal, sys, time
from pathlib import Path
from pathways_lab.runtime.processes import kept_labs
kept_labs.folder = lambda: Path(sys.argv[1])
claimed = kept_labs.claim("mine")
signal.signal(signal.SIGTERM, lambda *_: sys.exit(kept_labs.give_up("mine", claimed)))
import os
kept_labs.record("mine").write_text(json.dumps({"keeper": os.getpid()}))
print("ready", flush=True)
time.sleep(600)
"""


def test_who_stops_a_lab_waits_for_its_keeper(records: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", KEEPER, str(records)], stdout=subprocess.PIPE, text=True
    ) as keeper:
        assert keeper.stdout is not None
        assert keeper.stdout.readline() == "ready\n"
        assert kept_labs.names() == ["mine"]
        kept_labs.stop("mine")
        assert keeper.wait(10) == 0
    assert not list(records.iterdir())


def test_a_keeper_that_does_not_end_is_named(
    records: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept_labs, "_END_SECONDS", 0.0)
    claimed = kept_labs.claim("mine")
    assert claimed is not None
    with pytest.raises(PathwaysError, match="has not ended") as error:
        kept_labs.stop("mine")
    assert error.value.failure.remedy == "wait until it has started"
    told: list[int] = []
    monkeypatch.setattr(os, "kill", lambda pid, _: told.append(pid))
    kept_labs.record("mine").write_text(json.dumps({"keeper": 7}))
    with pytest.raises(PathwaysError) as error:
        kept_labs.stop("mine")
    assert "process 7" in error.value.failure.remedy
    assert told == [7]
    os.close(claimed)


def test_the_folder_is_this_accounts_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path))
    path = kept_labs.folder()
    assert path.parent == tmp_path
    assert path.stat().st_mode & 0o777 == 0o700
    path.chmod(0o755)
    with pytest.raises(PathwaysError, match="not a folder that only this account can enter"):
        kept_labs.folder()


# --- the control plane's side -----------------------------------------------------------------


def test_a_client_comes_back_to_its_slices_with_its_own_invitation() -> None:
    lab = Lab()
    ann = lab.rim.new_client("ann", 9, holder=5)
    lab.rim.client_joined(ann, Peer())
    where = ann.number << 32 | 1
    binding = SliceBinding(where, "ann", "i0", (1,), ("x",), (("i0/h", 0),), "cpu")
    lab.core.answer = lambda event: [m.SliceBound("c", "ann", binding)]
    request = {"slice": where, "request": pack(SliceRequest((1,), ("x",)))}
    lab.rim.from_client("ann", "slice", request, [], 50)
    lab.core.answer = lambda event: [Published("c", "ann", "w", True)]
    keep = {"name": "w", "buffers": [], "id": 1, "keep": True}
    lab.rim.from_client("ann", "publish", keep, [], 9)
    assert isinstance(lab.core.events[-1], HandlePublished)
    assert lab.core.events[-1].keep
    assert lab.clients[0].of("topology")[-1]["kept"] == ["w"]
    lab.core.answer = lambda event: [SlicesKept("c", "ann", (where,))]
    lab.rim.client_left("ann", "killed")
    lab.core.answer = lambda event: []
    with pytest.raises(ValueError, match="kept for a client named 'ann'"):
        lab.rim.new_client("ann", 9, holder=6)
    assert lab.rim.new_client("ann", 9).inherited == {where}, "an owner decides for all"
    again, peer = lab.rim.new_client("ann", 9, holder=5), Peer()
    assert lab.rim.registry.bindings_of(again.inherited) == [pack(binding)]
    lab.rim.client_joined(again, peer)
    assert not lab.rim.registry.seats
    for name, refused in (("ann", False), ("kernel-1", True)):
        count = lab.rim.rejected
        lab.rim.from_client(name, "release-slice", {"slice": where}, [], 9)
        assert (lab.rim.rejected > count) is refused, f"it is {name}'s"
    # Handles of before are no handles of the new client, though their numbers look alike.
    lab.rim.from_client("ann", "drop", {"buffers": [where]}, [], 9)
    assert "does not belong" in str(peer.of("refused")[-1])


def test_runs_that_go_on_keep_their_program_and_arguments_and_the_lab_awake() -> None:
    lab = Lab()
    submitted(lab)
    lab.core.answer = lambda event: []
    for number in (11, 13):
        fields = {"plan": "plan", "inputs": [None], "outputs": [ONE + number], "arguments": {0: 0}}
        lab.say(1, "submit", b"argument", run=ONE + number + 1, **fields)
    registry, run = lab.rim.registry, ONE + 12
    lab.core.answer = lambda event: [SlicesKept("c", "kernel-1", (ONE,), (run,))]
    lab.rim.client_left("kernel-1", "killed")
    assert (registry.programs.keys(), registry.arguments.keys()) == ({run}, {run})
    assert registry.plans.keys() == {"plan"}
    assert lab.clients[1].of("topology")[-1]["going"] == {"kernel-1": 1}
    lab.now += 1000.0
    assert lab.rim.idle() == 0.0, "it is at work for a client that has left"
    lab.rim.look()
    lab.core.answer = lambda event: [grants(run)[0]]
    lab.rim.happened(m.PatienceEnded(0.0, "c"))
    op, fields, buffers = lab.hosts["i0/h"].sent[-1]
    assert (op, fields["run"], buffers) == ("grant", run, [b"argument"])
    lab.core.answer = lambda event: [m.RunEnded("c", "kernel-1", run, "finished", None)]
    lab.rim.happened(m.PatienceEnded(0.0, "c"))
    assert not registry.arguments
    assert registry.topology()["going"] == {}
    lab.now += 1000.0
    assert lab.rim.idle() > 999.0
