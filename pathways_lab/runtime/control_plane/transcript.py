"""Writing down what the core was told and what it answered, so that it can be asked again.

Problem: that a simulation, a test and a real cluster are driven by the same
decisions must be shown and not only said: the events of a real lab, given to a
fresh core, must lead to the very same commands.

How: a :class:`Transcript` stands between the rim and the core; each event goes
into a file, with the commands that it led to.  ``pw.start(transcript=path)`` has
one made.  :func:`read` reads the file, :func:`differences` asks again.

Rule for maintainers: a transcript begins with the first event of a control
plane or it is none, ends at a limit and says so, and never stops the core.

Paper: none.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import msgpack

from pathways_lab.core.control import Control
from pathways_lab.core.diagnosis.overdue import Overdue
from pathways_lab.core.errors import Failure
from pathways_lab.core.memory.accounts import Account
from pathways_lab.core.memory.holdings import Holdings
from pathways_lab.core.memory.quotas import Quota
from pathways_lab.core.messages import Command, Event, PolicyChosen, PolicySet
from pathways_lab.core.scheduling.policies import BuiltIn, RemotePolicy
from pathways_lab.runtime.control_plane.driver import Core
from pathways_lab.transport.codec import pack, unpack

LIMIT = 256 << 20
"""Bytes of a transcript."""

_OF_POLICIES = {cls.__name__: cls for cls in (PolicyChosen, PolicySet)}
"""Messages with a field that the codec carries only when it holds a policy of the core's."""


class Transcript:
    """A core whose events and commands are written to a file.

    path: only its owner can read it; what was there before is overwritten.
    limit: bytes, after which nothing more is written.
    """

    def __init__(self, core: Core, path: str | Path, limit: int = LIMIT) -> None:
        self._core = core
        self._left = limit
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        # Unbuffered: the process may end at any time.
        self._file: BinaryIO | None = os.fdopen(handle, "wb", buffering=0)

    def handle(self, event: Event) -> list[Command]:
        """See :class:`pathways_lab.core.control.Control`."""
        try:
            commands = self._core.handle(event)
        except Exception:
            self._end("the core failed")
            raise
        if self._file is not None:
            try:
                entry = msgpack.packb([_plain(event), [_plain(c) for c in commands]])
                self._left -= len(entry)
                if self._left < 0:
                    self._end("it has reached its limit")
                else:
                    self._file.write(entry)
            except (OSError, TypeError, ValueError) as error:
                self._end(f"{type(event).__name__} could not be written: {error}")
        return commands

    @property
    def due(self) -> float:
        """A question, which changes nothing: it is not written."""
        return self._core.due

    def overdue(self, seconds: float, now: float) -> Sequence[Overdue]:
        """A question as well."""
        return self._core.overdue(seconds, now)

    def accounts(self, now: float) -> Mapping[str, tuple[Account, Quota]]:
        """A question as well."""
        return self._core.accounts(now)

    def why_not_donated(self, client: str, number: int) -> tuple[str, str] | None:
        """A question as well."""
        return self._core.why_not_donated(client, number)

    def count_published(self, name: str) -> int:
        """A question as well."""
        return self._core.count_published(name)

    def holdings(self, client: str) -> Holdings:
        """A question as well."""
        return self._core.holdings(client)

    def _end(self, why: str) -> None:
        file, self._file = self._file, None
        if file is not None:
            file.write(msgpack.packb(why))
            file.close()


class IncompleteTranscript(ValueError):
    """A transcript that ended before its lab did."""


def read(path: str | Path) -> Iterator[tuple[Event, list[Command]]]:
    """The events of a transcript, each with the commands that it led to.

    An entry that was cut off by the end of the process is left out.
    Raises IncompleteTranscript, at its end, for one that stopped early.
    """
    with open(path, "rb") as file:
        for entry in msgpack.Unpacker(file, strict_map_key=False, max_buffer_size=LIMIT):
            if isinstance(entry, str):
                raise IncompleteTranscript(f"the transcript {Path(path).name} stopped: {entry}")
            event, commands = entry
            yield _message(Event, event), [_message(Command, c) for c in commands]


def differences(path: str | Path, core: Core | None = None) -> list[str]:
    """What a fresh core answers differently than the one of the transcript: [] when nothing."""
    core, found = core or Control(), []
    for number, (event, commands) in enumerate(read(path)):
        again = core.handle(event)
        if again != commands:
            found.append(f"event {number}, {event}: then {commands}, now {again}")
    return found


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
