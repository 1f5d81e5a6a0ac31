"""Closes the links in a fork of this process: they and everything behind them are the parent's.

Problem: data loaders and pools of processes fork the kernel.  The copy has none of the threads
that read the links, and shares their sockets: its messages would come between the parent's own.

Rule for maintainers: the copy never asks for a lock; the holder may be a thread that is not
there.

Paper: section 4.2 (client).
"""

from __future__ import annotations

import contextlib
import os
import weakref
from typing import Protocol


class Leaving(Protocol):
    """Objects that a fork leaves to the parent."""

    def leave_to_parent(self) -> None:
        """This process is a fork: be of no use here, and tell nobody."""


_here: weakref.WeakSet[Leaving] = weakref.WeakSet()


def leave_at_fork(it: Leaving) -> None:
    """Have it left to the parent in forks of this process, as long as it exists."""
    _here.add(it)


def _leave() -> None:
    for it in list(_here):
        with contextlib.suppress(Exception):  # what cannot be left keeps nothing else from it
            it.leave_to_parent()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave)
