"""Prepared programs whose arguments and results are bundles.

Problem: the same call takes single arrays at first, and bundles once its habits are known.

Rule for maintainers: only a program of one call has such variants; the last few are kept with
the program.  Code is the same for all of them.

Paper: section 4.2 (one bookkeeping entry per logical buffer).
"""

from __future__ import annotations

import hashlib
from dataclasses import replace

from pathways_lab.client.code.export import Executable
from pathways_lab.client.program.graph import Prepared
from pathways_lab.core.program import bundles
from pathways_lab.core.program.bundles import APART, Ranges
from pathways_lab.core.program.program import Call

_KEPT = 32
"""Variants of a program that are kept: how arrays are passed may change with every call."""


def with_bundles(prepared: Prepared, given: Ranges, made: Ranges) -> Prepared:
    """The same with bundles in place of these arguments and results."""
    if not given and not made:
        return prepared
    found = prepared.variants.get((given, made))
    if found is None:
        if len(prepared.variants) >= _KEPT:
            prepared.variants.clear()
        heads = bundles.in_ranges(range(len(prepared.inputs)), given)
        firsts = bundles.in_ranges(range(len(prepared.outputs)), made)
        ends = (*firsts[1:], len(prepared.outputs))
        gone = prepared.donated
        found = prepared.variants[given, made] = replace(
            prepared,
            plan=bundles.with_bundles(prepared.plan, given, made),
            donated={n: gone[head] for n, head in enumerate(heads) if head in gone},
            results=tuple(zip(firsts, ends, strict=True)),
            tested={},
            variants={},
        )
    return found


def apart(prepared: Prepared, first: int, last: int) -> Prepared:
    """The program that gives these results, which are a bundle, buffers of their own."""
    found = prepared.parts.get((first, last))
    if found is None:
        refs = prepared.outputs[first:last]
        call = prepared.plan.steps[0].node
        assert isinstance(call, Call)
        types = tuple([ref.type for ref in refs])
        layouts = tuple([ref.placed.layout for ref in refs])
        name = f"arrays of {prepared.name}"
        key = hashlib.sha256(f"{APART} {types} {layouts}".encode()).hexdigest()[:32]
        every = tuple(range(len(refs)))
        code = Executable(key, APART, b"", name, types, types, layouts, layouts, every, call.line)
        found = prepared.parts[first, last] = replace(
            prepared,
            name=name,
            plan=bundles.apart(name, key, [ref.value for ref in refs], call.line),
            inputs=(),
            functions=((code, call.slice),),
            outputs=refs,
            donated={},
            results=(),
            tested={},
            variants={},
            parts={},
        )
    return found
