"""The gRPC side of the door: sessions, host buffers, and the secret.

Problem: JAX's client aborts its process on an answer that is wrong, and on a session that ends.
So each answer is checked before it leaves, each request gets one, and nothing is served to
whoever does not know the secret.

How: one session is a two-way stream, whose requests one thread takes in order; answers leave in
any order.  Bytes of arrays travel beside it, by numbers that the client chooses.

Rule for maintainers: nothing about arrays here.  A handler answers through *reply*, once, now or
later and in any thread; what it raises is an error status that names the request.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

import grpc

from pathways_lab.door import messages
from pathways_lab.door.messages import message

VERSIONS = range(16, 26)
"""Versions of the protocol that this server knows."""
SECRET = "pathways-lab-secret"
_STORE = "ifrt-proxy-grpc-host-buffer-store-metadata-bin"
_SESSION = "ifrt-proxy-grpc-ifrt-session-metadata-bin"
_CHUNK = 1 << 20
_STREAMS = 64
"""Threads: one for each stream of bytes under way, and one for the session."""
_PATIENCE = 600.0
"""Seconds that bytes may take to follow what speaks of them."""

INVALID, NOT_FOUND, INTERNAL, UNAVAILABLE, UNIMPLEMENTED = 3, 5, 13, 14, 12
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

    def at(self, number: int) -> Future[bytes]:
        """The bytes of that number, there or not yet."""
        with self._lock:
            return self._known.setdefault(number, Future())

    def put(self, number: int, data: bytes | Exception) -> None:
        """They are there, or will never be."""
        future = self.at(number)
        if future.done():
            return
        if isinstance(data, Exception):
            future.set_exception(data)
        else:
            future.set_result(data)

    def take(self, number: int) -> bytes:
        """Wait for them, once."""
        data = self.at(number).result(_PATIENCE)
        self.forget(number)
        return data

    def forget(self, number: int) -> None:
        with self._lock:
            self._known.pop(number, None)


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
        code = error.code if isinstance(error, Status) else INTERNAL
        made.response_metadata.status.code = code
        text = str(error) if isinstance(error, Status) else f"{type(error).__name__}: {error}"
        made.response_metadata.status.message = text or kind
        return made


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
        chosen = min(most.protocol_version, VERSIONS[-1])
        if chosen < max(least.protocol_version, VERSIONS[0]):
            context.abort(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"this door speaks versions {VERSIONS[0]} to {VERSIONS[-1]} of the protocol, and"
                f" the client {least.protocol_version} to {most.protocol_version}",
            )
        answer = message("GrpcGetVersionResponse")()
        answer.version.protocol_version = chosen
        answer.version.ifrt_serdes_version_number = most.ifrt_serdes_version_number
        return answer

    # --- sessions -------------------------------------------------------------------------

    def _session(self, requests: Iterator[Any], context: Any) -> Iterator[Any]:
        self._check_secret(context)
        answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
        buffers = Buffers()
        number = int.from_bytes(os.urandom(7))
        with self._lock:
            self._sessions[number] = buffers
        handler = self._open(buffers)

        def serve() -> None:
            with contextlib.suppress(Exception):  # the stream was cut
                for request in requests:
                    self._serve(number, handler, request, answers.put)
            answers.put(None)

        thread = threading.Thread(target=serve, name="session", daemon=True)
        thread.start()
        try:
            while (answer := answers.get()) is not None:
                yield answer
        finally:
            with self._lock:
                self._sessions.pop(number, None)
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

    def _check_secret(self, context: Any) -> None:
        said = b""
        for key, value in context.invocation_metadata():
            if key == _SESSION:
                told = message("GrpcIfrtSessionMetadata").FromString(value)
                said = told.initialization_data.attributes[SECRET].string_value
        if not hmac.compare_digest(said, self._secret):
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "this session does not know the secret")

    # --- bytes beside it ------------------------------------------------------------------

    def _buffers(self, number: int, context: Any) -> Buffers:
        with self._lock:
            found = self._sessions.get(number)
        if found is None:
            context.abort(grpc.StatusCode.NOT_FOUND, "there is no such session")
        assert found is not None
        return found

    def _store(self, parts: Iterator[Any], context: Any) -> Any:
        told = None
        for key, value in context.invocation_metadata():
            if key == _STORE:
                told = message("GrpcHostBufferStoreMetadata").FromString(value)
        if told is None:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"no {_STORE}")
            raise AssertionError
        buffers = self._buffers(told.session_id, context)
        data = b"".join([part.data for part in parts])
        if len(data) != told.buffer_size:
            context.abort(grpc.StatusCode.DATA_LOSS, f"{len(data)} bytes of {told.buffer_size}")
        buffers.put(told.handle, data)
        return message("GrpcHostBufferStoreResponse")()

    def _lookup(self, request: Any, context: Any) -> Iterator[Any]:
        buffers = self._buffers(request.session_id, context)
        try:
            data = buffers.at(request.handle).result(_PATIENCE)
        except Exception as error:
            context.abort(grpc.StatusCode.ABORTED, str(error))
            return
        made = message("GrpcHostBufferLookupResponse")
        for start in range(0, max(1, len(data)), _CHUNK):
            yield made(data=data[start : start + _CHUNK])

    def _delete(self, request: Any, context: Any) -> Any:
        self._buffers(request.session_id, context).forget(request.handle)
        return message("GrpcHostBufferDeleteResponse")()
