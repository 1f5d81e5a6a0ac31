"""A client process that always has work waiting: ``... share_client.py LABFILE NAME MS RUNS``.

It prints ``ready`` when its function is compiled, submits its runs when a line
comes, prints ``waiting``, and leaves at the end of its input.
"""

from __future__ import annotations

import sys

import numpy as np

import pathways_lab as pw


def main() -> None:
    """See the module's docstring."""
    file, name, ms, runs = sys.argv[1], sys.argv[2], float(sys.argv[3]), int(sys.argv[4])
    x = np.zeros((4,), np.float32)
    with pw.connect(file, name=name) as lab:
        call = pw.jit(lambda v: pw.emulated(ms)(v), on=lab.slice((4,), ("x",)))
        # A run for each call: small calls outside of programs would share runs.
        held = pw.program(lambda v: call(v), name="hold")
        held(x).result(timeout=120)
        print("ready", flush=True)
        sys.stdin.readline()
        handles = [held(x) for _ in range(runs)]
        print("waiting", flush=True)
        sys.stdin.read()
        del handles


if __name__ == "__main__":
    main()
