"""A client that never stops: ``... leaving_client.py LABFILE NAME``; it waits to be killed.

It uploads, computes on both islands, fetches, publishes, and prints ``busy`` when
all of that has happened once.
"""

from __future__ import annotations

import itertools
import sys

import numpy as np

import pathways_lab as pw

SIZE = 1 << 16


def main() -> None:
    """See the module's docstring."""
    file, name = sys.argv[1:]
    lab = pw.connect(file, name=name)
    left, right = (lab.slice(4, island=island) for island in ("island0", "island1"))
    double = pw.jit(lambda x: pw.emulated(2)(2 * x), on=left)
    more = pw.jit(lambda x: x + 1, on=right)

    @pw.program
    def step(x: pw.Handle) -> pw.Handle:
        return more(double(x))

    kept: list[pw.Handle] = []
    for n in itertools.count():
        kept.append(step(np.full(SIZE, n, np.float32)))
        kept = kept[-20:]
        lab.publish(f"{name}'s", kept[-1])
        if n % 5 == 0:
            assert kept[-1].result(timeout=60)[0] == 2 * n + 1
        if n == 5:
            print("busy", flush=True)


if __name__ == "__main__":
    main()
