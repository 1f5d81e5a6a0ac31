"""The control plane's checks of what a client says, for tests of the client without one."""

from __future__ import annotations

from typing import Any

from pathways_lab.core.slices.topology import SliceBinding
from pathways_lab.runtime import client_messages as said
from pathways_lab.runtime.client_messages import CLIENTS
from pathways_lab.runtime.control_plane.directory import ClientSeen, Registry
from pathways_lab.runtime.control_plane.requests import _HANDLERS, Rejected, client_event
from pathways_lab.transport.edge import Malformed, parsed


class Edge:
    """wrong: what the control plane would not take of what it was sent."""

    def __init__(self) -> None:
        self.wrong: list[str] = []
        self._registry = Registry()
        self._client = ClientSeen("kernel-1", 1, 1, owner=True)

    def bound(self, binding: SliceBinding) -> None:
        """A slice of the client has devices, on an island that it has for itself."""
        self._registry.bind_slice(binding)
        self._registry.leases[binding.island] = "kernel-1"

    def taken(self, binding: SliceBinding) -> None:
        """The client may read what it has taken on a slice of another client."""
        self._registry.bind_slice(binding)
        self._registry.taken.add((self._client.number, binding.slice))

    def hear(self, op: str, fields: dict[str, Any], buffers: list[memoryview]) -> None:
        """A message of the client."""
        registry = self._registry
        try:
            message = parsed(CLIENTS, op, fields, buffers)
            if type(message) in _HANDLERS:
                client_event(registry, self._client, message, buffers, 0.0)
        except (Malformed, Rejected) as error:
            self.wrong.append(f"{op}: {error}")
            return
        if isinstance(message, said.Forget):
            registry.forget_programs(message.plans, message.functions)
        elif isinstance(message, said.ReleaseSlice):
            registry.forget_slice(message.slice)
