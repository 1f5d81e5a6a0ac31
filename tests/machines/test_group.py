"""A lab over several machines, each test a story of one fault."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.machines.bench import Machines
from tests.machines.conftest import Make
from tests.machines.group import Group, lines_of, path

pytestmark = pytest.mark.cluster

CONNECT = """
import sys, time
import distributed, jax, numpy as np, pathways_lab as pw
from jax.sharding import PartitionSpec as P
with distributed.Client(sys.argv[1]) as client:
    client.wait_for_workers(WORKERS)
lab = pw.connect(sys.argv[1], **OPTIONS)
def say(*what): print(*what, flush=True)
"""

WAIT = """
import sys
import distributed, jax, numpy as np, pathways_lab as pw
from jax.sharding import PartitionSpec as P
with distributed.Client(sys.argv[1]) as client:
    client.wait_for_workers(2)
    print(client.scheduler_info()["address"])
"""

NOBODY = """
import time, pathways_lab as pw
for machine in "one", "sched":
    began = time.monotonic()
    try: pw.connect(f"tls://{machine}:8786")
    except pw.PathwaysError as error: print(error.failure.message)
    assert time.monotonic() - began < 30.0
"""

CLOSED = """
import sys, time, pathways_lab as pw
sys.stderr, began = sys.stdout, time.monotonic()
lab = pw.connect()
print("connected within", time.monotonic() - began)
lab.dask_client().close()
"""

SUM = """
s = lab.slice(2, axes=("x",))
total = pw.jit(lambda x: x.sum(), on=s, in_shardings=P("x"))
say("sum", np.asarray(total(np.arange(8.0))))
"""

IN_CLEAR = """
secret = np.frombuffer(b"OfNobody" * 2_000, np.int32)
add = pw.jit(lambda x: x.reshape(2, -1).sum(0), on=s, in_shardings=P("x"))
say((add(np.concatenate([secret, 0 * secret])).result() == secret).all(), lab)
"""

LATE = """
input()
while "west/late is down" not in repr(lab): time.sleep(0.02)
say(lab, lab._repr_html_())
"""


def connect(workers: int, **options: object) -> str:
    """The beginning of a client that waits for so many workers."""
    return CONNECT.replace("WORKERS", str(workers)).replace("OPTIONS", repr(options))


@contextmanager
def group_of(machines: Machines, *options: str, **environment: str) -> Iterator[Group]:
    group = Group(machines, *options, **environment)
    try:
        yield group
    finally:
        group.close()
        machines.close()


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
        group.worker("good1", "--devices", "1")
        group.worker("good2", "--devices", "1")
        group.worker("old", PYTHONPATH=other)
        group.worker("none", "--devices", "0")
        dask = ("distributed.cli.dask_worker", group.address, "--no-nanny", "--no-dashboard")
        group.start("lacks", *dask, PYTHONPATH=no_package(shared))
        source = connect(5, plain_collectives=True) + SUM + IN_CLEAR + LATE
        group.machines.sniff("OfNobody")
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
            assert "2 devices, collectives in the clear, " in client.stdout.readline()
            assert group.machines.sniff()["OfNobody"] > 0, "its owner has said so"
            assert told.keys() == {"lacks", "old", "none"}
            assert "ImportError: it is not installed" in told["lacks"]
            assert "the lab has JAX" in told["old"]
            assert "its resource devices is 0: " in told["none"]
            group.worker("late", PYTHONPATH=other)
            later = client.communicate("\n")[0]
            assert "west/late is down" in later
            assert "was not started on late: the lab has JAX" in later
            assert "mend its worker" in later
            assert "lab.restart" not in later
        with group.client("note", connect(5), PYTHONPATH=other) as client:
            assert "the lab at tls://10.77.0.1:8786 has JAX" in (said := client.communicate()[0])
            assert "and this client 0.1" in said


FEW_PORTS = """
on = [lab.slice(1, island=island) for island in ("one", "two")]
add = [pw.jit(lambda x: x + 1, on=s) for s in on]
say("computed", add[1](add[0](np.arange(4.0))).result().sum())
say(*sorted(h.data_address for island in lab.islands for h in island.hosts))
"""


def test_all_doors_are_at_the_ports_that_were_asked_for(machines: Make) -> None:
    """A firewall swallows everything else; one machine has ports of its own."""
    group_machines = machines(("sched", "one", "two", "note"))
    group_machines.wall("sched", 8786, 9000)
    group_machines.wall("one", 9000, 9001)
    group_machines.wall("two", 9500, 9501)
    with group_of(group_machines, "--host", "10.77.0.1") as group:
        group.worker("one", "--devices", "1", "--island", "one", "--ports", "9000-9001")
        group.worker("two", "--devices", "1", "--island", "two", "--ports", "9500-9501")
        asked = connect(2, ports=9000)
        with group.client("note", asked + FEW_PORTS) as client:
            told = client.communicate()[0]
    assert "computed 14.0\n" in told, told
    assert re.search(r"^tcp://10\.77\.0\.2:900[01] tcp://10\.77\.0\.3:950[01]$", told, re.M), told
    assert "does not reach" not in told


FORWARD = """
import socket, sys, threading
def carry(one, other):
    while data := one.recv(65536): other.sendall(data)
