"""A policy that answers from elsewhere, in simulated time: soon, late, wrongly, or never.

Problem: on a real cluster a user's own policy runs in another process, and the
core goes on while it thinks.  Whether every run still ends must be searched for
like everything else.

Rule for maintainers: the delays are those of a process that may be slow or
stuck; the policy itself is asked at once.

Paper: section 4.4.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from pathways_lab.core.errors import Failure
from pathways_lab.core.messages import (
    AskPolicy,
    Command,
    Event,
    PolicyAnswered,
    PolicyFailed,
    PolicyLate,
)
from pathways_lab.core.scheduling.policies import Policy, RemotePolicy, ask, name_of, places
from pathways_lab.sim.world import World

PATIENCE, BOUND = 0.03, 0.4
"""Seconds (assumed, those of the real runtime)."""


class Elsewhere:
    """Observes a world and answers what the core asks.  remote: what to install there."""

    def __init__(self, world: World, policy: Policy, rng: random.Random) -> None:
        self.remote = RemotePolicy(name_of(policy), 1, places(policy))
        self._world = world
        self._policy = policy
        self._rng = rng
        world.observers.append(self._heard)

    def _heard(self, event: Event, commands: list[Command]) -> None:
        for command in commands:
            if isinstance(command, AskPolicy):
                self._answer(command)

    def _answer(self, asked: AskPolicy) -> None:
        number, question = asked.policy, asked.question
        answer = ask(self._policy, asked.view)
        seconds = self._rng.choice((0.0002, 0.002, 0.02, 0.1, 2 * BOUND))
        if seconds > PATIENCE:
            self._after(PATIENCE, lambda t: PolicyLate(t, "late", number))
        if seconds > BOUND:
            never = Failure("policy", "it never answers")
            self._after(BOUND, lambda t: PolicyFailed(t, "failed", number, never))
        elif isinstance(answer, Failure):
            self._after(seconds, lambda t: PolicyFailed(t, "failed", number, answer))
        else:
            self._after(seconds, lambda t: PolicyAnswered(t, "answer", number, question, answer))

    def _after(self, seconds: float, make: Callable[[float], Event]) -> None:
        self._world.agenda.after(seconds, self._world.tell, "policy", make)
