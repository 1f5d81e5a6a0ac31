"""The simulated world with the launchers of real device processes in place of its hosts.

What is simulated is what a launcher's rim does: devices take their time, parts of
transfers travel, reports and messages are late.  Every decision of the host is the
launcher's own.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar

from pathways_lab.core.errors import Failure
from pathways_lab.core.messages import Grant
from pathways_lab.core.program.layout import Layout
from pathways_lab.core.program.program import Call, SliceId, Value
from pathways_lab.executor.actions import (
    Action,
    Broken,
    CancelReceive,
    Key,
    Launch,
    Receive,
    Report,
    Send,
)
from pathways_lab.executor.launcher import Launcher
from pathways_lab.sim import world as worlds
from pathways_lab.sim.host import Host
from pathways_lab.sim.parts import Part, RunHere, Task, WorldPort


@dataclass
class Letterbox:
    """One transfer: hosts that have sent, why there is nothing, hosts that can receive."""

    sent: set[str] = field(default_factory=set)
    failure: Failure | None = None
    waiting: dict[str, LauncherHost] = field(default_factory=dict)


class LauncherHost(Host):
    """A device process without JAX and without threads.

    waits: whether it waits for memory.
    """

    waits: ClassVar[bool] = True
    mail: ClassVar[dict[int, dict[Key, Letterbox]]] = {}
    """Of every world."""

    def __init__(self, world: WorldPort, name: str, island: str) -> None:
        super().__init__(world, name, island)
        self.limit = world.machine.memory
        self.launcher = Launcher(name, island, self.limit if self.waits else None)
        self.known: set[SliceId] = set()
        self.here: dict[int, RunHere] = {}

    @property
    def boxes(self) -> dict[Key, Letterbox]:
        return self.mail.setdefault(id(self.world), {})

    def _meet(self, slice_id: SliceId) -> None:
        if slice_id not in self.known:
            self.known.add(slice_id)
            binding = self.world.bindings[slice_id]
            lane = "+".join(sorted(map(str, binding.devices)))
            self.launcher.bind(binding, lane if self.name in binding.hosts else "")

    # --- messages ---------------------------------------------------------------------

    def grant(self, grant: Grant) -> None:
        plan = self.world.plans[grant.plan]
        for slice_id in plan.slices:
            self._meet(slice_id)
        if self.launcher.plan(plan.key) is None:
            self.launcher.program(plan)
            for step in plan.steps:
                if isinstance(step.node, Call):
                    cost = self.world.machine.cost(step.node.function)
                    self.launcher.needs(step.node.function, step.node.slice, cost.temporary)
        self.here.setdefault(grant.run, RunHere(grant, plan))
        arguments = {p: "bytes" for p, b in enumerate(grant.inputs) if b is None}
        self._do(self.launcher.grant(grant, arguments))

    def lacks(self, buffer: int, content: object) -> str:
        """Contents are not carried here."""
        slot = self.launcher.buffers.get(buffer)
        return "no value" if slot is None or slot.failure is not None else ""

    def free(self, buffers: tuple[int, ...]) -> None:
        self._do(self.launcher.free(buffers))

    def abort(self, run: int) -> None:
        self._do(self.launcher.abort(run, Failure("cancelled", "ended early")))

    def upload(self, buffer: int, where: SliceId, nbytes: int) -> None:
        self._meet(where)
        value = Value((nbytes,), "uint8", where, Layout((("x", 1),), ((),)), nbytes)
        self._do(self.launcher.uploaded(buffer, value, "bytes"))
        self.resident.append(buffer)
        self.flush_soon()

    def pump(self) -> None:
        """The launcher says by itself what may begin."""

    # --- what the launcher decides -------------------------------------------------------

    def _do(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Launch():
                    self._start(action)
                case Send():
                    self._send(action)
                case Receive(key=key):
                    box = self.boxes.setdefault(key, Letterbox())
                    box.waiting[self.name] = self
                    self._deliver(key)
                case CancelReceive(key=key):
                    self.boxes.setdefault(key, Letterbox()).waiting.pop(self.name, None)
                case Report(key=key, seconds=seconds, failure=failure):
                    self.finished.append((*key, seconds))
                    if failure is not None:
                        self.failed.append((*key, failure))
                    self.flush_soon()
                case Broken(message=message):
                    raise AssertionError(message)
        used = self.launcher.memory.used
        self.used = [used.get(d, 0) for d in range(len(self.used))]
        self.most = max(self.launcher.memory.most.values(), default=0)

    def _start(self, launch: Launch) -> None:
        run, step = launch.key
        here = self.here[run]
        info = self.world.steps(here.plan.key)[step]
        devices = self.world.local[launch.call.slice][self.name]
        task = Task(here, step, info, devices, launch.seq, begun=True)
        part = Part(self, task, self.world.gang(task, info.cost), len(devices), 0)
        self.launches.append((run, step, devices))
        for device in devices:
            self.queues[device].append(part)
        for slot in launch.outputs:
            slot.payload = None if slot.state == "failed" else "bytes"
        self.world.agenda.after(self.world.vary(self.world.machine.costs.launch), self._run, part)

    def _run(self, part: Part) -> None:
        if not part.over:
            self._launched(part)

    def part_ended(self, part: Part, seconds: float, failure: Failure | None) -> None:
        part.over = True
        for device in part.task.devices:
            if part in self.running[device]:
                self.running[device].remove(part)
            self.queues[device].remove(part)
        key = part.task.run.grant.run, part.task.step
        self._do(self.launcher.done(key, seconds, failure))
        for device in part.task.devices:
            self._turn(device)

    # --- transfers --------------------------------------------------------------------

    def _send(self, action: Send) -> None:
        value = action.plan.values[action.node.output]
        delay = self.world.vary(self.world.machine.costs.dcn_latency + value.nbytes * 1e-4)
        self.world.agenda.after(delay, self._posted, action)

    def _posted(self, action: Send) -> None:
        if not self.world.alive(self):
            return
        box = self.boxes.setdefault(action.key, Letterbox())
        box.sent.add(self.name)
        box.failure = box.failure or action.failure
        self._do(self.launcher.sent(action.key, action.failure))
        self._deliver(action.key)

    def _deliver(self, key: Key) -> None:
        box = self.boxes[key]
        source = self.here[key[0]].plan
        node = source.steps[key[1]].node
        assert not isinstance(node, Call)
        where = source.values[node.input].slice
        assert where is not None
        if box.failure is None and box.sent < set(self.world.local[where]):
            return
        waiting, box.waiting = box.waiting, {}
        for host in waiting.values():
            self.world.agenda.after(1e-6, host._arrived, key, box.failure)

    def _arrived(self, key: Key, failure: Failure | None) -> None:
        if self.world.alive(self):
            payload: Any = None if failure else "bytes"
            self._do(self.launcher.received(key, payload, failure))


@contextmanager
def launchers(waits: bool = True) -> Iterator[list[LauncherHost]]:
    """While active, worlds have these hosts; gives all that were made."""
    made: list[LauncherHost] = []

    class Noted(LauncherHost):
        @functools.wraps(LauncherHost.__init__)
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            made.append(self)

    Noted.waits = waits
    original = worlds.Host
    worlds.Host = Noted  # type: ignore[misc]
    try:
        yield made
    finally:
        worlds.Host = original  # type: ignore[misc]
        LauncherHost.mail.clear()
