"""A child for the tests of copies: makes some, each of which does what it is told."""

from __future__ import annotations

import functools
import os
import sys
import time
from pathlib import Path

import numpy as np

from pathways_lab.runtime import copies, host, lifeline


def be_copy(number: int) -> None:
    """It reports what it holds, and then does what it is told."""
    lifeline.begin()
    print(f"copy {number} printed", flush=True)
    lifeline.report(pid=os.getpid(), number=number, open=sorted(os.listdir("/proc/self/fd")))
    config = lifeline.configuration()
    if config.get("fail"):
        sys.exit("a reason on standard error")
    if config.get("deaf"):
        lifeline.at_end(functools.partial(time.sleep, 600))
        lifeline._patience = 600
        lifeline.report(deaf=True)
    time.sleep(600)


def draw() -> None:
    """In the place of a device process: what it draws at random."""
    lifeline.begin()
    host.main = lambda: lifeline.report(drawn=int(np.random.randint(1 << 60)))
    host.be_copy()


def main() -> None:
    config = lifeline.early_configuration()
    folder = Path(config["folder"])
    if config.get("draw"):
        np.random.seed(7)  # what is drawn from here is what all copies would draw
        children = [copies.fork(draw, name=f"copy {n}", folder=folder) for n in range(2)]
        drawn = [child.hear(20)["drawn"] for child in children]
        for child in children:
            child.wait()
        lifeline.begin()
        lifeline.report(drawn=drawn, codes=[child.exit_code for child in children])
        time.sleep(600)
    children = [
        copies.fork(functools.partial(be_copy, n), name=f"copy/{n}", folder=folder)
        for n in range(config["copies"])
    ]
    lifeline.begin()
    lifeline.report(copies=[child.hear(20) for child in children])
    while True:
        news = lifeline.configuration()
        child = children[news["copy"]]
        try:
            child.tell(news)
            if "deaf" in news:
                child.hear(20)
                child.end(0.1)
            else:
                child.hear(20)
        except lifeline.ChildDied as death:
            lifeline.report(reason=str(death))
        child.wait()
        lifeline.report(code=child.exit_code, alive=child.alive)


if __name__ == "__main__":
    main()
