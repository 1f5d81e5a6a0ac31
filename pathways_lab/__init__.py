"""Pathways Lab: one notebook drives many accelerators as one machine.

``import pathways_lab as pw`` is cheap: JAX, Dask and everything that draws are
imported when a name is first used.  :data:`__all__` is the whole public
surface, and a test keeps it.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

    from pathways_lab.client.functions.jax_patch import patched
    from pathways_lab.client.functions.jit import jit
    from pathways_lab.client.functions.pmap import pmap
    from pathways_lab.client.functions.traced_function import LargeConstantWarning
    from pathways_lab.client.lab.cancelling import Cancelled
    from pathways_lab.client.lab.deadlock_check import possible_deadlock
    from pathways_lab.client.lab.devices import Slice
    from pathways_lab.client.lab.lab import Lab
    from pathways_lab.client.lab.opening import connect, current, make_virtual_device_set, start
    from pathways_lab.client.lab.tags import tagged
    from pathways_lab.client.program.branches import cond, switch, until
    from pathways_lab.client.program.experts import experts
    from pathways_lab.client.program.program import device_put, program
    from pathways_lab.client.program.simulation import Machine, compare_policies, simulate
    from pathways_lab.client.saving.checkpoints import Saving, restore, save
    from pathways_lab.client.session.handles import Handle
    from pathways_lab.client.trunk.trunk import Trunk
    from pathways_lab.core.errors import Failure, PathwaysError
    from pathways_lab.core.scheduling.policies import (
        FIFO,
        Candidate,
        Place,
        PlaceView,
        Policy,
        PolicyView,
        Priority,
        ProportionalShare,
        ShortestFirst,
    )
    from pathways_lab.notebook.reports.timelines import compare_timelines
    from pathways_lab.notebook.reports.training_comparison import compare
    from pathways_lab.pipeline import mpmd
    from pathways_lab.pipeline.automatic import pipeline
    from pathways_lab.pipeline.islands import data_parallel
    from pathways_lab.pipeline.search import search
    from pathways_lab.pipeline.what_if import what_if
    from pathways_lab.runtime.emulated import emulated
    from pathways_lab.sim.machine import Costs, FunctionCost
    from pathways_lab.sim.simulate import Load
    from pathways_lab.timeline.log import Timeline, load

__all__ = [
    "FIFO",
    "Cancelled",
    "Candidate",
    "Costs",
    "Failure",
    "FunctionCost",
    "Handle",
    "Lab",
    "LargeConstantWarning",
    "Load",
    "Machine",
    "PathwaysError",
    "Place",
    "PlaceView",
    "Policy",
    "PolicyView",
    "Priority",
    "ProportionalShare",
    "Saving",
    "ShortestFirst",
    "Slice",
    "Trunk",
    "compare",
    "compare_policies",
    "compare_timelines",
    "cond",
    "connect",
    "current",
    "data_parallel",
    "device_put",
    "emulated",
    "experts",
    "jit",
    "load",
    "make_virtual_device_set",
    "mpmd",
    "patched",
    "pipeline",
    "pmap",
    "possible_deadlock",
    "program",
    "restore",
    "save",
    "search",
    "simulate",
    "start",
    "switch",
    "tagged",
    "until",
    "what_if",
]

_HOMES = {
    name: home
    for home, names in {
        "client.functions.jax_patch": "patched",
        "client.functions.jit": "jit",
        "client.functions.pmap": "pmap",
        "client.functions.traced_function": "LargeConstantWarning",
        "client.lab.cancelling": "Cancelled",
        "client.lab.deadlock_check": "possible_deadlock",
        "client.lab.devices": "Slice",
        "client.lab.lab": "Lab",
        "client.lab.opening": "connect current make_virtual_device_set start",
        "client.lab.tags": "tagged",
        "client.program.branches": "cond switch until",
        "client.program.experts": "experts",
        "client.program.program": "device_put program",
        "client.program.simulation": "Machine compare_policies simulate",
        "client.saving.checkpoints": "Saving restore save",
        "client.session.handles": "Handle",
        "client.trunk.trunk": "Trunk",
        "core.errors": "Failure PathwaysError",
        "core.scheduling.policies": "Candidate FIFO Place PlaceView Policy PolicyView"
        " Priority ProportionalShare ShortestFirst",
        "notebook.reports.timelines": "compare_timelines",
        "notebook.reports.training_comparison": "compare",
        "pipeline": "pipeline",
        "pipeline.islands": "data_parallel",
        "pipeline.mpmd": "mpmd",
        "pipeline.what_if": "what_if",
        "pipeline.search": "search",
        "runtime.emulated": "emulated",
        "sim.machine": "Costs FunctionCost",
        "sim.simulate": "Load",
        "timeline.log": "load",
    }.items()
    for name in names.split()
}


def _open_view(timeline: Timeline, *panels: str, **options: Any) -> Any:
    from pathways_lab.notebook.view.view import view_of

    return view_of(timeline, *panels, **options)


def _lab_closes(lab: Lab) -> None:
    from pathways_lab.door import in_process

    in_process.close_of(lab)
    _close_views(lab)


def _close_views(lab: Lab) -> None:
    # Without the module there are no views; nor while another thread is importing it.
    views = sys.modules.get("pathways_lab.notebook.view.view")
    if (freeze := getattr(views, "freeze_all", None)) is not None:
        freeze(lab.timeline)


def _open_dashboard(lab: Lab, folder: Path | None, page: str, height: int) -> Any:
    from pathways_lab.notebook.dashboard.frame import Dashboard

    return Dashboard(lab, folder, page, height)


def load_ipython_extension(shell: Any) -> None:
    """``%load_ext pathways_lab``: the magics, live views, JAX's names over virtual devices."""
    from pathways_lab.notebook.kernel import extension

    _plug_in()
    extension.load(shell)


def unload_ipython_extension(shell: Any) -> None:
    """``%unload_ext pathways_lab`` takes all of it back."""
    from pathways_lab.notebook.kernel import extension

    extension.unload(shell)


def _plug_in() -> None:
    from pathways_lab.client.lab import hooks
    from pathways_lab.notebook.dashboard import PAGES, kernels
    from pathways_lab.timeline import log

    log.open_view = log.open_view or _open_view
    hooks.pages = hooks.pages or PAGES
    hooks.open_dashboard = hooks.open_dashboard or _open_dashboard
    hooks.lab_opened = hooks.lab_opened or kernels.note
    hooks.lab_closes = hooks.lab_closes or _lab_closes


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'pathways_lab' has no attribute {name!r}")
    module = importlib.import_module(f"pathways_lab.{home}")
    if home.startswith(("client.", "pipeline")):
        # The lab is what makes calls outside of programs run.
        importlib.import_module("pathways_lab.client.lab.lab")
        importlib.import_module("pathways_lab.door.in_process")
    if home.startswith(("client.", "pipeline", "timeline")):
        _plug_in()
    # A package of that name is a name of its own.
    value = globals()[name] = module if hasattr(module, "__path__") else getattr(module, name)
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
