"""The failures of gangs: each names the gang, the device and the user's line.

Problem: JAX, user code and other hosts raise errors of many types, some of them with a
traceback in their text; a user needs the line that says most.

Rule for maintainers: a failure that comes with an error is kept, and only completed.

Paper: section 4.6 (errors).
"""

from __future__ import annotations

import re
import traceback
from dataclasses import replace

from pathways_lab.core.errors import Failure, PathwaysError
from pathways_lab.core.program.program import Call, Plan

_LAST_ERROR = re.compile(r"^(?:\w+\.)*\w*(?:Error|Exception|Interrupt|Warning)\b.*", re.MULTILINE)


class CallbackError(RuntimeError):
    """User code that a gang called back raised on a device."""

    def __init__(self, device: int, error: BaseException) -> None:
        super().__init__(f"{type(error).__name__}: {error}")
        self.device = device
        self.__cause__ = error


def doom(why: Failure, plan: Plan, call: Call, host: str) -> Failure:
    """Why devices are formed again, as the failure of one of their gangs."""
    return replace(why, program=plan.name, node=call.name, host=host, line=call.line)


def missing(call: Call, host: str) -> PathwaysError:
    """It should not have been granted."""
    name = call.name or call.function
    return PathwaysError(
        Failure("internal", f"{name} was launched on {host} but never compiled there")
    )


def failure_in(error: BaseException, plan: Plan, call: Call, host: str) -> Failure:
    """The failure of a gang, with everything that is known."""
    known = error.failure if isinstance(error, PathwaysError) else None
    device = known.device if known else getattr(error, "device", None)
    return Failure(
        known.kind if known else "execute",
        known.message if known else f"{call.name or 'a gang'} failed: {summary(error)}",
        known.remedy if known else "",
        program=plan.name,
        node=call.name,
        host=known.host or host if known else host,
        device="" if device is None else str(device),
        line=call.line,
        details="".join(traceback.format_exception(error)),
    )


def summary(error: BaseException) -> str:
    """The line of an error that says most: of a remote traceback in it, the last one."""
    text = str(error).strip() or type(error).__name__
    if "Traceback (most recent call last)" in text:
        found = _LAST_ERROR.findall(text)
        if found:
            return str(found[-1]).strip()
    return text.splitlines()[0]
