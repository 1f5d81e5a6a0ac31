"""Make a running Dask cluster into a lab, or find the lab that it already is.

Problem: the same call must work on a cluster that another person has started,
for the first notebook and for the second, and for people who have no
Dask credentials but only an invitation.

Permissions: a holder of the Dask credentials, or of the control plane's own
key, is an *owner*.  A *lab file* (JSON, readable by its owner only) usually holds
less: the control plane's address, an invitation's number and a key made for it,
and no certificate but the authority's.  Its reader is a *client*.

Rule for maintainers: only documented Dask API here; every failure says what to
do.  Importing this module must not import Dask: a client needs none.

Paper: section 3 (users reach the system through a client library).
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from pathways_lab.core.errors import refused
from pathways_lab.runtime.cluster.await_workers import WORKER_SECONDS, await_asked, await_first
from pathways_lab.runtime.cluster.dashboard_socket import Pages
from pathways_lab.runtime.cluster.device_supervisor import MODULE
from pathways_lab.runtime.cluster.lab_spec import Transport, Wishes
from pathways_lab.runtime.cluster.membership import Islands, is_rule
from pathways_lab.runtime.cluster.scheduler_probe import (
    PORTS,
    Unreached,
    at_once,
    first_cause,
    is_own,
    knock,
)
from pathways_lab.runtime.cluster.start_control_plane import ANY
from pathways_lab.runtime.control_plane.directory import COLLECTIVES, OWN_ISLANDS, why_no_name
from pathways_lab.runtime.processes import kept_labs
from pathways_lab.runtime.processes.start_progress import Tell
from pathways_lab.transport import addresses, versions
from pathways_lab.transport.auth import key_of
from pathways_lab.transport.dask_comms import CONTROL, is_comm, through
from pathways_lab.transport.handshake import SILENCE

if TYPE_CHECKING:
    import distributed

VARIABLE = "PATHWAYS_LAB"
"""A Dask scheduler's address (credentials as in Dask's own configuration), or a lab file."""

_NAMED = 8
"""Closed ways that are told; a machine that is cut off closes two to each other one."""
_WAYS = 8
"""Other machines at which each knocks when a lab is formed."""


@dataclass(frozen=True, slots=True)
class ControlAddress:
    """Where a control plane takes clients, and the key for it.

    tls: PEM texts ``ca``, ``cert``, ``key`` when the link leaves the machine; who
        was invited has ``ca`` only.
    holder: number of an invitation, whose key this is; 0: the owners' own.
    dashboard: the address of the Dask cluster's dashboard, where it is known.
    kept: the name under which it is kept on this machine, of a lab that outlives its kernels.
    """

    address: str
    key: bytes = field(repr=False)
    tls: dict[str, str] | None = field(default=None, repr=False)
    holder: int = 0
    dashboard: str = field(default="", compare=False)
    kept: str = field(default="", compare=False)

    @property
    def folder(self) -> Path | None:
        """The lab's private folder on this machine; None when it is on another one."""
        scheme, _, path = self.address.partition(":")
        return Path(path).parent if scheme == "unix" else None


def invitation(control: ControlAddress) -> ControlAddress:
    """An invitation: an owner gives it to a person who shall be a client and no more.

    Raises PathwaysError where clients cannot be told from owners.
    """
    if control.holder:
        return control
    if is_comm(control.address):
        raise refused(
            "this client's links go over Dask's comms, and everybody with the certificates for that"
            " is an owner",
            'invite(path, owner=True), or invite from a client without transport="dask"',
        )
    holder = 1 + secrets.randbelow(2**63)
    ca = None if control.tls is None else {"ca": control.tls["ca"]}
    key = key_of(control.key, holder)
    return ControlAddress(control.address, key, ca, holder, control.dashboard)


def write_lab_file(path: str | Path, control: ControlAddress, keeper: int = 0) -> None:
    """Every reader of the file can connect with its content.  Mode 0600.

    keeper: the process that keeps the lab, in the record of a kept one.
    """
    content: dict[str, Any] = {
        "control": {
            "address": control.address,
            "key": control.key.hex(),
            "tls": control.tls,
            "holder": control.holder,
            "dashboard": control.dashboard,
        }
    }
    if keeper:
        content["keeper"] = keeper
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        os.fchmod(descriptor, 0o600)
        json.dump(content, file)


