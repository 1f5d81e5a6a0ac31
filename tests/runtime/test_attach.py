"""A Dask cluster that somebody else started becomes a lab by plugins only."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import psutil
import pytest

from pathways_lab.core.errors import PathwaysError
from pathways_lab.runtime.cluster import attach as attach_module
from pathways_lab.runtime.cluster import dask_plugins, dask_private, scheduler_probe
from pathways_lab.runtime.cluster.attach import (
    VARIABLE,
    ControlAddress,
    attach,
    invitation,
    write_lab_file,
)
from pathways_lab.runtime.cluster.dask_plugins import ControlPlugin, HostsPlugin
from pathways_lab.runtime.cluster.death_reports import TOPIC
from pathways_lab.runtime.cluster.start_control_plane import ControlProcess, ControlSettings
from pathways_lab.runtime.processes.child_process import spawn
from pathways_lab.transport import addresses, versions
from pathways_lab.transport.auth import key_of
from pathways_lab.transport.reactor import Reactor
from tests.runtime.processes import children, gone, runs, stop, tree, until

distributed = pytest.importorskip("distributed")
FAKE = "tests.runtime.fake_host"


# --- pure ------------------------------------------------------------------------


def test_workers_may_leave_and_report_after_the_lab_has_ended(tmp_path: Path) -> None:
    """A cluster and its lab are closed in any order."""
    child = spawn(FAKE, None, name="control plane", folder=tmp_path)
    child.end()
    gone = Mock(spec=ControlProcess, alive=True, tell=child.tell)
    gone.worker_removed = functools.partial(ControlProcess.worker_removed, gone)
    plugin = ControlPlugin(None)
    plugin._plane, plugin._names = gone, {"tcp://there": "w"}
    plugin.log_event(TOPIC, {"worker": "tcp://there"})
    plugin.remove_worker(None, "tcp://there")
    assert plugin._names == {}


def test_an_invitation_is_all_that_a_client_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    control = ControlAddress("tcp://127.0.0.1:7", b"k" * 32, {"ca": "a", "cert": "b", "key": "c"})
    write_lab_file(tmp_path / "lab.json", control)
    monkeypatch.setenv(VARIABLE, str(tmp_path / "lab.json"))
    assert attach() == control


def test_an_invitation_holds_nothing_of_an_owners(tmp_path: Path) -> None:
    owner = ControlAddress("tcp://127.0.0.1:7", b"k" * 32, {"ca": "a", "cert": "b", "key": "c"})
    one, two = invitation(owner), invitation(owner)
    assert (one.address, one.tls) == (owner.address, {"ca": "a"})
    assert len({owner.key, one.key, two.key}) == 3
    assert one.key == key_of(owner.key, one.holder)
    assert invitation(one) is one  # who was invited can pass on no more
    write_lab_file(tmp_path / "lab.json", one)
    assert attach(tmp_path / "lab.json") == one
    assert owner.key.hex() not in (tmp_path / "lab.json").read_text()
    assert "kkkk" not in repr(owner)
    with pytest.raises(PathwaysError, match="everybody with the certificates for that is an owner"):
        invitation(ControlAddress("dask+tls://127.0.0.1:7", b"k" * 32, owner.tls))


def test_every_wrong_target_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    with pytest.raises(PathwaysError, match="PATHWAYS_LAB is not set"):
        attach()
    with pytest.raises(PathwaysError, match=r"there is no lab file .*absent.json"):
        attach(str(tmp_path / "absent.json"))
    with pytest.raises(PathwaysError, match=r"there is no lab file .*there:8786") as caught:
        attach("there:8786")
    assert 'write "tcp://there:8786"' in str(caught.value)
    (tmp_path / "other.json").write_text(json.dumps({"control": 3}))
    with pytest.raises(PathwaysError, match="is not a lab file"):
        attach(tmp_path / "other.json")
    write_lab_file(tmp_path / "odd.json", ControlAddress("nowhere", b"k" * 32))
    with pytest.raises(PathwaysError, match=r"is not a lab file: .*address 'nowhere' is neither"):
        attach(tmp_path / "odd.json")
    with pytest.raises(PathwaysError, match="cannot connect to int"):
        attach(3)


@pytest.fixture
def address() -> Iterator[str]:
    """Where somebody listens who never says anything."""
    with socket.socket() as mute:
        mute.bind(("127.0.0.1", 0))
        mute.listen()
        yield f"tcp://127.0.0.1:{mute.getsockname()[1]}"


def test_who_waits_for_an_address_is_told_for_what_and_until_when(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler_probe, "PATIENCE", 0.01)
    for where, why, patience in (
        (address, "127.0.0.1 is silent: it has accepted a .*, and not answered for 0.1", 0.1),
        ("tcp://127.0.0.1:1", "127.0.0.1 refuses connections at port 1 ", 0.5),
    ):
        told: list[str] = []
        with pytest.raises(PathwaysError, match=f"{where}'.*{why}"):
            attach(where, timeout=patience, tell=told.append)
        assert [
            re.split(r",| \(.*refused\)| \(.*Connect call failed.*\)", text)[0] for text in told
        ] == [
            f"waiting for a Dask scheduler at {where}",
            f"waited in vain for a Dask scheduler at {where}",
        ]
        assert re.search(r"until \d\d:\d\d:\d\d; Ctrl-C ends the wait", told[0])


def test_nobody_waits_unasked_where_nobody_listens() -> None:
    for where, why, remedy in (
        ("tcp://127.0.0.1:1", "127.0.0.1 refuses connections at port 1 .*no scheduler", "start it"),
        ("tcp://nobody.invalid:1", "no machine is known here by the name 'nobody.invalid'", "name"),
    ):
        began, told = time.monotonic(), list[str]()
        with pytest.raises(PathwaysError, match=f"no Dask scheduler at '{where}': {why}") as caught:
            attach(where, tell=told.append)
        assert remedy in caught.value.failure.remedy
        assert time.monotonic() - began < scheduler_probe.REACH + 10.0
        assert told == []


def test_each_way_to_miss_a_scheduler_has_its_own_words() -> None:
    def words(error: OSError) -> str:
        return str(scheduler_probe.unreached(error, "sched", 8786, "10.0.0.1", 2.0))

    assert words(TimeoutError()).startswith("nothing came back from sched (10.0.0.1) for 2 s: no ")
    assert words(ConnectionRefusedError()).startswith("sched (10.0.0.1) refuses connections at")
    no_way = OSError(errno.EHOSTUNREACH, "No route to host")
    assert words(no_way) == "no way leads to sched (10.0.0.1): No route to host"


def test_a_program_that_is_no_scheduler_is_called_that_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        web = threading.Thread(target=lambda: server.accept()[0].sendall(b"HTTP/1.1 400 " * 9))
        web.start()
        with pytest.raises(PathwaysError, match="what answers there is no Dask scheduler"):
            attach(f"tcp://127.0.0.1:{server.getsockname()[1]}", timeout=60.0)
        web.join()


def test_who_interrupts_that_wait_leaves_nothing_behind(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler_probe, "REACH", 0.01)
    before = threading.enumerate()

    def interrupt(text: str) -> None:
        if text.startswith("waiting"):
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        attach(address, tell=interrupt)
    assert [thread for thread in threading.enumerate() if thread not in before] == []


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ({"devices_per_host": 0}, "devices_per_host is 0"),
        ({"devices_per_host": "two"}, "devices_per_host is 'two'"),
        ({"hosts_per_island": -1}, "hosts_per_island is -1"),
        ({"memory": -5}, "memory is -5 bytes"),
        ({"platform": "gpu"}, "platform is 'gpu'"),
        ({"timeout": -1}, "timeout is -1"),
        ({"timeout": "soon"}, "timeout is 'soon'"),
        ({"silence": 0}, "silence is 0"),
    ],
)
def test_arguments_that_cannot_be_are_refused_before_anybody_is_asked(
    arguments: dict[str, Any], why: str
) -> None:
    with pytest.raises(PathwaysError, match=why) as caught:
        attach("tcp://127.0.0.1:1", **arguments)
    assert caught.value.failure.remedy


# --- with processes ----------------------------------------------------------------


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    with distributed.LocalCluster(
        n_workers=2,
        threads_per_worker=1,
        processes=True,
        host="127.0.0.1",
        dashboard_address=None,
        resources={"island:west": 1},
        security=distributed.Security.temporary(),
    ) as cluster:
        yield cluster


class Kernel:
    """A client of the lab that remembers the topology."""

    def __init__(self, control: ControlAddress) -> None:
        self.hosts: dict[str, dict[str, Any]] = {}
        self.closing: list[str] = []
        self.reactor = Reactor("kernel", self._message, lambda link, reason: None)
        self.reactor.start()
        hello = {"role": "client", "name": "", "pid": os.getpid()}
        self.link = self.reactor.connect(control.address, control.key, hello)
        self._topology(self.link.peer["topology"])

    def _message(self, link: Any, op: str, fields: dict[str, Any], buffers: Any) -> None:
        if op == "topology":
            self._topology(fields)
        elif op == "closing":
            self.closing.append(fields["reason"])

    def _topology(self, topology: dict[str, Any]) -> None:
        self.hosts = {h["name"]: h for i in topology["islands"] for h in i["hosts"]}


@pytest.mark.cluster
def test_life_of_a_lab_on_a_foreign_cluster(cluster: Any) -> None:
    """One story, because every step needs the one before it."""
    # Two clients at the same time, one by object and one by Dask client: one control plane.
    with distributed.Client(cluster) as client:
        found: list[ControlAddress] = []
        hosts: list[int] = []

        def join(target: Any) -> None:
            control = attach(target, devices_per_host=3, platform="cpu", host_module=FAKE)
            found.append(control)
            first = Kernel(control)
            hosts.append(len(first.hosts))
            first.reactor.close()

        threads = [threading.Thread(target=join, args=(each,)) for each in (cluster, client)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(found) == 2
        assert found[0] == found[1] == attach(cluster, host_module=FAKE)
        assert hosts == [2, 2], "each has the whole lab"

    kernel = Kernel(found[0])
    until(lambda: len(kernel.hosts) == 2)
    assert {name.split("/")[0] for name in kernel.hosts} == {"west"}
    assert {host["devices"] for host in kernel.hosts.values()} == {3}

    # The hosts are children of the Dask workers, and come back when they die.
    before = {name: host["pid"] for name, host in kernel.hosts.items()}
    one = next(iter(before))
    assert before[one] in tree(kernel.hosts[one]["worker_pid"])
    os.kill(before[one], signal.SIGKILL)
    until(lambda: kernel.hosts.get(one, {}).get("pid") not in (None, before[one]))

    # A worker that is killed cannot clean up: its device process does.
    folder = Path(kernel.hosts[one]["data_address"].removeprefix("unix:")).parent
    assert folder.exists()
    os.kill(kernel.hosts[one]["worker_pid"], signal.SIGKILL)
    until(lambda: not folder.exists())
    until(lambda: len(kernel.hosts) == 2)

    # Workers that join later bring a host, workers that leave take theirs along.
    cluster.scale(3)
    until(lambda: len(kernel.hosts) == 3)
    cluster.scale(1)
    until(lambda: len(kernel.hosts) == 1)

    # The scheduler ends: clients are told, everything is gone.
    pids = [kernel.hosts[name]["pid"] for name in kernel.hosts]
    cluster.close()
    until(lambda: kernel.closing)
    assert "Dask scheduler" in kernel.closing[0]
    assert gone(pids, 30.0) == []
    kernel.reactor.close()


@pytest.mark.cluster
def test_a_hung_host_is_lost_when_dask_gives_up_its_worker() -> None:
    with distributed.LocalCluster(
        n_workers=1, threads_per_worker=1, processes=True, host="127.0.0.1", dashboard_address=None
    ) as cluster:
        kernel = Kernel(attach(cluster, host_module=FAKE))
        (host,) = kernel.hosts.values()
        os.kill(host["pid"], signal.SIGSTOP)
        cluster.scale(0)
        until(lambda: not kernel.hosts)
        until(lambda: not runs(host["pid"]))
        kernel.reactor.close()


@pytest.mark.cluster
@pytest.mark.parametrize("given", [lambda client: client, lambda client: client.scheduler.address])
def test_a_stopped_scheduler_is_waited_for_as_long_as_told(
    given: Callable[[Any], Any], tmp_path: Path
) -> None:
    """Also by who comes with a client that was connected before."""
    file = tmp_path / "scheduler.json"
    where = ["--host", "127.0.0.1", "--port", "0", "--no-dashboard", "--scheduler-file", str(file)]
    with subprocess.Popen([sys.executable, "-m", "distributed.cli.dask_scheduler", *where]) as it:
        try:
            with distributed.Client(scheduler_file=str(file), set_as_default=False) as client:
                stop(it.pid)
                with pytest.raises(PathwaysError, match=r"is silent: .* not answered for 0\.5 s"):
                    attach(given(client), timeout=0.5)
                it.send_signal(signal.SIGCONT)
        finally:
            it.kill()


@pytest.mark.cluster
def test_when_the_control_plane_dies_the_next_lab_forms_on_the_same_cluster(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from pathways_lab.runtime.cluster import dask_plugins

    monkeypatch.setattr(
        dask_plugins, "PATIENCE", 0.5
    )  # its device process waits for the lab to return
    with distributed.LocalCluster(
        n_workers=1, threads_per_worker=1, processes=False, dashboard_address=None
    ) as cluster:
        first = attach(cluster, host_module=FAKE)
        kernel = Kernel(first)
        (host,) = kernel.hosts.values()
        (plane,) = children(os.getpid(), "pathways_lab.runtime.control_plane.process")
        plane.kill()
        until(lambda: not psutil.pid_exists(plane.pid))
        second = attach(cluster, host_module=FAKE)
        assert (second.address, second.key) != (first.address, first.key)
        assert second == attach(cluster, host_module=FAKE)
        assert gone([host["pid"]], 30.0) == []
        assert first.folder is not None
        assert not first.folder.exists()
        other = Kernel(second)
        assert set(other.hosts) == {host["name"]}
        kernel.reactor.close()
        other.reactor.close()


@pytest.mark.cluster
def test_a_device_process_that_cannot_start_is_told_with_its_log_and_can_be_tried_again() -> None:
    with distributed.LocalCluster(
        n_workers=1, threads_per_worker=1, processes=False, dashboard_address=None
    ) as cluster:
        with pytest.raises(PathwaysError, match="No module named no_such_module"):
            attach(cluster, host_module="no_such_module")
        told: list[str] = []
        control = attach(cluster, host_module=FAKE, tell=told.append)
        assert told == [
            "starting device processes on the workers", "the device processes are there",
        ]  # fmt: skip
        assert attach(cluster, host_module=FAKE, tell=told.append) == control
        assert len(told) == 2, "who joins has started nothing"
        kernel = Kernel(control)
        assert len(kernel.hosts) == 1
        kernel.reactor.close()


@pytest.mark.cluster
def test_one_worker_without_the_package_is_left_out_and_named(tmp_path: Path) -> None:
    package = tmp_path / "pathways_lab"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('it is not installed')")
    options: Any = {"threads_per_worker": 1, "processes": False, "dashboard_address": None}
    options |= {"protocol": "tcp", "host": "127.0.0.1"}
    with distributed.LocalCluster(n_workers=0, **options) as cluster:
        command = [sys.executable, "-m", "distributed.cli.dask_worker", cluster.scheduler_address]
        with subprocess.Popen(
            [*command, "--no-nanny", "--no-dashboard", "--nthreads", "1"],
            env={**os.environ, "PYTHONPATH": str(tmp_path)}, cwd=tmp_path,
            stderr=subprocess.DEVNULL,
        ) as bad, distributed.Client(cluster) as client:  # fmt: skip
            try:
                client.wait_for_workers(1, timeout=60)
                lacking = r"could not be started .*worker tcp.* on .*: ImportError: it is not inst"
                with pytest.raises(PathwaysError, match=lacking):
                    attach(client, host_module=FAKE)
                cluster.scale(1)
                client.wait_for_workers(2, timeout=60)
                told: list[str] = []
                kernel = Kernel(attach(client, host_module=FAKE, tell=told.append))
                (line,) = [line for line in told if line.startswith("left out: ")]
                assert socket.gethostname() in line
                assert "it is not installed" in line
                assert len(kernel.hosts) == 1
                kernel.reactor.close()
            finally:
                bad.kill()


@pytest.mark.cluster
def test_who_waits_for_a_first_worker_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pathways_lab.runtime.cluster.await_workers.PATIENCE", 0.01)
    told: list[str] = []
    with (
        distributed.LocalCluster(n_workers=0, processes=False, dashboard_address=None) as cluster,
        pytest.raises(PathwaysError, match=r"no workers after 0\.1 s"),
    ):
        attach(cluster, timeout=0.1, tell=told.append)
    assert told[0].startswith("waiting for a first worker of the Dask cluster, until")


@pytest.mark.cluster
def test_a_kernel_that_ends_with_its_cluster_open_ends_in_peace() -> None:
    code = f"""if True:
        import distributed
        from pathways_lab.runtime.cluster.attach import attach
        cluster = distributed.LocalCluster(
            n_workers=1, threads_per_worker=1, processes=False, dashboard_address=None)
        print(attach(cluster, host_module={FAKE!r}).folder)
    """
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )
    assert "Traceback" not in done.stderr
    assert not Path(done.stdout.strip()).exists()


@contextlib.contextmanager
def dask_here(**options: Any) -> Iterator[Any]:
    """A Dask cluster of this process."""
    common = {"n_workers": 1, "processes": False, "dashboard_address": None}
    with (
        distributed.LocalCluster(**{**common, **options}) as cluster,
        distributed.Client(cluster) as client,
    ):
        yield client


@pytest.mark.cluster
def test_plain_text_beyond_this_machine_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dask_private, "is_loopback", lambda address: False)
    with dask_here() as client, pytest.raises(PathwaysError, match="sends in the clear"):
        attach(client)


FAR = pytest.mark.parametrize("far", ["client", "worker"])


def put_elsewhere(far: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the client, or the worker, were not on the scheduler's machine."""
    if far == "client":
        monkeypatch.setattr(addresses, "machine", lambda: "another")
    else:

        def there(islands: Any, joined: bool, dask_worker: Any) -> tuple[str, str, str, bool]:
            return "another", dask_private.host_of_scheduler(dask_worker), "west", joined

        monkeypatch.setattr(dask_plugins, "machine_of_worker", there)


