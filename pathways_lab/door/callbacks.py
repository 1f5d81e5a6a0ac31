"""Callbacks of a client program: called on hosts, run in the program's own process.

Problem: ``jax.pure_callback`` and its relatives take functions that close over the state of the
user's program, and print where the user looks.  So hosts must not run them.

How: the program keeps its functions by number and listens on a Unix socket in the private folder
of its door.  The code that travels to a host holds :class:`Remote` functions, which send arrays
there and wait for arrays.  Each thread of a host has a connection, and each connection a thread
of the program, so a slow function holds up nothing but its own gang.

Rule for maintainers: arrays travel as bytes with shape and type, and nothing is unpickled.  A
peer that does not know the secret, or says what is no call, loses its connection and holds up
nobody.
Hosts unpickle :class:`Remote`, so this module imports nothing but what every host has.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import threading
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import (
    Client,
    Connection,
    Listener,
    answer_challenge,
    deliver_challenge,
)
from typing import Any

import ml_dtypes  # noqa: F401  NumPy knows JAX's types by it
import numpy as np

_LONGEST = 8000
"""Characters of a traceback that travel."""


class CallbackError(RuntimeError):
    """A callback failed in its program; the text has the traceback from there."""


def _send(link: Connection, head: dict[str, Any], arrays: Sequence[np.ndarray[Any, Any]]) -> None:
    head["arrays"] = [[str(array.dtype), list(array.shape)] for array in arrays]
    link.send_bytes(json.dumps(head).encode())
    for array in arrays:
        link.send_bytes(np.ascontiguousarray(array).tobytes())


def _receive(link: Connection) -> tuple[dict[str, Any], list[np.ndarray[Any, Any]]]:
    head = json.loads(link.recv_bytes())
    arrays = [
        np.frombuffer(link.recv_bytes(), np.dtype(dtype)).reshape(shape)
        for dtype, shape in head["arrays"]
    ]
    return head, arrays


class Remote:
    """A function of the program, on a host.

    number: the program's own of it.  ordered: JAX gives it a token first, and it returns that.
    """

    def __init__(self, address: str, secret: bytes, number: int, ordered: bool) -> None:
        self._where = (address, secret)
        self._asks = {"call": number, "ordered": ordered}

    def __call__(self, *arguments: Any) -> tuple[Any, ...]:
        try:
            link = _link(*self._where)
            _send(link, dict(self._asks), [np.asarray(each) for each in arguments])
            head, results = _receive(link)
        except (OSError, EOFError) as error:
            _links.known = {}
            raise CallbackError(
                f"the program of this callback cannot be reached: {error!r}. It must run, on the"
                " machine of the host"
            ) from None
        if "error" in head:
            raise CallbackError(head["error"])
        return tuple(results)


class Dropped:
    """Has a process drop a function, on a host; one that has ended has dropped all of them."""

    def __init__(self, remote: Callable[..., tuple[Any, ...]]) -> None:
        self._remote = remote

    def __call__(self, turn: Any, number: Any) -> tuple[Any, ...]:
        try:
            return self._remote(turn, number)
        except CallbackError:
            return (turn,)


def raise_said(error: Any) -> Any:
    """Raise what a function has told of; for hosts."""
    if text := bytes(np.asarray(error)).rstrip(b"\0").decode(errors="replace"):
        raise CallbackError(text)
    return np.True_


_links = threading.local()


def _link(address: str, secret: bytes) -> Connection:
    """This thread's connection to a program."""
    known: dict[str, Connection] = _links.__dict__.setdefault("known", {})
    if address not in known:
        known[address] = Client(address, family="AF_UNIX", authkey=secret)
    return known[address]


class Callables:
    """The functions of this program that hosts may call.  known: by number."""

    def __init__(
        self, address: str, secret: bytes, known: dict[int, Callable[..., Any]] | None = None
    ) -> None:
        self._known = {} if known is None else known
        self._numbers = itertools.count(1)
        self._closed = False
        self._secret = secret
        self._listener = Listener(address, family="AF_UNIX", backlog=64)
        threading.Thread(target=self._accept, name="callbacks", daemon=True).start()

    def keep(self, function: Callable[..., Any]) -> int:
        """Let hosts call it; by which number."""
        number = next(self._numbers)
        self._known[number] = function
        return number

    def drop(self, number: int) -> None:
        """Nobody calls it any more."""
        self._known.pop(number, None)

    def close(self) -> None:
        """Listen no more."""
        self._closed = True
        self._listener.close()

    def _accept(self) -> None:
        while not self._closed:
            with contextlib.suppress(OSError):
                link = self._listener.accept()
                threading.Thread(
                    target=self._serve, args=(link,), name="callback", daemon=True
                ).start()

    def _serve(self, link: Connection) -> None:
        # Whatever is wrong with a connection ends it, and nothing else.
        with contextlib.suppress(Exception), link:
            deliver_challenge(link, self._secret)
            answer_challenge(link, self._secret)
            while True:
                head, arguments = _receive(link)
                try:
                    token = [None] if head["ordered"] else []
                    results = self._known[head["call"]](*token, *arguments)
                    results = [np.asarray(each) for each in results[len(token) :]]
                except BaseException:  # an exit of the function, too, is an error of the call
                    _send(link, {"error": traceback.format_exc()[-_LONGEST:]}, [])
                else:
                    _send(link, {}, results)
