"""What clients and hosts say, as events of the core: checked, and nothing decided.

Problem: bytes from other processes become events that the core trusts.  Here
every field is checked, and every id for its owner; a wrong message is refused
with its reason and changes nothing.

Rule for maintainers: no clock and no sockets here; parcels go to the registry
only after all checks of the message have passed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from pathways_lab.core import elastic_messages as em
from pathways_lab.core import messages as m
from pathways_lab.core.cancel_messages import CancelRequested
from pathways_lab.core.errors import Failure
from pathways_lab.core.policies import BuiltIn
from pathways_lab.core.program import Plan
from pathways_lab.core.program_messages import ProgramsDropped
from pathways_lab.core.topology import SliceRequest
from pathways_lab.core.upload_messages import UploadLost
from pathways_lab.runtime.codec import unpack, unpack_fields
from pathways_lab.runtime.registry import Arguments, ClientSeen, HostSeen, Registry

_ASKED = {
    **dict.fromkeys(("publish", "unpublish", "take"), ("name", "name")),
    **dict.fromkeys(("lease", "return-lease"), ("lease", "island")),
    **dict.fromkeys(("suspend", "resume", "leave"), ("wish", "request")),
    **dict.fromkeys(("quota", "cancel"), ("question", "id")),
}
"""By what their client knows the questions that it waits for: a word, and the field behind it."""
_NAME_LENGTH = 200
_ABOUT_BYTES = 1 << 18
"""What the description of what is published may take: some thousand arrays."""


@dataclass(frozen=True, slots=True)
class _Letter:
    """One message of a client, with what is needed to judge it."""

    registry: Registry
    client: ClientSeen
    fields: dict[str, Any]
    buffers: list[memoryview]
    time: float
    cause: str

    def stamped(self) -> dict[str, Any]:
        """The fields, with what the sender cannot choose."""
        return {
            **self.fields,
            "time": self.time,
            "cause": self.cause,
            "client": self.client.name,
        }


class Rejected(ValueError):
    """A message that cannot be taken.  subject: what it was about, e.g. ``"run 7"``."""

    def __init__(self, subject: str, reason: str, remedy: str = "") -> None:
        super().__init__(reason)
        self.subject = subject
        self.remedy = remedy


def client_event(
    registry: Registry,
    client: ClientSeen,
    op: str,
    fields: dict[str, Any],
    buffers: list[memoryview],
    time: float,
) -> m.Event:
    """The event that a client's message means.  Raises Rejected."""
    handler = _HANDLERS.get(op)
    if handler is None:
        raise Rejected(op[:40], f"no message of clients is called {op[:40]!r}")
    client.messages += 1
    cause = f"{client.name}:{client.messages}"
    try:
        return handler(_Letter(registry, client, fields, buffers, time, cause))
    except Rejected:
        raise
    except (AttributeError, IndexError, KeyError, OverflowError, TypeError, ValueError) as error:
        # CodecError is a ValueError; a missing field is a KeyError.
        text = f"field {error} is missing" if isinstance(error, KeyError) else str(error)
        raise Rejected(_subject(op, fields), f"malformed message {op!r}: {text}") from error


def host_report(host: HostSeen, fields: dict[str, Any], time: float, cause: str) -> m.HostReport:
    """The event in a host's report.  Raises CodecError (a ValueError)."""
    return unpack_fields(m.HostReport, {**fields, "time": time, "cause": cause, "host": host.name})


def host_seen(hello: dict[str, Any]) -> HostSeen:
    """The host that a hello describes.  Raises KeyError, ValueError, TypeError."""
    values = {
        field.name: hello[field.name]
        for field in dataclasses.fields(HostSeen)
        if field.name in hello or field.default is dataclasses.MISSING
    }
    seen = HostSeen(**{**values, "block": tuple(values.get("block", ()))})
    texts = (seen.name, seen.island, seen.kind, seen.data_address)
    if not all(type(text) is str and text for text in texts) or type(seen.make) is not str:
        raise ValueError("name, island, kind, data_address and make must be text")
    if not all(type(n) is int and n >= 0 for n in (seen.devices, seen.memory, seen.pid)):
        raise ValueError("devices, memory and pid must be numbers")
    return seen


def race_of(fields: dict[str, Any]) -> tuple[int, int] | None:
    """The race that a run enters, and its controller there; None when it enters none."""
    match fields.get("race"):
        case [int(number), int(controller)]:
            return number, controller
    return None


def _subject(op: str, fields: dict[str, Any]) -> str:
    if op in _ASKED:
        kind, field = _ASKED[op]
        return f"{kind} {str(fields.get(field))[:64]}"
    for name in ("run", "slice", "buffer", "function"):
        if isinstance(fields.get(name), int | str):
            return f"{name} {str(fields[name])[:64]}"
    return op


def _integer(fields: dict[str, Any], name: str) -> int:
    value = fields[name]
    if type(value) is not int:
        raise TypeError(f"{name} is not a whole number")
    return value


