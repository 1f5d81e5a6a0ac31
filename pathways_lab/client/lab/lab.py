"""The lab: one object for a cluster that this kernel drives.

Problem: a newcomer's first line starts a cluster, a colleague's joins one that
runs; afterwards both use the same object.  Nothing starts unasked, and a lab that
was started here ends with the kernel.

Rule for maintainers: thin; everything is done by the session, the connection
and the runtime.  One embedded lab per kernel.

Paper: section 3 (users), section 4.1 (resource manager).
"""

from __future__ import annotations

import atexit
import contextlib
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from pathways_lab.client.feeds.feed import Feeding
from pathways_lab.client.functions import scopes
from pathways_lab.client.functions.jit import CompiledFunction
from pathways_lab.client.lab import hooks, slice_request, tags, topology_view
from pathways_lab.client.lab.cancelling import UnderWay
from pathways_lab.client.lab.dcn import Dcn, emulate, measure
from pathways_lab.client.lab.devices import Slice
from pathways_lab.client.lab.diagnostics import Care
from pathways_lab.client.lab.island_admin import Elasticity
from pathways_lab.client.lab.lease import Lease, require
from pathways_lab.client.lab.policies import Policies, Tagging
from pathways_lab.client.lab.sharing import Sharing
from pathways_lab.client.lab.stats import Stats
from pathways_lab.client.lab.topology_view import Device, IslandTable
from pathways_lab.client.program import calls
from pathways_lab.client.session import failures
from pathways_lab.client.session.connection import Connection
from pathways_lab.client.session.session import Session
from pathways_lab.client.training import per_host_loop
from pathways_lab.client.trunk.trunk import Trunks
from pathways_lab.core.checks import not_an_owner
from pathways_lab.core.errors import Failure
from pathways_lab.core.program.program import Line, SliceId
from pathways_lab.core.scheduling.policies import Policy
from pathways_lab.core.slices.topology import SliceRequest
from pathways_lab.runtime.client_messages import Loop
from pathways_lab.runtime.cluster import attach
from pathways_lab.runtime.cluster.attach import ControlAddress
from pathways_lab.runtime.cluster.embedded import EmbeddedCluster
from pathways_lab.runtime.cluster.start_control_plane import IDLE
from pathways_lab.runtime.processes import kept_labs
from pathways_lab.timeline.entries import Entries
from pathways_lab.timeline.export.sql import QueryRows
from pathways_lab.timeline.log import Timeline
from pathways_lab.transport import record_encoding, tls
from pathways_lab.transport.deferred_signals import HeldBack


