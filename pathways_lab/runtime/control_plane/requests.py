"""Requests of clients as events of the core, checked as far as that is possible here.

Problem: messages that have been parsed (:mod:`pathways_lab.transport.edge`) become events
that the core trusts.  Here every id is checked for its owner and every number for its
first use; a message that may not be is refused with its reason and changes nothing.

Rule for maintainers: no clock and no sockets here; parcels go to the registry
only after all checks of the message have passed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, fields
from typing import Any

from pathways_lab.core import messages as m
from pathways_lab.core.errors import Failure
from pathways_lab.core.messages import elastic as em
from pathways_lab.core.program.bundles import APART
from pathways_lab.core.program.folding import laid_out
from pathways_lab.core.program.program import Call
from pathways_lab.core.program.wellformed import Types, check_values, wrong_leaves
from pathways_lab.core.scheduling import tags
from pathways_lab.runtime import client_messages as said
from pathways_lab.runtime.control_plane.directory import Arguments, ClientSeen, Function, Registry
from pathways_lab.transport.codec import pack_fields

_NAME_LENGTH = 200
_ABOUT_BYTES = 1 << 18
"""Bytes that the description of a published value may take: some thousand arrays."""


@dataclass(slots=True)
class _Letter:
    """One message of a client, with what is needed to judge it."""

    registry: Registry
    client: ClientSeen
    said: Any
    buffers: list[memoryview]
    time: float
    cause: str

    @property
    def by(self) -> tuple[float, str, str]:
        """How an event of a client begins."""
        return self.time, self.cause, self.client.name

    def event(self, kind: Callable[..., m.Event], **others: Any) -> m.Event:
        """An event with the fields of the message, and others."""
        values = {each.name: getattr(self.said, each.name) for each in fields(self.said)}
        if "id" in values:
            values["request"] = values.pop("id")
        return kind(*self.by, **values, **others)


class Rejected(ValueError):
    """A message that is refused.  subject: what it was about, e.g. ``"run 7"``."""

    def __init__(self, subject: str, why: str | Failure, remedy: str = "") -> None:
        super().__init__(why if isinstance(why, str) else why.message)
        self.subject = subject
        self.failure = Failure("refused", why, remedy) if isinstance(why, str) else why


def client_event(
    registry: Registry, client: ClientSeen, message: Any, buffers: list[memoryview], time: float
) -> m.Event:
    """The event that a client's message means.  Raises Rejected."""
    client.messages += 1
    cause = f"{client.name}:{client.messages}"
    return _HANDLERS[type(message)](_Letter(registry, client, message, buffers, time, cause))


def own(client: ClientSeen, identities: Iterable[int], what: str) -> None:
    """Raises Rejected for a number that is not the client's."""
    number, also = client.number, client.inherited if what == "slice" else ()
    for identity in identities:
        if identity >> 32 != number and identity not in also:
            raise Rejected(
                f"{what} {identity}",
                f"{what} {identity} does not belong to {client.name}",
                "use only handles and slices of this connection",
            )


def use(client: ClientSeen, **numbers: Collection[int]) -> bool:
    """True.  Raises Rejected for a number of somebody else's, or that was used before.

    numbers: by what they are given to.
    """
    for what, identities in numbers.items():
        own(client, identities, what)
    for what, identities in numbers.items():
        used = client.used[what]
        for identity in identities:
            if not used.use(identity):
                raise Rejected(
                    f"{what} {identity}",
                    f"{what} {identity} was there before: a number is used once",
                    "send no message twice",
                )
    return True


def _slice(letter: _Letter) -> m.Event:
    message: said.Slice = letter.said
    own(letter.client, [message.slice], "slice")
    request = message.request
    sizes = request.shape
    if not 1 <= len(sizes) == len(request.axes) == len(set(request.axes)) <= 3:
        raise Rejected(f"slice {message.slice}", "a slice has 1 to 3 axes of different names")
    if min(sizes) < 1 or max(sizes) >= 1 << 31 or not 0 <= request.memory < 1 << 63:
        raise Rejected(f"slice {message.slice}", f"a slice of shape {sizes} cannot be")
    return letter.event(m.SliceRequested)


def _same(event: Callable[..., m.Event], **owned: str) -> Callable[[_Letter], m.Event]:
    """Makes an event with the fields of its message.  owned: of which things they are ids."""

    def made(letter: _Letter) -> m.Event:
        for name, what in owned.items():
            value = getattr(letter.said, name)
            own(letter.client, value if isinstance(value, tuple) else (value,), what)
        return letter.event(event)

    return made


