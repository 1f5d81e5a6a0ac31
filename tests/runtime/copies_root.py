"""A child for the tests of copies: makes some, each of which does what it is told."""

from __future__ import annotations

import functools
import os
import sys
import time
from pathlib import Path

import numpy as np

from pathways_lab.runtime.host import process
from pathways_lab.runtime.processes import child_copies, child_process


def be_copy(number: int) -> None:
    """It reports what it holds, and then does what it is told."""
    child_process.begin()
    print(f"copy {number} printed", flush=True)
    child_process.report(pid=os.getpid(), number=number, open=sorted(os.listdir("/proc/self/fd")))
    config = child_process.configuration()
    if config.get("fail"):
        sys.exit("a reason on standard error")
    if config.get("deaf"):
        child_process.at_end(functools.partial(time.sleep, 600))
        child_process._patience = 600
        child_process.report(deaf=True)
    time.sleep(600)


def draw() -> None:
    """In the place of a device process: what it draws at random."""
    child_process.begin()
    process.main = lambda: child_process.report(drawn=int(np.random.randint(1 << 60)))
    process.be_copy()


def main() -> None:
    config = child_process.early_configuration()
    folder = Path(config["folder"])
    if config.get("draw"):
        np.random.seed(7)  # what is drawn from here is what all copies would draw
        children = [child_copies.fork(draw, name=f"copy {n}", folder=folder) for n in range(2)]
        drawn = [child.hear(20)["drawn"] for child in children]
        for child in children:
            child.wait()
        child_process.begin()
        child_process.report(drawn=drawn, codes=[child.exit_code for child in children])
        time.sleep(600)
    children = [
        child_copies.fork(functools.partial(be_copy, n), name=f"copy/{n}", folder=folder)
        for n in range(config["copies"])
    ]
    child_process.begin()
    child_process.report(copies=[child.hear(20) for child in children])
    while True:
        news = child_process.configuration()
        child = children[news["copy"]]
        try:
            child.tell(news)
            if "deaf" in news:
                child.hear(20)
                child.end(0.1)
            else:
                child.hear(20)
        except child_process.ChildDied as death:
            child_process.report(reason=str(death))
        child.wait()
        child_process.report(code=child.exit_code, alive=child.alive)


if __name__ == "__main__":
    main()
