"""A child for the tests of lifelines: does what its configuration says."""

from __future__ import annotations

import os
import resource
import sys
import threading
import time
from pathlib import Path

from pathways_lab.runtime.processes import child_process


def main() -> None:
    child_process.begin()
    print("printed to standard output", flush=True)
    config = child_process.configuration()
    if config.get("fail"):
        sys.exit("a reason on standard error")
    if config.get("leave_behind"):
        marker = Path(config["leave_behind"])
        begun = threading.Event()

        def end() -> None:
            begun.set()
            time.sleep(config.get("slowly", 0))
            marker.write_text("ended")

        def end_too() -> None:
            begun.wait()
            child_process.leave(1)

        child_process.at_end(end)
        if config.get("slowly"):
            threading.Thread(target=end_too, daemon=True).start()
    pids = [os.getpid()]
    if config.get("depth"):
        child = child_process.spawn(
            "tests.runtime.lifeline_child",
            {**config, "depth": config["depth"] - 1},
            name=f"child{config['depth']}",
            folder=Path(config["folder"]),
        )
        pids += child.hear(20)["pids"]
    if config.get("fork") and os.fork() == 0:
        time.sleep(600)
    files = resource.getrlimit(resource.RLIMIT_NOFILE)
    child_process.report(pids=pids, variables=sorted(os.environ), files=files)
    if config.get("deaf"):
        os.kill(os.getpid(), 19)
    time.sleep(600)


if __name__ == "__main__":
    main()