def read_lab_file(path: str | Path) -> ControlAddress:
    """The inverse of :func:`write_lab_file`.  Raises PathwaysError for anything else."""
    try:
        control = json.loads(Path(path).read_text())["control"]
        key, holder = bytes.fromhex(control["key"]), int(control.get("holder", 0))
        dashboard = str(control.get("dashboard", ""))
        if not is_comm(address := str(control["address"])):
            addresses.parse(address)
        return ControlAddress(address, key, control["tls"], holder, dashboard)
    except FileNotFoundError:
        remedy = "check the path, or ask the owner of the lab for a file (lab.invite(path))"
        if re.fullmatch(r"[\w.-]+:\d+", str(path)):
            remedy = f'for a Dask scheduler write "tcp://{path}", or "tls://{path}"'
        raise refused(f"there is no lab file {str(Path(path).absolute())!r}", remedy) from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise refused(
            f"{str(path)!r} is not a lab file: {error!r}",
            "ask the owner of the lab for a new one (lab.invite(path))",
        ) from error


def find_kept(name: str) -> ControlAddress:
    """The lab that is kept under a name.  Raises PathwaysError that says which ones are."""
    path = kept_labs.find(name)
    if not kept_labs.wait_ready(name, WORKER_SECONDS):
        raise kept_labs.none(name)
    return replace(read_lab_file(path), kept=name)


class _Control(NamedTuple):
    """Arguments of :func:`attach` for the control plane of a new lab."""

    pages: Pages | None
    plain_collectives: bool
    silence: float
    ports: str


def attach(
    target: object = None,
    *,
    hosts_per_island: int | None = None,
    devices_per_host: int | None = None,
    memory: int | None = None,
    platform: str = "auto",
    timeout: float | None = None,
    pages: Pages | None = None,
    host_module: str = MODULE,
    tell: Tell = lambda _: None,
    plain_collectives: bool = False,
    silence: float = SILENCE,
    islands: Islands = "machine",
    ports: object = None,
    transport: Transport = "sockets",
) -> ControlAddress:
    """Find the lab behind *target*; make one by plugins if there is none yet.

    Arguments as of ``pw.connect``, which says more of most.

    target: a name is that of a lab file, or else of a kept lab.
    hosts_per_island: workers of an island whose accelerators start as one runtime,
        all of them or none; None: slices of accelerators lie on one host.  CPU
        devices of several hosts compute together in any number.
    devices_per_host, memory (bytes per device): None means what the worker's resources or JAX say.
    timeout: seconds to wait for a scheduler, and for workers: those that a Dask cluster object
        was asked for, else a first one.  None: a scheduler that takes no connection is not waited
        for, one that says nothing as long as Dask's configuration says (usually half a minute),
        workers a minute, and a first one that is a job in a queue as long as that takes.
    pages: what is added to Dask's dashboard when the lab is made.
    host_module: the module that is a device process, for tests.
    tell: told what is waited for, when that takes more than a moment.
    plain_collectives: without it collectives between machines of an island go through TLS, and
        where they cannot the lab is refused.
    transport: with ``"dask"`` hosts that do not reach the control plane go through the scheduler
        too, where this client makes the lab.

    Raises PathwaysError; also for arguments that cannot be, though a lab is there already.
    """
    wished = Wishes(
        hosts_per_island=hosts_per_island,
        devices_per_host=devices_per_host,
        memory=memory,
        transport=transport,
    )
    wished.check()
    if platform not in ("auto", "cpu"):
        raise refused(f"platform is {platform!r}", "on a Dask cluster use 'auto' or 'cpu'")
    if timeout is not None and (not isinstance(timeout, int | float) or not timeout > 0):
        raise refused(f"timeout is {timeout!r}", "timeout is a number of seconds above 0")
    if not isinstance(silence, int | float) or not 1 <= silence <= 3600:
        raise refused(f"silence is {silence!r}", "silence is a number of seconds, 1 to 3600")
    if not is_rule(islands):
        raise refused(
            f"islands is {islands!r}",
            'islands is "machine", "job" or "worker", or a function from the name of a machine to'
            " that of its island",
        )
    try:
        doors = ANY if ports is None else addresses.port_range(ports)
    except ValueError as error:
        wrong, _, rule = str(error).partition(": ")
        raise refused(wrong, rule) from None
    if target is None:
        target = os.environ.get(VARIABLE)
        if not target:
            raise refused(
                f"there is nothing to connect to: the environment variable {VARIABLE} is not set",
                "give a Dask address, Client or cluster, or the path of a lab file; "
                "pathways_lab.start() makes a lab on this machine",
            )
    if isinstance(target, str) and not why_no_name(target) and not os.path.exists(target):
        return find_kept(target)
    if isinstance(target, str | Path) and "://" not in str(target):
        return read_lab_file(target)
    client, ours = _client_of(target, timeout, tell)
    try:
        members = wished.hosts_per_island or 1
        far = transport == "dask"
        wishes = (wished.devices_per_host, memory, platform, host_module, members, islands, far)
        control = _Control(pages, plain_collectives, silence, doors)
        return _attach(client, wishes, control, timeout, tell)
    finally:
        if ours:
            client.close()


