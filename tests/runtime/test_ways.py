"""Ways between machines: a closed one is named with both ends, and doors have known ports."""

from __future__ import annotations

import socket

import pytest

from pathways_lab.core.errors import PathwaysError
from pathways_lab.runtime.cluster.attach import attach
from pathways_lab.runtime.cluster.scheduler_probe import Unreached, reach, unreached_of
from pathways_lab.transport.addresses import listening, port_range


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
