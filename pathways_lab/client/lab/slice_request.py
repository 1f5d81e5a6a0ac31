"""Arguments of users who ask for devices, made into a request.

Problem: a lab and a simulated machine are asked for slices in the same words.

Rule for maintainers: only what can be wrong in the words is refused here;
whether the devices exist is the resource manager's business.

Paper: section 4.1 (resource manager).
"""

from __future__ import annotations

import contextlib
import operator
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pathways_lab.client.session import failures
from pathways_lab.core.program.program import LONGEST_WINDOW
from pathways_lab.core.slices.topology import SliceRequest

_Number = int | float | np.integer | np.floating
_AXES = ("x", "y", "z")
_MOST = 2**31 - 1
"""No count is larger."""
_LONGEST = 24 * 3600.0
"""Seconds; what is to end by itself takes no longer."""
_UNITS = {
    "": 1,
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
}


def slice_request(
    shape: int | tuple[int, ...],
    axes: str | tuple[str, ...] | None = None,
    island: str | None = None,
    kind: str | None = None,
    memory: int | str = 0,
    window: float | None = None,
    islands: int | Sequence[str] | None = None,
) -> SliceRequest:
    """The request for a slice (see :meth:`pathways_lab.client.lab.lab.Lab.slice`).

    Raises PathwaysError for a shape, axes or a size that cannot be.
    """
    sizes = _sizes(shape)
    names = _AXES[: len(sizes)] if axes is None else _names(axes, sizes)
    island, kind = name_or_none("island", island), name_or_none("kind", kind)
    ahead = None if window is None else seconds("window", window)
    parts = _parts(islands, island, sizes)
    if len(parts) == 1:
        island, parts = parts[0] or None, ()
    return SliceRequest(sizes, names, island, kind, bytes_of(memory), window=ahead, islands=parts)


def _parts(islands: Any, island: str | None, sizes: tuple[int, ...]) -> tuple[str, ...]:
    """The islands that a slice spans, by name; "" means any."""
    if islands is None:
        return ()
    if isinstance(islands, Sequence):
        given = (islands,) if isinstance(islands, str) else islands
        parts = tuple(name("islands", each) for each in given)
    else:
        parts = ("",) * count("islands", islands, most=max(sizes))
    named = [part for part in parts if part]
    if island is None and parts and len({*named}) == len(named) and not sizes[0] % len(parts):
        return parts
    raise failures.refused(
        f"a slice of shape {sizes} on islands={islands!r}, island={island!r} cannot be: each island"
        " that it spans, named once, has an equal part of the first size",
        "for example lab.slice((2, 4), ('island', 'x'), islands=2), or island= for one island",
    )


def _sizes(shape: Any) -> tuple[int, ...]:
    """As plain integers, whatever library's they are."""
    given = tuple(shape) if isinstance(shape, Iterable) else (shape,)
    sizes: tuple[int, ...] = ()
    with contextlib.suppress(TypeError):
        sizes = tuple(operator.index(n) for n in given if not isinstance(n, bool))
    if 1 <= len(sizes) == len(given) <= 3 and min(sizes) >= 1 and max(sizes) <= _MOST:
        return sizes
    raise failures.refused(
        f"a slice of shape {given} cannot be: a mesh has 1 to 3 sizes, each a whole number"
        f" from 1 to {_MOST}",
        "for example lab.slice((2, 4), axes=('data', 'model'))",
    )


def _names(axes: Any, sizes: tuple[int, ...]) -> tuple[str, ...]:
    names = tuple(axes) if isinstance(axes, Iterable) and not isinstance(axes, str) else (axes,)
    texts = all(isinstance(each, str) and each for each in names)
    if texts and len(set(names)) == len(names) == len(sizes):
        failures.check_axes(names)
        return names
    raise failures.refused(
        f"axes {names} do not fit shape {sizes}: one different name per size is needed",
        f"for example axes={_AXES[: len(sizes)]}",
    )


def path(what: str, given: Any) -> Path:
    """The path of a file or folder.  what: the argument for it."""
    if isinstance(given, str | os.PathLike):
        return Path(given)
    raise failures.refused(
        f"{what}={given!r:.60} is not a path", "write text, or give a pathlib.Path"
    )


def function(what: str, given: Any) -> Any:
    """Something that can be called.  what: the argument for it."""
    if callable(given):
        return given
    raise failures.refused(
        f"{what}={given!r:.60} is not a function", "give a function, or a lambda"
    )


def name(what: str, given: Any) -> str:
    """A name that is text.  what: the argument for it."""
    if isinstance(given, str):
        try:
            given.encode()
        except UnicodeEncodeError as error:
            raise failures.refused(
                f"{what}={given!r:.60} cannot be sent: {error.reason}",
                "names are text of whole characters: repr(name) shows them",
            ) from None
        return given
    example = getattr(given, "name", what)
    raise failures.refused(
        f"{what}={given!r:.60} is not a name", f"write text, for example {example!r}"
    )


def name_or_none(what: str, given: Any) -> str | None:
    """The same of a name that may be left out."""
    return None if given is None else name(what, given)


def seconds(what: str, given: Any, remedy: str = "give seconds, from 0 on") -> float:
    """A number of seconds.  what: the argument for it."""
    if isinstance(given, _Number) and 0 <= given <= LONGEST_WINDOW:
        return float(given)
    raise failures.refused(f"{what}={given!r} is not a number of seconds", remedy)


_PATIENCE = "True: as long as it takes; or so many seconds, from 0 on; False: none"


def patience(what: str, given: Any) -> float | None:
    """How long to wait at most, in seconds; None: as long as it takes.  what: the argument."""
    return None if given is True else seconds(what, given, _PATIENCE)


def duration(what: str, given: Any) -> float:
    """How long something is to last that ends by itself, in seconds.  what: the argument for it."""
    if isinstance(given, _Number) and 0 < given <= _LONGEST:
        return float(given)
    raise failures.refused(
        f"{what}={given!r} is not a duration: it is more than 0, and at most {_LONGEST:g}",
        f"for example {what}=5",
    )


def count(what: str, given: Any, least: int = 1, most: int = _MOST) -> int:
    """A whole number from *least* to *most*.  what: the argument for it."""
    with contextlib.suppress(TypeError):
        if not isinstance(given, bool) and least <= (number := operator.index(given)) <= most:
            return number
    raise failures.refused(
        f"{what}={given!r:.60} is not a whole number from {least} to {most}",
        f"for example {what}={max(least, 2)}",
    )


def bytes_of(given: int | str, what: str = "memory") -> int:
    """A number of bytes, or text like ``"512 MiB"``.  what: the argument for it."""
    text = str(given).strip()
    digits = text.rstrip("BGIKMbgikm ")
    unit = _UNITS.get(text[len(digits) :].strip().upper())
    size = -1
    if type(given) is int:
        size = given
    elif unit is not None:
        with contextlib.suppress(ValueError, OverflowError):
            size = int(float(digits) * unit)
    if 0 <= size < 2**63:
        return size
    raise failures.refused(
        f"{what}={given!r} is not a size: sizes are bytes, from 0 on",
        "write a number, or text like '512 MiB'",
    )
