"""Handles under a name, from one notebook to another, and what each client has and may have.

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

from pathways_lab.client import failures, requests
from pathways_lab.client.accounts import Accounts
from pathways_lab.client.arrays import ArrayType
from pathways_lab.client.devices import Slice
from pathways_lab.client.handles import Handle
from pathways_lab.client.requests import bytes_of
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
    handle.buffer.shared = True
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


class Sharing:
    """The part of a lab that has to do with its other clients."""

    session: Session

    def publish(self, name: str, handle: Handle) -> None:
        """Let other clients of the lab take *handle* by *name*; nobody can read it otherwise.

        name: 1 to 200 characters; using it again for a newer handle moves it.

        The array stays on its devices, also when this handle dies, until the name
        is taken back (:meth:`unpublish`), moved, or this client leaves.  Those who
        have taken it until then keep it, even longer than this client stays (but a
        value that is still to be computed then fails with this client's run).  As
        long as anybody else has it, it cannot be donated.

        Raises PathwaysError when the name is another client's, or the handle is dead.

        >>> lab.publish("weights", w)                        # doctest: +SKIP
        >>> w = lab.take("weights")       # in another notebook; doctest: +SKIP
        """
        publish(self.session, requests.name("name", name), handle)

    def unpublish(self, name: str) -> None:
        """Take a name back.  Who has taken the handle keeps it."""
        self.session.connection.questions.share("unpublish", requests.name("name", name))

    def take(self, name: str) -> Handle:
        """A handle to what another client has published as *name*, at once.

        It is read like any handle (its value may still come), and can be given to
        compiled functions and programs on slices of this client: then it moves
        there.  It counts on its devices until this handle dies too.

        Raises PathwaysError when nothing has this name; it says what there is.
        """
        return take(self.session, requests.name("name", name))

    @property
    def published(self) -> dict[str, str]:
        """What can be taken: names, and which client has published each."""
        return dict(self.session.connection.topology["published"])

    def accounts(self) -> Accounts:
        """What every client has used since the lab began, and may have; a table.

        Gangs, device seconds, bytes between islands, bytes on devices now and over
        time (GB seconds).  The control plane counts them; the rows add up to the last.
        """
        return Accounts.of(self.session.connection.questions.ask("accounts", {})["rows"])

    def quota(
        self, client: str = "", *, devices: int | None = None, bytes: int | str | None = None
    ) -> None:
        """Limit what a client may have at a time; only owners of the lab can.

        client: its name, also before it is there; "": everybody without a quota of his own.
        devices: of all its slices together.  bytes: on all its devices together,
            memory that is reserved for its runs included; also text like ``"2 GB"``.
            None: no limit.

        Nothing is taken away.  What would exceed a quota waits until the client has
        less: slices in line, runs and uploads with the others that wait for memory.
        What never could be is refused, with the numbers.

        >>> lab.quota("student-3", devices=4, bytes="2 GB")  # doctest: +SKIP
        """
        if devices is not None:
            devices = requests.count("devices", devices, least=0)
        nbytes = None if bytes is None else bytes_of(bytes, "bytes")
        fields = {"whom": requests.name("client", client), "devices": devices, "nbytes": nbytes}
        self.session.connection.questions.ask("quota", fields)