def _own(client: ClientSeen, identities: Iterable[Any], what: str) -> None:
    for identity in identities:
        if type(identity) is not int or identity >> 32 != client.number:
            raise Rejected(
                f"{what} {str(identity)[:40]}",
                f"{what} {str(identity)[:40]} does not belong to {client.name}",
                "use only handles and slices of this connection",
            )


def _slice(letter: _Letter) -> m.Event:
    slice_id = _integer(letter.fields, "slice")
    _own(letter.client, [slice_id], "slice")
    request = unpack(SliceRequest, letter.fields["request"])
    wait = letter.fields.get("wait") is True
    return m.SliceRequested(letter.time, letter.cause, letter.client.name, slice_id, request, wait)


def _release(letter: _Letter) -> m.Event:
    slice_id = _integer(letter.fields, "slice")
    _own(letter.client, [slice_id], "slice")
    return m.SliceReleased(letter.time, letter.cause, letter.client.name, slice_id)


def _function(letter: _Letter) -> m.Event:
    slice_id, key = _integer(letter.fields, "slice"), letter.fields["function"]
    _own(letter.client, [slice_id], "slice")
    if type(key) is not str:
        raise TypeError("function is not text")
    if letter.fields.get("loop") is not None:
        binding = letter.registry.bindings.get(slice_id)
        island = binding.island if binding is not None else ""
        if letter.registry.leases.get(island) != letter.client.name:
            raise Rejected(
                f"function {key[:64]}",
                f"hosts run a loop by themselves only on a leased island, and {letter.client.name}"
                f" has no lease of {island or 'it'}",
                f"with lab.lease({island!r}): ...",
            )
    parcel = (letter.client.number, key)
    if letter.buffers:
        letter.registry.blobs[parcel] = letter.buffers[0]
    elif parcel not in letter.registry.blobs:
        raise Rejected(f"function {key[:64]}", "the code of the function did not come with it")
    letter.registry.functions[key, slice_id] = letter.fields
    return m.FunctionAnnounced(letter.time, letter.cause, letter.client.name, key, slice_id)


def _program(letter: _Letter) -> m.Event:
    plan = unpack(Plan, letter.fields["plan"])
    number, taken = letter.client.number, letter.registry.taken
    _own(letter.client, [s for s in plan.slices if (number, s) not in taken], "slice")
    owner = letter.registry.plans.get(plan.key)
    if owner is not None and owner[0] != letter.client.name:
        raise Rejected(f"program {plan.key[:64]}", "another client has a program of this key")
    if owner is not None and owner[1] != plan:
        raise Rejected(f"program {plan.key[:64]}", "this key was given to another program")
    letter.registry.plans[plan.key] = letter.client.name, plan
    return m.ProgramRegistered(letter.time, letter.cause, letter.client.name, plan)


def _forget(letter: _Letter) -> m.Event:
    event = unpack_fields(ProgramsDropped, letter.stamped())
    _own(letter.client, [slice_id for _, slice_id in event.functions], "slice")
    plans = letter.registry.plans
    for key in event.plans:
        if key in plans and plans[key][0] != letter.client.name:
            raise Rejected(f"program {key[:64]}", "the program belongs to another client")
    return event


def _submit(letter: _Letter) -> m.Event:
    event = unpack_fields(m.RunSubmitted, letter.stamped())
    _own(letter.client, [event.run], "run")
    _own(letter.client, [i for i in event.inputs if i is not None], "buffer")
    _own(letter.client, event.outputs, "buffer")
    if (
        event.plan in letter.registry.plans
        and letter.registry.plans[event.plan][0] != letter.client.name
    ):
        raise Rejected(f"run {event.run}", "the program belongs to another client")
    places = {int(index): int(place) for index, place in letter.fields.get("arguments", {}).items()}
    given = {index for index, bound in enumerate(event.inputs) if bound is None}
    if set(places) != given or not all(
        0 <= place < len(letter.buffers) for place in places.values()
    ):
        raise Rejected(
            f"run {event.run}",
            f"inputs {sorted(given)} need arguments; the message has them for {sorted(places)}",
        )
    if event.run in letter.registry.programs:
        raise Rejected(f"run {event.run}", f"run {event.run} was submitted already")
    hear = letter.fields.get("hear", 0)
    if type(hear) is not int or hear < 0 or (hear and len(event.outputs) != 1):
        raise Rejected(f"run {event.run}", f"hear is a number, with one output; got {hear!r:.50}")
    letter.registry.programs[event.run] = (letter.client.name, event.plan)
    if places or hear:
        letter.registry.arguments[event.run] = Arguments(places, letter.buffers, hear)
    return event


def _declare(letter: _Letter) -> m.Event:
    event = unpack_fields(m.BufferDeclared, letter.stamped())
    _own(letter.client, [event.buffer], "buffer")
    _own(letter.client, [event.slice], "slice")
    if event.nbytes < 0:
        raise ValueError("nbytes is negative")
    return event


