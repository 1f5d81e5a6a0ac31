"""A user's own policy, in a process where it can stop nobody.

Problem: a policy is a few lines from somebody's cell, asked while everybody's
programs wait for their turns.  It may raise, loop for ever, hold the
interpreter or end its process; none of that may reach the control plane, which
unpickles nothing.

How: the control plane starts ``python -m pathways_lab.runtime.control_plane.policy_worker``
on a lifeline.  The process loads the policy, tries it on a few views, and then
answers questions one by one, keeping the object, so that a policy may remember
things in its attributes.  The control plane (:mod:`.policy_supervisor`) keeps the
time and ends the process.

Rule for maintainers: imports little, to start quickly.  The policy runs in the
only thread that reads, so a question waits for the one before.  Each call has an
alarm of the operating system's, which also ends a process whose control plane
is gone while the policy keeps the interpreter to itself.

Paper: section 4.4.
"""

from __future__ import annotations

import contextlib
import io
import pickle
import signal
import sys
import traceback
from collections.abc import Iterator
from typing import Any

from pathways_lab.core.errors import Failure
from pathways_lab.core.scheduling.policies import (
    PlaceView,
    Policy,
    PolicyView,
    ask,
    name_of,
    places,
    validate,
)
from pathways_lab.runtime.processes import child_process
from pathways_lab.transport.codec import pack, unpack
from pathways_lab.transport.link import Link, LinkClosed
from pathways_lab.transport.reactor import Reactor

LOAD_SECONDS = 10.0
"""How long a policy may take to be loaded, with whatever it imports."""
CHOICE_SECONDS = 0.4
"""How long it may take for one choice; longer, and it is removed."""


@contextlib.contextmanager
def alarm(seconds: float) -> Iterator[None]:
    """End this process if the block takes so long, whatever it does."""
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)


class Printed(io.TextIOBase):
    """Becomes ``sys.stdout``: what the policy prints is for who has set it."""

    def __init__(self, link: Link) -> None:
        super().__init__()
        self._link = link
        self._rest = ""

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        lines, newline, self._rest = (self._rest + text).rpartition("\n")
        if newline:
            self._link.send("printed", {"text": lines + newline})
        return len(text)


class Asked:
    """The policy of this process, and the link over which it is asked."""

    def __init__(self) -> None:
        self.reactor = Reactor("policy", self._message, lambda link, why: child_process.leave())
        self._policy: Policy | None = None

    def _message(
        self, link: Link, op: str, fields: dict[str, Any], buffers: list[memoryview]
    ) -> None:
        with contextlib.suppress(LinkClosed):
            if op == "load":
                self._load(link, buffers[0])
            elif op == "ask":
                view = unpack(PolicyView | PlaceView, fields["view"])
                self._answer(link, fields["question"], view)

    def _load(self, link: Link, code: memoryview) -> None:
        try:
            with alarm(2 * LOAD_SECONDS):
                policy: Any = pickle.loads(code)
        except Exception as error:
            link.send("refused", {"failure": pack(_unloadable(error))})
            return
        link.send("loaded", {"name": name_of(policy), "places": places(policy)})
        with alarm(4 * CHOICE_SECONDS):
            failure = validate(policy)
        if failure is None:
            self._policy = policy
            sys.stdout = Printed(link)
            link.send("ready")
        else:
            link.send("refused", {"failure": pack(failure)})

    def _answer(self, link: Link, question: int, view: PolicyView | PlaceView) -> None:
        assert self._policy is not None, "a policy is asked after it was ready"
        with alarm(4 * CHOICE_SECONDS):
            answer = ask(self._policy, view)
        if isinstance(answer, Failure):
            link.send("failed", {"failure": pack(answer)})
        else:
            link.send("answer", {"question": question, "run": answer})


def _unloadable(error: Exception) -> Failure:
    missing = isinstance(error, ImportError)
    return Failure(
        "policy",
        f"the policy cannot be loaded where policies run: {type(error).__name__}: {error}",
        "install what it imports on the machine of the control plane"
        if missing
        else "keep only plain data in its attributes",
        details="".join(traceback.format_exception(error)),
    )


def main() -> None:
    """Connect to the control plane, load one policy, answer until the end."""
    child_process.begin()
    config = child_process.configuration()
    asked = Asked()
    hello = {"role": "policy", "name": "policy", "token": config["token"]}
    asked.reactor.connect(config["address"], bytes.fromhex(config["key"]), hello)
    asked.reactor.run_forever()


if __name__ == "__main__":
    main()
