"""The BokehJS route of a real Jupyter server, as a browser meets it."""

from __future__ import annotations

import http.client
import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pathways_lab_server
import pytest

TOKEN = "a-token-of-this-test"
BASE = "/user/ada/"
"""A base URL as under JupyterHub: the route must be below it."""

pytestmark = pytest.mark.cluster


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Base URL of a Jupyter server on loopback that found the extension by itself."""
    home = tmp_path_factory.mktemp("jupyter")
    environment = dict(os.environ)
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
    """The URL that the server writes down when it listens."""
    for _ in range(300):
        for path in runtime.glob("jpserver-*.json"):
            return str(json.loads(path.read_text())["url"])
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.1)
    raise AssertionError("the Jupyter server did not start within 30 s")


def get(url: str, token: str | None = TOKEN) -> tuple[int, bytes, http.client.HTTPMessage]:
    request = urllib.request.Request(url)
    if token:
        request.add_header("Authorization", f"token {token}")
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
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
    opener.open(f"{server}?token={TOKEN}", timeout=10).read()
    with opener.open(f"{server}pathways-lab/bokehjs/bokeh.min.js", timeout=10) as answer:
        assert answer.status == 200


def test_with_a_version_the_browser_may_keep_it(server):
    status, _, headers = get(f"{server}pathways-lab/bokehjs/bokeh-gl.min.js?v=3.9.2")
    assert status == 200
    assert "max-age" in headers["Cache-Control"]


def test_a_stranger_is_refused_and_not_redirected(server):
    status, body, _ = get(f"{server}pathways-lab/bokehjs/bokeh.min.js", token=None)
    assert status == 403
    assert len(body) < 20_000


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


def test_the_server_process_stays_light():
    """What Jupyter's server imports brings neither JAX, Dask, Bokeh nor the lab."""
    code = (
        "import sys, pathways_lab_server as x, pathways_lab_server.handler\n"
        "assert x.bokehjs_folder()\n"
        "print([n for n in ('jax', 'dask', 'bokeh', 'pathways_lab') if n in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_without_bokeh_the_server_starts_and_says_so(monkeypatch):
    class Server:
        class log:
            warnings: list[str] = []  # noqa: RUF012
            warning = warnings.append

    monkeypatch.setattr(pathways_lab_server, "bokehjs_folder", lambda: None)
    pathways_lab_server._load_jupyter_server_extension(Server)
    assert "pip install bokeh" in Server.log.warnings[0]
