"""Between the machines of a lab: nothing in the clear, nobody unasked, one time, and a pulse."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Iterator

import pytest

from tests.machines.bench import ROOT, Machine
from tests.machines.conftest import Make
from tests.machines.group import Group

pytestmark = pytest.mark.cluster

DELAY = 0.01

SECRET = "OfNobody"
"""Eight bytes of everything that is sent: of arrays, of arguments, of a name, and printed."""
HELLO = "PWLAB\r\n"
"""The beginning of a link's handshake."""
MEETS = "PRI * HTTP/2.0"
"""The beginning of a connection to the service at which hosts of an island meet."""
CALLS = "register-client"
"""Of Dask's own messages."""

TRAFFIC = f"""
import sys
import distributed, jax, numpy as np, pathways_lab as pw
with distributed.Client(sys.argv[1]) as client: client.wait_for_workers(2)
lab = pw.connect(sys.argv[1])
def {SECRET}(x):
    jax.debug.print("{SECRET}")
    return x + 0
on = [lab.slice(1) for _ in range(2)]
west, east = (pw.jit({SECRET}, on=s) for s in on)
both = lab.slice(2, axes=("x",))
assert len(both.hosts) == 2 and on[0].hosts != on[1].hosts
total = pw.jit(lambda x: x.reshape(2, -1).sum(0), on=both, in_shardings=jax.P("x"))
array = np.frombuffer(b"{SECRET}" * 20_000, np.int32)
for data in array[:4], array:
    assert (west(data).result() == data).all()
    there = east(west(pw.device_put(data, on[0])))
    assert (there.result() == data).all()
    assert (total(np.concatenate([data, 0 * data])).result() == data).all()
lab.publish("{SECRET}", there)
print(lab)
print("told", flush=True)
input()
"""

PLAIN = """
import sys
from pathways_lab.transport.reactor import Reactor
from pathways_lab.transport.tls import client_context, server_context
said, key = [], bytes(32)
reactor = Reactor("end", lambda link, op, fields, buffers: print(op, flush=True), lambda *_: None)
reactor.start()
if sys.argv[1:]:
    reactor.connect(sys.argv[1], key, {"name": "a"}).send("came", {"text": sys.argv[2]})
else:
    print(reactor.listen("tcp://10.77.0.2:0", key, {"name": "b"}), flush=True)
sys.stdin.read()
"""

SERVES = """
import sys
from pathways_lab.runtime.islands.jax_coordination import coordination_service
service = coordination_service("10.77.0.2:4000", 1)
print("serves", flush=True)
sys.stdin.read()
"""
MEET = """
from pathways_lab.runtime import jax_private
agent = jax_private.coordination_agent("10.77.0.2:4000", 0)
agent.connect()
agent.shutdown()
"""

STRANGER = """
import concurrent.futures, socket, ssl, sys
context = ssl._create_unverified_context()
greeting = b"PWLAB\\r\\n\\3" + bytes(40)
def heard(sock, word):
    sock.sendall(word)
    got = sock.recv(4096)
    if not got.startswith(greeting[:7]): return got
    sock.sendall(bytes(200))  # as the proof that one knows the key
    return sock.recv(4096)
def bare(place, word):
    with socket.create_connection(place, timeout=2) as sock: return heard(sock, word)
def tls(place, word):
    with socket.create_connection(place, timeout=2) as sock:
        with context.wrap_socket(sock) as sock: return heard(sock, word)
def tries(place):
    for way in bare, tls:
        for word in greeting, b"GET / HTTP/1.0\\r\\n\\r\\n":
            try: got = way(place, word)
            except OSError: continue
            if b" 404 " in got[:20]: continue
            if got and got[:2] != b"\\x15\\x03": return f"{way} {place}: {got!r}"
    return f"refused at {place[0]}"
places = [(host, int(port)) for host, _, port in (each.rpartition(":") for each in sys.argv[1:])]
with concurrent.futures.ThreadPoolExecutor(99) as pool: print(*pool.map(tries, places), sep="\\n")
"""


NOBODY = """
import concurrent.futures.thread, encodings.idna, os
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
"""
"""From here on another account; what is imported later cannot be found."""

