"""Writing down what the core was told and what it answered, so that it can be asked again.

Problem: that a simulation, a test and a real cluster are driven by the same
decisions must be shown and not only said: the events of a real lab, given to a
fresh core, must lead to the very same commands.

How: the rim gives each event and the commands that it led to to a
:class:`Transcript`, which writes them to a file.  ``pw.start(transcript=path)`` has
one made.  :func:`read` reads the file, :func:`differences` asks again.  Without one,
:class:`LastEvents` keeps the newest events in memory, and writes them to such a file
when the core fails.

Rule for maintainers: a transcript ends at a limit and says so, and never stops the core.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import socket
import tempfile
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import msgpack

from pathways_lab.core.control import Control
from pathways_lab.core.errors import Failure
from pathways_lab.core.messages import Command, Event, PolicyChosen, PolicySet
from pathways_lab.core.scheduling.policies import BuiltIn, RemotePolicy
from pathways_lab.transport.addresses import cache_folder
from pathways_lab.transport.codec import pack, unpack

LIMIT = 256 << 20
"""Bytes of a transcript."""
KEPT = 10_000
"""Events that are kept in memory, where no transcript is written."""
ENTRIES = 200_000
"""Entries of their lists that are kept at most: an event may name thousands of arrays."""

_OF_POLICIES = {cls.__name__: cls for cls in (PolicyChosen, PolicySet)}
"""Messages with a field that the codec carries only when it holds a policy of the core's."""


class LastEvents:
    """The newest events of a core, in memory."""

    def __init__(self) -> None:
        self._count = 0
        self._newest: deque[Event] = deque()
        self._entries = 0

    def decided(self, event: Event, commands: list[Command] | None) -> None:
        """The core has answered an event with *commands*; None: it failed."""
        newest = self._newest
        self._count += 1
        newest.append(event)
        self._entries += _listed(event)
        while len(newest) > KEPT or (self._entries > ENTRIES and len(newest) > 1):
            self._entries -= _listed(newest.popleft())

    def end(self, why: str) -> str:
        """Nothing more is decided.  Where the events lie now and how many, for people.

        Raises OSError when they cannot be written.
        """
        handle, path = tempfile.mkstemp(".transcript", "core-failed-", cache_folder())
        missing = self._count - len(self._newest)
        with os.fdopen(handle, "wb") as file:
            if missing:
                file.write(msgpack.packb(missing))
            for event in self._newest:
                file.write(msgpack.packb([_plain(event), None]))
            file.write(msgpack.packb(why))
        which = f"all {self._count:,} events"
        if missing:
            which = (
                f"the last {len(self._newest):,} of {self._count:,} events"
                " (pw.start(transcript=path) keeps all)"
            )
        return f"{path} on {socket.gethostname()}, {which}"


def _listed(event: Event) -> int:
    values = [getattr(event, name) for name in event.__dataclass_fields__]
    return sum([len(value) for value in values if isinstance(value, (tuple, list))])


class Transcript(LastEvents):
    """Writes events and commands to a file.

    path: only its owner can read it; what was there before is overwritten.
    limit: bytes, after which nothing more is written.
    """

    def __init__(self, path: str | Path, limit: int = LIMIT) -> None:
        super().__init__()
        self._path = path
        self._left = limit
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        # Unbuffered: the process may end at any time.
        self._file: BinaryIO | None = os.fdopen(handle, "wb", buffering=0)

    def decided(self, event: Event, commands: list[Command] | None) -> None:
        super().decided(event, commands)
        if self._file is None:
            return
        try:
            plain = None if commands is None else [_plain(c) for c in commands]
            entry = msgpack.packb([_plain(event), plain])
            self._left -= len(entry)
            if self._left < 0:
                self._stop("it has reached its limit")
            else:
                self._file.write(entry)
        except Exception as error:
            self._stop(f"{type(event).__name__} could not be written: {error}")

    def end(self, why: str) -> str:
        if self._file is None:
            return super().end(why)
        self._stop(why)
        return f"{self._path} on {socket.gethostname()}, all {self._count:,} events"

    def _stop(self, why: str) -> None:
        file, self._file = self._file, None
        if file is not None:
            with contextlib.suppress(OSError):  # the disk is full
                file.write(msgpack.packb(why))
            file.close()


class IncompleteTranscript(ValueError):
    """A transcript that ended before its lab did, or began after it."""


def read(path: str | Path) -> Iterator[tuple[Event, list[Command] | None]]:
    """The events of a transcript, each with the commands that it led to, as far as known.

    An entry that was cut off by the end of the process is left out.
    Raises IncompleteTranscript, at its end, for one that stopped early.
    """
    for entry in _entries(path):
        if isinstance(entry, str):
            raise IncompleteTranscript(f"the transcript {Path(path).name} stopped: {entry}")
        if not isinstance(entry, int):
            event, commands = entry
            told = None if commands is None else [_message(Command, c) for c in commands]
            yield _message(Event, event), told


def differences(path: str | Path, core: Control | None = None) -> list[str]:
    """The answers of a fresh core that differ from the transcript's: [] when none does.

    Raises what the core raises: also at the event on which it failed then, if it fails again.
    Raises IncompleteTranscript, before anything, for one without its first events.
    """
    for missing in itertools.islice(_entries(path), 1):
        if isinstance(missing, int):
            raise IncompleteTranscript(
                f"{missing:,} events before those in {Path(path).name} were not kept, so nothing"
                " can be decided again; read() gives those that were"
            )
    core, found = core or Control(), []
    for number, (event, commands) in enumerate(read(path)):
        again = core.handle(event)
        if commands is not None and again != commands:
            found.append(f"event {number}, {event}: then {commands}, now {again}")
    return found


def _entries(path: str | Path) -> Iterator[Any]:
    """How many events are missing, if any; [event, commands] of each; why no more follow, if so."""
    with open(path, "rb") as file:
        yield from msgpack.Unpacker(file, strict_map_key=False, max_buffer_size=LIMIT)


def _plain(message: Any) -> list[Any]:
    if type(message).__name__ not in _OF_POLICIES:
        return pack(message)  # type: ignore[no-any-return]
    values = (getattr(message, f.name) for f in dataclasses.fields(message))
    return [
        type(message).__name__,
        *(pack(v) if dataclasses.is_dataclass(v) else v for v in values),
    ]


def _message(kind: Any, plain: list[Any]) -> Any:
    cls = _OF_POLICIES.get(plain[0])
    if cls is None:
        return unpack(kind, plain)
    known = BuiltIn | RemotePolicy | Failure
    return cls(*(unpack(known, v) if isinstance(v, list) else v for v in plain[1:]))
