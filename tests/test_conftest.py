"""The guards of the test run are themselves tested."""

from __future__ import annotations

import fcntl
import socket
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.alone import ROOM, machine, once_more, turns_of_files
from tests.runtime.processes import until


def test_a_connection_to_another_machine_fails_at_the_attempt():
    """192.0.2.1 is reserved for documentation: nothing can answer, and nothing is asked."""
    with socket.socket() as sock, pytest.raises(AssertionError, match=r"192\.0\.2\.1"):
        sock.connect(("192.0.2.1", 80))


def test_loopback_is_allowed():
    with socket.create_server(("127.0.0.1", 0)) as server:
        socket.create_connection(server.getsockname()).close()


def test_who_is_alone_waits_for_others_and_nobody_starts_past_who_waits(tmp_path, monkeypatch):
    for name in ("DOOR", "ROOM"):
        (tmp_path / name).touch()
        monkeypatch.setattr(f"tests.alone.{name}", tmp_path / name)
    events: list[str] = []

    def enter(name: str, alone: bool) -> threading.Thread:
        def run() -> None:
            with machine(alone=alone):
                events.append(name)

        thread = threading.Thread(target=run)
        thread.start()
        return thread

    with machine(alone=False):
        enter("another", alone=False).join(10)
        assert events == ["another"]
        waits = enter("alone", alone=True)
        until(lambda: locked(tmp_path / "DOOR"), 10)
        late = enter("late", alone=False)
        assert events == ["another"]
    waits.join(10)
    late.join(10)
    assert events == ["another", "alone", "late"]


def test_this_test_is_not_alone():
    """The rules of the run are in force: what is there is what a test without a mark gets."""
    assert locked(ROOM)
    assert not locked(ROOM, fcntl.LOCK_SH)


@pytest.mark.alone
def test_this_test_is_alone():
    assert locked(ROOM, fcntl.LOCK_SH)


def test_of_several_processes_none_is_left_over_with_what_takes_long():
    tests = [("a", set()), ("b", {"cluster"}), ("c", {"alone"}), ("b", set()), ("c", {"cluster"})]
    assert turns_of_files((Path(name), marks) for name, marks in tests) == {
        Path("b"): 0, Path("c"): 1, Path("a"): 2,
    }  # fmt: skip


def locked(path, how=fcntl.LOCK_EX):
    """Whether somebody holds a lock that forbids one of this kind."""
    with path.open() as file:
        try:
            fcntl.flock(file, how | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        fcntl.flock(file, fcntl.LOCK_UN)
    return False


def _failed(*names: str, marks: tuple[str, ...] = ("cluster",)) -> list[SimpleNamespace]:
    return [SimpleNamespace(nodeid=name, keywords=dict.fromkeys(marks, 1)) for name in names]


def test_few_tests_of_real_processes_may_run_once_more() -> None:
    assert once_more({"failed": _failed("a"), "error": _failed("b")}, 1) == ["a", "b"]
    assert once_more({"failed": _failed("a", marks=("browser",))}, 1) == ["a"]
    thread = "tests/runtime/test_lanes.py::test"
    assert once_more({"failed": _failed(thread, marks=())}, 1) == [thread]


def test_pure_tests_many_tests_and_runs_that_did_not_end_may_not() -> None:
    pure = _failed("b", marks=())
    assert once_more({"failed": [*_failed("a"), *pure]}, 1) == []
    assert once_more({"failed": _failed("a", "b", "c")}, 1) == []
    assert once_more({"failed": _failed("a")}, 3) == []
    assert once_more({}, 0) == []
