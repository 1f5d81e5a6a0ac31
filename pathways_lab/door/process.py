"""The process of a door: one client program, and an ordinary client of the lab.

Problem: what a client program sends is decoded, its code is read as MLIR, and its arrays are
kept: an error in any of it must hurt nobody but that program.

How: the program's own process starts this one on a lifeline and tells it the lab file and a secret
through it.  It joins the lab under a name of its own, so that quotas, shares, accounts and views
know it as everybody; it listens on a Unix socket in a private folder, and ends with the program.

Rule for maintainers: a child begins with its lifeline; see ``runtime.processes.child_process``.
"""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

from pathways_lab.runtime.processes import child_process


def main() -> None:
    child_process.begin()
    told = child_process.configuration()

    from pathways_lab.client.lab import opening as labs
    from pathways_lab.core.errors import PathwaysError
    from pathways_lab.door.callbacks import Remote
    from pathways_lab.door.colocated import Beside
    from pathways_lab.door.protocol.messages import ProtocolMissing, classes
    from pathways_lab.door.protocol.server import Door
    from pathways_lab.door.session import Session

    try:
        classes()
        lab = labs.connect(told["lab"], name=told["name"])
    except (PathwaysError, ProtocolMissing) as error:
        child_process.report(refused=str(error))
        child_process.leave(1)
        return
    child_process.at_end(lab.close)
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="values", daemon=True).start()
    secret = bytes.fromhex(told["secret"])

    def remote(number: int, ordered: bool) -> Remote:
        return Remote(told["callbacks"], secret, number, ordered)

    devices = sum(host.devices for island in lab.islands for host in island.hosts)
    beside = Beside(Path(told["folder"]), secret, devices)
    how = loop, remote, beside, told["slice_index"]
    door = Door(lambda buffers: Session(lab, buffers, *how), secret)
    door.listen(path := f"{told['folder']}/door")
    child_process.report(address=f"unix:{path}", client=lab.name)
    threading.Event().wait()


if __name__ == "__main__":
    main()
