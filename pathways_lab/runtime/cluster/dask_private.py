"""The only module that uses Dask beyond its documentation.

Problem: plugins get Dask's own objects, and a few things that we need of them
are not documented: they may move with any release.

Rule for maintainers: no other module reads undocumented attributes of Dask's
objects; ``tests/runtime/test_dask_private.py`` fails with the name of the attribute
that moved.  Documented parts (plugins, ``run_on_scheduler``, ``Security``,
``Scheduler``, ``Worker``) are used directly.
"""

from __future__ import annotations

import importlib
import ipaddress
import logging
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from pathways_lab.transport.tls import client_context, server_context

Role = Literal["client", "scheduler", "worker"]


def resources_of(worker: Any) -> Mapping[str, float]:
    """The abstract resources with which a worker was started."""
    resources: Mapping[str, float] = worker.state.total_resources
    return resources


def limits_of(worker: Any) -> tuple[int, int | None]:
    """A worker's threads, and the bytes that it may take; None: nobody has said how many.

    A worker with fewer threads than the machine's has a limit that nobody has asked for.
    """
    from distributed.worker_memory import parse_memory_limit

    threads, limit = worker.state.nthreads, worker.memory_manager.memory_limit
    unasked = parse_memory_limit("auto", threads, logger=logging.getLogger(__name__))
    return threads, None if limit == unasked else limit


def has_nanny(worker: Any) -> bool:
    """Whether a worker's process is looked after, and ended, by another one of Dask's."""
    return worker.nanny is not None


def name_of_known_worker(scheduler: Any, address: str) -> str | None:
    """The name of a worker in the scheduler's table, or None when it is not there."""
    worker = scheduler.workers.get(address)
    return None if worker is None else str(worker.name)


def asked_workers(cluster: Any) -> dict[str, str]:
    """Names of the workers that a cluster object was asked for, each with the number of its job.

    "" where it is none.  Nothing is known of a cluster that is no object here (None).
    """
    asked = {}
    for name, spec in getattr(cluster, "worker_spec", {}).items():
        number = str(getattr(cluster.workers.get(name), "job_id", None) or "")
        asked.update({f"{name}{suffix}": number for suffix in spec.get("group", ("",))})
    return asked


def names_of_workers(client: Any) -> set[str]:
    """The names of the workers that a client's scheduler has now."""
    return {str(each["name"]) for each in client.scheduler_info(n_workers=-1)["workers"].values()}


def known_workers(scheduler: Any) -> tuple[str, ...]:
    """The addresses of the workers that the scheduler knows."""
    return tuple(scheduler.workers)


def has_scheduler(worker: Any) -> bool:
    """Whether something still listens at the address of a worker's scheduler.

    A worker whose scheduler died ends like one that is sent away; its plugins are not told
    which of the two it is.
    """
    parts = urlsplit(worker.scheduler.address)
    if parts.port is None:  # inproc: the scheduler is in this process
        return True
    try:
        socket.create_connection((parts.hostname or "", parts.port), timeout=1.0).close()
    except OSError:
        return False
    return True


async def run_on_worker(
    scheduler: Any, address: str, function: Callable[..., Any], *args: Any
) -> None:
    """Call a function in a worker's process, from the scheduler's; what it returns is lost.

    Raises what goes wrong on the way; what the function raises is in the worker's log.
    """
    from distributed.protocol.pickle import dumps

    message = {"op": "run", "function": dumps(function), "args": dumps(args), "wait": True}
    await scheduler.broadcast(msg=message, workers=[address])


async def remove_plugins(scheduler: Any, on_scheduler: str, on_workers: str) -> None:
    """Remove the plugins of these names, as far as they are there, from the scheduler's process.

    Raises what goes wrong on the way to a worker; none that comes later gets the plugin.
    """
    if on_scheduler in scheduler.plugins:
        scheduler.remove_plugin(on_scheduler)
    if has_worker_plugin(scheduler, on_workers):
        await scheduler.unregister_worker_plugin(None, on_workers)


