"""Requests with one thing wrong: each is an error that says what, and nothing is a fault."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from jax._src.interpreters import mlir
from jaxlib import _jax
from jaxlib.mlir import ir

from pathways_lab.client.code.tiles import whole
from pathways_lab.client.functions.array_types import ArrayType
from pathways_lab.door import arrays, shardings, state
from pathways_lab.door.protocol import buffers
from pathways_lab.door.protocol.buffers import Buffers
from pathways_lab.door.protocol.messages import message
from pathways_lab.door.protocol.status import EXHAUSTED, INVALID, NOT_FOUND, UNIMPLEMENTED, Status
from pathways_lab.door.session import Session
from pathways_lab.door.shardings import Placing
from tests.door.labs import MadeUp
from tests.door.requests import (
    KIND,
    Code,
    Requests,
    artefact,
    codes,
    options_of,
    shape_of,
    spec_of,
)

ONE = Placing((0,), whole(1, 2))


class Client:
    """A session of a lab without processes, and right requests for it."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.lab, self.buffers = MadeUp(1), Buffers(lambda _: True)
        lab: Any = self.lab
        self.session = Session(lab, self.buffers, loop, lambda number, ordered: print, Mock())
        self.requests = Requests(random.Random(0), self.buffers.put)

    def ask(self, kind: str, fields: Any) -> Any:
        """The answer, when there is one at once.  Raises Status."""
        answers: list[Any] = []
        self.session.handle(kind, fields, answers.append)
        return answers[0] if answers else None

    def make(self, number: int, kind: ArrayType = KIND, placing: Placing = ONE) -> None:
        """An array, under that number."""
        self.ask(
            "make_error_arrays_request",
            message("MakeErrorArraysRequest")(
                array_specs=[spec_of(kind, placing)], array_handles=[number]
            ),
        )


@pytest.fixture(scope="module")
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    made = asyncio.new_event_loop()
    yield made
    made.close()


@pytest.fixture
def client(loop, caplog, monkeypatch) -> Iterator[Client]:
    monkeypatch.setattr(buffers, "PATIENCE", 0.01)
    yield Client(loop)
    assert not caplog.records, "a fault of the door, and none of the client's"


def array(**changed: Any) -> Any:
    """A request to make an array of eight numbers of whose bytes the number is 7."""
    made = message("MakeArrayFromHostBufferRequest")(
        shape=shape_of((4, 2)), sharding=shardings.sharding_proto(ONE), host_buffer_handle=7,
        array_handle=1,
    )  # fmt: skip
    made.dtype.CopyFrom(spec_of(KIND, ONE).dtype)
    for name, value in changed.items():
        if name == "kind":
            made.dtype.kind = value
        elif name == "strides":
            made.byte_strides.strides.extend(value)
            made.byte_strides.SetInParent()
        elif name == "dims":
            made.shape.CopyFrom(shape_of(value))
        elif name == "hlo":
            made.sharding.serialized_sharding.type_name = "xla::ifrt::HloSharding"
            made.sharding.serialized_sharding.data = value
        else:
            setattr(made, name, value)
    return made


def hlo(devices: list[int], **sharding: Any) -> bytes:
    made = message("HloShardingProto")(xla_op_sharding=message("OpSharding")(**sharding))
    made.devices.device_ids.extend(devices)
    return bytes(made.SerializeToString())


@pytest.mark.parametrize(
    ("changed", "code", "text"),
    [
        ({"kind": 1234}, UNIMPLEMENTED, "type 1234"),
        ({"dims": (-4, -2)}, INVALID, "-4"),
        ({"dims": (1 << 62, 4)}, INVALID, str(1 << 62)),
        ({"dims": (1,) * 70}, UNIMPLEMENTED, "70 dimensions"),
        ({"dims": (1 << 40, 2)}, EXHAUSTED, f"{1 << 43:,} bytes"),
        ({"dims": (4, 3)}, INVALID, "32 bytes for"),
        ({"hlo": hlo([9])}, INVALID, "(9,)"),
        ({"hlo": hlo([0, 0])}, INVALID, "twice"),
        ({"hlo": hlo([])}, INVALID, "devices ()"),
        ({"hlo": b"\xff"}, INVALID, "no message of the protocol"),
        (
            {"hlo": hlo([0, 1], type=3, tile_assignment_dimensions=[2, 1],
                        tile_assignment_devices=[0, 1]), "dims": (5, 2)},
            INVALID, "5 cannot be cut into 2 equal parts",
        ),
        (
            {"hlo": hlo([0, 1], type=3, tile_assignment_dimensions=[2, 1],
                        iota_reshape_dims=[1 << 40, 2], iota_transpose_perm=[0, 1])},
            UNIMPLEMENTED, "tiles",
        ),
        (
            {"hlo": hlo([0, 1], type=3, tile_assignment_dimensions=[2, 1],
                        iota_reshape_dims=[2], iota_transpose_perm=[3])},
            UNIMPLEMENTED, "[3]",
        ),
        ({"strides": (-8, 4)}, INVALID, "(-8, 4)"),
        ({"strides": (8,)}, INVALID, "(8,)"),
        ({"strides": (1 << 62, 4)}, INVALID, str(1 << 62)),
        ({"strides": (8, 8)}, INVALID, "(8, 8)"),
        ({"host_buffer_handle": 8}, NOT_FOUND, "the bytes 8 have not come"),
        ({"array_handle": 1 << 60}, INVALID, "means something already"),
    ],
)  # fmt: skip
def test_an_array_that_is_none_is_not_made(client, changed, code, text):
    client.buffers.put(7, bytes(32))
    with pytest.raises(Status) as refused:
        client.ask("make_array_from_host_buffer_request", array(**changed))
    assert (refused.value.code, text in str(refused.value)) == (code, True), refused.value


