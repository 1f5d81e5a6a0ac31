"""Devices of several hosts that compute together, behind the host's one interface.

Problem: a slice that spans hosts needs JAX devices of all of them, and the
rest of a host must not care: it opens slices, compiles for their devices, and
launches.  Two kinds of islands do it in two ways.  Emulated devices: a client
of several processes per footprint, formed and ended by the control plane's
word, in milliseconds.  Accelerators: the platform's one client, which all
hosts of the island join at once, before they have devices at all.

Rule for maintainers: whatever waits for other hosts waits in a thread of its
own or in whoever opens a slice, which may wait; never in the reactor.

Paper: section 4.5, appendix A (pluggable runtimes).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from pathways_lab.core.errors import Failure, PathwaysError
from pathways_lab.core.topology import SliceBinding
from pathways_lab.runtime import jax_private
from pathways_lab.runtime.devices import CpuRuntime, Footprint, Owned, PlatformRuntime, footprint_of
from pathways_lab.runtime.formation import Formation
from pathways_lab.runtime.joining import Joint, forget_clients
from pathways_lab.runtime.relay import Relay

Joined = Callable[[Formation, Failure | None], object]
"""Told, in a thread of its own, that this host is in, or why it is not."""


class SpanningCpuRuntime(CpuRuntime):
    """CPU devices that compute together with those of other hosts.

    folder: private, for sockets.
    interface: the address of this machine under which the other hosts reach it.
    patience: seconds to wait for the other hosts of a formation.
    """

    def __init__(
        self,
        host: str,
        folder: Path,
        devices: int | None = None,
        memory: int | None = None,
        interface: str = "127.0.0.1",
        patience: float = 60.0,
    ) -> None:
        super().__init__(host, devices, memory)
        self._folder = folder
        self._interface = interface
        self._patience = patience
        self._changed = threading.Condition()
        self._joints: dict[int, Joint] = {}

    def form(self, formation: Formation, address: str, done: Joined) -> None:
        """The control plane says: join.  Returns at once.

        Of two formations of one footprint the newer one counts.
        """
        joint = Joint(formation, self.host, address, self._folder, self._interface)
        with self._changed:
            self._joints[formation.number] = joint
        with self._lock:
            self._open.pop(formation.footprint, None)
        threading.Thread(target=self._join, args=(joint, done), daemon=True).start()

    def _join(self, joint: Joint, done: Joined) -> None:
        failure = None
        try:
            joint.join(self._patience)
        except PathwaysError as error:
            failure = error.failure
        with self._changed:
            self._changed.notify_all()
        done(joint.formation, failure)

    def dissolve(self, number: int, reason: str) -> None:
        """The control plane says: leave.  Takes milliseconds; unknown numbers are fine.

        Whatever computes or waits there raises; arrays stay readable.
        """
        with self._changed:
            joint = self._joints.pop(number, None)
        if joint is None:
            return
        joint.end(reason)
        with self._changed:
            self._changed.notify_all()
        if self._newest(joint.formation.footprint) is None:
            with self._lock:
                self._open.pop(joint.formation.footprint, None)
        threading.Thread(target=forget_clients, name="forget clients", daemon=True).start()

    def meet(self, binding: SliceBinding, name: str) -> None:
        """Wait for the other hosts of a slice: before the first launch of each computation.

        With nothing in flight on the slice's lane.  *name*: the same on all
        hosts, and another one every time.  Raises PathwaysError when the
        formation ends.
        """
        if len(binding.hosts) > 1:
            self._joint(binding).meet(name)

    def sever(self, binding: SliceBinding) -> int:
        """End collectives of a slice that are in flight, with errors.  The formation is spoilt."""
        return self._joint(binding).sever()

    def open(self, binding: SliceBinding) -> Any:
        """As the base; waits for the formation of a slice that spans hosts, if need be."""
        if len(binding.hosts) > 1:
            self._await(binding)
        return super().open(binding)

    def close(self, binding: SliceBinding) -> None:
        """As the base; what a formation that ended left behind goes with its last slice."""
        super().close(binding)
        if len(binding.hosts) > 1 and self._newest(footprint_of(binding)) is None:
            forget_clients()

    def _make(self, binding: SliceBinding) -> Footprint:
        if len(binding.hosts) == 1:
            return super()._make(binding)
        return Footprint(self.lane(binding), self._joint(binding).devices)

    def _newest(self, key: tuple[Owned, ...]) -> Joint | None:
        with self._changed:
            numbers = [n for n, joint in self._joints.items() if joint.formation.footprint == key]
            return self._joints[max(numbers)] if numbers else None

    def _joint(self, binding: SliceBinding) -> Joint:
        joint = self._newest(footprint_of(binding))
        if joint is None:
            raise PathwaysError(
                Failure(
                    "lost",
                    f"slice {binding.slice} spans {', '.join(binding.hosts)}, which compute "
                    "together no more, or not yet",
                    "ask for a new slice",
                    host=self.host,
                )
            )
        return joint

    def _await(self, binding: SliceBinding) -> None:
        key = footprint_of(binding)

        def settled() -> bool:
            joint = self._newest(key)
            return joint is not None and joint.state != "joining"

        with self._changed:
            self._changed.wait_for(settled, self._patience)


class JoinedPlatformRuntime(PlatformRuntime):
    """The devices of accelerators, of this host and of the others of its island.

    Made after :meth:`join`.  Never run on accelerators: tested with JAX's own
    CPU platform in two processes.  Slices take their devices from the one
    client; hosts whose device process ends end the island's epoch, and all its
    device processes start anew.
    """

    def __init__(self, host: str, hosts: tuple[str, ...], memory: int | None = None) -> None:
        super().__init__(host, memory)
        devices = sorted(jax.devices(), key=lambda d: int(d.id))
        self._all = {
            (name, local): device
            for rank, name in enumerate(hosts)
            for local, device in enumerate(d for d in devices if d.process_index == rank)
        }

    @staticmethod
    def join(address: str, rank: int, hosts: int, folder: Path) -> Relay:
        """Join the island's other hosts; waits for them.  Before any use of JAX's devices.

        address: of the island's coordination service.  The relay is the
        process's own for as long as it lives.
        """
        relay = Relay(address, folder)
        agent = jax_private.coordination_agent(relay.address, rank)
        agent.connect()
        jax_private.join_platform(agent, rank, hosts)
        return relay

    def _make(self, binding: SliceBinding) -> Footprint:
        owned = footprint_of(binding)
        return Footprint(self.host, {o: self._all[o] for o in owned})
