"""The parts of a lab that its other parts need.

Problem: :class:`pathways_lab.Lab` is made of parts in many folders, each of
which needs other parts of it; modules do not import each other in a circle.

Rule for maintainers: only what several modules need is here.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from pathways_lab.client.lab.devices import Slice
from pathways_lab.client.lab.topology_view import Device, IslandTable
from pathways_lab.client.session.session import Session
from pathways_lab.core.slices.topology import SliceRequest
from pathways_lab.runtime.cluster.attach import ControlAddress
from pathways_lab.runtime.cluster.embedded import EmbeddedCluster
from pathways_lab.timeline.log import Timeline

if TYPE_CHECKING:
    import distributed


class Parts(Protocol):
    """See :class:`pathways_lab.Lab`."""

    session: Session
    timeline: Timeline
    embedded: EmbeddedCluster | None
    slices: list[Slice]
    leases: dict[str, Any]
    _control: ControlAddress

    @property
    def islands(self) -> IslandTable: ...

    @property
    def clients(self) -> tuple[str, ...]: ...

    @property
    def closed(self) -> bool: ...

    def slice(self, *args: Any, **options: Any) -> Slice: ...

    def slice_at(
        self,
        devices: Sequence[Device | tuple[str, int]],
        shape: int | tuple[int, ...] | None = None,
        axes: str | tuple[str, ...] | None = None,
        *,
        wait: bool | float,
    ) -> Slice: ...

    def dask_client(self) -> distributed.Client: ...

    def verify(self) -> Any: ...

    def invite(self, path: str | Path, *, owner: bool = False) -> None: ...

    def _bound(self, request: SliceRequest, wait: bool | float) -> Slice: ...

    def _remember(self, written: list[bytes]) -> None: ...
