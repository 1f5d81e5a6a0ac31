"""The keeper of a lab that outlives kernels: ``python -m pathways_lab.runtime.processes.keeper``.

Problem: the processes of a lab end with their parent, so that nothing is left behind; a lab that
is kept needs a parent that does not end with the kernel, and nothing may be left behind either.

How: the keeper is that parent.  It has a session of its own, hears neither Ctrl-C nor the end of a
terminal, and is nobody's child.  Until the kernel that starts it says that it has joined, the
keeper ends with it; from then on it ends when the lab does (nobody used it for its idle time, or
one of its processes died), or is told to by SIGTERM.  When it is killed, its children end by
their lifelines, and its record (:mod:`.processes.kept_labs`) has no lock any more.

Rule for maintainers: the keeper decides nothing and talks to nobody; it holds a cluster.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import threading
from pathlib import Path
from typing import Any

from pathways_lab.core.errors import Failure, PathwaysError, refused
from pathways_lab.runtime.cluster.attach import write_lab_file
from pathways_lab.runtime.cluster.dashboard_socket import Pages
from pathways_lab.runtime.cluster.embedded import EmbeddedCluster, start_cluster
from pathways_lab.runtime.cluster.lab_spec import Wishes
from pathways_lab.runtime.processes import kept_labs
from pathways_lab.runtime.processes.child_process import ChildDied, early_configuration, spawn
from pathways_lab.runtime.processes.start_progress import Progress, Show
from pathways_lab.transport.codec import pack, unpack

MODULE = "pathways_lab.runtime.processes.keeper"
IDLE_SECONDS = 3600.0
"""A kept lab to which no client is connected for so long ends."""
_LOOK_SECONDS = 0.5
_START_SECONDS = 150.0


# --- the kernel's end -------------------------------------------------------------


def start(name: str, wishes: Wishes, show: Show, pages: Pages | None) -> Keeper | None:
    """Start a lab that is kept under a name, and wait until it can be joined.

    None: there is one.  Raises PathwaysError as :func:`.embedded.start_cluster` does.
    """
    told = dataclasses.asdict(wishes) | {"transcript": _absolute(wishes.transcript)}
    configuration = {"name": name, "wishes": told, "pages": pages.plain() if pages else None}
    child = spawn(MODULE, configuration, name=name, folder=kept_labs.folder())
    try:
        while True:
            report = child.hear(_START_SECONDS)
            if report["stage"] == "progress":
                show(Progress(*report["progress"]))
            elif report["stage"] == "failed":
                raise PathwaysError(unpack(Failure, report["failure"]))
            else:
                break
    except BaseException as error:
        child.end()
        if isinstance(error, ChildDied):
            raise refused(
                f"the lab {name!r} did not start: {error}",
                "`python -m pathways_lab doctor` checks what it needs",
            ) from error
        raise
    if report["stage"] == "taken":
        child.end()
        return None
    return Keeper(child, str(report["note"]))


class Keeper:
    """A keeper that has started, and ends with this process until it is let go.

    note: why islands have one host although nobody said so, or "".
    """

    def __init__(self, child: Any, note: str) -> None:
        self._child = child
        self.note = note

    def let_go(self) -> None:
        """This kernel has joined: from now on the lab ends without it."""
        self._child.tell({"joined": True})
        self._child.end()

    def end(self) -> None:
        """This kernel has not joined: the lab ends."""
        self._child.end()


def _absolute(transcript: str | Path) -> str:
    return str(Path(transcript).absolute()) if transcript else ""


# --- the keeper's end -------------------------------------------------------------


def main() -> None:
    """The process: configuration in, a lab out, until that ends."""
    config = early_configuration()
    if os.fork():
        os._exit(0)  # whoever starts it need not wait for its end
    for sent in (signal.SIGINT, signal.SIGHUP):
        signal.signal(sent, signal.SIG_IGN)
    ending = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ending.set())
    reports = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    threading.Thread(target=_listen, args=(ending,), name="kernel", daemon=True).start()

    def report(stage: str, **fields: Any) -> None:
        try:
            reports.write(json.dumps({"stage": stage, **fields}).encode() + b"\n")
        except OSError:  # nobody listens any more
            ending.set()

    name = config["name"]
    claimed = kept_labs.claim(name)
    if claimed is None:
        report("taken")
        return
    try:
        _keep(config, ending, report)
    finally:
        kept_labs.give_up(name, claimed)
    # The lock goes with the process, when nothing else is left.


def _keep(config: dict[str, Any], ending: threading.Event, report: Any) -> None:
    def show(progress: Progress) -> None:
        report("progress", progress=list(progress))
        if ending.is_set():
            raise SystemExit

    pages = Pages(**config["pages"]) if config["pages"] else None
    try:
        cluster = start_cluster(Wishes(**config["wishes"]), show, pages=pages, kept=True)
    except PathwaysError as error:
        report("failed", failure=pack(error.failure))
        return
    with cluster:
        path = kept_labs.record(config["name"])
        write_lab_file(path, cluster.control, keeper=os.getpid())
        report("ready", note=cluster.note)
        while not ending.wait(_LOOK_SECONDS) and _lives(cluster):
            pass
        path.write_bytes(b"")  # nobody joins what ends


def _listen(ending: threading.Event) -> None:
    """Until the kernel that started this has joined: end when it is gone before."""
    with os.fdopen(os.dup(0), "rb") as lifeline:
        if not lifeline.readline():
            ending.set()


def _lives(cluster: EmbeddedCluster) -> bool:
    try:
        os.kill(cluster.pids["control"][0], 0)
    except ProcessLookupError:
        return False
    return cluster.alive


if __name__ == "__main__":
    main()
