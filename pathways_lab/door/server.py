"""The gRPC side of the door: sessions, host buffers, and the secret.

Problem: JAX's client aborts its process on an answer that is wrong, and on a session that ends.
So each answer is checked before it leaves, each request gets one, and nothing is served to
whoever does not know the secret.

How: one session is a two-way stream, whose requests one thread takes in order; answers leave in
any order.  Bytes of arrays travel beside it, by numbers that the client chooses.  A request that
does not parse ends its session, and bytes that nobody fetches take no more than a part of memory.

Rule for maintainers: nothing about arrays here.  A handler answers through *reply*, once, now or
later and in any thread; what it raises is an error status that names the request.
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

import grpc
import psutil
from google.protobuf.message import DecodeError

from pathways_lab.door import messages
from pathways_lab.door.messages import message

log = logging.getLogger("pathways_lab.door")
"""Faults of the door itself, and nothing else; they are in the log of its process."""

VERSIONS = range(16, 26)
"""Versions of the protocol that this server knows."""
SERDES = range(4)
"""Versions of what messages carry as bytes."""
SECRET = "pathways-lab-secret"
_STORE = "ifrt-proxy-grpc-host-buffer-store-metadata-bin"
_SESSION = "ifrt-proxy-grpc-ifrt-session-metadata-bin"
_CHUNK = 1 << 20
_STREAMS = 64
"""Threads: one for each stream of bytes under way, and one for the session."""
_PATIENCE = 600.0
"""Seconds that bytes may take to follow what speaks of them."""
_SESSIONS = 8
"""Most sessions at once: a program has one, and the streams of bytes need threads too."""
_UNREAD = 10_000
"""Most answers that wait for a client to read them: until then it is not served further."""
ROOM = psutil.virtual_memory().total // 2
"""Most bytes of arrays on their way between a client and the lab."""
_EACH = 1024
"""Bytes that even empty ones take."""

CANCELLED, INVALID, NOT_FOUND, EXHAUSTED = 1, 3, 5, 8
UNIMPLEMENTED, INTERNAL, UNAVAILABLE = 12, 13, 14
"""Codes of a status."""


class Status(Exception):
    """An answer that says why there is none."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = code


Reply = Callable[[Any], None]


class Handler(Protocol):
    """A session's requests are served by this."""

    def handle(self, kind: str, request: Any, reply: Reply) -> None:
        """Serve one request; reply(answer or Status) once, now or later."""

    def end(self) -> None:
        """The client is gone."""


class Buffers:
    """Bytes on their way, by number: of arrays that come, and of those that are read."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: dict[int, Future[bytes]] = {}
        self._sizes: dict[int, int] = {}
        self._taken = 0
        self._ended = False

    def put(self, number: int, data: bytes | Status) -> None:
        """They are there, or will never be.  Raises Status when there is no room for them."""
        size = _EACH + (0 if isinstance(data, Status) else len(data))
        with self._lock:
            future = self._known.setdefault(number, Future())
            if future.done() or self._ended:
                return
            if self._taken + size > ROOM:
                # Who waits for them hears it; nobody else can.
                del self._known[number]
                text = f"{self._taken:,} bytes of arrays are on their way, {size:,} are too many"
                future.set_exception(why := Status(EXHAUSTED, text))
                raise why
            self._sizes[number] = size
            self._taken += size
            if isinstance(data, Status):
                future.set_exception(data)
            else:
                future.set_result(data)

    def wait(self, number: int) -> bytes:
        """The bytes of that number, which may come later.  Raises Status when they do not."""
        with self._lock:
            if self._ended:
                raise Status(UNAVAILABLE, "this session has ended")
            future = self._known.setdefault(number, Future())
        try:
            return future.result(_PATIENCE)
        except TimeoutError:
            self.forget(number)
            text = f"the bytes {number} have not come within {_PATIENCE:g} s"
            raise Status(NOT_FOUND, text) from None

    def take(self, number: int) -> bytes:
        """The same, once."""
        data = self.wait(number)
        self.forget(number)
        return data

    def forget(self, number: int) -> None:
        with self._lock:
            self._known.pop(number, None)
            self._taken -= self._sizes.pop(number, 0)

    def end(self) -> None:
        """The session has ended: nobody waits for bytes any more."""
        with self._lock:
            self._ended = True
            for future in self._known.values():
                if not future.done():
                    future.set_exception(Status(UNAVAILABLE, "this session has ended"))
            self._known.clear()
            self._sizes.clear()


class Answers:
    """Answers of one session that have not left yet."""

    def __init__(self) -> None:
        self._left: deque[Any] = deque()
        self._changed = threading.Condition()
        self._ended = False

    def put(self, answer: Any) -> None:
        with self._changed:
            self._left.append(answer)
            self._changed.notify_all()

    def end(self) -> None:
        """No more will come; nobody waits."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def await_room(self) -> None:
        """Wait until the client has read enough of them."""
        with self._changed:
            self._changed.wait_for(lambda: self._ended or len(self._left) < _UNREAD)

    def __iter__(self) -> Iterator[Any]:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._ended or self._left)
                if not self._left:
                    return
                answer = self._left.popleft()
                self._changed.notify_all()
            yield answer


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


