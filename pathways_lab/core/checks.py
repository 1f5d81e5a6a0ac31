"""The checks before the core does anything that a client asks.

Problem: clients are other people's programs.  A request may name things that
belong to another client, that never existed or that are gone.  Its client gets an
answer that says so, and no other client notices.

Rule for maintainers: every check returns a Failure or None; nothing here
changes anything.

Paper: section 4.2 (client), section 4.6 (ownership).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from pathways_lab.core.errors import Failure
from pathways_lab.core.memory.store import BufferRecord
from pathways_lab.core.messages import RunSubmitted
from pathways_lab.core.program.legality import check_plan
from pathways_lab.core.program.plans import PlanIndex
from pathways_lab.core.program.program import Call, Plan, SliceId, slice_name
from pathways_lab.core.scheduling.admission import keepers
from pathways_lab.core.state import State

_REMEMBERED = 1024
"""Programs that a client does not have (any more), and why: so many are remembered."""


@dataclass(slots=True)
class ClientRecord:
    """The belongings of a connected client: programs by key, slices that it did not release.

    number, owner: see :class:`ClientJoined`.
    references: its numbers for buffers of others that it has taken.
    gone: why programs were refused, or ended with their slices, by key.
    """

    plans: dict[str, PlanIndex] = field(default_factory=dict)
    number: int = 0
    owner: bool = True
    slices: set[SliceId] = field(default_factory=set)
    references: set[int] = field(default_factory=set)
    gone: dict[str, Failure] = field(default_factory=dict)

    def register(self, key: str, index: PlanIndex) -> None:
        """A program is accepted."""
        self.plans[key] = index
        self.gone.pop(key, None)

    def refuse(self, key: str, why: Failure) -> None:
        """The client has no such program: its runs will be told why."""
        self.plans.pop(key, None)
        self.gone[key] = why
        if len(self.gone) > _REMEMBERED:
            del self.gone[next(iter(self.gone))]


def not_an_owner(client: str, to: str) -> tuple[str, str]:
    """Why a client may not decide for all, and the remedy.  to: ``"set policies"``."""
    return (
        f"{client} is a client of this lab, and only its owners {to}",
        "ask whoever started the lab (lab.invite(path, owner=True) makes owners)",
    )


def usable(state: State, client: str, record: ClientRecord, slice_id: SliceId) -> Failure | None:
    """Why a client may not use a slice for anything new."""
    found = state.resources.slices.get(slice_id)
    if found is not None and slice_id in record.slices:
        return found.failure
    if found is not None and reads(state, record, slice_id):
        return found.failure
    if found is not None and found.binding.client == client:
        return Failure(
            "refused", f"slice {slice_name(slice_id)} was released", "ask for a new slice"
        )
    return Failure(
        "refused",
        f"slice {slice_name(slice_id)} is unknown or belongs to another client",
        "use a slice that this client asked for",
    )


def waits_for_devices(failure: Failure) -> bool:
    """Whether a slice is only lost: what is registered for it is of use when it is bound again."""
    return failure.kind == "lost"


def reads(state: State, record: ClientRecord, slice_id: SliceId) -> bool:
    """Whether the client has taken a buffer that lies on this slice of another's."""
    taken = (state.store.references[number] for number in record.references)
    return any(buffer.slice == slice_id for buffer in taken)


def check_program(state: State, client: str, record: ClientRecord, plan: Plan) -> Failure | None:
    """Why a plan cannot be registered."""
    failure = check_plan(plan)
    if failure is not None:
        return failure
    for slice_id in plan.slices:
        failure = usable(state, client, record, slice_id)
        if failure is not None and not waits_for_devices(failure):
            return failure
    for step in plan.steps:
        node = step.node
        where = node.slice if isinstance(node, Call) else plan.values[node.output].slice
        if where not in record.slices:
            return Failure(
                "refused",
                f"{node.name!r} would put something on a slice that belongs to another"
                " client: what was taken can be read there, and no more",
                "compute on a slice of this client's own; what was taken moves there",
                program=plan.name,
                node=node.name,
                line=node.line,
            )
    return None