def _function(letter: _Letter) -> m.Event:
    message: said.Function = letter.said
    registry, key, slice_id = letter.registry, message.function, message.slice
    subject = f"function {key[:64]}"
    own(letter.client, [slice_id], "slice")
    if message.loop is not None:
        binding = registry.bindings.get(slice_id)
        islands = binding.islands if binding is not None else ("",)
        mine = [i for i in islands if registry.leases.get(i) == letter.client.name]
        island = next((island for island in islands if island not in mine), None)
        if island is not None:
            raise Rejected(
                subject,
                f"hosts run a loop by themselves only on a leased island, and {letter.client.name}"
                f" has no lease of {island or 'it'}",
                f"with lab.lease({island!r}): ...",
            )
    types = _types(message, subject)
    wrong = wrong_leaves((*types.inputs, *types.outputs), registry.devices.get(slice_id))
    if not wrong and message.kind == APART and types.inputs != types.outputs:
        wrong = "the arrays of a bundle are not those that come out of it"
    if wrong:
        raise Rejected(subject, f"{message.name!r}: {wrong}")
    announced, known = pack_fields(message), registry.functions.get((key, slice_id))
    if known is not None and {**known.fields, "line": announced["line"]} != announced:
        raise Rejected(subject, "this key was given to another function")
    parcel = (slice_id >> 32, key)
    if letter.buffers:
        registry.blobs[parcel] = letter.buffers[0]
    elif parcel not in registry.blobs:
        raise Rejected(subject, "the code of the function did not come with it")
    registry.functions[key, slice_id] = Function(announced, types)
    return m.FunctionAnnounced(*letter.by, key, slice_id)


def _types(message: said.Function, subject: str) -> Types:
    """Raises Rejected where what it takes and gives is told in lists of different lengths."""
    try:
        ins = zip(message.in_types, message.in_layouts, strict=True)
        outs = zip(message.out_types, message.out_layouts, strict=True)
        types = Types(
            tuple((*kind, layout) for kind, layout in ins),
            tuple((*kind, layout) for kind, layout in outs),
        )
    except ValueError:
        raise Rejected(subject, "its types and layouts are not as many") from None
    if any(p >= len(types.inputs) for p in message.donated):
        raise Rejected(subject, f"{message.name!r} donates an argument that it does not have")
    return types


def _program(letter: _Letter) -> m.Event:
    form, registry = letter.said.plan, letter.registry
    subject = f"program {form.key[:64]}"
    try:
        plan = laid_out(form, at_once=True)
    except ValueError as error:
        raise Rejected(subject, str(error)) from None
    number, taken = letter.client.number, registry.taken
    own(letter.client, [s for s in plan.slices if (number, s) not in taken], "slice")
    owner = registry.plans.get(plan.key)
    if owner is not None and owner[0] != letter.client.name:
        raise Rejected(subject, "another client has a program of this key")
    if owner is not None and owner[1] != plan:
        raise Rejected(subject, "this key was given to another program")
    nodes = [step.node for step in plan.steps]
    called = {(node.function, node.slice) for node in nodes if isinstance(node, Call)}
    known = {key: registry.functions[key].types for key in called & registry.functions.keys()}
    wrong = check_values(plan, registry.devices, known)
    if wrong is not None:
        raise Rejected(subject, wrong)
    registry.plans[plan.key] = letter.client.name, plan
    return m.ProgramRegistered(*letter.by, plan)


def _forget(letter: _Letter) -> m.Event:
    message: said.Forget = letter.said
    own(letter.client, [slice_id for _, slice_id in message.functions], "slice")
    plans = letter.registry.plans
    for key in message.plans:
        if key in plans and plans[key][0] != letter.client.name:
            raise Rejected(f"program {key[:64]}", "the program belongs to another client")
    return letter.event(m.ProgramsDropped)


def _submit(letter: _Letter) -> m.Event:
    message: said.Submit = letter.said
    registry, client, run = letter.registry, letter.client, message.run
    own(client, [i for i in message.inputs if i is not None], "buffer")
    if message.race is not None:
        own(client, message.race[:1], "race")
    if message.plan in registry.plans and registry.plans[message.plan][0] != client.name:
        raise Rejected(f"run {run}", "the program belongs to another client")
    places = message.arguments
    given = {index for index, bound in enumerate(message.inputs) if bound is None}
    if places.keys() != given or any(place >= len(letter.buffers) for place in places.values()):
        raise Rejected(
            f"run {run}",
            f"inputs {sorted(given)} need arguments; the message has them for {sorted(places)}",
        )
    if message.hear and len(message.outputs) != 1:
        raise Rejected(f"run {run}", "hear is a number, with one output")
    if why := tags.wrong(message.priority, message.data):
        raise Rejected(f"run {run}", why)
    use(client, run=(run,), buffer=message.outputs)
    registry.programs[run] = (client.name, message.plan)
    if places or message.hear:
        registry.arguments[run] = Arguments(places, letter.buffers, message.hear)
    return m.RunSubmitted(
        *letter.by,
        run,
        message.plan,
        message.inputs,
        message.outputs,
        message.priority,
        message.data,
        message.waited,
        message.worked,
        message.dropped,
    )


