"""The gRPC side of the door, with a handler that does anything."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from pathways_lab.door import messages, server
from pathways_lab.door.messages import message
from pathways_lab.door.server import Buffers, Door, Status, answer_to
from pathways_lab.transport.addresses import private_folder, remove_folder
from tests.door.wire import Refused, Wire, of_secret, of_store


class Anything:
    """Answers with what it is told to."""

    ended = 0

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
            raise Status(server.UNIMPLEMENTED, f"{kind} is not served by this door")

    def end(self) -> None:
        Anything.ended += 1


@pytest.fixture(scope="module")
def channel() -> Iterator[grpc.Channel]:
    folder: Path = private_folder()
    door = Door(Anything, b"the secret")
    door.listen(f"unix:{folder}/door")
    with grpc.insecure_channel(f"unix:{folder}/door") as opened:
        yield opened
    door.close()
    remove_folder(folder)


def session(channel: grpc.Channel, requests: list[Any], secret: bytes | None) -> list[Any]:
    """Answers to requests, or to bytes."""
    call = channel.stream_stream(
        f"/{messages.service_name()}/IfrtSession",
        request_serializer=lambda r: r if isinstance(r, bytes) else r.SerializeToString(),
        response_deserializer=message("IfrtResponse").FromString,
    )
    return list(
        call(
            iter(requests),
            metadata=of_secret(secret),
            timeout=30,
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
    assert said[0] == (server.UNIMPLEMENTED, "remap_arrays_request is not served by this door")
    assert said[1] == (server.UNIMPLEMENTED, "an unknown request")
    assert said[2][0] == said[3][0] == server.INTERNAL
    assert "nonsense" in said[3][1]


def test_an_answer_of_another_kind_never_leaves():
    made = answer_to(7, "compile_request", message("InitResponse")())
    assert made.WhichOneof("response") is None
    assert made.response_metadata.status.code == server.INTERNAL


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
            super().handle(kind, request, reply)
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
    metadata = [(server._SESSION, told.SerializeToString())]
    with pytest.raises(Refused, match="protocol_version 26") as refused:
        Wire(Door(Anything, b"the secret")).session(metadata).answer()
    assert refused.value.code == grpc.StatusCode.FAILED_PRECONDITION


def test_metadata_that_are_no_message_are_refused():
    wire = Wire(Door(Anything, b"the secret"))
    with pytest.raises(Refused, match="holds no GrpcIfrtSessionMetadata"):
        wire.session([(server._SESSION, b"\xff")]).answer()
    with pytest.raises(Refused, match="holds no GrpcHostBufferStoreMetadata"):
        wire.ask("HostBufferStore", [], [(server._STORE, b"\xff")])


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


def test_a_client_that_goes_waits_for_no_bytes_any_more():
    """Its session's thread would live for ten minutes."""
    door = Door(Takes, b"the secret")
    stream, _ = begun(Wire(door))
    stream.send(request(2, "make_array_from_host_buffer_request").SerializeToString())
    ended = Anything.ended
    stream.end()
    assert not door._sessions
    assert Anything.ended == ended + 1


def test_bytes_that_do_not_come_are_an_error_that_says_so(monkeypatch):
    monkeypatch.setattr(server, "_PATIENCE", 0.01)
    door = Door(Takes, b"the secret")
    wire = Wire(door)
    stream, number = begun(wire)
    stream.send(request(2, "make_array_from_host_buffer_request").SerializeToString())
    status = stream.answer().response_metadata.status
    assert (status.code, status.message) == (
        server.NOT_FOUND,
        "the bytes 0 have not come within 0.01 s",
    )
    asked = message("GrpcHostBufferLookupRequest")(session_id=number, handle=5)
    with pytest.raises(Refused, match="the bytes 5 have not come"):
        wire.ask("HostBufferLookup", asked.SerializeToString())
    assert not door._sessions[number]._known, "a number that was waited for is kept"
    stream.end()


@pytest.mark.parametrize(
    ("size", "parts", "code"),
    [(5, [b"1234"], "DATA_LOSS"), (3, [b"12", b"34"] + [b"x" * 100] * 9, "DATA_LOSS"),
     (-1, [b"1"], "DATA_LOSS"), (5000, [bytes(5000)], "RESOURCE_EXHAUSTED")],
)  # fmt: skip
def test_bytes_that_are_too_many_are_refused(monkeypatch, size, parts, code):
    monkeypatch.setattr(server, "ROOM", 4000)
    wire = Wire(Door(Anything, b"the secret"))
    stream, number = begun(wire)
    made = message("GrpcHostBufferStoreRequest")
    data = [made(data=part).SerializeToString() for part in parts]
    with pytest.raises(Refused) as refused:
        wire.ask("HostBufferStore", data, of_store(number, 7, size))
    assert refused.value.code.name in (code, "DATA_LOSS")
    stream.end()


def test_bytes_on_their_way_have_so_much_room(monkeypatch):
    monkeypatch.setattr(server, "ROOM", 10_000)
    buffers = Buffers()
    buffers.put(1, bytes(4000))
    buffers.put(2, bytes(3000))
    with pytest.raises(Status, match="on their way") as refused:
        buffers.put(3, bytes(1000))
    assert refused.value.code == server.EXHAUSTED
    assert len(buffers.take(1)) == 4000
    buffers.put(3, bytes(1000))
    buffers.end()
    with pytest.raises(Status, match="has ended"):
        buffers.wait(2)


def test_a_client_that_reads_no_answers_is_served_no_further(monkeypatch):
    monkeypatch.setattr(server, "_UNREAD", 2)
    answers = server.Answers()
    served: list[int] = []

    def serve() -> None:
        for number in range(5):
            answers.await_room()
            served.append(number)
            answers.put(number)
        answers.end()

    thread = threading.Thread(target=serve)
    thread.start()
    left = iter(answers)
    assert next(left) == 0
    assert len(served) <= 3
    assert list(left) == [1, 2, 3, 4]
    thread.join()


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
