"""What is used of Dask without being documented still is where it was."""

from __future__ import annotations

import asyncio
import http.client
import sys
import urllib.request
from pathlib import Path
from types import SimpleNamespace

import pytest

from pathways_lab.runtime.cluster import dask_private

distributed = pytest.importorskip("distributed")


class OnScheduler(distributed.SchedulerPlugin):  # type: ignore[misc]
    """Does nothing."""


class OnWorkers(distributed.WorkerPlugin):  # type: ignore[misc]
    """Does nothing."""


@pytest.mark.cluster
def test_undocumented_attributes_of_a_running_cluster() -> None:
    """A failure here names what moved; repair only dask_private.py."""

    async def look() -> None:
        async with (
            distributed.Scheduler(
                host="127.0.0.1", port=0, dashboard=False, dashboard_address="127.0.0.1:0"
            ) as scheduler,
            distributed.Worker(
                scheduler.address, name="island0/host1", nthreads=1, resources={"devices": 2}
            ) as worker,
            distributed.Client(scheduler.address, asynchronous=True) as client,
        ):
            assert dask_private.resources_of(worker) == {"devices": 2.0}
            assert dask_private.limits_of(worker) == (1, None)
            assert not dask_private.has_nanny(worker)
            assert dask_private.asked_workers(client.cluster) == {}
            assert dask_private.known_workers(scheduler) == (worker.address,)
            name = dask_private.name_of_known_worker(scheduler, worker.address)
            assert name == "island0/host1"
            assert dask_private.name_of_known_worker(scheduler, "tcp://127.0.0.1:1") is None
            page = dask_private.load_dashboard(scheduler)
            assert "<html" in await asyncio.to_thread(_read, page)
            for owner in (scheduler, worker, client):
                assert isinstance(dask_private.security_of(owner), distributed.Security)
            assert await asyncio.to_thread(dask_private.has_scheduler, worker)
            assert dask_private.host_of_scheduler(client) == "127.0.0.1"
            await client.register_plugin(OnScheduler(), name="ours")
            await client.register_plugin(OnWorkers(), name="theirs")
            for _ in range(2):
                await dask_private.remove_plugins(scheduler, "ours", "theirs")
                assert "ours" not in scheduler.plugins
                assert "theirs" not in worker.plugins
        assert not dask_private.has_scheduler(worker)

    asyncio.run(look())


def _read(page: str) -> str:
    with urllib.request.urlopen(page, timeout=20) as response:
        text: str = response.read().decode()
    return text


def test_credentials_are_those_that_the_configuration_names(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import dask

    assert isinstance(dask_private.security_for("tls://127.0.0.1:1"), distributed.Security)
    made = distributed.Security(require_encryption=True)
    loader = {"distributed.client.security-loader": f"{__name__}.loader"}
    monkeypatch.setattr(sys.modules[__name__], "loader", lambda info: made, raising=False)
    with dask.config.set(loader):
        assert dask_private.security_for("tls://127.0.0.1:1") is made


def test_credentials_come_out_of_memory_and_files(tmp_path: Path) -> None:
    security = distributed.Security.temporary()
    pems = dask_private.pems_of(security, "worker")
    assert pems is not None
    assert pems["cert"].startswith("-----BEGIN CERTIFICATE")
    for name, text in pems.items():
        (tmp_path / name).write_text(text)
    from_files = distributed.Security(
        tls_ca_file=str(tmp_path / "ca"),
        tls_client_cert=str(tmp_path / "cert"),
        tls_client_key=str(tmp_path / "key"),
    )
    assert dask_private.pems_of(from_files, "client") == pems
    assert dask_private.pems_of(distributed.Security(), "client") is None
    assert dask_private.pems_of(None, "client") is None
    gateway = SimpleNamespace(tls_cert="C\n", tls_key="K\n")
    assert dask_private.pems_of(gateway, "client") == {"ca": "C\n", "cert": "C\n", "key": "K\n"}


def test_the_lab_s_own_credentials_are_never_files(monkeypatch: pytest.MonkeyPatch) -> None:
    pems = dask_private.pems_of(distributed.Security.temporary(), "worker")
    assert pems is not None

    def refuse(*_: object, **__: object) -> str:
        raise AssertionError("a folder was made")

    monkeypatch.setattr("tempfile.mkdtemp", refuse)
    made = dask_private.security_without_files(pems)
    for role in ("scheduler", "worker"):
        known = distributed.Security().get_listen_args(role)
        assert made.get_listen_args(role).keys() == known.keys()
        known = distributed.Security().get_connection_args(role)
        assert made.get_connection_args(role).keys() == known.keys()
        assert made.get_listen_args(role)["ssl_context"] is not None
        assert dask_private.pems_of(made, role) == pems


@pytest.mark.parametrize(
    ("address", "local"),
    [
        ("tcp://127.0.0.1:8786", True),
        ("tls://[::1]:8786", True),
        ("inproc://10.0.0.1/123/1", True),
        ("tcp://localhost:1", True),
        ("tls://10.1.2.3:8786", False),
        ("tcp://node7:8786", False),
    ],
)
def test_what_counts_as_loopback(address: str, local: bool) -> None:
    assert dask_private.is_loopback(address) is local


@pytest.mark.cluster
def test_a_web_server_lets_nobody_in_before_its_dashboard_is_loaded() -> None:
    """Dask's asks nobody who he is, and every account of the machine reaches a port."""

    def status(port: int, path: str, host: str) -> int:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        connection.request("GET", path, headers={"Host": host})
        return connection.getresponse().status

    async def look() -> None:
        async with (
            dask_private.unheard(distributed.Scheduler)(
                host="127.0.0.1", port=0, dashboard=False
            ) as scheduler,
            dask_private.unheard(distributed.Worker)(scheduler.address, dashboard=False) as worker,
            distributed.Client(scheduler.address, asynchronous=True) as client,
        ):
            ports = [node.services["dashboard"].port for node in (scheduler, worker)]
            assert str(ports[0]) in client.dashboard_link
            for port in ports:
                with pytest.raises(ConnectionRefusedError):
                    await asyncio.to_thread(status, port, "/health", "localhost")
            dask_private.load_dashboard(scheduler)
            port = ports[0]
            for path, host, expected in (
                ("/status", "localhost", 200),
                ("/status", f"127.0.0.1:{port}", 200),
                ("/status", "[::1]:8787", 200),
                ("/status", "evil.example", 403),
                ("/info/main/workers.html", f"evil.example:{port}", 403),
                ("/sitemap.json", "localhost", 404),
                ("/no-such-page", "localhost", 404),
            ):
                assert await asyncio.to_thread(status, port, path, host) == expected, (path, host)
            with pytest.raises(ConnectionRefusedError):
                await asyncio.to_thread(status, ports[1], "/health", "localhost")

    asyncio.run(look())


@pytest.mark.parametrize(
    ("link", "names"),
    [
        ("{scheme}://{host}:{port}/status", {""}),
        ("https://hub.example/lab/{port}/status", {"hub.example"}),
        ("/user/ann/proxy/{port}/status", set()),
    ],
)
def test_a_dashboard_answers_by_the_name_that_dask_says_it_has(link: str, names: set[str]) -> None:
    """Behind a proxy of unknown name requests bear that name."""
    dask = pytest.importorskip("dask")
    with dask.config.set({"distributed.dashboard.link": link}):
        found = dask_private.names_of_this_machine()
    assert found == (names | {"localhost", "127.0.0.1", "[::1]", "::1"} if names else set())
