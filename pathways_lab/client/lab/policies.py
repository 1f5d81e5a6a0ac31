"""``lab.policy``: whose gangs go first, set and read from a cell.

Problem: a policy is for everybody on the lab, and must be as easy to change as
a variable.  The ones that come with the lab travel as data; a user's own one is
an object of any class with ``choose(view)`` and travels as code, to a process
that can stop nobody (:mod:`pathways_lab.runtime.control_plane.policy_worker`).  It is tried
there before it is in force, and whoever set it is told when it is removed.

Rule for maintainers: messages are handled in the reactor's thread, which never
prints: what is noticed later goes to a place below the cell that set the policy
or, without a front end, is printed by whoever waits for a value.

Paper: section 4.4.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, get_args

from pathways_lab.client.code import pickling, source_lines
from pathways_lab.client.lab import hooks
from pathways_lab.client.lab.tags import Tag
from pathways_lab.client.session import failures
from pathways_lab.client.session.connection import Connection
from pathways_lab.client.session.session import Session
from pathways_lab.core.errors import Failure, PathwaysError
from pathways_lab.core.scheduling.policies import BuiltIn, Policy, name_of, validate
from pathways_lab.transport.codec import pack, unpack

_SECONDS = 30.0
"""Far longer than a policy may take to be loaded and tried."""

Note = Callable[["str | Failure"], None]


@dataclass(frozen=True)
class OthersPolicy:
    """A policy of its own that another client has set: its code stays where it runs.

    name: of its class.  client: who set it.
    """

    name: str
    client: str

    def __repr__(self) -> str:
        return f"<policy {self.name}, set by {self.client}>"


class Policies:
    """The policy in force, as this client knows it.

    print_later(text): have text printed by whoever waits for a value next.
    """

    def __init__(self, connection: Connection, print_later: Callable[[str], None]) -> None:
        self._connection = connection
        self._print_later = print_later
        self._setting = threading.Lock()
        self._chosen: Any = None
        self._own: Any = None
        self._note: Note | None = None
        connection.on_policy = self._heard
        self._told = connection.policy

    @property
    def in_force(self) -> Any:
        """See :attr:`pathways_lab.Lab.policy`."""
        told = self._told
        if told["policy"] is not None:
            return unpack(BuiltIn, told["policy"])
        if told["owner"] == self._connection.name:
            return self._own
        return OthersPolicy(told["name"], told["owner"])

    def choose(self, policy: Policy) -> None:
        """Set the policy and wait until it is in force.  Raises PathwaysError when it is not."""
        wrong = _wrong(policy)
        if wrong is not None:
            raise PathwaysError(wrong)
        code, name = type(policy) not in get_args(BuiltIn), name_of(policy)
        fields = {"name": name} if code else {"policy": pack(policy)}
        buffers = [_pickled(policy)] if code else []
        with self._setting:
            self._chosen = policy
            ask = self._connection.questions.ask
            try:
                ask("policy", fields, _SECONDS, buffers, f"setting policy {name}")
            except PathwaysError as error:
                raise PathwaysError(_with_text(error.failure)) from None
        if code and hooks.open_notes is not None:
            self._note = hooks.open_notes()

    # --- in the reactor's thread -------------------------------------------------------

    def _heard(self, op: str, fields: dict[str, Any]) -> None:
        if op == "policy-printed":
            self._tell(fields["text"])
            return
        packed, ours = fields["failure"], fields["client"] == self._connection.name
        if ours and packed is None:
            self._own = self._chosen
        self._told = fields
        if ours and packed is not None:
            failure = _with_text(unpack(Failure, packed))
            what = f"{failure.message}; the policy was removed; clients share equally again"
            self._tell(dataclasses.replace(failure, message=what))

    def _tell(self, what: str | Failure) -> None:
        if self._note is not None:
            self._note(what)
        else:
            text = what if isinstance(what, str) else str(PathwaysError(what))
            self._print_later(text)


def _wrong(policy: object) -> Failure | None:
    """Checks a policy as far as that is possible without calling it."""
    if isinstance(policy, OthersPolicy):
        return failures.failure(
            "policy",
            f"{policy!r} is code of another client, and cannot be set from here",
            "ask its author for the class",
        ).failure
    if isinstance(policy, type) or not isinstance(policy, Policy):
        wrong = validate(policy)
        assert wrong is not None
        return dataclasses.replace(wrong, line=source_lines.of_caller())
    return None


def _pickled(policy: Policy) -> bytes:
    try:
        return pickling.dumps(policy)
    except Exception as error:
        raise failures.failure(
            "policy",
            f"policy {name_of(policy)} cannot be sent to where policies run:"
            f" {type(error).__name__}: {error}",
            "keep only plain data in its attributes, and nothing of this lab",
        ) from error


def _with_text(failure: Failure) -> Failure:
    """The source of the user's line is here and not where the policy ran."""
    return dataclasses.replace(failure, line=source_lines.with_text(failure.line))


class Tagging:
    """A lab whose client has a priority."""

    session: Session

    @property
    def priority(self) -> int:
        """The priority of this client's runs whose programs, functions and blocks name none.

            lab.priority = 2

        A whole number; higher goes first under :class:`pathways_lab.Priority`.  Holds for what
        is called from now on.  Setting raises PathwaysError for what is no priority.
        """
        return self.session.connection.tag.priority or 0

    @priority.setter
    def priority(self, priority: int) -> None:
        self.session.connection.tag = Tag.of(priority, None)
