"""Failures as data, and the errors that users see.

Problem: an error happens in one process and must be read in another, in the
cell that caused it.  A :class:`Failure` is the plain record that travels;
:class:`PathwaysError` is what the client raises from it.

Rule for maintainers: a message names the thing, the value, the rule and the
remedy; ids and the user's line are fields, never only text.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from pathways_lab.core.diagnosis.stall_story import Stuck
from pathways_lab.core.program.program import Line


@dataclass(frozen=True, slots=True)
class Failure:
    """Why something did not get its value.

    kind: ``"capture"``, ``"compile"``, ``"execute"``, ``"lost"``, ``"memory"``,
        ``"cancelled"``, ``"refused"``, ``"stalemate"``, ``"deadlock"``, ``"stuck"``,
        ``"internal"``.
    message: one or two sentences: thing, value, rule.
    remedy: what to do, or "".
    program, node, host, device: where, as far as known.
    line: the user's own line.
    story: of a deadlock, or of what was stuck: who waits for whom.
    details: full remote traceback or story, for ``%pw_traceback``.
    """

    kind: str
    message: str
    remedy: str = ""
    program: str = ""
    node: str = ""
    host: str = ""
    device: str = ""
    line: Line = field(default_factory=Line)
    details: str = ""
    story: Stuck | None = None

    @property
    def where(self) -> str:
        """Program, node, host and device, as far as known; a host that the message names is not."""
        host = "" if self.host in self.message.split() else self.host
        places = {"program": self.program, "node": self.node, "host": host, "device": self.device}
        return ", ".join(f"{label} {value}" for label, value in places.items() if value)


class PathwaysError(Exception):
    """Base of everything that Pathways Lab raises on purpose.  ``.failure`` has the record."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure

    def __str__(self) -> str:
        f = self.failure
        lines = [f.message]
        if f.where:
            lines.append(f"  in {f.where}")
        if f.story is not None:
            lines += f.story.members()
        elif f.line.number:
            lines.append(f"  at {f.line.told}")
        if f.remedy:
            lines.append(f"  remedy: {f.remedy}")
        return "\n".join(lines)


def refused(message: str, remedy: str = "", *, program: str = "") -> PathwaysError:
    """Something was asked for that cannot be, and nothing has changed."""
    return PathwaysError(Failure("refused", message, remedy, program=program))


class InvalidTransition(AssertionError):
    """A bug in the core: an object was asked for a change its life cycle forbids."""
