"""The kernel's lab: started here, joined, or found again.

Problem: a newcomer's first line starts a cluster, a colleague's joins one that runs, and who
restarts a kernel finds the one that was kept.  Nothing starts unasked.

Rule for maintainers: the lab itself is :mod:`.lab.lab`; here is only which one it is.

Paper: section 3 (users; virtual device sets).
"""

from __future__ import annotations

import dataclasses
import os
import warnings
from collections.abc import Callable
from pathlib import Path

from pathways_lab.client.lab import hooks, slice_request
from pathways_lab.client.lab import lab as labs
from pathways_lab.client.lab.devices import VirtualDeviceSet
from pathways_lab.client.lab.lab import Lab
from pathways_lab.client.session import failures
from pathways_lab.core.errors import PathwaysError
from pathways_lab.runtime import jax_private
from pathways_lab.runtime.cluster import accelerators, attach
from pathways_lab.runtime.cluster.attach import ControlAddress
from pathways_lab.runtime.cluster.await_workers import WORKER_SECONDS
from pathways_lab.runtime.cluster.embedded import start_cluster
from pathways_lab.runtime.cluster.lab_spec import Transport, Wishes, outline
from pathways_lab.runtime.cluster.membership import Islands
from pathways_lab.runtime.cluster.scheduler_probe import (
    BY_DASK,
    Unreached,
    Wait,
    reach,
    unreached_of,
)
from pathways_lab.runtime.control_plane.directory import why_no_name
from pathways_lab.runtime.processes import keeper, kept_labs
from pathways_lab.runtime.processes.start_progress import Progress, Show
from pathways_lab.transport.auth import AuthenticationError
from pathways_lab.transport.dask_comms import is_comm
from pathways_lab.transport.framing import WireError
from pathways_lab.transport.handshake import SILENCE


def current() -> Lab:
    """The lab of this kernel, of several the newest.

    Raises PathwaysError when there is none, it is lost, or the last one was closed: another one
    has other slices and values.
    """
    if labs._labs:
        labs._labs[-1].session.connection.check()
        return labs._labs[-1]
    if labs._gone is not None:
        raise PathwaysError(labs._gone)
    raise failures.refused("this kernel has no lab", "start one: lab = pw.start()")


def current_or_new() -> Lab:
    """The same; the first use in a kernel starts one."""
    return current() if labs._labs or labs._gone is not None else start()


def is_running() -> bool:
    """Whether this kernel has a lab."""
    return bool(labs._labs) and not labs._labs[-1].closed


def start(
    islands: int = 2,
    hosts_per_island: int | None = None,
    devices_per_host: int | None = None,
    *,
    memory: int | str | None = None,
    platform: str = "auto",
    progress: bool | Callable[[Progress], object] = True,
    transcript: str | Path = "",
    idle_close: float | None = None,
    transport: Transport = "sockets",
    name: str = "",
    keep: str = "",
) -> Lab:
    """Start a lab on this machine: a local Dask cluster whose workers own devices.

    islands: groups of hosts whose devices compute together; each is called
        ``"island"`` and a number.
    hosts_per_island, devices_per_host: two each by default.  On accelerators the default is
        one host with the island's share of them.  Where memory is short, and where processes
        cannot compute together (native Windows), it is one host with four devices; a warning
        says why.
    memory: bytes per device that programs may use, or text like ``"1 GiB"``
        (default: a share of what is free).
    platform: ``"auto"`` takes accelerators when there are enough, and warns when there are too
        few; ``"cpu"`` takes CPU devices.
    progress: show how far the start is; or a function that is told.
    transcript: a file that gets every event of the control plane, with what it
        decided: :func:`pathways_lab.runtime.control_plane.transcript.differences` decides again.
    idle_close: seconds after which the lab ends by itself when no client has said anything
        and no run is under way (None: only with the kernel).  A kept lab counts the seconds for
        which no client is connected (None: an hour).
    transport: ``"sockets"``: Unix sockets and shared memory; ``"dask"``: everything
        over Dask's own comms, as on a cluster where nothing else gets through.
    name: what this client is called (default: ``"kernel-1"``); weights of shares,
        records and errors name it so.
    keep: a name under which the lab is *kept*: it outlives the kernel, with what :meth:`Lab.keep`
        keeps there, and ``pw.connect(name)`` finds it, from this account and machine.  If there is
        one of this name, this joins it and says so.  Unless *name* says otherwise the client is
        called so too.

    It ends with the kernel, with :meth:`Lab.close`, and when another is started; a kept one when
    it was idle, by ``lab.close(end=True)`` and by ``python -m pathways_lab stop NAME``.
    Raises PathwaysError, with the numbers when memory does not suffice; what is wrong
    with the arguments is said before a lab that runs is ended.
    """
    _check_name(name)
    _check_name(keep, "keep")
    wishes = Wishes(
        islands,
        hosts_per_island,
        devices_per_host,
        None if memory is None else slice_request.bytes_of(memory),
        platform,
        transcript,
        idle_close,
        transport,
    )
    show = progress if callable(progress) else hooks.display() if progress else None
    if keep:
        if idle_close is None:
            wishes = dataclasses.replace(wishes, idle_close=keeper.IDLE_SECONDS)
        return _start_kept(keep, wishes, show, name)
    for lab in tuple(labs._labs):
        if lab.embedded is not None:
            # Refused here, it ends nothing.  How much will be free is seen when it is.
            outline(wishes, freed=lab.embedded.budget.total)
            lab._end(
                "another lab was started with pw.start()",
                "go on with it, pw.current(), or start one",
            )
    _leave_accelerators(wishes)
    made = start_cluster(wishes, show, pages=hooks.pages)
    if made.note:
        warnings.warn(made.note, stacklevel=2)
    try:
        lab = Lab(made.control, made, name)
    except BaseException:
        made.close()
        raise
    labs._labs.append(lab)
    return lab


