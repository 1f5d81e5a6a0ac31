"""A client whose functions crash their host, beside one that works on another island.

``python -m tests.acceptance.crashes --times 20`` starts a lab and a client process that
computes on one island and checks every value.  Meanwhile functions end the device process of
the other island, in one way after the other.  Each time its client reads how the process
ended, at its own line, and computes there again.

At the end every value of the other client was right, the processes of its island and the
control plane are those of the beginning, and its pace is told beside that before.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

import pathways_lab as pw
from tests.acceptance.hostile import PHASE, Client, processes

SECONDS = 120.0
MINE, OTHER = "island0", "island1"


def segfault(x: Any) -> Any:
    ctypes.string_at(0)  # not a signal to the process, which any of its threads might get
    return x


def abort(x: Any) -> Any:
    os.abort()


def leave(x: Any) -> Any:
    os._exit(3)


def kill(x: Any) -> Any:
    os.kill(os.getpid(), signal.SIGKILL)
    return x


WAYS: dict[Callable[[Any], Any], str] = {
    segfault: r"signal 11 .*SIGSEGV.*, in segfault at .*crashes\.py",
    abort: r"signal 6 .*SIGABRT.*, in abort at .*crashes\.py",
    leave: "ended with exit code 3",
    kill: r"signal 9 .*SIGKILL",
}
"""How a function ends its host, and the words that its client reads."""


def crash(lab: pw.Lab, on: pw.Slice, way: Callable[[Any], Any]) -> str:
    """End the host of a slice of one device; what its client reads.  The slice is back then."""

    def crashing(x: Any) -> Any:
        return jax.pure_callback(way, jax.ShapeDtypeStruct((), "float32"), x)

    try:
        pw.jit(crashing, on=on)(np.float32(1)).result(timeout=SECONDS)
    except pw.PathwaysError as error:
        told = str(error)
    else:
        raise AssertionError(f"{way.__name__} has not ended {on.hosts}")
    assert re.search(WAYS[way], told), told
    assert re.search(r"in program crashing, node crashing\n  at .*crashes\.py:\d+", told), told
    try:
        on.rebind(island=on.island)
    except pw.PathwaysError as error:
        if f"lab.restart({on.island!r})" not in str(error):
            raise
        # It has crashed too often.
        lab.restart(on.island)
        on.rebind(island=on.island)
    assert float(pw.jit(lambda x: x + 1, on=on)(np.float32(1))) == 2.0
    return told


def crashes(times: int) -> list[str]:
    """The whole of it; what was found, in lines.  Raises AssertionError."""
    with (
        tempfile.TemporaryDirectory() as folder,
        pw.start(islands=2, hosts_per_island=1, devices_per_host=2, name="owner") as lab,
    ):
        file = str(Path(folder, "lab.json"))
        lab.invite(file)
        before = processes(lab)
        other = Client("--good", file, "good", OTHER)
        other.wait()
        on = lab.slice(1, island=MINE)
        moments = [time.monotonic()]
        time.sleep(PHASE)
        moments.append(time.monotonic())
        ways = list(WAYS)
        read = [crash(lab, on, ways[number % len(ways)]) for number in range(times)]
        moments.append(time.monotonic())
        other.end()
        assert other.process.returncode == 0, "the other client failed"
        assert "wrong" not in other.lines, "a value was wrong"
        after = processes(lab)
        same = [name for name in before if before[name] == after[name]]
        assert [name for name in before if name not in same] == [f"{MINE}/host0"], (before, after)
        quiet, loud = (other.pace(*moments[n : n + 2]) for n in (0, 1))
        return [
            f"{times} crashes in {moments[2] - moments[1]:.0f} s, {len(set(read))} ways to read it",
            f"the same processes from beginning to end: {', '.join(same)}",
            f"the other client: {quiet:.0f} runs/s before, {loud:.0f} meanwhile, all of them right",
        ]


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=20)
    for line in crashes(parser.parse_args(arguments).times):
        print(line)
    return 0


if __name__ == "__main__":
    sys.exit(main())
