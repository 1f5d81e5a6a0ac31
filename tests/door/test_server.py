"""The methods of a door, with a handler that does anything; gRPC's own client calls some."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from pathways_lab.door.protocol import buffers, messages, server
from pathways_lab.door.protocol.buffers import Buffers
from pathways_lab.door.protocol.messages import message
from pathways_lab.door.protocol.server import Door, answer_to
from pathways_lab.door.protocol.status import (
    DATA_LOSS,
    EXHAUSTED,
    FAILED_PRECONDITION,
    INTERNAL,
    NOT_FOUND,
    UNIMPLEMENTED,
    Status,
)
from pathways_lab.transport.addresses import private_folder, remove_folder
from tests.door.wire import Refused, Wire, of_secret, of_store


class Anything:
    """Answers with what it is told to."""

    def __init__(self, buffers: Buffers) -> None:
        self.buffers = buffers

    def handle(self, kind: str, request: Any, reply: server.Reply) -> None:
        if kind == "init_request":
            reply(message("InitResponse")(platform_name="cpu"))
        elif kind == "check_future_request":
            reply(message("InitResponse")())
        elif kind == "compile_request":
            raise KeyError("nonsense")
        else:
            raise Status(UNIMPLEMENTED, f"{kind} is not served by this door")

    def end(self) -> None:
        """Nothing of it is left."""


@pytest.fixture(scope="module")
def channel() -> Iterator[grpc.Channel]:
    folder: Path = private_folder()
    door = Door(Anything, b"the secret")
    door.listen(f"{folder}/door")
    with grpc.insecure_channel(address := f"unix:{folder}/door") as opened:
        opened.address = address
        yield opened
    door.close()
    remove_folder(folder)


def session(
    channel: grpc.Channel, requests: list[Any], secret: bytes | None, timeout: float = 30
) -> list[Any]:
    """Answers to requests, or to bytes.  Within *timeout*, in which it waits for more."""
    call = channel.stream_stream(
        f"/{messages.service_name()}/IfrtSession",
        request_serializer=lambda r: r if isinstance(r, bytes) else r.SerializeToString(),
        response_deserializer=message("IfrtResponse").FromString,
    )
    return list(
        call(
            iter(requests),
            metadata=of_secret(secret),
            timeout=timeout,
        )
    )


def request(number: int, kind: str) -> Any:
    made = message("IfrtRequest")()
    made.request_metadata.op_id = number
    if kind:
        getattr(made, kind).SetInParent()
    return made


@pytest.mark.parametrize("secret", [None, b"", b"the secre", b"another"])
def test_nothing_is_served_without_the_secret(channel, secret):
    with pytest.raises(grpc.RpcError) as refused:
        session(channel, [request(1, "init_request")], secret)
    assert refused.value.code() == grpc.StatusCode.UNAUTHENTICATED


def test_every_request_gets_one_answer_and_wrong_ones_a_status(channel):
    kinds = ["init_request", "remap_arrays_request", "", "check_future_request", "compile_request"]
    asked = [request(number, kind) for number, kind in enumerate(kinds, start=1)]
    answers = session(channel, asked, b"the secret")
    assert [a.response_metadata.op_id for a in answers] == [1, 2, 3, 4, 5]
    first, *others = answers
    assert first.init_response.session_id
    assert all(a.WhichOneof("response") is None for a in others)
    said = [(a.response_metadata.status.code, a.response_metadata.status.message) for a in others]
    assert said[0] == (UNIMPLEMENTED, "remap_arrays_request is not served by this door")
    assert said[1] == (UNIMPLEMENTED, "an unknown request")
    assert said[2][0] == said[3][0] == INTERNAL
    assert "nonsense" in said[3][1]


def test_an_answer_of_another_kind_never_leaves():
    made = answer_to(7, "compile_request", message("InitResponse")())
    assert made.WhichOneof("response") is None
    assert made.response_metadata.status.code == INTERNAL


@pytest.mark.parametrize(
    ("name", "least", "most"),
    [("protocol_version", 1, 15), ("protocol_version", 26, 30), ("protocol_version", 20, 18),
     ("ifrt_serdes_version_number", 4, 9)],
)  # fmt: skip
def test_versions_that_nobody_knows_are_refused(channel, name, least, most):
    ask = channel.unary_unary(
        f"/{messages.service_name()}/GetVersion",
        request_serializer=message("GrpcGetVersionRequest").SerializeToString,
        response_deserializer=message("GrpcGetVersionResponse").FromString,
    )
    asked = message("GrpcGetVersionRequest")()
    asked.min_version.protocol_version = asked.max_version.protocol_version = 25
    setattr(asked.min_version, name, least)
    setattr(asked.max_version, name, most)
    with pytest.raises(grpc.RpcError) as refused:
        ask(asked)
    assert refused.value.code() == grpc.StatusCode.FAILED_PRECONDITION
    assert f"{least} to {most}" in refused.value.details()


def test_a_later_version_of_the_client_is_answered_with_the_last_known_one(channel):
    asked = message("GrpcGetVersionRequest")()
    asked.min_version.protocol_version, asked.max_version.protocol_version = 16, 99
    asked.max_version.ifrt_serdes_version_number = 99
    (answer,) = Wire(Door(Anything, b"")).ask("GetVersion", asked.SerializeToString())
    assert answer.version.protocol_version == server.VERSIONS[-1]
    assert answer.version.ifrt_serdes_version_number == server.SERDES[-1]


def test_bytes_that_are_no_request_end_their_session_and_no_other(channel):
    with pytest.raises(grpc.RpcError):
        session(channel, [request(1, "init_request"), b"\xff\xff"], b"the secret")
    assert len(session(channel, [request(1, "init_request")], b"the secret")) == 1


# --- without sockets ----------------------------------------------------------------------


class Takes(Anything):
    """Waits for bytes that a request speaks of."""

    def handle(self, kind: str, request: Any, reply: server.Reply) -> None:
        if kind == "init_request":
            reply(message("InitResponse")(platform_name="cpu"))
        else:
            self.buffers.take(request.host_buffer_handle)


def begun(wire: Wire) -> tuple[Any, int]:
    """A session, and its number."""
    stream = wire.session(of_secret(b"the secret"))
    stream.send(request(1, "init_request").SerializeToString())
    return stream, stream.answer().init_response.session_id


def test_a_session_of_another_version_is_refused():
    told = message("GrpcIfrtSessionMetadata").FromString(of_secret(b"the secret")[0][1])
    told.version.protocol_version = 26
    metadata = [(server.SESSION, told.SerializeToString())]
    with pytest.raises(Refused, match="protocol_version 26") as refused:
        Wire(Door(Anything, b"the secret")).session(metadata).answer()
    assert refused.value.code == FAILED_PRECONDITION


def test_metadata_that_are_no_message_are_refused():
    wire = Wire(Door(Anything, b"the secret"))
    with pytest.raises(Refused, match="holds no GrpcIfrtSessionMetadata"):
        wire.session([(server.SESSION, b"\xff")]).answer()
    with pytest.raises(Refused, match="holds no GrpcHostBufferStoreMetadata"):
        wire.ask("HostBufferStore", [], [(server.STORE, b"\xff")])


def test_a_door_has_so_many_sessions_at_once(monkeypatch):
    monkeypatch.setattr(server, "_SESSIONS", 2)
    wire = Wire(Door(Anything, b"the secret"))
    first, second = begun(wire)[0], begun(wire)[0]
    with pytest.raises(Refused, match="2 sessions"):
        begun(wire)
    first.end()
    third = begun(wire)[0]
    for stream in (second, third):
        stream.end()


def test_a_client_that_goes_waits_for_no_bytes_any_more(channel, monkeypatch):
    """The thread of its connection would live for ten minutes."""
    over = threading.Event()
    monkeypatch.setattr(Anything, "end", lambda self: over.set())
    monkeypatch.setattr(Anything, "handle", Takes.handle)
    asked = [request(1, "init_request"), request(2, "make_array_from_host_buffer_request")]
    with pytest.raises(grpc.RpcError):
        session(channel, asked, b"the secret", timeout=0.2)
    assert over.wait(30)


def test_bytes_may_come_by_another_connection(channel, monkeypatch):
    """JAX's client opens a channel for each kind of what it sends."""
    waits, asked = threading.Event(), queue.SimpleQueue()

    def handle(self: Anything, kind: str, request: Any, reply: server.Reply) -> None:
        if kind == "init_request":
            return reply(message("InitResponse")())
        waits.set()
        assert self.buffers.take(7) == b"bytes"
        reply(Status(INTERNAL, "they came"))

    monkeypatch.setattr(Anything, "handle", handle)
    call = channel.stream_stream(
        f"/{messages.service_name()}/IfrtSession",
        request_serializer=message("IfrtRequest").SerializeToString,
        response_deserializer=message("IfrtResponse").FromString,
    )
    asked.put(request(1, "init_request"))
    answers = call(iter(asked.get, None), metadata=of_secret(b"the secret"), timeout=20)
    number = next(answers).init_response.session_id
    asked.put(request(2, "make_array_from_host_buffer_request"))
    assert waits.wait(20)
    own = [("grpc.use_local_subchannel_pool", 1)]
    with grpc.insecure_channel(channel.address, options=own) as other:
        store = other.stream_unary(
            f"/{messages.service_name()}/HostBufferStore",
            request_serializer=message("GrpcHostBufferStoreRequest").SerializeToString,
        )
        part = message("GrpcHostBufferStoreRequest")(data=b"bytes")
        store(iter([part]), metadata=of_store(number, 7, 5), timeout=20)
    assert next(answers).response_metadata.status.message == "they came"
    asked.put(None)


