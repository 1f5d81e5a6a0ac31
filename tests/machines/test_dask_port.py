"""A lab whose notebook reaches nothing but the port of Dask's scheduler."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from tests.machines.bench import Machine, until
from tests.machines.conftest import Make
from tests.machines.group import BIN, Group, lines_of, path, tell

pytestmark = pytest.mark.cluster

SECRET, HELLO = "OfNobody", "PWLAB\r\n"
"""Eight bytes of what is sent, and the beginning of a link's handshake."""

FORWARD = """
import socket, sys, threading
def carry(one, other):
    try:
        while data := one.recv(65536): other.sendall(data)
    except OSError: pass
    for end in (one, other):
        try: end.shutdown(socket.SHUT_RDWR)
        except OSError: pass
door = socket.create_server((sys.argv[1], 8786))
print("forwards", flush=True)
while True:
    near, far = door.accept()[0], socket.create_connection((sys.argv[2], 8786))
    for ends in (near, far), (far, near): threading.Thread(target=carry, args=ends).start()
"""
"""Both ends of the one way from the notebook's machine to others, as ``ssh -L`` makes it."""

LINES = lines_of("A notebook that reaches one port only", "python")
FAR = f"""
import os, signal, sys, threading, time
import distributed, jax, numpy as np, pathways_lab as pw
sys.stderr = sys.stdout
def say(*what): print(*what, flush=True)
at = "tls://127.0.0.1:8786"
with distributed.Client(at) as client: client.wait_for_workers(2)
if sys.argv[2:] == ["first"]:
    try: pw.connect(at)
    except pw.PathwaysError as error: say("refused", error)
LINES
on = [lab.slice(1) for _ in range(2)]
assert on[0].hosts != on[1].hosts
add = [pw.jit(lambda x: x + 1, on=s) for s in on]
for size in 1, 1_000, 1_000_000:
    x = np.frombuffer(b"{SECRET}" * size, np.int32)
    assert np.array_equal(add[1](add[0](x)).result(), x + 2)
@pw.program
def both(x): return add[1](add[0](x))
say("computed", both(np.arange(4.0)).result().sum())
with lab.slice(2, axes=("x",)) as whole:
    total = pw.jit(lambda x: x.sum(), on=whole, in_shardings=jax.P("x"))
    say("sum over", len(whole.hosts), total(np.arange(8.0)).result())
try: lab.invite("bob.json")
except pw.PathwaysError as error: say("no invitation:", error.failure.message)
lab.invite("ann.json", owner=True)
with pw.connect("ann.json", name="ann") as ann:
    say("ann", pw.jit(lambda x: x + 1, on=ann.slice(1))(np.arange(4.0)).result().sum())
def sleep(x): return jax.pure_callback(lambda v: (time.sleep(3.0), v)[1], x, x)
slept = pw.jit(sleep, on=on[0])(np.arange(4.0))
threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT)).start()
began = time.monotonic()
try: slept.result()
except KeyboardInterrupt: say("interrupted", time.monotonic() - began < 2.5)
say("here", slept.result().sum())
if sys.argv[2:] == ["killed"]: os.kill(os.getpid(), signal.SIGKILL)
input()
time.sleep(4.0)
say("still here", add[1](np.arange(4.0)).result().sum())
input()
began = time.monotonic()
try: add[1](np.arange(4.0)).result()
except pw.PathwaysError as error: say("lost", time.monotonic() - began, error.failure.message)
""".replace("LINES", LINES.replace('"dask"', '"dask", silence=8'))


@pytest.fixture
def group(machines: Make) -> Iterator[Group]:
    """Two workers of an island, and a machine that reaches the scheduler's port only."""
    group_machines = machines(("sched", "one", "two", "gate", "note"))
    for machine in ("sched", "one", "two"):
        group_machines.cut("note", machine)
    made = Group(group_machines, "--host", "10.77.0.1")
    for machine in ("one", "two"):
        made.worker(machine, "--devices", "1")
    with (
        group_machines["gate"].python(FORWARD, "", "10.77.0.1") as gate,
        group_machines["note"].python(FORWARD, "127.0.0.1", "gate") as note,
    ):
        for end in (gate, note):
            assert end.stdout
            assert end.stdout.readline() == "forwards\n"
        yield made
        gate.kill()
        note.kill()
    made.close()
    group_machines.close()


def until_line(said: Iterator[str], begin: str) -> str:
    """The lines of a client up to one that begins so."""
    told = ""
    for line in said:
        told += line
        if line.startswith(begin):
            return told
    raise AssertionError(told)


def connections(machine: Machine) -> int:
    """How many there are from and to a machine."""
    return machine.run("cat", "/proc/net/tcp").count(" 01 ")