ACCOUNT = f"""
import glob, os, socket, sys
{NOBODY}def reached():
    for name in glob.glob("/tmp/**", recursive=True) + glob.glob("/dev/shm/**", recursive=True):
        if name.startswith(sys.argv[1]): continue
        try:
            if b"{SECRET}" in open(name, "rb").read(): yield name
        except OSError: pass
        if os.access(name, os.W_OK) and name not in ("/tmp/", "/dev/shm/"): yield "writes " + name
    for line in open("/proc/net/unix").read().splitlines()[1:]:
        name = line.split()[7:]
        for kind in socket.SOCK_STREAM, socket.SOCK_DGRAM:
            if not name: continue
            try: socket.socket(socket.AF_UNIX, kind).connect(name[0].replace("@", "\\0"))
            except OSError: continue
            yield name[0]
    for path in glob.glob("/proc/[0-9]*/environ") + glob.glob("/proc/[0-9]*/mem"):
        if path.split("/")[2] == str(os.getpid()): continue
        try: open(path, "rb").read(1)
        except OSError: continue
        yield path
print(*reached(), sep="\\n")
"""
"""Another account of a machine looks for what it can read, write or connect to."""


def ports(machine: Machine, loopback: bool = False) -> list[str]:
    """The addresses at which others reach something on a machine, or its other accounts do."""
    table = machine.run("cat", "/proc/net/tcp", "/proc/net/tcp6")
    found = re.findall(r"^ *\d+: ([0-9A-F]+):([0-9A-F]{4}) \S+ 0A ", table, re.MULTILINE)
    ends = {(".".join(str(byte) for byte in bytes.fromhex(at)[:-5:-1]), port) for at, port in found}
    return sorted(
        f"{at if at.startswith('127.') else machine.address}:{int(port, 16)}"
        for at, port in ends
        if at.startswith("127.") is loopback
    )


CLOCKS = """
import sys, time
import distributed, jax, numpy as np, pathways_lab as pw
from pathways_lab.timeline.records import Event, Sample, Span
with distributed.Client(sys.argv[1]) as client: client.wait_for_workers(2)
lab = pw.connect(sys.argv[1])
def say(*what): print(*what, flush=True)
on = [lab.slice(1) for _ in range(2)]
add = [pw.jit(lambda x: x + 1, on=s) for s in on]
say("network", lab.dcn())
say("sum", add[1](add[0](np.arange(4.0))).result().sum())
clock = lab.session.connection.link.clock
learnt = []
learn, clock_type = type(clock).learn, type(clock)
clock_type.learn = lambda self, *told: (learn(self, *told), learnt.append(told))[0]
time.sleep(2.3)
say("learnt", len(learnt), abs(clock.offset + 90_000) <= clock.error(time.monotonic()) < 1)
for _ in range(3): add[1](add[0](np.arange(4.0))).result()
sleep = lambda x: jax.pure_callback(lambda v: (time.sleep(4.0), v)[1], x, x)
slept = pw.jit(sleep, on=on[0])(np.arange(4.0))
say("cut")
say("slept", slept.result().sum())
time.sleep(0.5)
lab.close()
stamps = [r for r in lab.timeline.records if isinstance(r, Sample) and r.name == "clock"]
bounds = {stamp.host: stamp.value for stamp in stamps}
say("bounds", *(f"{host}:{bound:.3f}" for host, bound in sorted(bounds.items())))
granted, ended, wrong = {}, {}, []
for record in lab.timeline.records:
    if isinstance(record, Event) and record.kind == "submitted": granted[record.run] = record.time
    if isinstance(record, Event) and record.kind == "finished": ended[record.run] = record.time
gangs = [r for r in lab.timeline.records if isinstance(r, Span) and r.kind == "gang"]
for gang in gangs:
    if gang.start < granted[gang.run] - bounds[gang.host]: wrong.append(gang)
    if gang.end > ended[gang.run] + bounds[gang.host]: wrong.append(gang)
say("gangs", len(gangs), wrong)
"""