def forward(door, port):
    while True:
        near, far = door.accept()[0], socket.create_connection(("10.77.0.2", port))
        for ends in (near, far), (far, near): threading.Thread(target=carry, args=ends).start()
for port in 9000, 9001, 9002:
    door = socket.create_server(("", port))
    threading.Thread(target=forward, args=(door, port)).start()
print("forwards", flush=True)
"""

BEHIND = """
add = pw.jit(lambda x: x + 1, on=lab.slice(1))
say("computed", add(np.arange(4.0)).result().sum(), lab.islands[0].hosts[0].data_address)
"""


def test_a_machine_is_reached_at_its_contact_address(machines: Make) -> None:
    group_machines = machines(("sched", "inner", "gate", "note"))
    group_machines.cut("inner", "note")
    with (
        group_of(group_machines, "--host", "10.77.0.1") as group,
        group_machines["gate"].python(FORWARD) as gate,
    ):
        assert gate.stdout
        assert gate.stdout.readline() == "forwards\n"
        group.worker("inner", "--devices", "1", "--contact", "gate", "--ports", "9000-9002")
        with group.client("note", connect(1) + BEHIND) as client:
            told = client.communicate()[0]
        gate.kill()
    assert re.search(r"^computed 10\.0 tcp://gate:900[12]$", told, re.M), told
    assert "does not reach" not in told


BOOT = """
on = lab.slice(1, island="east")
add = pw.jit(lambda x: x + 1, on=on)
kept = add(np.arange(4.0))
say("there", kept.result().sum(), lab.islands[0].hosts[0].name)
input()
began = time.monotonic()
try: add(kept).result()
except pw.PathwaysError as error: say("lost", time.monotonic() - began, error.failure.message)
while True:
    try: on.rebind()
    except pw.PathwaysError: time.sleep(0.1)
    else: break
