"""What this thread is doing: capturing a program, or compiling one function.

Problem: the same call of a compiled function means four things: a run of its
own, a node of the program being captured, a part of the compiled function in
whose body it stands, or a mistake (inside ``jax.grad``, ``jax.jit`` ...).
Which one is decided by the innermost scope of the calling thread.

Rule for maintainers: thread-local and strictly nested.

Paper: section 3 (the program tracer).
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar


@dataclass(frozen=True, slots=True)
class Body:
    """The body of compiled function *name* is being traced by JAX."""

    name: str


Scope = TypeVar("Scope")


class _Stack(threading.local, Generic[Scope]):
    def __init__(self) -> None:
        self.entries: list[object] = []


_stack: _Stack[object] = _Stack()


def current() -> object | None:
    """The innermost scope: a :class:`Body`, a capture, or None."""
    return _stack.entries[-1] if _stack.entries else None


@contextlib.contextmanager
def entered(scope: object) -> Iterator[None]:
    """Make *scope* the innermost one for a while."""
    _stack.entries.append(scope)
    try:
        yield
    finally:
        _stack.entries.pop()