class Lab(Elasticity, Care, Feeding, Sharing, Trunks, Tagging, UnderWay):
    """A cluster that this kernel drives.

    session: the connection and what runs on it.  timeline: what happened.
    name: what everybody on the lab calls this client (weights of shares, records
    and errors name it so).  embedded: the cluster that was started for it, or None.
    timeout, quiet: for its control plane's answer, see :meth:`Reactor.connect`.
    """

    def __init__(
        self,
        control: ControlAddress,
        embedded: EmbeddedCluster | None = None,
        name: str = "",
        timeout: float = 10.0,
        quiet: Callable[[float], object] | None = None,
    ) -> None:
        self.embedded = embedded
        self.slices: list[Slice] = []
        self.leases: dict[str, Lease] = {}
        self._control = control
        self._compiled = 0
        self._closed = False
        connection = Connection(
            control.address,
            control.key,
            context=tls.client_context(control.tls),
            name=name,
            timeout=timeout,
            holder=control.holder,
            quiet=quiet,
        )
        self.session = Session(connection)
        self.session.lab = weakref.ref(self)
        self._policies = Policies(connection, lambda text: self.session.print_later("policy", text))
        self.name = connection.name
        for binding in connection.kept:
            connection.following.follow(on := Slice(binding, self))
            self.slices.append(on)
        apart = connection.link.clock
        self.timeline = Timeline(clock=lambda: time.monotonic() + apart.offset)
        self.timeline.written = Entries()
        connection.on_records = self._remember
        connection.on_closed = self._left_alone
        connection.send("watch", {"on": True})
        folder = embedded.folder if embedded is not None else control.folder
        if hooks.lab_opened is not None and folder is not None:
            hooks.lab_opened(folder)
        atexit.register(self.close)

    # --- devices ------------------------------------------------------------------------

    @property
    def islands(self) -> IslandTable:
        """Islands with their hosts, as they are now; of a lab that is gone, as they were last.

        They show themselves as a table of hosts: machine and address, devices, versions.
        """
        return topology_view.islands_of(self.session.connection.topology)

    def devices(self) -> tuple[Device, ...]:
        """All physical devices, island by island: host, number, kind, bytes of memory."""
        return topology_view.devices_of(self.islands)

    @property
    def clients(self) -> tuple[str, ...]:
        """The names of all connected clients, this one's (``lab.name``) too."""
        return tuple(self.session.connection.topology["clients"])

    @property
    def policy(self) -> Any:
        """The policy in force, for all clients of the lab: it says whose gangs go first.

            lab.policy = pw.ProportionalShare({"ann": 1, "bob": 2})

        One of ``pw.ProportionalShare(...)`` (a lab begins with equal shares of all clients),
        ``pw.FIFO()``, ``pw.Priority()``, ``pw.ShortestFirst()``, or an object of
        your own with ``choose(view)``, which is given a
        :class:`pathways_lab.PolicyView` and returns the ``run`` of one of
        ``view.candidates``.  Your object is copied to a process of its own; what
        it remembers in its attributes, it remembers there.  Reading gives the
        object that you set (not its copy), or, of another client's own one, its
        name and who set it.

        Setting waits until the policy was tried and is in force.  Raises
        PathwaysError when it is not, and then the one before stays.  One that
        fails later (it raises, names no candidate, takes longer than 0.4 s
        to choose) is removed at once, below the cell that set it you read why, and
        clients share equally again.  A choice that takes more than some 30 ms comes too late:
        the order of submission has made it.  Never up to a policy are the order inside of a run,
        memory, and that a run may be overtaken 64 times between two of its windows and no more.
        """
        return self._policies.in_force

    @policy.setter
    def policy(self, policy: Policy) -> None:
        self._policies.choose(policy)

    def slice(
        self,
        shape: int | tuple[int, ...],
        axes: str | tuple[str, ...] | None = None,
        *,
        island: str | None = None,
        islands: int | Sequence[str] | None = None,
        kind: str | None = None,
        memory: int | str = 0,
        wait: bool | float = True,
        window: float | None = None,
    ) -> Slice:
        """Virtual devices in a mesh, bound to physical devices of one island, or of several.

        shape: a number of devices, or 1 to 3 mesh sizes.
        axes: a name per mesh axis (default ``x``, ``y``, ``z``).
        island, kind (``"cpu"``, ``"gpu"``, ``"tpu"``), memory (least bytes per
            device, or text like ``"2 GB"``): constraints.
        islands: how many the slice spans, or their names: each has an equal part of the first
            mesh axis.  A gang there has its place in the order of all of them.
        wait: while an island is leased to another client, or slices of this one hold all devices of
            its quota: in line (True: as long as it takes, or so many seconds), whose place the cell
            shows.  Ctrl-C leaves the line.  False: say so at once.
        window: seconds of work that may be ahead of its gangs (see :attr:`window`).

        Devices are shared, so nothing else makes anybody wait.  Raises PathwaysError
        that says what was asked, what exists, what is free.
        """
        return self._bound(
            slice_request.slice_request(shape, axes, island, kind, memory, window, islands), wait
        )

    def _bound(self, request: SliceRequest, wait: bool | float) -> Slice:
        patience = slice_request.patience("wait", wait)
        made = Slice(self.session.connection.questions.request_slice(request, patience), self)
        self.session.connection.following.follow(made)
        self.slices.append(made)
        return made

    def release_slice(self, slice_id: SliceId) -> None:
        """Give a slice back (see :meth:`Slice.release`)."""
        # Other threads may do the same, or be adding to it.
        for entry in [entry for entry in tuple(self.slices) if entry.id == slice_id]:
            with contextlib.suppress(ValueError):
                self.slices.remove(entry)
        if not self.closed:
            self.session.connection.release_slice(slice_id)

    # --- an island for oneself ------------------------------------------------------------

    def lease(self, island: str, *, order: bool = True, patience: float = 3.0) -> Lease:
        """Have an island for this kernel alone, until the block ends.

        order: False switches the one order of launches off there, to see what it is
            for (:meth:`Lease.race`).  patience: seconds after which a deadlock that
            comes of it is ended.

        Raises PathwaysError while other clients have slices or handles there; it
        names them.  Meanwhile they get no slices there.  It also ends with this
        kernel and with the lab.

        >>> with lab.lease("island0"):                       # doctest: +SKIP
        ...     s = lab.slice(4, island="island0")
        """
        return Lease(self, island, order, patience)

    def multi_controller(
        self,
        function: Callable[..., Any],
        *args: Any,
        on: Slice | None = None,
        steps: int = 1,
        carry: int = 1,
        wait: bool = False,
        records: bool = True,
        in_shardings: Any = None,
        out_shardings: Any = None,
        donate_argnums: int | tuple[int, ...] | None = None,
        name: str | None = None,
        priority: int | None = None,
        data: Mapping[str, Any] | None = None,
    ) -> Any:
        """Repeat a step on every host of a slice by itself: one Python loop per host.

        function: an SPMD step, as for ``pw.jit``, or what ``pw.jit`` made of one.
        args: for the first step: arrays and handles.
        on, in_shardings, out_shardings, donate_argnums, name, priority, data: as for ``pw.jit``.
        steps: how many.  carry: so many arguments are replaced, before the next
            step, by the first results; the others stay.
        wait: for each step's end before the next one is launched (False: chained,
            as fast as JAX takes them).
        records: each step is in the timeline as a gang of its own; False: only the
            whole loop, and nothing stands in the loop but the call.

        The results of the last step, as handles, at once.  Needs the lease of the
        slice's island (:meth:`lease`); raises PathwaysError without.

        >>> with lab.lease("island0"):                       # doctest: +SKIP
        ...     s = lab.slice((2, 2), ("host", "device"), island="island0")
        ...     w = lab.multi_controller(step, w, batch, on=s, steps=100)
        """
        if not isinstance(function, CompiledFunction):
            function = CompiledFunction(
                function, on=on, in_shardings=in_shardings, out_shardings=out_shardings,
                donate_argnums=donate_argnums, name=name,
            )  # fmt: skip
        call = function.bind(args, {})
        place = calls.slice_of_call(call)
        require(self, place, "lab.multi_controller")
        carried = len(jax.tree.leaves(args[:carry]))
        loop, tag = Loop(steps, carried, wait, records), tags.Tag.of(priority, data)
        return per_host_loop.start(call, place, loop, tag)

    def dcn(self, *, latency: float = 0.0, bandwidth: float = 0.0) -> Dcn:
        """Have the islands be as far from each other as a network would make them (emulated).

        latency: seconds, one way.  bandwidth: bytes per second from each host to each host
            of another island; 0: no limit.  Without arguments it is over, and on a lab of several
            machines the result is the network between them, measured.

        For all clients of the lab, from the next bytes on; hosts that join later are as
        near as ever.  A gang of a slice that spans islands takes one latency longer for each
        collective between them, and its bytes at the bandwidth.  Raises
        PathwaysError on a lab that was not started here.
        """
        told = Dcn.of(latency, bandwidth)
        with self.dask_client() as dask:
            emulate(dask, self.islands, told)
            found = None if told.latency or told.bandwidth else measure(dask)
        return found or told

    # --- what happened -------------------------------------------------------------------

    @property
    def submitted(self) -> int:
        """Messages that submitted a run: one per run."""
        return self.session.connection.traffic.sent["submit"]

    def stats(self) -> Stats:
        """Counters: captured, lowered, exported, compiled, messages."""
        return self.session.connection.traffic.snapshot(self._compiled)

    def view(self, *panels: str, **options: Any) -> Any:
        """A live view of the timeline; of a lab that is gone, a static picture of all of it.

        panels: names; none means islands, queues and utilisation, and above the queues
            heat where there are more than 64 hosts, and experts where rows go to some.
        options: title, window (it looks back so many seconds; without it the last two runs of a
            program that repeats, or 20 seconds), origin (not further than that);
            of a lab that is gone ``replay=True``: live, with scrubber, zoom and clicks.
        """
        return self.timeline.view(*panels, **options)

    def sql(self, query: str = "") -> QueryRows:
        """The answer of the timeline to a query in SQL: see :meth:`Timeline.sql`."""
        return self.timeline.sql(query)

    def _remember(self, written: list[bytes]) -> None:
        seen = [record_encoding.look(entry) for entry in written]
        self._compiled += sum([kind == "compile" for kind, _ in seen])
        records = sum([least for _, least in seen])
        assert self.timeline.written is not None
        self.timeline.written.add(written, records)
        self.timeline.extend_later(records, lambda: record_encoding.read(written))

    # --- sharing, and the Dask side -----------------------------------------------------------

    @property
    def owner(self) -> bool:
        """Whether this client may decide for all: policies, quotas, chaos, an island's order."""
        return self.session.connection.owner

    def invite(self, path: str | Path, *, owner: bool = False) -> None:
        """Write a lab file: whoever can read it can ``pw.connect(path)``.

        owner: as an owner, who may decide for all, and has the Dask credentials if the
            lab has any.  Else as a client: the file holds a key that opens nothing but
            the clients' door, for what is a client's own.

        Raises PathwaysError when a client asks for more than it has itself.
        """
        self.session.connection.check()
        path = slice_request.path("path", path)
        if owner and not self.owner:
            raise failures.refused(*not_an_owner(self.name, "make owners"), line=Line())
        attach.write_lab_file(path, self._control if owner else attach.invitation(self._control))

    @property
    def dashboard_link(self) -> str:
        """The address of the dashboard of the lab's Dask cluster, with the lab's pages in its menu.

        For browsers on the Dask scheduler's machine, or wherever Dask's configuration
        ``distributed.dashboard.link`` leads to.  An embedded lab loads it at the first
        use: about a second.  Raises PathwaysError where none is known, or the lab is gone.
        """
        self.session.connection.check()
        link = self._control.dashboard or (self.embedded.dashboard() if self.embedded else "")
        if link:
            return link.removesuffix("/status")
        remedy = "ask the owner of its Dask cluster for the client's dashboard_link"
        raise failures.refused("no dashboard of this lab is known here", remedy)

    def dashboard(self, page: str = "", *, height: int = 640) -> Any:
        """The lab's pages: all clients, moving also while this kernel is busy.

        page: ``"islands"``, ``"order"``, ``"hosts"``, ``"heat"``, ``"queues"``, ``"utilisation"``,
            ``"memory"``, or "" for the usual panels together.
        height: of the frame in which a notebook shows it, in pixels.

        ``str()`` is its address.
        """
        self.session.connection.check()
        if hooks.open_dashboard is None:
            raise failures.refused("no front end is there", "import pathways_lab as pw")
        return hooks.open_dashboard(self, self._control.folder, page, height)

    # --- the end -----------------------------------------------------------------------------

    @property
    def closed(self) -> bool:
        """Whether nothing can run on it any more, because it was closed or lost."""
        return self._closed or self.session.connection.closed is not None

    @property
    def kept_as(self) -> str:
        """The name under which the lab outlives its kernels (``pw.start(keep=...)``), or ""."""
        return self._control.kept

    def close(self, *, end: bool = False) -> None:
        """Leave the lab; an embedded cluster ends with it.  Again is fine; nothing in a fork.

        end: a kept lab, which stays otherwise, ends too, for everybody.
        """
        with HeldBack():  # nothing stays behind; Ctrl-C counts when it is done, in seconds at most
            self._end("the lab was closed")
            if end and self.kept_as:
                kept_labs.stop(self.kept_as)

    def _end(self, reason: str, remedy: str = "") -> None:
        """Leave the lab.  reason, remedy: what its calls say from now on."""
        connection = self.session.connection
        if self._closed or connection.forked:
            return
        self._closed = True
        atexit.unregister(self.close)
        mine = self in _labs
        if mine:
            _labs.remove(self)
        self.leases.clear()
        with contextlib.ExitStack() as ends:  # last ones first, and all, whatever one comes to
            ends.callback(self._end_here, mine)
            ends.callback(connection.close, reason, remedy)
            for name in ("_host_tasks", "chaos"):
                if name in self.__dict__:
                    ends.callback(self.__dict__[name].close)
            if hooks.lab_closes is not None:
                ends.callback(hooks.lab_closes, self)

    def _end_here(self, mine: bool) -> None:
        global _gone
        closed = self.session.connection.closed
        if mine:
            _gone = closed
        for entry in self.slices:
            entry.end(closed)
        self.slices = []
        if self.embedded is not None:
            self.embedded.close()

    def _left_alone(self, failure: Failure) -> None:
        """Nothing more will happen; if the control plane closed itself, what was started for it
        here need not stay."""
        self.timeline.end()
        if self.embedded is not None and not self._closed and IDLE in failure.message:
            threading.Thread(target=self.embedded.close, name="pathways end", daemon=True).start()

    def __enter__(self) -> Lab:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        if self._closed:
            return "<Lab, closed>"
        if self.session.connection.closed is not None:
            return f"<Lab, {self.session.connection.closed.message}>"
        machine = topology_view.in_words(self.islands, self.session.connection.topology)
        kept = f", kept as {self.kept_as!r}" if self.kept_as else ""
        return f"<Lab {self.name}: {machine}{kept}>"

    def _repr_html_(self) -> str:
        table = (
            ""
            if self.closed
            else topology_view.table_of(self.islands, self.session.connection.down)._repr_html_()
        )
        return repr(self).strip("<>") + table


# Calls outside of programs run at once, in whatever lab their slice belongs to.
scopes.install(calls.Immediate())

_labs: list[Lab] = []
"""Labs that were started or joined and not closed since; the last one is the kernel's."""
_gone: Failure | None = None
"""Why the kernel has no lab any more, after it had one."""