say("back", lab.islands[0].hosts[0].name, add(np.arange(4.0)).result().sum())
"""


def test_a_machine_that_boots_comes_back_under_its_name(machines: Make) -> None:
    """Also with a certificate that was renewed while the lab runs."""
    silent = {"DASK_DISTRIBUTED__COMM__TIMEOUTS__TCP": "11s"}
    with group_of(machines(("sched", "one", "note")), "--host", "10.77.0.1", **silent) as group:
        group.worker("one", "--devices", "1", "--island", "east")
        source = connect(1, silence=3)
        with group.client("note", source + BOOT) as client:
            assert client.stdin
            assert client.stdout
            said = iter(client.stdout.readline, "")
            assert "there 10.0 east/one\n" in said
            group.certify("--renew")
            group.machines.boot("one")
            group.worker("one", "--devices", "1", "--island", "east")
            client.stdin.write("\n")
            client.stdin.flush()
            told = "".join(said)
    why = r"Dask removed its worker \(tls|.* its machine has started anew|no word from it on one"
    assert re.search(rf"^lost \d\S* host east/one was lost: {why}", told, re.M), told
    assert "back east/one 10.0\n" in told, told


APART = """
pids = {host.name: host.pid for host in lab.islands[0].hosts}
mine = [pw.jit(lambda x: x + 1, on=lab.slice(1))(np.arange(4.0)) for _ in range(4)]
mine = list({handle.slice.hosts[0]: handle for handle in mine}.values())
assert len(mine) == len(pids)
say("cut")
input()
began = time.monotonic()
try: np.asarray(total(np.arange(8.0)))
except pw.PathwaysError as error: say("lost", time.monotonic() - began, error.failure.message)
input()
say("same", pids == {host.name: host.pid for host in lab.islands[0].hosts})
say("kept", *(handle.result().sum() for handle in mine))
s.rebind()
say("again", np.asarray(total(np.arange(8.0))))
"""


def test_hosts_that_do_not_reach_each_other_cost_their_gangs_and_no_process(
    machines: Make,
) -> None:
    with group_of(machines(("sched", "one", "two", "note")), "--host", "10.77.0.1") as group:
        for machine in ("one", "two"):
            group.worker(machine, "--devices", "2")
        source = connect(2, silence=3) + SUM.replace("slice(2", "slice(4") + APART
        with group.client("note", source) as client:
            assert client.stdin
            assert client.stdout
            said = iter(client.stdout.readline, "")
            told = [*itertools.takewhile(lambda line: line != "cut\n", said)]
            assert "sum 28.0\n" in told
            group.machines.cut("one", "two")
            client.stdin.write("\n")
            client.stdin.flush()
            lost = next(line for line in said if line.startswith("lost"))
            why = (
                r"its hosts do not reach each other: no word from west/(one|two) \(10\.77\.0\.\d\)"
            )
            assert re.search(why, lost), lost
            assert float(lost.split()[1]) < 25
            group.machines.plug("one")
            client.stdin.write("\n")
            client.stdin.flush()
            assert [*said] == ["same True\n", "kept 10.0 10.0\n", "again 28.0\n"]


SILENT = """
def ends(call):
    began = time.monotonic()
    try: return str(call())
    except pw.PathwaysError as error: why = error.failure.message
    return f"took {time.monotonic() - began:.0f} s: {why}"
on = {island: lab.slice(1, island=island) for island in ("west", "east")}
add = {island: pw.jit(lambda x: x + 1, on=s) for island, s in on.items()}
east = add["east"](np.arange(4.0))
with lab.slice((2, 1), ("island", "x"), islands=("east", "west")) as both:
    total = pw.jit(lambda x: x.sum(), on=both, in_shardings=P(("island", "x")))
    say("sum over", *both.islands, total(np.arange(8.0)).result(), lab)
