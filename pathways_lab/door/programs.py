"""Compile requests as functions of the lab.

Problem: a client sends StableHLO and compile options, and hosts of a lab compile ``jax.export``
artefacts for named layouts.

How: the module becomes an export as it is, unread but for its signature.  Arguments and results
are placed as the module's own shardings say; results of which it says nothing go where Shardy's
propagation puts them, since the client must hear that before anything is compiled.

Rule for maintainers: one compile request, one function of the lab; what hosts cannot run is
refused here, by name.
"""

from __future__ import annotations

import hashlib
import math
import pickle
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, final

from pathways_lab.client.code import modules, pickling, tiles
from pathways_lab.client.code.export import PLATFORMS, Executable
from pathways_lab.client.functions.array_types import ArrayType
from pathways_lab.client.lab.devices import Slice
from pathways_lab.client.lab.run_options import USUAL
from pathways_lab.core.program.layout import Layout, shard_shape
from pathways_lab.core.program.program import Line
from pathways_lab.door import dtypes, exchange, shardings
from pathways_lab.door.exchange import Exchange
from pathways_lab.door.protocol.status import INVALID, UNIMPLEMENTED, Status
from pathways_lab.door.shardings import Placing
from pathways_lab.runtime import jax_callbacks, jax_modules, jax_private
from pathways_lab.runtime.arrays import dtype_of, element_of

_FOREIGN = frozenset(("CustomSPMDPartitioning", "InspectSharding"))
"""Custom calls that point into the memory of the client's process."""
_CALLBACK = "callback"
_LONGEST = 2000
"""Characters of what MLIR says of a module."""


@final
@dataclass(frozen=True, eq=False)
class Loaded:
    """A compiled function as a node of the lab's programs has it: see ``client.functions.Body``.

    devices: the client's numbers of the devices that it runs on, in order.
    in_kinds, in_placings, out_kinds, out_placings: arguments and results as the client has them.
    results: so many of its results are the client's; one more only says that it is over.
    module: the StableHLO that the client sent.
    tokens: numbers of results that are tokens to the client, and empty arrays on the lab.
    exchange: nothing computes, and values go to another client or come from it.
    """

    name: str
    devices: tuple[int, ...]
    code: Executable
    in_kinds: tuple[ArrayType, ...]
    in_placings: tuple[Placing, ...]
    out_kinds: tuple[ArrayType, ...]
    out_placings: tuple[Placing, ...]
    calls_python: bool
    results: int
    module: bytes
    tokens: frozenset[int]
    exchange: Exchange | None
    running: Any = USUAL

    @property
    def in_types(self) -> tuple[ArrayType, ...]:
        return self.code.in_types

    @property
    def out_types(self) -> tuple[ArrayType, ...]:
        return self.code.out_types

    @property
    def donated(self) -> tuple[int, ...]:
        return self.code.donated

    def wanted(self, index: int, place: Slice) -> Layout | None:
        return self.code.in_layouts[index]

    def on(self, place: Slice, wanted: Sequence[Any], pinned: Sequence[Any] | None) -> Executable:
        return self.code

    @property
    def key(self) -> str:
        return self.code.key

    @property
    def reorders(self) -> bool:
        """Whether the client has a result on devices in another order."""
        return any(placing.order for placing in self.out_placings)

    def donating(self, donated: tuple[int, ...]) -> Loaded:
        """The same, which may overwrite these arguments only."""
        key = hashlib.sha256(f"{self.code.key} {donated}".encode()).hexdigest()[:32]
        return replace(self, code=replace(self.code, key=key, donated=donated))


Remotely = Callable[[int, bool], Callable[..., Any]]
"""Makes what calls a function of the client by its number; and whether it takes a token."""


