"""The routes of a real Jupyter server, as a browser meets them."""

from __future__ import annotations

import contextlib
import http.client
import http.server
import json
import os
import random
import shutil
import socket
import socketserver
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pathways_lab_server
import pytest
from pathways_lab_server.labs import KERNELS, SOCKET

from pathways_lab.notebook.dashboard import kernels
from pathways_lab.notebook.view.live import LiveFigures
from pathways_lab.runtime.cluster import dashboard_socket
from pathways_lab.transport.addresses import private_folder
from tests.runtime.mutate import Mutator

TOKEN = "a-token-of-this-test"
BASE = "/user/ada/"
"""A base URL as under JupyterHub: the route must be below it."""

IMPORTABLE = {"PYTHONPATH": str(Path(pathways_lab_server.__file__).parents[1])}
"""The extension that is tested here, whatever is installed."""

pytestmark = pytest.mark.cluster


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Base URL of a Jupyter server on loopback that found the extension by itself."""
    home = tmp_path_factory.mktemp("jupyter")
    environment = {**os.environ, **IMPORTABLE}
    for name in ("CONFIG_DIR", "RUNTIME_DIR", "DATA_DIR"):
        environment[f"JUPYTER_{name}"] = str(home / name)
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "jupyter_server", "--no-browser", "--allow-root"),
            *("--ServerApp.ip=127.0.0.1", "--ServerApp.port=0", f"--ServerApp.root_dir={home}"),
            *(f"--IdentityProvider.token={TOKEN}", f"--ServerApp.base_url={BASE}"),
        ],
        env=environment,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield wait_until_ready(process, home / "RUNTIME_DIR")
    finally:
        process.terminate()
        process.communicate(timeout=20)


def wait_until_ready(process: subprocess.Popen[str], runtime: Path) -> str:
    """The URL that the server writes down, on a busy machine before it listens."""
    for _ in range(900):
        for path in runtime.glob("jpserver-*.json"):
            with contextlib.suppress(ValueError, ConnectionRefusedError):
                found = json.loads(path.read_text())
                socket.create_connection(("127.0.0.1", found["port"])).close()
                return str(found["url"])
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.1)
    raise AssertionError("the Jupyter server did not start within 90 s")


def get(url: str, token: str | None = TOKEN) -> tuple[int, bytes, http.client.HTTPMessage]:
    request = urllib.request.Request(url)
    if token:
        request.add_header("Authorization", f"token {token}")
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, answer.read(), answer.headers
    except urllib.error.HTTPError as error:
        return error.code, error.read(), error.headers


def test_the_file_of_the_installed_bokeh_is_served(server):
    folder = pathways_lab_server.bokehjs_folder()
    status, body, headers = get(f"{server}pathways-lab/bokehjs/bokeh.min.js")
    assert status == 200
    assert body == (folder / "bokeh.min.js").read_bytes()
    assert "javascript" in headers["Content-Type"]
    assert headers["Cache-Control"] == "no-cache"


def test_a_script_tag_of_a_logged_in_page_is_enough(server):
    """A page sends its cookie and no header."""
    opener = urllib.request.build_opener(urllib.request.HTTPCookieProcessor())
    opener.open(f"{server}?token={TOKEN}", timeout=60).read()
    with opener.open(f"{server}pathways-lab/bokehjs/bokeh.min.js", timeout=60) as answer:
        assert answer.status == 200


def test_with_a_version_the_browser_may_keep_it(server):
    file = f"{server}pathways-lab/bokehjs/bokeh-gl.min.js"
    status, _, headers = get(f"{file}?v={metadata.version('bokeh')}")
    assert status == 200
    assert "max-age" in headers["Cache-Control"]
    assert get(f"{file}?v=3.0.0")[0] == 404, "it would be kept as what it is not"


def test_a_stranger_is_refused_and_not_redirected(server):
    status, body, _ = get(f"{server}pathways-lab/bokehjs/bokeh.min.js", token=None)
    assert status == 403
    assert len(body) < 20_000


@pytest.mark.parametrize("kind", ["js", "css"])
def test_the_script_of_live_views_is_the_one_that_widgets_bring(server, kind):
    status, body, headers = get(f"{server}pathways-lab/view/live.{kind}")
    assert status == 200
    assert body.decode() == str(LiveFigures._esm if kind == "js" else LiveFigures._css)
    assert headers["Content-Type"].startswith({"js": "text/javascript", "css": "text/css"}[kind])
    assert headers["Cache-Control"] == "no-cache"
    assert get(f"{server}pathways-lab/view/live.{kind}", token=None)[0] == 403
    assert get(f"{server}pathways-lab/view/page.{kind}")[0] == 404


@pytest.mark.parametrize(
    "path",
    [
        "bokeh.js",
        "compiler.js",
        "nothing.min.js",
        "../../../__init__.py",
        "%2e%2e%2f__init__.py",
        "lib/index.js",
        "",
    ],
)
def test_nothing_else_is_served(server, path):
    assert get(f"{server}pathways-lab/bokehjs/{path}")[0] == 404


# --- labs ----------------------------------------------------------------------------------


class Lab(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    """Stands for a lab: a private folder, and a socket in it that answers GETs."""

    class Answer(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = f"you asked for {self.path}".encode()
            self.send_response(418 if "teapot" in self.path else 200)
            for name, value in (("Content-Type", "text/x-lab"), ("Cache-Control", "max-age=7")):
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def address_string(self) -> str:
            return "here"

        def log_message(self, *_: object) -> None:
            pass

    def __init__(self) -> None:
        self.folder = private_folder()
        self.name = self.folder.name
        super().__init__(str(self.folder / SOCKET), self.Answer)
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def server_close(self) -> None:
        if self.fileno() >= 0:
            self.shutdown()
            super().server_close()
        shutil.rmtree(self.folder)


@pytest.fixture
def lab() -> Iterator[Lab]:
    with Lab() as made:
        yield made


def listed(server: str) -> list[str]:
    found = json.loads(get(f"{server}pathways-lab/labs")[1])["labs"]
    assert [lab["started"] for lab in found] == sorted(lab["started"] for lab in found)[::-1]
    return [lab["name"] for lab in found]


def test_a_lab_is_listed_and_its_pages_are_passed_on(server, lab):
    assert lab.name in listed(server)
    status, body, headers = get(f"{server}pathways-lab/labs/{lab.name}/pathways-lab/feed?a=1&b=")
    assert (status, body) == (200, b"you asked for /pathways-lab/feed?a=1&b=")
    assert headers["Content-Type"] == "text/x-lab"
    assert headers["Cache-Control"] == "max-age=7"
    assert get(f"{server}pathways-lab/labs/{lab.name}/teapot")[0] == 418


def test_both_ends_call_the_socket_and_the_kernels_the_same():
    assert dashboard_socket.SOCKET == SOCKET
    assert kernels.FOLDER == KERNELS


def test_a_lab_is_listed_with_the_kernels_that_have_it(server, lab, monkeypatch):
    def told() -> dict[str, float]:
        found = json.loads(get(f"{server}pathways-lab/labs")[1])["labs"]
        return next(each["kernels"] for each in found if each["name"] == lab.name)

    assert told() == {}
    kernels.note(lab.folder)
    assert told() == {}, "this process is no kernel"
    monkeypatch.setattr("ipykernel.connect.get_connection_file", lambda: "/x/kernel-12-ab.json")
    kernels.note(lab.folder)
    assert told() == {"12-ab": pytest.approx(time.time(), abs=60)}


def test_labs_are_shown_to_nobody_else(server, lab):
    for path in ("", f"/{lab.name}/pathways", f"/{lab.name}/pathways-lab/state"):
        status, body, _ = get(f"{server}pathways-lab/labs{path}", token=None)
        assert status == 403
        assert b"asked" not in body


def test_a_folder_that_others_can_enter_is_no_lab(server, lab):
    """Another account cannot plant one."""
    lab.folder.chmod(0o755)
    assert lab.name not in listed(server)
    assert get(f"{server}pathways-lab/labs/{lab.name}/pathways")[0] == 404
    lab.folder.chmod(0o700)
    (lab.folder / SOCKET).rename(lab.folder / "elsewhere")
    (lab.folder / SOCKET).symlink_to(lab.folder / "elsewhere")
    assert get(f"{server}pathways-lab/labs/{lab.name}/pathways")[0] == 404


def test_a_lab_that_is_gone_is_said_to_be(server, lab):
    assert get(f"{server}pathways-lab/labs/pwlab-nobody/pathways")[0] == 404
    status, body, _ = get(f"{server}pathways-lab/labs/pwlab-nobody/pathways-lab/state?since=7")
    assert (status, json.loads(body)) == (200, {"gone": True}), "no browser logs it"
    assert get(f"{server}pathways-lab/labs/..%2f..%2fetc/passwd")[0] == 404
    with socket.socket(socket.AF_UNIX) as dead:
        (lab.folder / SOCKET).unlink()
        dead.bind(str(lab.folder / SOCKET))
    assert get(f"{server}pathways-lab/labs/{lab.name}/pathways")[0] == 502
    if Path("/proc/net/unix").exists():
        lab.shutdown()
        lab.socket.close()
        assert lab.name not in listed(server), "it was killed, and left its socket"


def test_the_server_process_stays_light():
    """What Jupyter's server imports brings neither JAX, Dask, Bokeh nor the lab."""
    code = (
        "import sys, pathways_lab_server as x\n"
        "import pathways_lab_server.handler, pathways_lab_server.labs\n"
        "assert x.bokehjs_folder()\n"
        "print([n for n in ('jax', 'dask', 'bokeh', 'pathways_lab') if n in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **IMPORTABLE}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout.strip() == "[]"


def test_without_bokeh_the_server_starts_and_says_so(monkeypatch):
    class Server:
        class log:
            warnings: list[str] = []  # noqa: RUF012
            warning = warnings.append

        class web_app:
            settings = {"base_url": "/"}  # noqa: RUF012
            add_handlers = staticmethod(lambda *_: None)

    monkeypatch.setenv(pathways_lab_server.PAGES_VARIABLE, "")
    monkeypatch.setattr(pathways_lab_server, "bokehjs_folder", lambda: None)
    pathways_lab_server._load_jupyter_server_extension(Server)
    assert "pip install bokeh" in Server.log.warnings[0]


def test_no_request_is_a_fault_of_the_server(server, lab):
    """Whatever is asked for, and however: it is answered, and not with an error of ours."""
    mutator = Mutator(random.Random(0))
    known = ["labs", f"labs/{lab.name}/pathways", f"labs/{lab.name}/feed", "bokehjs/bokeh.min.js",
             "view/live.js"]  # fmt: skip
    statuses = set()
    for _ in range(150):
        path = str(mutator.value(mutator.rng.choice(known))).encode(errors="replace")
        fields = mutator.fields({"since": "7", "v": "1"})
        query = urllib.parse.urlencode({str(k): str(v)[:500] for k, v in fields.items()})
        statuses.add(get(f"{server}pathways-lab/{urllib.parse.quote(path)[:900]}?{query}")[0])
    assert {200, 404} <= statuses
    assert max(statuses) < 500
