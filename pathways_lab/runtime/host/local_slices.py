"""The slices that live on this host: their devices, and the code compiled for them.

Problem: a slice is announced, its devices are opened (which may wait for other
hosts), its functions arrive and are compiled, and all of that in other threads
and in any order.  The rest of the host wants to know the present state.

Rule for maintainers: state changes in the reactor's thread only; long work
happens in the compiler's pool, or in a thread of its own where it may
wait for other hosts.  A slice that cannot be opened and a function that cannot be
compiled are a Failure in their place, never an exception here.

Paper: section 4.1 (virtual slices bound to hosts), section 4.2.
"""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import jax

from pathways_lab.core.errors import Failure, PathwaysError
from pathways_lab.core.program.program import Call, Line, Plan, SliceId, Transfer, slice_name
from pathways_lab.core.slices.topology import SliceBinding
from pathways_lab.executor.actions import Action
from pathways_lab.executor.launcher import Launcher
from pathways_lab.executor.transfer_routes import Route, route
from pathways_lab.runtime import arrays
from pathways_lab.runtime.devices import IslandRuntime, Place, footprint_of
from pathways_lab.runtime.host.compiler import Code, Compiler, Executable
from pathways_lab.runtime.host.device_queues import Lanes
from pathways_lab.runtime.host.regroup import Reforming, Renewal
from pathways_lab.runtime.host.user_output import Output
from pathways_lab.runtime.islands.multi_host_runtime import SpanningCpuRuntime


class Told(Protocol):
    """The driver of a host, as far as its slices tell it something."""

    def post(self, function: Callable[..., list[Action] | None], *args: Any) -> None:
        """Call it in the reactor's thread, and carry out what it returns.  From any thread."""

    def opened(self, slice_id: SliceId) -> list[Action]:
        """The devices of a slice are known now."""

    def compiling(self, binding: SliceBinding, code: Code, start: float, waiting: int) -> None:
        """A function begins to be compiled: seconds of its start, and how many wait."""

    def compiled(
        self, binding: SliceBinding, code: Code, result: Executable | Failure, start: float,
        end: float,
    ) -> None:  # fmt: skip
        """A function was compiled or could not be; seconds of start and end."""

    def broken(self, number: int, reason: str) -> None:
        """The hosts of a formation live, but its connections do not.  From any thread."""


@dataclass(slots=True)
class Tenant:
    """A slice as this host knows it.

    place: its devices here, why there are none, or None until that is known.
    wanted: functions that are to be there.  executables: those that are.
    codes: what they were compiled from, where several hosts compute together.
    """

    binding: SliceBinding
    place: Place | Failure | None = None
    waiting: list[Callable[[Place | Failure], None]] = field(default_factory=list)
    wanted: set[str] = field(default_factory=set)
    executables: dict[str, Executable] = field(default_factory=dict)
    codes: dict[str, Code] = field(default_factory=dict)


