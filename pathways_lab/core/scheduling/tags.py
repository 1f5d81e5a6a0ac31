"""Tags: what a client says of its runs for policies, beside what they compute.

Problem: a policy that knows deadlines, or which user of a service asks, needs to be told; and
what one client says is kept, and shown, at the cost of all.

Rule for maintainers: small and plain, checked where it is said and again where it arrives
(:func:`wrong`); the core carries it and never reads *data*.

Paper: section 4.4 (policies).
"""

from __future__ import annotations

import math
from typing import Any

Data = tuple[tuple[str, Any], ...]
"""Names with plain values, by name: in this form it can be compared."""

HIGHEST = 1_000_000
"""Priorities lie between minus this and this."""

NAMES, TEXT = 16, 128
"""Names in the data of a run at most, and characters of a name or a text."""

RULE = (
    f"data is at most {NAMES} names with values that are numbers (finite, below 2**63), True, False"
    f" or None, or texts of at most {TEXT} characters"
)


def wrong(priority: object, data: object) -> str:
    """The error in the priority and the :data:`Data` of a run, with the rule, or ""."""
    if type(priority) is not int or abs(priority) > HIGHEST:
        return f"priority is {priority!r:.60}: a whole number from {-HIGHEST:,} to {HIGHEST:,}"
    if not isinstance(data, tuple) or len(data) > NAMES:
        return f"data is {data!r:.60}: {RULE}"
    for pair in data:
        if not (isinstance(pair, tuple) and len(pair) == 2 and _name(pair[0])):
            return f"data has the name {pair!r:.60}: a name is a text of 1 to {TEXT} characters"
        if not _plain(pair[1]):
            return f"data has {pair[0]!r} with {pair[1]!r:.60}: {RULE}"
    if len({name for name, _ in data}) < len(data):
        return "data has one name twice"
    return ""


def _name(name: object) -> bool:
    return isinstance(name, str) and 0 < len(name) <= TEXT


def _plain(value: object) -> bool:
    if type(value) is float:
        return math.isfinite(value)
    if type(value) is int:
        return -(1 << 63) <= value < 1 << 63
    return value is None or type(value) is bool or (type(value) is str and len(value) <= TEXT)
