"""Messages about values that clients share or keep: :mod:`.slices.sharing`, :mod:`.slices.keeping`.

Rule for maintainers: as for all messages (:mod:`pathways_lab.core.messages`).
"""

from __future__ import annotations

from dataclasses import dataclass

from pathways_lab.core.program.program import SliceId


@dataclass(frozen=True, slots=True)
class HandlePublished:
    """A client gives buffers that it has a name under which others may take them, all together.

    about: words for takers, never looked into.  keep: they stay when the client leaves.
    to: the one client that may take them, once; "": anybody may.
    """

    time: float
    cause: str
    client: str
    name: str
    buffers: tuple[int, ...]
    about: bytes = b""
    request: int = 0
    keep: bool = False
    to: str = ""


@dataclass(frozen=True, slots=True)
class HandleUnpublished:
    """A client takes a name back: its own, or as an owner that of a client that has left."""

    time: float
    cause: str
    client: str
    name: str
    request: int = 0


@dataclass(frozen=True, slots=True)
class HandleTaken:
    """A client takes what is published.  buffers: its own numbers for its references."""

    time: float
    cause: str
    client: str
    name: str
    buffers: tuple[int, ...]
    request: int = 0


@dataclass(frozen=True, slots=True)
class Published:
    """Anybody may take what has this name now.  kept: it stays when the client leaves."""

    cause: str
    client: str
    name: str
    kept: bool = False


@dataclass(frozen=True, slots=True)
class Given:
    """One client, *to*, may take *stored*, each on one of *slices*."""

    cause: str
    client: str
    name: str
    to: str
    stored: tuple[int, ...]
    slices: tuple[SliceId, ...]
    about: bytes


@dataclass(frozen=True, slots=True)
class Unpublished:
    """Nobody can take it by this name any more.  client: who had published it."""

    cause: str
    client: str
    name: str


@dataclass(frozen=True, slots=True)
class Taken:
    """The client may read *stored*, each on one of *slices*; *buffers* are its own numbers."""

    cause: str
    client: str
    name: str
    buffers: tuple[int, ...]
    stored: tuple[int, ...]
    slices: tuple[SliceId, ...]
    about: bytes
    request: int = 0


@dataclass(frozen=True, slots=True)
class SlicesKept:
    """These stay for the next client of this name; None: nothing is kept for it any more."""

    cause: str
    client: str
    slices: tuple[SliceId, ...] | None


SharingEvent = HandlePublished | HandleUnpublished | HandleTaken
SharingCommand = Published | Given | Unpublished | Taken | SlicesKept
