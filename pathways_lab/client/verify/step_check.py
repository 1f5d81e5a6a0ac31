"""``lab.verify(step, ...)``: a function of the user's own, again and elsewhere, to the bit.

Problem: a device may compute everything right but what this step has it do; and collectives
spread what it spoils over all that compute with it.

How: the step runs again where it is, and then on other sets of devices, which lie on hosts as the
first ones do, with the same code and the same inputs, which ordinary transfers bring there.
Which set is next, and who is suspect, is decided by :mod:`pathways_lab.core.diagnosis.suspects`.

Rule for maintainers: nothing of the user's is consumed or changed; nothing runs a second time that
does more than compute.  Code is made once and not for each set: other code may round otherwise.

Paper: none; deterministic replay as other large systems do it (Gemini, section 5).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import jax
import numpy as np

from pathways_lab.client.chaos.fault_report import Check
from pathways_lab.client.code.export import Executable
from pathways_lab.client.functions.jit import BoundCall, CompiledFunction
from pathways_lab.client.functions.traced_function import Body
from pathways_lab.client.lab.devices import Slice
from pathways_lab.client.parts import Parts
from pathways_lab.client.program import examined
from pathways_lab.client.program.calls import prepare_call, session_of
from pathways_lab.client.session import failures
from pathways_lab.client.session.handles import Handle
from pathways_lab.client.verify.device_check import Sums, Verification, devices_of, told
from pathways_lab.core.diagnosis.suspects import (
    Replay,
    agree,
    next_set,
    sets_like,
    suspects,
    unchecked,
)
from pathways_lab.core.program.layout import Layout
from pathways_lab.core.slices.topology import Owned
from pathways_lab.runtime import checksums

_MOST = 16
"""Sets of devices on which a function is tried: each compiles it once more."""
_ALONE = "lab.verify(), without a function, looks at each device alone"
_ASKED = examined.Asked(
    "lab.verify",
    "step",
    "its nodes run on slices of their own",
    "and what is computed again must leave its inputs",
    "verify it",
)


def replay(
    lab: Parts, step: Callable[..., Any], args: Sequence[Any], wait: bool | float
) -> Verification:
    """Have several sets of devices compute the same call, and compare."""
    call, place = examined.bound(lab.session, _ASKED, step, args, {})
    function = call.function
    _check(call)
    home = place.binding.devices
    possible = sets_like(home, _islands_like(lab, place))
    replays = [Replay(home, None)]
    if next_set(replays, possible) is None:
        raise failures.refused(
            f"{function.name!r} runs on {told(home)}, and this lab has no other devices of that"
            " make that lie so: there is nobody to compare with",
            _ALONE,
        )
    compute = _Computing(call, place)
    first, again = compute(place), compute(place)
    if first != again:
        return _not_deterministic(function.name, home, first, again)
    replays = [Replay(home, first)]
    while len(replays) < _MOST and (devices := next_set(replays, possible)) is not None:
        with lab.slice_at(devices, place.shape, place.axes, wait=wait) as on:
            replays.append(Replay(devices, compute(on)))
    return _verdict(lab, function.name, replays)


def _check(call: BoundCall) -> None:
    """Raises PathwaysError for what cannot be compared."""
    body, name = call.body, call.function.name
    if body.calls_python:
        raise failures.refused(
            f"{name!r} calls back into Python, which may do more than compute, and something else"
            " each time",
            f"verify what it computes without callbacks; {_ALONE}",
            node=name,
        )
    if not body.out_types:
        raise failures.refused(
            f"{name!r} has no results, and results are what is compared",
            "have it return what it computes",
            node=name,
        )


def _islands_like(lab: Parts, place: Slice) -> list[list[tuple[str, int]]]:
    """Hosts of the one make that those of a slice are of, with the number of their devices."""
    hosts = [host for island in lab.islands for host in island.hosts]
    makes = {(host.kind, host.make) for host in hosts if host.name in place.hosts}
    return [
        [(host.name, host.devices) for host in island.hosts if {(host.kind, host.make)} == makes]
        for island in lab.islands
    ]


class _Computing:
    """One call, on any slice like its own, with the code that it has on its own.

    Calling it waits for the results, and answers their sums, device by device.
    """

    def __init__(self, call: BoundCall, place: Slice) -> None:
        ((self._code, _),) = prepare_call(call, place, call.body).functions
        self._call = call
        self._sum = CompiledFunction(
            checksums.of_parts, static_argnames=("mesh", "spec"), name="checksum"
        )

    def __call__(self, on: Slice) -> tuple[Sums, ...]:
        body = cast(Body, _Made(self._call.body, self._code))
        prepared = prepare_call(self._call, on, body)
        handles = session_of(on).run(prepared, self._call.leaves)
        sums = [self._summed(handle) for handle in handles]
        results = [handle.result() for handle in sums]
        return tuple(
            tuple(result[place].tobytes() for result in results) for place in range(len(on))
        )

    def _summed(self, handle: Handle) -> Handle:
        at = handle.sharding
        with jax.enable_x64(True):
            sums: Handle = self._sum(handle, np.uint32(0), mesh=at.mesh, spec=at.spec)
        return sums


class _Made:
    """A body whose code is made, for whatever slice."""

    def __init__(self, body: Body, code: Executable) -> None:
        self._body = body
        self._code = code

    def __getattr__(self, name: str) -> Any:
        return getattr(self._body, name)

    def wanted(self, index: int, place: Slice) -> Layout:
        """As the code takes it."""
        return self._code.in_layouts[index]

    def on(self, place: Slice, wanted: object, pinned: object = None) -> Executable:
        """The code that there is."""
        return self._code


# --- what comes of it -----------------------------------------------------------------------------


def _not_deterministic(
    name: str, home: Sequence[Owned], first: Sequence[Sums], again: Sequence[Sums]
) -> Verification:
    story = (
        f"{name!r} is not deterministic: on the same devices it made something else the second"
        f" time; or one of them computes now this, now that: {_ALONE}"
    )
    return Verification(
        story, False, (), (Check(told(home), False, _otherwise(home, first, again)),)
    )


def _verdict(lab: Parts, name: str, replays: Sequence[Replay]) -> Verification:
    same = agree(replays)
    left = [] if same else sorted(suspects(replays))
    good = [r.made for r in replays if left and not {*left} & {*r.devices}]
    right = replays[0].made if same else good[0] if good else None
    if same:
        story = f"{name!r} made the same on {len(replays)} sets of devices, to the bit"
        if everywhere := unchecked(replays):
            story += f"; {told(sorted(everywhere))}: in all of them, so compared with nobody"
    elif len(left) == 1:
        story = f"{name!r}: wrong results on {told(left)}: that alone explains what differs"
    elif left:
        story = f"{name!r}: one of these computes wrong, and no set tells which: {told(left)}"
        story += f"; {_ALONE}"
    else:
        story = f"{name!r}: no single device explains what differs: several compute wrong, or none"
        story += f" does; {_ALONE}"
    checks = [_of_set(replay, replays[0], right) for replay in replays]
    return Verification(story, same, devices_of(lab, left), tuple(checks))


def _of_set(replay: Replay, first: Replay, right: Any) -> Check:
    """The findings on one set.  right: the right result there, or None: unknown."""
    known = right is not None
    made, than = cast(Sequence[Sums], replay.made), cast(Sequence[Sums], right or first.made)
    if made == than:
        seen = "the same" if known else "what may be right or not"
    else:
        seen = _otherwise(replay.devices, than, made)
    return Check(told(replay.devices), known and made == than, seen)


def _otherwise(devices: Sequence[Owned], one: Sequence[Sums], other: Sequence[Sums]) -> str:
    """On which devices parts differ."""
    differ = [device for device, a, b in zip(devices, one, other, strict=True) if a != b]
    return f"otherwise, in what is on {told(differ)}"