def test_bytes_that_do_not_come_are_an_error_that_says_so(monkeypatch):
    monkeypatch.setattr(buffers, "PATIENCE", 0.01)
    stream, _ = begun(Wire(Door(Takes, b"the secret")))
    stream.send(request(2, "make_array_from_host_buffer_request").SerializeToString())
    status = stream.answer().response_metadata.status
    assert (status.code, status.message) == (NOT_FOUND, "the bytes 0 have not come within 0.01 s")
    stream.end()


def test_bytes_that_are_asked_for_before_they_are_there(channel):
    """And those of a session that ends are waited for no longer."""
    found: list[Any] = []
    kept = Buffers(lambda _: True)
    kept.when(5, found.append)
    kept.put(5, b"five")
    kept.when(5, found.append)
    kept.when(6, found.append)
    kept.end()
    kept.when(7, found.append)
    assert found[:2] == [b"five", b"five"]
    assert ["has ended" in str(status) for status in found[2:]] == [True, True]


@pytest.mark.parametrize(
    ("size", "parts", "code"),
    [(5, [b"1234"], DATA_LOSS), (3, [b"12", b"34"] + [b"x" * 100] * 9, DATA_LOSS),
     (-1, [b"1"], DATA_LOSS), (3500, [bytes(3500)], EXHAUSTED)],
)  # fmt: skip
def test_bytes_that_are_too_many_are_refused(monkeypatch, size, parts, code):
    monkeypatch.setattr(server, "ROOM", 4000)
    monkeypatch.setattr(buffers, "ROOM", 4000)
    wire = Wire(Door(Anything, b"the secret"))
    stream, number = begun(wire)
    made = message("GrpcHostBufferStoreRequest")
    data = [made(data=part).SerializeToString() for part in parts]
    with pytest.raises(Refused) as refused:
        wire.ask("HostBufferStore", data, of_store(number, 7, size))
    assert refused.value.code == code
    stream.end()


