"""The gRPC side of the door, with a handler that does anything."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from pathways_lab.door import messages, server
from pathways_lab.door.messages import message
from pathways_lab.door.server import Buffers, Door, Status, answer_to
from pathways_lab.transport.addresses import private_folder, remove_folder


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
    told = message("GrpcIfrtSessionMetadata")()
    if secret is not None:
        told.initialization_data.attributes[server.SECRET].string_value = secret
    call = channel.stream_stream(
        f"/{messages.service_name()}/IfrtSession",
        request_serializer=message("IfrtRequest").SerializeToString,
        response_deserializer=message("IfrtResponse").FromString,
    )
    return list(
        call(
            iter(requests),
            metadata=[("ifrt-proxy-grpc-ifrt-session-metadata-bin", told.SerializeToString())],
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


@pytest.mark.parametrize(("least", "most"), [(1, 15), (26, 30)])
def test_versions_that_nobody_knows_are_refused(channel, least, most):
    ask = channel.unary_unary(
        f"/{messages.service_name()}/GetVersion",
        request_serializer=message("GrpcGetVersionRequest").SerializeToString,
        response_deserializer=message("GrpcGetVersionResponse").FromString,
    )
    asked = message("GrpcGetVersionRequest")()
    asked.min_version.protocol_version, asked.max_version.protocol_version = least, most
    with pytest.raises(grpc.RpcError) as refused:
        ask(asked)
    assert refused.value.code() == grpc.StatusCode.FAILED_PRECONDITION
    assert f"{least} to {most}" in refused.value.details()


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
