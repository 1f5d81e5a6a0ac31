"""Handles under a name, from one notebook to another, and what each client has and may have.

Problem: what one notebook has made is readable by nobody else, which is right
until somebody wants to pass it on.  A published handle, or a tree of them, is described
(:mod:`.session.descriptions`) in words that the control plane keeps and does not read,
and made again, of handles of its own, by whoever takes it.  A publication that is *kept* stays
when this client leaves, for the next one of its name (:mod:`pathways_lab.core.slices.keeping`).

Rule for maintainers: what is taken comes from another client; where it lies is told by the
control plane.

Paper: section 4.2 (opaque handles), section 4.6 (ownership).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import jax

from pathways_lab.client.lab import hooks, slice_request
from pathways_lab.client.lab.accounts import Accounts
from pathways_lab.client.lab.devices import Slice
from pathways_lab.client.lab.slice_request import bytes_of
from pathways_lab.client.parts import Parts
from pathways_lab.client.session import failures
from pathways_lab.client.session.descriptions import Place, describe, read
from pathways_lab.client.session.handles import Handle
from pathways_lab.client.session.pending import Buffer
from pathways_lab.client.session.session import Session, buffer_of
from pathways_lab.core.errors import Failure
from pathways_lab.core.slices.topology import SliceBinding
from pathways_lab.runtime.control_plane.directory import why_no_name
from pathways_lab.runtime.processes.program_environment import environment
from pathways_lab.transport.codec import unpack
from pathways_lab.transport.deferred_signals import HeldBack


def publish(
    session: Session, name: str, tree: Any, keep: bool = False, to: str = "", ahead: bool = False
) -> None:
    """Let other clients take *tree* by *name*.  Raises PathwaysError when refused.

    keep: when all of it is there, and so that it stays when this client leaves.
    ahead: before it is there; the runs that make it go on when this client leaves.
    to: the one client that may take it.
    """
    fields, about = _shared(session, name, tree, to)
    if keep:
        fields |= {"keep": True, "ahead": ahead}
    ask = session.connection.questions.ask
    ask("publish", fields, None if keep else 60.0, [about], f"values to keep as {name!r}")


def give(
    session: Session, name: str, tree: Any, to: str, refused: Callable[[Failure], None]
) -> None:
    """Let one client take *tree*, and go on at once; see :meth:`.requests.Questions.tell`."""
    fields, about = _shared(session, name, tree, to)
    session.connection.questions.tell("publish", fields, refused, [about])


def _shared(session: Session, name: str, tree: Any, to: str) -> tuple[dict[str, Any], bytes]:
    handles, about = describe(tree)
    buffers = [buffer_of(handle, session) for handle in handles]
    for buffer in buffers:
        buffer.shared = True
    fields = {"name": name, "buffers": [buffer.id for buffer in buffers]}
    return {**fields, "to": to} if to else fields, about


def take(session: Session, name: str, patience: float | None = 0.0, giver: str = "") -> Any:
    """Handles of this client's own to what is published under *name*, for it or for all.

    patience: seconds to wait for the name; None: as long as it takes.
    giver: the client that has given it; "": anybody's.
    """
    connection = session.connection

    def given() -> tuple[str, str]:
        """The key of a gift of this name; without one a key of nothing."""
        found = () if giver else (key for key in tuple(connection.given) if key[1] == name)
        return next(iter(found), (giver, name))

    if patience != 0:
        with contextlib.suppress(TimeoutError):
            connection.board.wait(
                lambda: (
                    connection.closed is not None
                    or given() in connection.given
                    or name in connection.topology["published"]
                ),
                patience,
                f"a publication of {name!r}",
            )
    key = given()
    gift = connection.given.pop(key, None)
    if gift is None:
        count = connection.questions.ask("named", {"name": name}).fields["count"]
    else:
        count = len(gift.fields["stored"])
    buffers: list[Buffer] = []
    try:
        with HeldBack():
            buffers += [connection.new_buffer() for _ in range(count)]
        fields: dict[str, Any] = {"name": name, "buffers": [buffer.id for buffer in buffers]}
        if gift is None:
            answer = connection.questions.ask("take", fields)
            made = _handles(session, name, buffers, answer.fields, answer.buffers[0])
        else:
            # First, whatever its words come to: then it has ended.
            lose = functools.partial(connection.board.settle, buffers)
            connection.questions.tell("take", {**fields, "giver": key[0]}, lose)
            made = _handles(session, name, buffers, gift.fields, gift.about)
    except BaseException as error:
        connection.drop(*[buffer.id for buffer in buffers])
        if isinstance(error, IndexError | KeyError | RecursionError | TypeError | ValueError):
            raise failures.refused(
                f"what is published as {name!r} is described wrongly: {error!r}"
            ) from error
        raise
    return made


def _handles(
    session: Session, name: str, buffers: Sequence[Buffer], fields: dict[str, Any], about: bytes
) -> Any:
    kinds, tree = read(about, len(buffers))
    paths = {
        leaf.number: jax.tree_util.keystr(path)
        for path, leaf in jax.tree.leaves_with_path(tree)
        if isinstance(leaf, Place)
    }
    bindings = [unpack(SliceBinding, packed) for packed in fields["bindings"]]
    places = {binding.slice: _place(session, binding) for binding in bindings}
    handles = []
    for number, (buffer, kind) in enumerate(zip(buffers, kinds, strict=True)):
        buffer.stored, buffer.ticket = fields["stored"][number], fields["tickets"][number]
        on = places[fields["slices"][number]]
        handles.append(Handle(session, buffer, on.placed(*kind), name + paths.get(number, "")))
    return jax.tree.map(
        lambda leaf: handles[leaf.number] if isinstance(leaf, Place) else leaf, tree
    )


def _place(session: Session, binding: SliceBinding) -> Slice:
    """The slice of this number: of this client's own, or of another client's."""
    following = session.connection.following
    known = following.known(binding.slice)
    if known is not None:
        following.bound(binding)
        return known
    on = Slice(binding)
    on.taken, on.name = True, f"{on.name} of {binding.client}"
    return following.follow(on)


class Kept(Mapping[str, Any]):
    """The values that this client keeps on its lab, by name; each look takes handles of its own."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def __getitem__(self, name: str) -> Any:
        # A name that nobody has is the control plane's to refuse: it says what there is.
        return take(self._session, name)

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    @property
    def _names(self) -> list[str]:
        connection = self._session.connection
        published, kept = connection.topology["published"], connection.topology.get("kept", ())
        return [name for name in kept if published.get(name) == connection.name]

    def __len__(self) -> int:
        return len(self._names)

    def __repr__(self) -> str:
        return f"<kept by {self._session.connection.name}: {', '.join(self) or 'nothing'}>"