@dataclass(eq=False, repr=False)
class Tenants:
    """All slices that this host was told of.  apart: the lab's hosts are on several machines."""

    _host: str
    _runtime: IslandRuntime
    _launcher: Launcher
    _compiler: Compiler
    _lanes: Lanes
    _told: Told
    _apart: bool = False
    _tenants: dict[SliceId, Tenant] = field(default_factory=dict, init=False)
    _found_in: Callable[[Tenant], dict[str, Executable]] | None = field(default=None, init=False)

    def __getitem__(self, slice_id: SliceId) -> Tenant:
        return self._tenants[slice_id]

    @property
    def none_here(self) -> bool:
        """Whether no slice has devices on this host."""
        return not any(self._host in tenant.binding.hosts for tenant in self._tenants.values())

    def client(self, slice_id: SliceId | None) -> str:
        """The client that has the slice; "" when it is not known here."""
        tenant = self._tenants.get(slice_id) if slice_id is not None else None
        return tenant.binding.client if tenant is not None else ""

    def where(self, slice_id: SliceId | None) -> Place | Failure | None:
        """The slice's devices here, why there are none, or None while that is not known."""
        tenant = self._tenants.get(slice_id) if slice_id is not None else None
        return tenant.place if tenant is not None else None

    def place(self, slice_id: SliceId | None) -> Place:
        """The same where it must be there.  Raises PathwaysError or RuntimeError."""
        place = self.where(slice_id)
        if isinstance(place, Failure):
            raise PathwaysError(place)
        if place is None:
            raise RuntimeError(f"slice {slice_id} has no open devices on {self._host}")
        return place

    def device(self, slice_id: SliceId, number: int) -> Any:
        """The device that a pickled virtual device is here; from any thread.  None: not known."""
        place = self.where(slice_id)
        return place.devices[number] if isinstance(place, Place) else None

    def route(self, plan: Plan, node: Transfer) -> Route:
        """This host's part in a transfer."""
        source, target = plan.values[node.input], plan.values[node.output]
        assert source.slice is not None
        assert target.slice is not None
        kind = arrays.physical_of(source)
        return route(
            kind.shape,
            kind.layout,
            arrays.physical_of(target).layout,
            self[source.slice].binding,
            self[target.slice].binding,
            self._host,
            self._apart,
        )

    def argument(
        self, plan: Plan | None, position: int, buffers: Sequence[memoryview], place: int
    ) -> Any:
        """The argument in this place of those that came with a grant; a Failure if malformed."""
        if plan is None:
            return None
        try:
            value = plan.values[plan.inputs[position]]
            return arrays.argument(buffers[place], value, lambda: self.place(value.slice))
        except Exception as error:
            return failure_of(f"argument {position} is malformed", error, self._host)

    # --- slices -------------------------------------------------------------------------

    def bind(self, binding: SliceBinding) -> None:
        """A slice exists; if it has devices here, they are opened."""
        known = self._tenants.get(binding.slice)
        if known is not None and known.binding == binding:
            return
        tenant = self._tenants[binding.slice] = Tenant(binding)
        if self._found_in is not None:
            tenant.executables = self._found_in(tenant)
        if self._host not in binding.hosts:
            self._launcher.bind(binding)
            return
        self._launcher.bind(binding, self._runtime.lane(binding))
        if len(binding.hosts) == 1:
            self._compiler.submit(lambda: self._open(tenant))
        else:
            # It may wait long for the other hosts: nothing else shall wait with it.
            name = f"open slice {binding.slice}"
            threading.Thread(target=self._open, args=(tenant,), name=name, daemon=True).start()

    def _open(self, tenant: Tenant) -> None:
        """In a thread that may wait."""
        try:
            place: Place | Failure = self._runtime.open(tenant.binding)
        except Exception as error:
            text = f"{self._host} could not open the devices of a slice"
            place = failure_of(text, error, self._host)
        self._told.post(self._opened, tenant, place)

    def _opened(self, tenant: Tenant, place: Place | Failure) -> list[Action]:
        current = self._tenants.get(tenant.binding.slice)
        if current is not tenant:
            # It was taken away meanwhile, or lies elsewhere now.
            if current is None or footprint_of(current.binding) != footprint_of(tenant.binding):
                self._close(tenant.binding)
            return []
        tenant.place = place
        waiting, tenant.waiting = tenant.waiting, []
        for call in waiting:
            call(place)
        return self._told.opened(tenant.binding.slice)

    def when_open(self, slice_id: SliceId, call: Callable[[Place | Failure], None]) -> None:
        """Call with the slice's place, now or as soon as it is known."""
        tenant = self._tenants[slice_id]
        if tenant.place is None:
            tenant.waiting.append(call)
        else:
            call(tenant.place)

    def unbind(self, slice_id: SliceId) -> list[Action]:
        """A slice is gone, and with it the queue of devices that nobody else uses."""
        return self._end(slice_id, self._launcher.unbind)

    def leave(self, slice_id: SliceId) -> list[Action]:
        """The same for a slice that lies elsewhere now, with what is on it."""
        return self._end(slice_id, self._launcher.leave)

    def _end(self, slice_id: SliceId, end: Callable[[SliceId], list[Action]]) -> list[Action]:
        tenant = self._tenants.pop(slice_id, None)
        if tenant is None:
            return []
        actions = end(slice_id)
        if self._host in tenant.binding.hosts:
            # At once: it may be opened again by the next message.
            self._close(tenant.binding)
            lane = self._runtime.lane(tenant.binding)
            ours = [t.binding for t in self._tenants.values() if self._host in t.binding.hosts]
            if lane not in {self._runtime.lane(binding) for binding in ours}:
                self._lanes.drop(lane)
        return actions

    def _close(self, binding: SliceBinding) -> None:
        if self._runtime.close(binding):
            self._compiler.submit(jax.clear_caches)

    def binding(self, slice_id: SliceId) -> SliceBinding | None:
        """Where a slice lies, if that was told here."""
        tenant = self._tenants.get(slice_id)
        return tenant.binding if tenant is not None else None

    def reform(self, slices: Sequence[SliceId], output: Output) -> None:
        """Slices that share a lane get new devices there, before anything else is launched."""
        tenants = [self._tenants[slice_id] for slice_id in slices if slice_id in self._tenants]
        renewals = []
        for tenant in tenants:
            if isinstance(tenant.place, Place):
                compiled = [(tenant.codes[key], e) for key, e in tenant.executables.items()]
                renewals.append(Renewal(tenant.binding, tenant.place, tuple(compiled)))
            for function in tenant.executables:
                self._launcher.first_launches_alone(function, tenant.binding.slice)

        def failed(slice_id: SliceId, error: BaseException) -> None:
            self._told.post(self._not_reformed, slice_id, error)

        lane = self._runtime.lane(tenants[0].binding)
        self._lanes.put(lane, Reforming(renewals, self._runtime, output, failed))

    def _not_reformed(self, slice_id: SliceId, error: BaseException) -> None:
        tenant = self._tenants.get(slice_id)
        if tenant is not None:
            text = f"the hosts of slice {slice_name(slice_id)} could not be brought together again"
            tenant.place = failure_of(text, error, self._host)

    def meet(self, place: Place, call: Call) -> None:
        """Before the first launch of a function on several hosts.  In the lane's thread."""
        self._runtime.meet(place.binding, f"{call.slice}/{call.function}")

    def explained(self, place: Place, failure: Failure) -> Failure:
        """A gang's failure; other hosts may know its cause better.  In the lane's thread."""
        if isinstance(self._runtime, SpanningCpuRuntime):
            formation = place.footprint.formation
            return self._runtime.explained(place.binding, formation, failure, self._told.broken)
        return failure

    # --- functions ----------------------------------------------------------------------

    def find_in(self, made: Callable[[Tenant], dict[str, Executable]] | None) -> None:
        """From now on those who launch find a slice's executables in what this makes of them."""
        self._found_in = made
        for tenant in self._tenants.values():
            tenant.executables = dict(tenant.executables) if made is None else made(tenant)

    def prepare(self, code: Code) -> None:
        """Compile a function for its slice, as soon as that has devices."""
        tenant = self._tenants[code.slice]
        tenant.wanted.add(code.function)

        def compile_it(place: Place | Failure) -> None:
            if isinstance(place, Failure):
                self._compiled(tenant, code, (), place, 0.0, 0.0)
                return
            devices = place.devices
            self._compiler.prepare(
                code,
                place,
                lambda result, start, end: self._told.post(
                    self._compiled, tenant, code, devices, result, start, end
                ),
                lambda start, waiting: self._told.post(
                    self._told.compiling, tenant.binding, code, start, waiting
                ),
            )

        self.when_open(code.slice, compile_it)

    def forget(self, functions: Iterable[tuple[str, SliceId]]) -> None:
        """Nobody needs these any more."""
        for function, slice_id in functions:
            tenant = self._tenants.get(slice_id)
            if tenant is not None:
                tenant.wanted.discard(function)
                tenant.executables.pop(function, None)
                tenant.codes.pop(function, None)
                self._forget(tenant, function)

    def _forget(self, tenant: Tenant, function: str) -> None:
        """Slices of the same devices share what was compiled for them."""
        if isinstance(tenant.place, Place):
            footprint = tenant.place.footprint
            users = [t.place for t in self._tenants.values() if function in t.wanted]
            if not any(isinstance(p, Place) and p.footprint is footprint for p in users):
                self._compiler.forget(footprint, function)

    def _compiled(
        self,
        tenant: Tenant,
        code: Code,
        devices: tuple[Any, ...],
        result: Executable | Failure,
        start: float,
        end: float,
    ) -> None:
        if self._tenants.get(code.slice) is not tenant:
            return  # for devices that the slice has no more
        if code.function not in tenant.wanted:
            self._forget(tenant, code.function)
            return
        if isinstance(result, Executable):
            if isinstance(tenant.place, Place) and tenant.place.devices is not devices:
                self.prepare(code)  # they were formed again meanwhile
                return
            tenant.executables[code.function] = result
            self._launcher.needs(code.function, code.slice, result.temporary)
            if result.alone:
                self._launcher.launches_alone(code.function, code.slice)
            if len(tenant.binding.hosts) > 1:
                tenant.codes[code.function] = code
                self._launcher.first_launches_alone(code.function, code.slice)
        self._told.compiled(tenant.binding, code, result, start, end)


def failure_of(what: str, error: BaseException, host: str, line: Line | None = None) -> Failure:
    """An exception as data; one that is on purpose says itself what happened."""
    if isinstance(error, PathwaysError):
        return error.failure
    return Failure(
        "execute",
        f"{what}: {error}",
        host=host,
        line=line or Line(),
        details="".join(traceback.format_exception(error)),
    )