def _lose_upload(letter: _Letter) -> m.Event:
    buffer, why = _integer(letter.fields, "buffer"), unpack(Failure, letter.fields["failure"])
    _own(letter.client, [buffer], "buffer")
    return UploadLost(letter.time, letter.cause, letter.client.name, buffer, why)


def _drop(letter: _Letter) -> m.Event:
    event = unpack_fields(m.BuffersDropped, letter.stamped())
    _own(letter.client, event.buffers, "buffer")
    return event


def _cancel(letter: _Letter) -> m.Event:
    asked = {**letter.stamped(), "request": letter.fields.get("id", 0)}
    event = unpack_fields(CancelRequested, asked)
    _own(letter.client, event.runs, "run")
    _own(letter.client, event.buffers, "buffer")
    return event


def _policy(letter: _Letter) -> m.Event:
    policy, request = unpack(BuiltIn, letter.fields["policy"]), _integer(letter.fields, "request")
    return m.PolicyChosen(letter.time, letter.cause, letter.client.name, policy, request)


def _quota(letter: _Letter) -> m.Event:
    fields, whom = letter.fields, letter.fields["whom"]
    if type(whom) is not str or len(whom) > _NAME_LENGTH:
        raise ValueError("whom is not the name of a client")
    limits = {n: None if fields[n] is None else _integer(fields, n) for n in ("devices", "nbytes")}
    if any(limit is not None and limit < 0 for limit in limits.values()):
        raise ValueError("a quota is not negative")
    request = _integer(fields, "id")
    return m.QuotaChosen(
        letter.time, letter.cause, letter.client.name, whom, **limits, request=request
    )


def _lease(letter: _Letter) -> m.Event:
    return unpack_fields(m.LeaseRequested, letter.stamped())


def _return_lease(letter: _Letter) -> m.Event:
    return unpack_fields(m.LeaseReturned, letter.stamped())


def _rebind(letter: _Letter) -> m.Event:
    event = unpack_fields(em.RebindRequested, letter.stamped())
    _own(letter.client, [event.slice], "slice")
    return event


def _suspend(letter: _Letter) -> m.Event:
    return unpack_fields(em.SuspendRequested, letter.stamped())


def _resume(letter: _Letter) -> m.Event:
    return unpack_fields(em.ResumeRequested, letter.stamped())


def _leave(letter: _Letter) -> m.Event:
    """The hosts of an island are to be taken away."""
    island, request = letter.fields["island"], _integer(letter.fields, "request")
    if type(island) is not str:
        raise TypeError("island is not text")
    hosts = tuple(h.name for h in letter.registry.hosts.values() if h.island == island)
    if not hosts:
        known = ", ".join(sorted({h.island for h in letter.registry.hosts.values()}))
        raise Rejected(f"wish {request}", f"there is no {island[:64]!r}; there is {known}")
    who = letter.client.name
    anyway = letter.fields["anyway"] is True
    reason = f"{who} took {island} away"
    return em.HostsLeaving(letter.time, letter.cause, hosts, reason, who, anyway, request)


def _name(fields: dict[str, Any]) -> str:
    name = fields["name"]
    if type(name) is not str or not 0 < len(name) <= _NAME_LENGTH:
        raise ValueError(f"a name is text of 1 to {_NAME_LENGTH} characters")
    return name


def _numbers(letter: _Letter) -> tuple[int, ...]:
    numbers = letter.fields["buffers"]
    if type(numbers) is not list:
        raise TypeError("buffers is no list")
    _own(letter.client, numbers, "buffer")
    return tuple(numbers)


def _publish(letter: _Letter) -> m.Event:
    name, numbers = _name(letter.fields), _numbers(letter)
    about = bytes(letter.buffers[0]) if letter.buffers else b""
    if len(about) > _ABOUT_BYTES:
        raise ValueError(
            f"the description of what is published takes {len(about):,} bytes;"
            f" {_ABOUT_BYTES:,} are allowed"
        )
    return m.HandlePublished(letter.time, letter.cause, letter.client.name, name, numbers, about)


def _unpublish(letter: _Letter) -> m.Event:
    name = _name(letter.fields)
    return m.HandleUnpublished(letter.time, letter.cause, letter.client.name, name)


def _take(letter: _Letter) -> m.Event:
    name, numbers = _name(letter.fields), _numbers(letter)
    return m.HandleTaken(letter.time, letter.cause, letter.client.name, name, numbers)


_HANDLERS: dict[str, Callable[[_Letter], m.Event]] = {
    "slice": _slice,
    "release-slice": _release,
    "function": _function,
    "program": _program,
    "forget": _forget,
    "submit": _submit,
    "declare": _declare,
    "lose-upload": _lose_upload,
    "drop": _drop,
    "cancel": _cancel,
    "policy": _policy,
    "quota": _quota,
    "lease": _lease,
    "return-lease": _return_lease,
    "publish": _publish,
    "unpublish": _unpublish,
    "take": _take,
    "rebind": _rebind,
    "suspend": _suspend,
    "resume": _resume,
    "leave": _leave,
}