def has_worker_plugin(scheduler: Any, name: str) -> bool:
    """Whether workers are given the plugin of this name when they come."""
    return name in scheduler.worker_plugins


def unheard(kind: type[Any]) -> type[Any]:
    """The Scheduler or Worker class whose web server has a port, and listens to nobody.

    :func:`load_dashboard` has it listen.  Dask's web server asks nobody who he is, and every
    account of the machine can reach a port.  Then, too, it answers only requests that name this
    machine: a page of another site that has its name lead here is refused.
    """
    from distributed.http.routing import RoutingApplication
    from tornado import httpserver, web

    names = names_of_this_machine()

    class Guarded(RoutingApplication):
        def find_handler(self, request: Any, **options: Any) -> Any:
            status = 0 if not names or request.host_name.lower() in names else 403
            if request.path == "/sitemap.json":
                status = status or 404  # Dask's own fails where Bokeh's pages are loaded
            if not status:
                return super().find_handler(request, **options)
            return self.get_handler_delegate(request, web.ErrorHandler, {"status_code": status})

    web_application: Callable[[Any], Any] = Guarded

    class Unheard(kind):  # type: ignore[misc]  # whichever of the two it is
        def start_http_server(self, routes: Any, *_: Any, **__: Any) -> None:
            self.http_application = web_application(routes)
            server: Any = httpserver.HTTPServer(self.http_application)
            self.http_server = server
            # Bound, so that nobody else has the port; nobody is let in before it listens.
            server.door = socket.socket()
            server.door.bind(("127.0.0.1", 0))
            server.address, server.port = server.door.getsockname()
            self.services["dashboard"] = server

    Unheard.__name__ = Unheard.__qualname__ = kind.__name__
    return Unheard


def names_of_this_machine() -> frozenset[str]:
    """Hosts of the addresses at which browsers find the dashboard; none: those of any proxy."""
    import dask

    link = str(dask.config.get("distributed.dashboard.link"))
    if link.startswith("/"):
        return frozenset()
    return frozenset({"localhost", "127.0.0.1", "[::1]", "::1", urlsplit(link).hostname or ""})


def plugin_of(worker: Any, name: str) -> Any:
    """The plugin of this name that a worker has, set up or being set up; or None."""
    return worker.plugins.get(name)


def left_out(client: Any, plugin: str, module: str) -> dict[str, str]:
    """Workers that could not start the plugin of this name: by address, machine and reason.

    Waits for those that are at it.  module: where its class is, which has ``failure``.  The
    question travels by value, for a worker may lack *module*.
    """

    async def look(dask_worker: Any) -> tuple[str, str]:
        import asyncio
        import importlib
        import socket

        try:
            importlib.import_module(module)
        except Exception as error:
            return socket.gethostname(), f"{type(error).__name__}: {error}"
        there = dask_worker.plugins.get(plugin)
        while there is not None and there.failure is None:
            await asyncio.sleep(0.02)
        why = "it does not have the plugin" if there is None else there.failure
        return socket.gethostname(), why

    seen = client.run(look, on_error="return")
    told = {
        address: ("an unknown machine", f"{type(found).__name__}: {found}")
        if isinstance(found, BaseException)
        else found
        for address, found in seen.items()
    }
    return {
        address: f"worker {address} on {machine}: {why}"
        for address, (machine, why) in told.items()
        if why
    }


def import_dashboard() -> None:
    """Load the modules of Dask's dashboard.  Any thread."""
    importlib.import_module("distributed.dashboard.scheduler")


def load_dashboard(scheduler: Any) -> str:
    """Add the pages of Dask's dashboard to a scheduler that runs without; its address.

    One that is :func:`unheard` listens from now on.
    Importing them takes about a second, which the start of a lab must not cost.
    """
    from distributed.dashboard import scheduler as pages

    server = scheduler.services["dashboard"]
    door = getattr(server, "door", None)
    if door is not None:
        door.listen()
        door.setblocking(False)
        server.add_sockets([door])
    pages.connect(scheduler.http_application, server, scheduler, prefix="")
    return f"http://127.0.0.1:{server.port}/status"


