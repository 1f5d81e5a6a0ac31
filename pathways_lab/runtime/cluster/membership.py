"""The island that a Dask worker belongs to, and the name of its host.  Pure.

Problem: Dask knows workers, not islands.  A person who starts workers must be
able to say which of them are wired together, by the means that every launcher offers:
a name, a resource, or an environment variable.

The rule, first match wins:

1. a worker name with a slash, ``--name island0/host1``: the island is what
   stands before the slash, the host is the whole name;
2. a resource, ``--resources "island=3"`` (island ``island3``) or
   ``--resources "island:west=1"`` (island ``west``);
3. the environment variable ``PATHWAYS_ISLAND`` of the worker;
4. the argument ``islands`` of ``attach``: ``"machine"`` (the default): the workers of a machine
   form one island, named after it; ``"job"``: those of a job of a queueing system
   (``job17``); ``"worker"``: each worker is one; or a function from the name of the machine to
   that of the island.

A worker without a name is told from others of its machine by its port; where the island is
more than its machine, the host's name has both.  Two workers that come to one host's name are
refused: the first one keeps it.

The rule holds whenever a worker comes, also to a lab that runs (Dask's own scaling
included), and it may come to an island that is there or make a new one.  A worker
that goes is a host that leaves: runs that are admitted on it end first where Dask
retires it.

The number of devices, first match wins: the argument of ``attach``, a resource
``devices=4`` of the worker, what JAX finds.

Rule for maintainers: the docstring above is the documentation; tests cite it.

Paper: section 4.1 (islands of accelerators behind one resource manager).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple, get_args

from pathways_lab.runtime.processes import job

VARIABLE = "PATHWAYS_ISLAND"
Rule = Literal["machine", "job", "worker"]
Islands = Rule | Callable[[str], str]
"""Which workers form an island where they say nothing themselves."""


class Place(NamedTuple):
    """The island of a worker and the name of its host, unique on the cluster."""

    island: str
    host: str


def is_rule(islands: object) -> bool:
    """Whether this can say which workers form an island."""
    return callable(islands) or (isinstance(islands, str) and islands in get_args(Rule))


def place_of(
    name: object,
    resources: Mapping[str, float],
    environment: Mapping[str, str],
    machine: str,
    islands: Islands = "machine",
) -> Place:
    """Apply the rule to one worker.

    name: as Dask has it: text, a number, or the worker's address if none was given.

    Raises ValueError where *islands* finds no name, and what it raises if it is a function.
    """
    text = str(name)
    named = "://" not in text
    if named and "/" in text.strip("/"):
        return Place(text.strip("/").split("/")[0], text.strip("/"))
    said = _island_resource(resources) or environment.get(VARIABLE)
    number = text if named else re.sub(r".*?(\d+)$", r"\1", text)
    own = f"host{number}" if number.isdecimal() else text
    island = said or _by_rule(islands, machine or "island0", own, environment)
    if not named and machine not in ("", island):
        own = f"{machine}-{number}"
    return Place(island, f"{island}/{own}")


def _by_rule(islands: Islands, machine: str, host: str, environment: Mapping[str, str]) -> str:
    if callable(islands):
        island = islands(machine)
        if not isinstance(island, str) or not island or "/" in island:
            raise ValueError(
                f"islands({machine!r}) is {island!r}: the name of an island is a text without '/'"
            )
        return island
    if islands == "job":
        number = job.number_of(environment)
        if not number:
            raise ValueError(
                'islands="job", and the worker is in no job: none of '
                f"{', '.join(job.NUMBERS)} is in its environment"
            )
        return f"job{number}"
    return host if islands == "worker" else machine


def devices_of(resources: Mapping[str, float], argument: int | None) -> int | None:
    """How many devices a worker's host shall have; None: what JAX finds.

    Raises ValueError for a resource that is no such number.
    """
    if argument is not None:
        return argument
    if "devices" not in resources:
        return None
    count = resources["devices"]
    if count < 1 or count != int(count):
        raise ValueError(
            f"its resource devices is {count:g}: a host has a whole number of devices, 1 at least;"
            ' start the worker with --resources "devices=1", or with no such resource for all that'
            " JAX finds"
        )
    return int(count)


def _island_resource(resources: Mapping[str, float]) -> str:
    for key in sorted(resources):
        if key.startswith("island:"):
            return key.removeprefix("island:")
    return f"island{int(resources['island'])}" if "island" in resources else ""