def _declare(letter: _Letter) -> m.Event:
    own(letter.client, [letter.said.slice], "slice")
    use(letter.client, buffer=(letter.said.buffer,))
    return letter.event(m.BufferDeclared)


def _cancel(letter: _Letter) -> m.Event:
    message: said.Cancel = letter.said
    own(letter.client, (*message.runs, *(run for run, _ in message.steps)), "run")
    own(letter.client, message.buffers, "buffer")
    return letter.event(m.CancelRequested)


def _policy(letter: _Letter) -> m.Event:
    message: said.Policy = letter.said
    if message.policy is None:
        raise Rejected("policy", "neither a policy that comes with the lab, nor code of one")
    return m.PolicyChosen(*letter.by, message.policy, message.id)


def _quota(letter: _Letter) -> m.Event:
    if len(letter.said.whom) > _NAME_LENGTH:
        raise Rejected("quota", f"a client's name has at most {_NAME_LENGTH} characters")
    return letter.event(m.QuotaChosen)


def _leave(letter: _Letter) -> m.Event:
    """The hosts of an island are to be taken away."""
    message: said.Leave = letter.said
    island, known = message.island, letter.registry.hosts.values()
    hosts = tuple(h.name for h in known if h.island == island)
    if not hosts:
        there = ", ".join(sorted({h.island for h in known}))
        raise Rejected("leave", f"there is no {island[:64]!r}; there is {there}")
    who = letter.client.name
    reason = f"{who} took {island} away"
    return em.HostsLeaving(
        letter.time, letter.cause, hosts, reason, who, message.anyway, message.id
    )


def _check_name(name: str) -> None:
    if not 0 < len(name) <= _NAME_LENGTH:
        raise Rejected(
            "name",
            f"{name[:40]!r}{'...' * (len(name) > 40)} has {len(name)} characters: a name has 1 to"
            f" {_NAME_LENGTH}",
            "give it a shorter name",
        )


def _publish(letter: _Letter) -> m.Event:
    message: said.Publish = letter.said
    _check_name(message.name)
    own(letter.client, message.buffers, "buffer")
    about = bytes(letter.buffers[0]) if letter.buffers else b""
    if len(about) > _ABOUT_BYTES:
        raise Rejected(
            "name",
            f"the description of what is published takes {len(about):,} bytes;"
            f" {_ABOUT_BYTES:,} are allowed",
        )
    if message.keep and message.to:
        raise Rejected("name", "what is given to one client cannot be kept: it ends when taken")
    if message.ahead and not message.keep:
        raise Rejected("name", "only what is kept can be kept ahead of its values")
    return letter.event(m.HandlePublished, about=about)


def _unpublish(letter: _Letter) -> m.Event:
    _check_name(letter.said.name)
    return letter.event(m.HandleUnpublished)


def _take(letter: _Letter) -> m.Event:
    _check_name(letter.said.name)
    use(letter.client, buffer=letter.said.buffers)
    return letter.event(m.HandleTaken)


_HANDLERS: dict[type, Callable[[_Letter], m.Event]] = {
    said.Slice: _slice,
    said.ReleaseSlice: _same(m.SliceReleased, slice="slice"),
    said.Rebind: _same(em.RebindRequested, slice="slice"),
    said.Function: _function,
    said.Program: _program,
    said.Forget: _forget,
    said.Submit: _submit,
    said.Declare: _declare,
    said.LoseUpload: _same(m.UploadLost, buffer="buffer"),
    said.Drop: _same(m.BuffersDropped, buffers="buffer"),
    said.Cancel: _cancel,
    said.Policy: _policy,
    said.QuotaFor: _quota,
    said.Window: _same(m.WindowChosen),
    said.Lease: _same(m.LeaseRequested),
    said.ReturnLease: _same(m.LeaseReturned),
    said.Publish: _publish,
    said.Unpublish: _unpublish,
    said.Take: _take,
    said.Suspend: _same(em.SuspendRequested),
    said.Resume: _same(em.ResumeRequested),
    said.Leave: _leave,
}
