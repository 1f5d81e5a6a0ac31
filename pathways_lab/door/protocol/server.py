"""The methods of a door: sessions, bytes beside them, and the secret.

Problem: JAX's client aborts its process on an answer that is wrong, and on a session that ends.
So each answer is checked before it leaves, each request gets one, and nothing is served to
whoever does not know the secret.

How: one session is a two-way call, whose requests are taken in order; answers leave in any order.
A request that does not parse ends its session.

Rule for maintainers: nothing about arrays here.  A handler answers through *reply*, once, now or
later and in any thread; what it raises is an error status that names the request.
"""

from __future__ import annotations

import hmac
import os
import socket
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from google.protobuf.message import DecodeError

from pathways_lab.door.protocol import messages
from pathways_lab.door.protocol.buffers import ROOM, Buffers, Found
from pathways_lab.door.protocol.http2 import Call, Connection, Served, log
from pathways_lab.door.protocol.messages import message
from pathways_lab.door.protocol.status import (
    DATA_LOSS,
    EXHAUSTED,
    FAILED_PRECONDITION,
    INTERNAL,
    INVALID,
    NOT_FOUND,
    UNAUTHENTICATED,
    UNIMPLEMENTED,
    Status,
)

VERSIONS = range(16, 26)
"""Versions of the protocol that this server knows."""
SERDES = range(4)
"""Versions of what messages carry as bytes."""
SECRET = "pathways-lab-secret"
STORE = "ifrt-proxy-grpc-host-buffer-store-metadata-bin"
SESSION = "ifrt-proxy-grpc-ifrt-session-metadata-bin"
_CHUNK = 1 << 20
_CONNECTIONS = 64
_SESSIONS = 8
"""Most sessions at once: a program has one."""
_UNREAD = 10_000
"""Most answers that wait for a client to read them: until then it is not served further."""

Reply = Callable[[Any], None]


class Handler(Protocol):
    """A session's requests are served by this."""

    def handle(self, kind: str, request: Any, reply: Reply) -> None:
        """Serve one request; reply(answer or Status) once, now or later."""

    def end(self) -> None:
        """The client is gone."""


_KNOWN = {"protocol_version": VERSIONS, "ifrt_serdes_version_number": SERDES}


class Unary:
    """A call of one request.  served: takes it, and answers through the call."""

    def __init__(self, call: Call, served: Callable[[Call, bytes], None]) -> None:
        self._call = call
        self._served = served
        self._asked: list[bytes] = []

    def messages(self, several: Sequence[bytes]) -> None:
        self._asked += several
        if len(self._asked) > 1:
            raise Status(INVALID, f"{self._call.method} takes one message")

    def said_all(self) -> None:
        if not self._asked:
            raise Status(INVALID, f"{self._call.method} takes a message")
        self._served(self._call, self._asked[0])

    def gone(self) -> None:
        """Nothing of it is left."""


class Store:
    """Bytes for a session."""

    def __init__(self, call: Call, buffers: Buffers, told: Any) -> None:
        self._call = call
        self._buffers = buffers
        self._told = told
        self._come = 0
        self._parts: list[bytes] = []

    def messages(self, several: Sequence[bytes]) -> None:
        for one in several:
            data = _read("GrpcHostBufferStoreRequest", one).data
            self._parts.append(data)
            self._come += len(data)
        if self._come > min(self._told.buffer_size, ROOM):
            self.said_all()

    def said_all(self) -> None:
        wanted = self._told.buffer_size
        if self._come != wanted:
            text = f"{self._come:,} bytes have come where {wanted:,} were to come"
            raise Status(DATA_LOSS, text)
        self._buffers.put(self._told.handle, b"".join(self._parts))
        self._call.answer(message("GrpcHostBufferStoreResponse")().SerializeToString())
        self._call.end()

    def gone(self) -> None:
        """Nothing of it is left."""


