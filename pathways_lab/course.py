"""The course's exercises: ``pathways_lab.course.check("name", answer)``.

Problem: an answer can be written in many ways, and a student who is wrong wants to
know for which case.

Rule for maintainers: graded by behaviour only: what an answer does with examples,
never how it is written.  A wrong answer is told, not raised; it never ends a
notebook.
"""

from __future__ import annotations

import html
import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pathways_lab.core.errors import refused
from pathways_lab.pipeline.schedule import Schedule, ideal_bubble
from pathways_lab.pipeline.schedules import gpipe

Problem = str | None
"""The error in an answer, or None."""


@dataclass(frozen=True)
class Verdict:
    """right: whether it is.  text: why, or for which case not."""

    exercise: str
    right: bool
    text: str

    def __bool__(self) -> bool:
        return self.right

    def __repr__(self) -> str:
        return f"{self.exercise}: {'right' if self.right else 'not yet'}. {self.text}"

    def _repr_html_(self) -> str:
        mark, word = ("\N{CHECK MARK}", "right") if self.right else ("\N{WHITE CIRCLE}", "not yet")
        return f"{mark} <b>{self.exercise}: {word}.</b> {html.escape(self.text)}"


def check(exercise: str, answer: Any) -> Verdict:
    """Grade an answer by what it does.

    exercise: its name, as the notebook gives it.  answer: a function, a schedule or a
        number, as the exercise says; None for none yet.
    Raises PathwaysError for an exercise that there is not.
    """
    known = EXERCISES.get(exercise)
    if known is None:
        raise refused(
            f"there is no exercise called {exercise!r}", f"one of {', '.join(map(repr, EXERCISES))}"
        )
    if answer is None:
        return Verdict(exercise, False, "There is no answer yet.")
    try:
        problem = known(answer)
    except Exception as error:
        problem = f"It raised {type(error).__name__}: {error}"
    return Verdict(exercise, problem is None, problem or "It does what it should.")


# --- 03: SPMD and MPMD ------------------------------------------------------------------


def _messages(answer: Callable[[int, int, bool], int]) -> Problem:
    """How many messages a client sends: ``answer(nodes, steps, captured)``."""
    for nodes, steps in ((4, 1), (4, 10), (1, 7), (128, 3)):
        for captured in (True, False):
            wanted = steps if captured else nodes * steps
            if (got := answer(nodes, steps, captured)) != wanted:
                how = "captured as one program" if captured else "called one by one"
                return f"{nodes} functions, {steps} times, {how}: {wanted} messages, not {got}."
    return None


def _garbage(answer: Callable[[int, int], float]) -> Problem:
    """Share of device time for nothing, of an SPMD pipeline: ``answer(stages, microbatches)``."""
    for stages, microbatches in ((2, 2), (4, 8), (4, 16), (1, 5), (16, 64)):
        wanted = float(ideal_bubble(stages, microbatches))
        if not math.isclose(got := float(answer(stages, microbatches)), wanted, abs_tol=1e-3):
            return (
                f"{stages} stages and {microbatches} microbatches take"
                f" {stages + microbatches - 1} ticks, and {got:.3f} of the work is not for nothing."
            )
    return None


# --- 04: pipelines ------------------------------------------------------------------------


def _schedule(answer: Schedule) -> Problem:
    """As fast as GPipe with two slices and four microbatches, and keeping at most two of them."""
    if problem := _shaped(answer, slices=2, microbatches=4):
        return problem
    if (failure := answer.problem()) is not None:
        return failure.message
    if max(answer.peak) > 2:
        return f"A slice keeps {max(answer.peak)} microbatches at once; two are allowed."
    took, wanted = answer.timed().seconds, gpipe(2, 4).timed().seconds
    if took > wanted:
        return f"It takes {took:g} units of time; GPipe takes {wanted:g}."
    return None


def _hangs(answer: object) -> Problem:
    """A schedule that has all tasks and would wait for itself for ever."""
    if not isinstance(answer, Schedule):
        return f"It should be a Schedule, and is {type(answer).__name__}."
    failure = answer.problem()
    if failure is None:
        return "It does not hang: every slice gets to its end."
    if not answer.cycle():
        return f"It is not a schedule at all, for another reason: {failure.message}."
    return None


def _shaped(answer: object, slices: int, microbatches: int) -> Problem:
    if not isinstance(answer, Schedule):
        return f"It should be a Schedule, and is {type(answer).__name__}."
    if (len(answer.order), answer.microbatches) != (slices, microbatches):
        return (
            f"It is for {len(answer.order)} slices and {answer.microbatches} microbatches, not for"
            f" {slices} and {microbatches}."
        )
    return None


# --- 05: islands ----------------------------------------------------------------------------


def exchange_seconds(
    compute: float, nbytes: float, bandwidth: float, latency: float, chunks: int
) -> float:
    """A step whose gradients are sent in *chunks* equal parts, each as soon as it is computed.

    compute: seconds of the backward pass, in which the gradients come evenly.
    bandwidth: bytes per second.  latency: seconds that each part costs.
    """
    part = latency + nbytes / chunks / bandwidth
    sent = 0.0
    for number in range(1, chunks + 1):
        sent = max(sent, compute * number / chunks) + part
    return sent


def _chunks(answer: Callable[[float, float, float, float], int]) -> Problem:
    """The number of parts: ``answer(compute, nbytes, bandwidth, latency)``."""
    rng = random.Random(0)
    for _ in range(50):
        compute, nbytes = rng.uniform(0.01, 1), rng.uniform(1e6, 1e9)
        bandwidth, latency = rng.uniform(1e8, 1e10), rng.uniform(1e-4, 1e-2)
        case = compute, nbytes, bandwidth, latency
        best = min(exchange_seconds(*case, chunks) for chunks in range(1, 257))
        got = exchange_seconds(*case, max(1, int(answer(*case))))
        if got > 1.1 * best:
            return (
                f"compute {compute:.3f} s, {nbytes:.3g} bytes, {bandwidth:.3g} bytes/s, latency"
                f" {latency:.2g} s: a step of {got:.3f} s, and {best:.3f} s is possible."
            )
    return None


# --- 09: build it yourself --------------------------------------------------------------------


def _scheduler(answer: Callable[[Mapping[str, list[str]]], list[str]]) -> Problem:
    """Round robin: ``answer(queues)`` merges what clients queue, one of each in turn."""
    rng = random.Random(0)
    for _ in range(50):
        queues = {
            f"client{c}": [f"{c}.{n}" for n in range(rng.randrange(5))]
            for c in range(rng.randrange(1, 4))
        }
        wanted = [
            queue[turn]
            for turn in range(max(map(len, queues.values())))
            for queue in queues.values()
            if turn < len(queue)
        ]
        got = list(answer({client: list(queue) for client, queue in queues.items()}))
        if got != wanted:
            return f"Of {queues} it makes {got}; one of each in turn is {wanted}."
    return None


EXERCISES: dict[str, Callable[[Any], Problem]] = {
    "messages": _messages,
    "garbage": _garbage,
    "schedule": _schedule,
    "hangs": _hangs,
    "chunks": _chunks,
    "scheduler": _scheduler,
}
"""By name, what looks for a problem in an answer."""
