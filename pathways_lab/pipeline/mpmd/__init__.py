"""MPMD from ordinary training code: marks in it, and slices for the marks.

``pw.mpmd.named(name, function)`` marks a part of a model; ``pw.mpmd.jit(train_step, on={name:
slice})`` makes the whole training step, written for one device, one program over the slices.
``pw.mpmd.load(module, on=...)`` runs what Shardy's own partitioner made.

Rule for maintainers: ``pw.mpmd`` is loaded when it is used, and not by ``import pathways_lab``.
"""

from pathways_lab.client.program.ifrt import LoadedProgram, load
from pathways_lab.pipeline.mpmd.front import jit
from pathways_lab.pipeline.mpmd.marks import named
from pathways_lab.pipeline.mpmd.partition import Fragment
from pathways_lab.pipeline.mpmd.step import Step

__all__ = ["Fragment", "LoadedProgram", "Step", "jit", "load", "named"]


def __dir__() -> list[str]:
    return sorted(__all__)
