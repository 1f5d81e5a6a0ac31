"""``priority=`` and ``data=`` of runs: for programs, functions, a block of calls, a client.

Problem: what a policy is told of a run may be known where its program is made, or only where
it is called, or hold for all that a client does.

How: a block of :func:`tagged` goes before what a program or function says of itself, and that
before the client's own (``lab.priority``); names of data add up.

Rule for maintainers: who submits asks :func:`current` in the thread that calls; what is sent
later keeps its tag.

Paper: section 4.4 (policies).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from pathways_lab.client.session import failures
from pathways_lab.core.scheduling import tags
from pathways_lab.core.scheduling.tags import Data


@dataclass(frozen=True, slots=True)
class Tag:
    """Tags of runs.  priority: None leaves it open.  data: sorted by name."""

    priority: int | None = None
    data: Data = ()

    @classmethod
    def of(cls, priority: int | None, data: Mapping[str, Any] | None) -> Tag:
        """Raises PathwaysError for what policies are not told."""
        pairs: Any = data
        if data is None:
            pairs = ()
        elif isinstance(data, Mapping):
            pairs = tuple(data.items())
        why = tags.wrong(0 if priority is None else priority, pairs)
        if why:
            raise failures.refused(
                why,
                "priority=2, data={'deadline': 3.0}; what is larger or no plain value, publish"
                " or pass as an argument",
            )
        return NOTHING if priority is None and not pairs else cls(priority, tuple(sorted(pairs)))

    def over(self, other: Tag) -> Tag:
        """Both: where they speak of the same, this one counts."""
        if other is NOTHING:
            return self
        if self is NOTHING:
            return other
        priority = other.priority if self.priority is None else self.priority
        return Tag(priority, tuple(sorted({**dict(other.data), **dict(self.data)}.items())))


NOTHING = Tag()

_current: ContextVar[Tag] = ContextVar("tag", default=NOTHING)

current = _current.get
"""The tags of runs that are submitted here."""


@contextmanager
def tagged(*, priority: int | None = None, data: Mapping[str, Any] | None = None) -> Iterator[None]:
    """Calls in this block have this priority, and this data for policies.

        with pw.tagged(priority=2, data={"deadline": time.time() + 0.1}):
            answer = serve(params, tokens)

    Policies see both in ``view.candidates`` (:class:`pathways_lab.Candidate`); without one that
    reads them nothing changes.  Also around a loop: ``lab.feed``, ``lab.elastic``.

    priority: a whole number; whoever a run waits for has at least its priority.
    data: a few names with plain values: numbers, True, False, None or short texts.

    Raises PathwaysError for what policies are not told.
    """
    with beneath(NOTHING, Tag.of(priority, data)):
        yield


@contextmanager
def beneath(tag: Tag, above: Tag = NOTHING) -> Iterator[None]:
    """Calls in this block have *tag*, unless a block inside says otherwise.

    above: goes before these.
    """
    token = _current.set(above.over(_current.get()).over(tag))
    try:
        yield
    finally:
        _current.reset(token)