@FAR
@pytest.mark.cluster
def test_a_scheduler_that_calls_itself_loopback_is_where_its_machine_is(
    far: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name that stands for 127.0.1.1: what it says is no proof."""
    put_elsewhere(far, monkeypatch)
    clear = pytest.raises(PathwaysError, match="sends in the clear")
    with dask_here(protocol="tcp") as client, clear:
        attach(client, host_module=FAKE)


@FAR
@pytest.mark.cluster
def test_a_forwarded_port_is_called_that(far: str, monkeypatch: pytest.MonkeyPatch) -> None:
    put_elsewhere(far, monkeypatch)
    forwarded = pytest.raises(PathwaysError, match=r"at 127\.0\.0\.1, by a forwarded port")
    security = distributed.Security.temporary()
    with dask_here(protocol="tls", security=security) as client, forwarded:
        attach(client, host_module=FAKE)


@pytest.mark.cluster
def test_collectives_in_the_clear_are_refused_unless_their_owner_trusts_the_network(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def there(islands: Any, joined: bool, dask_worker: Any) -> tuple[str, str, str, bool]:
        return dask_worker.name, "10.0.0.1", "west", joined

    monkeypatch.setattr(dask_plugins, "machine_of_worker", there)
    monkeypatch.setattr(attach_module, "is_own", lambda host: True)
    security = distributed.Security.temporary()
    with dask_here(protocol="tls", security=security, n_workers=2) as client:
        with pytest.raises(PathwaysError, match=r"west: the workers of the island are on several"):
            attach_module._machines(client, "tls://there", False, "machine", joined=True)
        for plain, joined in (True, True), (False, False):
            found = attach_module._machines(client, "tls://there", plain, "machine", joined)
            assert found == "10.0.0.1"


@pytest.mark.cluster
def test_a_lab_of_one_machine_is_refused_to_a_client_of_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with dask_here() as client:
        attach(client, host_module=FAKE)
        monkeypatch.setattr(addresses, "machine", lambda: "another")
        with pytest.raises(PathwaysError, match=r"for the machine of the Dask scheduler alone"):
            attach(client, host_module=FAKE)


def answer_of_control() -> dict[str, Any]:
    here = {"machine": dask_plugins.machine(), "versions": versions.here(), "address": ""}
    return {**ControlSettings.fresh(Path("nowhere")).plain(), **here}


def a_worker(**resources: float) -> Mock:
    worker = Mock(address="tcp://127.0.0.1:4321")
    worker.name, worker.state.total_resources = "island1/d", resources
    worker.state.nthreads, worker.memory_manager.memory_limit = 1, None
    return worker


@pytest.mark.parametrize(
    ("worker", "jax", "why"),
    [
        (a_worker(devices=0), versions.here()["JAX"], "its resource devices is 0: "),
        (a_worker(), "0.1", "the lab has JAX 0.1 and this worker "),
    ],
)
def test_clients_hear_why_a_worker_that_comes_is_no_host(worker: Mock, jax: str, why: str) -> None:
    control = {**answer_of_control(), "versions": {**versions.here(), "JAX": jax}}
    plugin = HostsPlugin(control, None, None, "cpu", FAKE)
    with pytest.raises((RuntimeError, ValueError), match=why) as raised:
        asyncio.run(plugin.setup(worker))
    ((topic, report),) = [call.args for call in worker.log_event.call_args_list]
    assert topic == TOPIC
    assert (report["name"], report["state"]) == ("island1/d", "left out")
    assert report["reason"] == f"was not started on {socket.gethostname()}: {raised.value}"
    assert plugin.failure == str(raised.value)


def test_a_worker_elsewhere_that_calls_itself_loopback_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plugin = HostsPlugin(answer_of_control(), 1, None, "cpu", FAKE)
    worker = Mock(address="tcp://127.0.1.1:4321")
    worker.name, worker.state.total_resources = "w", {}
    worker.state.nthreads, worker.memory_manager.memory_limit = 1, None
    plugin._folder = Path("folder")
    assert plugin._configuration(worker)["island"]
    monkeypatch.setattr(dask_plugins, "machine", lambda: "another")
    with pytest.raises(PermissionError, match=r"tcp://127.0.1.1:4321 is on another one"):
        plugin._configuration(worker)


@pytest.mark.cluster
def test_with_tls_between_machines_everything_is_encrypted(
    cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if loopback were a network: TCP with the cluster's credentials on every link."""
    monkeypatch.setattr(dask_private, "is_loopback", lambda address: False)
    with distributed.LocalCluster(
        n_workers=1, threads_per_worker=1, processes=True, host="127.0.0.1",
        dashboard_address=None, security=distributed.Security.temporary(),
    ) as encrypted:  # fmt: skip
        control = attach(encrypted, host_module=FAKE)
        assert control.address.startswith("tcp://127.0.0.1:")
        assert control.tls is not None
