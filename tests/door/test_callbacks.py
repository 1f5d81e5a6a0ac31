"""Callables of a program and their calls from elsewhere, without a lab."""

from __future__ import annotations

import pickle
import socket
import threading
from collections.abc import Iterator
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from pathways_lab.door.callbacks import Callables, CallbackError, Dropped, Remote

SECRET = b"the secret"


@pytest.fixture(scope="module")
def callables(folder) -> Iterator[Callables]:
    made = Callables(str(folder / "callbacks"), SECRET)
    yield made
    made.close()


def remote(folder: Path, number: int, ordered: bool = False) -> Remote:
    return pickle.loads(pickle.dumps(Remote(str(folder / "callbacks"), SECRET, number, ordered)))


@pytest.mark.parametrize(
    "dtype", [np.float32, np.bool_, ml_dtypes.bfloat16, ml_dtypes.int4, ml_dtypes.int2]
)
def test_arrays_go_there_and_back(folder, callables, dtype):
    number = callables.keep(lambda x, y: (y, x))
    x, y = np.ones((2, 3), dtype), np.zeros((), np.int32)
    back = remote(folder, number)(x, y)
    assert [(each.dtype, each.shape) for each in back] == [(y.dtype, ()), (x.dtype, (2, 3))]
    assert (back[1] == x).all()


def test_a_token_is_nothing_and_stays_where_it_is(folder, callables):
    number = callables.keep(lambda token, x: (token, x + 1))
    assert remote(folder, number, ordered=True)(np.int32(1)) == (2,)


def test_an_error_has_the_traceback_and_the_next_call_works(folder, callables):
    def fails(x):
        raise SystemExit("not so")

    with pytest.raises(CallbackError, match="SystemExit: not so"):
        remote(folder, callables.keep(fails))(np.int32(1))
    assert remote(folder, callables.keep(lambda x: (x,)))(np.int32(1)) == (1,)


def test_a_dropped_function_is_an_error(folder, callables):
    number = callables.keep(lambda: ())
    callables.drop(number)
    with pytest.raises(CallbackError, match="KeyError"):
        remote(folder, number)()


def test_nobody_calls_without_the_secret(folder, callables):
    number = callables.keep(lambda: ())
    with pytest.raises(AuthenticationError):
        Client(str(folder / "callbacks"), family="AF_UNIX", authkey=b"another")
    assert remote(folder, number)() == ()


def test_who_says_nothing_holds_up_nobody(folder, callables):
    number = callables.keep(lambda: ())
    with socket.socket(socket.AF_UNIX) as silent:
        silent.connect(str(folder / "callbacks"))
        assert remote(folder, number)() == ()


@pytest.mark.parametrize(
    "said",
    [b"", b"no JSON", b"[]", b"{}", b'{"call": 1, "ordered": false, "arrays": [["f4,(2", [1]]]}',
     b'{"call": 1, "ordered": false, "arrays": [["float32", [-7, 3]]]}'],
)  # fmt: skip
def test_what_is_no_call_ends_its_connection_and_no_other(folder, callables, said, monkeypatch):
    raised: list[object] = []
    monkeypatch.setattr(threading, "excepthook", raised.append)
    number = callables.keep(lambda: ())
    with Client(str(folder / "callbacks"), family="AF_UNIX", authkey=SECRET) as link:
        link.send_bytes(said)
        with pytest.raises((EOFError, ConnectionError)):  # noqa: PT012  it may end before or after
            link.send_bytes(b"1234567")
            link.recv_bytes()
    assert remote(folder, number)() == ()
    assert not raised


def test_a_program_that_is_gone_is_an_error_that_says_so(folder):
    with pytest.raises(CallbackError, match="cannot be reached"):
        Remote(str(folder / "nobody"), SECRET, 1, False)()


def test_a_process_that_has_ended_has_dropped_its_functions(folder, callables):
    number = callables.keep(lambda turn, number: (turn, number))
    turn = np.True_
    assert Dropped(remote(folder, number))(turn, np.int32(3)) == (turn, 3)
    assert Dropped(Remote(str(folder / "nobody"), SECRET, 1, ordered=False))(turn, 3) == (turn,)
