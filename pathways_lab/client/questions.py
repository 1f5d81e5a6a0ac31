"""What a kernel asks the control plane and waits for: slices, leases, names, accounts.

Problem: an answer comes in the reactor's thread, possibly as a refusal, possibly
never because the lab is gone; and whoever waits may be interrupted.

Rule for maintainers: one question, one :class:`Pending`; it is forgotten by whoever
asked, however that ends.  All methods with ``fields`` run in the reactor's thread.

Paper: section 4.1 (resource manager).
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from pathways_lab.client import in_line
from pathways_lab.client.pending import Answer, Buffer, LeaseAnswer, NameAnswer, SliceAnswer
from pathways_lab.client.waiting import Board, Pending
from pathways_lab.core.errors import Failure, PathwaysError
from pathways_lab.core.program import SliceId
from pathways_lab.core.topology import SliceBinding, SliceRequest
from pathways_lab.runtime.codec import pack, unpack

if TYPE_CHECKING:
    from typing_extensions import Buffer as Bytes


class Asking(Protocol):
    """What is needed of a connection."""

    board: Board
    closed: Failure | None

    def new_id(self, kind: str) -> int: ...

    def send(
        self, op: str, fields: dict[str, Any] | None = None, buffers: Sequence[Bytes] = ()
    ) -> None: ...


class Questions:
    """The open questions of one connection."""

    def __init__(self, connection: Asking) -> None:
        self._connection = connection
        self._slices: dict[SliceId, SliceAnswer] = {}
        self._leases: dict[str, LeaseAnswer] = {}
        self._questions: dict[int, Answer] = {}
        self._names: dict[str, NameAnswer] = {}
        self._sharing = threading.Lock()

    @property
    def open(self) -> list[Pending]:
        """All that wait for an answer."""
        return [
            *self._slices.values(), *self._leases.values(),
            *self._questions.values(), *self._names.values(),
        ]  # fmt: skip

    # --- asking -------------------------------------------------------------------

    def request_slice(self, request: SliceRequest, wait: float | None = 0.0) -> SliceBinding:
        """Ask for devices and wait for the answer.  Raises PathwaysError when refused.

        wait: seconds in line, while what keeps it from being met can end (None: as
            long as it takes); its place there is shown.
        """
        identity = self._connection.new_id("slice")
        fields = {"slice": identity, "request": pack(request), "wait": wait != 0}
        return self._ask_slice("slice", identity, fields, wait)

    def rebind_slice(self, slice_id: SliceId, island: str | None) -> SliceBinding:
        """Ask for other devices for a lost slice, and wait for the answer."""
        return self._ask_slice("rebind", slice_id, {"slice": slice_id, "island": island}, 0.0)

    def _ask_slice(
        self, op: str, identity: SliceId, fields: dict[str, Any], wait: float | None
    ) -> SliceBinding:
        answer = self._slices[identity] = SliceAnswer()
        try:
            self._connection.send(op, fields)
            self._connection.board.wait(
                lambda: answer.done or bool(answer.waits), 60.0, "binding the slice"
            )
            if not answer.done:
                in_line.stay(self._connection.board, answer, wait)
        finally:
            self._slices.pop(identity, None)
            if op == "slice" and not answer.done and self._connection.closed is None:
                with contextlib.suppress(PathwaysError):
                    self._connection.send("release-slice", {"slice": identity})
        if answer.failure is not None or answer.binding is None:
            raise PathwaysError(answer.failure or Failure("lost", "the lab is gone: no answer"))
        return answer.binding

    def lease(self, island: str, order: bool, patience: float, timeout: float = 60.0) -> None:
        """Have an island for this client alone.  Raises PathwaysError when it is refused."""
        self._ask_lease("lease", island, {"order": order, "patience": patience}, timeout)

    def return_lease(self, island: str, timeout: float = 60.0) -> None:
        """Give an island back to everybody.  Nothing to do when the lab is gone."""
        if self._connection.closed is None:
            self._ask_lease("return-lease", island, {}, timeout)

    def _ask_lease(self, op: str, island: str, fields: dict[str, Any], timeout: float) -> None:
        answer = self._leases[island] = LeaseAnswer()
        try:
            self._connection.send(op, {"island": island, **fields})
            self._connection.board.wait(lambda: answer.done, timeout, f"the lease of {island}")
        finally:
            self._leases.pop(island, None)
        if answer.failure is not None:
            raise PathwaysError(answer.failure)

    def share(
        self, op: str, name: str, buffers: Sequence[Buffer] = (), about: bytes = b""
    ) -> NameAnswer:
        """``"publish"``, ``"unpublish"`` or ``"take"`` what has *name*; waits for the answer.

        buffers: those to publish, or the new ones that shall stand for what is taken.
        Raises PathwaysError when it is refused.
        """
        with self._sharing:
            answer = self._names[name] = NameAnswer(buffers)
            try:
                fields = {"name": name, "buffers": [buffer.id for buffer in buffers]}
                self._connection.send(op, fields, [about] if about else [])
                self._connection.board.wait(lambda: answer.done, 60.0, f"an answer about {name!r}")
            finally:
                self._names.pop(name, None)
        if answer.failure is not None:
            raise PathwaysError(answer.failure)
        return answer

    def ask(self, op: str, fields: dict[str, Any], timeout: float = 10.0) -> dict[str, Any]:
        """A question, and what was answered.  Raises PathwaysError when it is refused."""
        identity, answer = self._connection.new_id("question"), Answer()
        self._questions[identity] = answer
        try:
            self._connection.send(op, {**fields, "id": identity})
            self._connection.board.wait(lambda: answer.done, timeout, f"the answer to {op!r}")
        finally:
            self._questions.pop(identity, None)
        if answer.failure is not None:
            raise PathwaysError(answer.failure)
        return answer.fields

    def not_donated(self, buffers: Sequence[Buffer]) -> tuple[int, str, str] | None:
        """The first of these, which this client has published, that others keep: its number, a
        message, a remedy."""
        answer = self.ask("donation", {"buffers": [buffer.id for buffer in buffers]})
        return answer["refused"] and tuple(answer["refused"])

    # --- what is answered: in the reactor's thread -----------------------------------

    def refused(self, kind: str, subject: str, failure: Failure) -> None:
        """What was asked for does not happen.  kind, subject: ``"lease"``, ``"island0"``."""
        identity = int(subject) if subject.isdecimal() else 0
        found: dict[str, Pending | None] = {
            "slice": self._slices.get(identity),
            "question": self._questions.get(identity),
            "lease": self._leases.get(subject),
            "name": self._names.get(subject),
        }
        answer = found.get(kind)
        if answer is not None:
            self._connection.board.settle((answer,), failure)

    def bound(self, binding: SliceBinding) -> None:
        """A slice has devices."""
        answer = self._slices.get(binding.slice)
        if answer is not None:
            answer.binding = binding
            self._connection.board.settle((answer,), None)

    def leased(self, fields: dict[str, Any]) -> None:
        """A lease was given, or returned."""
        answer = self._leases.get(fields["island"])
        if answer is not None:
            self._connection.board.settle((answer,), None)

    def shared(self, fields: dict[str, Any]) -> None:
        """A name was published or withdrawn."""
        answer = self._names.get(fields["name"])
        if answer is not None:
            self._connection.board.settle((answer,), None)

    def taken(self, fields: dict[str, Any], about: bytes) -> None:
        """What is behind a name, and what its owner said about it."""
        answer = self._names.get(fields["name"])
        if answer is not None:
            places = {b.slice: b for b in (unpack(SliceBinding, b) for b in fields["bindings"])}
            for number, buffer in enumerate(answer.buffers):
                buffer.stored, buffer.ticket = fields["stored"][number], fields["tickets"][number]
            answer.bindings = [places[on] for on in fields["slices"]]
            answer.about = about
            self._connection.board.settle((answer,), None)

    def answered(self, fields: dict[str, Any]) -> None:
        """A question was answered."""
        answer = self._questions.get(fields["id"])
        if answer is not None:
            answer.fields = fields
            self._connection.board.settle((answer,), None)

    def slice_waits(self, fields: dict[str, Any]) -> None:
        """A request for a slice stands in line."""
        answer = self._slices.get(fields["slice"])
        if answer is not None:
            answer.waits = (
                f"waiting for devices, place {fields['place']} of {fields['waiting']} in line:"
                f" {fields['why']}"
            )
            self._connection.board.settle((), None)
