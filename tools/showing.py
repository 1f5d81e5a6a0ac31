"""How examples of the reference are written: functions, each of some names.

A function is one example, of the names in :func:`shows`.  It takes what is there before
(:data:`PREFACE`, and an empty folder), and the reference shows its body.

Rule for maintainers: examples are in :mod:`tools.examples`, in the order in which they run.
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Callable
from typing import Any

PREFACE = """
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec as P

import pathways_lab as pw
from pathways_lab.timeline.records import Span


def dense(weights, a):  # a layer
    return jnp.tanh(a @ weights)


def error(y, labels):
    return jnp.mean((y - labels) ** 2)


lab = pw.start(islands=2, hosts_per_island=1, devices_per_host=2, name="ann")
s = lab.slice(2, "x", island="island0")  # two virtual devices, in a mesh of one axis
t = lab.slice(2, "x", island="island1")
x = pw.device_put(np.arange(8, dtype=np.float32), s.sharding(P("x")))
folder = Path("somewhere")
"""

_examples: dict[Callable[..., Any], tuple[str, ...]] = {}


def shows(*names: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """This function is an example of these names; the reference shows it at each of them."""

    def keep(function: Callable[..., None]) -> Callable[..., None]:
        _examples[function] = names
        return function

    return keep


def all_examples() -> dict[Callable[..., Any], tuple[str, ...]]:
    """The examples in their order, each with its names."""
    return dict(_examples)


def by_name() -> dict[str, str]:
    """The text of the example of each name."""
    return {name: _text(function) for function, names in _examples.items() for name in names}


def _text(function: Callable[..., None]) -> str:
    """The body of a function, as one would write it in a cell."""
    source = textwrap.dedent(inspect.getsource(function))
    (defined,) = ast.parse(source).body
    assert isinstance(defined, ast.FunctionDef)
    lines, first = source.split("\n"), defined.body[0].lineno - 1
    while lines[first - 1].strip().startswith("#"):
        first -= 1
    text = textwrap.dedent("\n".join(lines[first:])).strip()
    return re.sub(r"  # type: ignore\[.*?\]", "", text)
