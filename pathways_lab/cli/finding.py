"""The report of one check of the doctor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Finding:
    """state: ``"ok"``; ``"note"`` for something optional that is absent; ``"warn"`` for what
    will hurt later; ``"FAIL"`` for what the lab cannot run without.

    what: the thing and its value.  remedy: what to do, or "".
    """

    state: Literal["ok", "note", "warn", "FAIL"]
    what: str
    remedy: str = ""
