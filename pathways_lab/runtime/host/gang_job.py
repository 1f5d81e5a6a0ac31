"""One gang between the launcher and its device queue: payloads in, payloads out.

Problem: the launcher speaks of slots, JAX of arrays.  A missing input becomes
zeros, a donated one is forgotten, results of a poisoned gang reach no reader,
and every error becomes one Failure that names the gang, the device and the user's
line.

Rule for maintainers: a job touches payloads only between its hand-over to the device
queue and its end; until then the launcher keeps its slots alive.

Paper: section 4.4, section 4.5.
"""

from __future__ import annotations

import re
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from pathways_lab.core.diagnosis.stall import LAUNCHED, QUEUED, WAITING, Seen
from pathways_lab.core.errors import Failure, PathwaysError
from pathways_lab.core.program.program import Call, Plan
from pathways_lab.executor.actions import Key, Launch
from pathways_lab.executor.local_array import Slot
from pathways_lab.executor.steps import Gang
from pathways_lab.runtime import arrays, nan_checks
from pathways_lab.runtime.devices import Place
from pathways_lab.runtime.host.compiler import Executable
from pathways_lab.runtime.host.device_queues import Times
from pathways_lab.runtime.host.host_loop import Lap, Laps

_LEFT_BEHIND = 1.0
"""Seconds after which a gang that was ended, and does not end, is not waited for any more."""
_LOOK = 0.002
"""Seconds between two looks at a gang that may never end."""
_LAST_ERROR = re.compile(r"^(?:\w+\.)*\w*(?:Error|Exception|Interrupt|Warning)\b.*", re.MULTILINE)


class CallbackError(RuntimeError):
    """User code that a gang called back raised on a device."""

    def __init__(self, device: int, error: BaseException) -> None:
        super().__init__(f"{type(error).__name__}: {error}")
        self.device = device
        self.__cause__ = error


@dataclass(slots=True)
class Work:
    """When this host received a grant, and prepared all its gangs, on its monotonic clock.

    told: the timeline knows.  free: the order is off.
    """

    received: float
    began: float
    ended: float = 0.0
    told: bool = False
    free: bool = False


class GangJob:
    """A gang as a lane sees it (see :class:`pathways_lab.runtime.host.device_queues.Job`).

    executable: None when it is not there; then the gang fails in its place.
    meet(job): called before the first launch of a function on several hosts.
    on_over(job, times, failure): called in the lane's threads.
    handed: monotonic seconds when its inputs and its turn had come.
    laps: of a loop, once it is over.
    announced: the timeline knows already that it was launched.
    doomed: why it shall not be launched, or was ended: its devices are formed again.
    """

    __slots__ = (
        "_executable",
        "_host",
        "_meet",
        "_on_over",
        "announced",
        "called",
        "devices",
        "doomed",
        "handed",
        "laps",
        "launch",
        "place",
    )

    def __init__(
        self,
        launch: Launch,
        place: Place,
        executable: Executable | None,
        host: str,
        meet: Callable[[GangJob], None],
        on_over: Callable[[GangJob, Times, Failure | None], None],
        handed: float,
    ) -> None:
        self.launch = launch
        self.place = place
        self.devices = place.locals
        self.handed = handed
        self.called = 0.0
        self.announced = False
        self.laps: tuple[Lap, ...] = ()
        self.doomed: Failure | None = None
        self._executable = executable
        self._host = host
        self._meet = meet
        self._on_over = on_over

    @property
    def awaited(self) -> bool:
        """Whether somebody waits for its end."""
        return self.launch.awaited

    def start(self) -> Any:
        launch, executable = self.launch, self._executable
        if self.doomed is not None:
            raise PathwaysError(self.doomed)
        self.called = time.monotonic()
        if executable is None:
            raise missing(launch.call, self._host)
        if executable.calls_python:
            executable.gangs.key, executable.gangs.errors = launch.key, []
        if launch.first:
            self._meet(self)
        arguments = []
        for slot in launch.inputs:
            array = gathered(slot, self.place)
            arguments.append(arrays.zeros(slot.value, self.place) if array is None else array)
        for position in launch.copies:
            slot = launch.inputs[position]
            arguments[position] = arrays.copied(slot.value, arguments[position], self.place)
        results, receipt = executable(arguments)
        for position in launch.call.donated:
            if position not in launch.copies:
                launch.inputs[position].payload = None
        if launch.poison is None:
            for slot, result in zip(launch.outputs, results, strict=True):
                slot.payload = result
        return receipt

    def rest(self) -> None:
        return None

    def ready(self, receipt: Any) -> bool:
        return bool(receipt.is_ready())

    def wait(self, receipt: Any) -> None:
        work = self.launch.stamp
        if self.doomed is not None or (isinstance(work, Work) and work.free):
            outwait(receipt, lambda: self.doomed)
        receipt.block_until_ready()
        if isinstance(receipt, Laps):
            self.laps = receipt.laps
        assert self._executable is not None
        if self._executable.calls_python and self._executable.gangs.errors:
            raise CallbackError(*self._executable.gangs.errors[0])
        if self._executable.check is not None and self.launch.poison is None:
            inputs = [slot.value for slot in self.launch.inputs]
            outputs = [slot.value for slot in self.launch.outputs]
            nan_checks.complain(receipt, self.launch.call, inputs, outputs, self.place.binding)

    def over(self, times: Times, error: BaseException | None) -> None:
        self._on_over(self, times, None if error is None else self._failure(error))

    def _failure(self, error: BaseException) -> Failure:
        call = self.launch.call
        if self.doomed is not None:
            return doom(self.doomed, self.launch.plan, call, self._host)
        return failure_in(error, self.launch.plan, call, self._host)


