"""Checks of Jupyter around the lab: server extension, widgets, kernel, BokehJS, browser."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from importlib import metadata, util
from pathlib import Path

from pathways_lab.cli.finding import Finding

INSTALL = f"{sys.executable} -m pip install 'pathways-lab[notebook]'"
SERVER_EXTENSION = "pathways_lab_server"
LAB_EXTENSIONS = {
    "@jupyter-widgets/jupyterlab-manager": ("jupyterlab-widgets", "live views"),
    "anywidget": ("anywidget", "live views"),
    "pathways-lab": ("pathways-lab", "the side panel"),
}
"""By name: the distribution that brings it, and what does not show without it."""
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def lab() -> Iterator[Finding]:
    """JupyterLab is installed: an extra, for those who use another front end."""
    try:
        yield Finding("ok", f"JupyterLab {metadata.version('jupyterlab')}")
    except metadata.PackageNotFoundError:
        yield Finding("note", "JupyterLab: not installed in this environment", INSTALL)


def kernel() -> Iterator[Finding]:
    """The kernel called python3 is this Python and not one of another environment."""
    if util.find_spec("ipykernel") is None or util.find_spec("jupyter_client") is None:
        yield Finding("note", "kernel: ipykernel is not installed in this environment", INSTALL)
        return
    from jupyter_client.kernelspec import KernelSpecManager

    program = KernelSpecManager().get_kernel_spec("python3").argv[0]
    found = shutil.which(program) if not Path(program).is_absolute() else program
    if program in ("python", "python3") or (found and Path(found).samefile(sys.executable)):
        yield Finding("ok", "kernel: python3 is this environment")
    else:
        yield Finding(
            "warn",
            f"kernel: python3 is {program}, another environment",
            f"{sys.executable} -m ipykernel install --sys-prefix",
        )


def server_extension() -> Iterator[Finding]:
    """Jupyter's server will load the extension that serves BokehJS."""
    if util.find_spec("jupyter_server") is None:
        yield Finding("note", "server extension: no Jupyter server in this environment", INSTALL)
        return
    from jupyter_core.paths import jupyter_config_path
    from jupyter_server.extension.config import ExtensionConfigManager

    manager = ExtensionConfigManager(read_config_path=jupyter_config_path())
    enabled = manager.get_jpserver_extensions().get(SERVER_EXTENSION)
    if util.find_spec(SERVER_EXTENSION) is None:
        yield Finding("warn", "server extension: not importable", INSTALL)
    elif not enabled:
        yield Finding(
            "warn",
            "server extension: not enabled, so live views wait while a cell runs",
            f"{sys.executable} -m jupyter server extension enable --sys-prefix {SERVER_EXTENSION}",
        )
    else:
        yield Finding("ok", "server extension: enabled")


def widgets() -> Iterator[Finding]:
    """JupyterLab's side of the widgets that live views are made of, and of the panel."""
    if util.find_spec("jupyter_core") is None:
        return
    from jupyter_core.paths import jupyter_path

    roots = [Path(root) for root in jupyter_path("labextensions")]
    for name, (distribution, part) in LAB_EXTENSIONS.items():
        if any((root / name / "package.json").is_file() for root in roots):
            yield Finding("ok", f"JupyterLab extension: {name}")
        else:
            yield Finding(
                "warn",
                f"JupyterLab extension: {name} is missing, {part} will not show",
                f"{sys.executable} -m pip install --force-reinstall {distribution}",
            )


def bokehjs() -> Iterator[Finding]:
    """The scripts that draw in the page, from the installed Bokeh."""
    spec = util.find_spec("bokeh")
    roots = (spec.submodule_search_locations or ()) if spec else ()
    if any((Path(root) / "server/static/js/bokeh.min.js").is_file() for root in roots):
        yield Finding("ok", f"BokehJS {metadata.version('bokeh')}: served from this machine")
    else:
        yield Finding(
            "FAIL",
            "BokehJS: the files are not where the installed Bokeh has them",
            f"{sys.executable} -m pip install --force-reinstall bokeh",
        )


def chromium() -> Iterator[Finding]:
    """A browser for the browser tests; only where the development extra is installed."""
    if util.find_spec("playwright") is None:
        return
    path = next(filter(None, map(shutil.which, BROWSERS)), None)
    if path:
        yield Finding("ok", f"Chromium for the tests: {path}")
    else:
        yield Finding(
            "note",
            "Chromium for the tests: none, so browser tests will be reported as not run",
            "install chromium with the system's package manager",
        )