def load(module: bytes, devices: tuple[int, ...], kind: str, remote: Remotely) -> Loaded:
    """The function that a StableHLO module is.  kind: of the devices.

    Raises Status for what hosts cannot run.
    """
    sent = module
    try:
        said = jax_modules.read_signature(module)
        tokens = frozenset[int]()
        if (said.tokens or said.token_outputs) and not said.calls & jax_callbacks.JAX_TARGETS:
            tokens = said.token_outputs
            module = jax_modules.without_tokens(module)
        stacks = jax_modules.Stacked(
            module, (False,) * len(said.inputs), (False,) * len(said.outputs)
        )
        if said.unreduced:
            stacks = jax_modules.stacked(module)
            module = stacks.module
        if module is not sent:
            said = jax_modules.read_signature(module)
        ins, outs = map(_types, (said.inputs, said.outputs))
        _check(said, len(devices))
        read = jax_private.read_lowered(
            module, [len(t.shape) for t in ins], [len(t.shape) for t in outs]
        )
    except (Status, dtypes.UnknownType):
        raise
    except Exception as error:  # MLIR raises anything, for anything
        text = f"compile_request: no module that JAX makes: {type(error).__name__}: {error}"
        raise Status(INVALID, text[:_LONGEST]) from None
    calls = said.calls & jax_callbacks.JAX_TARGETS
    ends = bool(calls) and not outs
    moved_ins = _reordered(said.reordered_inputs, devices)
    moved_outs = _reordered(said.reordered_outputs, devices)
    named = [
        *_fitting(_with(moved_ins, read.inputs), ins, len(devices)),
        *_fitting(_with(moved_outs, read.outputs), outs, len(devices)),
    ]
    settled = [
        tiles.whole(len(devices), len(kind.shape)) if layout is None
        else tiles.canonical(layout)
        for layout, kind in zip(named, (*ins, *outs), strict=True)
    ]  # fmt: skip
    in_layouts, out_layouts = tuple(settled[: len(ins)]), tuple(settled[len(ins) :])
    sizes = [
        math.prod(shard_shape(layout, kind.shape)) * element_of(kind.dtype).itemsize
        for layout, kind in zip(settled, (*ins, *outs), strict=True)
    ]
    donated = overwritten(said.donors, sizes[: len(ins)], sizes[len(ins) :])
    name = said.name.removeprefix("jit_") or said.name
    skip = said.tokens
    placed = [*named[skip : len(ins)], *named[len(ins) + skip :]]
    platform = PLATFORMS.get(kind, kind)
    made = modules.exported(module, name, ins[skip:], outs[skip:], placed, len(devices), platform)
    blob = bytes(made.serialize())
    python = bool(calls or said.tokens)
    if python:
        blob = _calling(module, blob, remote, ends, said.tokens)
    results = len(outs)
    if ends:
        outs, out_layouts = (ArrayType((), "bool"),), (tiles.whole(len(devices), 0),)
    out_stacks = (*stacks.outputs, False) if ends else stacks.outputs
    in_placings = _placings(devices, in_layouts, stacks.inputs, moved_ins)
    out_placings = _placings(devices, out_layouts, out_stacks, moved_outs)
    digest = hashlib.sha256(module)
    digest.update(repr((in_layouts, out_layouts, donated, kind)).encode())
    code = Executable(
        digest.hexdigest()[:32], "callbacks" if python else "export", blob, name, ins, outs,
        in_layouts, out_layouts, donated, Line(),
    )  # fmt: skip
    return Loaded(
        name, devices, code,
        _as_sent(ins, in_placings), in_placings, _as_sent(outs, out_placings), out_placings,
        bool(calls), results, sent, tokens, exchange.of(said.calls),
    )  # fmt: skip


def _reordered(found: jax_modules.Reordered, devices: tuple[int, ...]) -> dict[int, Placing]:
    return {n: shardings.reordered(devices, *each) for n, each in found.items()}


def _with(moved: dict[int, Placing], layouts: Sequence[Layout | None]) -> list[Layout | None]:
    """The lab's values are on the devices as they come, and cut in the same way."""
    return [moved[n].layout if n in moved else layout for n, layout in enumerate(layouts)]