def dask_client(target: Any) -> distributed.Client:
    """A Dask client of one's own for what :func:`attach` took; the caller closes it."""
    import distributed

    from pathways_lab.runtime.cluster import dask_private

    if not isinstance(target, distributed.Client):
        return _client_of(target)[0]
    address = target.scheduler_info()["address"]
    security = dask_private.security_of(target)
    return distributed.Client(address, security=security, set_as_default=False)


def _client_of(
    target: Any, timeout: float | None = None, tell: Tell = lambda _: None
) -> tuple[distributed.Client, bool]:
    """A Dask client for *target*, and whether it is ours to close."""
    import dask
    import distributed

    from pathways_lab.runtime.cluster import dask_private

    if isinstance(target, distributed.Client):
        if target.asynchronous:
            raise refused(
                "an asynchronous distributed.Client cannot be used here",
                "give the scheduler's address, or a Client made without asynchronous=True",
            )
    elif not isinstance(target, str) and not hasattr(target, "scheduler_address"):
        raise refused(
            f"cannot connect to {type(target).__name__} {target!r:.60}",
            "give a Dask address, a distributed.Client, a Dask cluster, or a lab file",
        )
    usual = dask.utils.parse_timedelta(dask.config.get("distributed.comm.timeouts.connect"))
    security = None
    limit, wait = timeout or usual, timeout is not None
    try:
        if isinstance(target, distributed.Client):
            # Whatever it is asked, it would wait for ever for a scheduler that says nothing.
            address = str(target.scheduler.address) if target.scheduler else ""
            if not address.startswith("inproc:"):
                knock(address, dask_private.security_of(target), limit, tell, wait)
            return target, False
        if isinstance(target, str):
            security = dask_private.security_for(target)
            knock(target, security, limit, tell, wait)
        client = distributed.Client(target, security=security, timeout=limit, set_as_default=False)
        return client, True
    except Unreached as error:
        raise refused(f"no Dask scheduler at {target!r:.80}: {error}", error.remedy) from error
    except (OSError, TypeError, ValueError) as error:
        # Dask raises TypeError for a tls:// address without credentials.
        raise refused(
            f"the Dask scheduler at {target!r:.80} cannot be reached: {error}{_why(error)}",
            "check the address (a scheduler's log says it; its dashboard has another port), and for"
            " tls:// Dask's configuration of certificates",
        ) from error


def _attach(
    client: distributed.Client,
    hosts: tuple[int | None, int | None, str, str, int, Islands, bool],
    wished: _Control,
    timeout: float | None,
    tell: Tell,
) -> ControlAddress:
    from pathways_lab.runtime.cluster import dask_private
    from pathways_lab.runtime.cluster.dask_plugins import (
        ControlPlugin,
        HostsPlugin,
        beyond,
        control_of,
        hosts_up,
    )

    address: str = client.scheduler_info()["address"]
    *_, platform, _, members, islands, far = hosts
    try:
        control = client.run_on_scheduler(control_of)
        if control is None:
            # Their machines decide how the lab is reached.
            await_asked(client, timeout, tell)
            joined = members > 1 and platform != "cpu"
            seen = _machines(client, address, wished.plain_collectives, islands, joined, far)
            client.register_plugin(ControlPlugin(seen, *wished))
            control = client.run_on_scheduler(control_of)
    except (ImportError, AttributeError) as error:
        raise refused(
            f"the Dask scheduler at {address} cannot load pathways_lab: {error}",
            versions.REMEDY,
        ) from error
    assert control is not None
    local = control["host"] is None
    if local and control["machine"] != addresses.machine():
        raise refused(*beyond(f"this client ({socket.gethostname()})"))
    if wrong := versions.apart(control.get(versions.FIELD), f"the lab at {address}", "this client"):
        raise refused(wrong, versions.REMEDY)
    if not control["alive"]:
        raise refused(
            f"the control plane of the lab at {address} has died",
            "whoever started the lab can start a new one with pw.start()",
        )
    if not control["hosts_are_there"]:
        patience = WORKER_SECONDS if timeout is None else timeout
        await_first(client, patience, tell)
        if not control["hosts_come"]:
            tell("starting device processes on the workers")
            out = _install_hosts(client, HostsPlugin(control, *hosts))
        # Somebody else may have begun at the same time: he has the same lab, and not half of it.
        client.run_on_scheduler(hosts_up, patience)
        if not control["hosts_come"]:
            tell("the device processes are there")
            for told in out:
                tell(f"left out: {told}")
    # The ways between all hosts are many; who joins later has the doctor for them.
    if not local and not control["hosts_are_there"]:
        _tell_closed(client, tell)
    door = control["address"]
    if far and not local:
        door = through(dask_private.scheduler_of(client), CONTROL)
    return ControlAddress(
        door,
        bytes.fromhex(control["key"]),
        None if local else dask_private.pems_of(dask_private.security_of(client), "client"),
        dashboard=client.dashboard_link or "",
    )


