"""A call of one compiled function that a lab makes to look at it, once or several times.

Problem: such a call is not part of the user's computation.  So it is of one function and no
program, on a slice of this lab, and leaves its arguments as they are.

Rule for maintainers: everything is refused before anything runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from pathways_lab.client.functions.jit import BoundCall, CompiledFunction
from pathways_lab.client.lab import slice_request
from pathways_lab.client.lab.devices import Slice
from pathways_lab.client.program.calls import session_of, slice_of_call
from pathways_lab.client.program.program import ProgramFunction
from pathways_lab.client.session import failures
from pathways_lab.client.session.session import Session


class Asked(NamedTuple):
    """Words for errors.

    method: what was called.  parameter: its argument that is the function.
    program, donated: why it takes no program, and nothing that is donated.
    instead: what to do with the function.
    """

    method: str
    parameter: str
    program: str
    donated: str
    instead: str


def bound(
    session: Session,
    asked: Asked,
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> tuple[BoundCall, Slice]:
    """The call, and where it runs.  Raises PathwaysError for what cannot be looked at."""
    if isinstance(function, ProgramFunction):
        raise failures.refused(
            f"{function!r} is a program, and {asked.program}",
            f"give {asked.method} one of its compiled functions, with what that is called with",
        )
    function = slice_request.function(asked.parameter, function)
    if not isinstance(function, CompiledFunction):
        function = CompiledFunction(function)
    call = function.bind(tuple(args), dict(kwargs))
    place, name = slice_of_call(call), function.name
    if session_of(place) is not session:
        what = f"{name!r} runs on slice {place.name} of another lab"
        raise failures.refused(what, f"ask that one: its own {asked.method}(...)")
    if call.body.donated:
        given = ", ".join(call.body.labels[number] for number in call.body.donated)
        raise failures.refused(
            f"{name!r} donates {given}, {asked.donated}",
            f"{asked.instead} without donate_argnums: pw.jit(f, ...)",
            node=name,
        )
    return call, place