class Sharing(Parts):
    """The part of a lab that has to do with its other clients."""

    def door(
        self, name: str = "", *, slice_index: bool = False
    ) -> AbstractContextManager[dict[str, str]]:
        """Variables of the environment with which other programs' JAX is this lab.

            with lab.door() as variables:
                subprocess.run([sys.executable, "train.py"], env=os.environ | variables)

        name: what a program is called on the lab; without one by a number, and any number of
            programs may have the same variables.
        slice_index: each device has the number of its island as ``slice_index``, for
            ``mesh_utils.create_hybrid_device_mesh``.  ``jax.make_mesh`` then refuses meshes over
            several islands, so a plain script had better see none.

        Each program is a client of its own.  They are good on this machine and for this account,
        and until the block ends: they name a lab file.  Raises PathwaysError when the lab is gone.
        """
        self.session.connection.check()
        return environment(self.invite, name, slice_index)

    def open_door(self, name: str = "", *, slice_index: bool = False) -> Any:
        """Make this lab's devices those of JAX in this process: ``jax.devices()``.

            with lab.open_door() as door:
                y = jax.jit(step)(x)                  # on the lab
                params = door.array(params)           # hundreds of handles in one message

        name: of one more client of the lab, which runs what JAX runs; without one by a number.
        slice_index: as of :meth:`door`.

        JAX needs no such block to compute with handles and on slices: see the documentation of the
        door.  JAX may have been used before: ``jax.devices("cpu")`` are still there, and arrays
        from before may be arguments of calls on the lab.

        The end of the block gives JAX the devices of before.  ``door.close()``, and the end of a
        block before which JAX did not need the lab, also deletes JAX's arrays on the lab, and ends
        that client.  Raises PathwaysError within such a block, when JAX has the devices of another
        lab, and when it has these without *name* or *slice_index* already.
        """
        self.session.connection.check()
        if hooks.open_door is None:
            raise failures.refused("no door is there", "import pathways_lab as pw")
        return hooks.open_door(self, name, slice_index, lead=True)

    def publish(self, name: str, tree: Any, *, to: str = "") -> None:
        """Let other clients of the lab take *tree* by *name*; nobody can read it otherwise.

        name: 1 to 200 characters; using it again for something newer moves it.
        tree: a handle, or a tree of handles in dicts, lists and tuples; what was taken from
            others may be among them.  It goes as a whole: whoever takes it gets all of one
            publication, never a mixture of two.
        to: a client, by its name.  It alone can take this, once, and nobody else learns of it.

        The arrays stay on their devices, also when these handles die, until the name
        is taken back (:meth:`unpublish`), moved, or this client leaves.  Those who
        have taken them until then keep them, even longer than this client stays (but a
        value that is still to be computed then fails with this client's run).  As
        long as anybody else has it, an array cannot be donated.

        Raises PathwaysError when the name is another client's, or a handle is dead.

        >>> lab.publish("weights", {"w": w, "b": b})         # doctest: +SKIP
        >>> weights = lab.take("weights")       # in another notebook; doctest: +SKIP
        """
        name, to = slice_request.name("name", name), to and slice_request.name("to", to)
        publish(self.session, name, tree, to=to)

    def keep(self, **trees: Any) -> None:
        """Have values outlive this kernel: they stay on their devices when it ends, or is killed.

        trees: by name, a handle or a tree of handles, as for :meth:`publish`.  Returns when they
            are there and kept, and those that were kept under these names before are not any more.
            Each name goes as a whole: what belongs together belongs under one name.

        The next client of this one's name (``lab.name``) finds them in :attr:`kept`, and its slices
        in ``lab.slices``: nothing moves, and functions that are compiled for them are not compiled
        again.  They count on the account of this name, and in its quotas, until :meth:`unpublish`;
        other clients may take them meanwhile, like anything published.  Runs that are under way end
        with this kernel, but for those that :meth:`detach` names.  Values end with their hosts, and
        with the lab: keep the lab itself with ``pw.start(keep=...)``.

        Raises PathwaysError when a value fails, and for a client without a name of its own.

        >>> lab = pw.start(keep="mine")                      # doctest: +SKIP
        >>> lab.keep(state=state)       # and the kernel may die; doctest: +SKIP
        >>> state = pw.connect("mine").kept["state"]         # doctest: +SKIP
        """
        self._keep(trees, ahead=False)

    def detach(self, **trees: Any) -> None:
        """Have values outlive this kernel that are still to come: their runs go on without it.

        trees: as for :meth:`keep`.  Returns when what the runs need of this kernel (the arrays that
            it uploads) is on devices, and not when they have begun.

        All runs that make these values go on where they stand, also those that wait for their turn,
        on the account of this client's name and in its quotas.  Its next client finds the values in
        :attr:`kept` and waits for them there; when a run has failed, looking there raises why.
        ``lab.cancel(lab.kept["out"])`` cancels the runs.

        Raises PathwaysError when a value has failed, and for a client without a name of its own.

        >>> lab.detach(state=train(state))    # and the kernel may restart; doctest: +SKIP
        >>> state = pw.connect("mine").kept["state"].result()        # doctest: +SKIP
        """
        self._keep(trees, ahead=True)

    def _keep(self, trees: dict[str, Any], ahead: bool) -> None:
        name = self.session.connection.name
        if why_no_name(name):
            raise failures.refused(
                f"{name!r} is a name that the lab has given this client: nobody could come back by"
                " it for what it keeps",
                'come with a name of your own: pw.connect(..., name="ann"), pw.start(keep="mine")',
            )
        for key, tree in trees.items():
            publish(self.session, key, tree, keep=True, ahead=ahead)

    @property
    def kept(self) -> Kept:
        """The values that are kept for this client's name, by name, as handles of its own.

        >>> state = lab.kept["state"] if "state" in lab.kept else init()   # doctest: +SKIP
        """
        return Kept(self.session)

    def unpublish(self, name: str) -> None:
        """Take a name back.  Clients that have taken the handle keep it."""
        self.session.connection.questions.ask(
            "unpublish", {"name": slice_request.name("name", name)}
        )

    def take(self, name: str, wait: bool | float = False) -> Any:
        """A handle to what another client has published as *name*, or the tree of them, at once.

        wait: for somebody to publish it, if nobody has (True: as long as it takes, or so many
            seconds).

        A handle is read like any other (its value may still come), and can be given to
        compiled functions and programs on slices of this client: then it moves
        there.  It counts on its devices until this handle dies too.

        Raises PathwaysError when nothing has this name; it says what there is.
        """
        patience = slice_request.patience("wait", wait)
        return take(self.session, slice_request.name("name", name), patience)

    @property
    def published(self) -> dict[str, str]:
        """The names that this client can take, and the client that published each."""
        connection = self.session.connection
        given = {name: giver for giver, name in tuple(connection.given)}
        return {**connection.topology["published"], **given}

    def accounts(self) -> Accounts:
        """A table of each client's use since the lab began, and of its quotas.

        Gangs, device seconds, bytes between islands, bytes on devices now and over
        time (GB seconds).  The control plane counts them; the rows add up to the last.
        """
        return Accounts.of(self.session.connection.questions.ask("accounts", {}).fields["rows"])

    def quota(
        self, client: str = "", *, devices: int | None = None, bytes: int | str | None = None
    ) -> None:
        """Limit what a client may have at a time; only owners of the lab can.

        client: its name, also before it is there; "": everybody without a quota of his own.
        devices: of all its slices together.  bytes: on all its devices together,
            memory that is reserved for its runs included; also text like ``"2 GB"``.
            None: no limit.

        Nothing is taken away.  A request beyond a quota waits until the client has
        less: slices in line, runs and uploads with the others that wait for memory.
        A request that a quota can never hold is refused, with the numbers.

        >>> lab.quota("student-3", devices=4, bytes="2 GB")  # doctest: +SKIP
        """
        if devices is not None:
            devices = slice_request.count("devices", devices, least=0)
        nbytes = None if bytes is None else bytes_of(bytes, "bytes")
        fields = {
            "whom": slice_request.name("client", client),
            "devices": devices,
            "nbytes": nbytes,
        }
        self.session.connection.questions.ask("quota", fields)
