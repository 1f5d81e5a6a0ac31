"""A fork of the kernel: it can use nothing of the lab, and disturbs nobody who does."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable
from unittest.mock import Mock

import numpy as np
import pytest

import pathways_lab as pw
from pathways_lab.client.lab.lab import Lab
from pathways_lab.runtime.cluster.attach import ControlAddress
from pathways_lab.transport.link import Link
from tests.client.kit import KEY, FakeLab

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="processes do not fork here"),
    # The warnings of Python and JAX are about threads that would be missed: nothing here waits.
    pytest.mark.filterwarnings("ignore:.*fork.*"),
]
X = np.arange(4, dtype=np.float32)


def in_a_fork(*doings: Callable[[], object]) -> list[str]:
    """What each of these says, or raises, in a forked process."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        threading.Timer(5.0, os._exit, (1,)).start()  # what hangs ends, and says nothing
        for doing in doings:
            try:
                said = repr(doing())
            except BaseException as error:
                said = f"{type(error).__name__}: {error}"
            os.write(writing, (said.replace("\n", " ") + "\n").encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as told:
        said = told.read().splitlines()
    os.waitpid(child, 0)
    return said


def test_a_fork_can_use_nothing_and_says_so_at_once(fake: FakeLab) -> None:
    f = pw.jit(lambda x: x + 1, on=fake.slice(2))
    ready = f(X).block_until_ready()
    fake.held = True
    pending = f(X)
    said = in_a_fork(
        lambda: f(X), lambda: f(ready), ready.result, pending.result, lambda: fake.slice(2),
        lambda: f(np.zeros(100_000, np.float32)),
    )  # fmt: skip
    mine = f"this lab belongs to process {os.getpid()}, and process "
    assert len(said) == 6
    assert all(entry.startswith(f"PathwaysError: {mine}") for entry in said)
    fake.held = False
    fake.release()
    assert pending.result().tolist() == [1, 2, 3, 4]


def test_a_fork_disturbs_nobody(fake: FakeLab) -> None:
    f = pw.jit(lambda x: x + 1, on=fake.slice(2))
    handles = [f(X).block_until_ready() for _ in range(3)]
    # What cannot be closed keeps no other open.
    sock = Mock(**{"family": socket.AF_UNIX, "close.side_effect": OSError})
    broken = [Link(Mock(), sock, "broken", {}, Mock()) for _ in range(8)]
    fake.settle()
    before = list(fake.messages)

    def let_go() -> set[int]:
        handles.clear()
        fake.connection.flush(drops=True)
        return {link.sock.fileno() for link in fake.connection.reactor.links}

    assert in_a_fork(let_go) == ["{-1}"]  # all closed: the lab sees when the parent is gone
    assert len(broken) == 8
    fake.settle()
    assert fake.messages == before
    assert fake.connection.link.closed is None
    assert f(handles[0]).result().tolist() == [2, 3, 4, 5]


def test_a_lab_is_not_closed_by_a_fork_that_ends(fake: FakeLab) -> None:
    with Lab(ControlAddress(fake.address, KEY)) as lab:
        assert in_a_fork(lab.close, lambda: lab.closed) == ["None", "True"]
        assert not lab.closed