def test_a_number_is_used_once_and_what_it_means_stays(client):
    data = np.arange(8, dtype=np.float32)
    client.buffers.put(7, data.tobytes())
    client.ask("make_array_from_host_buffer_request", array())
    client.buffers.put(7, bytes(32))
    with pytest.raises(Status, match="the number 1 means something already"):
        client.ask("make_array_from_host_buffer_request", array())
    assert (asyncio.run(client.session._value(1).read()) == data.reshape(4, 2)).all()


@pytest.mark.parametrize("strides", [None, (8, 4), (4, 16)])
def test_strides_that_fit_are_taken(client, strides):
    data = np.arange(8, dtype=np.float32)
    client.buffers.put(7, data.tobytes())
    given = array() if strides is None else array(strides=strides)
    client.ask("make_array_from_host_buffer_request", given)
    found = asyncio.run(client.session._value(1).read())
    wanted = data.reshape(2, 4).T if strides == (4, 16) else data.reshape(4, 2)
    assert (found == wanted).all()


def shards(held: list[list[int]], parts: int) -> Any:
    """Halves of an array over two devices."""
    layout = shardings.Layout((("a0", 2),), (("a0",), ()))
    made = message("MakeArraysFromHostBufferShardsRequest")(array_handles=[1])
    spec = made.specs.add(array_spec=spec_of(KIND, Placing((0, 1), layout)))
    for indices in held:
        spec.addressable_shard_indices.add(indices=indices)
    for _ in range(parts):
        spec.host_buffers.add(
            dtype=spec_of(KIND, ONE).dtype, shape=shape_of((2, 2)), host_buffer_handle=7
        )
    return made


def test_one_part_may_be_several_shards(client):
    half = np.arange(4, dtype=np.float32).reshape(2, 2)
    client.buffers.put(7, half.tobytes())
    client.ask("make_arrays_from_host_buffer_shards_request", shards([[0, 1]], 1))
    found = asyncio.run(client.session._value(1).read())
    assert np.array_equal(found, [*half, *half])


@pytest.mark.parametrize(
    ("held", "parts"), [([], 0), ([[0]], 1), ([[0], [0]], 2), ([[0], [5]], 2), ([[0, 1], []], 2)]
)
def test_shards_that_are_not_all_of_an_array_make_none(client, held, parts):
    client.buffers.put(7, bytes(32))
    with pytest.raises(Status, match="shards") as refused:
        client.ask("make_arrays_from_host_buffer_shards_request", shards(held, parts))
    assert refused.value.code == INVALID


def copied(**fields: Any) -> tuple[str, Any]:
    return "copy_arrays_request", message("CopyArraysRequest")(array_handles=[1], **fields)


def assembled(*numbers: int) -> tuple[str, Any]:
    layout = shardings.Layout((("a0", 2),), (("a0",), ()))
    return "assemble_array_from_single_device_arrays_request", message(
        "AssembleArrayFromSingleDeviceArraysRequest"
    )(
        shape=shape_of((4, 2)),
        sharding=shardings.sharding_proto(Placing((0, 1), layout)),
        single_device_array_handles=numbers,
    )


def resharded(kind: ArrayType, count: int = 1) -> tuple[str, Any]:
    made = message("ReshardArraysRequest")(array_handles=[1])
    made.array_specs.extend([spec_of(kind, Placing((0,), whole(1, len(kind.shape))))] * count)
    return "reshard_arrays_request", made


def assigned(replicas: int, partitions: int) -> tuple[str, Any]:
    made = message("GetDefaultDeviceAssignmentRequest")
    return "get_default_device_assignment_request", made(
        num_replicas=replicas, num_partitions=partitions
    )


