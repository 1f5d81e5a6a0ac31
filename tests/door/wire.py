"""The door's methods as gRPC calls them, without sockets: bytes in, bytes out."""

from __future__ import annotations

import faulthandler
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from pathways_lab.door import messages, server
from pathways_lab.door.messages import message
from pathways_lab.door.server import Door

Metadata = Sequence[tuple[str, bytes]]
PATIENCE = 60.0
"""Seconds after which an answer will not come any more."""


class Refused(Exception):
    """The door has ended a call.  code: of gRPC."""

    def __init__(self, code: grpc.StatusCode, text: str) -> None:
        super().__init__(f"{code.name}: {text}")
        self.code = code


class Unanswered(AssertionError):
    """The door said nothing."""


class Context:
    """What a method is told of its call."""

    def __init__(self, metadata: Metadata) -> None:
        self._metadata = metadata
        self._over: list[Callable[[], None]] = []

    def invocation_metadata(self) -> Metadata:
        return self._metadata

    def add_callback(self, call: Callable[[], None]) -> bool:
        self._over.append(call)
        return True

    def abort(self, code: grpc.StatusCode, text: str) -> None:
        assert text, f"refused with {code} without a word"
        raise Refused(code, text)

    def end(self) -> None:
        """The call is over."""
        while self._over:
            self._over.pop()()


class Wire:
    """A door's methods by name."""

    def __init__(self, door: Door) -> None:
        found: Any = door._methods()
        self._methods = {
            name: found.service(SimpleNamespace(method=f"/{messages.service_name()}/{name}"))
            for name in messages.method_names()
        }

    def ask(self, name: str, data: Any, metadata: Metadata = ()) -> list[Any]:
        """Call one of the methods that are not sessions.  data: of a request, or of several.

        All its answers.  Raises Refused, as for bytes that are no request.
        """
        method, context = self._methods[name], Context(metadata)
        try:
            if method.request_streaming:
                return [
                    method.stream_unary(iter([self.read(name, part) for part in data]), context)
                ]
            request = self.read(name, data)
            if method.response_streaming:
                return list(method.unary_stream(request, context))
            return [method.unary_unary(request, context)]
        finally:
            context.end()

    def read(self, name: str, data: bytes) -> Any:
        """A request of a method; Raises Refused where gRPC ends the call."""
        try:
            return self._methods[name].request_deserializer(data)
        except DecodeError:
            raise Refused(grpc.StatusCode.INTERNAL, "Exception deserializing request!") from None

    def session(self, metadata: Metadata) -> Stream:
        return Stream(self, self._methods["IfrtSession"].stream_stream, metadata)


class Stream:
    """A session.  ended: by the door."""

    def __init__(self, wire: Wire, method: Any, metadata: Metadata) -> None:
        self.ended = False
        self._wire = wire
        self._asked: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._context = Context(metadata)
        self._answers: Iterator[Any] = method(self._requests(), self._context)

    def _requests(self) -> Iterator[Any]:
        while (data := self._asked.get()) is not None:
            yield self._wire.read("IfrtSession", data)

    def send(self, data: bytes) -> None:
        self._asked.put(data)

    def answer(self) -> Any:
        """The next one; None when the door has ended the session.  Raises Refused."""
        with _watch(self._hang_up):
            answer = next(self._answers, None)
        self.ended = self.ended or answer is None
        return answer

    def _hang_up(self) -> None:
        self._context.end()
        self._asked.put(None)

    def end(self) -> None:
        """The client goes; what the door still answers is for nobody."""
        self._hang_up()
        with _watch(lambda: os._exit(3)):
            for _ in self._answers:
                pass


class _watch:
    """Does something when a block takes too long."""

    _until: float | None = None
    _then: Callable[[], None]
    _thread: threading.Thread | None = None

    def __init__(self, then: Callable[[], None]) -> None:
        self._asked = then

    def __enter__(self) -> None:
        _watch._then, _watch._until = self._asked, time.monotonic() + PATIENCE
        if _watch._thread is None:
            _watch._thread = threading.Thread(target=_watch._look, daemon=True)
            _watch._thread.start()

    def __exit__(self, *_: object) -> None:
        _watch._until = None

    @staticmethod
    def _look() -> None:
        while True:
            time.sleep(0.5)
            until = _watch._until
            if until is not None and time.monotonic() > until:
                faulthandler.dump_traceback(sys.__stderr__)
                _watch._until = None
                _watch._then()


def of_secret(secret: bytes | None) -> Metadata:
    """The metadata of a session that says it."""
    told = message("GrpcIfrtSessionMetadata")()
    told.version.protocol_version, told.version.ifrt_serdes_version_number = 25, 3
    if secret is not None:
        told.initialization_data.attributes[server.SECRET].string_value = secret
    return [(server._SESSION, told.SerializeToString())]


def of_store(session: int, handle: int, size: int) -> Metadata:
    """The metadata of bytes for a session."""
    told = message("GrpcHostBufferStoreMetadata")
    made = told(session_id=session, handle=handle, buffer_size=size)
    return [(server._STORE, made.SerializeToString())]
