"""The workers of an embedded lab: ``python -m pathways_lab.runtime.cluster.workers_main``.

Problem: each host of a lab is a Dask worker and a device process, and both import for a second
what all others import as well.

How: this process imports it once; the workers are copies of it, and their device processes
copies of them (:mod:`.processes.child_copies`).  Then it passes on what the notebook
kernel has to say to them, and what they report.  A device process that takes the place of one
that died is a new interpreter.

Rule for maintainers: nothing is started, and no thread begun, before the copies are made.

Paper: section 4.5 (one executor process per host).
"""

from __future__ import annotations

import functools
import selectors
import threading
from pathlib import Path
from typing import Any

from pathways_lab.runtime.cluster import worker_main
from pathways_lab.runtime.cluster.device_supervisor import MODULE
from pathways_lab.runtime.host import process
from pathways_lab.runtime.processes import child_copies, child_process
from pathways_lab.runtime.processes.child_process import Child, ChildDied
from pathways_lab.runtime.processes.interpreter_settings import imports

WORKER = "pathways_lab.runtime.cluster.worker_main"
_PATIENCE = 2.5
"""Seconds in which all workers must have ended, before who ends this process loses its own."""


def main() -> None:
    """The process: the workers' configurations in, their reports out, until all have ended."""
    config = child_process.early_configuration()
    workers: list[dict[str, Any]] = config["workers"]
    if config["copies"]:
        import_all(workers)
    children = {w["device"]["name"]: start(w, copy=config["copies"]) for w in workers}
    child_process.begin(_PATIENCE)
    for child in children.values():
        child_process.at_end(child.end)
    for child in children.values():
        child_process.at_end(child.let_go)  # first of all of them
    threading.Thread(target=_pass_on, args=(children,), daemon=True).start()
    _report(children)
    child_process.leave()


def import_all(workers: list[dict[str, Any]]) -> None:
    """Import the modules that each copy of this process would import otherwise."""
    with imports():
        import distributed  # noqa: F401

        if any(copied(worker) for worker in workers):
            process.import_all()


def copied(worker: dict[str, Any]) -> bool:
    """Whether its device process is a copy too: vendors' libraries promise nothing of copies."""
    device = worker["device"]
    return worker["module"] == MODULE and device["platform"] == "cpu" and not device["stand_in"]


def start(worker: dict[str, Any], *, copy: bool) -> Child:
    """The process of one worker."""
    name, folder = f"worker {worker['device']['name']}", Path(worker["folder"])
    if copy:
        main = functools.partial(worker_main.be_copy, worker, copied(worker))
        return child_copies.fork(main, name=name, folder=folder)
    return child_process.spawn(WORKER, worker, name=name, folder=folder)


def _pass_on(children: dict[str, Child]) -> None:
    """Pass on the kernel's messages to all, and end the workers of an island when it says so.

    children: by host.
    """
    while True:
        news = child_process.configuration()
        if "end" in news:
            island = f"{news['end']}/"
            ending = [child for host, child in children.items() if host.startswith(island)]
            for child in ending:
                child.let_go()
            for child in ending:
                child.finish()
            continue
        for child in children.values():
            try:
                child.tell(news)
            except ChildDied:
                continue  # it is reported as ended


def _report(children: dict[str, Child]) -> None:
    """Report the workers' messages and ends, until all have ended."""
    with selectors.DefaultSelector() as selector:
        for host, child in children.items():
            selector.register(child, selectors.EVENT_READ, host)
        while selector.get_map():
            for key, _ in selector.select():
                host, child = key.data, children[key.data]
                try:
                    for report in child.reports():
                        child_process.report(**report, host=host)
                except ChildDied as death:
                    selector.unregister(child)
                    child.end()
                    child_process.report(stage="ended", reason=str(death), host=host)


if __name__ == "__main__":
    main()