@pytest.mark.parametrize(
    ("asked", "text"),
    [
        (copied(device_ids=[0, 1]), "a copy on 2 devices of an array on 1"),
        (copied(device_ids=[7]), "(7,)"),
        (copied(result_handles=[5, 6]), "2 names for 1 arrays"),
        (assembled(1, 1), r"float32\[4,2\] where float32\[2,2\] is one"),
        (assembled(1), "1 shards for 2 devices"),
        (resharded(ArrayType((8,), "float32")), "said to be"),
        (resharded(ArrayType((2, 2), "float32")), "said to be"),
        (resharded(KIND, 2), "2 types for 1 arrays"),
        (assigned(0, 1 << 60), "0 x"),
        (assigned((1 << 64) - 1, 1), "devices of 4"),
    ],
)
def test_what_does_not_fit_the_arrays_of_the_client_is_refused(client, asked, text):
    client.make(1)
    with pytest.raises(Status, match=text) as refused:
        client.ask(*asked)
    assert refused.value.code == INVALID


def compiled(client: Client, code: Code) -> int:
    number: int = client.ask("compile_request", Requests.compile(code)).loaded_executable_handle
    return number


def test_a_call_with_other_arguments_than_the_functions_is_refused_before_it_runs(client):
    code = next(code for code in codes() if code.name == "both")
    number = compiled(client, code)
    client.make(1)
    client.make(2, ArrayType((4,), "float32"), Placing((0,), whole(1, 1)))
    call = message("LoadedExecutableExecuteRequest")
    for arguments, names, text in (
        ([1, 2], [], "takes"), ([1], [], "takes"), ([1, 9], [], "no array 9"),
        ([1, 1], [5], "1 names for 2 results"),
    ):  # fmt: skip
        with pytest.raises(Status, match=text):
            client.ask(
                "loaded_executable_execute_request",
                call(
                    loaded_executable_handle=number,
                    args_handles=arguments,
                    result_array_handle=names,
                ),
            )
    assert client.session._value(1), "an argument that the function donates is still there"


@pytest.mark.parametrize(
    "damage",
    [lambda data: b"", lambda data: b"no module", lambda data: data.replace(b"main", b"mein")],
)
def test_a_module_that_mlir_does_not_read_is_refused(client, damage: Callable[[bytes], bytes]):
    made = Requests.compile(codes()[0])
    made.program.data = damage(made.program.data)
    with pytest.raises(Status, match="compile_request: no module that JAX makes") as refused:
        client.ask("compile_request", made)
    assert refused.value.code == INVALID


def test_a_callback_without_its_number_is_refused(client):
    code = next(code for code in codes() if code.name == "asks")
    with mlir.make_ir_context():
        parsed = _jax.mlir.deserialize_portable_artifact(code.module)
        text = str(parsed.operation)
        assert "index = 0" in text
        module = artefact(ir.Module.parse(text.replace("index = 0", "other = 0")))
    with pytest.raises(Status, match="a callback that JAX has not made") as refused:
        client.ask("compile_request", Requests.compile(replace(code, module=module)))
    assert refused.value.code == INVALID


def test_options_without_a_device_are_refused(client):
    made = Requests.compile(codes()[0])
    options = message("XlaCompileOptionsProto").FromString(options_of((0,)))
    build = options.compile_options.executable_build_options
    del build.device_assignment.computation_devices[0].replica_device_ids[:]
    made.compile_options.data = options.SerializeToString()
    with pytest.raises(Status, match="one replica"):
        client.ask("compile_request", made)


@pytest.mark.parametrize(
    ("strides", "right"),
    [((8, 4), True), ((4, 16), True), ((8, 8), False), ((8,), False), ((1 << 62, 4), False)],
)
def test_elements_are_given_close_together_and_in_no_other_way(strides, right):
    from pathways_lab.door.arrays import _check_dense, strided

    data = np.arange(8, dtype=np.float32).reshape(4, 2)
    if right:
        _check_dense(data, strides)
        assert strided(data, strides) in (data.tobytes(), data.T.tobytes())
    else:
        with pytest.raises(Status, match="strides"):
            _check_dense(data, strides)


def test_a_client_keeps_so_many_numbers_and_no_more(client, monkeypatch):
    monkeypatch.setattr(state, "_MOST", 3)
    for number in (1, 2, 3):
        client.make(number)
    with pytest.raises(Status, match="3 arrays") as refused:
        client.make(4)
    assert refused.value.code == EXHAUSTED
    for number in range(5, 50):
        with pytest.raises(Status):
            client.make(number)
    assert len(client.session._unmade) == 0


def test_nothing_of_a_session_stays_on_the_lab(client, monkeypatch):
    monkeypatch.setattr(arrays, "_FEW", 0)  # it goes to the lab at once
    client.buffers.put(7, bytes(32))
    client.ask("make_array_from_host_buffer_request", array())
    assert client.lab.slices
    assert client.lab.session.held
    client.session.end()
    assert not client.lab.slices
    assert not client.lab.session.held
