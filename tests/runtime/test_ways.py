"""A way between two machines that is closed is called that, with both ends."""

from __future__ import annotations

import socket

import pytest

from pathways_lab.runtime.cluster.scheduler_probe import Unreached, reach, unreached_of


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
