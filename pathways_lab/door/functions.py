"""Requests about functions: compiled, described, called, given up.

Problem: a call is one gang on the lab, however many arrays and shards it has, and the client goes
on without an answer.

Rule for maintainers: a method for each kind of request, named as it; see :mod:`.session`.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from pathways_lab.client.code.tiles import whole
from pathways_lab.client.functions.array_types import ArrayType
from pathways_lab.client.functions.jit import CompiledFunction
from pathways_lab.client.lab import sharing
from pathways_lab.client.lab.devices import Slice
from pathways_lab.client.program.graph import Argument, CallNode, Prepared, Ref, prepare
from pathways_lab.client.program.ifrt import LoadedProgram
from pathways_lab.client.session.handles import Handle
from pathways_lab.core.errors import Failure, PathwaysError
from pathways_lab.core.program.program import Line
from pathways_lab.door import (
    colocated,
    dtypes,
    exchange,
    options,
    over_meshes,
    programs,
    shardings,
    strings,
    values,
)
from pathways_lab.door.colocated import Colocated
from pathways_lab.door.exchange import Exchange
from pathways_lab.door.over_meshes import OverMeshes
from pathways_lab.door.programs import Loaded
from pathways_lab.door.protocol.http2 import log
from pathways_lab.door.protocol.messages import message
from pathways_lab.door.protocol.server import Reply
from pathways_lab.door.protocol.status import INVALID, NOT_FOUND, UNIMPLEMENTED, Status
from pathways_lab.door.shardings import Placing
from pathways_lab.door.state import DONATE, Function, State
from pathways_lab.door.strings import Strings
from pathways_lab.door.values import Failed, Value, Whole


class Functions(State):
    """The part of a session that has to do with functions and their calls."""

    def _compile_request(self, request: Any, reply: Reply) -> Any:
        if request.program.type_name == colocated.TYPE:
            return self._compiled(self._colocated(request.program.data))
        if request.program.type_name == over_meshes.TYPE:
            loaded = over_meshes.load(request.program.data, request.compile_options.data)
            loaded.on(self.slice_of, ())  # what hosts cannot run is refused now
            return self._compiled(loaded)
        if request.program.type_name != "xla::ifrt::XlaProgram":
            kind = request.program.type_name
            raise Status(UNIMPLEMENTED, f"compile_request: programs of the kind {kind!r}")
        if request.host_callbacks:
            raise Status(UNIMPLEMENTED, "compile_request: host callbacks are not served")
        devices = options.devices_of(request.compile_options.data)
        self.slice_of(devices)
        return self._compiled(
            programs.load(request.program.data, devices, self._kind, self._remote)
        )

    def _colocated(self, data: bytes) -> Colocated:
        """A function that runs beside the devices.  Raises Status."""
        said = message("CustomCallProgramProto").FromString(data)
        if said.type != colocated.KIND:
            raise Status(
                UNIMPLEMENTED, f"compile_request: custom programs of the kind {said.type!r}"
            )
        devices = tuple(said.devices.device_ids)
        self.slice_of(devices)
        ins, outs = (
            [self._typed(spec.dtype, spec.shape, spec.sharding) for spec in specs]
            for specs in (said.input_specs, said.output_specs)
        )
        number, remote = self._beside.keep(said.serialized_program_text)
        (in_kinds, in_placings), (out_kinds, out_placings) = (
            (tuple(kind for kind, _ in each), tuple(placing for _, placing in each))
            for each in (ins, outs)
        )
        return Colocated(
            said.name, devices, number, remote, in_kinds, in_placings, out_kinds, out_placings
        )

    def _compiled(self, loaded: Function) -> Any:
        number = self._new(0)
        devices = loaded.devices
        self._programs[number] = loaded
        made = message("CompileResponse")(
            loaded_executable_handle=number,
            name=loaded.name,
            num_devices=len(devices),
            fingerprint_value=loaded.key.encode(),
            ready_future_handle=self._future(),
        )
        made.device_ids.extend(devices)
        made.addressable_device_ids.extend(devices)
        if isinstance(loaded, OverMeshes):
            made.mpmd_addressable_devices.SetInParent()
            by_mesh = made.mpmd_addressable_devices.mpmd_addressable_devices
            for name, named in loaded.meshes.items():
                by_mesh[name].mpmd_addressable_device_ids.extend(named)
        else:
            made.mpmd_addressable_devices_error.code = UNIMPLEMENTED
            made.mpmd_addressable_devices_error.message = "this is a program of one mesh"
        return made

    def _program(self, number: int) -> Function:
        loaded = self._programs.get(number)
        if loaded is None:
            raise Status(NOT_FOUND, f"there is no executable {number}")
        return loaded

    def _loaded_executable_metadata_request(self, request: Any, reply: Reply) -> Any:
        loaded = self._program(request.loaded_executable_handle)
        made = message("LoadedExecutableMetadataResponse")()
        out_kinds = loaded.out_kinds[: loaded.results]
        out_placings = loaded.out_placings[: loaded.results]
        for listed, placings in (
            (made.parameter_shardings, loaded.in_placings),
            (made.output_shardings, out_placings),
        ):
            listed.shardings.extend(map(shardings.op_sharding, placings))
        made.parameter_shardings.SetInParent()
        made.output_shardings.SetInParent()
        for kinds, listed in (
            (loaded.in_kinds, made.parameter_layouts_list),
            (out_kinds, made.output_layouts_list),
        ):
            listed.SetInParent()
            for kind in kinds:
                listed.layouts.add(minor_to_major=reversed(range(len(kind.shape))))
        made.output_memory_kinds.SetInParent()
        made.output_memory_kinds.memory_kind_lists.add().memory_kinds.extend(
            ["device"] * loaded.results
        )
        made.donated_input_indices.donated_input_indices.extend(loaded.donated)
        made.donated_input_indices.SetInParent()
        made.compiled_memory_stats_error.code = UNIMPLEMENTED
        made.compiled_memory_stats_error.message = "memory statistics are not served"
        made.mpmd_compiled_memory_stats_error.code = UNIMPLEMENTED
        made.mpmd_compiled_memory_stats_error.message = "memory statistics are not served"
        return made

    def _loaded_executable_mpmd_metadata_request(self, request: Any, reply: Reply) -> Any:
        made = message("LoadedExecutableMpmdMetadataResponse")()
        made.mpmd_compiled_memory_stats_error.code = UNIMPLEMENTED
        made.mpmd_compiled_memory_stats_error.message = "this is a program of one mesh"
        return made

    def _loaded_executable_human_readable_program_text_request(
        self, request: Any, reply: Reply
    ) -> None:
        loaded = self._program(request.loaded_executable_handle)
        if not isinstance(loaded, Loaded):
            raise Status(UNIMPLEMENTED, f"{loaded.name} is no program of one mesh: it has no text")

        async def told() -> Any:
            made = message("LoadedExecutableHumanReadableProgramTextResponse")()
            text = await asyncio.to_thread(programs.text_of, loaded, self._kind)
            made.human_readable_program_text = text
            return made

        self._later("loaded_executable_human_readable_program_text_request", reply, told())

    def _loaded_executable_cost_analysis_request(self, request: Any, reply: Reply) -> Any:
        made = message("LoadedExecutableCostAnalysisResponse")()
        made.status.code = UNIMPLEMENTED
        made.status.message = "cost analysis is not served"
        return made

    def _loaded_executable_delete_request(self, request: Any, reply: Reply) -> Any:
        self._forget(request.loaded_executable_handle)
        return message("LoadedExecutableDeleteResponse")(future_handle=self._future())

    def _loaded_executable_is_deleted_request(self, request: Any, reply: Reply) -> Any:
        gone = request.loaded_executable_handle not in self._programs
        return message("LoadedExecutableIsDeletedResponse")(is_deleted=gone)

    def _loaded_executable_destruct_request(self, request: Any, reply: Reply) -> Any:
        gone = request.loaded_executable_handle
        self._forget(gone)
        self._prepared = {key: p for key, p in self._prepared.items() if key[0] != gone}
        self._over = {key: p for key, p in self._over.items() if key[0] != gone}
        return message("LoadedExecutableDestructResponse")()

    def _forget(self, number: int) -> None:
        gone = self._programs.pop(number, None)
        if not isinstance(gone, Colocated):
            return
        self._beside_on = {k: f for k, f in self._beside_on.items() if k[0] != gone.number}
        # As a call, it has its turn after those that were made before.
        with contextlib.suppress(PathwaysError, Status):
            drop = self._function(gone.devices, 0, self._beside.dropping)
            named = self._beside_put(gone, np.int32(gone.number))
            self._turns[gone.devices] = drop(self._turn(gone), named)

    def _turn(self, loaded: Colocated) -> Any:
        """The value that the last call on these devices has handed on, or will."""
        last = self._turns.get(loaded.devices)
        lost = last is None or last.failure is not None or last.slice.released
        return self._beside_put(loaded, np.True_) if lost else last

    def _beside_put(self, loaded: Function, data: Any) -> Handle:
        """A whole array on the devices of a function."""
        kind = ArrayType(np.shape(data), str(data.dtype))
        place, layout = self.slice_of(loaded.devices), whole(len(loaded.devices), len(kind.shape))
        return self._lab.session.put(np.asarray(data), kind, place, layout, "device_put")

    def _function(
        self, devices: tuple[int, ...], number: int, make: Callable[[Slice], CompiledFunction]
    ) -> CompiledFunction:
        """The outcome of *make* for these devices, made once.  number: of its function, or 0."""
        place = self.slice_of(devices)
        key = number, make.__name__, place.id
        if key not in self._beside_on:
            self._beside_on[key] = make(place)
        return self._beside_on[key]

    # --- calls ----------------------------------------------------------------------------

    def _loaded_executable_execute_request(self, request: Any, reply: Reply) -> Any:
        loaded = self._program(request.loaded_executable_handle)
        named = list(request.result_array_handle)
        if named and len(named) != loaded.results:
            raise Status(INVALID, f"{len(named)} names for {loaded.results} results")
        made_all = self._run(request, loaded)
        outputs = made_all[: loaded.results]
        made = message("LoadedExecutableExecuteResponse")()
        for index, (number, value) in enumerate(
            zip(named or [0] * len(outputs), outputs, strict=True)
        ):
            number = self._keep(number, value)
            if not named:
                made.outputs.add(
                    dtype=(
                        dtypes.token() if index in loaded.tokens else dtypes.proto(value.kind.dtype)
                    ),
                    shape=message("ShapeProto")(dims=value.kind.shape),
                    sharding=shardings.sharding_proto(value.placing),
                    array_handle=number,
                )
        if request.result_status_handle:
            self._future(made_all, request.result_status_handle)
        elif request.execute_options.fill_status:
            made.status_handle = self._future(made_all)
        return made

    def _run(self, request: Any, loaded: Function) -> list[Value]:
        """One call: one gang, whatever it takes and returns."""
        kept = set(request.execute_options.non_donatable_input_indices)
        given = [self._value(number) for number in request.args_handles]
        if [value.kind for value in given] != list(loaded.in_kinds):
            kinds = [value.kind for value in given], loaded.in_kinds
            said, takes = ([*map(str, each)] for each in kinds)
            raise Status(INVALID, f"{loaded.name} takes {takes!s:.500}, and not {said!s:.500}")
        consumed = [n for n in loaded.donated if n not in kept]
        overwritten = tuple(n for n in consumed if given[n].given_up)
        try:
            if isinstance(loaded, Colocated):
                return self._run_beside(loaded, given)
            if isinstance(loaded, Loaded) and loaded.exchange is not None:
                return self._exchanged(loaded, loaded.exchange, given)
            number = request.loaded_executable_handle
            if isinstance(loaded, OverMeshes):
                handles = [value.handle() for value in given]
                made = self._over_meshes(number, loaded, overwritten)(*handles)
            else:
                arguments = [value.argument() for value in given]
                prepared = self._prepare(number, loaded, arguments, overwritten)
                made = self._lab.session.call(prepared, arguments)
        except (PathwaysError, Status) as error:
            results: list[Value] = [
                Failed(kind, placing, error)
                for kind, placing in zip(loaded.out_kinds, loaded.out_placings, strict=True)
            ]
        else:
            if isinstance(loaded, OverMeshes):
                passed = set(map(id, made))
                for value, handle in zip(given, handles, strict=True):
                    value.shared = value.shared or id(handle) in passed
            elif loaded.reorders:
                # A gang's results are on its own slice, whose devices have one order.
                made = list(map(self._as_placed, made, loaded.out_placings))
            results = list(map(Whole, loaded.out_kinds, loaded.out_placings, made))
        # The lab keeps what the call reads until it is over; nobody else has it any more.
        self._consume(DONATE, [request.args_handles[n] for n in consumed])
        return results

    def _exchanged(self, loaded: Loaded, with_: Exchange, given: Sequence[Value]) -> list[Value]:
        """Take what another client gave, or give it these."""
        session, other = self._lab.session, with_.other
        if loaded.in_kinds[:1] != (exchange.NUMBER,):
            raise Status(INVALID, f"{loaded.name}: no number comes first")
        number, *rest = given
        name = exchange.named(int(np.asarray(number.argument())))
        if with_.way == exchange.GIVE:
            sharing.give(session, name, [value.handle() for value in rest], other, self._not_given)
            made = [number.handle()]
        else:
            made = sharing.take(session, name, exchange.PATIENCE, other)
        if len(made) != len(loaded.out_kinds):
            raise Status(INVALID, f"{loaded.name}: {len(loaded.out_kinds)} arrays for {len(made)}")
        for handle, wanted in zip(made, loaded.out_kinds, strict=True):
            if (handle.shape, handle.type.dtype) != (wanted.shape, wanted.dtype):
                raise Status(INVALID, f"{loaded.name}: {wanted} for {handle.type}")
        placed = list(map(self._as_placed, made, loaded.out_placings))
        return list(map(Whole, loaded.out_kinds, loaded.out_placings, placed))

    @staticmethod
    def _not_given(why: Failure) -> None:
        """The other client waits for a while, and says what it did not get."""
        log.warning("no values for another client: %s", why)

    def _run_beside(self, loaded: Colocated, given: Sequence[Value]) -> list[Value]:
        """One call of colocated Python."""
        handles = [
            value.bytes_on(functools.partial(self._beside_put, loaded))
            if isinstance(value, Strings)
            else values.moved(value.handle(), loaded.here(value.placing, value.kind), self)
            for value in given
        ]
        call = self._function(loaded.devices, loaded.number, loaded.calling)
        check = self._function(loaded.devices, loaded.number, loaded.checking)
        self._turns[loaded.devices], *said = call(self._turn(loaded), *handles)
        over, *results = check(*said)
        made: list[Value] = []
        for kind, placing, handle in zip(
            loaded.out_kinds, loaded.out_placings, results, strict=True
        ):
            if kind.dtype == strings.NAME:
                made.append(Strings(kind, placing, None, handle))
            else:
                made.append(Whole(kind, placing, values.moved(handle, placing, self)))
        whether = Placing(loaded.devices, whole(len(loaded.devices), 0))
        return [*made, Whole(ArrayType((), "bool"), whether, over)]

    def _over_meshes(
        self, number: int, loaded: OverMeshes, overwritten: tuple[int, ...]
    ) -> LoadedProgram:
        key = number, overwritten
        known = self._over.get(key)
        if known is None or any(on.released or on.state == "lost" for on in known.slices):
            known = self._over[key] = loaded.on(self.slice_of, overwritten)
        return known

    def _as_placed(self, handle: Handle, placing: Placing) -> Handle:
        return values.moved(handle, placing, self)

    def _prepare(
        self, number: int, loaded: Loaded, given: Sequence[Any], overwritten: tuple[int, ...]
    ) -> Prepared:
        place = self.slice_of(loaded.devices)
        key = (
            number,
            overwritten,
            place.id,
            *[(x.slice.id, x.layout) if type(x) is Handle else None for x in given],
        )
        known = self._prepared.get(key)
        if known is None or known.released:
            body: Any = loaded.donating(overwritten)
            inputs = tuple(
                Ref(x.type, x.slice, x.layout, f"argument {n}", Argument(n))
                if type(x) is Handle
                else Ref(loaded.in_types[n], place, None, f"argument {n}", Argument(n))
                for n, x in enumerate(given)
            )
            outputs = tuple(Ref(kind, place, name=loaded.name) for kind in loaded.out_types)
            node = CallNode(body, place, inputs, outputs, loaded.name, Line())
            known = self._prepared[key] = prepare(loaded.name, [node], outputs)
        return known

    def _loaded_executable_fetch_execute_result_request(self, request: Any, reply: Reply) -> None:
        kind = "loaded_executable_fetch_execute_result_request"
        made = message("LoadedExecutableFetchExecuteResultResponse")()
        self._when_there(kind, reply, self._futured(request.result_status_handle), made)