_KNOWN = {"protocol_version": VERSIONS, "ifrt_serdes_version_number": SERDES}


def _said(context: Any, key: str, kind: str) -> Any:
    """The message that the metadata of a call have under a key; an empty one without it."""
    for name, value in context.invocation_metadata():
        if name == key:
            try:
                return message(kind).FromString(value)
            except DecodeError:
                context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"{key} holds no {kind}")
    return message(kind)()


class Door:
    """A server for one client program.

    open: makes what serves a session from the bytes beside it.
    secret: what the session's first message must carry.
    """

    def __init__(self, open: Callable[[Buffers], Handler], secret: bytes) -> None:
        self._open = open
        self._secret = secret
        self._lock = threading.Lock()
        self._sessions: dict[int, Buffers] = {}
        self._server = grpc.server(
            ThreadPoolExecutor(_STREAMS, thread_name_prefix="door"),
            options=[
                ("grpc.max_receive_message_length", -1),
                ("grpc.max_send_message_length", -1),
                ("grpc.so_reuseport", 0),
            ],
        )
        self._server.add_generic_rpc_handlers((self._methods(),))

    def listen(self, address: str) -> int:
        """Begin to serve; the port that was chosen (1 for a Unix socket)."""
        port = self._server.add_insecure_port(address)
        self._server.start()
        return int(port)

    def close(self) -> None:
        self._server.stop(None)

    def _methods(self) -> grpc.GenericRpcHandler:
        served = {
            "GetVersion": (grpc.unary_unary_rpc_method_handler, self._version),
            "IfrtSession": (grpc.stream_stream_rpc_method_handler, self._session),
            "HostBufferStore": (grpc.stream_unary_rpc_method_handler, self._store),
            "HostBufferLookup": (grpc.unary_stream_rpc_method_handler, self._lookup),
            "HostBufferDelete": (grpc.unary_unary_rpc_method_handler, self._delete),
        }
        methods = {}
        for name, (asked, answered) in messages.method_names().items():
            if name in served:
                make, call = served[name]
                methods[name] = make(
                    call,
                    request_deserializer=messages.classes()[asked].FromString,
                    response_serializer=messages.classes()[answered].SerializeToString,
                )
        return grpc.method_handlers_generic_handler(messages.service_name(), methods)

    # --- versions -----------------------------------------------------------------------

    def _version(self, request: Any, context: Any) -> Any:
        least, most = request.min_version, request.max_version
        answer = message("GrpcGetVersionResponse")()
        for name, known in _KNOWN.items():
            first, last = getattr(least, name), getattr(most, name)
            chosen = min(last, known[-1])
            if chosen < max(first, known[0]):
                context.abort(
                    grpc.StatusCode.FAILED_PRECONDITION,
                    f"this door speaks {name} {known[0]} to {known[-1]}, and the client"
                    f" {first} to {last}",
                )
            setattr(answer.version, name, chosen)
        return answer

    # --- sessions -------------------------------------------------------------------------

    def _session(self, requests: Iterator[Any], context: Any) -> Iterator[Any]:
        self._check_session(context)
        answers, buffers = Answers(), Buffers()
        number = int.from_bytes(os.urandom(7))
        with self._lock:
            full = len(self._sessions) >= _SESSIONS
            if not full:
                self._sessions[number] = buffers
        if full:
            text = f"this door has {_SESSIONS} sessions, and no more at once"
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, text)
        handler = self._open(buffers)

        def serve() -> None:
            with contextlib.suppress(Exception):  # the stream was cut, or has no request
                for request in requests:
                    answers.await_room()
                    self._serve(number, handler, request, answers.put)
            answers.end()

        def over() -> None:
            # What waits for the client waits no longer.
            buffers.end()
            answers.end()

        context.add_callback(over)
        thread = threading.Thread(target=serve, name="session", daemon=True)
        thread.start()
        try:
            yield from answers
        finally:
            with self._lock:
                self._sessions.pop(number, None)
            over()
            thread.join()
            handler.end()

    def _serve(self, number: int, handler: Handler, request: Any, put: Reply) -> None:
        operation, kind = request.request_metadata.op_id, request.WhichOneof("request") or ""

        def reply(result: Any) -> None:
            if kind == "init_request" and not isinstance(result, Exception):
                result.session_id = number
            put(answer_to(operation, kind, result))

        if not kind:
            put(answer_to(operation, "this request", Status(UNIMPLEMENTED, "an unknown request")))
            return
        try:
            handler.handle(kind, getattr(request, kind), reply)
        except Exception as error:
            reply(error)

    def _check_session(self, context: Any) -> None:
        told = _said(context, _SESSION, "GrpcIfrtSessionMetadata")
        said = told.initialization_data.attributes[SECRET].string_value
        if not hmac.compare_digest(said, self._secret):
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "this session does not know the secret")
        for name, known in _KNOWN.items():
            if getattr(told.version, name) not in known:
                text = f"a session of {name} {getattr(told.version, name)}, which nobody agreed on"
                context.abort(grpc.StatusCode.FAILED_PRECONDITION, text)

    # --- bytes beside it ------------------------------------------------------------------

    def _buffers(self, number: int, context: Any) -> Buffers:
        with self._lock:
            found = self._sessions.get(number)
        if found is None:
            context.abort(grpc.StatusCode.NOT_FOUND, "there is no such session")
        assert found is not None
        return found

    def _store(self, parts: Iterator[Any], context: Any) -> Any:
        told = _said(context, _STORE, "GrpcHostBufferStoreMetadata")
        buffers = self._buffers(told.session_id, context)
        come, data = 0, []
        for part in parts:
            data.append(part.data)
            come += len(part.data)
            if come > min(told.buffer_size, ROOM):
                break
        if come != told.buffer_size:
            text = f"{come:,} bytes have come where {told.buffer_size:,} were to come"
            context.abort(grpc.StatusCode.DATA_LOSS, text)
        try:
            buffers.put(told.handle, b"".join(data))
        except Status as error:
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, str(error))
        return message("GrpcHostBufferStoreResponse")()

    def _lookup(self, request: Any, context: Any) -> Iterator[Any]:
        buffers = self._buffers(request.session_id, context)
        try:
            data = buffers.wait(request.handle)
        except Status as error:
            context.abort(grpc.StatusCode.ABORTED, str(error))
            return
        made = message("GrpcHostBufferLookupResponse")
        for start in range(0, max(1, len(data)), _CHUNK):
            yield made(data=data[start : start + _CHUNK])

    def _delete(self, request: Any, context: Any) -> Any:
        self._buffers(request.session_id, context).forget(request.handle)
        return message("GrpcHostBufferDeleteResponse")()
