"""Devices of several hosts that compute together, behind the host's one interface.

Problem: a slice that spans hosts needs JAX devices of all of them, and the
rest of a host must not care: it opens slices, compiles for their devices, and
launches.  Two kinds of islands do it in two ways.  Emulated devices: a client
of several processes per footprint, formed and ended by the control plane's
word, in milliseconds.  Accelerators: the platform's one client, which all
hosts of the island join at once, before they have devices at all.

Rule for maintainers: a wait for other hosts happens in a thread of its own, or in
the thread that opens a slice, which may wait; never in the reactor.

Paper: section 4.5, appendix A (pluggable runtimes).
"""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax

from pathways_lab.core.errors import Failure, PathwaysError
from pathways_lab.core.program.program import SliceId, slice_name
from pathways_lab.core.slices.topology import SliceBinding
from pathways_lab.runtime import jax_private
from pathways_lab.runtime.devices import (
    CpuRuntime,
    Footprint,
    Place,
    PlatformRuntime,
    footprint_of,
)
from pathways_lab.runtime.islands import disconnect
from pathways_lab.runtime.islands.coordination_relay import Relay, Upstream
from pathways_lab.runtime.islands.group_member import (
    MEET_MILLISECONDS,
    Joint,
    Reach,
    forget_clients,
)
from pathways_lab.runtime.islands.process_group import Formation, why_hosts_stay_apart

_BROKEN = "Gloo"
"""In every error of a collective whose connections broke, and in no other."""
_NEWS_SECONDS = 2.0
"""How long the control plane may take to notice and tell that a host died."""

Joined = Callable[[int, Failure | None], object]
"""Told, in a thread of its own: the formation, and None or why this host is not in it."""


class SpanningCpuRuntime(CpuRuntime):
    """CPU devices that compute together with those of other hosts.

    folder: private, for sockets.
    interface: the address of this machine under which the other hosts reach it; None: collectives
        between machines are encrypted, and :attr:`reach` opens the streams in which they go.
    service: connects to the coordination service of a formation where that is elsewhere.
    patience: seconds to wait for the other hosts of a formation.

    The control plane says :meth:`span` before it binds a slice that spans
    hosts, then :meth:`form`, once per formation, and :meth:`dissolve`.
    """

    def __init__(
        self,
        host: str,
        folder: Path,
        devices: int | None = None,
        memory: int | None = None,
        interface: str | None = "127.0.0.1",
        patience: float = 60.0,
        room: int | None = None,
        service: Callable[[int], socket.socket] | None = None,
    ) -> None:
        super().__init__(host, devices, memory, room)
        self.reach: Reach | None = None
        self._service = service
        self._folder = folder
        self._interface = interface
        self._patience = patience
        self._changed = threading.Condition()
        self._formations: dict[int, Formation] = {}
        self._joints: dict[int, Joint] = {}
        self._footprints: dict[int, Footprint] = {}
        self._over: dict[int, str] = {}
        """Why formations have ended that slices still name."""
        self._spans: dict[SliceId, int] = {}
        self._closed: set[SliceId] = set()

    # --- what the control plane says; returns at once ---------------------------------

    def span(self, slice_id: SliceId, formation: Formation) -> None:
        """This slice, about to be bound, computes in that formation."""
        with self._changed:
            before = self._spans.get(slice_id)
            self._spans[slice_id] = formation.number
            if before is not None and before not in self._spans.values():
                self._over.pop(before, None)
            self._formations[formation.number] = formation

    def form(self, number: int, address: str, done: Joined) -> None:
        """All hosts of a formation are told now: meet at this coordination service."""
        with self._changed:
            formation = self._formations.get(number)
            if formation is None:
                return
            apart = why_hosts_stay_apart(self.kind)
            if apart is not None:
                done(number, apart)
                return
            service = address if self._service is None else partial(self._service, number)
            joint = Joint(formation, self.host, service, self._folder, self._interface, self.reach)
            self._joints[number] = joint
        threading.Thread(target=self._join, args=(joint, done), daemon=True).start()

    def dissolve(self, number: int, reason: str) -> Joint | None:
        """A formation has ended, formed or not.  Unknown numbers are fine.

        Whatever computes or waits in it raises; arrays stay readable.  Returns
        this host's part, if it had begun to join: it may still be stuck.
        """
        with self._changed:
            self._formations.pop(number, None)
            joint = self._joints.pop(number, None)
            self._footprints.pop(number, None)
            if number in self._spans.values():
                self._over[number] = reason
        if joint is not None:
            joint.end(reason)
            self._forget()
        with self._changed:
            self._changed.notify_all()
        return joint

    def admit(self, number: object, host: str, sealed: ssl.SSLSocket) -> None:
        """A stream of a formation's collectives has come from another host."""
        with self._changed:
            joint = self._joints.get(number) if isinstance(number, int) else None
        if joint is None:
            sealed.close()
        else:
            joint.admit(host, sealed)

    @property
    def plain(self) -> bool:
        """Whether collectives with hosts of other machines go in the clear."""
        return self._interface is not None

    def bear(self, silence: float) -> None:
        """Now and then: connections are made with the first computation of some devices."""
        with self._changed:
            joints = tuple(self._joints.values())
        for joint in joints:
            joint.bear(silence)

    # --- what the host asks; may wait -------------------------------------------------

    def open(self, binding: SliceBinding) -> Place:
        """As the base; a slice that spans hosts waits until all of them have joined."""
        if len(binding.hosts) == 1:
            return super().open(binding)
        with self._changed:
            self._closed.discard(binding.slice)
        return self.reopen(binding)

    def reopen(self, binding: SliceBinding) -> Place:
        """The devices of a slice whose formation was formed again; it may be closed meanwhile."""

        def settled() -> bool:
            number = self._spans.get(binding.slice, -1)
            if number in self._over or binding.slice in self._closed:
                return True
            joint = self._joints.get(number)
            return joint is not None and joint.state != "joining"

        with self._changed:
            self._changed.wait_for(settled, self._patience)
        joint = self._joint(binding)
        devices = joint.devices
        with self._changed:
            number = joint.formation.number
            made = Footprint(self.lane(binding), devices, number)
            footprint = self._footprints.setdefault(number, made)
        return Place(binding, self.host, footprint)

    def close(self, binding: SliceBinding) -> bool:
        """As the base; what a formation that ended left behind goes with its last slice."""
        full = super().close(binding)
        with self._changed:
            number = self._spans.pop(binding.slice, None)
            self._closed.add(binding.slice)
            self._changed.notify_all()
            if number is None or number in self._spans.values():
                return full
            ended = self._over.pop(number, None)
        if ended is not None:
            self._forget()
        return full

    def meet(self, binding: SliceBinding, name: str) -> None:
        """Wait for the other hosts of a slice: before the first launch of each computation.

        With nothing in flight on the slice's lane.  *name*: the same on all
        hosts; it may be met again, but not twice at once.  Raises
        PathwaysError when the formation ends.
        """
        if len(binding.hosts) > 1:
            self._joint(binding).meet(name)

    def explained(
        self,
        binding: SliceBinding,
        formation: int,
        failure: Failure,
        broken: Callable[[int, str], object],
    ) -> Failure:
        """The cause of failure of a gang of a slice that spans hosts; may wait a moment.

        formation: in which the gang was.  When the slice's hosts have been formed again
        meanwhile, its broken connections say nothing of the new ones.

        The death of a host breaks its connections before anybody can say whose
        they were, so news of its formation is waited for.  When there are none,
        ``broken(number, reason)`` is to tell that the formation is of no use any
        more, and the news of that are waited for.  A slice that was closed has no
        news to come, and a wait here would hold up the next gang on the same devices.
        """
        if len(binding.hosts) == 1 or _BROKEN not in failure.details:
            return failure
        with self._changed:
            number = self._spans.get(binding.slice)
            if number != formation:
                return failure

            def known() -> bool:
                return number in self._over or self._spans.get(binding.slice) != number

            joint = self._joints.get(number)
            told = self._changed.wait_for(known, _NEWS_SECONDS)
        if not told:
            text = failure.message
            broken(number, disconnect.reason(text, {}) if joint is None else joint.why_broken(text))
        with self._changed:
            self._changed.wait_for(known, _NEWS_SECONDS)
            why = self._over.get(number)
        if why is None:
            return failure
        return replace(failure, kind="lost", message=f"{failure.node} failed: {why}")

    def _join(self, joint: Joint, done: Joined) -> None:
        failure = None
        try:
            joint.join(self._patience)
        except PathwaysError as error:
            failure = error.failure
        with self._changed:
            self._changed.notify_all()
        done(joint.formation.number, failure)

    def _joint(self, binding: SliceBinding) -> Joint:
        with self._changed:
            number = self._spans.get(binding.slice, -1)
            joint = self._joints.get(number)
            why = self._over.get(number, "their runtime was not formed in time")
        if joint is None:
            hosts = ", ".join(binding.hosts)
            raise PathwaysError(
                Failure(
                    "lost",
                    f"the hosts of slice {slice_name(binding.slice)} ({hosts}) do not compute"
                    f" together: {why}",
                    "ask for a new slice",
                    host=self.host,
                )
            )
        return joint

    def _forget(self) -> None:
        threading.Thread(target=forget_clients, name="forget clients", daemon=True).start()