def _leave_accelerators(wishes: Wishes) -> None:
    """Have this kernel's own JAX leave the memory of accelerators to the hosts of a new lab."""
    if outline(wishes).emulated:
        return
    if not jax_private.backends_initialised():
        accelerators.restrain_kernel()
    elif accelerators.claims():
        warnings.warn(
            "this kernel's own JAX may have claimed three quarters of an accelerator's memory, and"
            " the lab gets the rest (lab.islands says how much): call pw.start() before JAX"
            f" computes here, or set {accelerators.PREALLOCATE}=false before",
            stacklevel=3,
        )


def _start_kept(kept: str, wishes: Wishes, show: Show | None, name: str) -> Lab:
    wishes.check()
    known = next((lab for lab in labs._labs if lab.kept_as == kept and not lab.closed), None)
    if known is not None:
        return known
    made = None
    if not kept_labs.is_there(kept):
        _leave_accelerators(wishes)
        made = keeper.start(kept, wishes, show or (lambda _: None), hooks.pages)
    if made is None:
        hooks.line()(
            f"joining the lab that is kept as {kept!r} already: it stays as it was started"
            f" (`python -m pathways_lab stop {kept}` ends it)"
        )
        return connect(kept, name=name)
    if made.note:
        warnings.warn(made.note, stacklevel=3)
    try:
        lab = connect(kept, name=name)
        made.let_go()
    except BaseException:
        made.end()
        raise
    return lab


def _check_name(name: str, argument: str = "name") -> None:
    if name and (wrong := why_no_name(str(name))):
        raise failures.refused(wrong, f'for example {argument}="ann"')


