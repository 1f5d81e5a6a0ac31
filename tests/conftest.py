"""Rules for every test: no line out of this machine, and nothing skipped in silence.

Law: a test that would need a network fails at the attempt, in this process
(an audit hook that allows loopback, Unix sockets and unconnected datagrams).
Law: tests that cannot run here are named, with the reason, at the end.
Law: tests in several processes do not disturb those that look at time (`alone`).
Law: values on a lab that a test leaves in reference cycles are gone before the next one begins.
Law: XLA optimises little, as most functions of tests run a few times only.  Tests of the code that
users get, and of how long it takes, ask for ``optimised``.
"""

from __future__ import annotations

import gc
import ipaddress
import os
import shutil
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from jaxlib.version import __version_info__ as jaxlib_version

from pathways_lab.transport.addresses import private_folder, remove_folder
from tests.acceptance.strikes import hear_interrupts
from tests.alone import machine, once_more, turns_of_files

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
MAC_CHROME = Path("/Applications/Google Chrome.app/Contents/MacOS/Google Chrome")


# How long an example takes says nothing on a busy machine.
settings.register_profile("unhurried", deadline=None)
settings.load_profile("unhurried")

LITTLE = (
    "--xla_backend_optimization_level=0",
    "--xla_llvm_disable_expensive_passes=true",
    "--xla_cpu_parallel_codegen_split_count=1",
    # Later releases have no other emitters, and end a process that asks for them.
    *(["--xla_cpu_use_fusion_emitters=false"] if jaxlib_version < (0, 11) else []),
)
"""A function is compiled in a tenth of the time.  XLA reads them when a process first uses it."""

GIVEN = " ".join(flag for flag in os.environ.get("XLA_FLAGS", "").split() if flag not in LITTLE)
"""Those of whoever runs the tests; processes of pytest-xdist inherit ours too."""

os.environ["XLA_FLAGS"] = " ".join((*LITTLE, GIVEN)).strip()


@pytest.fixture(scope="module")
def optimised() -> Iterator[None]:
    """Processes that start meanwhile, until the end of the file, compile as those of users do."""
    yield from as_users_do()


@pytest.fixture
def optimised_alone() -> Iterator[None]:
    """The same, until the end of the test."""
    yield from as_users_do()


def as_users_do() -> Iterator[None]:
    before = os.environ["XLA_FLAGS"]
    os.environ["XLA_FLAGS"] = GIVEN
    yield
    os.environ["XLA_FLAGS"] = before


sys.modules.setdefault("rfc3987_syntax", None)  # type: ignore[arg-type]  # as demo does

hear_interrupts()


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """A folder of this user alone, with a path that is short enough for sockets."""
    made = private_folder()
    yield made
    remove_folder(made)


class OutsideConnection(AssertionError):
    """A test tried to reach another machine."""


def own_addresses() -> set[str]:
    """Numeric addresses of this machine, as far as it can resolve its own name."""
    try:
        return {str(info[4][0]) for info in socket.getaddrinfo(socket.gethostname(), None)}
    except OSError:
        return set()


OWN = own_addresses()


def is_local(host: str) -> bool:
    """Whether *host*, a name or a numeric address, is this machine."""
    if host in OWN or host in ("", "localhost", socket.gethostname()):
        return True
    try:
        return ipaddress.ip_address(host.split("%")[0]).is_loopback
    except ValueError:
        return False


def forbid_outside(event: str, arguments: tuple[Any, ...]) -> None:
    """Audit hook: raise for a stream connection that leaves this machine.

    Connected datagram sockets pass: they send nothing, and are how one asks
    for one's own address.
    """
    if event == "socket.connect":
        sock, address = arguments
        internet = sock.family in (socket.AF_INET, socket.AF_INET6)
        if internet and sock.type & socket.SOCK_STREAM and not is_local(str(address[0])):
            raise OutsideConnection(f"a test connected to {address!r}")


sys.addaudithook(forbid_outside)


def find_chromium() -> str | None:
    """The path of an installed Chromium or Chrome, or None."""
    for name in BROWSERS:
        if path := shutil.which(name):
            return path
    return str(MAC_CHROME) if MAC_CHROME.exists() else None


@pytest.fixture(scope="session")
def chromium() -> str:
    """Path of the browser; tests that ask for it are skipped, and listed, without one."""
    path = find_chromium()
    if path is None:
        pytest.skip("no Chromium on this machine")
    return path


@pytest.fixture(scope="session", autouse=True)
def quiet_children() -> Iterator[None]:
    """Processes that tests start use no proxy for loopback and draw no colours."""
    saved = dict(os.environ)
    os.environ.update(NO_PROXY="127.0.0.1,localhost", no_proxy="127.0.0.1,localhost", NO_COLOR="1")
    yield
    os.environ.clear()
    os.environ.update(saved)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Fast tests first, and of several processes the slow files; no browser test without one."""
    marks = {item: {mark.name for mark in item.iter_markers()} for item in items}
    order = {"browser": 3, "alone": 2, "cluster": 1}
    items.sort(key=lambda item: max((order.get(name, 0) for name in marks[item]), default=0))
    if "PYTEST_XDIST_WORKER" in os.environ:
        turns = turns_of_files((item.path, marks[item]) for item in items)
        items.sort(key=lambda item: turns[item.path])
    if find_chromium() is None:
        for item in items:
            if item.get_closest_marker("browser"):
                item.add_marker(pytest.mark.skip(reason="no Chromium on this machine"))


def keep_what_is_left() -> None:
    """What is imported or cached stays, so looking for garbage need not look there each time."""
    gc.collect()
    gc.freeze()


def pytest_collection_finish() -> None:
    """Before the first test."""
    keep_what_is_left()


@pytest.hookimpl(wrapper=True, tryfirst=True)  # outermost: to wait is not the test's own time
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """What looks at time runs while the other processes of tests wait."""
    if item.get_closest_marker("cluster"):
        gc.collect()  # errors that were caught keep the handles of their frames
    with machine(alone=item.get_closest_marker("alone") is not None):
        done = yield
    if nextitem is not None and nextitem.path != item.path:
        keep_what_is_left()  # the fixtures of the file are gone
    return done


def pytest_terminal_summary(terminalreporter: Any, exitstatus: int, config: pytest.Config) -> None:
    """A section of its own for what did not run, so that nobody takes it for passed."""
    if config.pluginmanager.has_plugin("cacheprovider"):
        config.cache.set("lab/again", once_more(terminalreporter.stats, exitstatus))
    skipped = terminalreporter.stats.get("skipped", [])
    if skipped:
        terminalreporter.section("NOT RUN on this machine", sep="=", yellow=True)
        for report in skipped:
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
            terminalreporter.line(f"{report.nodeid}: {reason}")
