"""A lab over several machines, each test a story of one fault."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.machines.bench import Machines
from tests.machines.conftest import Make
from tests.machines.group import Group

pytestmark = pytest.mark.cluster

CONNECT = """
import sys
import distributed, jax, numpy as np, pathways_lab as pw
from jax.sharding import PartitionSpec as P
with distributed.Client(sys.argv[1]) as client:
    client.wait_for_workers(WORKERS)
    scheduler = client.scheduler_info()["address"]
lab = pw.connect(sys.argv[1])
def say(*what): print(*what, flush=True)
"""

SUM = """
s = lab.slice(2, axes=("x",))
total = pw.jit(lambda x: x.sum(), on=s, in_shardings=P("x"))
say("sum", np.asarray(total(np.arange(8.0))))
"""

LATE = """
input()
while "west/6 is down" not in repr(lab): pass
say(lab, lab._repr_html_())
"""


@contextmanager
def group_of(machines: Machines, *options: str) -> Iterator[Group]:
    group = Group(machines, *options)
    try:
        yield group
    finally:
        group.close()


def other_jax(folder: Path) -> str:
    """A search path on which another version of JAX seems to be installed."""
    info = folder / "other" / "jax-0.1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: jax\nVersion: 0.1\n")
    return str(info.parent)


def no_package(folder: Path) -> str:
    """A search path on which this package is not there."""
    package = folder / "lacking" / "pathways_lab"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise ImportError('it is not installed')")
    return str(package.parent)


def test_a_bad_worker_costs_one_worker_and_is_named(machines: Make) -> None:
    names = ("sched", "good1", "good2", "lacks", "old", "none", "late", "note")
    with group_of(machines(names), "--host", "10.77.0.1") as group:
        shared = group.machines.shared
        other = other_jax(shared)
        one = ("--resources", "devices=1", "--name")
        group.worker("good1", *one, "west/1")
        group.worker("good2", *one, "west/2")
        group.worker("lacks", *one, "west/3", PYTHONPATH=no_package(shared))
        group.worker("old", *one, "west/4", PYTHONPATH=other)
        group.worker("none", "--resources", "devices=0", "--name", "west/5")
        source = CONNECT.replace("WORKERS", "5") + SUM + LATE
        with group.client("note", source) as client:
            assert client.stdout
            assert client.stdin
            told = {}
            for line in client.stdout:
                if line.startswith("left out: "):
                    told[line.split(" on ")[1].split(":")[0]] = line
                if line.startswith("sum"):
                    break
            assert line == "sum 28.0\n"
            assert told.keys() == {"lacks", "old", "none"}
            assert "ImportError: it is not installed" in told["lacks"]
            assert "the lab has JAX" in told["old"]
            assert "its resource devices is 0: " in told["none"]
            group.worker("late", *one, "west/6", PYTHONPATH=other)
            later = client.communicate("\n")[0]
            assert "west/6 is down" in later
            assert "was not started on late: the lab has JAX" in later
        with group.client("note", CONNECT.replace("WORKERS", "5"), PYTHONPATH=other) as client:
            assert "the lab at tls://10.77.0.1:8786 has JAX" in (said := client.communicate()[0])
            assert "and this client 0.1" in said


def test_a_scheduler_that_calls_itself_loopback_is_reached_by_all(machines: Make) -> None:
    """Without a route to elsewhere Dask calls itself what its name stands for, as on Debian."""
    with group_of(machines(("sched", "one", "note"))) as group:
        group.worker("one", "--name", "west/1", "--resources", "devices=2")
        group.worker("sched", "--name", "west/2", "--resources", "devices=2")
        source = CONNECT.replace("WORKERS", "2") + "say(scheduler)\n" + SUM
        source = source.replace("slice(2", "slice(4")
        for machine in ("sched", "note"):
            with group.client(machine, source) as client:
                said = client.communicate()[0]
            assert "tls://127.0.1.1:8786" in said
            assert "sum 28.0" in said
