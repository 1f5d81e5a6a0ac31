"""The client's own errors: what cannot be captured, asked for or answered, and why.

Problem: JAX's errors about traced values speak of tracing, which users of a
captured program have never heard of, and their tracebacks end inside JAX.
Every such error becomes a :class:`PathwaysError` that names the user's own
line, the rule and the remedy; exceptions that the user's own code raises keep
their type and gain a note.

Rule for maintainers: one function here per sentence that users read more than
once; the text names the thing, the value, the rule, and the remedy does work.

Paper: section 3 (what the compiled-function contract demands).
"""

from __future__ import annotations

import contextlib
import dataclasses
import traceback
import unicodedata
from collections.abc import Iterable, Iterator
from typing import Any, NoReturn

import jax
from jax.core import Tracer

from pathways_lab.client.code import source_lines
from pathways_lab.core.errors import Failure, PathwaysError
from pathways_lab.core.program.program import Line
from pathways_lab.runtime import jax_private

_COMPILED = "put it inside one compiled function (pw.jit), where JAX compiles it"
_AFTERWARDS = "use the value after the program has returned its handles"

ESCAPED = (
    "a stand-in of one program was used outside of it: it was kept in a global, an attribute"
    " or a closure",
    "return the value from its program, and pass the handle to the next one",
)
"""Message and remedy for a stand-in that outlived its capture."""

# The first class that matches wins: several derive from ConcretizationTypeError.
_REASONS: tuple[tuple[type[BaseException], str, str], ...] = (
    (
        jax.errors.TracerBoolConversionError,
        "Python control flow depends on the value of an array, and values come after the run",
        "pw.cond(value, f, g, *args) runs the nodes of one of two functions, and pw.until(done,"
        " body, state, at_most=n) repeats those of one; inside a compiled function: jax.lax.cond,"
        " jax.lax.while_loop or jnp.where; an argument that only Python reads is static"
        " (static_argnames)",
    ),
    (
        jax.errors.TracerArrayConversionError,
        "NumPy was asked for the value of an array, and values come after the run",
        f"use jax.numpy, or {_AFTERWARDS}",
    ),
    (
        jax.errors.TracerIntegerConversionError,
        "an array was used where Python needs a number (an index, a range, a shape),"
        " and values come after the run",
        "make it a Python int: static_argnames for an argument, a literal in a cell",
    ),
    (
        jax.errors.NonConcreteBooleanIndexError,
        "an array was indexed with a mask, so that the shape of the result depends on values",
        "use jnp.where(mask, x, fill), whose shape is known",
    ),
    (
        jax.errors.UnexpectedTracerError,
        *ESCAPED,
    ),
    (
        jax.errors.ConcretizationTypeError,
        "Python was asked for the value of an array, and values come after the run",
        _AFTERWARDS,
    ),
)


def failure(
    kind: str,
    message: str,
    remedy: str = "",
    *,
    line: Line | None = None,
    program: str = "",
    node: str = "",
    details: str = "",
) -> PathwaysError:
    """A PathwaysError from its parts; without *line* the caller's own one."""
    where = source_lines.of_caller() if line is None else line
    return PathwaysError(
        Failure(kind, message, remedy, program=program, node=node, line=where, details=details)
    )


def refused(
    message: str, remedy: str = "", *, line: Line | None = None, program: str = "", node: str = ""
) -> PathwaysError:
    """Something was asked for that cannot be, and nothing has changed."""
    return failure("refused", message, remedy, line=line, program=program, node=node)


@contextlib.contextmanager
def at(line: Line) -> Iterator[None]:
    """An error found in here, in code captured at *line*, is an error there, not at the caller."""
    try:
        yield
    except PathwaysError as error:
        known = error.failure.line
        if line.number and (known.file, known.number) == source_lines.place_of_caller():
            error.failure = dataclasses.replace(error.failure, line=line)
        raise


@contextlib.contextmanager
def at_caller() -> Iterator[None]:
    """A refusal in here, by parts that know no lines, is a refusal at the caller's line.

    Also a decorator, of functions that users call.
    """
    try:
        yield
    except PathwaysError as error:
        error.failure = told(error.failure).failure
        raise


def told(failure: Failure) -> PathwaysError:
    """The answer of the lab, at the caller's own line."""
    known = failure.line.number
    return PathwaysError(
        failure if known else dataclasses.replace(failure, line=source_lines.of_caller())
    )


def donated_to(node: str, line: Line) -> Failure:
    """A handle that is used after a node has consumed its array."""
    return Failure(
        "refused",
        f"this handle was donated to {node!r}, which may have overwritten it",
        "use the result of that call, or do not donate the argument",
        node=node,
        line=line,
    )


def not_sent(error: BaseException) -> Failure:
    """Why a call that did not leave has no value."""
    if isinstance(error, PathwaysError):
        return error.failure
    return Failure("cancelled", f"the call was interrupted before it was sent: {error!r}")


def capture_failure(
    message: str, remedy: str = "", *, line: Line | None = None, program: str = "", node: str = ""
) -> PathwaysError:
    """Code that cannot be captured."""
    return failure("capture", message, remedy, line=line, program=program, node=node)


