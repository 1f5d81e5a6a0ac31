"""This process's part in a formation: joining, meeting, and getting out alive.

Problem: a JAX client of several processes is formed by native calls that wait
for the others, and used by collectives that wait for the others.  Any of them
may die at any moment, and this process must neither die with them nor wait
for ever, nor lose what else it holds.

How: the native calls happen in a thread of their own; :meth:`Joint.end`, from
any thread at any time, cancels waits for introductions, severs the
connections of collectives in flight (they raise), and lets go.  The only call
that cannot be cancelled, the very first, is left behind in its thread.

A group of devices that computes together for the first time introduces itself
through the coordination service, and gives up after thirty seconds, a limit
that cannot be set.  So hosts first :meth:`Joint.meet`, which waits as long as
it takes, with nothing in flight before.

Rule for maintainers: the agent is never destroyed or cut off while it is
connected: that would end the process (:mod:`pathways_lab.runtime.islands.coordination_relay`).

Paper: section 4.5.
"""

from __future__ import annotations

import gc
import ssl
import threading
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import jax

from pathways_lab.core.errors import Failure, PathwaysError
from pathways_lab.runtime import jax_private
from pathways_lab.runtime.islands import disconnect
from pathways_lab.runtime.islands.batch_threads import giving_way
from pathways_lab.runtime.islands.coordination_relay import Relay, Upstream
from pathways_lab.runtime.islands.process_group import Formation
from pathways_lab.runtime.islands.tls_tunnel import Tunnel, own_address
from pathways_lab.transport.addresses import machine

MEET_MILLISECONDS = 10**9
_INTRODUCTION_SECONDS = 60
Reach = Callable[[int, str], ssl.SSLSocket]
"""A stream of a formation to a host; waits."""
_listening = threading.Lock()
"""One communicator at a time is made, so that its port can be told from others."""