def test_bytes_on_their_way_have_so_much_room(monkeypatch):
    monkeypatch.setattr(buffers, "ROOM", 10_000)
    kept = Buffers(lambda _: True)
    kept.put(1, bytes(4000))
    kept.put(2, bytes(3000))
    with pytest.raises(Status, match="on their way") as refused:
        kept.put(3, bytes(1000))
    assert refused.value.code == EXHAUSTED
    assert len(kept.take(1)) == 4000
    kept.put(3, bytes(1000))
    kept.end()
    with pytest.raises(Status, match="has ended"):
        kept.take(2)


def test_a_request_whose_bytes_have_no_room_hears_it_at_once(monkeypatch):
    monkeypatch.setattr(buffers, "ROOM", 4000)

    def comes(seconds: float) -> bool:
        with pytest.raises(Status, match="on their way"):
            kept.put(1, bytes(5000))
        return True

    kept = Buffers(comes)
    with pytest.raises(Status, match="on their way") as refused:
        kept.take(1)
    assert refused.value.code == EXHAUSTED
    kept.put(1, bytes(2900))
    assert len(kept.take(1)) == 2900


def test_a_client_that_reads_no_answers_is_served_no_further(monkeypatch):
    monkeypatch.setattr(server, "_UNREAD", 2)
    stream, _ = begun(Wire(Door(Anything, b"the secret")))
    call, served = stream._call, []
    call.unread = 5
    call.read_on = lambda: served.append(call.answers.qsize()) or setattr(call, "unread", 0) or True
    stream.send(*[request(n, "remap_arrays_request").SerializeToString() for n in (2, 3)])
    assert served == [1], "the second request waited until the client had read"
    assert call.answers.qsize() == 2
    stream.end()


def test_bytes_of_no_session_are_refused(channel):
    ask = channel.unary_stream(
        f"/{messages.service_name()}/HostBufferLookup",
        request_serializer=message("GrpcHostBufferLookupRequest").SerializeToString,
        response_deserializer=message("GrpcHostBufferLookupResponse").FromString,
    )
    with pytest.raises(grpc.RpcError) as refused:
        list(ask(message("GrpcHostBufferLookupRequest")(session_id=1, handle=1)))
    assert refused.value.code() == grpc.StatusCode.NOT_FOUND


def test_the_protocol_is_in_the_installed_jaxlib():
    """What the door serves by name; a release that renames it is named here."""
    fields = {f.name for f in message("IfrtRequest").DESCRIPTOR.fields}
    from pathways_lab.door.session import Session

    served = {name[1:] for name in dir(Session) if name.endswith("_request")}
    assert served <= fields
    assert fields - served == {
        "request_metadata",
        "bitcast_arrays_request",
        "loaded_executable_mpmd_cost_analysis_request",
        "loaded_host_callback_poll_request",
        "loaded_host_callback_return_request",
    }
