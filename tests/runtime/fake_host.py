"""A device process without devices, for tests: joins the control plane and stays.

The name says how it behaves: ``.../crashes-N`` dies N times right after it was
ready, ``.../never`` dies before.  Who is told to leave asks whether it may, as real ones do.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from pathways_lab.runtime.cluster.device_supervisor import RETIRED
from pathways_lab.runtime.processes import child_process
from pathways_lab.transport.auth import HOSTS
from pathways_lab.transport.link import Link
from pathways_lab.transport.reactor import Reactor
from pathways_lab.transport.tls import client_context


def _message(link: Link, op: str, fields: dict[str, Any], buffers: list[memoryview]) -> None:
    if op == "retire":
        child_process.leave(RETIRED)


def main() -> None:
    child_process.begin()
    config = child_process.configuration()
    name: str = config["name"]
    if name.endswith("never"):
        sys.exit("no devices today")
    if config["control"]:
        reactor = Reactor("host", _message, lambda link, reason: child_process.leave())
        reactor.start()
        hello = {
            "role": "host", "name": name, "island": config["island"],
            "devices": config["devices"] or 1, "kind": "cpu", "memory": config["memory"] or 0,
            "pid": os.getpid(), "worker_pid": config["worker_pid"],
            "data_address": config["data_listen"], "emulated": False,
            "worker": config["worker"],
        }  # fmt: skip
        key = bytes.fromhex(config["key"])
        context = client_context(config["tls"])
        link: Link = reactor.connect(
            config["control"], key, hello, timeout=30, retry=True, context=context, holder=HOSTS
        )
        assert link.name == "control"
    child_process.report(ready=True)
    if "crashes-" in name:
        marker = Path(config["data_listen"])
        before = len(marker.read_text()) if marker.exists() else 0
        if before < int(name.rpartition("-")[2]):
            marker.write_text("x" * (before + 1))
            os.abort()
    while True:
        news = child_process.configuration()
        if "leave" in news and config["control"]:
            link.send("leaving", {"reason": news["leave"]})


if __name__ == "__main__":
    main()
