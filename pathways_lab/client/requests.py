"""What users write when they ask for devices, made into a request.

Problem: a lab and a simulated machine are asked for slices in the same words.

Rule for maintainers: only what can be wrong in the words is refused here;
whether the devices exist is the resource manager's business.

Paper: section 4.1 (resource manager).
"""

from __future__ import annotations

from collections.abc import Iterable

from pathways_lab.client import failures
from pathways_lab.core.topology import SliceRequest

_AXES = ("x", "y", "z")
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
) -> SliceRequest:
    """The request for a slice (see :meth:`pathways_lab.client.lab.Lab.slice`).

    Raises PathwaysError for a shape, axes or a size that cannot be.
    """
    sizes = tuple(shape) if isinstance(shape, Iterable) else (shape,)
    names = _AXES[: len(sizes)] if axes is None else (axes,) if isinstance(axes, str) else axes
    _check_shape(sizes, tuple(names))
    return SliceRequest(sizes, tuple(names), island, kind, bytes_of(memory))


def _check_shape(shape: tuple[int, ...], axes: tuple[str, ...]) -> None:
    good = 1 <= len(shape) <= 3 and all(isinstance(n, int) and n >= 1 for n in shape)
    if not good:
        raise failures.failure(
            "refused",
            f"a slice of shape {shape} cannot be: a mesh has 1 to 3 sizes, each a whole number"
            " from 1 on",
            "for example lab.slice((2, 4), axes=('data', 'model'))",
        )
    if len(axes) != len(shape) or len(set(axes)) != len(axes):
        raise failures.failure(
            "refused",
            f"axes {axes} do not fit shape {shape}: one different name per size is needed",
            f"for example axes={_AXES[: len(shape)]}",
        )


def bytes_of(given: int | str) -> int:
    """A number of bytes, or text like ``"512 MiB"``."""
    if isinstance(given, int):
        return given
    text = str(given).strip()
    digits = text.rstrip("BGIKMbgikm ")
    unit = _UNITS.get(text[len(digits) :].strip().upper())
    try:
        if unit is None:
            raise ValueError
        return int(float(digits) * unit)
    except ValueError:
        raise failures.failure(
            "refused", f"memory={given!r} is no size", "write bytes, or text like '512 MiB'"
        ) from None
