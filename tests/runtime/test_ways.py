"""Ways between machines: a closed one is named with both ends, and doors have known ports.

A peer that has taken a connection is busy: it is waited for, and called silent in the end.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from distributed import LocalCluster, Security

import pathways_lab as pw
from pathways_lab.core.errors import PathwaysError
from pathways_lab.runtime.cluster import scheduler_probe
from pathways_lab.runtime.cluster.attach import ControlAddress, attach, others, write_lab_file
from pathways_lab.runtime.cluster.scheduler_probe import (
    Unreached,
    Wait,
    at_once,
    knock,
    reach,
    unreached_of,
)
from pathways_lab.transport import handshake
from pathways_lab.transport.addresses import listening, parse, port_range
from pathways_lab.transport.reactor import Reactor


def test_a_door_that_nobody_opens_is_named_with_both_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as door:
        open_one = f"tcp://127.0.0.1:{(port := door.getsockname()[1])}"
        reach(open_one, "a host")
        reach("unix:/there", "a host of this machine")
    here = socket.gethostname()
    with pytest.raises(
        Unreached, match=f"{here} does not reach west/a at 127.0.0.1, port {port}: C"
    ):
        reach(open_one, "west/a")

    def silent(place: tuple[str, int], timeout: float) -> None:
        raise TimeoutError

    monkeypatch.setattr(socket, "create_connection", silent)
    first, second = unreached_of({"west/b": "tcp://[::1]:7", "west/a": open_one, "c": "unix:/x"})
    assert "does not reach west/a" in str(first)
    assert "west/b at ::1, port 7: nothing came back for 2 s" in str(second)
    assert "open the ports" in second.remedy


def test_a_door_takes_the_first_free_port_of_a_range() -> None:
    assert port_range("9000-9015") == port_range((9000, 9015)) == "9000-9015"
    assert port_range(9000) == "9000-9000"
    for wrong in ("", "9015-9000", (1, 2, 3), 0, 70000, "x", None, "1-x"):
        with pytest.raises(ValueError, match="ports are a first and a last one"):
            port_range(wrong)
    with pytest.raises(PathwaysError, match="ports is 'web'"):
        attach("tcp://127.0.0.1:1", ports="web")
    with listening("tcp://127.0.0.1:0") as taken:
        first = taken.getsockname()[1]
        with listening(f"tcp://127.0.0.1:{first}-{first + 20}") as second:
            assert first < second.getsockname()[1] <= first + 20
        with pytest.raises(OSError, match=f"none of the ports {first}-{first} of 127.0.0.1"):
            listening(f"tcp://127.0.0.1:{first}-{first}")


def test_a_peer_that_has_accepted_is_waited_for_until_the_limit() -> None:
    told: list[str] = []
    wait = Wait("10.0.0.7", 30.0, told.append)
    for seconds in range(30):
        wait.quiet(float(seconds))
    assert told == [
        f"waiting for 10.0.0.7, which has accepted and not answered for {seconds} s"
        for seconds in (2, 4, 8, 16)
    ]
    with pytest.raises(
        Unreached, match=r"10\.0\.0\.7 is silent: .* not answered for 30 s"
    ) as caught:
        wait.quiet(30.0)
    assert "timeout= waits longer" in caught.value.remedy


def test_machines_knock_at_few_others() -> None:
    def knocks(count: int) -> list[tuple[str, str]]:
        doors = {f"w{n}": (f"h{n:03}", f"tcp://10.0.0.{n}:1") for n in range(count)}
        names = {worker: name for worker, (name, _) in doors.items()}
        return [(names[w], other) for w, mine in others(doors).items() for other in mine]

    assert knocks(0) == knocks(1) == []
    for few in (2, 5, 9):
        assert len(set(knocks(few))) == few * (few - 1)
        assert all(one != other for one, other in knocks(few))
    many = knocks(200)
    assert len(many) == 8 * 200  # and not 200 for each
    assert set(Counter(other for _, other in many).values()) == {8}


def test_so_many_peers_are_asked_at_once_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler_probe, "_AT_ONCE", 2)
    pair, crowd = threading.Barrier(2), threading.Barrier(3)

    def ask(number: int) -> int:
        pair.wait(10.0)  # two at least
        with pytest.raises(threading.BrokenBarrierError):
            crowd.wait(0.1)  # and not three
        return number

    assert at_once(ask, range(4)) == list(range(4))


@contextlib.contextmanager
def late(address: str, seconds: float) -> Iterator[str]:
    """An address that accepts at once, and leads to another one after so many seconds."""
    _, place = parse(address)
    assert not isinstance(place, str)

    def carry(source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)

    def serve() -> None:
        begun = 0.0
        while True:
            try:
                near, _ = door.accept()
                begun = begun or time.monotonic()
                time.sleep(max(0.0, begun + seconds - time.monotonic()))
                far = socket.create_connection(place)
            except OSError:
                return
            for ends in (near, far), (far, near):
                threading.Thread(target=carry, args=ends, daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as door:
        threading.Thread(target=serve, daemon=True).start()
        yield f"tcp://127.0.0.1:{door.getsockname()[1]}"
        door.shutdown(socket.SHUT_RDWR)


def test_a_scheduler_that_answers_late_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler_probe, "REACH", 1.0)
    told: list[str] = []
    options = {"n_workers": 0, "processes": False, "dashboard_address": None}
    with (
        LocalCluster(protocol="tcp://", **options) as cluster,  # type: ignore[no-untyped-call]
        late(cluster.scheduler_address, 3.5) as address,
    ):
        began = time.monotonic()
        knock(address, Security(), 60.0, told.append)
        assert time.monotonic() - began > 3.0
    progress = [text for text in told if "127.0.0.1, which has accepted and not" in text]
    assert len(progress) >= 2, told
    assert told[-1].startswith("found")


def test_a_control_plane_that_answers_late_is_joined_and_a_mute_one_is_silent(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(handshake, "_QUIET", 0.05)
    key, waited = bytes(32), list[float]()
    there, here = (Reactor(name, lambda *_: None, lambda *_: None) for name in ("there", "here"))
    try:
        there.start()
        here.start()
        control = there.listen("tcp://127.0.0.1:0", key, {"name": "control"})
        with late(control, 0.5) as address:
            link = here.connect(address, key, {"name": "a"}, quiet=waited.append)
        assert link.peer["name"] == "control"
        assert max(waited) > 0.3
    finally:
        here.close()
        there.close()
    with socket.create_server(("127.0.0.1", 0)) as mute:
        address = f"tcp://127.0.0.1:{mute.getsockname()[1]}"
        write_lab_file(tmp_path / "mute.json", ControlAddress(address, key))
        with pytest.raises(
            PathwaysError, match=r"127\.0\.0\.1.* is silent: .*not answered for 0\.3"
        ):
            pw.connect(tmp_path / "mute.json", timeout=0.3)
    with pytest.raises(PathwaysError, match=r"control plane at 127\.0\.0\.1.*refused"):
        pw.connect(tmp_path / "mute.json", timeout=30.0)
