"""The door's methods as a connection calls them, without sockets: bytes in, bytes out."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Sequence
from typing import Any

from pathways_lab.door.protocol import messages, server
from pathways_lab.door.protocol.messages import message
from pathways_lab.door.protocol.server import Door
from pathways_lab.door.protocol.status import Status

Metadata = Sequence[tuple[str, bytes]]
PATIENCE = 60.0
"""Seconds after which an answer will not come any more."""


class Refused(Exception):
    """The door has ended a call.  code: of gRPC."""

    def __init__(self, code: int, text: str) -> None:
        assert text, f"refused with {code} without a word"
        super().__init__(text)
        self.code = code


class Unanswered(AssertionError):
    """The door said nothing."""


class Call:
    """A call without a connection.  answers: what the door has said, and at last how it ended."""

    unread = 0

    def __init__(self, name: str, metadata: Metadata) -> None:
        self.method = f"/{messages.service_name()}/{name}"
        self.metadata = dict(metadata)
        self.answers: queue.SimpleQueue[bytes | tuple[int, str]] = queue.SimpleQueue()
        self.over = False

    def answer(self, data: bytes) -> None:
        if not self.over:
            self.answers.put(data)

    def end(self, code: int = 0, text: str = "") -> None:
        if not self.over:
            self.over = True
            self.answers.put((code, text))

    def read_on(self, seconds: float | None = None) -> bool:
        """Nothing comes while the door waits."""
        time.sleep(seconds or 0)
        return not self.over

    def wake(self) -> None:
        """It waits for nobody else."""


class Wire:
    """A door's methods by name."""

    def __init__(self, door: Door) -> None:
        self._door = door

    def ask(
        self, name: str, data: Any, metadata: Metadata = (), patience: float = PATIENCE
    ) -> list[Any]:
        """Call one of the methods that are not sessions.  data: of a request, or of several.

        All its answers.  Raises Refused; Unanswered, and gives the call up, when it has had
        *patience* (seconds).
        """
        call = Call(name, metadata)
        stream = Stream(self._door, call, messages.method_names()[name][1])
        stream.send(*([data] if isinstance(data, bytes) else data))
        stream.finish()
        try:
            return list(iter(lambda: stream.answer(patience), None))
        finally:
            stream.end()

    def session(self, metadata: Metadata) -> Stream:
        call = Call("IfrtSession", metadata)
        return Stream(self._door, call, messages.method_names()["IfrtSession"][1])


class Stream:
    """A call.  ended: by the door."""

    def __init__(self, door: Door, call: Any, answered: str) -> None:
        self.ended = False
        self._call = call
        self._answered = messages.classes()[answered]
        self._served: Any = None
        self._gone = False
        self._do(lambda: setattr(self, "_served", door.serve(call)))

    def send(self, *several: bytes) -> None:
        """These come, together."""
        self._do(lambda: self._served.messages(several))

    def finish(self) -> None:
        """The client has said all."""
        self._do(lambda: self._served.said_all())

    def answer(self, patience: float = PATIENCE) -> Any:
        """The next one; None when the door has ended the call.  Raises Refused or Unanswered."""
        try:
            said = self._call.answers.get(timeout=patience)
        except queue.Empty:
            raise Unanswered(self._call.method) from None
        if isinstance(said, bytes):
            return self._answered.FromString(said)
        self.ended = True
        self._leave()
        code, text = said
        if code:
            raise Refused(code, text)
        return None

    def end(self) -> None:
        """The client goes; what the door still answers is for nobody."""
        self._call.over = True
        self._leave()

    def _do(self, do: Callable[[], Any]) -> None:
        """Something of the client's comes, as a connection tells it."""
        if not self._call.over:
            try:
                do()
            except Status as error:
                self._call.end(error.code, str(error))

    def _leave(self) -> None:
        if not self._gone and self._served is not None:
            self._gone = True
            self._served.gone()


def of_secret(secret: bytes | None) -> Metadata:
    """The metadata of a session that says it."""
    told = message("GrpcIfrtSessionMetadata")()
    told.version.protocol_version, told.version.ifrt_serdes_version_number = 25, 3
    if secret is not None:
        told.initialization_data.attributes[server.SECRET].string_value = secret
    return [(server.SESSION, told.SerializeToString())]


def of_store(session: int, handle: int, size: int) -> Metadata:
    """The metadata of bytes for a session."""
    told = message("GrpcHostBufferStoreMetadata")
    made = told(session_id=session, handle=handle, buffer_size=size)
    return [(server.STORE, made.SerializeToString())]
