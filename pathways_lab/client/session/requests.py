"""Requests of a kernel to the control plane with an answer: slices, and all others by a number.

Problem: an answer comes in the reactor's thread, possibly as a refusal, possibly
never because the lab is gone; and the waiting thread may be interrupted.

Rule for maintainers: one question, one number, one answer, one :class:`Pending`; the
asking thread forgets it, however that ends.  Requests for slices go by the slice's number.
All methods with ``fields`` run in the reactor's thread.

Paper: section 4.1 (resource manager).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from pathways_lab.client.lab import queue_display
from pathways_lab.client.session import failures
from pathways_lab.client.session.pending import Answer, Buffer, SliceAnswer
from pathways_lab.client.session.waiting import Board, Pending
from pathways_lab.core.diagnosis.stall_story import Stuck
from pathways_lab.core.errors import Failure, PathwaysError
from pathways_lab.core.program.program import SliceId
from pathways_lab.core.slices.topology import SliceBinding, SliceRequest
from pathways_lab.transport.codec import pack, unpack

if TYPE_CHECKING:
    from typing_extensions import Buffer as Bytes


class Asking(Protocol):
    """The part of a connection that is needed here."""

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
        self._questions: dict[int, Answer] = {}

    @property
    def open(self) -> list[Pending]:
        """All that wait for an answer."""
        return [*self._slices.values(), *self._questions.values()]

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
                queue_display.stay(self._connection.board, answer, wait)
        finally:
            self._slices.pop(identity, None)
            if op == "slice" and not answer.done and self._connection.closed is None:
                with contextlib.suppress(PathwaysError):
                    self._connection.send("release-slice", {"slice": identity})
        if answer.failure is not None or answer.binding is None:
            raise failures.told(answer.failure or Failure("lost", "the lab is gone: no answer"))
        return answer.binding

    def ask(
        self,
        op: str,
        fields: dict[str, Any],
        timeout: float | None = 60.0,
        buffers: Sequence[Bytes] = (),
        what: str = "",
    ) -> Answer:
        """A question, and its answer.  what: is waited for.

        Raises PathwaysError when it is refused, or the lab is gone; TimeoutError after
        *timeout* seconds, and what was asked for may still come.
        """
        identity, answer = self._connection.new_id("question"), Answer()
        self._questions[identity] = answer
        try:
            self._connection.send(op, {**fields, "id": identity}, buffers)
            self._connection.board.wait(
                lambda: answer.done, timeout, what or f"the answer to {op!r}"
            )
        finally:
            self._questions.pop(identity, None)
        if answer.failure is not None:
            raise failures.told(answer.failure)
        return answer

    def tell(
        self,
        op: str,
        fields: dict[str, Any],
        refused: Callable[[Failure], None],
        buffers: Sequence[Bytes] = (),
    ) -> None:
        """Ask for something, and go on.  refused(failure): in any thread, if it does not happen."""
        identity, answer = self._connection.new_id("question"), Answer()

        def over() -> None:
            self._questions.pop(identity, None)
            if answer.failure is not None:
                refused(answer.failure)

        self._questions[identity] = answer
        try:
            self._connection.send(op, {**fields, "id": identity}, buffers)
        except BaseException:
            self._questions.pop(identity, None)
            raise
        self._connection.board.when_done(answer, over)

    def not_donated(self, buffers: Sequence[Buffer]) -> tuple[int, str, str] | None:
        """The first of these, which this client has published, that others keep: its number, a
        message, a remedy."""
        fields = self.ask("donation", {"buffers": [buffer.id for buffer in buffers]}).fields
        return fields["refused"] and tuple(fields["refused"])

    @contextlib.contextmanager
    def wondering(self, seconds: float) -> Iterator[Callable[[], Stuck | None]]:
        """Ask what is late, as long ago as that; in the block the answer can be had, if it is
        there."""
        identity, answer = self._connection.new_id("question"), Answer()
        self._questions[identity] = answer

        def story() -> Stuck | None:
            packed = answer.fields["story"] if answer.done and answer.failure is None else None
            return None if packed is None else unpack(Stuck, packed)

        try:
            with contextlib.suppress(PathwaysError):
                self._connection.send("stuck", {"seconds": seconds, "id": identity})
            yield story
        finally:
            self._questions.pop(identity, None)

    # --- what is answered: in the reactor's thread -----------------------------------

    def refused(self, identity: SliceId, failure: Failure) -> None:
        """There is no such slice for this client."""
        answer = self._slices.get(identity)
        if answer is not None:
            self._connection.board.settle((answer,), failure)

    def bound(self, binding: SliceBinding) -> None:
        """A slice has devices."""
        answer = self._slices.get(binding.slice)
        if answer is not None:
            answer.binding = binding
            self._connection.board.settle((answer,), None)

    def answered(self, fields: dict[str, Any], buffers: Sequence[memoryview]) -> None:
        """A question was answered: it is as asked for, or why not."""
        answer = self._questions.get(fields["id"])
        if answer is not None:
            answer.fields, answer.buffers = fields, tuple(bytes(b) for b in buffers)
            packed = fields["failure"]
            failure = None if packed is None else unpack(Failure, packed)
            self._connection.board.settle((answer,), failure)

    def slice_waits(self, fields: dict[str, Any]) -> None:
        """A request for a slice stands in line."""
        answer = self._slices.get(fields["slice"])
        if answer is not None:
            answer.waits = (
                f"waiting for devices, place {fields['place']} of {fields['waiting']} in line:"
                f" {fields['why']}"
            )
            self._connection.board.settle((), None)
