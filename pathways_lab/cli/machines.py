"""``cluster status`` and ``doctor ADDRESS``: the machines of a cluster, and what lies between.

Problem: a lab over machines fails for reasons outside of it (a closed port, another version, a
name that means another machine), minutes later and in other words.  Each is looked at by
itself, between every pair of machines that will talk.

How: over Dask's own connections every worker is asked what it is, and opens a port for a
moment, at which the others, the scheduler's machine and this client knock as the lab will.

Rule for maintainers: nothing is changed on any machine; a port takes nothing but the word
that was agreed on, and is closed at the end.
"""

from __future__ import annotations

import secrets
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pathways_lab.cli.finding import Finding

if TYPE_CHECKING:
    from pathways_lab.runtime.cluster.scheduler_probe import Way

_HERE = "this client"
LIMIT = 2.0
"""Seconds for Dask's own connection to the scheduler."""


@dataclass(frozen=True)
class Facts:
    """One process.  host: where others reach it.  free: bytes of memory.  devices: 0: all."""

    role: str
    machine: str
    name: str
    host: str
    where: str
    island: str
    devices: int
    free: int
    versions: dict[str, str]


def worker_facts(dask_worker: Any = None) -> Facts:
    """For ``Client.run``."""
    from pathways_lab.runtime.cluster import dask_private
    from pathways_lab.runtime.cluster.dask_plugins import place_of_worker
    from pathways_lab.runtime.cluster.membership import devices_of

    resources, place = dask_private.resources_of(dask_worker), place_of_worker(dask_worker)
    host = dask_private.host_of(dask_worker.address)
    devices = devices_of(resources, None) or 0
    return _facts("worker", place.host, host, place.island, devices)


def scheduler_facts(dask_scheduler: Any = None) -> Facts:
    """For ``Client.run_on_scheduler``."""
    from pathways_lab.runtime.cluster import dask_private

    return _facts("scheduler", "scheduler", dask_private.host_of(dask_scheduler.address), "", 0)


def _facts(role: str, name: str, host: str, island: str, devices: int) -> Facts:
    from pathways_lab.transport import versions
    from pathways_lab.transport.addresses import machine
    from pathways_lab.transport.machine_share import available_memory

    free = available_memory()
    here = socket.gethostname()
    return Facts(role, here, name, host, machine(), island, devices, free, versions.here())


def worker_knocks(
    doors: dict[str, tuple[str, int]], word: bytes, dask_worker: Any = None
) -> dict[str, Way]:
    """For ``Client.run``: the ways from a worker, which may reach the scheduler elsewhere."""
    from pathways_lab.runtime.cluster import dask_private
    from pathways_lab.runtime.cluster.scheduler_probe import knock_at

    scheduler = dask_private.host_of_scheduler(dask_worker), doors["scheduler"][1]
    return knock_at({**doors, "scheduler": scheduler}, word)


# --- the commands --------------------------------------------------------------------------------


def show(address: str) -> int:
    """``cluster status``: a table of the processes."""
    from pathways_lab.core.errors import PathwaysError
    from pathways_lab.runtime.cluster.dask_plugins import control_of
    from pathways_lab.timeline.text_table import TextTable
    from pathways_lab.transport import versions

    try:
        client = _client(address)
    except PathwaysError as error:
        print(error)
        return 1
    with client:
        workers, strange = _ask(client)
        facts = _listed(client, workers)
        control = client.run_on_scheduler(control_of)
    rows = [
        (
            *(f.machine, f.name, str(f.devices or "all"), f"{f.free / 1e9:.1f} GB"),
            versions.in_words(f.versions),
        )
        for f in facts
    ]
    print(TextTable(rows, ("machine", "host", "devices", "free", "versions"), "<<>><"))
    for told in strange:
        print(told)
    alive = control is not None and control["alive"]
    print("a lab runs here" if alive else f"no lab yet: pathways_lab.connect({address!r}) makes it")
    return 0


def examine(address: str) -> Iterator[Finding]:
    """``doctor ADDRESS``: what may be wrong between the machines of a cluster."""
    from pathways_lab.core.errors import PathwaysError

    try:
        client = _client(address)
    except PathwaysError as error:
        yield Finding("FAIL", error.failure.message, error.failure.remedy)
        return
    with client:
        workers, strange = _ask(client)
        facts = _listed(client, workers)
        yield Finding("ok", f"the scheduler answers at {address}")
        yield from _secure(client, facts)
        for told in strange:
            yield Finding("FAIL", told, "mend or end this worker; a lab leaves it out")
        yield from _alike(facts)
        for each in facts:
            if each.role == "worker":
                devices = f"{each.devices} devices" if each.devices else "all devices of JAX"
                what = f"{each.name} on {each.machine} ({each.host}): {devices}"
                yield Finding("ok", f"{what}, {each.free / 1e9:.1f} GB free")
        if not any(each.role == "worker" for each in facts):
            yield Finding("warn", "no workers", "python -m pathways_lab cluster worker ADDRESS")
        yield from _ways(client, workers)