class Joint:
    """The part of *host* in *formation*.

    service: the coordination service, see
        :class:`pathways_lab.runtime.islands.coordination_relay.Relay`.
    folder: private, for a socket.
    interface: the address of this machine under which the other hosts reach it; None: collectives
        between machines go through a *tunnel*, whose streams *reach* opens.
    addresses: of the hosts, and which one is there; known when they have joined.

    Made without waiting; :meth:`join` does the work.
    """

    def __init__(
        self,
        formation: Formation,
        host: str,
        service: str | Upstream,
        folder: Path,
        interface: str | None = "127.0.0.1",
        reach: Reach | None = None,
    ) -> None:
        self.formation = formation
        self.host = host
        self.rank = formation.rank(host)
        self.addresses: dict[str, str] = {}
        self._interface = interface
        self._own: disconnect.Endpoint | None = None
        self._tunnel = None
        if interface is None:
            assert reach is not None
            self._tunnel = Tunnel(partial(reach, formation.number))
        self._relay = Relay(service, folder, self._orphan)
        self._lock = threading.Lock()
        self._settled = threading.Event()
        self._ended: str | None = None
        self._error: BaseException | None = None
        self._agent: Any = None
        self._connected = False
        """To the coordination service: from now on the agent must be shut down before it goes."""
        self._connecting = True
        self._devices: dict[tuple[str, int], Any] = {}
        self._endpoints: set[disconnect.Endpoint] = set()

    def __repr__(self) -> str:
        return f"<{self.formation}, rank {self.rank}, {self.state}>"

    @property
    def state(self) -> str:
        """``"joining"``, ``"joined"`` or ``"ended: why"``."""
        with self._lock:
            if self._ended is not None:
                return f"ended: {self._ended}"
            return "joined" if self._devices else "joining"

    @property
    def orphaned(self) -> bool:
        """Whether the coordination service is gone.

        Groups of devices that computed together before go on, others raise.
        """
        return self._relay.lost

    @property
    def devices(self) -> Mapping[tuple[str, int], Any]:
        """JAX devices of all hosts by host and local number; PathwaysError when it has ended."""
        with self._lock:
            if self._ended is not None:
                raise self._over()
            return self._devices

    @property
    def stuck(self) -> bool:
        """Whether it ended while connecting: a thread waits until the others come, if ever."""
        with self._lock:
            return self._ended is not None and self._connecting

    def join(self, timeout: float = 60.0) -> None:
        """Form the client together with the others.  Once; waits at most *timeout* seconds.

        Raises PathwaysError when it failed, took too long or was ended meanwhile.
        """
        threading.Thread(target=self._join, name=f"join {self.formation}", daemon=True).start()
        if not self._settled.wait(timeout):
            self.end(f"not all of its hosts came within {timeout:g} s")
        with self._lock:
            if self._ended is not None:
                raise self._over() from self._error

    def _join(self) -> None:
        try:
            agent = jax_private.coordination_agent(self._relay.address, self.rank)
            agent.connect()
            with self._lock:
                self._connecting, self._connected = False, True
                ended = self._ended is not None
                if not ended:
                    self._agent = agent
            if ended:
                self._disconnect(agent)
                return
            devices = self._form(agent)
        except Exception as error:
            self._error = error
            with self._lock:
                self._connecting = False
            self.end(f"it could not be formed: {error}")
            return
        with self._lock:
            if self._ended is None:
                self._devices = devices
        self._settled.set()

    def _form(self, agent: Any) -> dict[tuple[str, int], Any]:
        formation, ranks = self.formation, range(len(self.formation.parts))
        interface = self._interface or own_address()
        own = len(formation.parts[self.rank][1])
        with _listening, giving_way():
            before = disconnect.listeners()
            collectives = jax_private.cpu_collectives(agent, interface)
            ours = disconnect.listeners() - before
        if self._tunnel is not None:
            # Nobody else has this address.
            ours = {each for each in ours if each[0] == interface}
            (self._own,) = ours
            self._tunnel.shut(self._own, own)
        elif len(ours) != 1:
            # Somebody else began to listen just now: rather not severed than the wrong ones.
            ours = set()
        told = " ".join(f"{port}@{at}" for at, port in ours)
        agent.key_value_set(f"lab/{self.rank}", f"{told}\n{machine()}")
        with giving_way():
            client = jax_private.make_joint_cpu_client(
                agent, collectives, self.rank, len(formation.parts), own
            )
        for rank in ranks:
            told = agent.blocking_key_value_get(f"lab/{rank}", _INTRODUCTION_SECONDS * 1000)
            listens, _, there = told.partition("\n")
            for port, _, at in (entry.partition("@") for entry in listens.split()):
                self._endpoints.add((at, int(port)))
                self.addresses[at] = formation.parts[rank][0]
                if self._tunnel is not None and there != machine():
                    self._tunnel.stand_for(formation.parts[rank][0], (at, int(port)))
                elif self._tunnel is not None and rank != self.rank:
                    self._tunnel.open()
        devices: dict[tuple[str, int], Any] = {}
        for rank, (host, locals_) in enumerate(formation.parts):
            theirs = [d for d in client.devices() if d.process_index == rank]
            theirs.sort(key=lambda device: int(device.id))
            devices |= {(host, n): d for n, d in zip(locals_, theirs, strict=True)}
        return devices

    def meet(self, name: str) -> None:
        """Wait until all hosts of the formation say the same *name*; again and again, if need be.

        Raises PathwaysError when the formation has ended or ends meanwhile.
        """
        with self._lock:
            agent = self._agent
            if self._ended is not None:
                raise self._over()
        try:
            agent.wait_at_barrier(f"lab/{name}", MEET_MILLISECONDS)
        except Exception as error:
            self.end(f"its hosts could not meet: {error}")
            raise self._over() from error

    def sever(self) -> int:
        """End collectives in flight, with errors; how many connections there were."""
        return disconnect.sever(self._endpoints)

    def admit(self, host: str, sealed: ssl.SSLSocket) -> None:
        """A stream of another host's collectives has come."""
        if self._tunnel is None or self._own is None or host not in self.formation.hosts:
            sealed.close()
        else:
            self._tunnel.admit(sealed, host, self._own)

    def why_broken(self, message: str) -> str:
        """Why connections between hosts broke, of the *message* of a collective, in words."""
        if self._tunnel is not None and self._tunnel.why:
            return f"its hosts do not reach each other: {self._tunnel.why}"
        return disconnect.reason(message, self.addresses)

    def bear(self, silence: float) -> None:
        """Collectives end, with errors, when a host's machine is silent for so many seconds."""
        disconnect.bear(self._endpoints, silence)

    def end(self, reason: str) -> None:
        """Leave, from any thread; takes milliseconds.  Again is fine, the first reason counts.

        Threads that wait in the formation's computations raise.  Arrays stay
        readable; the client is gone when they, and functions compiled for it,
        are (:func:`forget_clients`).
        """
        with self._lock:
            if self._ended is not None:
                return
            self._ended = reason
            agent, self._agent = self._agent, None
            self._devices = {}
        if agent is not None:
            self._disconnect(agent)
            self.sever()
        if self._tunnel is not None:
            self._tunnel.close()
        self._settled.set()

    def _disconnect(self, agent: Any) -> None:
        """Cancel what waits for introductions, and let the service go.  Once, any thread."""
        with self._lock:
            first, self._connected = self._connected, False
        if first:
            agent.shutdown()
            self._relay.close()

    def _orphan(self) -> None:
        """The coordination service is gone: who waits for an introduction waits for nothing."""
        with self._lock:
            agent = self._agent
        if agent is not None:
            self._disconnect(agent)

    def _over(self) -> PathwaysError:
        return PathwaysError(
            Failure(
                "lost",
                f"{self.formation} has ended: {self._ended}",
                "ask for a new slice, or wait until the island is back and run it again",
                host=self.host,
            )
        )


def forget_clients() -> None:
    """Let clients that nobody uses any more end with their threads; takes some 0.1 s.

    JAX remembers what it compiled and how it placed things, and with it the client.
    """
    jax.clear_caches()
    gc.collect()
