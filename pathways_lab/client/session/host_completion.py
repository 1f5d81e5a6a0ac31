"""Hosts that may confirm that a value is ready, without waiting for the control plane.

Problem: the control plane hears last that a gang has ended, and its client hears
of it later still.  A host knows first, and has a link to the client.  But a host
may compute with zeros for a value that another host failed to make, and does not
know of it: only the control plane sees everything that a value depends on.

How: a value has *witnesses* when one set of hosts does all of its run, each of
them every gang, and the same set makes whatever its inputs still wait for.  Then
a failure anywhere is a failure on one of them, and when all of them say that the
value is there, it is.

Rule for maintainers: a witness's good word settles; its bad word does not, for it
does not know the whole story.  A witness's word is never needed: the control
plane says the same, later.

Paper: section 4.5 (data-ready messages straight from hosts).
"""

from __future__ import annotations

from collections.abc import Iterable

from pathways_lab.client.session.pending import Buffer
from pathways_lab.core.program.program import Plan, SliceId
from pathways_lab.core.slices.topology import SliceBinding

MOST = 4
"""More hosts than this are not asked one by one: the control plane's one word is cheaper."""

Hosts = frozenset[str]


class Witnesses:
    """The makers of values, as far as they are the same hosts."""

    def __init__(self) -> None:
        self._slices: dict[SliceId, Hosts] = {}
        self._plans: dict[str, Hosts] = {}

    def bound(self, binding: SliceBinding) -> None:
        """A slice is on these hosts, from now on."""
        self._slices[binding.slice] = frozenset(binding.hosts)
        self._plans.clear()

    def released(self, slice_id: SliceId) -> None:
        """A slice is gone, with all plans that use it."""
        self._slices.pop(slice_id, None)
        self._plans.clear()

    def forget(self, plans: Iterable[str]) -> None:
        """These are registered no more."""
        for key in plans:
            self._plans.pop(key, None)

    def of(self, plan: Plan, inputs: Iterable[Buffer | None]) -> Hosts:
        """Witnesses of what a run of *plan* makes; none when there are none."""
        hosts = self._plans.get(plan.key)
        if hosts is None:
            first, *others = {self._slices.get(on, Hosts()) for on in plan.slices} or {Hosts()}
            alone = not others and len(first) <= MOST
            # A host does not know of a failure that it would have heard of in another branch.
            always = all(step.node.when is None for step in plan.steps)
            hosts = first if alone and always else Hosts()
            self._plans[plan.key] = hosts
        for buffer in inputs:
            if buffer is not None and not buffer.done and buffer.witnesses != hosts:
                return Hosts()
        return hosts
