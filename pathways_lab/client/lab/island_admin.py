"""Islands that come and go, and clients whose slices leave their devices for a while.

Problem: a machine is not the same all day.  The owner of a lab adds an island
before a demonstration, takes one away for something else, or has a colleague's
long training step aside for an hour, and nobody else's code should change.

Rule for maintainers: thin; who may, when, and what becomes of values is decided
by the core (:mod:`pathways_lab.core.slices.migration`).

Paper: section 4.1 (resources are added and removed), section 4.2 (suspend,
resume, migration of a client's slices).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jax.sharding import PartitionSpec as P

from pathways_lab.client.lab import slice_request
from pathways_lab.client.lab.tags import Tag
from pathways_lab.client.lab.topology_view import Island
from pathways_lab.client.parts import Parts
from pathways_lab.client.session import failures
from pathways_lab.client.training.elastic_loop import Elastic
from pathways_lab.core.program.program import SliceId
from pathways_lab.core.slices.topology import SliceBinding

if TYPE_CHECKING:
    from pathways_lab.runtime.cluster.embedded import EmbeddedCluster

_SECONDS = 60.0


class Takeaway(tuple[str, ...]):
    """The slices and clients that a change affects, in words: one line each."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "\n".join(self) or "nothing was there"

    def _repr_html_(self) -> str:
        import html

        return "<br>".join(html.escape(line) for line in self) or "nothing was there"


