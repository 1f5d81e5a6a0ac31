"""The scopes of a thread: it captures a program, compiles one function, or does neither.

Problem: the same call of a compiled function means four things: a run of its
own, a node of the program being captured, a part of the compiled function in
whose body it stands, or a mistake (inside ``jax.grad``, ``jax.jit`` ...).
Which one is decided by the innermost scope of the calling thread.

Rule for maintainers: thread-local and strictly nested.  The outermost scope is
put here by the module that runs calls at once, so that compiled functions and
handles need not know it.

Paper: section 3 (the program tracer).
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from pathways_lab.client.session import failures


@dataclass(frozen=True, slots=True)
class Body:
    """The body of compiled function *name* is being traced by JAX."""

    name: str


class Recorder(Protocol):
    """A scope in which compiled functions are called."""

    def call(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call of a compiled function: its results."""

    def record_move(self, leaf: Any, move: Any, name: str) -> Any:
        """An explicit ``device_put`` of one leaf."""

    def apply(
        self,
        name: str,
        function: Callable[..., Any],
        operands: Sequence[Any],
        options: dict[str, Any],
    ) -> Any:
        """An operator or method on a handle."""

    def lift(self, leaf: Any) -> Any:
        """A handle as JAX sees it here; anything else as it is."""


class _Stack(threading.local):
    def __init__(self) -> None:
        self.entries: list[Body | Recorder] = []


_stack = _Stack()
_outermost: Recorder | None = None


def install(outermost: Recorder) -> None:
    """The scope of calls that stand in no other."""
    global _outermost
    _outermost = outermost


def current() -> Body | Recorder:
    """The innermost scope."""
    if _stack.entries:
        return _stack.entries[-1]
    if _outermost is None:
        raise RuntimeError(
            "nothing runs calls yet: pathways_lab.client.program.calls is not imported"
        )
    return _outermost


def for_handles() -> Recorder:
    """The innermost scope, which takes handles.

    Raises PathwaysError in the body of a compiled function, which takes them as arguments only.
    """
    scope = current()
    if isinstance(scope, Body):
        raise failures.capture_failure(
            f"compiled function {scope.name!r} reads a handle from outside",
            "pass the handle as an argument",
            node=scope.name,
        )
    return scope


def outermost() -> bool:
    """Whether calls run at once: they stand in no scope."""
    return not _stack.entries


def check_outside(name: str, why: str) -> None:
    """Raises PathwaysError where *name* stands in a scope, of which it cannot be a part."""
    if _stack.entries:
        raise failures.capture_failure(
            f"{name} is not a part of a program: it {why}",
            "call it before or after, with the handles that the program takes or returns",
        )


@contextlib.contextmanager
def entered(scope: Body | Recorder) -> Iterator[None]:
    """Make *scope* the innermost one for a while."""
    _stack.entries.append(scope)
    try:
        yield
    finally:
        _stack.entries.pop()
