"""The door of the dashboard: what fails behind it does not close it."""

from __future__ import annotations

import asyncio
import errno
import socket
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tornado import web
from tornado.httpclient import AsyncHTTPClient
from tornado.httpserver import HTTPServer

from pathways_lab.runtime.cluster import dashboard_socket
from pathways_lab.runtime.cluster.dashboard_proxy import routes
from pathways_lab.runtime.cluster.dashboard_socket import Door, Pages
from pathways_lab.transport.addresses import private_folder, remove_folder


def test_whoever_knocks_is_heard_though_no_process_could_be_started_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def knock() -> None:
        loop = asyncio.get_running_loop()
        again = asyncio.Event()
        starts: list[Any] = []

        def refused(*args: Any, **options: Any) -> Any:
            starts.append(args)
            if len(starts) == 2:
                loop.call_soon_threadsafe(again.set)
            raise OSError(errno.EAGAIN, "no process left")

        monkeypatch.setattr(subprocess, "Popen", refused)
        monkeypatch.setattr(dashboard_socket, "_AGAIN", 0.0)
        settings = SimpleNamespace(folder=folder, key=b"k", tls=None)
        control: Any = SimpleNamespace(settings=settings, address="")
        door = Door(Pages("nobody", {}), control)
        with socket.socket(socket.AF_UNIX) as somebody:
            somebody.connect(str(door.path))
            await asyncio.wait_for(again.wait(), 10.0)
        door.close()

    folder = private_folder()
    try:
        asyncio.run(knock())
    finally:
        remove_folder(folder)


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 502),  # let in, and the lab behind it is gone
        ({"Host": "localhost:8787"}, 502),
        ({"Host": "evil.example:8787"}, 403),
        ({"X-Real-Ip": "10.0.0.7"}, 403),
    ],
)
def test_the_pages_answer_to_this_machine_and_to_nobody_who_names_another(
    headers: dict[str, str], status: int, tmp_path: Path
) -> None:
    async def ask() -> int:
        hosts = frozenset({"127.0.0.1", "localhost"})
        pages = routes(["page"], lambda: tmp_path / "nobody", hosts)
        server = HTTPServer(web.Application(pages), xheaders=True)  # so that one can come from afar
        server.listen(0, "127.0.0.1")
        (listener,) = server._sockets.values()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/page"
        answer = await AsyncHTTPClient(force_instance=True).fetch(
            url, headers=headers, raise_error=False
        )
        server.stop()
        return int(answer.code)

    assert asyncio.run(ask()) == status
