"""A client that is killed in the middle of a submission.

Problem: a process that is killed leaves whatever its socket had taken: also half
a message, which must harm nobody.

Rule for maintainers: it works as any client does, with values on every island,
and then writes the first half of one more submission and kills itself.
"""

from __future__ import annotations

import os
import signal

from pathways_lab.runtime.processes import child_process


def main() -> None:
    """See the module's docstring."""
    child_process.begin()
    config = child_process.configuration()
    import numpy as np

    from pathways_lab.client.functions.jit import CompiledFunction
    from pathways_lab.client.lab.lab import Lab
    from pathways_lab.runtime.cluster.attach import ControlAddress
    from pathways_lab.runtime.emulated import emulated
    from pathways_lab.transport.framing import encode

    key = bytes.fromhex(config["key"])
    control = ControlAddress(config["address"], key, config["tls"], config["holder"])
    lab = Lab(control, name=config["name"])
    kept = []
    for island in lab.islands:
        work = CompiledFunction(lambda x: emulated(5)(x + 1), on=lab.slice(1, island=island.name))
        kept += [work(np.full(4096, n, np.float32)) for n in range(4)]
    kept[0].block_until_ready()
    message = b"".join(encode("submit", {"run": 1, "plan": "x" * 4000, "inputs": []}))
    child_process.report(ready=True)
    sock = lab.session.connection.link.sock
    sock.setblocking(True)
    sock.send(message[: len(message) // 2])
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main()
