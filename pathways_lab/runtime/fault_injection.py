"""Trouble on purpose: messages that come late, twice, or never.

Problem: the faults of a bad network must be tried on real processes and real
transports (Unix sockets, shared memory, TLS, Dask's comms), in seconds, again
and again, and must end by themselves even if the client that asked for them is gone.

How: between the socket and the handlers of a process.  Messages that have come
are held, forgotten or handed over twice; the link that they came over counts
them afterwards, as it would after a network that did so, and draws its own
conclusions.  A partition is messages that wait in both directions: so it is with TCP,
which sends again until it gets through.

Rule for maintainers: a link that is in no trouble keeps its messages in order
and whole.  Only owners of the lab get here: orders come over the lifeline, from the
parent, and from nowhere else.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from pathways_lab.transport.framing import Message
from pathways_lab.transport.link import Link
from pathways_lab.transport.reactor import Reactor

Kind = Literal["delay", "hold", "drop", "duplicate"]


@dataclass(slots=True)
class Rule:
    """Trouble for the messages of some peers.

    peers: their names (hosts; ``"control"``).  kind: ``"delay"`` (each by *seconds*, and over
    each link *rate* bytes in a second, if that is not 0), ``"hold"`` (all, until *lasts* is
    over), ``"drop"`` or ``"duplicate"`` (*count* messages).
    lasts: seconds.  op: only messages of this kind, or "".  name: if any, it takes the
    place of an earlier rule of that name.
    """

    kind: Kind
    peers: tuple[str, ...]
    lasts: float
    seconds: float = 0.0
    count: int = 0
    op: str = ""
    rate: float = 0.0
    name: str = ""
    until: float = field(default=0.0)
    free: dict[str, float] = field(default_factory=dict)
    """By peer: when the last byte of what was sent so far is through."""

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Rule:
        """Raises KeyError, TypeError, ValueError."""
        rule = cls(**{**plain, "peers": tuple(plain["peers"])})
        if rule.kind not in get_args(Kind) or not rule.lasts > 0:
            raise ValueError(f"no trouble: {plain!r}")
        return rule

    def hits(self, link: Link, message: Message) -> bool:
        """Whether one of *count* messages is this one; it is counted."""
        if not self.count or link.name not in self.peers or message.op[:1] == "\0":
            return False
        if self.op and message.op != self.op:
            return False
        self.count -= 1
        return True


class Troubles:
    """All trouble of one process (the reactor's ``trouble``); in its reactor's thread."""

    def __init__(self, way: Reactor, clock: Callable[[], float] = time.monotonic) -> None:
        self._way = way
        self._clock = clock
        self._rules: list[Rule] = []
        self._held: dict[Link, deque[tuple[float, Message]]] = {}

    def begin(self, plain: Mapping[str, Any]) -> None:
        """A new rule, see :class:`Rule`; or ``{"heal": True}``: everything ends now."""
        if plain.get("heal"):
            self._rules.clear()
            for link in tuple(self._held):
                self._release(link, everything=True)
            return
        rule = Rule.from_plain(plain)
        rule.until = self._clock() + rule.lasts
        if rule.name:
            self._rules = [other for other in self._rules if other.name != rule.name]
        self._rules.append(rule)
        self._way.trouble = self

    def lateness(self, name: str, peers: Collection[str], messages: int, nbytes: int) -> float:
        """Seconds that messages, of *nbytes* in all, take from the farthest of these peers.

        By the delay of this name.  From any thread.
        """
        now = self._clock()
        return max(
            (
                messages * rule.seconds + (nbytes / rule.rate if rule.rate else 0.0)
                for rule in self._rules
                if rule.name == name and rule.until > now and not {*rule.peers}.isdisjoint(peers)
            ),
            default=0.0,
        )

    def on_the_way(self, link: Link, messages: list[Message]) -> list[Message]:
        """See :class:`pathways_lab.transport.reactor.Trouble`."""
        now = self._clock()
        self._rules = [rule for rule in self._rules if rule.until > now]
        if not self._rules and not self._held:
            self._way.trouble = None
            return messages
        come = list(self._lost_and_repeated(link, messages))
        slow = [r for r in self._rules if r.kind in ("delay", "hold") and link.name in r.peers]
        if not come or (not slow and link not in self._held):
            return come
        held = self._held.setdefault(link, deque())
        for message in come:
            due = max((self._due(rule, link, message, now) for rule in slow), default=now)
            held.append((max(due, held[-1][0]) if held else due, message))
        self._way.call_later(max(0.0, held[0][0] - now), self._release, link)
        return []

    def _lost_and_repeated(self, link: Link, messages: Iterable[Message]) -> Iterable[Message]:
        for message in messages:
            hit = next((rule for rule in self._rules if rule.hits(link, message)), None)
            if hit is None or hit.kind == "duplicate":
                yield message
            if hit is not None and hit.kind == "duplicate":
                yield message

    def _due(self, rule: Rule, link: Link, message: Message, now: float) -> float:
        """When a message is through."""
        if rule.kind == "hold":
            return rule.until
        if rule.rate:
            nbytes = max(message.size, sum(buffer.nbytes for buffer in message.buffers))
            begin = max(now, rule.free.get(link.name, 0.0))
            rule.free[link.name] = now = begin + nbytes / rule.rate
        return now + rule.seconds

    def _release(self, link: Link, everything: bool = False) -> None:
        """Hand over what is due, in the order in which it came."""
        held, now = self._held.get(link, deque()), self._clock()
        come: list[Message] = []
        while held and (everything or held[0][0] <= now):
            come.append(held.popleft()[1])
        if not held:
            self._held.pop(link, None)
        else:
            self._way.call_later(held[0][0] - now, self._release, link)
        if come and link.closed is None:
            self._way.admit(link, come)