class Session:
    """A session: requests in order, and their answers.  over: told when it is."""

    def __init__(
        self, call: Call, number: int, open: Callable[[Buffers], Handler], over: Callable[[], None]
    ) -> None:
        self.buffers = Buffers(call.read_on, call.wake)
        self._call = call
        self._number = number
        self._over = over
        self._handler = open(self.buffers)
        self._request = message("IfrtRequest")
        self._left: deque[bytes] = deque()
        self._serving = self._gone = self._said_all = False

    def messages(self, several: Sequence[bytes]) -> None:
        self._left += several
        self._serve()

    def said_all(self) -> None:
        self._said_all = True
        self._serve()

    def gone(self) -> None:
        self._gone = True
        self.buffers.end()
        self._over()
        if not self._serving:
            self._handler.end()

    def _serve(self) -> None:
        """Serve what is there; not in the middle of another request, whose bytes have to come."""
        if self._serving:
            return
        self._serving = True
        try:
            while self._left and not self._gone:
                self._one(self._left.popleft())
                while self._call.unread > _UNREAD and self._call.read_on():
                    pass
        finally:
            self._serving = False
            if self._gone:
                self._handler.end()
        if self._said_all:
            self._call.end()

    def _one(self, data: bytes) -> None:
        """Raises Status for bytes that are no request."""
        try:
            request = self._request.FromString(data)
        except DecodeError:
            raise Status(INVALID, "bytes that are no request") from None
        operation, kind = request.request_metadata.op_id, request.WhichOneof("request") or ""

        def reply(result: Any) -> None:
            if kind == "init_request" and not isinstance(result, Exception):
                result.session_id = self._number
            self._call.answer(answer_to(operation, kind, result).SerializeToString())

        if not kind:
            kind = "this request"
            return reply(Status(UNIMPLEMENTED, "an unknown request"))
        try:
            self._handler.handle(kind, getattr(request, kind), reply)
        except Exception as error:
            reply(error)


class Door:
    """A server for one client program.

    open: makes what serves a session from the bytes beside it.
    secret: what the session's first message must carry.
    """

    def __init__(self, open: Callable[[Buffers], Handler], secret: bytes) -> None:
        self._open = open
        self._secret = secret
        self._lock = threading.Lock()
        self._sessions: dict[int, Session] = {}
        self._connections: set[Connection] = set()
        self._listening: socket.socket | None = None

    def listen(self, path: str) -> None:
        """Begin to serve at a Unix socket."""
        self._listening = socket.socket(socket.AF_UNIX)
        self._listening.bind(path)
        self._listening.listen()
        threading.Thread(target=self._accept, name="door", daemon=True).start()

    def close(self) -> None:
        """Serve nobody any more."""
        if self._listening is not None:
            self._listening.shutdown(socket.SHUT_RDWR)
        with self._lock:
            connections = list(self._connections)
        for connection in connections:
            connection.close()

    def _accept(self) -> None:
        assert self._listening is not None
        with self._listening:
            while True:
                try:
                    link, _ = self._listening.accept()
                except OSError:
                    return
                with self._lock:
                    full = len(self._connections) >= _CONNECTIONS
                    made = Connection(link, self.serve)
                    self._connections.add(made)
                if full:
                    made.close()
                threading.Thread(target=self._run, args=(made,), name="door", daemon=True).start()

    def _run(self, connection: Connection) -> None:
        connection.run()
        with self._lock:
            self._connections.discard(connection)

    def serve(self, call: Call) -> Served:
        """Begin to serve a call.  Raises Status for one that is not."""
        service, _, name = call.method.removeprefix("/").partition("/")
        known = service == messages.service_name() and name in messages.method_names()
        if known and name == "IfrtSession":
            return self._session(call)
        if known and name == "HostBufferStore":
            told = _said(call, STORE, "GrpcHostBufferStoreMetadata")
            return Store(call, self._buffers(told.session_id), told)
        one = {
            "GetVersion": _version,
            "HostBufferLookup": self._lookup,
            "HostBufferDelete": self._delete,
        }
        if not known or name not in one:
            raise Status(UNIMPLEMENTED, f"{call.method} is not served by this door")
        return Unary(call, one[name])

    def _session(self, call: Call) -> Session:
        self._check_session(call)
        number = int.from_bytes(os.urandom(7))
        with self._lock:
            if len(self._sessions) >= _SESSIONS:
                text = f"this door has {_SESSIONS} sessions, and no more at once"
                raise Status(EXHAUSTED, text)
            made = Session(call, number, self._open, lambda: self._ended(number))
            self._sessions[number] = made
        return made

    def _ended(self, number: int) -> None:
        with self._lock:
            self._sessions.pop(number, None)

    def _check_session(self, call: Call) -> None:
        told = _said(call, SESSION, "GrpcIfrtSessionMetadata")
        said = told.initialization_data.attributes[SECRET].string_value
        if not hmac.compare_digest(said, self._secret):
            raise Status(UNAUTHENTICATED, "this session does not know the secret")
        for name, known in _KNOWN.items():
            if getattr(told.version, name) not in known:
                text = f"a session of {name} {getattr(told.version, name)}, which nobody agreed on"
                raise Status(FAILED_PRECONDITION, text)

    # --- bytes beside it ------------------------------------------------------------------

    def _buffers(self, number: int) -> Buffers:
        with self._lock:
            found = self._sessions.get(number)
        if found is None:
            raise Status(NOT_FOUND, "there is no such session")
        return found.buffers

    def _lookup(self, call: Call, data: bytes) -> None:
        request = _read("GrpcHostBufferLookupRequest", data)
        made = message("GrpcHostBufferLookupResponse")

        def answer(found: Found) -> None:
            if isinstance(found, Status):
                return call.end(found.code, str(found))
            for start in range(0, max(1, len(found)), _CHUNK):
                call.answer(made(data=found[start : start + _CHUNK]).SerializeToString())
            call.end()

        self._buffers(request.session_id).when(request.handle, answer)

    def _delete(self, call: Call, data: bytes) -> None:
        request = _read("GrpcHostBufferDeleteRequest", data)
        self._buffers(request.session_id).forget(request.handle)
        call.answer(message("GrpcHostBufferDeleteResponse")().SerializeToString())
        call.end()


