"""Pipelines: schedules as data, and layered models as MPMD programs that follow them.

``pw.pipeline(layers, slices, ...)`` makes the program (see
:func:`pathways_lab.pipeline.automatic.pipeline`); ``pw.pipeline.gpipe(4, 16)``
and its siblings are the schedules, ``pw.pipeline.Schedule.read`` is for one's own.

Rule for maintainers: the package is its own main function, so that the name
means one thing whoever imported it first; nothing is loaded before it is used.
"""

from __future__ import annotations

import importlib
import inspect
import sys
import types
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathways_lab.pipeline.automatic import Pipeline, pipeline
    from pathways_lab.pipeline.emulation import held
    from pathways_lab.pipeline.islands import DataParallel, data_parallel
    from pathways_lab.pipeline.schedule import Costs, Schedule, Table, Task
    from pathways_lab.pipeline.schedules import (
        Comparison,
        circular,
        dual_pipe_v,
        eager_one_forward_one_backward,
        gpipe,
        interleaved,
        one_forward_one_backward,
        zero_bubble,
        zero_bubble_h2,
    )

__all__ = [
    "Comparison",
    "Costs",
    "DataParallel",
    "Pipeline",
    "Schedule",
    "Table",
    "Task",
    "circular",
    "data_parallel",
    "dual_pipe_v",
    "eager_one_forward_one_backward",
    "gpipe",
    "held",
    "interleaved",
    "one_forward_one_backward",
    "pipeline",
    "zero_bubble",
    "zero_bubble_h2",
]

_HOMES = {
    name: home
    for home, names in {
        "automatic": "Pipeline pipeline",
        "emulation": "held",
        "islands": "DataParallel data_parallel",
        "schedule": "Costs Schedule Table Task",
        "schedules": "Comparison circular dual_pipe_v eager_one_forward_one_backward gpipe"
        " interleaved one_forward_one_backward zero_bubble zero_bubble_h2",
    }.items()
    for name in names.split()
}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{home}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)


class _Callable(types.ModuleType):
    """A module that is called like its main function, and shows its arguments."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.pipeline(*args, **kwargs)

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self.pipeline)


sys.modules[__name__].__class__ = _Callable
