"""The words of JAX's client on the standard error of the program.

Problem: the client of the proxy protocol warns of its connection when a door opens, and prints a
stack trace when one closes under arrays that are left.  Both are as they should be, and a cell of a
notebook shows them in red.

How: all that the process writes meanwhile goes to a file, and is passed on without these lines.

Rule for maintainers: for moments only.  The last words of a process that aborts must not lie in a
file.
"""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
import time
from collections.abc import Iterator

PATIENCE = 0.5
"""Seconds until the last words have come."""
_LINES = re.compile(
    rb"^[WI]\d{4} [^\n]*\b(?:grpc_\w+|rpc_helper)\.cc:\d+\][^\n]*\n"
    rb"(?:=== Source Location[^\n]*\n[^\n]*\n; Stack trace: [^\n]*\n)?"  # since JAX 0.11
    rb"(?:(?:\t[^\n]*)?\n)*(?:\*\*\* End stack trace \*\*\*\n+)?",
    re.MULTILINE,
)


def cleaned(text: bytes) -> bytes:
    """The text without the client's warnings."""
    return _LINES.sub(b"", text)


@contextlib.contextmanager
def clean(last: bytes = b"") -> Iterator[None]:
    """Keep the client's warnings of the block away from standard error.

    last: words of the last one; they are waited for, :data:`PATIENCE` at most.
    """
    with tempfile.TemporaryFile() as file:
        error = os.dup(2)
        os.dup2(file.fileno(), 2)
        try:
            yield
            deadline = time.monotonic() + PATIENCE
            while last not in _all_of(file.fileno()) and time.monotonic() < deadline:
                time.sleep(0.005)
        finally:
            os.dup2(error, 2)
            os.write(2, cleaned(_all_of(file.fileno())))
            os.close(error)


def _all_of(file: int) -> bytes:
    return os.pread(file, os.fstat(file).st_size, 0)