def _version(call: Call, data: bytes) -> None:
    """The newest version that both know."""
    request = _read("GrpcGetVersionRequest", data)
    least, most = request.min_version, request.max_version
    answer = message("GrpcGetVersionResponse")()
    for name, known in _KNOWN.items():
        first, last = getattr(least, name), getattr(most, name)
        chosen = min(last, known[-1])
        if chosen < max(first, known[0]):
            raise Status(
                FAILED_PRECONDITION,
                f"this door speaks {name} {known[0]} to {known[-1]}, and the client"
                f" {first} to {last}",
            )
        setattr(answer.version, name, chosen)
    call.answer(answer.SerializeToString())
    call.end()


def _read(kind: str, data: bytes) -> Any:
    """Raises Status for bytes that are no such message."""
    try:
        return message(kind).FromString(data)
    except DecodeError:
        raise Status(INVALID, f"bytes that are no {kind}") from None


def _said(call: Call, key: str, kind: str) -> Any:
    """The message that the metadata of a call have under a key; an empty one without it."""
    try:
        return message(kind).FromString(call.metadata.get(key, b""))
    except DecodeError:
        raise Status(INVALID, f"{key} holds no {kind}") from None


def checked(kind: str, answer: Any) -> Any:
    """An answer that this client may be given.  Raises Status for any other."""
    if answer.response_metadata.status.code:
        if answer.WhichOneof("response") is not None:
            raise Status(INTERNAL, f"an error came with an answer to {kind}")
    elif answer.WhichOneof("response") != kind.removesuffix("_request") + "_response":
        raise Status(INTERNAL, f"{answer.WhichOneof('response')} is no answer to {kind}")
    if not answer.IsInitialized():
        raise Status(INTERNAL, f"the answer to {kind} is incomplete")
    return answer


def answer_to(operation: int, kind: str, result: Any) -> Any:
    """The whole answer: a result in its field, or a status."""
    made = message("IfrtResponse")()
    made.response_metadata.op_id = operation
    try:
        if isinstance(result, Exception):
            raise result
        field = kind.removesuffix("_request") + "_response"
        getattr(made, field).CopyFrom(result)
        return checked(kind, made)
    except Exception as error:
        made.Clear()
        made.response_metadata.op_id = operation
        if not isinstance(error, Status):
            log.exception("the answer to %s", kind)
            error = Status(INTERNAL, f"{type(error).__name__}: {error}")
        made.response_metadata.status.code = error.code
        text = str(error)
        made.response_metadata.status.message = text or kind
        return made
