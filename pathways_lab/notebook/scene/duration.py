"""Times in few characters, for every text of a picture."""

from __future__ import annotations


def duration(seconds: float, digits: int = 3) -> str:
    """A time of so many digits: ``"1.5 s"``, ``"12 ms"``, ``"80 µs"``."""
    seconds = float(f"{seconds:.{digits}g}")
    for size, unit in ((1.0, "s"), (1e-3, "ms")):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 1e-6:.3g} µs"
