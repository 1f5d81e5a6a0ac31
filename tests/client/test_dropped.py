"""The kernel forgets a run when it ends and a value when its handle goes, whatever else happens."""

from __future__ import annotations

import threading
from typing import Any

import jax
import numpy as np
import pytest

import pathways_lab as pw
from pathways_lab.client.session.pending import Watch
from tests.client.kit import FakeLab
from tests.runtime.processes import until

V = np.arange(1, 9, dtype=np.float32)


@pytest.fixture
def double(fake: FakeLab) -> Any:
    return pw.jit(lambda x: x * 2, on=fake.slice(4))


def test_a_handle_that_goes_while_its_run_ends_is_forgotten_with_the_run(
    fake: FakeLab, double: Any
) -> None:
    """In one thread the handle goes, and in another one the end of the run is heard."""

    class Goes(dict[int, Any]):
        """What is looked at is gone right afterwards."""

        def __contains__(self, key: object) -> bool:
            found = super().__contains__(key)
            self.pop(key, None)  # type: ignore[call-overload]
            return found

    connection = fake.connection
    double(V).block_until_ready()
    fake.held = True
    handle = double(V)
    run = connection.maker(handle.buffer)
    assert run is not None
    connection._buffers = Goes(connection._buffers)
    fake.held = False
    fake.release()
    until(lambda: not connection.runs)
    assert run.done
    assert handle.state == "ready"


def test_a_tick_that_fails_is_followed_by_others(
    fake: FakeLab, double: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They tell which handles are gone when nothing else is sent."""
    registered, failed = fake.connection.registered, threading.Event()
    monkeypatch.setattr(registered, "tidy", lambda: 1 / 0 if failed.set() is None else [])
    assert failed.wait(10)
    monkeypatch.undo()
    identity = double(V).block_until_ready().buffer_id
    until(lambda: any(identity in drop["buffers"] for drop in fake.of("drop")), 10)


def test_handles_of_a_donated_bundle_go_without_a_word(
    fake: FakeLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hundreds of them go with each step of a training."""
    step = pw.jit(lambda tree: [x + 1 for x in tree], on=fake.slice(4), donate_argnums=0)
    tree = [V] * 24
    for _ in range(4):
        tree = step(tree)
    assert tree[0]._bundle is tree[-1]._bundle is not None
    jax.block_until_ready(tree)
    fake.connection.flush(drops=True)
    monkeypatch.setattr(fake.connection, "take_dropped", list)  # nobody takes them away
    tree = step(tree)
    assert not [each for each in fake.connection._dropped if isinstance(each, Watch)]
    del tree
    assert len([each for each in fake.connection._dropped if isinstance(each, Watch)]) == 24
