"""The peers at the other ends of the control plane's links, and messages to them.

Problem: any peer may be gone at the moment in which it is told something, and
what is told to many (who is there, which slices) must be the same for all.

Rule for maintainers: sending never fails and never waits; the end of a peer
comes as an event of its own.  No sockets here: peers are anything with
``forward`` and ``pending``, so that tests need none.

Paper: section 4.5.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from pathways_lab.core.errors import Failure
from pathways_lab.runtime.control_plane.directory import Registry
from pathways_lab.transport.codec import pack
from pathways_lab.transport.framing import Letter
from pathways_lab.transport.link import Link

if TYPE_CHECKING:
    from typing_extensions import Buffer


class Switchboard:
    """The links of clients and hosts, by name.

    used(workers): told of the Dask workers on whose devices there are slices, when these change.
    """

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self.used: Callable[[list[str]], object] = lambda workers: None
        self._in_use: frozenset[str] = frozenset()
        self.clients: dict[str, Link] = {}
        self.hosts: dict[str, Link] = {}

    def is_current(self, name: str, peer: Link) -> bool:
        """Whether *peer* is the link of the client or host of this name."""
        return peer in (self.clients.get(name), self.hosts.get(name))

    # --- to one ------------------------------------------------------------------

    def client(
        self, name: str, op: str, fields: dict[str, Any], buffers: Sequence[Buffer] = ()
    ) -> int:
        """Tell a client.  The bytes sent, 0 when it is gone."""
        return _post(self.clients.get(name), Letter(op, fields, buffers))

    def host(
        self, name: str, op: str, fields: dict[str, Any], buffers: Sequence[Buffer] = ()
    ) -> int:
        """Tell a host at once, also what others wait for behind a race."""
        return self.forward(name, Letter(op, fields, buffers))

    def forward(self, host: str, letter: Letter) -> int:
        """The same of a letter that other hosts get too."""
        return _post(self.hosts.get(host), letter)

    def refuse(self, client: str, subject: str, failure: Failure) -> None:
        """Tell a client that something of its was not taken, and why."""
        self.client(client, "refused", {"subject": subject, "failure": pack(failure)})

    def answer(
        self,
        client: str,
        number: int,
        failure: Failure | None,
        fields: dict[str, Any] | None = None,
        buffers: Sequence[Buffer] = (),
    ) -> None:
        """Answer a client's question of this number: with *fields*, or why not."""
        said = {"id": number, "failure": None if failure is None else pack(failure)}
        self.client(client, "answered", {**said, **(fields or {})}, buffers)

    # --- to all ------------------------------------------------------------------

    def every_client(self, op: str, fields: dict[str, Any]) -> None:
        letter = Letter(op, fields)
        for peer in tuple(self.clients.values()):
            _post(peer, letter)

    def end(self, why: dict[str, str]) -> None:
        """Clients hear that the lab is over; from now on nobody is here to be told anything."""
        self.every_client("closing", why)
        self.clients.clear()
        self.hosts.clear()

    def topology(self) -> None:
        """Clients hear who is there, and Dask what is in use."""
        self.every_client("topology", self._registry.topology())
        before, self._in_use = self._in_use, self._registry.workers_in_use()
        if self._in_use != before:
            self.used(sorted(self._in_use))

    def data_addresses(self) -> None:
        """Hosts hear where the others are."""
        addresses = {h.name: h.data_address for h in self._registry.hosts.values()}
        letter = Letter("peers", {"peers": addresses})
        for name in self.hosts:
            self.forward(name, letter)

    def clients_present(self, newest: int, hosts: Sequence[str]) -> None:
        """Hosts take nothing from clients that have left.  newest: the last number given."""
        present = [client.number for client in self._registry.clients.values()]
        letter = Letter("clients", {"newest": newest, "present": present})
        for name in hosts:
            self.forward(name, letter)


def _post(peer: Link | None, letter: Letter) -> int:
    """Send to a peer that may be gone: its end is then on the way as an event."""
    if peer is None:
        return 0
    try:
        return peer.forward(letter)
    except ConnectionError:
        return 0