def outwait(receipt: Any, doomed: Callable[[], Failure | None]) -> None:
    """Wait for what may hang, by looking: nothing wakes a thread that waits in native code.

    Most collectives raise when their connections are cut.  A few miss it
    and wait for ever, in a thread of a client that is not used any more.
    """
    left = _LEFT_BEHIND
    while not receipt.is_ready():
        why = doomed()
        if why is not None:
            if left <= 0.0:
                raise PathwaysError(why)
            left -= _LOOK
        time.sleep(_LOOK)


def doom(why: Failure, plan: Plan, call: Call, host: str) -> Failure:
    """Why devices are formed again, as the failure of one of their gangs."""
    return replace(why, program=plan.name, node=call.name, host=host, line=call.line)


def gathered(slot: Slot, place: Place) -> Any:
    """The inputs of a gang, or None when there are none."""
    array = slot.payload
    if isinstance(array, arrays.OnDemand):
        array = array.array()
    if array is not None and place.renewed:
        array = arrays.here(slot.value, array, place)
    return array


def missing(call: Call, host: str) -> PathwaysError:
    """It should not have been granted."""
    name = call.name or call.function
    return PathwaysError(
        Failure("internal", f"{name} was launched on {host} but never compiled there")
    )


def failure_in(error: BaseException, plan: Plan, call: Call, host: str) -> Failure:
    """The failure of a gang, with everything that is known."""
    known = error.failure if isinstance(error, PathwaysError) else None
    device = known.device if known else getattr(error, "device", None)
    return Failure(
        known.kind if known else "execute",
        known.message if known else f"{call.name or 'a gang'} failed: {summary(error)}",
        known.remedy if known else "",
        program=plan.name,
        node=call.name,
        host=known.host or host if known else host,
        device="" if device is None else str(device),
        line=call.line,
        details="".join(traceback.format_exception(error)),
    )


def progress(gangs: Iterable[Gang], jobs: Mapping[Key, GangJob]) -> Iterator[Seen]:
    """The launched and the other ones of *gangs*.  jobs: those handed to device queues."""
    now = time.monotonic()
    for gang in gangs:
        job = jobs.get((gang.run.id, gang.index))
        state, seconds = WAITING if job is None else QUEUED, 0.0
        if job is not None and job.called:
            state, seconds = LAUNCHED, now - job.called
        yield Seen(gang.run.id, gang.index, state, seconds, gang.locals)


def summary(error: BaseException) -> str:
    """The line of an error that says most: of a remote traceback in it, the last one."""
    text = str(error).strip() or type(error).__name__
    if "Traceback (most recent call last)" in text:
        found = _LAST_ERROR.findall(text)
        if found:
            return str(found[-1]).strip()
    return text.splitlines()[0]