def _client(address: str) -> Any:
    """A Dask client.  Raises PathwaysError within some seconds where nobody answers."""
    import dask
    import distributed  # noqa: F401 (else its defaults come meanwhile, and go when this is over)

    from pathways_lab.runtime.cluster.attach import dask_client

    with dask.config.set({"distributed.comm.timeouts.connect": f"{LIMIT:g}s"}):
        return dask_client(address)


def _ask(client: Any) -> tuple[dict[str, Facts], list[str]]:
    """The workers, by Dask's address; and words about those that cannot answer."""
    from pathways_lab.runtime.cluster import dask_private

    seen = client.run(worker_facts, on_error="return")
    workers = {address: f for address, f in seen.items() if isinstance(f, Facts)}
    bad = {address: f for address, f in seen.items() if not isinstance(f, Facts)}
    machines = client.run(socket.gethostname, workers=list(bad)) if bad else {}
    strange = [
        f"worker {dask_private.host_of(address)} on {machines[address]}:"
        f" {type(error).__name__}: {error}"
        for address, error in bad.items()
    ]
    return workers, strange


def _listed(client: Any, workers: Mapping[str, Facts]) -> list[Facts]:
    """The processes, the scheduler first."""
    by_name = sorted(workers.values(), key=lambda facts: facts.name)
    return [client.run_on_scheduler(scheduler_facts), *by_name]


def _secure(client: Any, facts: list[Facts]) -> Iterator[Finding]:
    from pathways_lab.runtime.cluster import dask_private
    from pathways_lab.transport.addresses import machine

    pems = dask_private.pems_of(dask_private.security_of(client), "client")
    if pems is not None:
        yield Finding("ok", "TLS: both ends of every connection show a certificate")
    elif {machine()} == {each.where for each in facts}:
        yield Finding("ok", "no TLS, and none needed: all is on this machine")
    else:
        yield Finding(
            "FAIL",
            "no TLS: the lab would send in the clear between machines, and is refused",
            "python -m pathways_lab cluster certs DIR, and --certs DIR for all commands",
        )


def _alike(facts: list[Facts]) -> Iterator[Finding]:
    from pathways_lab.transport import versions

    apart = False
    for each in facts:
        theirs = f"{each.name} on {each.machine}"
        if wrong := versions.apart(each.versions, theirs, "this client"):
            apart = True
            yield Finding("FAIL", wrong, versions.REMEDY)
    if not apart:
        yield Finding("ok", f"the same versions everywhere: {versions.in_words(facts[0].versions)}")


def _ways(client: Any, workers: Mapping[str, Facts]) -> Iterator[Finding]:
    """The scheduler's machine and every worker are reached from every worker and from here."""
    from pathways_lab.runtime.cluster import dask_private
    from pathways_lab.runtime.cluster.scheduler_probe import (
        BY_DASK,
        PORTS,
        WORD,
        close_doors,
        knock_at,
        open_door,
    )

    word = secrets.token_bytes(WORD)
    at = dask_private.host_of_scheduler(client)
    doors: dict[str, tuple[str, int]] = {}
    try:
        everywhere = "::" if ":" in at else "0.0.0.0"
        doors["scheduler"] = at, client.run_on_scheduler(open_door, everywhere, word)
        for address, each in workers.items():
            port = client.run(open_door, each.host, word, workers=[address])[address]
            doors[each.name] = each.host, port
        ways = {_HERE: knock_at(doors, word)}
        told = client.run(worker_knocks, doors, word, workers=list(workers)) if workers else {}
        for address, found in told.items():
            name = workers[address].name
            ways[name] = {target: way for target, way in found.items() if target != name}
    finally:
        client.run_on_scheduler(close_doors)
        client.run(close_doors, workers=list(workers))
    good = [way for found in ways.values() for way in found.values() if not way.failure]
    for source, found in ways.items():
        mend = f"{PORTS}; {BY_DASK}" if source == _HERE else PORTS
        for target, way in found.items():
            if way.failure:
                yield Finding("FAIL", f"{source} does not reach {target}: {way.failure}", mend)
    if good:
        slow, thin = max(way.seconds for way in good), min(way.rate for way in good)
        yield Finding(
            "ok",
            f"{len(good)} ways between them: a round trip takes {1e3 * slow:.1f} ms at most, and "
            f"{thin / 1e6:.0f} MB/s go through at least",
        )
