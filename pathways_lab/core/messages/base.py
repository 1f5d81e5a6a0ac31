"""The beginning of every message, by where it comes from and where it goes.

Rule for maintainers: what all messages of a kind say, and nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Happened:
    """An event.  cause: its id, or that of the event that led to it."""

    time: float
    cause: str


@dataclass(frozen=True, slots=True)
class Wished(Happened):
    """An event by which a client wants something."""

    client: str


@dataclass(frozen=True, slots=True)
class Commanded:
    """A command.  cause: the id of the event that led to it."""

    cause: str


@dataclass(frozen=True, slots=True)
class ToClient(Commanded):
    """A command about which a client hears."""

    client: str


@dataclass(frozen=True, slots=True)
class ToHosts(Commanded):
    """A command that these hosts carry out."""

    hosts: tuple[str, ...]