say("there", add["west"](np.arange(8.0)).result().sum(), east.result().sum())
input()
say(ends(lambda: add["west"](np.arange(8.0)).result()))
say(ends(lambda: add["east"](east).result().sum()))
say("ended")
input()
say(ends(lambda: lab.slice(1, island="east")))
say("ended")
"""


def test_a_silent_machine_is_called_silent_when_the_lab_says_so(machines: Make) -> None:
    names = ("sched", "one", "two", "note")
    with group_of(machines(names), "--host", "10.77.0.1") as group:
        group.worker("one", "--devices", "1")
        group.worker("two", "--devices", "1", "--island", "east")
        source = connect(2, silence=4) + SILENT
        with group.client("note", source) as client:
            assert client.stdin
            assert client.stdout
            said = iter(client.stdout.readline, "")
            told = list(itertools.takewhile(lambda line: line != "there 36.0 10.0\n", said))
            assert client.poll() is None, told
            assert "sum over east west 28.0 <Lab kernel-1: 2 islands, 2 devices>\n" in told

            def after(what: Callable[[str], None], machine: str) -> str:
                what(machine)
                assert client.stdin
                client.stdin.write("\n")
                client.stdin.flush()
                return "".join(itertools.takewhile(lambda line: line != "ended\n", said))

            lost = after(group.machines.unplug, "one")
            assert re.search(r"no word from west/one on one for \d+\.\d s", lost)
            assert "stuck" not in lost
            assert re.search(r"was lost: no word from it on one \(10\.77\.0\.2\) for \d+ s", lost)
            assert "\n14.0\n" in lost
            assert int(re.search(r"^took (\d+)", lost, re.M)[1]) < 40
            lost = after(group.machines.unplug, "sched")
            assert re.search(r"no word from control on sched \(10\.77\.0\.1\) for \d+ s", lost)
            assert int(re.search(r"^took (\d+)", lost, re.M)[1]) < 40


WALLED = """
import sys, time, pathways_lab as pw
import distributed
with distributed.Client(sys.argv[1]) as client: client.wait_for_workers(1)
began = time.monotonic()
try: pw.connect(sys.argv[1])
except pw.PathwaysError as error: print(error)
print("seconds", time.monotonic() - began)
"""


def test_a_closed_port_is_named_with_both_ends(machines: Make) -> None:
    with group_of(machines(("sched", "one", "note")), "--host", "10.77.0.1") as group:
        group.machines.wall("sched", 8786)
        group.worker("one", "--devices", "1")
        with group.client("note", WALLED) as client:
            said = client.communicate()[0]
    closed = r"one does not reach the lab's control plane at 10\.77\.0\.1, port \d+: nothing came"
    assert re.search(closed, said), said
    assert "open the ports of these machines to each other" in said
    assert float(said.split("seconds ")[1]) < 20


def test_the_lines_of_the_page_make_a_lab(machines: Make) -> None:
    """Although the scheduler, which finds no route to elsewhere, calls itself what its name
    stands for on Debian; and the doctor names a way that is cut."""
    shell, python = (lines_of("By hand", language) for language in ("sh", "python"))
    certs, scheduler, worker, status, doctor = (
        line.split("#")[0].split() for line in shell.splitlines()
    )
    group = machines(("sched", "one", "two", "note"))
    at = {"env": {"PATH": path(), "HOME": str(group.shared)}}
    group["sched"].run(*certs, **at)
    with (group.shared / "log").open("w") as log:
        quiet = {**at, "stdout": log, "stderr": log}
        group["sched"].start(*scheduler, **quiet)
        for machine in ("one", "two"):
            group[machine].start(*worker, **quiet)
    source = python + CONNECT.split("lab =")[1].partition("\n")[2]
    source = WAIT + source + SUM + "say(lab); say(lab.islands)"
    environment = {**at["env"], "DASK_CONFIG": f"{group.shared}/certs"}
    with group["note"].python(source, "tls://sched:8786", env=environment) as client:
        said = client.communicate()[0]
    assert "tls://127.0.1.1:8786" in said
    assert "sum 28.0" in said
    assert "2 devices>" in said, "nothing is in the clear"
    for machine, address in ("one", "10.77.0.2"), ("two", "10.77.0.3"):
        assert re.search(rf"west/{machine} +{machine} \({re.escape(address)}\) .* JAX \d", said)
    told = group["note"].run(*status, **at)
    assert re.search(r"one +west/one +1 ", told)
    assert "a lab runs here" in told
    group.cut("one", "two")
    group.unplug("sched")
    with group["note"].python(NOBODY, env=environment) as client:
        refused, silent = client.communicate()[0].splitlines()
    assert "one (10.77.0.2) refuses connections at port 8786" in refused
    assert "nothing came back from sched (10.77.0.1) for 2 s: no machine has" in silent
    group.plug("sched")
    by_name = {**environment, "PATHWAYS_LAB": "tls://sched:8786"}
    with group["note"].python(CLOSED, env=by_name) as client:
        told, took = client.communicate()[0].split("connected within ")
    assert client.returncode == 0
    assert "two does not reach west/one at 10.77.0.2, port" in told
    assert "one does not reach west/two at 10.77.0.3, port" in told
    assert float(took) < 15.0
    with group["note"].start(*doctor, **at) as process:
        told = process.communicate()[0]
    assert "west/one does not reach west/two: no answer from 10.77.0.3 for 2 s" in told
    assert "west/two does not reach west/one: no answer from 10.77.0.2 for 2 s" in told
    assert process.returncode == 1
    assert "TLS: both ends" in told
    assert "the same versions everywhere" in told
    assert "5 ways between them" in told