def test_a_notebook_behind_a_forwarded_port_has_the_whole_lab(group: Group) -> None:
    machines = group.machines
    machines.sniff(SECRET, HELLO)
    with group.client("note", FAR, "first") as client:
        assert client.stdout
        said = iter(client.stdout.readline, "")
        told = until_line(said, "here")
        assert re.search(r"^refused .* is reached at 127\.0\.0\.1, by a forwarded port", told, re.M)
        assert 'remedy: transport="dask" goes through that port' in told
        assert "computed 14.0\n" in told
        assert "no invitation: this client's links go over Dask's comms" in told
        assert "ann 10.0\n" in told
        assert "sum over 2 28.0\n" in told
        assert "interrupted True\nhere 6.0\n" in told
        assert machines.sniff() == {SECRET: 0, HELLO: 0}
        doctor = (sys.executable, "-m", "pathways_lab", "doctor", "tls://127.0.0.1:8786")
        settings = {"DASK_CONFIG": f"{machines.shared}/certs"}
        with machines["note"].start(*doctor, env=settings) as process:
            told = process.communicate()[0]
        for name in "scheduler", "west/one", "west/two":
            assert f"this client does not reach {name}: " in told
        assert 'transport="dask"' in told
        assert "west/one does not reach" not in told
        # A client that is killed leaves nothing on the way.
        before = {name: connections(machines[name]) for name in ("sched", "one", "two")}
        with group.client("note", FAR, "killed") as killed:
            assert "here 6.0\n" in killed.communicate()[0]
        for name, count in before.items():
            until(lambda name=name, count=count: connections(machines[name]) <= count, name, 5)
        machines.unplug("gate")
        time.sleep(3.0)
        machines.plug("gate")
        tell(client, "")
        told = until_line(said, "still here 10.0")
        assert re.search(r"^\[watchdog\] no word from control on sched for \d\.\d s$", told, re.M)
        assert "[watchdog] control on sched answers again\n" in told
        machines.unplug("gate")
        told = client.communicate("\n")[0]
    lost = re.search(r"^lost (\d+)\S* the lab is gone: no word from control on sched", told, re.M)
    assert lost, told
    assert 5 < int(lost[1]) < 16


WALLED = """
import sys
import distributed, jax, numpy as np, pathways_lab as pw
sys.stderr = sys.stdout
def say(*what): print(*what, flush=True)
with distributed.Client(sys.argv[1]) as client: client.wait_for_workers(2)
lab = pw.connect(sys.argv[1], transport="dask")
on = [lab.slice(1) for _ in range(2)]
add = [pw.jit(lambda x: x + 1, on=s) for s in on]
say("computed", add[1](add[0](np.arange(4.0))).result().sum())
with lab.slice(2, axes=("x",)) as whole:
    total = pw.jit(lambda x: x.sum(), on=whole, in_shardings=jax.P("x"))
    say("sum over", len(whole.hosts), total(np.arange(8.0)).result(), lab)
"""


def test_workers_too_need_no_other_port_of_the_schedulers_machine(machines: Make) -> None:
    """Which may be a service that passes on Dask's port alone."""
    group_machines = machines(("sched", "one", "two", "note"))
    group_machines.wall("sched", 8786)
    group = Group(group_machines, "--host", "10.77.0.1")
    try:
        for machine in ("one", "two"):
            group.worker(machine, "--devices", "1")
        with group.client("note", WALLED) as client:
            told = client.communicate()[0]
    finally:
        group.close()
        group_machines.close()
    assert "computed 14.0\n" in told, told
    assert re.search(r"^sum over 2 28\.0 <Lab kernel-1: 1 islands?, 2 devices>$", told, re.M), told


GATEWAY = f"""
c.DaskGateway.backend_class = "dask_gateway_server.backends.local.UnsafeLocalBackend"
c.DaskGateway.address = "127.0.0.1:8001"
c.Proxy.address = "0.0.0.0:8000"
c.LocalBackend.clusters_directory = "/tmp/clusters"
c.ClusterConfig.scheduler_cmd = ["{sys.executable}", "-m", "distributed.cli.dask_scheduler"]
c.ClusterConfig.worker_cmd = ["{sys.executable}", "-m", "distributed.cli.dask_worker"]
"""
THROUGH = """
import sys
import jax, numpy as np, pathways_lab as pw
from dask_gateway import Gateway
sys.stderr = sys.stdout
def say(*what): print(*what, flush=True)
with Gateway("http://gate:8000") as gateway, gateway.new_cluster() as cluster:
    cluster.scale(2)
    with cluster.get_client() as client: client.wait_for_workers(2)
    try: pw.connect(cluster)
    except pw.PathwaysError as error: say("closed", error)
    with pw.connect(cluster, transport="dask") as lab:
        say(lab.islands)
        hosts = len(lab.islands[0].hosts)
        on = lab.slice(lab.islands[0].devices, axes=("x",))
        total = pw.jit(lambda x: x.reshape(4, -1).sum(0), on=on, in_shardings=jax.P("x"))
        x = np.arange(4_000_000, dtype=np.float32)
        assert np.array_equal(total(x).result(), x.reshape(4, -1).sum(0))
        say("computed over", hosts)
say("over")
"""


def test_a_gateways_proxy_is_enough_for_a_lab(machines: Make) -> None:
    pytest.importorskip("dask_gateway_server")
    group = machines(("gate", "note"))
    group.wall("gate", 8000)
    settings, routes = group.shared / "gateway.py", "200 GET /api/v1/routes"
    settings.write_text(GATEWAY)
    with (group.shared / "log").open("w+") as log:
        command = (f"{BIN}/dask-gateway-server", "--config", str(settings))
        group["gate"].start(*command, env={"PATH": path()}, stdout=log, stderr=log)
        until(lambda: routes in (group.shared / "log").read_text(), "a gateway with its proxy")
        with group["note"].python(THROUGH, stderr=subprocess.STDOUT) as client:
            told = client.communicate(timeout=120)[0]
    assert re.search(r"^closed note does not reach the lab's control plane at 10\.77", told, re.M)
    assert 'transport="dask"' in told
    assert "computed over 2\nover\n" in told, told