def add_pages(scheduler: Any, routes: Sequence[tuple[Any, ...]], names: Mapping[str, str]) -> None:
    """Serve pages of our own with Dask's, and list them where Dask's pages are listed.

    routes: as tornado takes them; they win over Dask's.  names: titles by path.
    """
    from distributed.dashboard import scheduler as dashboard
    from distributed.http.scheduler import info

    class Plots(info.IndividualPlots):
        """The pages that JupyterLab's extension for Dask reads, with ours among them."""

        def write(self, chunk: Any) -> None:
            super().write({**chunk, **{title: f"/{path}" for path, title in names.items()}})

    listed = (r"(?:/.*)?/individual-plots\.json", Plots, {"dask_server": scheduler})
    scheduler.http_application.add_handlers(r".*$", [*routes, listed])
    variables = dashboard.template_variables(scheduler)
    variables["plots"] += [{"url": path, "name": title} for path, title in names.items()]
    variables["plots"].sort(key=lambda plot: plot["name"])
    variables["pages"].insert(0, next(iter(names)))


def has_dashboard() -> bool:
    """Whether this process has loaded Dask's dashboard."""
    return "distributed.dashboard.scheduler" in sys.modules


def answer(server: Any, operation: str, handler: Callable[..., Any] | None) -> None:
    """Have a Scheduler or Worker answer an operation of others' comms; None: no more."""
    if handler is None:
        server.handlers.pop(operation, None)
    else:
        server.handlers[operation] = handler


def scheduler_of(owner: Any) -> str:
    """The address at which a Client or Worker reaches its scheduler, by a proxy too."""
    return str(owner.scheduler.address)


def host_of_scheduler(owner: Any) -> str:
    """The numeric address at which a Client or Worker reaches its scheduler's machine."""
    host = host_of(scheduler_of(owner))
    return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])


def security_of(owner: Any) -> Any:
    """The Security of a Scheduler, Worker, Client or cluster, or None."""
    return getattr(owner, "security", None)


def security_for(address: str) -> Any:
    """The Security with which a Dask client would connect, as Dask's configuration has it."""
    from distributed import Security, client

    return client._maybe_call_security_loader(address) or Security()


def pems_of(security: Any, role: Role) -> dict[str, str] | None:
    """The TLS credentials in a Security, as PEM texts; None when it has none.

    That of dask-gateway has one certificate for all roles, which has signed itself.
    """

    def of(*names: str) -> Any:
        return next((found for name in names if (found := getattr(security, name, None))), None)

    parts = {
        "ca": of("tls_ca_file", "tls_cert"),
        "cert": of(f"tls_{role}_cert", "tls_cert"),
        "key": of(f"tls_{role}_key", "tls_key"),
    }
    if not all(parts.values()):
        return None
    return {name: text if "\n" in text else Path(text).read_text() for name, text in parts.items()}


def security_without_files(pems: Mapping[str, str]) -> Any:
    """The Security of a scheduler or worker with these PEM texts ``ca``, ``cert``, ``key``.

    Dask's own writes the key to a temporary folder, which stays when the process is killed.
    """
    from distributed import Security

    class WithoutFiles(Security):
        def get_connection_args(self, role: Role) -> dict[str, Any]:
            context = client_context(pems)
            return {"ssl_context": context, "require_encryption": True, "extra_conn_args": {}}

        def get_listen_args(self, role: Role) -> dict[str, Any]:
            return {"ssl_context": server_context(pems), "require_encryption": True}

    roles = ("client", "scheduler", "worker")
    named = {f"tls_{role}_{part}": pems[part] for role in roles for part in ("cert", "key")}
    return WithoutFiles(  # type: ignore[no-untyped-call]
        require_encryption=True, tls_ca_file=pems["ca"], **named
    )


def host_of(address: str) -> str:
    """The host part of a Dask address; ``127.0.0.1`` for ``inproc://``."""
    parts = urlsplit(address)
    return "127.0.0.1" if parts.scheme == "inproc" else parts.hostname or ""


def is_loopback(address: str) -> bool:
    """Whether a Dask address can be reached from its own machine only."""
    host = host_of(address)
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
