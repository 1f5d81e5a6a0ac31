"""The control plane's end of users' own policies: started, asked, timed, ended.

Problem: a policy of a user's own must be able to choose, and unable to hold
anybody up.  Each lives in a process of its own
(:mod:`~pathways_lab.runtime.control_plane.policy_worker`); here is who starts it, has it
tried before the core hears of it, carries questions and answers, keeps the
time, and ends the process by its id.

    tried --ready--> in force --failed, silent, gone, replaced--> ended
      \\--refused, silent, gone--> ended

Two bounds: after :data:`PATIENCE` nobody waits for an answer any more (the order
of submission decides that turn); after :data:`CHOICE_SECONDS` the policy is removed.

Rule for maintainers: nothing is decided here, and nothing waits: processes are
started and reaped in threads of their own.  Everything else happens in the
reactor's thread.

Paper: section 4.4.
"""

from __future__ import annotations

import math
import secrets
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from pathways_lab.core import messages as m
from pathways_lab.core.errors import Failure
from pathways_lab.core.scheduling.policies import Policy, RemotePolicy
from pathways_lab.runtime.control_plane.policy_worker import CHOICE_SECONDS, LOAD_SECONDS
from pathways_lab.runtime.processes import child_process
from pathways_lab.transport.codec import pack, unpack
from pathways_lab.transport.link import Link

if TYPE_CHECKING:
    pass

MODULE = "pathways_lab.runtime.control_plane.policy_worker"
PATIENCE = 0.03
"""Seconds after which the order of submission decides a turn that the policy was asked about."""
_POLL_SECONDS = 0.2


class Told(Protocol):
    """The driver of the core."""

    def happened(self, event: m.Event) -> None: ...

    def policy_refused(self, client: str, request: int, failure: Failure) -> None: ...

    def policy_printed(self, client: str, name: str, text: str) -> None: ...


@dataclass(slots=True, eq=False)
class Author:
    """One policy's process.

    client, request: who wants it.  limit: seconds that it has for what it does
    now, since *begun*.  asked: open questions with their times, oldest first.
    look: when the clock will be looked at next.
    """

    number: int
    token: str
    client: str
    request: int
    name: str
    code: Any
    begun: float
    limit: float
    doing: str = "be loaded"
    link: Link | None = None
    in_force: bool = False
    late: bool = False
    places: bool = False
    look: float = math.inf
    asked: deque[tuple[int, float]] = field(default_factory=deque)


