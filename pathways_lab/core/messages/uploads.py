"""Messages about uploads that never come to be: not sent, or not declared.

Problem: a client can have a buffer filled by somebody else, who may not be able to.  Then
whoever reads it must be told why, and nobody may wait for it.  And bytes that nobody has
declared are given up after a time, also when nothing happens that would show the time.

Rule for maintainers: as in :mod:`pathways_lab.core.messages`, whose union has them.

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


@dataclass(frozen=True, slots=True)
class PatienceEnded:
    """It is so late (``Control.due``) that bytes which nobody has declared are given up."""

    time: float
    cause: str


UploadEvent = UploadLost | PatienceEnded