def _placings(
    devices: tuple[int, ...],
    layouts: Sequence[Layout],
    stacks: Sequence[bool],
    moved: dict[int, Placing],
) -> tuple[Placing, ...]:
    return tuple(
        moved.get(n, Placing(devices, *each))
        for n, each in enumerate(zip(layouts, stacks, strict=True))
    )


def _as_sent(kinds: Sequence[ArrayType], placings: Sequence[Placing]) -> tuple[ArrayType, ...]:
    """Types of arrays whose values have these."""
    return tuple(
        ArrayType(kind.shape[1:], kind.dtype) if placing.stacked else kind
        for kind, placing in zip(kinds, placings, strict=True)
    )


def overwritten(
    donors: dict[int, int | None], ins: Sequence[int], outs: Sequence[int]
) -> tuple[int, ...]:
    """Donated arguments whose memory a result takes, as XLA decides it.

    ins, outs: bytes of each argument and result on one device.
    """
    taken = set(donors.values())
    free = Counter(size for number, size in enumerate(outs) if number not in taken)
    found = []
    for number, output in donors.items():
        if output is not None or free[ins[number]] > 0:
            found.append(number)
            free[ins[number]] -= output is None
    return tuple(found)


def _calling(module: bytes, blob: bytes, remote: Remotely, ends: bool, tokens: int) -> bytes:
    """An export with its callbacks, as hosts take it."""
    try:
        callbacks = jax_callbacks.numbered(
            module, remote, lambda word: dtype_of(dtypes.of_word(word))
        )
    except Exception as error:  # MLIR raises anything, with the traceback in its text
        said = str(error).strip().splitlines()[-1][:_LONGEST]
        text = f"compile_request: a callback that JAX has not made: {said}"
        raise Status(INVALID, text) from None
    ordered = jax_callbacks.ORDERED[:tokens]
    # JAX leaves out calls without results and without effects.
    unordered = jax_callbacks.UNORDERED if callbacks else ()
    pickled = pickling.dumps(tuple(callbacks))
    return pickle.dumps(jax_callbacks.Calling(blob, pickled, ordered, unordered, ends, tokens))


def text_of(loaded: Loaded, kind: str) -> str:
    """The program as hosts of CPU devices compile it.  Raises Status for other kinds."""
    if kind != "cpu" or loaded.code.kind == "callbacks":
        raise Status(UNIMPLEMENTED, "the text of a compiled program is known on CPU devices only")
    return jax_modules.hlo_text(loaded.module, len(loaded.devices))


def _types(said: tuple[tuple[tuple[int, ...], str], ...]) -> tuple[ArrayType, ...]:
    return tuple(ArrayType(shape, dtypes.of_word(word)) for shape, word in said)


def _check(said: jax_modules.Signature, devices: int) -> None:
    if said.replicas != 1:
        raise Status(UNIMPLEMENTED, f"compile_request: {said.replicas} replicas are not served")
    if said.partitions != devices:
        text = f"compile_request: {said.partitions} partitions for {devices} devices"
        raise Status(INVALID, text)
    for target in sorted(said.calls):
        known = target in jax_callbacks.JAX_TARGETS
        if target in _FOREIGN or (_CALLBACK in target and not known):
            raise Status(UNIMPLEMENTED, f"compile_request: custom call {target!r} is not served")


def _fitting(
    found: Sequence[Layout | None], kinds: Sequence[ArrayType], devices: int
) -> list[Layout | None]:
    """Layouts that cut these arrays evenly."""
    fitting: list[Layout | None] = []
    for layout, kind in zip(found, kinds, strict=True):
        if layout is not None and len(layout.spec) != len(kind.shape):
            layout = None  # of a token, which has no dimensions there
        if layout is not None:
            sizes = dict(layout.mesh)
            cuts = [math.prod(sizes[axis] for axis in axes) for axes in layout.spec]
            uneven = any(n % cut for n, cut in zip(kind.shape, cuts, strict=True))
            layout = None if uneven or layout.devices != devices else layout
        fitting.append(layout)
    return fitting
