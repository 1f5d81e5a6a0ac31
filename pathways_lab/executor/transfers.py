"""Transfers on one host: when they may be sent, accepted and forgotten.

Problem: a host may hold the source of a transfer, its target, or both; the one
waits for its gang, the other for room, and a run may end in between.

Rule for maintainers: no order: a transfer waits for its source and for memory,
and nothing else.

Paper: section 4.5 (transfers beside computations).
"""

from __future__ import annotations

from typing import Any

from pathways_lab.core.errors import Failure
from pathways_lab.core.program.program import Transfer
from pathways_lab.executor.actions import CancelReceive, Receive, Report, Send
from pathways_lab.executor.local_array import FAILED, READY
from pathways_lab.executor.run_values import Values
from pathways_lab.executor.steps import Key, Move, Run


class Moves:
    """The transfers in progress."""

    def __init__(self, values: Values) -> None:
        self._values = values

    def add(self, run: Run, index: int, node: Transfer, seq: int) -> None:
        """One was granted."""
        plan = run.reading.plan
        move = Move(run, index, node, seq)
        run.steps[index] = move
        if self._values.book.lane(plan.values[node.output].slice):
            move.target = self._values.value(run, node.output)
            self._values.buffers.use(move.target)
            self._values.memory.lodge(move)
            if self._values.memory.begin(move):
                self.accept(move)
        if self._values.book.lane(plan.values[node.input].slice):
            move.source = self._values.value(run, node.input)
            self._values.buffers.use(move.source)
            move.source.readers.append(move.reader)
            if not move.source.when_settled(lambda: self._send(move)):
                self._send(move)

    def accept(self, move: Move) -> None:
        """There is room for what will come; parts that came before wait in the host's memory."""
        assert move.target is not None
        move.accepted = True
        self._values.buffers.count(move.target)
        key, plan = (move.run.id, move.index), move.run.reading.plan
        self._values.actions.append(Receive(key, plan, move.node, move.target, move.seq))

    def _send(self, move: Move) -> None:
        source = move.source
        if source is None:  # cancelled before its source was settled
            return
        move.started = True
        failure = source.failure if source.lacking else None
        key = (move.run.id, move.index)
        self._values.actions.append(
            Send(key, move.run.reading.plan, move.node, source, failure, move.seq)
        )

    def sent(self, key: Key, failure: Failure | None = None) -> None:
        """The source is not needed any more."""
        move = self._values.runs[key[0]].steps[key[1]]
        assert isinstance(move, Move)
        self._end_send(move, failure)
        self._end_move(move)

    def _end_send(self, move: Move, failure: Failure | None) -> None:
        assert move.source is not None
        source, move.source = move.source, None
        move.failure = move.failure or failure
        self._values.buffers.end_reading(source, move.reader)

    def received(self, key: Key, payload: Any = None, failure: Failure | None = None) -> None:
        """All parts are here, or some never will be."""
        run = self._values.runs.get(key[0])
        move = run.steps.get(key[1]) if run else None
        if not isinstance(move, Move) or move.target is None:
            return  # cancelled while its last part came
        self._end_receive(move, payload, failure)
        self._end_move(move)

    def _end_receive(self, move: Move, payload: Any, failure: Failure | None) -> None:
        assert move.target is not None
        target, move.target = move.target, None
        move.failure = move.failure or failure
        target.payload = payload
        target.become(FAILED if failure else READY, failure)
        self._values.buffers.release(target)

    def _end_move(self, move: Move) -> None:
        if move.source is None and move.target is None:
            failures = {} if move.failure is None else {move.index: move.failure}
            self._values.actions.append(Report(move.run.id, move.index, (0.0,), failures))
            self._values.finish(move.run, move.index)

    def cancel(self, move: Move, failure: Failure) -> None:
        """Its run ends early: it is not waited for."""
        key = (move.run.id, move.index)
        if move.target is not None:
            if not move.accepted:
                self._values.memory.withdraw(move)
            self._values.actions.append(CancelReceive(key))
            self._end_receive(move, None, failure)
        if move.source is not None and not move.started:
            self._end_send(move, failure)
        self._end_move(move)