def reraise(error: Exception, *, program: str = "", node: str = "", called: str = "") -> NoReturn:
    """Raise *error*, which ended a capture, as what users can act on.

    A PathwaysError stays, completed by program and node.  An exception that the
    user's own code raised stays too, with a note.  Whatever JAX or NumPy raised
    becomes a PathwaysError from it.  called: the call with its types.
    """
    line = source_lines.of_traceback(error.__traceback__)
    if not line.number:  # JAX or NumPy refused the call itself: no frame of the user's is inside
        line = source_lines.of_caller()
    if isinstance(error, PathwaysError):
        known = error.failure
        error.failure = dataclasses.replace(
            known,
            program=known.program or program,
            node=known.node or node,
            line=known.line if known.line.number else line,
        )
        raise error.with_traceback(source_lines.without_machinery(error.__traceback__))
    message, remedy = _meaning(error)
    if not message and source_lines.raised_by_user(error.__traceback__):
        where = " of ".join(filter(None, (node and f"node {node!r}", program and f"{program!r}")))
        if where and line.number:
            error.add_note(f"while Pathways Lab captured {where}, at {line.told}")
        raise error.with_traceback(source_lines.without_machinery(error.__traceback__))
    if not message:
        message = f"{type(error).__name__}: {_first_paragraph(error)}"
        message += f", in the call {called}" if called else ""
    details = "".join(traceback.format_exception(error))
    raise failure(
        "capture", message, remedy, line=line, program=program, node=node, details=details
    ) from error


def _meaning(error: Exception) -> tuple[str, str]:
    """Message and remedy for what JAX says of values that do not exist yet; else empty."""
    for kind, message, remedy in _REASONS:
        if isinstance(error, kind):
            return message, remedy
    return _in_other_words(error)


def _in_other_words(error: Exception) -> tuple[str, str]:
    """The same for errors without a class of their own."""
    text = _first_paragraph(error)
    if isinstance(error, TypeError) and "await" in text and "Tracer" in text:
        return (
            "a program cannot wait for a value: await needs the result of the run",
            "await the handle after the program has returned it",
        )
    if isinstance(error, TypeError) and "format string" in text and "Tracer" in text:
        return (
            "a value was formatted before it exists: values come after the run",
            "print it without a format, or after the program has returned its handles",
        )
    if isinstance(error, TypeError) and "forward-mode" in text and "custom_vjp" in text:
        return (
            "jax.jvp cannot look into a compiled function: a call in a program has gradients"
            " (jax.grad, jax.vjp, jax.jacrev), and no forward mode",
            "put it inside one compiled function: pw.jit(lambda x, dx: jax.jvp(f, (x,), (dx,)))",
        )
    if isinstance(error, ValueError) and "set_mesh" in text and "outside" in text:
        return (
            "a program cannot enter a mesh: jax.set_mesh stands inside of it",
            "put the with statement around the call of the program, or name the mesh where it is"
            " needed (slice.sharding(spec), shard_map(mesh=slice.mesh))",
        )
    if isinstance(error, AttributeError) and ("Tracer" in text or "traced array" in text):
        return (
            f"inside a program a value is only its shape and dtype ({text})",
            _AFTERWARDS,
        )
    return "", ""


def _first_paragraph(error: Exception) -> str:
    """An error's text up to the first empty line: what follows is JAX's advice on tracing."""
    return " ".join(str(error).split("\n\n", 1)[0].split())


def check_axes(names: Iterable[Any]) -> None:
    """Raises PathwaysError for names of mesh axes that would end who compiles for the mesh."""
    for name in names:
        if isinstance(name, str) and not name.isascii():
            raise refused(
                f"{name!r} cannot be the name of a mesh axis: XLA ends the process that compiles"
                " for a mesh with a name that is not ASCII",
                f"for example {_plain(name)!r}",
            )


def _plain(name: str) -> str:
    """A name like this one, in ASCII."""
    parts = unicodedata.normalize("NFKD", name.replace("ß", "ss"))
    return parts.encode("ascii", "ignore").decode().strip() or "x"


PUT = "device_put, which puts values on devices"


def in_transformation(
    transformation: str, *, program: str = "", node: str = "", thing: str = PUT
) -> PathwaysError:
    """A program, a compiled function or else *thing* met jax.grad, jax.vmap or jax.jit."""
    if program:
        thing = f"the program {program!r}, which is one run"
    elif node:
        thing = f"the compiled function {node!r}, which is one node"
    remedy = _COMPILED
    if transformation.startswith("jax."):
        remedy += f": pw.jit({transformation}(f)), where f is plain Python"
    if transformation in ("jax.grad", "jax.vmap"):
        remedy += f"; or a program, pw.program({transformation}(f)), which looks into calls"
    return capture_failure(
        f"{transformation} cannot look into {thing}",
        remedy,
        program=program,
        node=node,
    )


def check_values(leaves: Iterable[Any], *, program: str = "", node: str = "") -> None:
    """Raises PathwaysError for a stand-in of JAX's where a call needs values.

    A transformation stands around the call, or the stand-in was kept when its program was over.
    """
    for leaf in leaves:
        if isinstance(leaf, Tracer):
            transformation = jax_private.transformation_of(leaf)
            if transformation:
                raise in_transformation(transformation, program=program, node=node)
            raise capture_failure(*ESCAPED, program=program, node=node)
