"""`import pathways_lab as pw`: exactly the promised names, documented, and a light import."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest

import pathways_lab as pw

SURFACE = {
    # a lab
    *("start", "connect", "current", "Lab"),
    # virtual devices
    *("make_virtual_device_set", "Slice", "emulated"),
    # compiled functions, programs, data
    *("jit", "pmap", "program", "device_put", "patched", "Handle"),
    *("cond", "switch", "until"),
    # models
    *("mpmd", "pipeline", "data_parallel", "experts", "Trunk"),
    # checkpoints
    *("save", "restore", "Saving"),
    # whose gangs go first
    *("FIFO", "Priority", "ProportionalShare", "ShortestFirst"),
    *("Policy", "PolicyView", "Candidate", "PlaceView", "Place", "Cancelled", "tagged"),
    # looking ahead
    "possible_deadlock",
    # looking at what happened
    *("compare_timelines", "load"),
    # simulating
    *("simulate", "compare_policies", "Machine", "Costs", "FunctionCost", "Load"),
    *("what_if", "search"),
    # the same work in several ways
    "compare",
    # pictures
    "compare_timelines",
    # what can go wrong
    *("PathwaysError", "Failure", "LargeConstantWarning"),
}
"""A new name is a decision: add it here, to README or a notebook, and to CHANGELOG."""


DRAWING = {"compare", "compare_timelines"}
"""Names that bring Bokeh with them, once they are used."""


def fresh(code: str) -> str:
    """Output of *code* in a new interpreter, in which nothing is imported yet."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_the_list_is_the_promise():
    assert set(pw.__all__) == SURFACE
    assert len(pw.__all__) == len(SURFACE)


@pytest.mark.parametrize("name", sorted(SURFACE))
def test_every_name_can_be_had_and_is_documented(name):
    value = getattr(pw, name)
    assert len(inspect.getdoc(value) or "") > 20
    assert name in dir(pw)


def test_names_that_are_offered_are_public():
    assert set(dir(pw)) == SURFACE
    assert set(dir(pw.pipeline)) == set(pw.pipeline.__all__)
    assert set(dir(pw.mpmd)) == set(pw.mpmd.__all__)
    assert callable(pw.pipeline)
    assert inspect.signature(pw.pipeline) == inspect.signature(pw.pipeline.pipeline)


def test_a_star_import_brings_the_same():
    names: dict[str, object] = {}
    exec("from pathways_lab import *", names)
    assert names.keys() - {"__builtins__"} == SURFACE


def test_an_unknown_name_is_an_ordinary_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'strat'"):
        pw.strat  # noqa: B018


def test_import_is_light():
    """What a worker or a script does not need is not there: drawing, widgets, Dask, JAX."""
    heavy = ("bokeh", "anywidget", "ipywidgets", "IPython", "distributed", "dask", "jax", "numpy")
    code = f"import sys, pathways_lab; print([n for n in {heavy} if n in sys.modules])"
    assert fresh(code) == "[]"


@pytest.mark.cluster
def test_using_every_name_starts_nothing_and_draws_nothing():
    """All others together: no JAX device is initialised, no view, no thread, and no Dask,
    which takes a quarter of the start of a kernel that needs none."""
    code = (
        "import sys, threading, pathways_lab as pw\n"
        f"for name in set(pw.__all__) - {DRAWING}: getattr(pw, name)\n"
        "from pathways_lab.runtime import jax_private\n"
        "assert not jax_private.backends_initialised()\n"
        "drawing = {'bokeh', 'anywidget', 'ipywidgets', 'IPython'}\n"
        "loaded = {*drawing, 'distributed'} & sys.modules.keys()\n"
        "print(sorted(loaded), threading.active_count())"
    )
    assert fresh(code) == "[] 1"


@pytest.mark.parametrize("made", [pw.jit, pw.program])
def test_an_option_that_there_is_not_is_refused_at_once(made):
    """By the name of what was called, which shows its options."""
    options = inspect.signature(made).parameters
    assert "name" in options
    assert all(p.kind is p.KEYWORD_ONLY for p in [*options.values()][1:])
    with pytest.raises(TypeError, match=f"{made.__name__}.. got an .* 'nam'; did you mean 'name'"):
        made(lambda x: x, nam="f")
    with pytest.raises(TypeError, match="'zzzz'; it takes "):
        made(zzzz=1)