@dataclass(eq=False, repr=False)
class PolicyDesk:
    """All policies of users' own that are tried or in force: at most a few.

    later(seconds, function, *args): call it then, in this thread.
    """

    _told: Told
    _launcher: Processes
    _clock: Callable[[], float]
    _later: Callable[..., None]
    _authors: dict[str, Author] = field(default_factory=dict, init=False)
    _last: int = field(default=0, init=False)

    def try_out(self, client: str, request: int, name: str, code: Any) -> None:
        """A client wants *code*, a pickled object, to be the policy.  It is tried first."""
        self._last += 1
        token, now = secrets.token_hex(16), self._clock()
        author = Author(self._last, token, client, request, name, code, now, LOAD_SECONDS)
        self._authors[token] = author
        self._launcher.start(token, lambda why: self._gone(token, why))
        self._watch(author)

    def ask(self, command: m.AskPolicy) -> None:
        """Pass on a question of the core's."""
        author = next((a for a in self._authors.values() if a.number == command.policy), None)
        if author is None or author.link is None:
            return
        author.asked.append((command.question, self._clock()))
        try:
            author.link.send("ask", {"question": command.question, "view": pack(command.view)})
        except ConnectionError:
            return  # its end is on the way
        self._watch(author)

    def keep(self, policy: Policy | RemotePolicy) -> None:
        """This one is in force now; every other that was is ended."""
        for author in tuple(self._authors.values()):
            in_force = isinstance(policy, RemotePolicy) and policy.number == author.number
            if author.in_force and not in_force:
                self._end(author)

    # --- what processes say ----------------------------------------------------------

    def knows(self, token: str) -> bool:
        """Whether this is the token of a process that was started and has not joined."""
        author = self._authors.get(token)
        return author is not None and author.link is None

    def joined(self, token: str, link: Link) -> None:
        """A process is there: it gets its code."""
        author = self._authors.get(token)
        if author is None:
            link.close("nobody wants it any more")
            return
        author.link, code, author.code = link, author.code, None
        link.send("load", {}, [code])

    def said(self, token: str, op: str, fields: dict[str, Any]) -> None:
        """A message of a process.  A malformed answer counts as its failure."""
        author = self._authors.get(token)
        if author is None:
            return
        try:
            self._heard(author, op, fields)
        except (KeyError, TypeError, ValueError) as error:
            self._fail(author, _broken(author, f"its process sent nonsense ({error!r})"))

    def left(self, token: str, reason: str) -> None:
        """The link of a process is closed."""
        self._gone(token, f"its process ended ({reason})")

    def _heard(self, author: Author, op: str, fields: dict[str, Any]) -> None:
        now = self._clock()
        if op == "answer":
            question, _ = author.asked.popleft() if author.asked else (0, 0.0)
            if question != fields["question"] or type(fields["run"]) is not int:
                raise ValueError("an answer that was not asked for")
            author.late = author.late and bool(author.asked)
            if author.asked:
                # Its turn comes only now.
                author.asked[0] = author.asked[0][0], now
            cause = f"policy-{author.number}:{question}"
            self._told.happened(
                m.PolicyAnswered(now, cause, author.number, question, fields["run"])
            )
        elif op == "printed":
            self._told.policy_printed(author.client, author.name, str(fields["text"])[:10_000])
        elif op == "loaded":
            author.begun, author.limit, author.doing = now, CHOICE_SECONDS, "choose"
            author.name = str(fields["name"])[:100]
            author.places = fields.get("places") is True
            self._watch(author)
        elif op == "ready":
            author.in_force = True
            policy = RemotePolicy(author.name, author.number, author.places)
            cause = f"{author.client}:policy-{author.number}"
            self._told.happened(m.PolicyChosen(now, cause, author.client, policy, author.request))
        elif op in ("refused", "failed"):
            self._fail(author, unpack(Failure, fields["failure"]))
        else:
            raise ValueError(f"no message of policies is called {op[:40]!r}")

    # --- time --------------------------------------------------------------------------

    def _watch(self, author: Author) -> None:
        """Look at the clock when something may be due."""
        due = self._due(author)
        if due < author.look:
            author.look = due
            self._later(max(0.0, due - self._clock()), self._look, author, due)

    def _due(self, author: Author) -> float:
        if author.token not in self._authors:
            return math.inf
        if not author.in_force:
            return author.begun + author.limit
        if not author.asked:
            return math.inf
        return author.asked[0][1] + (CHOICE_SECONDS if author.late else PATIENCE)

    def _look(self, author: Author, due: float) -> None:
        if author.look == due:
            author.look = math.inf
            if self._clock() >= self._due(author):
                self._overdue(author)
            self._watch(author)

    def _overdue(self, author: Author) -> None:
        if not author.in_force:
            self._fail(author, _slow(author, author.limit, author.doing))
        elif author.late:
            self._fail(author, _slow(author, CHOICE_SECONDS, "choose"))
        else:
            author.late = True
            cause = f"policy-{author.number}:late"
            self._told.happened(m.PolicyLate(self._clock(), cause, author.number))

    # --- ends --------------------------------------------------------------------------

    def _gone(self, token: str, why: str) -> None:
        author = self._authors.get(token)
        if author is not None:
            self._fail(author, _broken(author, why))

    def _fail(self, author: Author, failure: Failure) -> None:
        self._end(author)
        if author.in_force:
            cause = f"policy-{author.number}:failed"
            self._told.happened(m.PolicyFailed(self._clock(), cause, author.number, failure))
        else:
            self._told.policy_refused(author.client, author.request, failure)

    def _end(self, author: Author) -> None:
        if self._authors.pop(author.token, None) is not None:
            if author.link is not None:
                author.link.close("the policy is not in force any more")
            self._launcher.end(author.token)


def _slow(author: Author, seconds: float, doing: str) -> Failure:
    return Failure(
        "policy",
        f"policy {author.name} took longer than {seconds:g} s to {doing}",
        "choose() must return within milliseconds: look for a loop that does not end"
        if doing == "choose"
        else "import less in the policy's cell or module",
    )


def _broken(author: Author, why: str) -> Failure:
    return Failure(
        "policy",
        f"policy {author.name} is gone: {why}",
        "a policy must not end or leave its process; correct it and set it again",
    )


class Processes:
    """Policies as children of this process, each looked after by a thread; no method waits.

    address, key: where they connect.  folder: for their logs.
    soon(function, *args): call it in the reactor's thread.
    """

    def __init__(self, address: str, key: bytes, folder: Path, soon: Callable[..., None]) -> None:
        self._address = address
        self._key = key
        self._folder = folder
        self._soon = soon
        self._unwanted: dict[str, threading.Event] = {}

    def start(self, token: str, gone: Callable[[str], None]) -> None:
        """gone(why) when it cannot be started."""
        unwanted = self._unwanted[token] = threading.Event()
        threading.Thread(
            target=self._look_after, args=(token, unwanted, gone), name="policy", daemon=True
        ).start()

    def end(self, token: str) -> None:
        """By its id, now."""
        self._unwanted.pop(token).set()

    def _look_after(
        self, token: str, unwanted: threading.Event, gone: Callable[[str], None]
    ) -> None:
        configuration = {"address": self._address, "key": self._key.hex(), "token": token}
        name = f"policy {token[:8]}"
        try:
            child = child_process.spawn(MODULE, configuration, name=name, folder=self._folder)
        except Exception as error:
            self._soon(gone, f"its process could not be started: {error}")
            return
        while not unwanted.wait(_POLL_SECONDS) and child.alive:
            pass
        if not unwanted.is_set():
            self._soon(gone, f"its process ended with code {child.exit_code}; {child.last_words()}")
        # It may be stuck, with nothing to save: no patience.
        child.end(patience=0.0)