def _tell_closed(client: distributed.Client, tell: Tell) -> None:
    """Say which hosts do not reach each other: later that would be an error of some transfer."""
    from pathways_lab.runtime.cluster.dask_plugins import closed_ways, door_of_host

    found = client.run(door_of_host, on_error="ignore")
    doors = {worker: door for worker, door in found.items() if door is not None}
    if not doors:
        return
    found = at_once(
        lambda each: client.run(closed_ways, each[1], workers=[each[0]], on_error="ignore"),
        others(doors).items(),
    )
    told = sorted(way for closed in found for ways in closed.values() for way in ways)
    for way in told[:_NAMED]:
        tell(f"{way}; {PORTS}")
    if told[_NAMED:]:
        tell(f"and {len(told) - _NAMED} more ways between hosts are closed")


def others(doors: Mapping[str, tuple[str, str]]) -> dict[str, dict[str, str]]:
    """The doors at which each worker's machine knocks: those of the next few, in a circle.

    All pairs of many machines would be too many; a machine that is shut is found so as well.
    """
    workers = sorted(doors, key=lambda worker: doors[worker])
    ring = [doors[worker] for worker in workers] * 2
    ways = min(len(workers) - 1, _WAYS)
    return {
        worker: dict(ring[place : place + ways]) for place, worker in enumerate(workers, start=1)
    }


def _machines(
    client: distributed.Client,
    address: str,
    plain_collectives: bool,
    islands: Islands,
    joined: bool = False,
    by_dask: bool = False,
) -> str | None:
    """The host at which other machines reach the scheduler's; None: client and workers are there.

    Machines are compared, and not names: a scheduler may call itself 127.0.1.1 and be reached
    from everywhere.  joined: accelerators of an island start as one runtime.  by_dask: this client
    reaches Dask's scheduler only.

    Raises PathwaysError where others could listen, or nobody could come.
    """
    from pathways_lab.runtime.cluster import dask_private
    from pathways_lab.runtime.cluster.dask_plugins import (
        machine_of_scheduler,
        machine_of_worker,
        plain_text,
    )

    there = client.run_on_scheduler(machine_of_scheduler)
    seen = client.run(machine_of_worker, islands, joined, on_error="return").values()
    told = [each for each in seen if not isinstance(each, BaseException)]
    far = [host for machine, host, *_ in told if machine != there]
    away = addresses.machine() != there
    if away and not by_dask:
        far.insert(0, dask_private.host_of_scheduler(client))
    if not far and not away and dask_private.is_loopback(address):
        return None
    pems = dask_private.pems_of(dask_private.security_of(client), "client")
    if pems is None:
        raise refused(*plain_text(address))
    host = far[0] if far else dask_private.host_of(address)
    if far and not client.run_on_scheduler(is_own, host):
        raise refused(
            f"the Dask scheduler is on another machine and is reached at {host}, by a forwarded"
            " port: nothing but that port comes through, and the lab has ports of its own",
            'transport="dask" goes through that port, slower; or connect to an address of the'
            " scheduler's machine",
        )
    if not plain_collectives:
        first = {island: machine for machine, _, island, _ in told}
        clear = {island for _, _, island, clear in told if clear}
        apart = {island for machine, _, island, _ in told if first[island] != machine}
        spread = sorted(apart & clear)
        if spread:
            raise refused(
                f"{' and '.join(spread)}: the workers of the island are on several machines,"
                f" {COLLECTIVES}",
                OWN_ISLANDS,
            )
    return host


def _install_hosts(client: distributed.Client, plugin: Any) -> list[str]:
    """Start the device processes; which workers are left out, and why.

    Raises PathwaysError when all of them would be.
    """
    from pathways_lab.runtime.cluster import dask_private

    try:
        client.register_plugin(plugin)
    except Exception as error:
        out = dask_private.left_out(client, plugin.name, type(plugin).__module__)
        if 0 < len(out) < len(client.scheduler_info(n_workers=-1)["workers"]):
            return sorted(out.values())
        # Let the next attempt, perhaps with other arguments, try again.
        with contextlib.suppress(Exception):  # where it is not, it cannot be removed
            client.unregister_worker_plugin(plugin.name)
        raise refused(
            f"a device process could not be started on a Dask worker: {error}"
            + "".join(f"; {told}" for told in sorted(out.values())),
            "see the last lines of its log above; platform='cpu' does without accelerators",
        ) from error
    return []


def _why(error: Exception) -> str:
    """The cause of failure of Dask's last attempt, which its own words leave out."""
    cause = first_cause(error)
    return "" if str(cause) in str(error) else f": {cause}"