class JoinedPlatformRuntime(PlatformRuntime):
    """The devices of accelerators, of this host and of the others of its island.

    service: the island's coordination service, see
        :class:`pathways_lab.runtime.islands.coordination_relay.Relay`.
    hosts: by rank, this one included.

    Made before any use of JAX's devices; waits for the other hosts.  Never run
    on accelerators: tested with JAX's own CPU platform in two processes.  Slices
    take their devices from the one client; when a device process ends, all of
    the island start anew (:mod:`pathways_lab.runtime.islands.accelerator_groups`).
    """

    def __init__(
        self,
        host: str,
        hosts: Sequence[str],
        service: str | Upstream,
        folder: Path,
        memory: int | None = None,
    ) -> None:
        # The relay is the process's own for as long as it lives.
        self._relay = Relay(service, folder)
        rank = list(hosts).index(host)
        self._agent = jax_private.coordination_agent(self._relay.address, rank)
        self._agent.connect()
        jax_private.join_platform(self._agent, rank, len(hosts))
        super().__init__(host, memory)
        self.emulated = self.kind == "cpu"
        devices = sorted(jax.devices(), key=lambda d: int(d.id))
        self._all = {
            (name, local): device
            for rank, name in enumerate(hosts)
            for local, device in enumerate(d for d in devices if d.process_index == rank)
        }

    def meet(self, binding: SliceBinding, name: str) -> None:
        """As in formations: whoever introduces devices to each other does not wait for long."""
        if len(binding.hosts) > 1:
            self._agent.wait_at_barrier(f"lab/{name}", MEET_MILLISECONDS)

    def _make(self, binding: SliceBinding) -> Footprint:
        owned = footprint_of(binding)
        return Footprint(self.host, {o: self._all[o] for o in owned})
