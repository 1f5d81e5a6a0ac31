"""Versions of what both ends of a link must have alike, and the words for those that are not.

Problem: processes of a lab exchange compiled code, pickled functions and messages of their own.
With another JAX, another Python or another version of this package at one end, something breaks
later, elsewhere, and in words that name neither.

Alike must be Python to its second number (pickled functions), JAX and jaxlib (compiled code and
collectives), and this package (messages and plans).  The last number of Python, NumPy, the
operating system and the kind of processor may differ; Dask compares its own versions.

Rule for maintainers: every hello carries them, and the accepting end compares.  They are read
from what is installed, without an import: a control plane loads no JAX.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping
from importlib import metadata
from typing import Any

FIELD = "versions"
"""Where they are in a hello."""
_PACKAGES = {"pathways-lab": "pathways_lab", "jax": "JAX", "jaxlib": "jaxlib"}
_LONGEST = 40

REMEDY = "install the same version of it for the scheduler, the workers and the notebook"


@functools.cache
def here() -> dict[str, str]:
    """The versions of this process, by name; "" for what is not installed."""
    found = {"Python": f"{sys.version_info.major}.{sys.version_info.minor}"}
    for distribution, name in _PACKAGES.items():
        try:
            found[name] = metadata.version(distribution)
        except metadata.PackageNotFoundError:
            found[name] = ""
    return found


def in_words(found: Mapping[str, str]) -> str:
    """Versions as :func:`here` has them, for people."""
    return ", ".join(f"{name} {version or '-'}" for name, version in found.items())


def apart(theirs: object, their: str, our: str) -> str:
    """How the versions of another process differ from those of this one, or "".

    theirs: what a hello has in :data:`FIELD`, from anybody.  their, our: the owners of the two,
    as the sentence names them.
    """
    known: Mapping[Any, Any] = theirs if isinstance(theirs, Mapping) else {}
    differing = [
        f"{name} {str(known.get(name) or 'of no known version')[:_LONGEST]} and {our} {version}"
        for name, version in here().items()
        if known.get(name) != version
    ]
    if not differing:
        return ""
    return f"{their} has {', '.join(differing)}"
