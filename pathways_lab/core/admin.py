"""Requests of one client that change the lab for all: policies, quotas, leased islands.

Problem: on a shared lab some requests change the work of every client.  Only the
lab's *owners* decide about policies, quotas and the order of an island; an
invited client decides for itself.

Rule for maintainers: a request is looked at only after its client is known to be
an owner; the refusal of any other client says who may.  Effects of a policy or a
quota are elsewhere.

Paper: section 4.1 (resource manager), section 4.4 (policies).
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass

from pathways_lab.core import messages as m
from pathways_lab.core.checks import ClientRecord, not_an_owner
from pathways_lab.core.errors import Failure
from pathways_lab.core.memory.quotas import Quota
from pathways_lab.core.memory.uploads import Uploads
from pathways_lab.core.messages import elastic as em
from pathways_lab.core.scheduling.admission import beyond_quota
from pathways_lab.core.scheduling.outcomes import Outcomes
from pathways_lab.core.scheduling.policies import RemotePolicy, validate
from pathways_lab.core.slices.slice_queue import Bookings
from pathways_lab.core.state import State


@dataclass(slots=True)
class Decisions:
    """See the module's docstring."""

    state: State
    clients: Mapping[str, ClientRecord]
    bookings: Bookings
    outcomes: Outcomes
    uploads: Uploads

    def _owns(
        self,
        event: m.PolicyChosen | m.QuotaChosen | m.LeaseRequested | m.WindowChosen,
        subject: str,
        to: str,
    ) -> bool:
        """Whether a client may decide for all; else it is told who may."""
        if self.clients[event.client].owner:
            return True
        self.state.refuse(event, subject, Failure("refused", *not_an_owner(event.client, to)))
        return False

    def quota_chosen(self, event: m.QuotaChosen) -> None:
        """Refuse the waiting requests that can never be met now."""
        state = self.state
        if not self._owns(event, f"the quota of {event.whom}", "set quotas"):
            return
        state.quotas.give(event.whom, Quota(event.devices, event.nbytes))
        state.out.append(em.Answer(event.cause, event.client, event.request))
        self.bookings.moved = True
        state.admission.changed, state.admission.settled = True, False
        for entry in [e for entries in state.admission.kinds.values() for e in entries]:
            failure = beyond_quota(entry, state.store.ledger, state.quotas)
            if failure is not None and entry.run is not None:
                self.outcomes.fail(entry.run, failure)
            elif failure is not None and entry.buffer is not None:
                self.uploads.lose(entry.buffer, failure)

    def window_chosen(self, event: m.WindowChosen) -> None:
        """Cut the waiting gangs into windows anew; granted gangs keep their places."""
        pace, functions, seconds = self.state.pace, self.state.functions, event.seconds
        if seconds is not None:
            if not self._owns(event, f"question {event.request}", "say how far ahead grants run"):
                return
            pace.limit = round(seconds * 1e6)
            functions.assumed = max(self.state.rules.assumed, seconds)
            functions.version += 1
        kept = {"seconds": pace.limit / 1e6}
        self.state.out.append(em.Answer(event.cause, event.client, event.request, numbers=kept))

    def policy_chosen(self, event: m.PolicyChosen) -> None:
        if not self._owns(event, f"policy {event.request}", "set policies"):
            return
        turns = self.state.turns
        self.bookings.moved = True
        failure: Failure | None = None
        if isinstance(event.policy, RemotePolicy):
            turns.install(event.policy, event.client)
        else:
            failure = validate(event.policy)
            if failure is None:
                turns.install(copy.deepcopy(event.policy), event.client)
        self.state.out.append(
            m.PolicySet(
                event.cause, event.client, turns.policy, turns.owner, failure, event.request
            )
        )

    def _remote(self, number: int) -> bool:
        """Whether the policy in force is this remote one; others may have last words."""
        policy = self.state.turns.policy
        return isinstance(policy, RemotePolicy) and policy.number == number

    def policy_answered(self, event: m.PolicyAnswered) -> None:
        if self._remote(event.policy):
            self.state.turns.answered(event.question, event.run)
            self.bookings.moved = True

    def policy_late(self, event: m.PolicyLate) -> None:
        if self._remote(event.policy):
            self.state.turns.questions.overdue()
            self.bookings.moved = True

    def policy_failed(self, event: m.PolicyFailed) -> None:
        if self._remote(event.policy):
            self.state.turns.remove(event.failure)
            self.bookings.moved = True

    def tell_policy(self) -> None:
        """Ask what is new to be asked; say whose policy was removed."""
        state, turns = self.state, self.state.turns
        turns.questions.named.clear()
        if turns.questions.new:
            assert isinstance(turns.policy, RemotePolicy)
            number = turns.policy.number
            new, turns.questions.new = turns.questions.new, []
            state.out += [
                m.AskPolicy(state.cause, number, question, view) for question, view in new
            ]
        if turns.removed is not None:
            (owner, failure), turns.removed = turns.removed, None
            state.out.append(m.PolicySet(state.cause, owner, turns.policy, turns.owner, failure))

    def lease_requested(self, event: m.LeaseRequested) -> None:
        state, subject = self.state, f"lease {event.island}"
        if not event.order and not self._owns(event, subject, "switch the order off"):
            return
        handles = {number: len(buffers) for number, buffers in state.store.by_slice.items()}
        failure = state.resources.lease(event.island, event.client, event.order, handles)
        if failure is not None:
            self.state.refuse(event, subject, failure)
        else:
            # Nothing is bounded where the order is off: see Grants.
            state.functions.version += not event.order
            state.out += [
                m.Leased(event.cause, event.client, event.island, event.order, event.patience),
                em.Answer(event.cause, event.client, event.request),
            ]

    def lease_returned(self, event: m.LeaseReturned) -> None:
        if self.state.resources.end_lease(event.island, event.client):
            self.state.functions.version += 1
            self.bookings.moved = True
            self.state.out += [
                m.LeaseEnded(event.cause, event.client, event.island),
                em.Answer(event.cause, event.client, event.request),
            ]
        else:
            self.state.refuse(event, f"lease {event.island}", f"{event.client} has no such lease")