def connect(
    target: object = None,
    *,
    hosts_per_island: int | None = None,
    devices_per_host: int | None = None,
    memory: int | str | None = None,
    platform: str = "auto",
    timeout: float | None = None,
    name: str = "",
    plain_collectives: bool = False,
    silence: float = SILENCE,
    islands: Islands = "machine",
    ports: tuple[int, int] | str | None = None,
    transport: Transport = "sockets",
) -> Lab:
    """Join the lab on a Dask cluster, or make one there by plugins if there is none.

    target: a ``distributed.Client``, a Dask cluster, the address of a Dask scheduler, the path of
        a lab file, the name of a kept lab (``pw.start(keep=name)``), or None: what the environment
        variable PATHWAYS_LAB says.
    hosts_per_island: workers whose accelerators start as one runtime (None: each host for itself).
    plain_collectives: JAX sends data between machines of an island in the clear, which is faster.
    silence: seconds without a sign of a machine after which it counts as lost (5 to 120, say).
    islands: which workers form one, where they do not say it themselves: those of a
        ``"machine"``, those of a ``"job"`` of a queueing system, each ``"worker"``, or a function
        from the name of a machine to that of its island.
    ports: a first and a last one, ``(9000, 9015)``, between which the lab's doors are on every
        machine whose Dask configuration does not say others (``pathways.ports``).
    transport: ``"dask"`` where nothing but Dask's scheduler is reached from here (a forwarded port,
        a gateway's proxy): this client's links go through it, slower, and encrypted from end to
        end as they are.
    Those before, devices_per_host, memory and platform: only for the one who makes the lab.
    timeout: seconds to wait for scheduler, worker and host, each; None: 2 for a connection at all,
        and 30 for the answer of a machine that has taken one.
    name: of this client on the lab (default: ``"kernel-"`` and a number); no two have the same.

    Raises PathwaysError that says what is missing.
    """
    _check_name(name)
    control = attach.attach(
        target,
        hosts_per_island=hosts_per_island,
        devices_per_host=devices_per_host,
        memory=None if memory is None else slice_request.bytes_of(memory),
        platform=platform,
        timeout=timeout,
        pages=hooks.pages,
        tell=hooks.line(),
        plain_collectives=plain_collectives,
        silence=silence,
        islands=islands,
        ports=ports,
        transport=transport,
    )
    try:
        reach(control.address, "the lab's control plane")
        lab = _joined(control, name, timeout or SILENCE)
    except Unreached as error:
        far = f"; {BY_DASK}" if control.address.startswith("tcp:") else ""
        raise failures.refused(str(error), error.remedy + far) from error
    except OSError as error:
        raise failures.failure(
            "lost",
            f"the lab at {control.address} does not answer: {error}",
            "is it still running?  Ask its owner for a new lab file",
        ) from error
    except (AuthenticationError, WireError) as error:
        raise failures.refused(
            f"the lab at {control.address} and this client do not understand each other: {error}",
            "ask its owner for a new lab file, or install the same pathways_lab for both",
        ) from error
    try:
        lab.session.connection.await_host(timeout or WORKER_SECONDS)
        if not is_comm(control.address):
            _check_ways(lab)
    except BaseException:
        lab.close()
        raise
    given = os.environ.get(attach.VARIABLE) if target is None else target
    lab._target = None if isinstance(given, str | Path) and "://" not in str(given) else given
    labs._labs.append(lab)
    return lab


def _check_ways(lab: Lab) -> None:
    """Say which hosts this machine does not reach.  Raises PathwaysError when it is all of them."""
    hosts = {host.name: host.data_address for island in lab.islands for host in island.hosts}
    lost = unreached_of(hosts)
    for error in lost:
        hooks.line()(f"{error}; {error.remedy}; {BY_DASK}")
    if hosts and len(lost) == len(hosts):
        raise failures.refused(str(lost[0]), f"{lost[0].remedy}; {BY_DASK}")


def _joined(control: ControlAddress, name: str, limit: float) -> Lab:
    """On a kept lab the first client has the lab's name, by which it finds what it has kept.

    limit: seconds for which a control plane is waited for that has taken the connection.
    """
    quiet = Wait(f"the lab's control plane at {control.address}", limit, hooks.line()).quiet
    if control.kept and not name:
        try:
            return Lab(control, name=control.kept, timeout=limit, quiet=quiet)
        except PathwaysError as error:
            if "connected already" not in error.failure.message:
                raise
    return Lab(control, name=name, timeout=limit, quiet=quiet)


def make_virtual_device_set(lab: Lab | None = None) -> VirtualDeviceSet:
    """A set to which slices of virtual devices are added: of the kernel's lab, or of a first one.

    Raises PathwaysError for what is no lab, and where the kernel's lab is gone.
    """
    if lab is not None and not callable(getattr(lab, "slice", None)):
        raise failures.refused(
            f"lab={lab!r:.60} has no devices to make a set of",
            "pw.make_virtual_device_set().add_slice(tpu_devices=4), or with a lab as its argument",
        )
    return VirtualDeviceSet((current_or_new() if lab is None else lab).slice)
