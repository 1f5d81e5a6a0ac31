"""The control plane over real sockets: two doors, one reactor, a scripted core."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pathways_lab.core import messages as m
from pathways_lab.core.diagnosis.overdue import Overdue
from pathways_lab.core.slices.topology import SliceBinding, SliceRequest
from pathways_lab.runtime.control_plane import process
from pathways_lab.runtime.control_plane.process import ControlPlane, Keys
from pathways_lab.transport import auth, record_encoding
from pathways_lab.transport.auth import AuthenticationError, new_key
from pathways_lab.transport.codec import pack
from pathways_lab.transport.handshake import Refused
from pathways_lab.transport.link import Link
from pathways_lab.transport.reactor import Reactor
from pathways_lab.transport.tls import client_context, server_context
from tests.runtime.processes import until
from tests.runtime.test_tls import fresh_pems

HOST = {
    "role": "host", "name": "i0/h", "island": "i0", "devices": 2, "kind": "cpu", "memory": 10,
    "pid": 3, "worker_pid": 4, "data_address": "unix:/nowhere", "emulated": True,
}  # fmt: skip
CLIENT = {"role": "client", "name": "", "pid": 1}


class Binder:
    """A core that binds every slice to the first devices."""

    def __init__(self) -> None:
        self.events: list[m.Event] = []
        self.due = math.inf

    def overdue(self, seconds: float, now: float) -> list[Overdue]:
        return []

    def handle(self, event: m.Event) -> list[m.Command]:
        self.events.append(event)
        if isinstance(event, m.SliceRequested):
            request = event.request
            devices = tuple(("i0/h", d) for d in range(request.devices))
            return [
                m.SliceBound(
                    event.cause,
                    event.client,
                    SliceBinding(
                        event.slice, event.client, "i0", request.shape, request.axes, devices, "cpu"
                    ),
                )
            ]
        return []


class End:
    """A process at the other end: remembers messages by op."""

    def __init__(self) -> None:
        self.got: list[tuple[str, dict[str, Any]]] = []
        self.closed: list[str] = []
        self.reactor = Reactor(
            "end",
            lambda link, op, fields, buffers: self.got.append((op, fields)),
            lambda link, reason: self.closed.append(reason),
        )
        self.reactor.start()

    def of(self, op: str) -> list[dict[str, Any]]:
        return [fields for name, fields in self.got if name == op]


class Lab:
    def __init__(self, folder: Path, door: str = "", pems: dict[str, str] | None = None) -> None:
        self.core = Binder()
        self.keys = Keys(new_key(), new_key())
        context = server_context(pems, invited=True)
        self.plane = ControlPlane(self.core, self.keys, door or f"unix:{folder}/c", folder, context)
        self.plane.reactor.start()
        self.ends: list[End] = []

    def connect(self, **hello: Any) -> tuple[End, Link]:
        end = End()
        self.ends.append(end)
        holder = auth.HOSTS if hello["role"] == "host" else 0
        return end, end.reactor.connect(self.plane.address, self.key(holder), hello, holder=holder)

    def key(self, holder: int) -> bytes:
        return auth.key_of(self.keys.door, holder)

    def close(self) -> None:
        self.plane.close("over")
        for end in self.ends:
            end.reactor.close()


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    lab = Lab(tmp_path)
    yield lab
    lab.close()


def test_a_client_finds_hosts_binds_a_slice_and_watches(lab: Lab) -> None:
    host, _ = lab.connect(**HOST)
    client, link = lab.connect(role="client", name="", pid=1)
    assert (link.peer["client"], link.peer["number"]) == ("kernel-1", 1)
    assert link.peer["data_key"] == auth.key_of(lab.keys.data, 1) != lab.keys.data
    assert link.peer["emulated"] is True
    assert link.peer["topology"]["islands"][0]["hosts"][0]["name"] == "i0/h"
    link.send("watch")
    link.send("slice", {"slice": 1 << 32, "request": pack(SliceRequest((2,), ("x",)))})
    until(lambda: client.of("slice-bound") and host.of("bind"))
    until(lambda: len(client.of("records")) == 2)  # what was, then what came
    records = [r for f in client.of("records") for r in record_encoding.read(f["records"])]
    kinds = [r.kind for r in records]  # type: ignore[union-attr]
    assert kinds == ["host-joined", "client-joined", "slice-bound"]


def test_a_run_with_thousands_of_arguments_comes_through(lab: Lab) -> None:
    client, link = lab.connect(role="client", name="", pid=1)
    one, many = 1 << 32, 5000
    fields = {
        "run": one, "plan": "p", "inputs": [None] * many, "outputs": [one],
        "arguments": {n: n for n in range(many)},
    }  # fmt: skip
    link.send("submit", fields, [b"1234"] * many)
    until(lambda: client.closed or any(isinstance(e, m.RunSubmitted) for e in lab.core.events))
    assert not client.closed


def test_malformed_messages_close_only_the_link_of_who_sent_them(lab: Lab) -> None:
    other, host = lab.connect(**HOST)[0], lab.connect(role="client", name="other", pid=1)[0]
    for hello, op in (
        ({"role": "client", "name": "evil", "pid": 1}, "report"),
        ({"role": "client", "name": "evil", "pid": 1}, "stuck"),
        ({"role": "observer"}, "watch"),
    ):
        evil, link = lab.connect(**hello)
        link.send(op, {"seconds": 1.0})
        until(lambda evil=evil: evil.closed)
    assert not other.closed
    assert not host.closed


def test_a_client_key_makes_no_host(lab: Lab) -> None:
    end = End()
    lab.ends.append(end)
    connect, door, invited = end.reactor.connect, lab.plane.address, 7
    key = lab.key(invited)
    with pytest.raises(AuthenticationError):
        connect(door, key, HOST, holder=auth.HOSTS)
    with pytest.raises(Refused, match="for clients"):
        connect(door, key, HOST, holder=invited)
    with pytest.raises(Refused, match="for clients"):
        connect(door, lab.keys.door, HOST)
    with pytest.raises(Refused, match="for hosts"):
        connect(door, lab.key(auth.HOSTS), CLIENT, holder=auth.HOSTS)
    with pytest.raises(Refused, match=r"HostSeen\.island is missing"):
        lab.connect(role="host", name="x")
    assert not lab.core.events


def test_a_host_shows_a_certificate_and_an_invited_client_none(tmp_path: Path) -> None:
    """Both come to one door, where the system asks nobody for one."""
    pems = fresh_pems()
    lab, end = Lab(tmp_path, "tcp://127.0.0.1:0", pems), End()
    try:
        lab.ends.append(end)
        connect, door, key = end.reactor.connect, lab.plane.address, lab.key
        bare, full = client_context({"ca": pems["ca"]}), client_context(pems)
        assert connect(door, key(7), CLIENT, context=bare, holder=7).peer["client"] == "kernel-1"
        for hello in (HOST, {**HOST, "role": "stream"}):
            with pytest.raises(Refused, match="a host shows a certificate"):
                connect(door, key(auth.HOSTS), hello, context=bare, holder=auth.HOSTS)
        assert connect(door, key(auth.HOSTS), HOST, context=full, holder=auth.HOSTS).certified
        with pytest.raises(OSError):
            connect(door, key(auth.HOSTS), HOST, 1.0, holder=auth.HOSTS)  # in the clear
    finally:
        lab.close()


def test_leaving_and_crashing_become_events(lab: Lab) -> None:
    _, host = lab.connect(**HOST)
    _, client = lab.connect(role="client", name="notebook", pid=1)
    client.close()
    until(lambda: any(isinstance(e, m.ClientLeft) for e in lab.core.events))
    watcher, link = lab.connect(role="client", name="other", pid=2)
    assert link.peer["client"] == "other"
    with pytest.raises(Refused, match="connected already"):
        lab.connect(role="client", name="other", pid=3)
    host.send("report", {"ended": "nonsense"})
    until(lambda: watcher.of("topology") and not watcher.of("topology")[-1]["islands"])
    lost = [e for e in lab.core.events if isinstance(e, m.HostLost)]
    assert "malformed message 'report'" in lost[0].reason
    assert watcher.of("topology")[-1]["clients"] == ["other"]


def test_two_workers_that_come_to_one_name_do_not_replace_each_other(lab: Lab) -> None:
    first, link = lab.connect(**HOST, worker="7")
    with pytest.raises(Refused, match="workers '7' and 'host7' are both to be the host 'i0/h'"):
        lab.connect(**HOST, worker="host7")
    assert not first.closed
    link.close()
    until(lambda: any(isinstance(e, m.HostLost) for e in lab.core.events))
    lab.connect(**HOST, worker="host7")


def test_a_new_process_of_the_same_host_replaces_the_old(lab: Lab) -> None:
    first, _ = lab.connect(**HOST)
    lab.connect(**{**HOST, "pid": 99})
    until(lambda: first.closed)
    kinds = [type(e) for e in lab.core.events]
    assert kinds == [m.HostJoined, m.HostLost, m.HostJoined]
    assert lab.plane.rim.registry.hosts["i0/h"].pid == 99


def test_clients_hear_that_the_lab_closes(lab: Lab) -> None:
    client, _ = lab.connect(role="client", name="notebook", pid=1)
    lab.plane.close("the lab was closed")
    until(lambda: client.closed)
    assert client.of("closing") == [{"reason": "the lab was closed"}]


def test_a_core_that_raises_ends_the_lab(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    host, _ = lab.connect(**HOST)
    other, _ = lab.connect(role="client", name="other", pid=1)
    client, link = lab.connect(role="client", name="notebook", pid=1)

    def broken(event: m.Event) -> list[m.Command]:
        raise AssertionError("a bug")

    until(lambda: client.of("topology"))
    monkeypatch.setattr(lab.core, "handle", broken)
    link.send("slice", {"slice": 2 << 32, "request": pack(SliceRequest((2,), ("x",)))})
    until(lambda: client.closed and other.closed and host.closed)
    for end in (client, other):
        (told,) = end.of("closing")
        assert "the control plane failed on SliceRequested (notebook:1)" in told["reason"]
        assert str(tmp_path) in told["remedy"]
    assert {op for op, _ in host.got} == {"peers", "clients"}
    assert lab.plane.reactor._done.wait(10)


def test_a_host_that_is_gone_is_lost_with_the_word_of_its_worker(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The link closes first; whoever waits for it no longer is told that and no more."""
    monkeypatch.setattr(process, "_WORD_SECONDS", 60.0)

    def lost() -> list[str]:
        return [e.reason for e in lab.core.events if isinstance(e, m.HostLost)]

    who = {"name": "i0/h", "island": "i0", "worker_name": "w", "pid": 3}
    how = {"state": "died", "code": -11, "reason": "was ended by signal 11", "words": ""}
    word = {**who, **how, "asked": False, "compiling": []}
    _, link = lab.connect(**HOST, worker="w")
    link.close()
    until(lambda: "i0/h" in lab.plane._closing)
    assert not lost()
    lab.plane.host_down(word)
    until(lambda: lost() == ["its device process was ended by signal 11"])
    _, link = lab.connect(**HOST, worker="w")
    until(lambda: not lab.plane.rim.registry.down)
    before = lab.plane._closing["i0/h"]
    link.close()
    until(lambda: lab.plane._closing["i0/h"] is not before)
    lab.plane.worker_removed("w", "Dask removed it")
    until(lambda: len(lost()) == 2)


def test_a_host_whose_job_was_killed_is_lost_for_its_reason(lab: Lab) -> None:
    asked: list[str] = []

    def why(job: str) -> str:
        asked.append(job)
        return "its job 17 was killed" if job == "17" else ""

    lab.plane._why_ended = why
    for job, told in (("17", "its job 17 was killed"), ("18", "i0/h closed the connection")):
        host, _ = lab.connect(**HOST, worker="w", job=job)
        until(lambda: "i0/h" in lab.plane.rim.peers.hosts)
        host.reactor.close()
        # Dask hears of it at the same time, and knows less.
        lab.plane.worker_removed("w", "Dask removed the worker w")
        until(lambda: "i0/h" not in lab.plane.rim.peers.hosts)
        lost = [event for event in lab.core.events if isinstance(event, m.HostLost)]
        assert lost[-1].reason == told
    assert asked == ["17", "18"]