class Elasticity(Parts):
    """The methods of a lab that change its machine: mixed into :class:`pathways_lab.Lab`."""

    # --- islands ---------------------------------------------------------------------------

    def add_island(
        self,
        name: str | None = None,
        *,
        hosts: int | None = None,
        devices_per_host: int | None = None,
    ) -> Island:
        """Start one more island of an embedded lab; it is there when this returns.

        name: default ``island`` and the next number.
        hosts, devices_per_host: default as the first islands have.

        On a Dask cluster of your own, scale that instead: its new workers become
        hosts by themselves (which island: :mod:`pathways_lab.runtime.cluster.membership`).
        Raises PathwaysError when memory does not suffice; then all is as before.
        """
        embedded = self._embedded("add an island to")
        there = {island.name for island in self.islands}
        down = {each["island"]: each for each in self.session.connection.down}
        if hosts is not None:
            hosts = slice_request.count("hosts", hosts)
        if devices_per_host is not None:
            devices_per_host = slice_request.count("devices_per_host", devices_per_host)
        if name is None:
            name = next(
                n for n in (f"island{i}" for i in range(10_000)) if n not in there and n not in down
            )
        slice_request.name("name", name)
        if name in there:
            raise failures.refused(f"there is an island {name!r} already", "choose another name")
        if name in down:
            raise failures.refused(
                f"there is an island {name!r} already: {down[name]['name']} is down:"
                f" {down[name]['told']}",
                f"lab.restart({name!r}), or lab.remove_island({name!r}) first",
            )
        embedded.add_island(name, hosts, devices_per_host)
        wanted = hosts or embedded.recipe.hosts

        def found() -> list[Island]:
            return [i for i in self.islands if i.name == name and len(i.hosts) == wanted]

        self._wait(lambda: bool(found()), f"island {name}")
        return found()[0]

    def remove_island(
        self, name: str, *, anyway: bool = False, timeout: float | None = _SECONDS
    ) -> Takeaway:
        """Take an island of an embedded lab away; what it took with it, in words.

        anyway: also when somebody has slices there.  They are lost, with the values
            on them, after what is running there has ended.
        timeout: seconds to wait for that (None: as long as it takes).

        Raises PathwaysError, naming everybody's slices there, unless *anyway*;
        TimeoutError when what runs there takes longer: the island takes nothing new,
        and asking again waits on.

        On a Dask cluster of your own: ``client.retire_workers(...)``, or scale down.
        """
        embedded = self._embedded("take an island from")
        fields = {"island": slice_request.name("name", name), "anyway": bool(anyway)}
        lines: tuple[str, ...] = ()
        if any(island.name == name for island in self.islands) or not self._down(name):
            lines = self._ask("leave", fields, f"the end of what runs on {name}", timeout)
        embedded.remove_island(name)
        self._wait(
            lambda: all(island.name != name for island in self.islands) and not self._down(name),
            f"the end of island {name}",
        )
        return Takeaway(lines)

    def _ask(
        self, op: str, fields: dict[str, Any], what: str, timeout: float | None
    ) -> tuple[str, ...]:
        """Ask, and wait until it is done: what it was done to, in words."""
        answer = self.session.connection.questions.ask(op, fields, timeout, what=what)
        return tuple(answer.fields["lines"])

    def restart(self, name: str, *, timeout: float | None = _SECONDS) -> tuple[Island, ...]:
        """Give an island, or one host, new device processes; they are there when this returns.

        name: of an island or a host, also of one that is down because its process ended again
            and again (``lab.stuck()`` names those, and why).
        timeout: seconds to wait for them (None: as long as it takes).

        Handles on hosts that lived fail.  Returns the islands.  Only owners of the lab can do
        it.  Raises PathwaysError with the reason when a process ends again and again.

        >>> lab.restart("island0")                           # doctest: +SKIP
        """
        connection = self.session.connection
        fields = {"name": slice_request.name("name", name)}
        before: dict[str, int] = connection.questions.ask("restart", fields).fields["hosts"]

        def found() -> bool:
            hosts = {host.name: host.pid for island in self.islands for host in island.hosts}
            return all(hosts.get(name, pid) != pid for name, pid in before.items())

        def given_up() -> list[str]:
            return [d["told"] for d in connection.down if d["name"] in before and not d["again"]]

        self._wait(lambda: found() or bool(given_up()), f"new processes of {name}", timeout)
        if not found():
            raise failures.failure("lost", f"{name} is down again: {given_up()[0]}")
        names = {host.partition("/")[0] for host in before}
        return tuple(island for island in self.islands if island.name in names)

    def _down(self, island: str) -> bool:
        """Whether an island has hosts without a device process."""
        return any(each["island"] == island for each in self.session.connection.down)

    def _embedded(self, what: str) -> EmbeddedCluster:
        self.session.connection.check()
        if self.embedded is None:
            raise failures.refused(
                f"this lab was not started here, so you cannot {what} it here",
                "scale its Dask cluster: workers that come become hosts, and those that"
                " retire end what runs on them first",
            )
        return self.embedded

    def _wait(self, done: Callable[[], bool], what: str, seconds: float | None = _SECONDS) -> None:
        """The topology comes as a message, which may be behind what was waited for."""
        self.session.connection.board.wait(done, seconds, what)

    # --- slices ----------------------------------------------------------------------------

    def suspend(self, client: str, *, timeout: float | None = _SECONDS) -> Takeaway:
        """Have a client's slices give their devices to others, without its help.

        client: its name (``lab.clients``).  timeout: seconds to wait for what is
        running there (None: as long as it takes).

        Runs there end first; then the values go into the memory of the hosts.
        It can read its handles, upload and submit as always, and its runs wait.
        Returns what was suspended.  See :meth:`resume`.
        """
        what = f"the end of what runs on the slices of {client}"
        fields = {"whose": slice_request.name("client", client)}
        return Takeaway(self._ask("suspend", fields, what, timeout))

    def resume(
        self, client: str, *, island: str | None = None, timeout: float | None = _SECONDS
    ) -> Takeaway:
        """Give a suspended client devices again, with its values on them; its runs go on.

        island: where; None: where it was, if nobody shares those devices more than
            others, else wherever there is room.
        timeout: seconds to wait for that (None: as long as it takes).

        Results are the same, bit for bit.  Raises PathwaysError, and leaves all as
        it is, when there are not devices or bytes enough for all its slices.
        """
        what = f"the values of {client} to be on devices again"
        fields = {
            "whose": slice_request.name("client", client),
            "island": slice_request.name_or_none("island", island),
        }
        return Takeaway(self._ask("resume", fields, what, timeout))

    def rebind_slice(self, slice_id: SliceId, island: str | None) -> SliceBinding:
        """Other devices for a lost slice (see :meth:`Slice.rebind`)."""
        return self.session.connection.questions.rebind_slice(
            slice_id, slice_request.name_or_none("island", island)
        )

    def slice_state(self, slice_id: SliceId) -> str:
        """``"bound"``, ``"suspended"`` or ``"lost"``, as last told."""
        return str(self.session.connection.topology["away"].get(slice_id, "bound"))

    # --- training ---------------------------------------------------------------------------

    def elastic(
        self,
        train_step: Callable[..., Any],
        state: Any,
        batches: Iterable[Any],
        *,
        update: Callable[..., Any] | None = None,
        islands: Sequence[str] | None = None,
        devices: int | None = None,
        parts: int | None = None,
        replicas: int = 2,
        every: int = 10,
        ahead: int = 1,
        start: int = 0,
        state_sharding: Any = None,
        batch_sharding: Any = None,
        priority: int | None = None,
        data: Mapping[str, Any] | None = None,
    ) -> Elastic:
        """A training loop that goes on when islands are lost, and uses those that come back.

        >>> for step, state, loss in lab.elastic(gradients, params, batches, update=sgd):
        ...     print(step, loss)                            # doctest: +SKIP

        train_step: plain JAX.  With *update*, ``train_step(state, part)`` returns
            gradients and something small (a loss), every batch is cut along its first
            axis into *parts* (default: the number of islands), which the islands share,
            and ``update(state, gradients)``, of the mean, makes the new state on each of
            them.  Without, ``train_step(state, batch)`` returns the new state and
            something small; one island computes, and others keep copies.
        state: a pytree of arrays or handles.  batches: pytrees of arrays, one per step.
        islands: their names (None: all, also those that join later).  One that a lease or
            a quota keeps from the loop joins when it is free.
        devices: of each island that computes (default: those of the smallest).
        replicas, every: every so many steps the state is kept on so many islands.
        ahead: so many steps are submitted before the one that is waited for.
        start: the number of the first step, of a loop that goes on where another one ended;
            the batches begin with that step's.
        state_sharding, batch_sharding: of the mesh axis ``"data"`` (default: whole
            on each device; cut along the first axis).
        priority, data: of its runs, for policies, as of :func:`pathways_lab.program`.

        Yields each step once: its number, the state after it (handles), and what
        train_step returned beside (values; the mean over parts).  After a loss it goes
        on from the newest state that lives, with the batches since; results are those
        of a run without loss, bit for bit.  Raises PathwaysError when every copy of
        the state is lost.  ``.story`` of what this returns says what happened.
        """
        there = [i for i in self.islands if islands is None or i.name in islands]
        if islands is not None and not there:
            known = ", ".join(i.name for i in self.islands) or "none"
            raise failures.refused(
                f"islands={islands!r}: the lab has no such island",
                f"name some of those that are there ({known}), or give none for all",
            )
        train_step = slice_request.function("train_step", train_step)
        if update is not None:
            update = slice_request.function("update", update)
        parts = slice_request.count("parts", (len(there) or 1) if parts is None else parts)
        if devices is None:
            devices = min((i.devices for i in there), default=1)
        return Elastic(
            self, train_step, state, batches, update, islands,
            slice_request.count("devices", devices),
            parts if update is not None else 1,
            slice_request.count("replicas", replicas),
            slice_request.count("every", every),
            slice_request.count("ahead", ahead, least=0),
            P() if state_sharding is None else state_sharding,
            P("data") if batch_sharding is None else batch_sharding,
            slice_request.count("start", start, least=0),
            Tag.of(priority, data),
        )  # fmt: skip
