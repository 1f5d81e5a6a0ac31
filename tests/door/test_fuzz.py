"""A short form of ``python -m tests.door.fuzz``, and that it sees what it looks for."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from pathways_lab.door import arrays, functions, state
from pathways_lab.door.protocol import server
from pathways_lab.door.protocol.buffers import Buffers
from pathways_lab.door.protocol.status import INVALID, Status
from pathways_lab.door.session import Session
from pathways_lab.door.state import State
from tests.door import labs
from tests.door.fuzz import ROUND, Broken, Fuzz, fuzzing
from tests.door.modules import elsewhere


@pytest.fixture
def fuzz() -> Iterator[Fuzz]:
    with fuzzing(0, labs.made_up) as made:
        yield made


def test_wrong_requests_raise_nothing_and_nobody_else_notices(fuzz: Fuzz) -> None:
    for _ in range(4):
        fuzz.round()
    fuzz._look()
    evil = fuzz.evil
    assert fuzz.inputs == 4 * ROUND
    assert evil.answered.total() > ROUND // 2, "right ones are served"
    assert evil.refused.total() > ROUND // 2
    assert evil.turned_away > 20
    assert evil.unreadable


def test_every_request_that_is_served_is_made(fuzz: Fuzz) -> None:
    served = {name[1:] for name in dir(Session) if name.endswith("_request")}
    assert served == {*fuzz.evil.requests.kinds()}


def _ends(module: bytes, *_: Any) -> None:
    if module == b"fatal":
        os.abort()
    if module == b"wrong":
        raise Status(INVALID, "wrong")


def test_a_module_that_ends_its_reader_is_counted_and_ends_nobody_else() -> None:
    with elsewhere(_ends) as (load, _, fatal):
        for _ in range(2):
            with pytest.raises(Status, match="ends the process"):
                load(b"fatal", (0,), "cpu", None)
            with pytest.raises(Status, match="wrong"):
                load(b"wrong", (0,), "cpu", None)
            assert load(b"right", (0,), "cpu", None) is None
    assert fatal.count == 2


# --- what it finds --------------------------------------------------------------------------


def no_check_of_arrays(patch: pytest.MonkeyPatch) -> None:
    """Shapes and layouts are believed."""
    patch.setattr(state, "shard_bytes", lambda *_: 0)


def no_check_of_devices(patch: pytest.MonkeyPatch) -> None:
    """So are devices."""
    patch.setattr(State, "_check_devices", lambda *_: None)


def values_that_stay(patch: pytest.MonkeyPatch) -> None:
    """A session that ends forgets nothing."""
    kept: list[Any] = []
    patch.setattr(Session, "end", lambda self: kept.append(self))


def a_fault_in_a_request(patch: pytest.MonkeyPatch) -> None:
    """A method raises what nobody thought of."""

    def broken(*_: Any) -> None:
        raise ZeroDivisionError

    patch.setattr(functions.Functions, "_loaded_executable_metadata_request", broken)


def a_fault_in_what_is_waited_for(patch: pytest.MonkeyPatch) -> None:
    """The same, after the request was taken."""

    def broken(*_: Any) -> None:
        raise ZeroDivisionError

    patch.setattr(arrays, "strided", broken)


def two_answers(patch: pytest.MonkeyPatch) -> None:
    """One request is answered twice."""
    handle = Session.handle

    def twice(self: Session, kind: str, request: Any, reply: Any) -> None:
        handle(self, kind, request, reply)
        if kind == "is_array_deleted_request":
            handle(self, kind, request, reply)

    patch.setattr(Session, "handle", twice)


def no_secret(patch: pytest.MonkeyPatch) -> None:
    """Whoever comes is served."""
    patch.setattr(server.hmac, "compare_digest", lambda *_: True)


def bytes_of_others(patch: pytest.MonkeyPatch) -> None:
    """All sessions share the bytes beside them."""
    one = Buffers(lambda _: True)
    patch.setattr(Buffers, "end", lambda self: None)
    patch.setattr(server, "Buffers", lambda *_: one)


@pytest.mark.parametrize(
    "taken_out",
    [
        no_check_of_arrays, no_check_of_devices, values_that_stay, a_fault_in_a_request,
        a_fault_in_what_is_waited_for, two_answers, no_secret, bytes_of_others,
    ],
)  # fmt: skip
def test_what_is_taken_out_is_found(
    monkeypatch: pytest.MonkeyPatch, taken_out: Callable[[pytest.MonkeyPatch], None]
) -> None:
    monkeypatch.setattr("tests.door.fuzz.LEAVING", 0.5)

    def several(fuzz: Fuzz) -> None:
        for _ in range(20):
            fuzz.round()
            fuzz._look()

    with fuzzing(0, labs.made_up) as fuzz:
        taken_out(monkeypatch)
        with pytest.raises((Broken, AssertionError)):
            several(fuzz)