@pytest.fixture(scope="module")
def group(machines: Make) -> Iterator[Group]:
    """Three machines with three clocks, and one for clients."""
    names, clocks = ("sched", "one", "two", "note"), {"one": 5000, "note": 90_000}
    made = Group(
        machines(names, delay=DELAY, clocks=clocks),
        *("--host", "10.77.0.1", "--dashboard-address", "127.0.0.1:0"),
    )
    for machine in ("one", "two"):
        made.worker(machine, "--devices", "1")
    yield made
    made.close()
    made.machines.close()


def test_nothing_is_in_the_clear_and_strangers_are_refused_everywhere(group: Group) -> None:
    machines = group.machines
    machines.sniff(SECRET, HELLO, CALLS, MEETS)
    with group.client("note", TRAFFIC) as client:
        assert client.stdout
        said = ""
        while not said.endswith("told\n"):
            said += (line := client.stdout.readline())
            assert line, said
        assert SECRET in said, "it was printed"
        assert "2 devices>" in said, "nothing is in the clear"
        seen = machines.sniff(SECRET, HELLO, MEETS)
        assert seen == {SECRET: 0, HELLO: 0, CALLS: 0, MEETS: 0}
        # Hosts that compute together open no door for that.
        doors = [door for name in ("sched", "one", "two") for door in ports(machines[name])]
        assert len(doors) == 6
        with machines["note"].python(STRANGER, *doors) as stranger:
            tried = stranger.communicate()[0].splitlines()
        one = machines["one"]
        own = [*ports(one), *ports(one, loopback=True)]
        assert len(own) == 5, (
            "two of them for collectives, one of Dask's pages, which are switched off"
        )
        account = STRANGER.replace("context", f"{NOBODY}context", 1).replace("out=2", "out=0.5")
        with one.python(account, *own) as stranger:
            tried += stranger.communicate()[0].splitlines()
        one.run("sh", "-c", f"echo {SECRET} > /tmp/left")
        assert one.run(sys.executable, "-c", ACCOUNT, str(ROOT)) == "/tmp/left\n"
        client.communicate("\n")
    assert len(tried) == len(doors) + len(own)
    assert [told for told in tried if not told.startswith("refused")] == []
    # Without TLS it would be seen.
    with machines["one"].python(PLAIN) as there:
        assert there.stdout
        address = there.stdout.readline().strip()
        with machines["two"].python(PLAIN, address, SECRET):
            assert there.stdout.readline() == "came\n"
        there.communicate()
    with machines["one"].python(SERVES) as there:
        assert there.stdout
        assert there.stdout.readline() == "serves\n"
        machines["two"].run(sys.executable, "-c", MEET)
        there.communicate()
    assert min(machines.sniff().values()) > 0


def test_clocks_are_compared_again_and_again_and_a_missed_pulse_is_told(group: Group) -> None:
    """No effect is before its cause by more than the bounds."""
    with group.client("note", CLOCKS) as client:
        assert client.stdout
        said = ""
        while not said.endswith("cut\n"):
            said += (line := client.stdout.readline())
            assert line, said
        group.machines.unplug("sched")
        time.sleep(3.2)
        group.machines.plug("sched")
        told = client.stdout.read()
    assert "sum 14.0\n" in said
    network = re.search(r"network DCN \(measured\): latency (\S+) ms, (\S+) MB/s from", said)
    assert network, said
    assert DELAY <= float(network[1]) / 1000 < 10 * DELAY
    assert 0 < float(network[2]) < 4 / DELAY, "a transfer of 4 MB takes as long as one way"
    assert re.search(r"^learnt [1-9] True$", said, re.M), said
    bounds = re.search(r"^bounds west/one:(\S+) west/two:(\S+)$", told, re.M)
    assert bounds, told
    for bound in bounds.groups():
        assert DELAY <= float(bound) < 1
    assert re.search(r"^gangs [1-9]\d* \[\]$", told, re.M), told
    sched = r"control on sched \(10\.77\.0\.1\)"
    assert re.search(rf"^\[watchdog\] no word from {sched} for [1-3]\.\d s$", told, re.M), told
    assert re.search(rf"^\[watchdog\] {sched} answers again$", told, re.M), told
    assert "slept 6.0\n" in told