def check_functions(
    index: PlanIndex, known: Mapping[tuple[str, SliceId], object]
) -> Failure | None:
    """Why a plan's functions cannot be waited for."""
    missing = [
        f"{name} on slice {slice_name(s)}" for name, s in index.functions if (name, s) not in known
    ]
    if not missing:
        return None
    return Failure(
        "refused",
        f"program {index.plan.name!r} calls unannounced functions: {', '.join(missing)}",
        "announce every compiled function for its slice first",
        program=index.plan.name,
    )


def check_numbers(state: State, event: RunSubmitted) -> str:
    """The error in the numbers that a client chose, or ""."""
    if event.run < 1 or event.run in state.runs:
        return "its number is in use"
    if len(set(event.outputs)) != len(event.outputs):
        return "two of its outputs have the same number"
    taken = [b for b in event.outputs if state.store.in_use(b) or b < 1]
    return f"the numbers of outputs {taken} are in use" if taken else ""


def check_run(
    state: State, event: RunSubmitted, record: ClientRecord, index: PlanIndex | None
) -> Failure | None:
    """Why a run is not legal."""

    def refusal(message: str, remedy: str = "") -> Failure:
        return Failure("refused", message, remedy, program=index.plan.name if index else "")

    if index is None:
        unknown = refusal(f"plan {event.plan!r} is unknown", "register the program first")
        return record.gone.get(event.plan, unknown)
    plan = index.plan
    if (len(event.inputs), len(event.outputs)) != (len(plan.inputs), len(plan.outputs)):
        return refusal(
            f"program {plan.name!r} takes {len(plan.inputs)} inputs and returns"
            f" {len(plan.outputs)}, the run has {len(event.inputs)} and {len(event.outputs)}"
        )
    for slice_id in plan.slices:
        failure = usable(state, event.client, record, slice_id)
        if failure is not None and failure.kind == "refused":
            return failure
    given = Counter(event.inputs) if index.donors else Counter[int | None]()
    for p, number in enumerate(event.inputs):
        if number is None:
            continue
        buffer = state.store.find(number, event.client)
        if buffer is None:
            return refusal(f"buffer {number} is unknown or belongs to another client")
        if not index.readers[p] or buffer.failure is not None:
            continue
        value = plan.values[plan.inputs[p]]
        if (buffer.slice, buffer.nbytes) != (value.slice, value.nbytes):
            return refusal(
                f"input {p} of {plan.name!r} is on slice {value.slice} with {value.nbytes:,}"
                f" bytes per device, buffer {number} is on slice {buffer.slice} with"
                f" {buffer.nbytes:,}"
            )
        if p in index.donors and (wrong := why_not_donated(buffer)):
            return refusal(*wrong)
        if buffer.donor or (p in index.donors and given[number] > 1):
            return refusal(
                f"buffer {number} ({buffer.name or 'unnamed'}) was donated",
                "use the result of the call that it was donated to",
            )
    return None


def why_not_donated(buffer: BufferRecord) -> tuple[str, str] | None:
    """Message and remedy where others than its owner's handle keep a buffer."""
    if not (buffer.names or buffer.gifts or buffer.references):
        return None
    return (
        f"buffer {buffer.id} ({buffer.name or 'unnamed'}) cannot be donated: it is also kept"
        f" by {keepers(buffer)}",
        "unpublish it and wait until its takers drop it, or do not donate it",
    )


def spoiled(
    state: State, index: PlanIndex, inputs: tuple[BufferRecord | None, ...]
) -> Failure | None:
    """Why a legal run cannot have results: lost slices, failed inputs."""
    for slice_id in index.plan.slices:
        failure = state.resources.slices[slice_id].failure
        if failure is not None:
            return failure
    return next((b.failure for b in inputs if b is not None and b.failure is not None), None)
