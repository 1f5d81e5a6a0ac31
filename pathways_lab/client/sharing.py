"""Handles under a name, from one notebook to another.

Problem: what one notebook has made is readable by nobody else, which is right
until somebody wants to pass it on.  A published handle is described here, in a
few words that the control plane keeps and does not read, and made again, as a
handle of its own, by whoever takes it.

Rule for maintainers: what is taken comes from another client, so its description
is checked like any message; where it lies is told by the control plane.

Paper: section 4.2 (opaque handles), section 4.6 (ownership).
"""

from __future__ import annotations

import json
from typing import Any

from pathways_lab.client import failures
from pathways_lab.client.arrays import ArrayType
from pathways_lab.client.devices import Slice
from pathways_lab.client.handles import Handle
from pathways_lab.client.session import Session
from pathways_lab.core.layout import Layout
from pathways_lab.runtime.codec import pack, unpack


def publish(session: Session, name: str, handle: Handle) -> None:
    """Let other clients take *handle* by *name*.  Raises PathwaysError when refused."""
    if not isinstance(handle, Handle) or handle.session is not session:
        raise TypeError(
            f"only handles of this lab can be published, not {type(handle).__name__}: publish the"
            " leaves of a tree under names of their own"
        )
    about = {
        "shape": handle.shape,
        "dtype": handle.type.dtype,
        "weak": handle.type.weak,
        "layout": pack(handle.layout),
    }
    session.connection.questions.share("publish", name, handle.buffer, json.dumps(about).encode())


def take(session: Session, name: str) -> Handle:
    """A handle of this client's own to what is published under *name*."""
    connection = session.connection
    buffer = connection.new_buffer()
    try:
        answer = connection.questions.share("take", name, buffer)
    except BaseException:
        connection.drop(buffer.id)
        raise
    try:
        kind, layout = _described(json.loads(answer.about))
    except (KeyError, TypeError, ValueError) as error:
        connection.drop(buffer.id)
        raise failures.failure(
            "refused", f"what is published as {name!r} is described wrongly: {error!r}"
        ) from error
    assert answer.binding is not None
    on = Slice(answer.binding)
    connection.following.follow(on)
    on.name = f"{on.name} of {answer.binding.client}"
    return Handle(session, buffer, on.placed(kind, layout), name)


def _described(about: dict[str, Any]) -> tuple[ArrayType, Layout]:
    shape = tuple(int(size) for size in about["shape"])
    layout = unpack(Layout, about["layout"])
    return ArrayType(shape, str(about["dtype"]), bool(about["weak"])), layout
