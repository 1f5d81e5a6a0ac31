"""``lab.chaos``: break something on purpose, and see whether it comes out as it was said.

Problem: people who must rely on a lab want to see it fail, on the real processes
and before it matters.  Every fault here is a real one: signals to real
processes, messages that really come late, twice or never, bits that are
really wrong.

How: hosts are reached through the Dask workers beside them, by a Dask client.  Every
holder of a Dask client is an owner of the lab, and only owners can do any of this
(:mod:`pathways_lab.runtime.cluster.break_process`).  The expected outcome of a fault is said
first and compared afterwards (:mod:`pathways_lab.client.chaos.fault_report`).

Rule for maintainers: a fault ends by itself, where it was begun, also if this
kernel dies.

Paper: section 4.6.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from pathways_lab.client.chaos.fault_report import Check, Expected, Fault
from pathways_lab.client.functions.jit import CompiledFunction
from pathways_lab.client.lab import slice_request
from pathways_lab.client.lab.devices import Slice
from pathways_lab.client.lab.slice_request import bytes_of, duration
from pathways_lab.client.lab.topology_view import Host
from pathways_lab.client.parts import Parts
from pathways_lab.client.session import failures
from pathways_lab.client.session.handles import Handle
from pathways_lab.core.errors import PathwaysError
from pathways_lab.runtime.cluster.attach import ControlAddress
from pathways_lab.runtime.cluster.break_process import act
from pathways_lab.runtime.processes.child_process import Child, spawn
from pathways_lab.timeline.records import Event

if TYPE_CHECKING:
    import distributed

CONTROL = "control"
"""The control plane, as one end of a connection."""
Begin = Callable[[], float | None]
_LOST = frozenset({"host-lost"})
_COUNTED = "lost or repeated on the way"
_LOOKING = 120.0
"""Seconds for which a device goes on computing wrong at most, while somebody looks for it."""
_TOLD = 1.0
"""Seconds within which links notice: they compare their counts every half second."""


class Chaos:
    """Faults on purpose; see ``lab.chaos``.

    >>> lab.chaos.kill("island0/host1").report()             # doctest: +SKIP
    >>> with lab.chaos.partition("island0", "island1", seconds=3) as fault:
    ...     out = step(x).result()                           # doctest: +SKIP
    """

    def __init__(self, lab: Parts, control: ControlAddress) -> None:
        self._lab = lab
        self._control = control
        self._client: distributed.Client | None = None

    def close(self) -> None:
        """Forget the Dask client; what was begun ends by itself."""
        client, self._client = self._client, None
        if client is not None:
            with contextlib.suppress(Exception):
                client.close(timeout=2)

    # --- processes ----------------------------------------------------------------------

    def kill(self, host: str) -> Fault:
        """Kill a host's device process (SIGKILL)."""
        return self._kill(f"kill {host}", [self.host(host)])

    def lose(self, island: str) -> Fault:
        """Kill all device processes of an island at once."""
        return self._kill(f"lose {island}", self._hosts(island))

    def _kill(self, title: str, hosts: Sequence[Host]) -> Fault:
        names = frozenset(host.name for host in hosts)
        islands = tuple(sorted({name.partition("/")[0] for name in names}))
        text = (
            f"within a second the control plane names {', '.join(sorted(names))}; runs that use"
            f" its devices fail and say so, all others go on; values on other hosts stay;"
            f" in seconds {' and '.join(islands)} is whole again"
        )
        expected = Expected(text, _LOST, names, dies=names, blames=(*names,), computes=islands)

        def begin() -> None:
            for host in hosts:
                self._act(host.name, {"do": "kill", "pid": host.pid})

        return self._fault(title, expected, begin)

    def hang(self, host: str, seconds: float = 5.0) -> Fault:
        """Stop a device process (SIGSTOP) for so many seconds."""
        name, seconds = self.host(host).name, duration("seconds", seconds)
        noticed = seconds > 4.0
        text = (
            f"{name} is named as silent within 4 s; what needs it waits, everything else goes on;"
            " after that it goes on, and nothing was lost (lab.on_stuck says when it is restarted"
            " instead)"
        )
        expected = Expected(
            text,
            frozenset({"silent"} if noticed else ()),
            frozenset({name}),
            spares=True,
            computes=(self._island_of(name),),
        )
        return self._fault(
            f"hang {name} for {seconds:g} s",
            expected,
            lambda: self._act(name, {"do": "hang", "seconds": seconds}),
            seconds,
            lambda: self._act(name, {"do": "heal"}),
        )

    def slow(self, host: str, factor: float = 4.0, seconds: float = 10.0) -> Fault:
        """Let a device process run only every so many-th part of the time."""
        name, seconds = self.host(host).name, duration("seconds", seconds)
        if not (isinstance(factor, int | float) and 1 < factor < math.inf):
            raise failures.refused(f"factor={factor!r} makes nothing slower", "factor=4")
        text = (
            f"whatever {name} takes part in takes up to {factor:g} times as long; nothing fails,"
            " nobody is restarted, other islands go on"
        )
        expected = Expected(text, spares=True, computes=(self._island_of(name),))
        return self._fault(
            f"slow {name} down {factor:g} times for {seconds:g} s",
            expected,
            lambda: self._act(name, {"do": "slow", "factor": factor, "seconds": seconds}),
            seconds,
            lambda: self._act(name, {"do": "heal"}),
        )

    # --- messages -----------------------------------------------------------------------

    def delay(self, a: str, b: str, ms: float = 50.0, seconds: float = 10.0) -> Fault:
        """Every message between *a* and *b* comes so much later, in both directions.

        a, b: islands, hosts, or ``"control"``.  Collectives inside an island have
        connections of their own, which are left alone.
        """
        seconds, late = duration("seconds", seconds), duration("ms", ms) / 1000
        text = "results come later by some multiple of it; order and values are the same"
        return self._between(
            f"delay {a} - {b} by {ms:g} ms for {seconds:g} s",
            Expected(text, spares=True, **self._probes(a, b)),
            (a, b),
            {"kind": "delay", "seconds": late, "lasts": seconds},
            seconds,
        )

    def partition(self, a: str, b: str, seconds: float = 5.0) -> Fault:
        """Nothing gets through between *a* and *b*, in both directions; afterwards all does.

        a, b: islands or hosts, of different islands.
        """
        seconds, probes = duration("seconds", seconds), self._probes(a, b)
        if self._island_of(a) == self._island_of(b) or CONTROL in (a, b):
            raise failures.refused(
                f"a partition is between islands, and {a!r} and {b!r} are not in different ones",
                "lab.chaos.hang(host) or .kill(host) for a host that its island cannot reach",
            )
        text = (
            f"transfers between {a} and {b} wait and then arrive; everything else goes on,"
            " nothing fails"
        )
        return self._between(
            f"partition {a} | {b} for {seconds:g} s",
            Expected(text, spares=True, **probes),
            (a, b),
            {"kind": "hold", "lasts": seconds},
            seconds,
        )

    def drop(self, a: str, b: str, count: int = 1, seconds: float = 10.0) -> Fault:
        """The next messages from *a* to *b* are lost, at most *count* on each connection's end."""
        return self._miscount("drop", "lost", a, b, count, seconds)

    def duplicate(self, a: str, b: str, count: int = 1, seconds: float = 10.0) -> Fault:
        """The next messages from *a* to *b* come twice."""
        return self._miscount("duplicate", "repeated", a, b, count, seconds)

    def _miscount(self, kind: str, word: str, a: str, b: str, count: int, seconds: float) -> Fault:
        seconds, count = duration("seconds", seconds), slice_request.count("count", count)
        hosts = {h.name for end in (a, b) if CONTROL in (a, b) for h in self._hosts(end)}
        what = (
            f"{', '.join(sorted(hosts))} counts as lost and comes back, what is on it fails"
            if hosts
            else "transfers that wait on it fail and say so, the next ones take a new connection"
        )
        text = f"the connection ends within a second of the message that was {word}; {what}"
        islands = tuple(sorted({name.partition("/")[0] for name in hosts}))
        probes = {"computes": islands} if hosts else self._probes(a, b)
        expected = Expected(
            text,
            _LOST if hosts else frozenset(),
            frozenset(hosts),
            dies=frozenset(hosts),
            blames=(_COUNTED, *hosts),
            felt=kind == "drop" and not hosts,
            **probes,
        )
        rule = {"kind": kind, "count": count, "lasts": seconds}
        return self._between(
            f"{kind} {count} from {a} to {b}", expected, (a, b), rule, 0.0, both=False
        )

    def _between(
        self,
        title: str,
        expected: Expected,
        ends: tuple[str, str],
        rule: dict[str, Any],
        seconds: float,
        both: bool = True,
    ) -> Fault:
        names = [self._ends(end) for end in ends]
        ways = [(names[0], names[1])] + ([(names[1], names[0])] if both else [])

        def begin() -> float:
            start = time.monotonic()
            for source, target in ways:
                for name in target:
                    self._trouble(name, {**rule, "peers": source})
            return time.monotonic() - start

        def end() -> None:
            for name in {*names[0], *names[1]}:
                self._trouble(name, {"heal": True})

        def healed() -> tuple[Check, ...]:
            """A fault that strikes each of several links once may still lie in wait for some."""
            with contextlib.suppress(PathwaysError):  # a host that is gone has no trouble
                end()
            time.sleep(_TOLD)
            return ()

        if seconds:
            return self._fault(title, expected, begin, seconds, end)
        return self._fault(title, expected, begin, look=healed)

    def _trouble(self, name: str, rule: dict[str, Any]) -> None:
        if name == CONTROL:
            from pathways_lab.runtime.cluster.dask_plugins import trouble_at_control

            self._dask().run_on_scheduler(trouble_at_control, rule)
        else:
            self._act(name, {"do": "trouble", "rule": rule})

    # --- memory -------------------------------------------------------------------------

    def fill_memory(self, host: str, nbytes: int | str | None = None) -> Fault:
        """Hold so many bytes on each device of a host, until the block or the report ends.

        nbytes: also text like ``"1 GiB"``; default: nine tenths of what a device has.
        """
        there = self.host(host)
        count = int(there.memory * 0.9) if nbytes is None else bytes_of(nbytes)
        text = (
            f"runs that need more than the rest of {there.name}'s memory wait, and nothing fails;"
            " what could never fit is refused; when the bytes are free, all go on"
        )
        expected = Expected(text, spares=True, computes=(self._island_of(there.name),))
        held: list[tuple[Slice, Handle]] = []

        def begin() -> None:
            devices = [(there.name, number) for number in range(there.devices)]
            on = self._lab.slice_at(devices, wait=False)
            fill = CompiledFunction(
                lambda: jnp.ones((on.mesh.size, count), jnp.uint8),
                on=on,
                out_shardings=P("x"),
                name="fill",
            )
            held.append((on, fill().block_until_ready()))

        def end() -> None:
            while held:
                on, _ = held.pop()
                on.release()

        title = f"fill {there.name} with {count:,} bytes on each device"
        return self._fault(title, expected, begin, 0.0, end)

    # --- wrong results ------------------------------------------------------------------

    def flip(self, host: str, device: int = 0, seconds: float = 10.0) -> Fault:
        """For so many seconds one bit is wrong in every result that a device computes.

        device: its number on the host.  The report has it go on for as long as
            ``lab.verify()`` takes, to see whether that names it.
        """
        there, seconds = self.host(host), duration("seconds", seconds)
        if slice_request.count("device", device, 0) >= there.devices:
            raise failures.refused(
                f"device={device} of {host} does not exist: it has {there.devices}",
                f"a number from 0 to {there.devices - 1}",
            )
        text = (
            "nothing fails and nobody notices, results are just wrong, and so is what is made of"
            f" them; lab.verify() names device {device} of {host} and no other, as long as it lasts"
        )
        expected = Expected(text, spares=True, computes=(self._island_of(host),))

        def flip(lasts: float) -> None:
            self._act(host, {"do": "flip", "rule": {"device": device, "lasts": lasts}})

        version = self._lab.timeline.version

        def look() -> list[Check]:
            """It is over by now: it is begun again for as long as that takes, and ended."""
            noticed = [
                f"{record.kind}: {record.args}"
                for record in self._lab.timeline.since(version).records
                if isinstance(record, Event)
                and (record.kind, record.host) in {("failed", host), ("host-lost", host)}
            ]
            flip(_LOOKING)
            try:
                meanwhile = self._lab.verify()
            finally:
                flip(0.0)
            named = [(each.host, each.number) for each in meanwhile.suspects]
            return [
                Check("nobody notices", not noticed, "; ".join(noticed)[:200] or "nothing is told"),
                Check("lab.verify() names it and no other", named == [(host, device)],
                      meanwhile.story),
            ]  # fmt: skip

        return self._fault(
            f"flip a bit of all that device {device} of {host} computes, for {seconds:g} s",
            expected,
            lambda: flip(seconds),
            seconds,
            lambda: flip(0.0),
            look,
        )

    # --- clients, and the whole ---------------------------------------------------------

    def lose_client(self) -> Fault:
        """A client of its own is killed when it has written half of a submission."""
        name = f"doomed-{os.urandom(3).hex()}"
        text = (
            "the control plane notices at once; its handles, slices and bytes are freed, the half"
            " message is thrown away, and nobody else notices anything"
        )
        expected = Expected(
            text, frozenset({"client-left"}), frozenset({name}), spares=True,
            computes=tuple(island.name for island in self._lab.islands),
        )  # fmt: skip
        folder = tempfile.TemporaryDirectory(prefix="pw-")
        children: list[Child] = []

        def begin() -> float:
            start, control = time.monotonic(), self._control
            child = spawn(
                "pathways_lab.client.chaos.crash_client",
                {
                    "address": control.address,
                    "key": control.key.hex(),
                    "tls": control.tls,
                    "holder": control.holder,
                    "name": name,
                },
                name=name,
                folder=Path(folder.name),
            )
            children.append(child)
            child.hear(60.0)  # it is about to
            ready = time.monotonic()
            child.wait()
            return ready - start

        def look() -> list[Check]:
            for child in children:
                child.end()
            folder.cleanup()
            killed = all(child.exit_code == -signal.SIGKILL for child in children)
            topology = self._lab.session.connection.topology
            left = [s for s in topology["slices"] if name in str(s)]
            return [
                Check("it was killed in the middle", killed, "by SIGKILL" if killed else "no"),
                Check("nothing of it is left", name not in self._lab.clients and not left,
                      f"{len(left)} slices"),
            ]  # fmt: skip

        title = f"kill client {name} in the middle of a submission"
        return self._fault(title, expected, begin, look=look)

    def lose_scheduler(self) -> Fault:
        """Kill the Dask scheduler.  This lab ends with it."""
        client = self._dask()
        if client.run_on_scheduler(os.getpid) == os.getpid():
            raise failures.refused(
                "the Dask scheduler of this lab runs in this process",
                "a cluster whose scheduler has a process of its own, such as pw.start()'s",
            )
        text = (
            "within seconds every handle fails and says that the Dask scheduler ended; the lab is"
            " closed, no process of it stays; pw.start() or pw.connect(...) forms a new one"
        )
        expected = Expected(text, blames=("the lab is gone",))

        def begin() -> None:
            client.run_on_scheduler(_end_soon)
            self.close()  # or it would look for its scheduler, and say so

        def look() -> list[Check]:
            connection = self._lab.session.connection
            with contextlib.suppress(TimeoutError):
                connection.board.wait(lambda: connection.closed is not None, 20.0, "the end")
            told = "" if connection.closed is None else str(PathwaysError(connection.closed))
            return [
                Check("the lab is closed", self._lab.closed, told),
                Check("it says how a new one forms", "pw.start()" in told, told),
            ]

        return self._fault("lose the Dask scheduler", expected, begin, look=look)

    def _fault(
        self, title: str, expected: Expected, begin: Begin, *args: Any, **more: Any
    ) -> Fault:
        # First: the time that it takes is not the fault's.
        self._dask()
        return Fault(self._lab, title, expected, begin, *args, **more)

    # --- reaching hosts -----------------------------------------------------------------

    def _dask(self) -> distributed.Client:
        """The Dask client of an owner.  Raises PathwaysError for all others."""
        self._lab.session.connection.check()
        if self._client is None:
            try:
                self._client = self._lab.dask_client()
            except PathwaysError as error:
                raise failures.refused(
                    "this is for owners of the lab, who hold the credentials of its Dask cluster;"
                    " this kernel has none",
                    "ask an owner, or start a lab of your own: pw.start()",
                ) from error
        return self._client

    def ask(self, function: Callable[..., Any], host: str, *args: Any, must: bool = True) -> Any:
        """The answer of the worker that has the device process of a host: the one that is true.

        must: a worker has to have it.  Raises PathwaysError.
        """
        answers: dict[str, Any] = self._dask().run(function, host, *args)
        found = next(filter(None, answers.values()), None)
        if found is None and must:
            raise failures.failure(
                "lost", f"no worker has the device process of {host} (any more)", "lab.islands"
            )
        return found

    def _act(self, host: str, wish: dict[str, Any]) -> None:
        self.ask(act, host, wish, must=wish["do"] != "heal")

    def _ends(self, end: str) -> list[str]:
        return [CONTROL] if end == CONTROL else [host.name for host in self._hosts(end)]

    def _hosts(self, name: str) -> list[Host]:
        """The hosts of an island, or one host; none for the control plane."""
        every = [host for island in self._lab.islands for host in island.hosts]
        found = [h for h in every if name in (h.name, h.name.partition("/")[0])]
        if not found and name != CONTROL:
            raise failures.refused(
                f"the lab has no host or island {name!r}",
                f"one of {', '.join(sorted({self._island_of(h.name) for h in every}))},"
                f" {', '.join(h.name for h in every)}",
            )
        return found

    def host(self, name: str) -> Host:
        """The host of this name.  Raises PathwaysError that names those there are."""
        found = self._hosts(name)
        if len(found) != 1 or found[0].name != name:
            raise failures.refused(
                f"{name!r} is not a host", f"one of {', '.join(host.name for host in found)}"
            )
        return found[0]

    def _island_of(self, name: str) -> str:
        return name.partition("/")[0]

    def _probes(self, a: str, b: str) -> dict[str, Any]:
        """The transfer that must work between two ends."""
        for end in (a, b):
            self._ends(end)
        islands = [self._island_of(end) for end in (a, b) if end != CONTROL]
        if len(set(islands)) == 2:
            return {"between": ((islands[0], islands[1]), (islands[1], islands[0]))}
        return {"computes": tuple(dict.fromkeys(islands))}

    def __repr__(self) -> str:
        return (
            "<Chaos: kill(host), hang(host), slow(host), lose(island), delay(a, b), drop(a, b),"
            " duplicate(a, b), partition(a, b), fill_memory(host),"
            " flip(host, device), lose_client(), lose_scheduler()>"
        )


def _end_soon() -> None:
    """In the Dask scheduler: it can still answer."""
    killer = threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGKILL))
    killer.daemon = True
    killer.start()
