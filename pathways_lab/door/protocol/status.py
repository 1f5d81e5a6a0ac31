"""Codes of an answer that says why there is none: those of gRPC, which JAX's client has too."""

from __future__ import annotations

CANCELLED, INVALID, NOT_FOUND, EXHAUSTED, FAILED_PRECONDITION = 1, 3, 5, 8, 9
UNIMPLEMENTED, INTERNAL, UNAVAILABLE, DATA_LOSS, UNAUTHENTICATED = 12, 13, 14, 15, 16


class Status(Exception):
    """An answer that says why there is none."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = code
