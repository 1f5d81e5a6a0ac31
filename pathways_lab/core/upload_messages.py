"""Messages about uploads that others than their client send.

Problem: a client can have a buffer filled by somebody else, who may not be able to.  Then
whoever reads it must be told why, and nobody may wait for it.

Rule for maintainers: as in :mod:`pathways_lab.core.messages`, whose union has it.

Paper: section 4.6 (errors are delivered to whoever depends on what failed).
"""

from __future__ import annotations

from dataclasses import dataclass

from pathways_lab.core.errors import Failure


@dataclass(frozen=True, slots=True)
class UploadLost:
    """The bytes of a declared buffer of this client will never come, and why."""

    time: float
    cause: str
    client: str
    buffer: int
    failure: Failure
