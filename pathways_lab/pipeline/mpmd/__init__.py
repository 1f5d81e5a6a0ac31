"""MPMD from ordinary training code: marks in it, and slices for the marks.

``pw.mpmd.named(name, function)`` marks a part of a model; ``pw.mpmd.jit(train_step, on={name:
slice})`` makes the whole training step, written for one device, one program over the slices.

Rule for maintainers: nothing is loaded before it is used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathways_lab.pipeline.mpmd.marks import named
    from pathways_lab.pipeline.mpmd.partition import Fragment
    from pathways_lab.pipeline.mpmd.step import Step, jit

__all__ = ["Fragment", "Step", "jit", "named"]

_HOMES = {"Fragment": "partition", "Step": "step", "jit": "step", "named": "marks"}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{home}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
